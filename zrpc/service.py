"""The service thread: one thread for control messages, timers and finalisers.

It owns the control DEALER; nobody else touches that socket.  Any thread may

* ``post`` a control message (it goes out in the order of posting),
* ``request`` something of the broker and wait for the answer, or ``ask`` with a callback,
* ``call_at`` a moment: the work runs here, so it must be short and must not block.

The thread sleeps until a message, a wake-up byte, or the next timer.  A wake-up is
written only where it would sleep past what is new: a call whose deadline lies behind
the one already slept for costs no system call at all.

Rejected: an inproc socket pair as wake-up (four times the price of a byte in a socket
pair, and one more thing that ``term`` waits for); a lock around the control socket (a
poll in one thread and a send in another is undefined in libzmq).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from broker import messages
from broker.messages import Message
from broker.protocol import ProtocolError

from .errors import BrokerLostError, RpcError, RpcTimeoutError

logger = logging.getLogger(__name__)


class RequestFailed(Exception):
    """The broker answered a request with a failure."""

    def __init__(self, failure: messages.Failure) -> None:
        super().__init__(failure.text)
        self.code = failure.code
        self.names = failure.names


class Service:
    """One agent's service thread.

    Args:
        control: the control DEALER, connected; owned by the thread from ``start`` on.
        on_message: called with each control message that answers no request.
        on_wake: called in every pass with the current monotonic time; returns the next
            moment at which it wants to be called again, or None.
        name: the thread's name.
    """

    def __init__(
        self,
        control: zmq.Socket[bytes],
        *,
        on_message: Callable[[Message], None],
        on_wake: Callable[[float], float | None],
        name: str = "zrpc-service",
    ) -> None:
        self._control = control
        self._on_message = on_message
        self._on_wake = on_wake
        self._outgoing: deque[bytes] = deque()
        self._requests: dict[int, Callable[[Any, Exception | None], None]] = {}
        self._asked: dict[int, Message] = {}
        self._numbers = itertools.count(1)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._sleeping_until = 0.0
        self._woken = False
        #: The interpreter ends: threads that wait for an answer end with it.
        self.exiting = False
        self._failure: BaseException | None = None
        self._extra: dict[int, Callable[[], None]] = {}
        self._sockets: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._new_sockets: deque[tuple[zmq.Socket[bytes], Callable[[], None]]] = deque()
        self._over = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    # ------------------------------------------------------------ from any thread

    def wake(self, moment: float = 0.0) -> None:
        """Make the thread look again before ``moment`` (monotonic seconds; 0: at once)."""
        if self._woken:
            return
        until = self._sleeping_until
        if until and moment >= until:
            return
        # The flag first, then the look: either we see it asleep, or it sees the flag.
        self._woken = True
        if self._sleeping_until:
            # Full: it has bytes to read already.  Closed: it has ended.
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    def post(self, message: Message) -> None:
        """Send a control message, after those posted before."""
        self._outgoing.append(messages.encode(message))
        self.wake()

    def ask(
        self, build: Callable[[int], Message], done: Callable[[Any, Exception | None], None]
    ) -> int:
        """Send a request; ``done(value, error)`` runs on the service thread.

        Args:
            build: makes the message of the request's number.
        """
        number = next(self._numbers)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._requests[number] = done
        if failure is not None:
            done(None, _as_error(failure))
        else:
            message = build(number)
            self._asked[number] = message
            self.post(message)
        return number

    def ask_again(self) -> None:
        """Send all open requests again: the broker that heard them is gone."""
        with self._lock:
            open_requests = [self._asked[n] for n in sorted(self._asked) if n in self._requests]
        for message in open_requests:
            self.post(message)

    def request(self, build: Callable[[int], Message], timeout: float | None, what: str) -> Any:
        """Send a request and wait for the answer.

        Args:
            timeout: seconds, None for no limit.
            what: for the error text: "resolve worker 'w1'".

        Raises:
            RequestFailed: the broker said no.
            RpcTimeoutError: no answer came.
            BrokerLostError: the agent has lost its broker.
        """
        if threading.current_thread() is self.thread:
            raise RuntimeError("a request from the service thread would wait for itself")
        gate = threading.Lock()
        gate.acquire()
        result: list[Any] = [None, None]

        def done(value: Any, error: Exception | None) -> None:
            result[:] = value, error
            gate.release()

        number = self.ask(build, done)
        try:
            answered = gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            with self._lock:
                self._requests.pop(number, None)
                self._asked.pop(number, None)
        if not answered:
            raise RpcTimeoutError(
                f"The broker did not answer within {timeout:g} s when asked to {what}. "
                "Check that it runs (zrpc status) and can be reached.",
                elapsed=timeout,
                limit=timeout,
            )
        if result[1] is not None:
            raise result[1]
        return result[0]

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run ``work`` on the service thread at ``moment`` (monotonic seconds)."""
        with self._lock:
            heapq.heappush(self._timers, (moment, next(self._numbers), work))
        self.wake(moment)

    def watch_descriptor(self, descriptor: int, work: Callable[[], None]) -> None:
        """Run ``work`` once on the service thread when ``descriptor`` becomes readable."""

        def add() -> None:
            self._extra[descriptor] = work

        self.call_at(0.0, add)

    def watch_socket(self, socket: zmq.Socket[bytes], work: Callable[[], None]) -> None:
        """Run ``work`` on the service thread whenever ``socket`` can be read.

        The socket belongs to that thread from now on, which closes it at the end.
        """
        with self._lock:
            if not self._over:
                self._new_sockets.append((socket, work))
                socket = None  # type: ignore[assignment]
        if socket is not None:
            socket.close(0)
        self.wake()

    def post_all(self, several: list[Message]) -> None:
        """Send control messages with no other between them."""
        self._outgoing.extend([messages.encode(message) for message in several])
        self.wake()

    def fail_requests(self, error: BaseException) -> None:
        """End all open requests, and those to come, with ``error``."""
        if self.exiting:
            return
        with self._lock:
            self._failure = error
            requests = list(self._requests.values())
            self._requests.clear()
        for done in requests:
            done(None, _as_error(error))

    def is_current(self) -> bool:
        """Is the calling thread the service thread?"""
        return threading.current_thread() is self.thread

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._reader, zmq.POLLIN)
        registered: set[int] = set()
        control = self._control
        try:
            while True:
                self._woken = False
                self._send_all()
                now = time.monotonic()
                wake = self._on_wake(now)
                timer = self._run_timers(now)
                self._send_all()
                for descriptor in self._extra.keys() - registered:
                    poller.register(descriptor, zmq.POLLIN)
                    registered.add(descriptor)
                while self._new_sockets:
                    socket, work = self._new_sockets.popleft()
                    self._sockets[socket] = work
                    poller.register(socket, zmq.POLLIN)
                moments = [moment for moment in (wake, timer) if moment is not None]
                until = min(moments) if moments else float("inf")
                self._sleeping_until = until
                if self._outgoing or self._woken:
                    self._sleeping_until = 0.0
                    continue
                delay = None if until == float("inf") else max(0.0, until - time.monotonic()) * 1000
                events = dict(poller.poll(None if delay is None else int(delay + 0.999)))
                self._sleeping_until = 0.0
                if self._reader.fileno() in events:
                    self._drain_wakes()
                # Control first: it may say why a watched process is about to end.
                if control in events:
                    self._receive_all()
                for socket, work in list(self._sockets.items()):
                    if socket in events:
                        self._guard(work)
                for descriptor in list(self._extra):
                    if descriptor in events:
                        poller.unregister(descriptor)
                        registered.discard(descriptor)
                        self._guard(self._extra.pop(descriptor))
        except zmq.ContextTerminated:
            pass
        except zmq.ZMQError as error:
            if error.errno not in (zmq.ETERM, zmq.ENOTSOCK):
                logger.exception("the service thread's socket failed")
        except Exception:
            logger.exception("the service thread ended with an error that it did not expect")
        finally:
            control.close(0)
            with self._lock:
                self._over = True
            for socket in (*self._sockets, *(new for new, _ in self._new_sockets)):
                socket.close(0)
            self._reader.close()
            self._writer.close()
            self.fail_requests(
                self._failure
                or BrokerLostError("The agent has been shut down; nothing can be asked.")
            )

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def _send_all(self) -> None:
        while self._outgoing:
            try:
                self._control.send(self._outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                self.call_at(time.monotonic() + 0.05, lambda: None)
                return
            self._outgoing.popleft()

    def _receive_all(self) -> None:
        for _ in range(1000):
            try:
                data = self._control.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode(data)
            except ProtocolError as error:
                logger.warning("a control message of the broker was not understood: %s", error)
                continue
            self._guard(lambda message=message: self._handle(message))  # type: ignore[misc]

    def _handle(self, message: Message) -> None:
        if isinstance(message, (messages.Answer, messages.Failure)):
            with self._lock:
                done = self._requests.pop(message.request, None)
                self._asked.pop(message.request, None)
            if done is None:
                return
            if isinstance(message, messages.Answer):
                done(message.value, None)
            else:
                done(None, RequestFailed(message))
            return
        self._on_message(message)

    def _run_timers(self, now: float) -> float | None:
        while True:
            with self._lock:
                if not self._timers:
                    return None
                if self._timers[0][0] > now:
                    return self._timers[0][0]
                _, _, work = heapq.heappop(self._timers)
            self._guard(work)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (zmq.ContextTerminated, zmq.ZMQError):
            raise
        except Exception:
            logger.exception("the service thread met an error that it did not expect and goes on")


def _as_error(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RpcError(str(error))
