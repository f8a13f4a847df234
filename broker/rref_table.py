"""The broker's half of RRef bookkeeping: who holds what, and when a value may go.  Pure.

A *row* stands for an RRef: its owner, and its *forks*.  A fork is one reference under its
own id; it is in its minter's *custody* until another session *takes* it.  Control
messages of one session come in order; those of two sessions, and control against data,
in any.  Five rules stand in for a handshake:

1. A minter's ``add`` is queued on control before the message with the fork goes out.
2. Forks are listed outside of a message's body; whoever ends the message drops them.
3. The taker announces what it takes.  An ``add`` may come twice, a ``take`` before its
   ``add``.  A fork that ends before its ``add`` has come keeps its row alive until the
   ``add`` comes (the minter's own fork may be in the same queue) or the minter is gone.
   Adds of a minter come in the order of their numbers: of a fork below the highest that
   was seen no ``add`` is to come.
4. ``Free`` carries the highest number minted by the owner that has been seen here; an
   owner that has minted a fork of that value since ignores it, and its ``add`` is coming.
5. A row that is emptied is freed at once, but not within two seconds of a death: the
   announcement of a taker whose minter died may still be on its way.

Why it is safe while everybody lives: who mints a fork holds another of the same RRef, and
drops that one only after the new one's ``add``, in the same queue.  So while an ``add`` is
on its way there is an older fork in the table, or one whose ``add`` is on its way too;
at the end of that chain stands the creator (whose row is not there yet), or the owner
(rule 4), or a fork that ended early (rule 3).

Why rule 5 looks at all deaths and not at the row's own: A gives a fork to B, B mints one
for C and dies before control has read its ``take`` and ``add``.  A hears of the death and
drops its fork; the row is emptied by a drop, and no fork of the dead was ever in it.
Another death within the two seconds prolongs them (C may have died after it passed the
fork on), up to ten in all, so that a job in which somebody always dies frees nevertheless.

A session's words are heard once and in order, also over a cut connection (it repeats
them).  But a table that is a new one, after a restart, knows nothing, and what it says may be
lost too: so after a reconnect a session *announces* all that it holds, has sent and owns.
What it once sent may have been taken and dropped before the restart; when its call ends
it says ``give``, and the receiver is asked.  While others may still have to announce
themselves, nothing is freed.

Rejected: counts instead of fork ids (a message that comes twice is a count that is
wrong for ever); asking the owner before each fork, as torch does (a round trip before
user code may run, and a dead owner's forks wait for ever); ordering control against
data (drops overtook adds 3 times in 3 000 in a measurement); the two seconds only for rows
in which a fork of the dead was seen (see above).

Members of a job are trusted not to guess each other's fork ids, no further: nobody may
mint in another's name, drop or take what another holds, or give an RRef a second owner.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

RRefId = tuple[int, int]
ForkId = tuple[int, int]

#: Seconds after a death for which emptied rows are kept.
DEATH_WAIT = 2.0
#: Seconds for which an emptied row is kept at most, where one death follows another.
LONGEST_WAIT = 10.0
#: Sessions whose end is remembered.
REMEMBERED = 10_000


#: Frees of one owner that are told again when it announces itself.
FREES_REMEMBERED = 1000


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


@dataclass(slots=True)
class Ask:
    """Ask a session whether it holds a fork that was given to it."""

    receiver: int
    rref: RRefId
    owner: int
    fork: ForkId


Action = Free | OwnerDied | Ask


@dataclass(slots=True)
class Fork:
    """One reference."""

    holder: int
    taken: bool
    added: bool


@dataclass(slots=True)
class Row:
    """One RRef."""

    rref: RRefId
    owner: int
    forks: dict[ForkId, Fork] = field(default_factory=dict)
    early: set[ForkId] = field(default_factory=set)  # ended, their add still to come
    kind: str = ""
    made_at: str = ""


class RRefTable:
    """The RRefs of one job.

    Every event returns the actions that follow from it.  ``now`` is a monotonic clock's
    reading in seconds; it never goes back.

    Example:
        >>> table = RRefTable()
        >>> owner, user, rref, fork = 1, 2, (2, 0), (2, 1)
        >>> table.add(user, rref, owner, fork, now=0.0)
        []
        >>> table.drop(user, rref, fork, now=1.0)
        [Free(owner=1, rref=(2, 0), seen=-1)]
    """

    def __init__(self) -> None:
        self.rows: dict[RRefId, Row] = {}
        self.freed = 0
        self._owned: defaultdict[int, dict[RRefId, None]] = defaultdict(dict)
        self._held: defaultdict[int, dict[tuple[RRefId, ForkId], None]] = defaultdict(dict)
        # By minter: forks that are taken, or have ended, and whose add has not come.
        self._awaited: defaultdict[int, dict[tuple[RRefId, ForkId], None]] = defaultdict(dict)
        # By receiver: forks of which it is asked whether it has them.
        self._asked: defaultdict[int, dict[tuple[RRefId, ForkId], None]] = defaultdict(dict)
        # By owner: what it was told last, and may not have heard.
        self._frees: dict[int, deque[Free]] = {}
        self._seen: dict[int, int] = {}
        self._emptied: OrderedDict[RRefId, float] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._quiet_from = float("-inf")
        self._frozen_until = float("-inf")

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

        Args:
            kind: the type of the value, where it is known; for people.
            made_at: where in the program the RRef was made; for people.

        Raises:
            NotAllowed: the fork is not of this session's minting, or the row has another owner.
        """
        if fork[0] != session:
            raise NotAllowed("an add of a fork that another session has minted")
        self.owner_minted(session, fork[1])
        if rref[0] == session:
            self.owner_minted(session, rref[1])
        if owner in self._ended:
            return [OwnerDied(session, owner, [rref])]
        row = self._row(rref, owner, session)
        row.kind = kind or row.kind
        row.made_at = made_at or row.made_at
        self._expect_no_more(rref, fork)
        if fork in row.early:
            row.early.discard(fork)
            return self._check(row, now)
        known = row.forks.get(fork)
        if known is not None:
            known.added = True
        else:
            self._hold(row, fork, Fork(session, False, True))
        return []

    def take(
        self, session: int, rref: RRefId, owner: int, fork: ForkId, now: float
    ) -> list[Action]:
        """``session`` has received ``fork`` and holds it from now on; saying so again changes nothing.

        Raises:
            NotAllowed: somebody else has taken it, or the row has another owner.
        """
        self._forget(self._asked, session, rref, fork)
        if owner in self._ended:
            return [OwnerDied(session, owner, [rref])]
        row = self._row(rref, owner, 0)
        if fork in row.early:
            return []
        known = row.forks.get(fork)
        if known is None:
            # Its minter's add is still to come, or was here before, or the minter is gone.
            added = fork[0] in self._ended or fork[1] <= self._seen.get(fork[0], -1)
            self._hold(row, fork, Fork(session, True, added))
            if not added:
                self._awaited[fork[0]][rref, fork] = None
        elif known.taken and known.holder != session:
            raise NotAllowed("a take of a fork that another session holds")
        else:
            self._forget(self._held, known.holder, rref, fork)
            known.holder, known.taken = session, True
            self._held[session][rref, fork] = None
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
        self._forget(self._held, session, rref, fork)
        self._end(row, fork)
        return self._check(row, now)

    def give(
        self, session: int, rref: RRefId, fork: ForkId, receiver: int, now: float
    ) -> list[Action]:
        """``session`` no longer knows whether ``receiver`` has taken its fork; it is asked.

        Where that one is gone, the fork is.
        """
        row = self.rows.get(rref)
        known = row.forks.get(fork) if row is not None else None
        if row is None or known is None or known.holder != session or fork[0] != session:
            return []
        if receiver in self._ended:
            return self.drop(session, rref, fork, now)
        # Asked again when it announces itself: question or answer may be lost until then.
        self._asked[receiver][rref, fork] = None
        return [Ask(receiver, rref, row.owner, fork)]

    def announce(
        self,
        session: int,
        forks: list[tuple[RRefId, int, ForkId, bool]],
        owned: list[RRefId],
        minted: int,
        now: float,
        patience: float,
    ) -> list[Action]:
        """All that ``session`` holds, has sent and owns; it replaces what it said before.

        Args:
            forks: RRef, owner, fork, and whether it holds that fork (else it has sent it).
            owned: RRefs of its own that others may hold.
            minted: the next number that it will mint.
            patience: seconds for which others may still have to announce themselves.

        Raises:
            NotAllowed: it names what is another's.
        """
        actions: list[Action] = []
        named: set[tuple[RRefId, ForkId]] = set()
        for rref, owner, fork, held in forks:
            named.add((rref, fork))
            say = self.take if held else self.add
            actions += say(session, rref, owner, fork, now)
        self.owner_minted(session, minted - 1)
        touched: dict[RRefId, Row] = {}
        for rref, fork in list(self._awaited.get(session, ())):
            if fork[1] >= minted:
                continue  # its add comes behind the announcement
            row = touched[rref] = self.rows[rref]
            self._expect_no_more(rref, fork)
            if fork in row.early:
                row.early.discard(fork)
            else:
                row.forks[fork].added = True
        for rref, fork in list(self._held.get(session, ())):
            if (rref, fork) not in named:
                row = touched[rref] = self.rows[rref]
                self._forget(self._held, session, rref, fork)
                self._end(row, fork)
        for rref in owned:
            if rref not in self.rows:
                # Nobody holds it, or whoever does has not said so yet.
                touched[rref] = self._row(rref, session, session)
        for rref, fork in list(self._asked.get(session, ())):
            known = self.rows[rref].forks.get(fork) if rref in self.rows else None
            if known is None or known.taken:
                self._forget(self._asked, session, rref, fork)
            else:
                actions.append(Ask(session, rref, self.rows[rref].owner, fork))
        # A value whose creation it has not got yet is not among those that it owns.
        actions += [free for free in self._frees.get(session, ()) if free.rref not in self.rows]
        if touched:
            self.freeze(now + patience)
        for row in touched.values():
            actions += self._check(row, now)
        return actions

    def freeze(self, until: float) -> None:
        """Free nothing before that moment: who holds what is not known well enough."""
        self._frozen_until = max(self._frozen_until, until)

    def owner_minted(self, session: int, number: int) -> None:
        """``session`` has minted all numbers up to this one, and said so before (rule 4)."""
        if number > self._seen.get(session, -1):
            self._seen[session] = number

    def session_ended(self, session: int, now: float) -> list[Action]:
        """A session was lost or has left: as owner, as holder and as minter.

        It costs time in proportion to its own rows and forks.
        """
        self._ended[session] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._quiet_from = max(self._quiet_from, now + DEATH_WAIT)
        actions = self._owner_ended(session)
        self._asked.pop(session, None)
        self._frees.pop(session, None)
        touched: dict[RRefId, Row] = {}
        # As minter first: no add of its comes any more, so nothing need wait for one.
        for rref, fork in self._awaited.pop(session, ()):
            row = self.rows[rref]
            if fork in row.early:
                row.early.discard(fork)
                touched[rref] = row
            else:
                row.forks[fork].added = True
        for rref, fork in self._held.pop(session, ()):
            row = touched[rref] = self.rows[rref]
            self._end(row, fork)
        for row in touched.values():
            actions += self._check(row, now)
        self._seen.pop(session, None)
        return actions

    def due(self, now: float) -> list[Action]:
        """Free the rows that were kept because of a death; see :meth:`next_due`."""
        actions: list[Action] = []
        while (moment := self.next_due()) is not None and moment <= now:
            actions.append(self._free(self.rows[next(iter(self._emptied))]))
        return actions

    def next_due(self) -> float | None:
        """The moment, in seconds, at which :meth:`due` has something to do; None for never."""
        for emptied_at in self._emptied.values():
            return max(self._frozen_until, min(self._quiet_from, emptied_at + LONGEST_WAIT))
        return None

    # ------------------------------------------------------------ for people

    def listing(self) -> Iterator[dict[str, object]]:
        """One map a row."""
        for rref, row in self.rows.items():
            yield {
                "rref": list(rref),
                "owner": row.owner,
                "holders": sorted({fork.holder for fork in row.forks.values()}),
                "forks": len(row.forks),
                "kind": row.kind,
                "made_at": row.made_at,
            }

    def snapshot(self) -> dict[str, int]:
        """Counters: rows and forks now, rows that wait after a death, rows freed so far."""
        return {
            "rows": len(self.rows),
            "forks": sum(len(held) for held in self._held.values()),
            "waiting": len(self._emptied),
            "freed": self.freed,
        }

    # ------------------------------------------------------------ inside

    def _row(self, rref: RRefId, owner: int, minter: int) -> Row:
        row = self.rows.get(rref)
        if row is not None and row.owner != owner:
            if rref[0] != minter:
                raise NotAllowed("an RRef that has another owner")
            # Its creator knows; whoever spoke before it did not.
            self._remove(row)
            row = None
        if row is None:
            row = self.rows[rref] = Row(rref, owner)
            self._owned[owner][rref] = None
        return row

    def _hold(self, row: Row, fork: ForkId, new: Fork) -> None:
        row.forks[fork] = new
        self._held[new.holder][row.rref, fork] = None
        self._emptied.pop(row.rref, None)

    def _end(self, row: Row, fork: ForkId) -> None:
        """The fork is no more; its place among its holder's is cleared already."""
        if not row.forks.pop(fork).added:
            row.early.add(fork)

    def _forget(
        self,
        index: defaultdict[int, dict[tuple[RRefId, ForkId], None]],
        session: int,
        rref: RRefId,
        fork: ForkId,
    ) -> None:
        entries = index.get(session)
        if entries is not None:
            entries.pop((rref, fork), None)
            if not entries:
                del index[session]

    def _expect_no_more(self, rref: RRefId, fork: ForkId) -> None:
        self._forget(self._awaited, fork[0], rref, fork)

    def _check(self, row: Row, now: float) -> list[Action]:
        if row.forks or row.early or row.rref in self._emptied:
            return []
        if now >= self._quiet_from and now >= self._frozen_until:
            return [self._free(row)]
        self._emptied[row.rref] = now
        return []

    def _free(self, row: Row) -> Free:
        self._remove(row)
        self.freed += 1
        free = Free(row.owner, row.rref, self._seen.get(row.owner, -1))
        if row.owner not in self._ended:
            if row.owner not in self._frees:
                self._frees[row.owner] = deque(maxlen=FREES_REMEMBERED)
            self._frees[row.owner].append(free)
        return free

    def _remove(self, row: Row) -> None:
        rref = row.rref
        del self.rows[rref]
        self._emptied.pop(rref, None)
        for fork, known in row.forks.items():
            self._forget(self._held, known.holder, rref, fork)
            self._expect_no_more(rref, fork)
        for fork in row.early:
            self._expect_no_more(rref, fork)
        owned = self._owned.get(row.owner)
        if owned is not None:
            owned.pop(rref, None)
            if not owned:
                del self._owned[row.owner]

    def _owner_ended(self, session: int) -> list[Action]:
        holders: defaultdict[int, list[RRefId]] = defaultdict(list)
        for rref in self._owned.pop(session, ()):
            row = self.rows[rref]
            for holder in {known.holder for known in row.forks.values()} - {session}:
                holders[holder].append(rref)
            self._remove(row)
        return [OwnerDied(holder, session, rrefs) for holder, rrefs in holders.items()]
