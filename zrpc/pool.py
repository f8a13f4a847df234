"""Threads that read and handle: leader and followers.

One thread at a time sits in the *reader's seat*: it blocks on the receiving socket and
takes in what comes.  When that is work that may block (a request, a future with
callbacks) it gives the seat to an idle thread and does the work itself, so a request
crosses no queue and wakes nobody for its own sake.  With nobody idle and no thread to
spare, the work is queued and the reader reads on: replies always flow.  A thread that
ends its work takes from the queue before it tries for the seat.

At most ``limit`` *counted* works (handlers) run at once; callbacks are not counted.  A
work that blocks in a nested wait says so (:meth:`HandlerPool.blocked`) and stands aside:
a spare thread takes its place, up to ``spares`` of them; past that the wait is refused
with :class:`~zrpc.errors.BusyError`, so a pool can run dry but never hang.

Threads start when they are needed and end when more are idle than the pool keeps.
They are daemons: a handler that never returns does not keep its process alive.

Rejected: a receiver thread that hands over everything (two more thread switches a
request: 60 us of 200 here); a pool of fixed size (a chain A->B->A as deep as the pool
is a deadlock).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .errors import BusyError

logger = logging.getLogger(__name__)


class PoolClosed(Exception):
    """Raised by the pool's ``read`` when there will be nothing more to read."""


class Work:
    """Something to run on a pool thread.

    Args:
        run: what to do; an exception out of it is logged.
        counted: True for a handler (bounded by the pool's limit), False for a callback.
    """

    __slots__ = ("counted", "run")

    def __init__(self, run: Callable[[], Any], counted: bool) -> None:
        self.run = run
        self.counted = counted


class _Local(threading.local):
    pool: HandlerPool | None = None
    work: Work | None = None
    aside = False  # it is in blocked() already


_local = _Local()


def on_pool_thread() -> bool:
    """Is the calling thread running a pool's work?"""
    return _local.work is not None


