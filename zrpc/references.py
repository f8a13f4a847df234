"""RRefs of one agent: its owned values, the forks that it holds, and their bookkeeping.

The rules are in :mod:`zrpc.rref_ledger` (pure); this shell calls it under the agent's
lock, and queues the operations that come out before it lets go of that lock: they reach
control in the order in which the ledger made them, whichever threads did, and *before* the
data message that carries a fork is sent.  ``__del__`` of an RRef only appends to a queue,
which the service thread drains.

A message's forks stand outside its body (``Meta.references``).  They are taken when its
first frame set arrives (:class:`Opened`), whether the body is ever decoded or not; what
the body did not make an RRef of is dropped when the message is done with.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker import messages

from . import errors
from .futures import Future
from .rref_ledger import ReferenceLedger

if TYPE_CHECKING:
    from .agent import Agent
    from .rref import RRef

RRefId = tuple[int, int]
ForkId = tuple[int, int]


class OwnedValue:
    """A value that lives here, or will: what an RRef of ours refers to."""

    __slots__ = ("__weakref__", "future", "id", "methods", "type_name")

    def __init__(self, rref: RRefId, executor: Any) -> None:
        self.id = rref
        self.future: Future[Any] = Future(executor=executor)
        self.methods: list[str] | None = None
        self.type_name = ""

    def set(self, value: Any, methods: list[str] | None = None) -> None:
        """The value is here."""
        cls = type(value)
        self.type_name = f"{cls.__module__}.{cls.__qualname__}"
        self.methods = methods
        if not self.future.done():
            self.future.complete(value)


class Packing:
    """Codec hooks of one outgoing message: mints a fork for each RRef in it, once."""

    __slots__ = ("_agent", "_seen", "references")

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.references: list[list[Any]] = []
        self._seen: dict[int, tuple[Any, Any]] = {}

    def encode_reference(self, rref: RRef[Any]) -> Any:
        """Called by the codec for each RRef that it meets."""
        seen = self._seen.get(id(rref))
        if seen is None:
            data = rref._fork_for(self)
            # Kept alive with it: an id stands for one object only as long as that lives.
            seen = self._seen[id(rref)] = (rref, data)
        return seen[1]

    def mint(self, rref: RRefId, owner: int) -> ForkId:
        """A new fork of ``rref``, on its way in this message."""
        references = self._agent.references
        with self._agent.lock:
            fork, operations = references.ledger.fork_for_send(rref, owner, self)
            references.queue(operations)
        self.references.append([list(rref), owner, list(fork)])
        return fork

    def sent(self, key: Any) -> None:
        """The message has got its number (lock held)."""
        if self.references:
            self._agent.references.ledger.message_sent(self, key)

    def abandon(self) -> None:
        """The message will never be sent: its forks are given back."""
        if self.references:
            self._agent.references.message_ended(self, False)

    def decode_reference(self, data: Any) -> Any:
        """Not for outgoing messages."""
        raise NotImplementedError

    def post(self) -> None:
        """Send the rows to control; before the message goes to tx (rule 1)."""
        if self.references:
            self._agent.references.flush()


class Opened:
    """Codec hooks of one incoming message: its forks, taken at receipt."""

    __slots__ = ("_agent", "_forks", "_made", "own")

    def __init__(self, agent: Agent, references: list[Any] | None) -> None:
        self._agent = agent
        self._forks: dict[ForkId, tuple[RRefId, int]] = {}
        self._made: dict[ForkId, Any] = {}
        # Values of our own that came back: kept, since their fork is dropped at once.
        self.own: dict[RRefId, OwnedValue] = {}
        if references:
            for row, owner, fork in references:
                rref, key = (row[0], row[1]), (fork[0], fork[1])
                if owner == agent.session:
                    self.own[rref] = agent.references.own(rref)
                with agent.lock:
                    known = agent.references.ledger.holds(key)
                    agent.references.queue(agent.references.ledger.take(rref, owner, key))
                if not known:  # else the message has come before, and its fork is somebody's
                    self._forks[key] = (rref, owner)
            agent.references.flush()

    def encode_reference(self, rref: Any) -> Any:
        """Not for incoming messages."""
        raise NotImplementedError

    def decode_reference(self, data: Any) -> Any:
        """Called by the codec for each RRef in the body."""
        from .rref import rref_from_data

        rref, fork = rref_from_data(self._agent, data, self._forks, self._made, self.own)
        self._made[fork] = rref
        return rref

    def close(self) -> None:
        """The message is done with: drop the forks that no RRef has taken over."""
        forks, self._forks = self._forks, {}
        made, self._made = self._made, {}
        self.own = {}
        for fork in forks:
            if fork not in made or made[fork]._fork is None:
                self._agent.references.release_later(fork)

    def __del__(self) -> None:
        if self._forks:
            self.close()


class References:
    """The shell around the ledger."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.ledger: ReferenceLedger = ReferenceLedger(0)
        self._released: deque[ForkId] = deque()
        self._queued: list[Any] = []
        self._sequence = 0
        #: What we have said, and control may not have heard.
        self._unheard: deque[messages.References] = deque()
        #: All entries that anybody here holds, in the ledger or not.
        self._entries: weakref.WeakValueDictionary[RRefId, OwnedValue] = (
            weakref.WeakValueDictionary()
        )
        #: Why the owner of an RRef is gone.
        self._ended: dict[int, str] = {}
        self.dead_owners: dict[int, str] = {}

    def begin(self, session: int) -> None:
        """The session is known."""
        self.ledger = ReferenceLedger(session)

    # ------------------------------------------------------------ operations

    def queue(self, operations: list[Any]) -> None:
        """Lock held, as it was when the ledger made these: they go to control in that order."""
        self._queued += operations

    def flush(self) -> None:
        """Send to control what is queued."""
        with self._agent.lock:
            self._flush()

    def sent_replies_ended(self, session: int, numbers: list[int]) -> None:
        """Lock held: the caller has done with these replies of ours, which carried forks."""
        for number in numbers:
            self._queued += self.ledger.message_ended((session, -number), True)
        self._flush()

    def _flush(self) -> None:
        if self._queued:
            operations, self._queued = self._queued, []
            self._sequence += 1
            message = messages.References([_plain(op) for op in operations], self._sequence)
            self._unheard.append(message)
            self._agent.service.post(message)

    def heard(self, sequence: int) -> None:
        """Control has heard our words up to this number."""
        with self._agent.lock:
            while self._unheard and self._unheard[0].sequence <= sequence:
                self._unheard.popleft()

    def release_later(self, fork: ForkId) -> None:
        """From a finaliser, any thread: only queue it."""
        self._released.append(fork)
        self._agent.service.wake()

    def drain(self) -> None:
        """On the service thread: drop what finalisers released."""
        if not self._released:
            return
        with self._agent.lock:
            while self._released:
                self._queued += self.ledger.release(self._released.popleft())
            self._flush()

    def message_ended(self, key: Any, delivered: bool) -> None:
        """A message that carried forks is done with."""
        with self._agent.lock:
            self._queued += self.ledger.message_ended(key, delivered)
            self._flush()

    def message_lost_sight_of(self, key: Any) -> None:
        """Nobody waits for that message's answer any more: control finds out who has its forks."""
        with self._agent.lock:
            self._queued += self.ledger.message_of_unknown_fate(key)
            self._flush()

    def confirm(self, rows: list[list[Any]]) -> None:
        """Control asks whether we hold these forks."""
        with self._agent.lock:
            for rref, owner, fork in rows:
                self._queued += self.ledger.confirm((rref[0], rref[1]), owner, (fork[0], fork[1]))
            self._flush()

    def announce(
        self,
        heard: int,
        build: Callable[[list[Any], list[Any], int, int, bool], list[Any]],
    ) -> None:
        """Tell control all that we hold, have under way and own, after a reconnect.

        Args:
            build: makes the messages of forks, owned RRefs, mint counter, sequence number, and
                whether they stand for all that was said before.
            heard: which of our words control has heard last.  The others are said again
                first; where it has heard none (-1), or we no longer have those that follow, the
                announcement stands for them all.
        """
        with self._agent.lock:
            while self._unheard and self._unheard[0].sequence <= heard:
                self._unheard.popleft()
            next_kept = self._unheard[0].sequence if self._unheard else self._sequence + 1
            again = heard >= 0 and next_kept == heard + 1
            forks, owned, minted = self.ledger.announcement()
            if again:
                self._flush()
                self._agent.service.post_all(list(self._unheard))
            else:
                unheard = [op for message in self._unheard for op in message.operations]
                self._queued = self.ledger.to_say_again((*unheard, *self._queued))
                forks += [(op[1], op[2], op[3], False) for op in self._queued if op[0] == "give"]
                self._unheard.clear()
            self._agent.service.post_all(
                build(
                    [[list(rref), owner, list(fork), held] for rref, owner, fork, held in forks],
                    [list(rref) for rref in owned],
                    minted,
                    self._sequence,
                    not again,
                )
            )
            self._flush()

    # ------------------------------------------------------------ owned values

    def new_value(self) -> OwnedValue:
        """The entry of a new RRef of this worker; the ledger hears of it when it is first forked."""
        with self._agent.lock:
            entry = OwnedValue((self.ledger.session, self.ledger.mint()), self._agent.pool.submit)
        self._entries[entry.id] = entry
        return entry

    def own(self, rref: RRefId, *, created: bool = False) -> OwnedValue:
        """The entry of an RRef that lives here and that others know of, made if need be.

        Args:
            created: its creation has arrived; else this may be a placeholder for it.
        """
        with self._agent.lock:
            entry: OwnedValue | None = self.ledger.owned_value(rref) or self._entries.get(rref)
            if entry is None:
                entry = OwnedValue(rref, self._agent.pool.submit)
            self._entries[rref] = entry
            # False: nobody wants it any more.  The entry then goes with whoever uses it now.
            self.ledger.create_owned(rref, entry, created)
            self._queued += self.ledger.pending_operations()
            self._flush()
        if rref[0] in self._ended:
            self._orphaned(entry)
        return entry

    def _awaited(self, rref: RRefId) -> OwnedValue | None:
        """The entry into which the result of a ``remote`` goes; None if nobody wants it any more."""
        if rref[0] == self.ledger.session:
            return self._entries.get(rref)
        return self.own(rref, created=True)

    def readopt(self, entry: OwnedValue) -> None:
        """An RRef of ours is about to be forked: the ledger keeps its value from now on."""
        with self._agent.lock:
            if not self.ledger.create_owned(entry.id, entry):
                # A free that had come in the meantime is overtaken by this fork.
                self.ledger.create_owned(entry.id, entry)
            self._queued += self.ledger.pending_operations()
            self._flush()

    def new_fork(self, owner: int) -> tuple[RRefId, ForkId]:
        """Ids of a new RRef at ``owner`` and of our fork of it; control is told."""
        with self._agent.lock:
            rref, fork, operations = self.ledger.new_fork(owner)
            self._queued += operations
            self._flush()
        return rref, fork

    def creation_done(
        self, result: list[Any] | None, value: Any, methods: list[str] | None
    ) -> None:
        """The function of a ``remote`` has returned."""
        if result is not None:
            entry = self._awaited((result[0][0], result[0][1]))
            if entry is not None:
                entry.set(value, methods)

    def creation_failed(self, rref: list[int], error: BaseException) -> None:
        """The function of a ``remote`` has raised, or never ran."""
        entry = self._awaited((rref[0], rref[1]))
        if entry is not None and not entry.future.done():
            entry.future.fail(error)

    # ------------------------------------------------------------ what control says

    def freed(self, rrefs: list[list[Any]]) -> None:
        """Nobody holds these any more."""
        gone = []
        with self._agent.lock:
            for rref, seen in rrefs:
                gone.append(self.ledger.free((rref[0], rref[1]), seen))
        # The values' own finalisers are code of the user: not here, where timers run.
        self._agent.pool.submit(gone.clear)

    def session_ended(self, session: int, name: str, reason: str) -> None:
        """A session is gone: as owner, its RRefs are dead; as creator, nothing of it will come."""
        with self._agent.lock:
            dead, orphans, operations = self.ledger.session_lost(session)
            self._ended[session] = f"{name!r} ({reason})"
            self._queued += operations
            self._flush()
        if dead:
            self.dead_owners[session] = reason
        for entry in orphans:
            self._orphaned(entry)

    def _orphaned(self, entry: OwnedValue) -> None:
        """Its creator is gone: if the value is not there yet it will never come."""
        if not entry.future.done():
            entry.future.fail(
                errors.WorkerLostError(
                    "The value of this RRef never came: the worker that was to create it with remote() "
                    f"is gone: {self._ended.get(entry.id[0], 'lost')}.",
                    ran="maybe",
                )
            )


def _plain(operation: Any) -> list[Any]:
    return [list(part) if isinstance(part, tuple) else part for part in operation]
