"""Futures: waits that end, callbacks that run once, and torch's own functions given ours."""

from __future__ import annotations

import asyncio
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from zrpc import CallCancelledError, RpcTimeoutError
from zrpc.futures import Future, collect_all, wait_all

from support.cluster import ROOT, environment

LIMIT = 10.0


@pytest.fixture
def executor() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs callbacks on one thread of its own, as an agent's pool does."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def test_a_value_is_returned_and_an_error_raised_as_it_was_set() -> None:
    good: Future[int] = Future()
    good.complete(5)
    assert good.done() and good.wait() == good.value() == 5 and good.exception() is None
    error = KeyError("that very one")
    bad: Future[int] = Future()
    bad.fail(error)
    for way in (bad.wait, bad.value):
        with pytest.raises(KeyError) as caught:
            way()
        assert caught.value is error
    assert bad.exception() is error


def test_it_is_a_future_of_torch() -> None:
    future: Future[int] = Future()
    assert isinstance(future, torch.futures.Future) and isinstance(future, torch._C.Future)


@pytest.mark.parametrize("second", ["complete", "fail", "set_result", "set_exception"])
def test_a_result_is_set_once_only(second: str) -> None:
    future: Future[Any] = Future()
    future.set_result(1)
    with pytest.raises(RuntimeError, match="once"):
        getattr(future, second)(ValueError())
    assert future.wait() == 1


def test_a_wait_with_a_limit_gives_up_waiting_not_the_future() -> None:
    future: Future[int] = Future()
    future.worker, future.function = "w1", "train:step"
    with pytest.raises(RpcTimeoutError, match=r"train:step on worker 'w1' timed out") as caught:
        future.wait(0.05)
    assert isinstance(caught.value, TimeoutError)
    assert future._waiters == []
    future.complete(1)
    assert future.wait(0.05) == 1


def test_a_value_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(RuntimeError, match="not done"):
        Future().value()


def test_many_threads_may_wait_for_one_future() -> None:
    future: Future[int] = Future()
    with ThreadPoolExecutor(20) as pool:
        waits = [pool.submit(future.wait, LIMIT) for _ in range(20)]
        future.complete(7)
        assert [wait.result(LIMIT) for wait in waits] == [7] * 20


def test_waits_stand_aside_while_they_block_and_only_then() -> None:
    entered: list[Any] = []

    class Aside:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: Any) -> None:
            entered.append("out")

    future: Future[int] = Future(before_wait=lambda future: Aside())
    threading.Timer(0.05, lambda: future.complete(1)).start()
    assert future.wait(LIMIT) == 1 and entered == ["in", "out"]
    assert future.wait() == 1 and entered == ["in", "out"]


# ------------------------------------------------------------------ callbacks


def test_callbacks_run_where_the_executor_says(executor: Any) -> None:
    ran: queue.Queue[int] = queue.Queue()
    future: Future[int] = Future(executor)
    future.add_done_callback(lambda f: ran.put(threading.get_ident()))
    future.complete(1)
    future.add_done_callback(lambda f: ran.put(threading.get_ident()))
    assert threading.get_ident() not in (ran.get(timeout=LIMIT), ran.get(timeout=LIMIT))


def test_a_blocking_callback_holds_up_neither_the_completion_nor_a_wait(executor: Any) -> None:
    release = threading.Event()
    future: Future[int] = Future(executor)
    future.add_done_callback(lambda f: release.wait(LIMIT))
    future.complete(1)
    assert future.wait(LIMIT) == 1
    release.set()


