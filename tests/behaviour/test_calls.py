"""Calls between processes: time limits, callbacks, who and what can be called."""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from together import meet, raises_within, wait_until

import zrpc as rpc

from support.cluster import run_ranks

AE = rpc.functions.async_execution
#: Seconds; only catches hangs.
LIMIT = 10.0


def echo(value: Any) -> Any:
    return value


def slow_echo(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


class Slow(torch.nn.Module):
    """Whatever is done with it takes 1.2 s."""

    def forward(self, x: Any) -> Any:
        return self.doze(x)

    def doze(self, x: Any) -> Any:
        time.sleep(1.2)
        return x


@AE
def answered_later(x: Any) -> Any:
    future: Any = torch.futures.Future()
    threading.Timer(1.2, lambda: future.set_result(x)).start()
    return future


# ------------------------------------------------------------------ time limits


def _limited(seconds: float) -> dict[str, Callable[[], Any]]:
    """Every way to wait 1.2 s for 5, with a limit."""
    work = ("w1", slow_echo, (1.2, 5))
    rref, registered = rpc.remote("w1", Slow), rpc.remote("w1", "dozer")
    registered.to_here()
    mine = rpc.remote("w0", slow_echo, (1.2, 5), timeout=20)
    return {
        "rpc_sync": lambda: rpc.rpc_sync(*work, timeout=seconds),
        "rpc_async": lambda: rpc.rpc_async(*work, timeout=seconds).wait(),
        "then": lambda: rpc.rpc_async(*work, timeout=seconds).then(lambda f: f.wait()).wait(),
        "to itself": lambda: rpc.rpc_sync("w0", slow_echo, (1.2, 5), timeout=seconds),
        "async_execution": lambda: rpc.rpc_sync("w1", answered_later, (5,), timeout=seconds),
        "remote": lambda: rpc.remote(*work, timeout=seconds).to_here(20),
        "to_here": lambda: rpc.remote(*work, timeout=20).to_here(seconds),
        "to_here at the owner": lambda: mine.to_here(seconds),
        "fetch": lambda: rpc.remote(*work, timeout=20).fetch(seconds),
        "to_here_async": lambda: rpc.remote(*work, timeout=20).to_here_async(seconds).wait(),
        "local_value": lambda: rpc.remote(*work, timeout=20).local_value(seconds).wait(),
        "local_value at the owner": lambda: mine.local_value(seconds),
        "copy": lambda: rpc.remote(*work, timeout=20).copy(timeout=seconds).to_here(20),
        "proxy rpc_sync": lambda: rref.rpc_sync(seconds).doze(5),
        "proxy rpc_async": lambda: rref.rpc_async(seconds).doze(5).wait(),
        "proxy remote": lambda: rref.remote(seconds).doze(5).to_here(20),
        "registered": lambda: rpc.rpc_sync(
            registered.owner, registered.doze, (5,), timeout=seconds
        ),
        "model": lambda: rpc.get_model("w1", "dozer", timeout=seconds)(5),
        "model, later": lambda: rpc.get_model("w1", "dozer", seconds).forward_async(5).wait(),
    }


def _outcomes(ways: dict[str, Callable[[], Any]]) -> dict[str, tuple[Any, float]]:
    def one(way: Callable[[], Any]) -> tuple[Any, float]:
        start = time.monotonic()
        try:
            result = way()
        except Exception as error:
            result = error
        return result, time.monotonic() - start

    with ThreadPoolExecutor(len(ways)) as pool:
        return dict(zip(ways, pool.map(one, ways.values()), strict=True))


def _time_limits(rank: int) -> None:
    if rank == 1:
        rpc.register_model("dozer", Slow())
    meet("ready")
    if rank == 0:
        for way, (result, took) in _outcomes(_limited(0.3)).items():
            assert isinstance(result, rpc.RpcTimeoutError), (way, result)
            assert isinstance(result, TimeoutError) and isinstance(result, RuntimeError), way
            assert 0.25 < took < LIMIT, (way, took)
        # Late answers are nobody's.
        assert [rpc.rpc_sync("w1", echo, (i,)) for i in range(50)] == list(range(50))
        # 0 is no limit, though the default (of the options) is one.
        rpc.api._set_rpc_timeout(0.3)
        assert rpc.get_rpc_timeout() == 0.3
        for way, (result, _) in _outcomes(_limited(0)).items():
            assert result == 5, (way, result)
        with raises_within(1.1, rpc.RpcTimeoutError, "300 ms", after=0.25):
            rpc.rpc_sync("w1", slow_echo, (1.2, 5))
        rpc.api._set_rpc_timeout(0)
        assert rpc.rpc_sync("w1", slow_echo, (0.5, 6)) == 6
        for bad in (-2, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                rpc.rpc_sync("w1", echo, (1,), timeout=bad)
        with pytest.raises(TypeError, match="timeout"):
            rpc.rpc_async("w1", echo, (1,), timeout="soon")
        # A wait with a limit gives up waiting, not the call.
        future = rpc.rpc_async("w1", slow_echo, (0.7, 7))
        with raises_within(0.6, rpc.RpcTimeoutError, "w1", after=0.1):
            future.wait(timeout=0.1)
        with raises_within(0.6, rpc.RpcTimeoutError, "1 of 2", after=0.1):
            rpc.wait_all([rpc.rpc_async("w1", echo, (1,)), future], timeout=0.2)
        assert future.wait(timeout=20) == 7
        # A creation that has timed out does not make to_here wait, however long it may.
        rref = rpc.remote("w1", slow_echo, (4, 0), timeout=0.5)
        with raises_within(1.5, rpc.RpcTimeoutError, "RRef creation", after=0.4):
            rref.to_here(timeout=30)
        with raises_within(0.3, rpc.RpcTimeoutError, "RRef creation"):
            rref.to_here(timeout=30)
        # A value that is late for one to_here is there for the next.
        rref = rpc.remote("w1", slow_echo, (0.7, 8))
        with raises_within(0.6, rpc.RpcTimeoutError):
            rref.to_here(timeout=0.2)
        assert rref.to_here() == 8
        # Nested calls have what remains of the outer one's time.
        with raises_within(1.1, rpc.RpcTimeoutError):
            rpc.rpc_sync("w1", remaining_nested, timeout=0.5)
        assert rpc.rpc_sync("w1", remaining_seen, timeout=5) < 5
    meet("done")


def remaining_nested() -> None:
    rpc.rpc_sync("w0", time.sleep, (2,))


def remaining_seen() -> float | None:
    return rpc.rpc_sync("w0", remaining_here)


def remaining_here() -> float | None:
    call = rpc.current_call()
    assert call is not None
    return call.remaining()


def test_every_wait_has_a_limit_that_is_kept_and_zero_is_none() -> None:
    run_ranks(_time_limits, 2, options={"num_worker_threads": 64})


def _stages(rank: int) -> None:
    if rank == 0:
        running = rpc.rpc_async("w1", slow_echo, (1.5, 0), timeout=0.4)
        time.sleep(0.1)
        queued = rpc.rpc_async("w1", echo, (0,), timeout=0.4)
        for future, function, stage in (
            (running, "slow_echo", "running there"),
            (queued, "echo", "queued there"),
        ):
            with pytest.raises(rpc.RpcTimeoutError, match="RPC ran for more than") as caught:
                future.wait()
            text = str(caught.value)
            for part in ("'w1'", function, stage, "400 ms"):
                assert part in text, text
        assert rpc.rpc_sync("w1", counted, timeout=20) == 1  # the queued one has not run
        pid = rpc.rpc_sync("w1", os.getpid)
        os.kill(pid, signal.SIGSTOP)
        try:
            with raises_within(3, rpc.RpcTimeoutError, rf"test_calls:echo.*'w1'.*{pid}.*not known"):
                rpc.rpc_sync("w1", echo, (0,), timeout=0.4)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rpc.rpc_sync("w1", echo, (3,)) == 3


_counted = [0]


def counted() -> int:
    _counted[0] += 1
    return _counted[0]


def test_a_timeout_says_which_function_where_and_how_far_it_had_come() -> None:
    run_ranks(_stages, 2, options={"num_worker_threads": 1})


# ------------------------------------------------------------------ futures


@AE
def no_future() -> int:
    return 3


@AE
def fails_at_once() -> Any:
    raise ValueError("at once")


@AE
def fails_later() -> Any:
    future: Any = torch.futures.Future()
    threading.Timer(0.05, lambda: future.set_exception(KeyError("later"))).start()
    return future


@AE
def never() -> Any:
    return torch.futures.Future()


@AE
def asks_back(x: int) -> Any:
    return rpc.rpc_async("w0", operator.mul, (x, 10)).then(lambda f: f.wait() + 1)


@AE
def asks_back_and_fails(x: int) -> Any:
    return rpc.rpc_async("w0", operator.mul, (x, 10)).then(lambda f: f.wait() / 0)


def _futures(rank: int) -> None:
    if rank:
        return
    future = rpc.rpc_async("w1", max, (1, 2))
    seen: list[Any] = []
    future.add_done_callback(lambda f: 1 / 0)  # its trouble is its own
    future.add_done_callback(lambda f: seen.append(f.wait()))
    failing = future.then(lambda f: 1 / 0)
    chained = future.then(lambda f: f.wait() + 1).then(lambda f: f.value() * 2)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    with pytest.raises(ZeroDivisionError):
        failing.then(lambda f: f.wait()).wait()
    assert failing.then(lambda f: type(f.exception())).wait() is ZeroDivisionError
    assert chained.wait() == 6
    wait_until(lambda: seen == [2], "the callback")
    assert future.then(lambda f: f.wait()).wait() == 2  # one that was done already
    for late in (rpc.rpc_async("w1", time.sleep, (1,), timeout=0.2),):
        with raises_within(1, rpc.RpcTimeoutError):
            late.then(lambda f: f.wait()).wait()
    broken = rpc.rpc_async("w1", operator.truediv, (1, 0))
    with pytest.raises(ZeroDivisionError, match=r"truediv|division"):
        broken.then(lambda f: f.wait()).wait()
    with pytest.raises(ZeroDivisionError):
        torch.futures.wait_all([rpc.rpc_async("w1", echo, (1,)), broken])
    assert torch.futures.wait_all([rpc.rpc_async("w1", echo, (i,)) for i in range(5)]) == [
        *range(5)
    ]

    with pytest.raises(RuntimeError, match=r"torch\.futures\.Future object, but got int"):
        rpc.rpc_sync("w1", no_future)
    with pytest.raises(ValueError, match="at once"):
        rpc.rpc_sync("w1", fails_at_once)
    with pytest.raises(KeyError, match="later"):
        rpc.rpc_sync("w1", fails_later)
    with pytest.raises(KeyError, match="later"):
        rpc.remote("w1", fails_later).to_here()
    with raises_within(1.5, rpc.RpcTimeoutError):
        rpc.rpc_sync("w1", never, timeout=0.3)
    assert rpc.rpc_sync("w1", asks_back, (4,)) == 41
    assert rpc.remote("w1", asks_back, (5,)).to_here() == 51
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_async("w1", asks_back_and_fails, (1,)).wait()
    # Given up, it does not keep shutdown waiting either.
    endless = rpc.rpc_async("w1", never, timeout=0)
    assert endless.cancel() and endless.cancelled()
    with pytest.raises(rpc.CallCancelledError, match="never"):
        endless.wait()


def test_errors_come_through_callbacks_chains_and_async_execution() -> None:
    run_ranks(_futures, 2)


# ------------------------------------------------------------------ who and what


def who_calls() -> Any:
    call = rpc.current_call()
    assert call is not None
    return call.caller, call.function, call.remaining(), call.id


class Late:
    pass


def _whom_and_what(rank: int) -> None:
    if rank:
        meet("done")
        return
    info = rpc.get_worker_info("w1")
    assert (info.name, info.id) == ("w1", 1) and rpc.get_worker_info(1) == info
    assert rpc.get_worker_info().name == "w0"
    for to in ("w1", 1, info, rpc.RRef, lambda: info, rpc.remote("w1", echo, (1,)).owner):
        if to is not rpc.RRef:
            assert rpc.rpc_sync(to, os.getpid) == rpc.remote(to, os.getpid).to_here() != os.getpid()
    with raises_within(1, rpc.UnknownWorkerError, r"w11.*Did you mean 'w1'.*'w0', 'w1'"):
        rpc.rpc_sync("w11", echo, (1,))
    for call in (rpc.rpc_async, rpc.remote, lambda to, *_: rpc.get_worker_info(to), rpc.get_model):
        for nobody in ("nobody", 7):
            with raises_within(1, rpc.UnknownWorkerError, f"could not find destination.*{nobody}"):
                call(nobody, *((echo, (1,)) if call is not rpc.get_model else ()))
    for bad in (1.5, None, b"w1"):
        with raises_within(1, (TypeError, ValueError)):  # type: ignore[arg-type]
            rpc.rpc_sync(bad, echo, (1,))
    with raises_within(1, TypeError, "callable"):
        rpc.rpc_sync("w1", 5)

    caller, function, remaining, number = rpc.rpc_sync("w1", who_calls, timeout=9)
    assert caller == rpc.get_worker_info() and "who_calls" in function and number > 0
    assert remaining is not None and 8 < remaining <= 9
    assert rpc.rpc_sync("w1", who_calls, timeout=0)[2] is None
    assert rpc.rpc_sync("w0", who_calls)[0] == rpc.get_worker_info()
    assert rpc.current_call() is None

    # What only the caller has: an error that names it, at once, and the callee goes on.
    this = sys.modules[__name__]
    for name in ("only_here", "OnlyHere"):
        made: Any = (lambda: 1) if name.islower() else type(name, (), {"__module__": __name__})
        made.__qualname__ = made.__name__ = name
        setattr(this, name, made)
        for kind in (rpc.rpc_sync, lambda *a: rpc.remote(*a).to_here()):
            with raises_within(5, rpc.UnknownFunctionError, name):
                kind("w1", made)
    with raises_within(5, RuntimeError, "no_such_method"):
        rpc.remote("w1", Late).rpc_sync().no_such_method()

    # By value: lambdas, closures, partials, methods of instances, local classes.
    factor = 3
    assert rpc.rpc_sync("w1", lambda: 1) == 1
    assert rpc.rpc_async("w1", lambda x: x * factor, (2,)).wait() == 6
    assert rpc.remote("w1", (lambda: lambda: factor)()).to_here() == 3
    assert rpc.rpc_sync("w1", "abc".upper) == "ABC"
    assert rpc.rpc_sync("w1", lambda: os.getpid()) != os.getpid()
    # What cannot travel: an error here that names it, before anything is sent.
    for argument, word in ((threading.Lock(), "lock"), ((i for i in "ab"), "generator")):
        for kind in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with raises_within(2, rpc.EncodeError, rf"(?s)echo.*w1.*not sent.*{word}"):
                kind("w1", echo, (argument,))
    future: Any = torch.futures.Future()
    with pytest.raises(Exception, match=r"Can not pickle torch\.futures\.Future"):
        rpc.rpc_sync("w1", echo, (future,))
    # The same small argument may be changed as soon as rpc_async is back.
    changing, listed = torch.zeros(100), [0]
    later = rpc.rpc_async("w1", slow_echo, (0.05, (changing, listed)))
    changing.fill_(1)
    listed.append(1)
    there, list_there = later.wait()
    assert there.sum() == 0 and list_there == [0]
    # A call to oneself copies, as one to others does.
    assert rpc.rpc_sync("w0", changed, (changing, listed)) is True
    assert changing.sum() == 100 and listed == [0, 1]
    assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    meet("done")


def changed(tensor: torch.Tensor, values: list[int]) -> bool:
    tensor.fill_(9)
    values.clear()
    return True


def test_who_can_be_called_and_what_can_be_sent() -> None:
    run_ranks(_whom_and_what, 2)


def _no_pickles(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
        assert rpc.rpc_sync("w1", echo, ({"a": (1, [2, None])},)) == {"a": (1, [2, None])}
        for function, name in ((lambda: 1, "lambda"), (rpc.RRef, None), (Slow().doze, "doze")):
            if name is not None:
                with raises_within(1, rpc.PickleRefusedError, rf"{name}.*allow_pickle"):
                    rpc.rpc_sync("w1", function)
        with raises_within(1, RuntimeError, "(?s)Late.*allow_pickle"):
            rpc.rpc_sync("w1", echo, (Late(),))
        with raises_within(1, RuntimeError, "(?s)Late.*allow_pickle"):
            rpc.rpc_sync("w1", late)
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("w1", operator.truediv, (1, 0))


def late() -> Late:
    return Late()


def test_without_pickles_the_error_names_the_thing_and_the_option() -> None:
    run_ranks(_no_pickles, 2, options={"allow_pickle": False})


def _room(rank: int) -> None:
    if rank:
        return
    futures, start = [], time.monotonic()
    for i in range(12):
        futures.append(rpc.rpc_async("w1", slow_echo, (0.25, i)))
        if i == 3:
            assert time.monotonic() - start < 0.25  # four have room
    assert time.monotonic() - start > 0.45  # the others waited for it
    assert rpc.wait_all(futures) == [*range(12)]
    # Callbacks and handlers that make calls wait for room without stopping what makes room.
    chained = [rpc.rpc_async("w1", echo, (i,)).then(_ask_again) for i in range(20)]
    assert rpc.wait_all(chained) == [i + 1 for i in range(20)]
    # Room is given back by calls that time out, too.
    lost = [rpc.rpc_async("w1", time.sleep, (0.6,), timeout=0.1) for _ in range(8)]
    assert sum(isinstance(f.exception(), rpc.RpcTimeoutError) for f in lost) == 8
    assert rpc.rpc_sync("w1", echo, (1,)) == 1


def _ask_again(future: Any) -> Any:
    return rpc.rpc_sync("w1", operator.add, (future.wait(), 1))


def test_past_max_pending_calls_wait_for_room() -> None:
    run_ranks(_room, 2, options={"max_pending": 4})
