"""A worker's half of RRef bookkeeping; the broker's is :mod:`broker.rref_table`, with the rules.  Pure.

The ledger knows the values that this session owns and that others may refer to, the
forks that it holds, and those that are on their way in messages of its own.  Its methods
return the operations to queue on control, in order: ``("add", rref, owner, fork, type,
made_at)``, ``("take", rref, owner, fork)``, ``("drop", rref, owner, fork)``.

All methods are called under the agent's lock.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

RRefId = tuple[int, int]
ForkId = tuple[int, int]
Operation = tuple[Any, ...]


class _Owned:
    """A value of ours, and the number of the last fork of it that we minted."""

    __slots__ = ("last_mint", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.last_mint = -1


class ReferenceLedger:
    """The RRefs of one session.

    Args:
        session: its number, the first half of every id that it mints.
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self._next = 0
        self._owned: dict[RRefId, _Owned] = {}
        self._held: dict[ForkId, tuple[RRefId, int]] = {}
        self._transit: dict[Any, list[tuple[RRefId, int, ForkId]]] = {}
        # Freed before their creation has arrived, by creator.
        self._freed_early: defaultdict[int, set[RRefId]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._owned)

    @property
    def held(self) -> int:
        """How many forks this session holds."""
        return len(self._held)

    @property
    def in_transit(self) -> int:
        """How many messages with forks are under way."""
        return len(self._transit)

    def mint(self) -> int:
        """The next number; RRefs and forks share the counter."""
        number = self._next
        self._next = number + 1
        return number

    # ------------------------------------------------------------ owned values

    def owned_value(self, rref: RRefId) -> Any:
        """The value of an RRef of ours that others may know; None if there is none."""
        owned = self._owned.get(rref)
        return None if owned is None else owned.value

    def create_owned(self, rref: RRefId, value: Any) -> bool:
        """Keep ``value`` from now on; False where nobody wants it any more (it was freed before)."""
        early = self._freed_early.get(rref[0])
        if early is not None and rref in early:
            early.discard(rref)
            return False
        self._owned[rref] = _Owned(value)
        return True

    def free(self, rref: RRefId, seen: int) -> Any:
        """Control says that nobody holds it; returns the value if it is given up.

        Args:
            seen: the highest number minted by us that control had seen.
        """
        owned = self._owned.get(rref)
        if owned is None:
            if rref[0] != self.session:
                self._freed_early[rref[0]].add(rref)
            return None
        if owned.last_mint > seen:
            return None  # a fork of it is on its way to control
        del self._owned[rref]
        return owned.value

    # ------------------------------------------------------------ forks

    def new_fork(self, owner: int) -> tuple[RRefId, ForkId, list[Operation]]:
        """Ids for an RRef that ``owner`` is about to make for us, and our own fork of it."""
        rref = (self.session, self.mint())
        fork = (self.session, self.mint())
        self._held[fork] = (rref, owner)
        return rref, fork, [("add", rref, owner, fork, "", "")]

    def fork_for_send(
        self, rref: RRefId, owner: int, message: Any
    ) -> tuple[ForkId, list[Operation]]:
        """A new fork that will travel in ``message`` (any key)."""
        fork = (self.session, self.mint())
        owned = self._owned.get(rref)
        if owned is not None:
            owned.last_mint = fork[1]
        self._transit.setdefault(message, []).append((rref, owner, fork))
        return fork, [("add", rref, owner, fork, "", "")]

    def message_sent(self, message: Any, key: Any) -> None:
        """``message`` is known as ``key`` from now on; the first half of the key is the peer's session."""
        forks = self._transit.pop(message, None)
        if forks is not None:
            self._transit[key] = forks

    def message_ended(self, key: Any, delivered: bool) -> list[Operation]:
        """The message is done with: taken by its receiver, or given back."""
        forks = self._transit.pop(key, [])
        return [] if delivered else [("drop", *fork) for fork in forks]

    def take(self, rref: RRefId, owner: int, fork: ForkId) -> list[Operation]:
        """A fork has arrived.  Of a value of our own it is dropped at once: we have the value."""
        if fork in self._held:
            return []
        operations: list[Operation] = [("take", rref, owner, fork)]
        if owner == self.session:
            operations.append(("drop", rref, owner, fork))
        else:
            self._held[fork] = (rref, owner)
        return operations

    def release(self, fork: ForkId) -> list[Operation]:
        """We no longer hold it; again is no harm."""
        held = self._held.pop(fork, None)
        return [] if held is None else [("drop", held[0], held[1], fork)]

    def session_lost(self, session: int) -> tuple[list[RRefId], list[Any], list[Operation]]:
        """A session is gone.

        Returns:
            RRefs that it owned and we hold; values of ours that it was to create;
            operations (forks that were on their way to it are given back).
        """
        dead = []
        for fork, (rref, owner) in list(self._held.items()):
            if owner == session:
                del self._held[fork]
                dead.append(rref)
        orphans = [owned.value for rref, owned in self._owned.items() if rref[0] == session]
        self._freed_early.pop(session, None)
        operations: list[Operation] = []
        for key in list(self._transit):
            if isinstance(key, tuple) and key[0] == session:
                operations += self.message_ended(key, False)
        return dead, orphans, operations
