"""Futures: torch's, with waits that end.

:class:`Future` is a ``torch.futures.Future``, so that whatever takes one takes ours.  It
differs where torch's own cannot be used:

* ``wait`` takes a timeout and lets Ctrl-C through (torch's blocks in C, uninterruptibly);
* an error is raised as the very exception that was set, in ``wait`` and in callbacks;
* callbacks run where the agent says (its pool), never in the thread that reads the
  socket, which must not block;
* it can be awaited, and cancelled.

The value is kept here *and* in the C++ future below, since torch's own functions
(``torch.futures.wait_all``, ``collect_all``) read it there; the C++ side is completed after
our own waiters have been woken.

Waiters are locks made by those who wait: a future that is done before anybody waits for
it allocates none.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, NoReturn, TypeVar

import torch

from . import errors

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")
_Base = torch.futures.Future
_Native: Any = torch._C.Future
Executor = Callable[[Callable[[], Any]], Any]


class Future(_Base, Generic[T]):  # type: ignore[type-arg]
    """The result of a call that has not come yet.

    Args:
        executor: runs callbacks; default: the thread that completes the future, or the
            one that adds a callback to a future that is done.
        before_wait: makes a context manager for the time of a blocking wait.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        before_wait: Callable[[Future[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._executor = executor
        self._before_wait = before_wait
        self._mutex = threading.Lock()
        self._state = 0  # 0 pending, 1 value, 2 error
        self._result: Any = None
        self._waiters: list[Any] = []
        self._callbacks: list[Callable[[Future[T]], Any]] = []
        #: Called by :meth:`cancel`; ends the call and returns its error.
        self.on_cancel: Callable[[], BaseException | None] | None = None
        #: Whose call it is the result of, for error texts.
        self.worker: str | None = None
        self.function: str | None = None

    # ------------------------------------------------------------ completing

    def complete(self, value: T) -> None:
        """Set the value.

        Raises:
            RuntimeError: the future is done already.
        """
        self._settle(1, value)

    def fail(self, error: BaseException) -> None:
        """Set the exception that waits will raise.

        Raises:
            RuntimeError: the future is done already.
        """
        self._settle(2, error)

    def set_result(self, result: T) -> None:
        """torch's name for :meth:`complete`."""
        self._settle(1, result)

    def set_exception(self, result: BaseException) -> None:
        """torch's name for :meth:`fail`."""
        if not isinstance(result, BaseException):
            raise AssertionError(f"{result!r} is of type {type(result)}, not an Exception.")
        self._settle(2, result)

    def _settle(self, state: int, result: Any) -> None:
        with self._mutex:
            if self._state:
                raise RuntimeError("This future is done already; its result can be set once only.")
            self._result = result
            self._state = state
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
            # It leads to the call, and that back to us: left there, the value (and an RRef in
            # it) would live until the garbage collector comes by.
            self.on_cancel = None
        for waiter in waiters:
            waiter.release()
        if callbacks:
            self._run(callbacks)
        # Straight to the C++ class: torch's set_exception calls set_result, which is ours.
        if state == 2:
            _Native._set_unwrap_func(self, _raise)
        _Native.set_result(self, result)

    def _run(self, callbacks: list[Callable[[Future[T]], Any]]) -> None:
        for callback in callbacks:
            if self._executor is None:
                try:
                    callback(self)
                except Exception:
                    # As in torch: the others run, and whoever waits gets the result.
                    logger.exception("a callback of a future raised an exception")
            else:
                self._executor(functools.partial(callback, self))

    # ------------------------------------------------------------ looking

    def done(self) -> bool:
        """Is the result there (a value or an error)?"""
        return self._state != 0

    @property
    def has_callbacks(self) -> bool:
        """Does anything run when it is completed?"""
        return bool(self._callbacks)

    def value(self) -> T:
        """The value of a future that is done.

        Raises:
            RuntimeError: it is not done.
            BaseException: its error.
        """
        if self._state == 1:
            return self._result  # type: ignore[no-any-return]
        if self._state == 2:
            raise self._result
        raise RuntimeError("This future is not done: wait() for it first.")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error, or None where there is a value.

        Raises:
            RpcTimeoutError: not done within ``timeout`` seconds.
        """
        self._await(timeout)
        return self._result if self._state == 2 else None

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the value and return it.

        Args:
            timeout: seconds; None for no limit (the call itself has one).

        Raises:
            RpcTimeoutError: it is not there in time.  The call goes on; wait again if you like.
            BaseException: what the call raised.
        """
        self._await(timeout)
        if self._state == 2:
            raise self._result
        return self._result  # type: ignore[no-any-return]

    def _await(self, timeout: float | None) -> None:
        if self._state:
            return
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout is {timeout!r}; it must be 0 or more seconds, or None.")
        gate = threading.Lock()
        gate.acquire()
        with self._mutex:
            if self._state:
                return
            self._waiters.append(gate)
        context = (
            self._before_wait(self) if self._before_wait is not None else contextlib.nullcontext()
        )
        try:
            with context:
                # A lock of Python's: signals get through, other threads run.
                woken = gate.acquire(
                    timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
                )
        finally:
            with self._mutex:
                if gate in self._waiters:
                    self._waiters.remove(gate)
        if not woken and not self._state:
            assert timeout is not None
            raise errors.wait_timed_out(timeout, worker=self.worker, function=self.function)

    # ------------------------------------------------------------ callbacks

    def add_done_callback(self, callback: Callable[[Future[T]], Any]) -> None:
        """Call ``callback(self)`` when it is done; at once where it is.

        With an executor (futures of calls) it runs there, else in the completing thread.
        """
        with self._mutex:
            if not self._state:
                self._callbacks.append(callback)
                return
        self._run([callback])

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of what ``callback(self)`` returns, once this one is done.

        An exception of the callback is that future's error.
        """
        chained: Future[S] = Future(self._executor, self._before_wait)

        def run(done: Future[T]) -> None:
            try:
                value = callback(done)
            except BaseException as error:
                if not chained.done():
                    chained.fail(error)
            else:
                if not chained.done():
                    chained.complete(value)

        self.add_done_callback(run)
        return chained

    # ------------------------------------------------------------ cancelling, asyncio

    def cancel(self) -> bool:
        """Give the call up; waits then raise :class:`~zrpc.CallCancelledError`.

        The callee is told.  Returns False if it was done already.
        """
        with self._mutex:
            if self._state:
                return False
            on_cancel = self.on_cancel
        error = on_cancel() if on_cancel is not None else None
        with contextlib.suppress(RuntimeError):  # its result came in the same moment
            self.fail(error or errors.call_cancelled(self.worker, self.function))
        return self.cancelled()

    def _cancel_with(self, error: BaseException) -> None:
        """End the call as :meth:`cancel` does, with an error of one's own."""
        with self._mutex:
            if self._state:
                return
            on_cancel = self.on_cancel
        with contextlib.suppress(RuntimeError):
            self.fail(error)
        if on_cancel is not None:
            on_cancel()

    def cancelled(self) -> bool:
        """Was it ended by :meth:`cancel`?"""
        error = self._result if self._state == 2 else None
        return isinstance(error, errors.CallCancelledError) and not error.remote

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def done(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(wake)

        # Not over the executor: waking a loop blocks nothing.
        with self._mutex:
            pending = not self._state
            if pending:
                self._waiters.append(_Waker(done))
        if pending:
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.value()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("Can not pickle torch.futures.Future")


def _raise(error: BaseException) -> NoReturn:
    raise error


class _Waker:
    """Stands among the waiters for an event loop."""

    def __init__(self, wake: Callable[[Any], None]) -> None:
        self._wake = wake

    def release(self) -> None:
        self._wake(None)


def wait_all(futures: Iterable[Any], timeout: float | None = None) -> list[Any]:
    """Wait for all and return their values, in order.

    Raises the first error as soon as it comes, without waiting for the others.

    Args:
        futures: ours or torch's.
        timeout: seconds in all; None for no limit.

    Raises:
        RpcTimeoutError: not all are done in time.
        BaseException: the first error.
    """
    waiting = list(futures)
    for future in waiting:
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"wait_all takes futures, not {type(future).__name__} {future!r:.100}.")
    finished: Future[None] = Future(before_wait=_before_wait(waiting))
    left = len(waiting)
    lock = threading.Lock()

    def done(future: Any) -> None:
        nonlocal left
        error: BaseException | None = None
        try:
            future.value()
        except BaseException as problem:
            error = problem
        with lock:
            left -= 1
            if finished.done() or (left and error is None):
                return
            if error is not None:
                finished.fail(error)
            else:
                finished.complete(None)

    for future in waiting:
        _when_done(future, done)
    if waiting:
        start = time.monotonic()
        try:
            finished.wait(timeout)
        except errors.RpcTimeoutError as error:
            if finished.done() or timeout is None:
                raise
            raise errors.RpcTimeoutError(
                f"wait_all timed out after {time.monotonic() - start:.2f} s: {left} of "
                f"{len(waiting)} futures "
                "were not done. The calls go on and may be waited for again.",
                elapsed=time.monotonic() - start,
                limit=timeout,
                ran="maybe",
            ) from error
    return [future.value() for future in waiting]


def collect_all(futures: Iterable[Any]) -> Future[list[Any]]:
    """A future that is done when all of ``futures`` are; its value is the list of them.

    Its callbacks run where those of the first of our futures run.
    """
    waiting = list(futures)
    ours = [future for future in waiting if isinstance(future, Future)]
    result: Future[list[Any]] = Future(ours[0]._executor if ours else None, _before_wait(waiting))
    left = len(waiting)
    lock = threading.Lock()

    def done(_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            result.complete(waiting)

    for future in waiting:
        _when_done(future, done)
    if not waiting:
        result.complete(waiting)
    return result


def _before_wait(futures: list[Any]) -> Callable[[Future[Any]], Any] | None:
    return next((future._before_wait for future in futures if isinstance(future, Future)), None)


def _when_done(future: Any, work: Callable[[Any], None]) -> None:
    """Run ``work(future)`` at completion, in the completing thread: it must not block."""
    if not isinstance(future, Future):
        future.add_done_callback(work)
        return
    with future._mutex:
        pending = not future._state
        if pending:
            future._waiters.append(_Waker(lambda _: work(future)))
    if not pending:
        work(future)
