"""The RRef tables of all jobs, and their place on the control channel.

Checks the shape of what workers send, keeps each to what is theirs to say, and turns the
tables' actions into messages, in bulk.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from . import messages
from .protocol import ProtocolError
from .rref_table import DEATH_WAIT, Action, Ask, Free, NotAllowed, OwnerDied, RRefTable

#: Messages for each session.
Told = dict[int, list[messages.Message]]


class ReferenceTables:
    """One :class:`~broker.rref_table.RRefTable` for each job."""

    def __init__(self) -> None:
        self._tables: dict[str, RRefTable] = {}
        self.refused = 0

    def operations(
        self, job: str, session: int, operations: list[list[Any]], now: float
    ) -> tuple[Told, set[int]]:
        """Carry out what ``session`` says; returns what to tell whom, and the owners that it now depends on.

        Raises:
            ProtocolError: an operation has the wrong shape.
        """
        table = self._tables.setdefault(job, RRefTable())
        actions: list[Action] = []
        owners: set[int] = set()
        for operation in operations:
            verb, rref, owner, fork, texts, receiver = _check(operation)
            try:
                if verb == "add":
                    actions += table.add(session, rref, owner, fork, now, *texts)
                elif verb == "take":
                    actions += table.take(session, rref, owner, fork, now)
                elif verb == "give":
                    actions += table.give(session, rref, fork, receiver, now)
                else:
                    actions += table.drop(session, rref, fork, now)
            except NotAllowed as error:
                self.refused += 1
                raise ProtocolError(f"RRef operation refused: {error}") from None
            if verb in ("add", "take") and owner != session:
                owners.add(owner)
        return _told(actions), owners

    def announce(
        self, job: str, session: int, parts: list[messages.Announce], now: float, patience: float
    ) -> tuple[Told, set[int]]:
        """All that ``session`` holds, has sent and owns; as :meth:`operations`.

        Args:
            patience: seconds that other sessions may still take to announce themselves.

        Raises:
            ProtocolError: something in it has the wrong shape, or is another's.
        """
        table = self._tables.setdefault(job, RRefTable())
        forks = [_check_fork(row) for part in parts for row in part.forks]
        owned = [_identifier(rref) for part in parts for rref in part.owned]
        try:
            actions = table.announce(
                session, forks, owned, parts[-1].minted, now, patience + DEATH_WAIT
            )
        except NotAllowed as error:
            self.refused += 1
            raise ProtocolError(f"RRef announcement refused: {error}") from None
        # Whose end would change something: owners, and who has minted what is held.
        others = {owner for _, owner, _, _ in forks} | {fork[0] for _, _, fork, _ in forks}
        return _told(actions), others - {session}

    def freeze(self, job: str, until: float) -> None:
        """Free nothing of that job before a moment: this broker has just been started again."""
        self._tables.setdefault(job, RRefTable()).freeze(until + DEATH_WAIT)

    def session_ended(self, job: str, session: int, ending: str, now: float) -> Told:
        """A session is gone."""
        table = self._tables.get(job)
        return {} if table is None else _told(table.session_ended(session, now))

    def due(self, now: float) -> Told:
        """Rows whose wait after a death is over."""
        actions: list[Action] = []
        for table in self._tables.values():
            actions += table.due(now)
        return _told(actions)

    def next_due(self) -> float | None:
        """When :meth:`due` has something to do."""
        moments = [m for table in self._tables.values() if (m := table.next_due()) is not None]
        return min(moments, default=None)

    def forget(self, job: str) -> None:
        """The job is over."""
        self._tables.pop(job, None)

    def count(self, job: str) -> int:
        """Rows of a job."""
        table = self._tables.get(job)
        return 0 if table is None else len(table)


def _check(
    operation: list[Any],
) -> tuple[str, tuple[int, int], int, tuple[int, int], list[str], int]:
    if len(operation) < 4 or operation[0] not in ("add", "take", "drop", "give"):
        raise ProtocolError("an RRef operation of unknown form")
    verb, rref, owner, fork, *texts = operation
    receiver = 0
    if verb == "give":
        if len(texts) != 1 or type(texts[0]) is not int:
            raise ProtocolError("an RRef operation without a receiver")
        receiver, texts = texts[0], []
    if type(owner) is not int or len(texts) > 2 or not all(isinstance(t, str) for t in texts):
        raise ProtocolError("an RRef operation with fields of the wrong type")
    return (
        verb,
        _identifier(rref),
        owner,
        _identifier(fork),
        [text[:200] for text in texts],
        receiver,
    )


def _check_fork(row: list[Any]) -> tuple[tuple[int, int], int, tuple[int, int], bool]:
    if len(row) != 4 or type(row[1]) is not int or type(row[3]) is not bool:
        raise ProtocolError("an announced fork with fields of the wrong type")
    return _identifier(row[0]), row[1], _identifier(row[2]), row[3]


def _identifier(value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(part) is int and 0 <= part < 1 << 64 for part in value)
    ):
        raise ProtocolError("an RRef operation whose id is no pair of integers")
    return value[0], value[1]


def _told(actions: list[Action]) -> Told:
    freed: defaultdict[int, list[list[Any]]] = defaultdict(list)
    asked: defaultdict[int, list[list[Any]]] = defaultdict(list)
    told: defaultdict[int, list[messages.Message]] = defaultdict(list)
    for action in actions:
        if isinstance(action, Free):
            freed[action.owner].append([list(action.rref), action.seen])
        elif isinstance(action, Ask):
            row = [list(action.rref), action.owner, list(action.fork)]
            asked[action.receiver].append(row)
        elif isinstance(action, OwnerDied):
            rrefs = [list(rref) for rref in action.rrefs]
            told[action.holder].append(messages.OwnersDied(action.owner, rrefs))
    for owner, rows in freed.items():
        told[owner].append(messages.Freed(rows))
    for receiver, rows in asked.items():
        told[receiver].append(messages.Confirm(rows))
    return dict(told)
