"""The data sockets of one agent: a tx DEALER for each router, and one rx DEALER. No logic.

Sending is for any thread, under the agent's lock; receiving for who sits in the reader's
seat.  Each socket has a monitor: a connection that was made anew is a hint that messages
may have been lost on the old one (:func:`monitor`).

Heartbeats on data only find a connection that is dead without saying so.  Their timeout
is long, since the answer to a ping may stand behind a frame of 4 MiB on a slow line.  What
the kernel can find (nobody acknowledges what we sent), it finds earlier: TCP_MAXRT.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from typing import Any

import zmq

from broker.protocol import (
    FLAGS_LOW_BYTE,
    HEADER_SIZE,
    HIGH_WATER_MARK,
    MAX_FRAME_SIZE,
    Flag,
)

from .pool import PoolClosed

#: A dead data connection is found within so many heartbeat timeouts.
DATA_PATIENCE = 5.0

_monitor_numbers = itertools.count()


class Sent(enum.Enum):
    """What became of a send."""

    OK = 0
    FULL = 1
    CLOSED = 2


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


def apply_heartbeat(socket: zmq.Socket[bytes], interval: float, timeout: float) -> None:
    """Let libzmq find a connection that is dead without saying so.

    Args:
        interval: seconds between pings.
        timeout: seconds without an answer.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(interval * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout * 1000)))
    with contextlib.suppress(zmq.ZMQError):  # not on every system
        socket.setsockopt(zmq.TCP_MAXRT, max(1, int(timeout * 1000)))


def monitor(context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket on which each completed handshake of ``socket`` can be received.

    Before ``socket`` connects.  Whoever receives must close it, or ``term()`` hangs.
    """
    address = f"inproc://zrpc-monitor-{next(_monitor_numbers)}"
    socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    events.connect(address)
    return events


def drain_monitor(events: zmq.Socket[bytes]) -> int:
    """How many handshakes there were since the last call."""
    count = 0
    while True:
        try:
            events.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return count
        count += 1


class DataSockets:
    """The sockets; nothing works before :meth:`open`."""

    def __init__(self) -> None:
        self._tx: list[zmq.Socket[bytes]] = []
        self._rx: zmq.Socket[bytes] | None = None
        self.closed = False

    def open(
        self,
        context: zmq.Context[Any],
        endpoints: list[str],
        tx_ids: list[bytes],
        rx_id: bytes,
        heartbeat: float,
    ) -> list[zmq.Socket[bytes]]:
        """Connect to each router under the routing ids of the welcome; returns the monitors."""
        monitors = []
        for endpoint, identity in zip(endpoints, tx_ids, strict=True):
            tx = self._socket(context, identity, heartbeat)
            self._tx.append(tx)
            monitors.append(monitor(context, tx))
            tx.connect(endpoint)
        self._rx = rx = self._socket(context, rx_id, heartbeat)
        monitors.append(monitor(context, rx))
        for endpoint in endpoints:
            rx.connect(endpoint)
        return monitors

    def _socket(
        self, context: zmq.Context[Any], identity: bytes, heartbeat: float
    ) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        apply_socket_options(socket)
        apply_heartbeat(socket, heartbeat, heartbeat * DATA_PATIENCE)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        return socket

    @property
    def routers(self) -> int:
        """How many routers there are."""
        return len(self._tx)

    # ------------------------------------------------------------ sending (lock held)

    def send(
        self, router: int, destination: bytes, header: bytes, frames: list[Any], large: bool
    ) -> Sent:
        """Send one message, all of it or nothing."""
        if self.closed:
            return Sent.CLOSED
        tx = self._tx[router]
        try:
            tx.send(destination, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError:
            return Sent.CLOSED
        if not frames:
            tx.send(header, zmq.NOBLOCK)
            return Sent.OK
        tx.send(header, zmq.SNDMORE | zmq.NOBLOCK)
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            # Without a copy only where it pays (pyzmq copies below its own threshold).
            tx.send(
                frame, zmq.NOBLOCK if index == last else zmq.SNDMORE | zmq.NOBLOCK, copy=not large
            )
        return Sent.OK

    def close_tx(self) -> None:
        """Close the sending sockets; nothing is sent from then on."""
        self.closed = True
        for tx in self._tx:
            tx.close(0)

    def set_linger(self, milliseconds: int) -> None:
        """How long what has been sent may still take to leave after the close."""
        for tx in self._tx:
            if not tx.closed:
                tx.setsockopt(zmq.LINGER, milliseconds)

    # ------------------------------------------------------------ receiving (in the seat)

    def receive(self) -> tuple[bytes, bytes, list[Any]]:
        """Wait for one message: its source, its header, its other frames.

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
            if rx.closed or self.closed:
                raise PoolClosed from None
            raise
        return source, head, frames

    def close_rx(self) -> None:
        """Close the receiving socket; only by who sits in the reader's seat."""
        if self._rx is not None:
            self._rx.close(0)
