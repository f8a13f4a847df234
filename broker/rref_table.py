"""The broker's half of RRef bookkeeping: who holds what, and when a value may go.  Pure.

A *row* stands for an RRef: its owner, and its *forks*.  A fork is one reference under its
own id; it is in its minter's *custody* until another session *takes* it.  Control
messages of one session come in order; those of two sessions, and control against data,
in any.  Five rules stand in for a handshake:

1. A minter's ``add`` is queued on control before the message with the fork goes out.
2. Forks are listed outside of a message's body; whoever ends the message drops them.
3. The taker announces what it takes.  An ``add`` may come twice, a ``take`` before its
   ``add``.  A fork that is dropped before its ``add`` has come keeps its row alive until the
   ``add`` comes (the minter's own fork may be in the same queue) or the minter is gone.
4. ``Free`` carries the highest number minted by the owner that has been seen here; an
   owner that has minted a fork of that value since ignores it, and its ``add`` is coming.
5. A row emptied by drops is freed at once; one emptied by a death after two seconds, so
   that the announcement of a taker whose minter died can still come.

Rejected: counts instead of fork ids (a message that comes twice is a count that is
wrong for ever); asking the owner before each fork, as torch does (a round trip before
user code may run, and a dead owner's forks wait for ever); ordering control against
data (drops overtook adds 3 times in 3 000 in a measurement).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

RRefId = tuple[int, int]
ForkId = tuple[int, int]

#: Seconds for which a row that a death has emptied is kept.
DEATH_WAIT = 2.0
#: Sessions whose end is remembered.
REMEMBERED = 10_000


class NotAllowed(Exception):
    """A session said something of a fork that is not its to say."""


@dataclass(slots=True)
class Free:
    """Tell the owner that nobody holds the value."""

    owner: int
    rref: RRefId
    seen: int


@dataclass(slots=True)
class OwnerDied:
    """Tell a holder that the owner of these is gone."""

    holder: int
    owner: int
    rrefs: list[RRefId]


Action = Free | OwnerDied


@dataclass(slots=True)
class Fork:
    """One reference."""

    holder: int
    taken: bool
    added: bool


@dataclass(slots=True)
class Row:
    """One RRef."""

    owner: int
    forks: dict[ForkId, Fork] = field(default_factory=dict)
    early: set[ForkId] = field(default_factory=set)  # dropped, their add still to come
    kind: str = ""
    made_at: str = ""
    emptied_at: float | None = None


class RRefTable:
    """The RRefs of one job."""

    def __init__(self) -> None:
        self.rows: dict[RRefId, Row] = {}
        self._owned: defaultdict[int, set[RRefId]] = defaultdict(set)
        self._held: defaultdict[int, set[tuple[RRefId, ForkId]]] = defaultdict(set)
        self._early: defaultdict[int, set[tuple[RRefId, ForkId]]] = defaultdict(set)
        self._seen: dict[int, int] = {}
        self._emptied: OrderedDict[RRefId, float] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    # ------------------------------------------------------------ events

    def add(
        self,
        session: int,
        rref: RRefId,
        owner: int,
        fork: ForkId,
        now: float,
        kind: str = "",
        made_at: str = "",
    ) -> list[Action]:
        """``session`` has minted ``fork``; it is in its custody until somebody takes it.

        Raises:
            NotAllowed: the fork is not of this session's minting, or the row has another owner.
        """
        if fork[0] != session:
            raise NotAllowed("an add of a fork that another session has minted")
        self._saw(session, fork[1])
        if rref[0] == session:
            self._saw(session, rref[1])
        if owner in self._ended:
            return []
        row = self._row(rref, owner)
        row.kind = kind or row.kind
        row.made_at = made_at or row.made_at
        if fork in row.early:
            row.early.discard(fork)
            self._early[session].discard((rref, fork))
            return self._check(rref, row, None)
        known = row.forks.get(fork)
        if known is not None:
            known.added = True
        else:
            self._hold(rref, row, fork, Fork(session, False, True))
        return []

    def take(self, session: int, rref: RRefId, owner: int, fork: ForkId, now: float) -> list[Action]:
        """``session`` has received ``fork`` and holds it from now on.

        Raises:
            NotAllowed: somebody else has taken it, or the row has another owner.
        """
        if owner in self._ended:
            return []
        row = self._row(rref, owner)
        if fork in row.early:
            return []
        known = row.forks.get(fork)
        if known is None:
            # Its minter's add is still to come, unless the minter is gone.
            self._hold(rref, row, fork, Fork(session, True, fork[0] in self._ended))
        elif known.taken and known.holder != session:
            raise NotAllowed("a take of a fork that another session holds")
        else:
            self._held[known.holder].discard((rref, fork))
            known.holder, known.taken = session, True
            self._held[session].add((rref, fork))
        return []

    def drop(self, session: int, rref: RRefId, fork: ForkId, now: float) -> list[Action]:
        """``session`` no longer holds ``fork``; saying so again changes nothing.

        Raises:
            NotAllowed: somebody else holds it.
        """
        row = self.rows.get(rref)
        known = row.forks.get(fork) if row is not None else None
        if row is None or known is None:
            return []
        if known.holder != session:
            if fork[0] == session:
                return []  # given back by its minter, but it has been taken meanwhile
            raise NotAllowed("a drop of a fork that another session holds")
        self._unhold(rref, row, fork)
        if not known.added:
            row.early.add(fork)
            self._early[fork[0]].add((rref, fork))
        return self._check(rref, row, None)

    def session_ended(self, session: int, now: float) -> list[Action]:
        """A session is gone, as owner, as holder and as minter."""
        self._ended[session] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        actions = self._owner_ended(session)
        touched: set[RRefId] = set()
        for rref, fork in self._held.pop(session, set()):
            row = self.rows.get(rref)
            if row is not None and fork in row.forks:
                del row.forks[fork]
                touched.add(rref)
        for rref, fork in self._early.pop(session, set()):
            row = self.rows.get(rref)
            if row is not None:
                row.early.discard(fork)
                touched.add(rref)
        for rref in touched:
            actions += self._check(rref, self.rows[rref], now)
        self._seen.pop(session, None)
        return actions

    def _owner_ended(self, session: int) -> list[Action]:
        holders: defaultdict[int, list[RRefId]] = defaultdict(list)
        for rref in self._owned.pop(session, set()):
            row = self.rows.pop(rref)
            self._emptied.pop(rref, None)
            for fork, known in row.forks.items():
                self._held[known.holder].discard((rref, fork))
            for fork in row.early:
                self._early[fork[0]].discard((rref, fork))
            for holder in {known.holder for known in row.forks.values()} - {session}:
                holders[holder].append(rref)
        return [OwnerDied(holder, session, rrefs) for holder, rrefs in holders.items()]

    def due(self, now: float) -> list[Action]:
        """Free the rows that a death has emptied two seconds ago."""
        actions: list[Action] = []
        while self._emptied:
            rref, moment = next(iter(self._emptied.items()))
            if moment + DEATH_WAIT > now:
                break
            actions += self._free(rref, self.rows[rref])
        return actions

    def next_due(self) -> float | None:
        """When :meth:`due` has something to do."""
        moment = next(iter(self._emptied.values()), None)
        return None if moment is None else moment + DEATH_WAIT

    def listing(self) -> Iterator[dict[str, object]]:
        """One map a row, for people."""
        for rref, row in self.rows.items():
            yield {
                "rref": list(rref),
                "owner": row.owner,
                "holders": sorted({fork.holder for fork in row.forks.values()}),
                "forks": len(row.forks),
                "kind": row.kind,
                "made_at": row.made_at,
            }

    # ------------------------------------------------------------ inside

    def _saw(self, session: int, number: int) -> None:
        if number > self._seen.get(session, -1):
            self._seen[session] = number

    def _row(self, rref: RRefId, owner: int) -> Row:
        row = self.rows.get(rref)
        if row is None:
            row = self.rows[rref] = Row(owner)
            self._owned[owner].add(rref)
        elif row.owner != owner:
            raise NotAllowed("an RRef that has another owner")
        return row

    def _hold(self, rref: RRefId, row: Row, fork: ForkId, new: Fork) -> None:
        row.forks[fork] = new
        self._held[new.holder].add((rref, fork))
        if row.emptied_at is not None:
            row.emptied_at = None
            self._emptied.pop(rref, None)

    def _unhold(self, rref: RRefId, row: Row, fork: ForkId) -> None:
        known = row.forks.pop(fork)
        self._held[known.holder].discard((rref, fork))

    def _check(self, rref: RRefId, row: Row, died_at: float | None) -> list[Action]:
        if row.forks or row.early or row.emptied_at is not None:
            return []
        if died_at is None:
            return self._free(rref, row)
        row.emptied_at = died_at
        self._emptied[rref] = died_at
        return []

    def _free(self, rref: RRefId, row: Row) -> list[Action]:
        del self.rows[rref]
        self._emptied.pop(rref, None)
        self._owned[row.owner].discard(rref)
        return [Free(row.owner, rref, self._seen.get(row.owner, -1))]
