"""What stands between this session and one peer: ids, marks, credit. Pure, no socket, no clock.

A :class:`Pair` has two halves that share their messages:

* *our calls to the peer*: ids that count up, the calls still waited for, and the
  low-water mark (the lowest of them) that every message of ours repeats;
* *the peer's calls to us*: every id from the peer's mark up with its state and, once
  done, its reply.  A second copy of a request so never runs twice, and an id below the
  mark is dead for the life of the session.

Credit is counted in positions (:mod:`broker.protocol`): we may send while
``position - peer_taken`` stays below the window, and flag the message with which it is
time for the peer to tell what it has taken.  Pieces of large buffers stop at a
smaller window than whole messages, so that a small call never queues behind more than
a few pieces.

Rejected: forgetting replies after a time (a reply that is asked for again would be
gone, and its call would run twice or never); a set of finished ids without a mark
(it grows for ever); one credit for pieces and calls (a no-op behind 64 MiB of pieces
waits for them all).

All methods are called under the agent's lock.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any

from broker.protocol import (
    CREDIT_WINDOW,
    PIECE_SIZE,
    Acknowledgement,
    Flag,
    Header,
    pack_session,
)

if TYPE_CHECKING:
    from .transfer import Assembly, Outgoing

#: Bytes of pieces under way towards one peer.
PIECE_WINDOW = 4 * PIECE_SIZE
#: Bytes of replies that a moved mark frees at the callee, past which it is told at once.
TELL_MARK = 1024 * 1024
#: Calls of one caller that a callee keeps; more are refused, none is forgotten.
MAX_SERVED = 500_000


class Stage(enum.IntEnum):
    """How far a call of the peer has come here."""

    RECEIVING = 0
    QUEUED = 1
    RUNNING = 2
    DONE = 3


class Served:
    """A call of the peer: its stage, and its reply once it is done."""

    __slots__ = ("assembly", "cancelled", "forks", "on_cancel", "reply", "stage")

    def __init__(self) -> None:
        self.stage = Stage.RECEIVING
        self.assembly: Assembly | None = None
        self.reply: Outgoing | None = None
        self.forks = False  # the reply carries forks of RRefs
        self.cancelled = False
        self.on_cancel: Any = None

    def end(self) -> None:
        """Nobody waits for it any more; what runs can see it, what has a hook is told."""
        self.cancelled = True
        self.assembly = None
        if self.on_cancel is not None:
            self.on_cancel()


class Pair:
    """All that is between this session and the peer session ``session``."""

    def __init__(self, session: int, window: int = CREDIT_WINDOW) -> None:
        self.session = session
        self.wire_name = pack_session(session)
        self.member: Any = None  # who it is, once known
        self.same_clock = False
        self.unintroduced: list[Any] = []  # works that wait for control to say who it is
        self.window = window
        self.piece_window = min(PIECE_WINDOW, window)
        self.tell_step = self.piece_window // 2
        self.tell_asked = 0  # position of the last message that asked the peer to tell
        self.lost: str | None = None  # why it is gone
        # our calls
        self.next_call = 1
        self.waiting: dict[int, Any] = {}
        self.told_mark = 1
        self.told_highest = 0
        self.unacknowledged_bytes = 0
        # our messages
        self.position = 0
        self.peer_taken = 0
        self.outbox: deque[Outgoing] = deque()
        self.streams: deque[Outgoing] = deque()
        # the peer's messages and calls
        self.taken = 0
        self.told_taken = 0
        self.served: dict[int, Served] = {}
        #: Replies with forks that the peer has done with: the agent's ledger is to know.
        self.forgotten_forks: list[int] = []
        self.peer_mark = 1
        self.peer_highest = 0
        self.peer_still: set[int] = set()
        self.assemblies: dict[int, Assembly] = {}
        # probes
        self.probe_pause = 0.0  # seconds; 0: no question is open
        self.probed_at = 0.0
        self.ask_back = False

    # ------------------------------------------------------------ our calls

    @property
    def mark(self) -> int:
        """The lowest id of ours that we still wait for."""
        return next(iter(self.waiting), self.next_call)

    def start_call(self, call: Any) -> int:
        """Give ``call`` the next id and wait for it."""
        number = self.next_call
        self.next_call = number + 1
        self.waiting[number] = call
        return number

    def end_call(self, number: int) -> Any:
        """Wait no longer for call ``number``; returns it, or None if it had ended already."""
        self.assemblies.pop(number, None)
        return self.waiting.pop(number, None)

    def acknowledgement(self) -> Acknowledgement | None:
        """What to tell the callee of our finished calls, or None where nothing has changed.

        With very many calls in flight only the mark is told: a list of them would cost more
        than it frees.
        """
        highest = self.next_call - 1
        if highest == self.told_highest and self.unacknowledged_bytes == 0:
            return None
        self.told_highest = highest
        self.unacknowledged_bytes = 0
        if len(self.waiting) > 1000:
            return Acknowledgement(self.mark - 1, [])
        return Acknowledgement(highest, list(self.waiting))

    # ------------------------------------------------------------ credit, sending

    def has_room(self, size: int, *, piece: bool = False) -> bool:
        """May a message of ``size`` charged bytes go now?  One may always go when none is under way."""
        under_way = self.position - self.peer_taken
        return under_way <= 0 or under_way + size <= (self.piece_window if piece else self.window)

    def charge(self, size: int) -> int:
        """Count a message as sent; returns the position for its header."""
        self.position += size
        return self.position

    def stamp(self, header: Header, size: int) -> Header:
        """Write into ``header`` what every message repeats, and charge its size."""
        header.mark = self.told_mark = self.mark
        header.taken = self.told_taken = self.taken
        before = self.position
        header.position = self.charge(size)
        if before // self.tell_step != header.position // self.tell_step:
            # The peer does not know our window: we say when it is time to tell.
            header.flags |= Flag.TELL
        if header.flags & Flag.TELL:
            self.tell_asked = header.position
        return header

    @property
    def must_ask(self) -> bool:
        """Something waits for room, and nothing under way makes the peer tell what it has taken."""
        return self.position > self.peer_taken >= self.tell_asked

    def returned(self, position: int) -> bool:
        """A message came back undelivered: what stood before it is no longer under way."""
        if position > self.peer_taken:
            self.peer_taken = min(position, self.position)
            return True
        return False

    def probe_answered(self) -> None:
        """No question is open any more."""
        self.probe_pause = 0.0

    # ------------------------------------------------------------ the peer's side

    def receive(self, header: Header) -> bool:
        """Take in what every header repeats; returns whether we may now send more."""
        if header.position > self.taken:
            self.taken = header.position
        if header.mark > self.peer_mark:
            self._forget_below(header.mark)
        if header.taken > self.peer_taken:
            self.peer_taken = min(header.taken, self.position)
            return bool(self.outbox or self.streams)
        return False

    def _forget_below(self, mark: int) -> None:
        served = self.served
        if mark - self.peer_mark > len(served):
            numbers = [number for number in served if number < mark]
        else:
            numbers = [number for number in range(self.peer_mark, mark) if number in served]
        self._forget(numbers)
        self.peer_mark = mark

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            served = self.served.pop(number)
            if served.forks:
                self.forgotten_forks.append(number)
            if served.stage != Stage.DONE:
                # The word that it was given up may have come before the call itself.
                served.end()

    def receive_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Forget the calls that the peer has done with; their ids stay dead."""
        highest = acknowledgement.highest
        if highest < self.peer_highest:
            return
        still = set(acknowledgement.pending)
        if highest == self.peer_highest:
            # Two that crossed on the way: what either has done with stays dead.
            still &= self.peer_still
        self.peer_highest = highest
        self.peer_still = still
        self._forget([n for n in self.served if n <= highest and n not in still])

    def admit(self, number: int) -> Served | None:
        """A request came: its new state, or None for one that is known or dead already."""
        if number < self.peer_mark or number in self.served:
            return None
        if number <= self.peer_highest and number not in self.peer_still:
            return None
        served = Served()
        self.served[number] = served
        return served

    def forget_peer(self) -> None:
        """The peer is gone: nothing of it, and nothing for it, is kept.  Our calls are ended apart."""
        for served in self.served.values():
            served.end()
        self.served.clear()
        self.outbox.clear()
        self.streams.clear()
        self.assemblies.clear()
        self.unintroduced.clear()

    @property
    def is_full(self) -> bool:
        """Does the peer have so many calls here that new ones must be refused?"""
        return len(self.served) >= MAX_SERVED
