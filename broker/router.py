"""The data router: look up, swap, send.

It unpacks nothing but the size and the version byte of a header, and keeps no queue.
Its table is set by the control side.  A message that cannot be handed on goes back to
its sender with a mark; one that breaks the protocol is dropped, counted, and logged
once a peer.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import Any

import zmq

from .protocol import (
    FLAGS_LOW_BYTE,
    FULL,
    HEADER_SIZE,
    MAX_FRAMES,
    PROTOCOL_MAXIMUM,
    PROTOCOL_MINIMUM,
    SESSION_SIZE,
    UNREACHABLE,
    Flag,
    pack_session,
)

logger = logging.getLogger(__name__)

#: Peers of whose bad messages the log has told.
REPORTED = 1000
_LARGE = int(Flag.LARGE)
_MORE = zmq.SNDMORE | zmq.NOBLOCK


class Router:
    """Routes between the sessions in its table.

    Args:
        socket: a bound ROUTER with ROUTER_MANDATORY; or None, to be set later.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.messages = 0
        self.bytes = 0
        self.returned = 0
        self.dropped: Counter[str] = Counter()
        self._sessions: dict[bytes, bytes] = {}  # tx id -> session
        self._receivers: dict[bytes, bytes] = {}  # session -> rx id
        self._senders: dict[bytes, bytes] = {}  # session -> tx id
        self._reported: OrderedDict[bytes, None] = OrderedDict()

    def set_routes(self, session: int, tx: bytes, rx: bytes) -> None:
        """Let a session send from ``tx`` and receive at ``rx``."""
        name = pack_session(session)
        self._sessions[tx] = name
        self._senders[name] = tx
        self._receivers[name] = rx

    def remove_routes(self, session: int) -> None:
        """Cut a session off."""
        name = pack_session(session)
        self._receivers.pop(name, None)
        tx = self._senders.pop(name, None)
        if tx is not None:
            self._sessions.pop(tx, None)

    def drain(self, limit: int) -> bool:
        """Route up to ``limit`` messages; True if there may be more."""
        socket = self.socket
        receive = socket.recv
        more = socket.getsockopt
        sessions, receivers = self._sessions, self._receivers
        for _ in range(limit):
            try:
                sender = receive(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if not more(zmq.RCVMORE):
                self._drop(sender, "a message of one frame")
                continue
            destination = receive()
            if not more(zmq.RCVMORE):
                self._drop(sender, "a message of two frames")
                continue
            header = receive()
            frames: list[Any] = []
            if more(zmq.RCVMORE):
                large = len(header) == HEADER_SIZE and header[FLAGS_LOW_BYTE] & _LARGE
                frames = socket.recv_multipart(0, not large)
            source = sessions.get(sender)
            if source is None:
                self._drop(sender, "a routing id that no session has")
                continue
            if (
                len(header) != HEADER_SIZE
                or not PROTOCOL_MINIMUM <= header[0] <= PROTOCOL_MAXIMUM
                or len(destination) != SESSION_SIZE
                or len(frames) > MAX_FRAMES
            ):
                self._drop(sender, "a header, destination or frame count that is not ours")
                continue
            target = receivers.get(destination)
            if target is None:
                self._return(source, UNREACHABLE, destination, header)
                continue
            try:
                socket.send(target, _MORE)
            except zmq.Again:
                self._return(source, FULL, destination, header)
                continue
            except zmq.ZMQError:
                self._return(source, UNREACHABLE, destination, header)
                continue
            socket.send(source, _MORE)
            if not frames:
                socket.send(header, zmq.NOBLOCK)
            else:
                socket.send(header, _MORE)
                size = 0
                last = frames.pop()
                for frame in frames:
                    size += len(frame)
                    socket.send(frame, _MORE, copy=False)
                size += len(last)
                socket.send(last, zmq.NOBLOCK, copy=False)
                self.bytes += size
            self.messages += 1
        return True

    def _return(self, source: bytes, mark: bytes, destination: bytes, header: bytes) -> None:
        """Back to its sender: it has not been delivered."""
        self.returned += 1
        target = self._receivers.get(source)
        if target is None:
            return
        try:
            self.socket.send_multipart([target, mark + destination, header], zmq.NOBLOCK)
        except zmq.ZMQError:
            # Its sender cannot be reached either; a probe will tell it.
            self.dropped["a sender that cannot be reached"] += 1

    def _drop(self, sender: bytes, reason: str) -> None:
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv()
        self.dropped[reason] += 1
        if sender not in self._reported:
            self._reported[sender] = None
            if len(self._reported) > REPORTED:
                self._reported.popitem(last=False)
            logger.warning(
                "dropped a data message: %s (peer %s; further ones of it are counted, not logged)",
                reason,
                sender.hex()[:8],
            )

    def snapshot(self) -> dict[str, Any]:
        """Counters, for the status document."""
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "returned": self.returned,
            "dropped": dict(self.dropped),
        }
