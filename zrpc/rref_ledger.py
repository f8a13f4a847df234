"""A worker's half of RRef bookkeeping; the broker's is :mod:`broker.rref_table`, with the rules.  Pure.

The ledger knows the values that this session owns and that others may refer to, the
forks that it holds, and those that are on their way in messages of its own.  Its methods
return the operations to queue on control: ``("add", rref, owner, fork, type, made_at)``,
``("take", rref, owner, fork)``, ``("drop", rref, owner, fork)``,
``("give", rref, owner, fork, receiver)``.

All methods are called under the agent's lock, and the operations of one call are queued
before those of the next: the table counts on adds that come in the order of their numbers.

What the five rules leave to the worker:

* *A take that dies with its taker.*  A peer says "delivered", and is killed before control
  has read its ``take``: the fork is still in our custody there, and we have forgotten the
  message.  So the last forks that a peer was given are remembered and dropped once more
  when it is lost; that is no harm where it did take them.
* *An add that dies with its creator.*  ``remote`` was called on us, and its caller was killed
  before control has read its ``add``: our value has no row that could ever be emptied.  So
  when a creator is lost, each value of its making is announced and dropped under a fork
  of our own; if nobody holds it, it is freed for that.

* *A fork of which the minter does not know what became.*  Its call was given up, or it
  was announced as under way after a reconnect and may have been taken and dropped long
  before.  A ``give`` makes control ask the receiver, who takes it or says that it is gone.

Rejected: an operation with which the minter hands over each delivered fork (one more
control message for every RRef sent, for what only a kill within milliseconds needs);
holding a fork of one's own values (a row for each, and a drop to be timed).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

RRefId = tuple[int, int]
ForkId = tuple[int, int]
Operation = tuple[Any, ...]

#: Forks remembered a peer that it was given last: more than control can be behind by.
REMEMBERED_FORKS = 1024
#: Sessions whose end is remembered.
REMEMBERED_SESSIONS = 10_000


class _Owned:
    """A value of ours, and the number of the last fork of it that we minted."""

    __slots__ = ("created", "last_mint", "value")

    def __init__(self, value: Any, created: bool) -> None:
        self.value = value
        self.created = created
        self.last_mint = -1


class ReferenceLedger:
    """The RRefs of one session.

    Args:
        session: its number, the first half of every id that it mints.

    Example:
        >>> owner, user = ReferenceLedger(1), ReferenceLedger(2)
        >>> rref = (1, owner.mint())
        >>> owner.create_owned(rref, "value")
        True
        >>> fork, operations = owner.fork_for_send(rref, 1, "message")
        >>> operations
        [('add', (1, 0), 1, (1, 1), '', '')]
        >>> user.take(rref, 1, fork)
        [('take', (1, 0), 1, (1, 1))]
        >>> user.release(fork)
        [('drop', (1, 0), 1, (1, 1))]
        >>> owner.free(rref, seen=1)
        'value'
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self._next = 0
        self._owned: dict[RRefId, _Owned] = {}
        self._held: dict[ForkId, tuple[RRefId, int]] = {}
        self._held_of: defaultdict[int, dict[ForkId, None]] = defaultdict(dict)  # by owner
        self._transit: dict[Any, list[tuple[RRefId, int, ForkId]]] = {}
        # Announced while they were under way.
        self._uncertain: set[ForkId] = set()
        self._given: dict[int, deque[tuple[RRefId, int, ForkId]]] = {}  # by receiver
        self._made_by: defaultdict[int, dict[RRefId, None]] = defaultdict(dict)  # by creator
        # Freed before their creation has arrived, by creator.
        self._freed_early: defaultdict[int, set[RRefId]] = defaultdict(set)
        self._lost: OrderedDict[int, None] = OrderedDict()
        self._pending: list[Operation] = []

    def __len__(self) -> int:
        return len(self._owned)

    @property
    def held(self) -> int:
        """How many forks this session holds."""
        return len(self._held)

    def holds(self, fork: ForkId) -> bool:
        """Does this session hold that fork?"""
        return fork in self._held

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

    def create_owned(self, rref: RRefId, value: Any, created: bool = True) -> bool:
        """Keep ``value`` from now on; if ``rref`` has one already, that one is kept.

        Where the creator was lost meanwhile there are operations to queue
        (:meth:`pending_operations`).

        Args:
            value: any object but None.
            created: False for the placeholder of a value whose creation has not arrived
                (a fork of it, or a call on it, came first); its creation then calls again.

        Returns:
            False where nobody wants it any more: it was freed before it came.
        """
        early = self._freed_early.get(rref[0])
        if early is not None and rref in early:
            if created:
                early.discard(rref)
                if not early:
                    del self._freed_early[rref[0]]
            return False
        owned = self._owned.get(rref)
        if owned is not None:
            owned.created = owned.created or created
            return True
        self._owned[rref] = _Owned(value, created)
        if rref[0] != self.session:
            self._made_by[rref[0]][rref] = None
            if rref[0] in self._lost:
                self._pending += self._show(rref)
        return True

    def pending_operations(self) -> list[Operation]:
        """What :meth:`create_owned` has left to be queued; other methods' results begin with it."""
        operations, self._pending = self._pending, []
        return operations

    def free(self, rref: RRefId, seen: int) -> Any:
        """Control says that nobody holds it; returns the value if it is given up, else None.

        Args:
            seen: the highest number minted by us that control had seen.
        """
        owned = self._owned.get(rref)
        if owned is not None and owned.last_mint > seen:
            return None  # a fork of it is on its way to control
        foreign = rref[0] != self.session
        if foreign and rref[0] not in self._lost and (owned is None or not owned.created):
            self._freed_early[rref[0]].add(rref)
        if owned is None:
            return None
        del self._owned[rref]
        if foreign:
            _discard(self._made_by, rref[0], rref)
        return owned.value

    # ------------------------------------------------------------ forks

    def new_fork(self, owner: int) -> tuple[RRefId, ForkId, list[Operation]]:
        """Ids for an RRef that ``owner`` is about to make for us, and our own fork of it."""
        rref = (self.session, self.mint())
        fork = (self.session, self.mint())
        self._hold(rref, owner, fork)
        return rref, fork, [*self.pending_operations(), ("add", rref, owner, fork, "", "")]

    def fork_for_send(
        self, rref: RRefId, owner: int, message: Any, value: Any = None
    ) -> tuple[ForkId, list[Operation]]:
        """A new fork that will travel in ``message``.

        Args:
            message: any key that names the message until :meth:`message_sent`.
            value: where we are the owner: the value, kept again if it had been freed.
        """
        operations = self.pending_operations()
        if value is not None and rref not in self._owned:
            self.create_owned(rref, value)
            operations += self.pending_operations()
        fork = (self.session, self.mint())
        owned = self._owned.get(rref)
        if owned is not None:
            owned.last_mint = fork[1]
        self._transit.setdefault(message, []).append((rref, owner, fork))
        operations.append(("add", rref, owner, fork, "", ""))
        return fork, operations

    def message_sent(self, message: Any, key: tuple[int, Any]) -> None:
        """``message`` is known as ``key`` from now on; the first half of the key is the peer's session."""
        forks = self._transit.pop(message, None)
        if forks is not None:
            self._transit[key] = forks

    def message_ended(self, key: Any, delivered: bool) -> list[Operation]:
        """The message is done with; a key that names none is no harm.

        Args:
            delivered: its receiver has taken the forks.  Else they are given back: it was
                not delivered, or never sent, or its receiver is lost.
        """
        operations = self.pending_operations()
        forks = self._transit.pop(key, None)
        if forks is None:
            return operations
        peer = key[0] if isinstance(key, tuple) else None
        if delivered and peer is not None and peer not in self._lost:
            given = [fork for fork in forks if fork[1] != peer]
            self._remember_given(peer, given)
            if self._uncertain:
                operations += self._give(peer, [f for f in forks if f[2] in self._uncertain])
            return operations
        for rref, owner, fork in forks:
            self._uncertain.discard(fork)
            if owner not in self._lost:
                operations.append(("drop", rref, owner, fork))
        return operations

    def message_of_unknown_fate(self, key: tuple[int, Any]) -> list[Operation]:
        """Nobody waits for the answer to that message, which may or may not arrive."""
        operations = self.pending_operations()
        forks = self._transit.pop(key, None)
        if forks is None:
            return operations
        if key[0] in self._lost:
            self._transit[key] = forks
            return operations + self.message_ended(key, False)
        return operations + self._give(key[0], forks)

    def _remember_given(self, peer: int, forks: list[tuple[RRefId, int, ForkId]]) -> None:
        if forks:
            if peer not in self._given:
                self._given[peer] = deque(maxlen=REMEMBERED_FORKS)
            self._given[peer].extend(forks)

    def _give(self, peer: int, forks: list[tuple[RRefId, int, ForkId]]) -> list[Operation]:
        operations: list[Operation] = []
        self._remember_given(peer, forks)
        for rref, owner, fork in forks:
            self._uncertain.discard(fork)
            if owner not in self._lost:
                operations.append(("give", rref, owner, fork, peer))
        return operations

    def confirm(self, rref: RRefId, owner: int, fork: ForkId) -> list[Operation]:
        """Control asks whether we have that fork: we take it once more, or are done with it."""
        operations = self.pending_operations()
        operations.append(("take", rref, owner, fork))
        if fork not in self._held:
            operations.append(("drop", rref, owner, fork))
        return operations

    def announcement(
        self,
    ) -> tuple[list[tuple[RRefId, int, ForkId, bool]], list[RRefId], int]:
        """All that control must know of us, after words of ours may have been lost.

        Returns:
            Forks that we hold (True) or have minted and sent (False); values of ours; the
            number that will be minted next.
        """
        forks = [(rref, owner, fork, True) for fork, (rref, owner) in self._held.items()]
        for sent in self._transit.values():
            for rref, owner, fork in sent:
                if owner not in self._lost:
                    forks.append((rref, owner, fork, False))
                    self._uncertain.add(fork)
        return forks, list(self._owned), self._next

    def to_say_again(self, said: Iterable[Sequence[Any]]) -> list[Operation]:
        """What of these operations, which a dead broker may not have heard, its successor must hear.

        An announcement stands for all others.  But it does not tell of what we had and have
        given up already: its minter may announce it or ask for it, and the owner of what we
        have made may have got it only after its own announcement.
        """
        operations: list[Operation] = []
        for verb, rref, owner, fork, *more in said:
            rref, fork = tuple(rref), tuple(fork)
            if owner in self._lost:
                continue
            if verb == "give" and more[0] not in self._lost:
                operations.append((verb, rref, owner, fork, more[0]))
            elif verb == "drop":
                had = "add" if fork[0] == self.session else "take"
                operations += [(had, rref, owner, fork), ("drop", rref, owner, fork)]
        return operations

    def take(self, rref: RRefId, owner: int, fork: ForkId) -> list[Operation]:
        """A fork has arrived.  Of a value of our own it is dropped at once: we have the value."""
        operations = self.pending_operations()
        if fork in self._held:
            return operations
        operations.append(("take", rref, owner, fork))
        if owner == self.session:
            operations.append(("drop", rref, owner, fork))
        else:
            self._hold(rref, owner, fork)
        return operations

    def release(self, fork: ForkId) -> list[Operation]:
        """We no longer hold it; again is no harm."""
        operations = self.pending_operations()
        held = self._held.pop(fork, None)
        if held is not None:
            rref, owner = held
            _discard(self._held_of, owner, fork)
            if owner not in self._lost:
                operations.append(("drop", rref, owner, fork))
        return operations

    def session_lost(self, session: int) -> tuple[list[RRefId], list[Any], list[Operation]]:
        """A session was lost or has left.

        Returns:
            RRefs that it owned and we hold; values of ours that it made or was to make;
            operations (forks on their way to it are given back, see the module's text).
        """
        self._lost[session] = None
        while len(self._lost) > REMEMBERED_SESSIONS:
            self._lost.popitem(last=False)
        dead: dict[RRefId, None] = {}
        for fork in self._held_of.pop(session, ()):
            dead[self._held.pop(fork)[0]] = None
        self._freed_early.pop(session, None)
        operations = self.pending_operations()
        for key in [k for k in self._transit if isinstance(k, tuple) and k[0] == session]:
            operations += self.message_ended(key, False)
        for rref, owner, fork in self._given.pop(session, ()):
            if owner not in self._lost:
                operations.append(("drop", rref, owner, fork))
        orphans = []
        for rref in self._made_by.get(session, ()):
            orphans.append(self._owned[rref].value)
            operations += self._show(rref)
        return list(dead), orphans, operations

    # ------------------------------------------------------------ inside

    def _hold(self, rref: RRefId, owner: int, fork: ForkId) -> None:
        self._held[fork] = (rref, owner)
        self._held_of[owner][fork] = None

    def _show(self, rref: RRefId) -> list[Operation]:
        """Make sure that a value of ours has a row, which is freed if nobody holds it."""
        fork = (self.session, self.mint())
        self._owned[rref].last_mint = fork[1]
        return [("add", rref, self.session, fork, "", ""), ("drop", rref, self.session, fork)]


def _discard(index: defaultdict[int, dict[Any, None]], session: int, item: Any) -> None:
    items = index.get(session)
    if items is not None:
        items.pop(item, None)
        if not items:
            del index[session]
