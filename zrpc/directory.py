"""Who is who: names, ranks and sessions of the members that this agent has met.

Resolve is subscribe: a name is asked for once, and from then on control tells the fate
of the session that it stood for.  So a cached entry is right until its fate comes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from broker import messages

from . import errors
from .service import RequestFailed, Service
from .worker_info import Member, WorkerInfo

#: Sessions whose end is remembered.
REMEMBERED = 10_000


class Directory:
    """The members that an agent knows; thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._by_name: dict[str, Member] = {}
        self._by_rank: dict[int, Member] = {}
        self._by_session: dict[int, Member] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()

    def add(self, member: Member) -> Member:
        """Remember a member, unless its fate has come before the answer that named it."""
        with self._lock:
            if member.session in self._ended:
                return member
            self._by_name[member.name] = member
            self._by_rank[member.info.id] = member
            self._by_session[member.session] = member
        return member

    def known(self) -> list[Member]:
        """All members that were met."""
        with self._lock:
            return list(self._by_session.values())

    def ended(self, session: int) -> str | None:
        """Why that session is gone, if it is."""
        return self._ended.get(session)

    def remove(self, session: int, reason: str) -> Member | None:
        """Forget a session whose fate has come."""
        with self._lock:
            self._ended[session] = reason
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            member = self._by_session.pop(session, None)
            if member is not None:
                if self._by_name.get(member.name) is member:
                    del self._by_name[member.name]
                if self._by_rank.get(member.info.id) is member:
                    del self._by_rank[member.info.id]
            return member

    def by_session(self, session: int) -> Member | None:
        """The member of that session, if it is known."""
        return self._by_session.get(session)

    def require(self, session: int, name: str) -> Member:
        """The member of that session, asked for if need be.

        Raises:
            WorkerLostError: it is gone.
        """
        found = self._by_session.get(session)
        if found is not None:
            return found
        try:
            values = self._service.request(
                lambda number: messages.Resolve(number, session=session),
                10.0,
                f"find worker {name!r}",
            )
        except RequestFailed as failure:
            raise errors.worker_lost(name, None, str(failure), "no") from None
        return self.add(Member.from_map(values))

    def resolve(self, to: Any, timeout: float | None, function: str | None = None) -> Member:
        """Find whom ``to`` means: a name, a rank, a :class:`WorkerInfo`, or a callable that returns one.

        Raises:
            UnknownWorkerError: nobody of that name or rank is there; the text lists who is.
            ValueError: ``to`` is nothing of this kind.
        """
        if isinstance(to, Member):
            return to
        if isinstance(to, str):
            found = self._by_name.get(to)
        elif isinstance(to, int) and not isinstance(to, bool):
            found = self._by_rank.get(to)
        elif isinstance(to, WorkerInfo) or (hasattr(to, "name") and hasattr(to, "id")):
            to = to.name
            found = self._by_name.get(to)
        elif callable(to):
            return self.resolve(to(), timeout, function)
        else:
            raise ValueError(
                f"Cannot get WorkerInfo from name {to!r}: `to` is a worker's name (str), its rank "
                f"(int), a WorkerInfo, or something callable that returns one, not {type(to).__name__}."
            )
        if found is not None:
            return found
        try:
            while True:
                member = self.add(Member.from_map(self._ask(to, timeout, function)))
                if self.ended(member.session) is None:
                    return member
                # It ended while the answer was on its way; somebody else may have its name.
        except RequestFailed as failure:
            if failure.code == "lost":
                raise errors.worker_lost(
                    str(to), function, str(failure).partition(": ")[2], "no"
                ) from None
            raise errors.unknown_worker(to, failure.names, function=function) from None

    def _ask(self, to: str | int, timeout: float | None, function: str | None) -> Any:
        what = f"resolve worker {to!r}"
        if isinstance(to, str):
            return self._service.request(
                lambda number: messages.Resolve(number, worker=to), timeout, what
            )
        if to < 0:
            raise errors.unknown_worker(to, self.names(timeout), function=function)
        return self._service.request(
            lambda number: messages.Resolve(number, rank=to), timeout, what
        )

    def introduce(self, session: int, done: Callable[[Member | None], None]) -> None:
        """Ask control who ``session`` is; ``done`` runs on the service thread, None if it is gone."""
        known = self._by_session.get(session)
        if known is not None:
            done(known)
            return

        def answered(values: Any, error: Exception | None) -> None:
            done(None if error is not None else self.add(Member.from_map(values)))

        self._service.ask(lambda number: messages.Resolve(number, session=session), answered)

    def members(self, timeout: float | None) -> list[Member]:
        """All members of the job, by rank."""
        values = self._service.request(messages.ListMembers, timeout, "list the members")
        return sorted((Member.from_map(value) for value in values), key=lambda m: m.info.id)

    def names(self, timeout: float | None) -> list[str]:
        """The names of all members."""
        return [member.name for member in self.members(timeout)]