class HandlerPool:
    """Reader's seat, handlers and callbacks of one agent.

    Args:
        read: blocks for one message, returns the works that it makes (often none);
            raises :class:`PoolClosed` at the end.  Only one thread is in it at a time.
        limit: handlers that may run at once.
        spares: threads that may stand in for blocked ones.
        name: prefix of the threads' names.
        closed: called once, by the thread that held the seat last.
    """

    def __init__(
        self,
        read: Callable[[], list[Work]],
        limit: int,
        *,
        spares: int = 256,
        name: str = "zrpc",
        closed: Callable[[], None] | None = None,
    ) -> None:
        self.limit = limit
        self.spares = spares
        self._read = read
        self._on_closed = closed
        self._name = name
        self._lock = threading.Lock()
        self._handlers: deque[Work] = deque()
        self._callbacks: deque[Work] = deque()
        self._sleepers: list[threading.Lock] = []
        self._threads: set[threading.Thread] = set()
        self._seated = False
        self._closing = False
        self._running = 0  # counted works that run, blocked ones apart
        self._apart = 0  # blocked works and callbacks: threads beyond the limit
        self._blocked = 0
        self._number = 0

    # ------------------------------------------------------------ from outside

    def start(self) -> None:
        """Put a first thread in the seat."""
        with self._lock:
            self._wake_one()

    def submit(self, run: Callable[[], Any], *, counted: bool = False) -> None:
        """Run something on a pool thread; a callback unless ``counted``."""
        work = Work(run, counted)
        with self._lock:
            self._enqueue(work)
            self._wake_one()

    @property
    def counts(self) -> dict[str, int]:
        """Threads, handlers running, waiting and blocked, for status documents."""
        with self._lock:
            return {
                "threads": len(self._threads),
                "running": self._running + self._blocked,
                "queued": len(self._handlers),
                "blocked": self._blocked,
                "idle": max(0, self.limit - self._running),
            }

    @property
    def busy(self) -> bool:
        """Is any work running or waiting (other than the calling thread's own)?"""
        mine = 1 if _local.pool is self and _local.work is not None else 0
        with self._lock:
            return self._running + self._apart + len(self._handlers) + len(self._callbacks) > mine

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Stand aside while this thread's work waits for another call.

        Raises:
            BusyError: so many works are blocked that no thread is left to stand in.
        """
        work = _local.work if _local.pool is self and not _local.aside else None
        if work is None:
            yield
            return
        with self._lock:
            if self._blocked >= self.spares:
                raise BusyError(
                    f"This worker has {self._blocked} handlers and callbacks blocked in nested calls, "
                    f"the most it has threads for ({self.spares}); the call was not made. "
                    "Use rpc_async with callbacks or functions.async_execution for such deep chains."
                )
            self._blocked += 1
            if work.counted:
                self._running -= 1
                self._apart += 1
            self._wake_one()
        _local.aside = True
        try:
            yield
        finally:
            _local.aside = False
            with self._lock:
                self._blocked -= 1
                if work.counted:
                    self._running += 1
                    self._apart -= 1

    def close(self, timeout: float) -> list[str]:
        """Wait up to ``timeout`` seconds for the threads to end; returns names of those still running.

        ``read`` must already be raising :class:`PoolClosed`.
        """
        with self._lock:
            self._closing = True
            self._handlers.clear()
            alone = not self._seated
            self._seated = True
            self._release_all()
            threads = [t for t in self._threads if t is not threading.current_thread()]
        if alone and self._on_closed:
            self._on_closed()
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    # ------------------------------------------------------------ inside, under the lock

    def _enqueue(self, work: Work) -> None:
        if work.counted:
            if not self._closing:
                self._handlers.append(work)
        else:
            self._callbacks.append(work)

    def _take(self) -> Work | None:
        if self._callbacks:
            self._apart += 1
            return self._callbacks.popleft()
        if self._handlers and self._running < self.limit:
            self._running += 1
            return self._handlers.popleft()
        return None

    def _has_task(self) -> bool:
        if self._closing:
            return bool(self._callbacks)
        return (
            not self._seated
            or bool(self._callbacks)
            or (bool(self._handlers) and self._running < self.limit)
        )

    def _wake_one(self) -> bool:
        """If there is something to do and nobody for it, wake or start a thread."""
        if not self._has_task():
            return False
        if self._sleepers:
            self._sleepers.pop().release()
            return True
        # More than the limit may run: a handler that was blocked goes on without asking.
        running = max(self.limit, self._running)
        if len(self._threads) > running + self._apart + len(self._callbacks):
            return False
        if len(self._threads) > running + 1 + self.spares:
            return False
        self._number += 1
        thread = threading.Thread(
            target=self._run, name=f"{self._name}-{self._number}", daemon=True
        )
        self._threads.add(thread)
        thread.start()
        return True

    def _release_all(self) -> None:
        while self._sleepers:
            self._sleepers.pop().release()

    # ------------------------------------------------------------ the threads

    def _run(self) -> None:
        _local.pool = self
        me = threading.current_thread()
        work: Work | None = None
        gate = threading.Lock()
        gate.acquire()
        while True:
            with self._lock:
                if work is not None:
                    if work.counted:
                        self._running -= 1
                    else:
                        self._apart -= 1
                work = self._take()
                seat = False
                if work is None:
                    if self._closing and not self._callbacks:
                        self._threads.discard(me)
                        return
                    if not self._seated:
                        self._seated = seat = True
                    elif len(self._sleepers) > self.limit:
                        self._threads.discard(me)
                        return
                    else:
                        self._sleepers.append(gate)
                elif not self._seated and not self._closing:
                    self._wake_one()
            if work is None and seat:
                work = self._sit()
            elif work is None:
                gate.acquire()
                continue
            if work is not None:
                self._perform(work)

    def _sit(self) -> Work | None:
        """Read until there is work for this very thread and somebody else for the seat."""
        while True:
            try:
                works = self._read()
            except PoolClosed:
                with self._lock:
                    self._closing = True
                    self._release_all()
                if self._on_closed:
                    self._on_closed()
                return None
            except Exception:
                logger.exception("the reader met an error that it did not expect and goes on")
                continue
            if not works:
                continue
            with self._lock:
                for work in works:
                    self._enqueue(work)
                if not self._callbacks and not (self._handlers and self._running < self.limit):
                    continue
                self._seated = False
                if self._wake_one():
                    return self._take()
                self._seated = True

    def _perform(self, work: Work) -> None:
        _local.work = work
        try:
            work.run()
        except BaseException:
            logger.exception("work on a pool thread ended with an error that nothing caught")
        finally:
            _local.work = None
