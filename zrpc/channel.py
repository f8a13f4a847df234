"""The data channel of one agent: its tx and rx sockets, and the pairs behind them.

Any thread sends, under the agent's lock, without ever blocking: what finds no credit or
no room in the socket waits in its pair's outbox and goes when the peer has taken more.
One thread at a time reads (:meth:`DataChannel.read` is the pool's reader).

This is the thin shell: what may be sent, what a message means and what is forgotten is
decided in :mod:`zrpc.pair` and :mod:`zrpc.transfer`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from broker.protocol import (
    FLAGS_LOW_BYTE,
    FULL,
    HEADER_SIZE,
    HIGH_WATER_MARK,
    MAX_FRAME_SIZE,
    SESSION_SIZE,
    Acknowledgement,
    Flag,
    Header,
    Kind,
    ProtocolError,
    charge,
    pack_session,
    unpack_session,
)

from .pair import TELL_MARK, Pair, Served, Stage
from .pool import PoolClosed, Work
from .transfer import Assembly, Outgoing

logger = logging.getLogger(__name__)

#: Seconds after which a message that came back is sent again.
RETRY_UNREACHABLE = 0.05
RETRY_FULL = 0.005
#: Seconds after which a moved mark is told by a message of its own.
MARK_DELAY = 0.1


class Events(Protocol):
    """What the channel tells its agent.  All are called without the lock held, by the reader."""

    def message_arrived(self, assembly: Assembly) -> None:
        """The first message of a request or reply is here (its references are to be taken)."""

    def request_complete(self, pair: Pair, served: Served, assembly: Assembly) -> Work | None:
        """A request is whole; returns the work that runs it."""

    def reply_complete(self, pair: Pair, call: Any, assembly: Assembly) -> Work | None:
        """A reply is whole; returns the work that completes its call, if it may block."""

    def stage_told(self, pair: Pair, number: int, stage: int) -> None:
        """The callee's answer to a probe: 0 unknown, else :class:`~zrpc.pair.Stage` + 1."""

    def forks_forgotten(self, pair: Pair) -> None:
        """The peer has done with replies that carried forks; the lock is held."""

    def stranger(self, pair: Pair) -> None:
        """A session that was not known has sent its first message; the lock is held."""