def test_then_chains_values_and_errors_as_they_are() -> None:
    future: Future[int] = Future()
    chained = future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 10)
    failing = future.then(lambda f: 1 // 0)
    after = failing.then(lambda f: f.wait())
    future.complete(1)
    assert isinstance(chained, Future) and chained.wait() == 20
    for each in (failing, after):
        with pytest.raises(ZeroDivisionError):
            each.wait()


def test_a_callback_that_races_the_completion_runs_exactly_once() -> None:
    for _ in range(300):
        future: Future[int] = Future()
        ran: list[int] = []
        barrier = threading.Barrier(2)

        def add(future: Any = future, ran: Any = ran, barrier: Any = barrier) -> None:
            barrier.wait()
            future.add_done_callback(lambda f: ran.append(1))

        thread = threading.Thread(target=add)
        thread.start()
        barrier.wait()
        future.complete(1)
        thread.join()
        assert ran == [1]


# ------------------------------------------------------------------ cancelling, asyncio


def test_cancel_ends_the_call_and_raises_its_error() -> None:
    future: Future[int] = Future()
    told: list[str] = []

    def on_cancel() -> BaseException:
        told.append("told")
        return CallCancelledError("by hand", worker="w1")

    future.on_cancel = on_cancel
    assert future.cancel() and future.cancelled() and told == ["told"]
    with pytest.raises(CallCancelledError, match="by hand"):
        future.wait()
    assert not future.cancel()


def test_a_future_that_is_done_cannot_be_cancelled() -> None:
    future: Future[int] = Future()
    future.complete(1)
    assert not future.cancel() and not future.cancelled() and future.wait() == 1


def test_it_can_be_awaited() -> None:
    async def main() -> tuple[int, str]:
        slow: Future[int] = Future()
        bad: Future[int] = Future()
        threading.Timer(0.05, lambda: slow.complete(3)).start()
        threading.Timer(0.05, lambda: bad.fail(ValueError("late"))).start()
        value = await slow
        assert await slow == 3  # again
        try:
            await bad
        except ValueError as error:
            return value, str(error)
        return value, ""

    assert asyncio.run(asyncio.wait_for(main(), LIMIT)) == (3, "late")


def test_a_cancelled_task_cancels_what_it_awaits() -> None:
    future: Future[int] = Future()

    async def wait() -> int:
        return await future

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert future.cancelled()


def test_a_pickle_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        pickle.dumps(Future())


# ------------------------------------------------------------------ many


def test_wait_all_returns_values_in_order_of_ours_and_torchs() -> None:
    ours: Future[int] = Future()
    theirs: torch.futures.Future[int] = torch.futures.Future()
    threading.Timer(0.03, lambda: theirs.set_result(2)).start()
    threading.Timer(0.06, lambda: ours.complete(1)).start()
    assert wait_all([ours, theirs], LIMIT) == [1, 2]
    assert wait_all([]) == []


def test_wait_all_raises_the_first_error_without_waiting_for_the_others() -> None:
    never: Future[int] = Future()
    failing: Future[int] = Future()
    threading.Timer(0.03, lambda: failing.fail(KeyError("first"))).start()
    with pytest.raises(KeyError, match="first"):
        wait_all([never, failing], LIMIT)
    assert not never.done()


def test_wait_all_with_a_limit_says_how_many_are_missing() -> None:
    done: Future[int] = Future()
    done.complete(1)
    with pytest.raises(RpcTimeoutError, match="1 of 2"):
        wait_all([done, Future()], 0.05)
    with pytest.raises(TypeError, match="takes futures"):
        wait_all([1])


def test_collect_all_is_done_when_all_are_whatever_became_of_them(executor: Any) -> None:
    good: Future[int] = Future(executor)
    bad: Future[int] = Future(executor)
    both = collect_all([good, bad])
    bad.fail(ValueError("x"))
    assert not both.done()
    good.complete(1)
    found = both.wait(LIMIT)
    assert found[0].value() == 1 and isinstance(found[1].exception(), ValueError)
    assert collect_all([]).wait(LIMIT) == []


def test_torchs_own_functions_take_ours() -> None:
    futures: list[Any] = [Future() for _ in range(3)]
    collected = torch.futures.collect_all(futures)
    for number, future in enumerate(futures):
        future.complete(number)
    assert torch.futures.wait_all(futures) == [0, 1, 2]
    assert [future.value() for future in collected.wait()] == [0, 1, 2]
    bad: Future[int] = Future()
    bad.fail(ValueError("from ours"))
    with pytest.raises(ValueError, match="from ours"):
        torch.futures.wait_all([bad])


def test_ctrl_c_lands_in_a_wait() -> None:
    code = (
        "import time\nfrom zrpc.futures import Future\n"
        "print('ready', flush=True)\n"
        "try:\n    Future().wait()\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT)
    assert out == "interrupted\n" and process.returncode == 0
