"""What arrives on the data channel, message by message.

Called by who sits in the reader's seat.  Marks, credit and state are :class:`~zrpc.pair.Pair`'s,
content is :class:`~zrpc.transfer.Assembly`'s; this decides which of them a message concerns,
and drops what breaks the protocol: counted, logged once a peer, nobody else disturbed.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from broker.protocol import (
    FULL,
    SESSION_SIZE,
    Acknowledgement,
    Flag,
    Header,
    Kind,
    ProtocolError,
    unpack_session,
)

from . import probing
from .pair import Pair, Served, Stage
from .pool import Work
from .transfer import Assembly, Outgoing

if TYPE_CHECKING:
    from .channel import DataChannel

logger = logging.getLogger(__name__)

#: Peers of whose bad messages the log tells.
REPORTED = 1000


class Events(Protocol):
    """What arrived, for the agent.  All are called without the lock held, by the reader."""

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


class Receiver:
    """Takes messages in.

    Args:
        channel: for what must be sent because of them.
        events: the agent.
        lock: the agent's lock.
    """

    def __init__(self, channel: DataChannel, events: Events, lock: threading.Lock) -> None:
        self._channel = channel
        self._events = events
        self._lock = lock
        self._complained: set[int] = set()
        self.dropped = 0

    def take_in(self, source: bytes, head: bytes, frames: list[Any]) -> Work | None:
        """One message; returns the work that it makes."""
        try:
            return self._take_in(source, head, frames)
        except ProtocolError as error:
            self._drop(source, str(error))
            return None

    def _drop(self, source: bytes, reason: str) -> None:
        self.dropped += 1
        session = unpack_session(source[-SESSION_SIZE:]) if len(source) >= SESSION_SIZE else 0
        if session not in self._complained and len(self._complained) < REPORTED:
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
            self._channel.came_back(unpack_session(source[1:]), header, full=source[:1] == FULL)
            return None
        if len(source) != SESSION_SIZE:
            raise ProtocolError("a source that is no session")
        session = unpack_session(source)
        kind = header.kind
        channel = self._channel
        with self._lock:
            if kind == Kind.ECHO:
                if session == channel.session:
                    channel.echoes.add(header.index)
                return None
            pair = channel.pairs.get(session)
            if pair is None:
                pair = channel.pair(session)
                self._events.stranger(pair)
            if pair.lost is not None:
                return None
            if pair.receive(header):
                channel.pump(pair)
            if header.flags & Flag.TELL:
                channel.tell(pair)
            if kind == Kind.CREDIT and header.offset and frames:
                pair.receive_acknowledgement(Acknowledgement.unpack(_bytes(frames[0])))
            if pair.forgotten_forks:
                self._events.forks_forgotten(pair)
            if kind == Kind.PROBE:
                self._answer(pair, header, frames)
        if kind == Kind.REQUEST:
            return self._take_request(pair, header, frames)
        if kind == Kind.REPLY:
            return self._take_reply(pair, header, frames)
        if kind == Kind.PIECE:
            return self._take_piece(pair, header, frames)
        if kind == Kind.STATE:
            self._take_state(pair, frames)
        return None

    def _take_request(self, pair: Pair, header: Header, frames: list[Any]) -> Work | None:
        assembly = Assembly(header, frames)
        with self._lock:
            served = pair.admit(header.call)
        # Also where it is a second copy, or nobody wants it any more: its references are then
        # dropped with it.  What has arrived of the first copy stays.
        if served is not None or assembly.has_references:
            self._events.message_arrived(assembly)
        if served is None:
            return None
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
            if header.call in pair.waiting and header.call not in pair.assemblies:
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
        assembly = served.assembly if served is not None else None
        if served is None or assembly is None:
            return None
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
            self._channel.note_ended(pair, sum(assembly.lengths) + assembly.header.offset)
        return self._events.reply_complete(pair, call, assembly)

    # ------------------------------------------------------------ probes

    def _answer(self, pair: Pair, header: Header, frames: list[Any]) -> None:
        """Say what became of the calls asked about, and send lost replies again (lock held)."""
        body, replies = probing.answer(pair, _bytes(frames[0]) if frames else b"\x90")
        for reply, pieces in replies:
            probing.send_again(pair, reply, pieces)
        # Not subject to credit, and before the replies: it repeats the positions.
        self._channel.send_bare(pair, Kind.STATE, body)
        if replies:
            self._channel.pump(pair)
        if header.flags & Flag.ASK_BACK and pair.waiting:
            self._channel.probe(pair, asked=True)

    def _take_state(self, pair: Pair, frames: list[Any]) -> None:
        told: list[tuple[int, int]] = []
        with self._lock:
            pair.probe_answered()
            for number, stage, missing in probing.read_answer(_bytes(frames[0])):
                call = pair.waiting.get(number)
                if call is None:
                    continue
                if call.expired:
                    told.append((number, stage))
                elif call.outgoing is not None:
                    if stage == 0:
                        probing.send_again(pair, call.outgoing, None)
                    elif missing:
                        probing.send_again(pair, call.outgoing, missing)
            self._channel.pump(pair)
            # The callee's credit: it may have lost what it sent, and waits for this.
            self._channel.tell(pair)
        for number, stage in told:
            self._events.stage_told(pair, number, stage)


def find_outgoing(pair: Pair, header: Header) -> Outgoing | None:
    """What a message that came back belongs to, if anybody still wants it."""
    if header.kind == Kind.REPLY or header.flags & Flag.OF_REPLY:
        served = pair.served.get(header.call)
        return served.reply if served is not None and served.stage == Stage.DONE else None
    if header.kind in (Kind.REQUEST, Kind.PIECE):
        call = pair.waiting.get(header.call)
        return call.outgoing if call is not None else None
    return None


def _bytes(frame: Any) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame.buffer)