def apply_socket_options(socket: zmq.Socket[bytes]) -> None:
    """Set what ZeroMQ's defaults get wrong for us (see the design, section 8)."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 4000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_SIZE)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


class DataChannel:
    """Sockets and pairs.

    Args:
        events: the agent.
        lock: the agent's lock.
        call_at: runs a function on the service thread at a moment.
        window: credit towards one peer, bytes.
    """

    def __init__(
        self,
        events: Events,
        lock: threading.Lock,
        call_at: Callable[[float, Callable[[], None]], None],
        window: int,
    ) -> None:
        self._events = events
        self._lock = lock
        self._call_at = call_at
        self._window = window
        self.pairs: dict[int, Pair] = {}
        self.session = 0
        self._tx: list[zmq.Socket[bytes]] = []
        self._rx: zmq.Socket[bytes] | None = None
        self._closed = False
        self._echoes: set[int] = set()
        self._on_echo: Callable[[], None] | None = None
        self._mark_dirty: set[Pair] = set()
        self._mark_timer = False
        self._complained: set[int] = set()
        self._refused: Header | None = None  # what the socket did not take
        self.dropped = 0

    # ------------------------------------------------------------ sockets

    def open(
        self,
        context: zmq.Context[Any],
        session: int,
        endpoints: list[str],
        tx_ids: list[bytes],
        rx_id: bytes,
    ) -> None:
        """Connect to each data router under the routing ids of the welcome."""
        self.session = session
        for endpoint, identity in zip(endpoints, tx_ids, strict=True):
            tx = context.socket(zmq.DEALER)
            apply_socket_options(tx)
            tx.setsockopt(zmq.ROUTING_ID, identity)
            tx.connect(endpoint)
            self._tx.append(tx)
        self._rx = rx = context.socket(zmq.DEALER)
        apply_socket_options(rx)
        rx.setsockopt(zmq.ROUTING_ID, rx_id)
        for endpoint in endpoints:
            rx.connect(endpoint)

    def send_echoes(self) -> bool:
        """Send to ourselves through each router whose echo has not come back; True when all have."""
        with self._lock:
            missing = [i for i in range(len(self._tx)) if i not in self._echoes]
            for index in missing:
                header = Header(Kind.ECHO, index=index)
                try:
                    self._tx[index].send(pack_session(self.session), zmq.SNDMORE | zmq.NOBLOCK)
                    self._tx[index].send(header.pack(), zmq.NOBLOCK)
                except zmq.Again:
                    pass
        return not missing

    def close_tx(self) -> None:
        """Close the sending sockets; nothing is sent from then on."""
        with self._lock:
            self._closed = True
            for tx in self._tx:
                tx.close(0)

    def set_linger(self, milliseconds: int) -> None:
        """How long what has been sent may still take to leave after the close."""
        with self._lock:
            for tx in self._tx:
                if not tx.closed:
                    tx.setsockopt(zmq.LINGER, milliseconds)

    def close_rx(self) -> None:
        """Close the receiving socket; only by who sits in the reader's seat."""
        if self._rx is not None:
            self._rx.close(0)

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
                break
            if not self._transmit(pair, outgoing, *outgoing.next_message()):
                header = self._refused
                assert header is not None
                outgoing.again.insert(0, (header.index, header.offset))
                return
            streams.rotate(-1)

    def _transmit(
        self, pair: Pair, outgoing: Outgoing | None, header: Header, frames: list[Any], size: int
    ) -> bool:
        if self._closed or pair.lost is not None:
            self._refused = header
            return False
        pair.stamp(header, size)
        if outgoing is not None and outgoing.deadline is not None and header.kind == Kind.REQUEST:
            if pair.same_clock:
                header.flags |= Flag.SAME_CLOCK
                header.deadline = int(outgoing.deadline * 1e9)
            else:
                header.deadline = max(1, int((outgoing.deadline - time.monotonic()) * 1e9))
        tx = self._tx[pair.session % len(self._tx)]
        large = bool(header.flags & Flag.LARGE)
        try:
            tx.send(pair.wire_name, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            pair.position -= size
            self._refused = header
            self._call_at(time.monotonic() + RETRY_FULL, lambda: self._retry(pair))
            return False
        except zmq.ZMQError:
            pair.position -= size
            self._refused = header
            return False
        if not frames:
            tx.send(header.pack(), zmq.NOBLOCK)
            return True
        tx.send(header.pack(), zmq.SNDMORE | zmq.NOBLOCK)
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            # Without a copy only where it pays (pyzmq copies below its own threshold).
            tx.send(
                frame, zmq.NOBLOCK if index == last else zmq.SNDMORE | zmq.NOBLOCK, copy=not large
            )
        return True

    def send_bare(self, pair: Pair, header: Header) -> None:
        """Send a message of nothing but its header (lock held); lost if it cannot go now."""
        self._transmit(pair, None, header, [], charge(0, 0))

    def _retry(self, pair: Pair) -> None:
        with self._lock:
            self.pump(pair)

    # ------------------------------------------------------------ marks

    def note_ended(self, pair: Pair, freed: int) -> None:
        """A call of ours has ended (lock held): its callee may forget it, soon or at once."""
        pair.unacknowledged_bytes += freed
        if pair.unacknowledged_bytes >= TELL_MARK:
            self._tell(pair)
            return
        self._mark_dirty.add(pair)
        if not self._mark_timer:
            self._mark_timer = True
            self._call_at(time.monotonic() + MARK_DELAY, self._tell_marks)

    def _tell_marks(self) -> None:
        with self._lock:
            self._mark_timer = False
            dirty, self._mark_dirty = self._mark_dirty, set()
            for pair in dirty:
                self._tell(pair)

    def _tell(self, pair: Pair) -> None:
        acknowledgement = pair.acknowledgement()
        if acknowledgement is not None or pair.taken != pair.told_taken:
            body = acknowledgement.pack() if acknowledgement is not None else b""
            header = Header(Kind.CREDIT, offset=len(body))
            self._transmit(pair, None, header, [body], charge(1, len(body)))

    # ------------------------------------------------------------ receiving

    def read(self) -> list[Work]:
        """Take one message off the socket; returns the works that it makes.

        Raises:
            PoolClosed: the context has been terminated.
        """
        rx = self._rx
        assert rx is not None
        try:
            source = rx.recv()
            head = rx.recv() if rx.getsockopt(zmq.RCVMORE) else b""
            frames: list[Any] = []
            if head and rx.getsockopt(zmq.RCVMORE):
                large = len(head) == HEADER_SIZE and head[FLAGS_LOW_BYTE] & Flag.LARGE
                frames = rx.recv_multipart(0, not large)
        except zmq.ContextTerminated:
            raise PoolClosed from None
        except zmq.ZMQError:
            if rx.closed or self._closed:
                raise PoolClosed from None
            raise
        try:
            work = self._take_in(source, head, frames)
        except ProtocolError as error:
            self._drop(source, str(error))
            return []
        return [work] if work is not None else []

    def _drop(self, source: bytes, reason: str) -> None:
        self.dropped += 1
        session = unpack_session(source[-SESSION_SIZE:]) if len(source) >= SESSION_SIZE else 0
        if session not in self._complained and len(self._complained) < 1000:
            self._complained.add(session)
            logger.warning(
                "dropped a message of session %016x that breaks the protocol: %s "
                "(further ones of this session are counted, not logged)",
                session,
                reason,
            )

    def _take_in(self, source: bytes, head: bytes, frames: list[Any]) -> Work | None:
        header = Header.unpack(head)
        if len(source) == SESSION_SIZE + 1:
            self._came_back(source, header)
            return None
        if len(source) != SESSION_SIZE:
            raise ProtocolError("a source that is no session")
        session = unpack_session(source)
        kind = header.kind
        with self._lock:
            if kind == Kind.ECHO:
                if session == self.session:
                    self._echoes.add(header.index)
                return None
            pair = self.pairs.get(session)
            if pair is None:
                pair = self.pair(session)
                self._events.stranger(pair)
            if pair.lost is not None:
                return None
            if pair.receive(header):
                self.pump(pair)
            if pair.should_tell_taken:
                self._tell(pair)
            if kind == Kind.CREDIT and header.offset and frames:
                pair.receive_acknowledgement(Acknowledgement.unpack(_bytes(frames[0])))
            if pair.forgotten_forks:
                self._events.forks_forgotten(pair)
            if kind == Kind.CREDIT:
                return None
            if kind == Kind.PROBE:
                served = pair.served.get(header.call)
                stage = served.stage + 1 if served is not None else 0
                self.send_bare(pair, Header(Kind.STATE, index=stage, call=header.call))
                return None
        if kind == Kind.STATE:
            self._events.stage_told(pair, header.call, header.index)
            return None
        if kind == Kind.REQUEST:
            return self._take_request(pair, header, frames)
        if kind == Kind.REPLY:
            return self._take_reply(pair, header, frames)
        if kind == Kind.PIECE:
            return self._take_piece(pair, header, frames)
        return None

    def _take_request(self, pair: Pair, header: Header, frames: list[Any]) -> Work | None:
        assembly = Assembly(header, frames)
        with self._lock:
            served = pair.admit(header.call)
            if served is None:
                known = pair.served.get(header.call)
                if known is not None and known.stage == Stage.RECEIVING:
                    known.assembly = assembly  # the sender has begun again
                return None
        self._events.message_arrived(assembly)
        if assembly.complete:
            return self._events.request_complete(pair, served, assembly)
        served.assembly = assembly
        return None

    def _take_reply(self, pair: Pair, header: Header, frames: list[Any]) -> Work | None:
        assembly = Assembly(header, frames)
        # Also where it comes too late: its references are then dropped with it.
        self._events.message_arrived(assembly)
        if header.call not in pair.waiting:
            return None
        if assembly.complete:
            return self._complete_reply(pair, assembly)
        with self._lock:
            if header.call in pair.waiting:
                pair.assemblies[header.call] = assembly
        return None

    def _take_piece(self, pair: Pair, header: Header, frames: list[Any]) -> Work | None:
        if len(frames) != 1:
            raise ProtocolError(f"a piece of {len(frames)} frames")
        if header.flags & Flag.OF_REPLY:
            assembly = pair.assemblies.get(header.call)
            if assembly is None:
                return None
            assembly.add_piece(header, frames[0])
            return self._complete_reply(pair, assembly) if assembly.complete else None
        served = pair.served.get(header.call)
        if served is None or served.assembly is None:
            return None
        assembly = served.assembly
        assembly.add_piece(header, frames[0])
        if not assembly.complete:
            return None
        served.assembly = None
        return self._events.request_complete(pair, served, assembly)

    def _complete_reply(self, pair: Pair, assembly: Assembly) -> Work | None:
        with self._lock:
            call = pair.end_call(assembly.header.call)
            if call is None:
                return None
            self.note_ended(pair, sum(assembly.lengths) + assembly.header.offset)
        return self._events.reply_complete(pair, call, assembly)

    def _came_back(self, source: bytes, header: Header) -> None:
        session = unpack_session(source[1:])
        with self._lock:
            pair = self.pairs.get(session)
            if pair is None or pair.lost is not None:
                return
            pair.returned(header.position)
            outgoing = self._find_outgoing(pair, header)
            if outgoing is None or outgoing.cancelled:
                self.pump(pair)
                return
            delay = RETRY_FULL if source[:1] == FULL else RETRY_UNREACHABLE
            self._call_at(
                time.monotonic() + delay, lambda: self._send_again(pair, outgoing, header)
            )

    def _find_outgoing(self, pair: Pair, header: Header) -> Outgoing | None:
        of_reply = header.kind == Kind.REPLY or header.flags & Flag.OF_REPLY
        if of_reply:
            served = pair.served.get(header.call)
            return served.reply if served is not None else None
        if header.kind in (Kind.REQUEST, Kind.PIECE):
            call = pair.waiting.get(header.call)
            return call.outgoing if call is not None else None
        return None

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


def _bytes(frame: Any) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame.buffer)
