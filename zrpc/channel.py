"""The data channel of one agent: the pairs, and what is sent to them.

Any thread sends, under the agent's lock, without ever blocking: what finds no credit or
no room in the socket waits in its pair's outbox and goes when the peer has taken more.
One thread at a time reads (:meth:`DataChannel.read` is the pool's reader); what it reads
goes through :mod:`zrpc.receiving`.

What may be sent, what a message means and what is forgotten is decided in
:mod:`zrpc.pair`, :mod:`zrpc.transfer` and :mod:`zrpc.probing`; the sockets are
:mod:`zrpc.data_sockets`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from broker.protocol import Flag, Header, Kind, charge, pack_session

from . import probing
from .data_sockets import DataSockets, Sent
from .pair import TELL_MARK, Pair
from .pool import Work
from .receiving import Events, Receiver, find_outgoing
from .transfer import Outgoing

#: Seconds after which a message that came back is sent again.
RETRY_UNREACHABLE = 0.05
RETRY_FULL = 0.005
#: Seconds after which a moved mark is told by a message of its own.
MARK_DELAY = 0.1


class DataChannel:
    """Pairs, and sending to them.

    Args:
        events: the agent.
        lock: the agent's lock.
        call_at: runs a function on the service thread at a moment.
        window: credit towards one peer, bytes.
        sockets: default ZeroMQ's.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        events: Events,
        lock: threading.Lock,
        call_at: Callable[[float, Callable[[], None]], None],
        window: int,
        sockets: DataSockets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = lock
        self._call_at = call_at
        self._window = window
        self._clock = clock
        self.sockets = sockets or DataSockets()
        self.receiver = Receiver(self, events, lock)
        self.pairs: dict[int, Pair] = {}
        self.session = 0
        #: Routers whose echo has come back.
        self.echoes: set[int] = set()
        self._mark_dirty: set[Pair] = set()
        self._mark_timer = False
        self._refused: Header | None = None  # what the socket did not take
        self.close_rx = self.sockets.close_rx

    # ------------------------------------------------------------ sockets

    def open(
        self,
        context: zmq.Context[Any],
        session: int,
        endpoints: list[str],
        tx_ids: list[bytes],
        rx_id: bytes,
        heartbeat: float,
    ) -> list[zmq.Socket[bytes]]:
        """Connect to each data router under the routing ids of the welcome; returns the monitors."""
        self.session = session
        return self.sockets.open(context, endpoints, tx_ids, rx_id, heartbeat)

    def send_echoes(self) -> bool:
        """Send to ourselves through each router whose echo has not come back; True when all have."""
        with self._lock:
            missing = [i for i in range(self.sockets.routers) if i not in self.echoes]
            for index in missing:
                header = Header(Kind.ECHO, index=index)
                self.sockets.send(index, pack_session(self.session), header.pack(), [], False)
        return not missing

    def close_tx(self) -> None:
        """Close the sending sockets; nothing is sent from then on."""
        with self._lock:
            self.sockets.close_tx()

    def set_linger(self, milliseconds: int) -> None:
        """How long what has been sent may still take to leave after the close."""
        with self._lock:
            self.sockets.set_linger(milliseconds)

    def read(self) -> list[Work]:
        """Take one message off the socket; returns the works that it makes.

        Raises:
            PoolClosed: the context has been terminated.
        """
        work = self.receiver.take_in(*self.sockets.receive())
        return [work] if work is not None else []

    # ------------------------------------------------------------ sending (lock held)

    def pair(self, session: int) -> Pair:
        """The pair with that session, made if need be."""
        pair = self.pairs.get(session)
        if pair is None:
            pair = self.pairs[session] = Pair(session, self._window)
        return pair

    def send(self, pair: Pair, outgoing: Outgoing) -> None:
        """Send a request or reply, now or when there is credit."""
        pair.outbox.append(outgoing)
        self.pump(pair)

    def pump(self, pair: Pair) -> None:
        """Send what waits for this pair, as far as its credit goes."""
        outbox = pair.outbox
        while outbox:
            outgoing = outbox[0]
            if not outgoing.cancelled:
                if not pair.has_room(outgoing.first_size):
                    self._ask_for_room(pair)
                    break
                if not self._transmit(pair, outgoing, *outgoing.first()):
                    return
                outgoing.started = True
                if outgoing.is_split:
                    pair.streams.append(outgoing)
            outbox.popleft()
        streams = pair.streams
        while streams:
            outgoing = streams[0]
            if outgoing.finished:
                streams.popleft()
                continue
            if not pair.has_room(outgoing.next_size(), piece=True):
                self._ask_for_room(pair)
                break
            if not self._transmit(pair, outgoing, *outgoing.next_message()):
                header = self._refused
                assert header is not None
                outgoing.again.insert(0, (header.index, header.offset))
                return
            streams.rotate(-1)

    def _ask_for_room(self, pair: Pair) -> None:
        if pair.must_ask:
            self.send_bare(pair, Kind.CREDIT, flags=Flag.TELL)

    def _transmit(
        self, pair: Pair, outgoing: Outgoing | None, header: Header, frames: list[Any], size: int
    ) -> bool:
        if pair.lost is not None:
            self._refused = header
            return False
        pair.stamp(header, size)
        if outgoing is not None and outgoing.deadline is not None and header.kind == Kind.REQUEST:
            if pair.same_clock:
                header.flags |= Flag.SAME_CLOCK
                header.deadline = int(outgoing.deadline * 1e9)
            else:
                header.deadline = max(1, int((outgoing.deadline - self._clock()) * 1e9))
        sent = self.sockets.send(
            pair.session % self.sockets.routers,
            pair.wire_name,
            header.pack(),
            frames,
            bool(header.flags & Flag.LARGE),
        )
        if sent is Sent.OK:
            return True
        pair.position -= size
        pair.told_taken = -1  # it was not told
        if header.flags & Flag.TELL:
            pair.tell_asked = 0  # nor asked
        self._refused = header
        if sent is Sent.FULL:
            self._call_at(self._clock() + RETRY_FULL, lambda: self._retry(pair))
        return False

    def send_bare(self, pair: Pair, kind: Kind, body: bytes = b"", *, flags: int = 0) -> None:
        """Send a message that is not subject to credit; lost if it cannot go now."""
        header = Header(kind, flags, offset=len(body))
        self._transmit(pair, None, header, [body], charge(1, len(body)))

    def _retry(self, pair: Pair) -> None:
        with self._lock:
            self.pump(pair)

    # ------------------------------------------------------------ marks

    def note_ended(self, pair: Pair, freed: int) -> None:
        """A call of ours has ended (lock held): its callee may forget it, soon or at once."""
        pair.unacknowledged_bytes += freed
        if pair.unacknowledged_bytes >= TELL_MARK:
            self.tell(pair)
            return
        self._mark_dirty.add(pair)
        if not self._mark_timer:
            self._mark_timer = True
            self._call_at(self._clock() + MARK_DELAY, self._tell_marks)

    def _tell_marks(self) -> None:
        with self._lock:
            self._mark_timer = False
            dirty, self._mark_dirty = self._mark_dirty, set()
            for pair in dirty:
                self.tell(pair)

    def tell(self, pair: Pair) -> None:
        """Tell the peer what we have taken, and which calls we have done with, if that is new."""
        acknowledgement = pair.acknowledgement()
        if acknowledgement is not None or pair.taken != pair.told_taken:
            body = acknowledgement.pack() if acknowledgement is not None else b""
            self.send_bare(pair, Kind.CREDIT, body)

    # ------------------------------------------------------------ what came back

    def came_back(self, session: int, header: Header, *, full: bool) -> None:
        """The router could not hand on a message of ours: it has not been delivered.

        Args:
            full: the peer's queue in the router is full; else it cannot be reached.
        """
        with self._lock:
            pair = self.pairs.get(session)
            if pair is None or pair.lost is not None:
                return
            pair.returned(header.position)
            outgoing = find_outgoing(pair, header)
            if outgoing is None or outgoing.cancelled:
                self.pump(pair)
                return
            delay = RETRY_FULL if full else RETRY_UNREACHABLE
            self._call_at(self._clock() + delay, lambda: self._send_again(pair, outgoing, header))

    def _send_again(self, pair: Pair, outgoing: Outgoing, header: Header) -> None:
        with self._lock:
            if outgoing.cancelled or pair.lost is not None:
                return
            if header.kind == Kind.PIECE:
                if outgoing.started:
                    outgoing.again.append((header.index, header.offset))
                    if outgoing not in pair.streams:
                        pair.streams.append(outgoing)
            elif outgoing not in pair.outbox:
                if outgoing in pair.streams:
                    pair.streams.remove(outgoing)
                outgoing.restart()
                pair.outbox.append(outgoing)
            self.pump(pair)

    # ------------------------------------------------------------ probes

    def reconnected(self) -> None:
        """A connection of ours was made anew: what was under way on the old one may be lost."""
        with self._lock:
            for pair in self.pairs.values():
                # Also where nothing is known to be under way: its first call may be lost.
                self.probe(pair)

    def probe_old(self, age: float) -> None:
        """Ask after calls that have waited for ``age`` seconds, and were not asked after since."""
        with self._lock:
            before = self._clock() - age
            for pair in self.pairs.values():
                oldest = next(iter(pair.waiting.values()), None)
                if oldest is not None and max(oldest.started, pair.probed_at) < before:
                    self.probe(pair)

    def probe(self, pair: Pair, *, asked: bool = False) -> None:
        """Ask what became of our calls to this peer, until it answers (lock held).

        Args:
            asked: it wants to be asked; then it is not asked to ask back.
        """
        if pair.session == self.session or pair.lost is not None:
            return
        running = pair.probe_pause > 0
        pair.ask_back = not asked or (running and pair.ask_back)
        pair.probe_pause = probing.FIRST_PAUSE
        self._ask(pair)
        if not running:
            self._call_at(self._clock() + pair.probe_pause, lambda: self._ask_again(pair))

    def _ask(self, pair: Pair) -> None:
        pair.probed_at = self._clock()
        flags = Flag.ASK_BACK if pair.ask_back else 0
        for body in probing.questions(pair):
            self.send_bare(pair, Kind.PROBE, body, flags=flags)

    def _ask_again(self, pair: Pair) -> None:
        with self._lock:
            if not pair.probe_pause or pair.lost is not None or self.sockets.closed:
                pair.probe_pause = 0.0
                return
            self._ask(pair)
            pair.probe_pause = min(pair.probe_pause * 2, probing.LONGEST_PAUSE)
            self._call_at(self._clock() + pair.probe_pause, lambda: self._ask_again(pair))
