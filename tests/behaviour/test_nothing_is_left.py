"""What calls leave behind when they have ended, well or not: nothing, and nobody is held up."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
from together import meet, raises_within, wait_until

import zrpc as rpc

from support.cluster import Cluster, run_ranks, shared_server


def echo(value: Any) -> Any:
    return value


def nap(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def kept_here() -> tuple[int, int]:
    gc.collect()
    ledger = rpc.current_agent().references.ledger
    return len(ledger), ledger.in_transit


def _rounds(rank: int) -> None:
    if rank == 0:
        # Values of ours that go away and come back; twice at once; to ourselves.
        for number in range(150):
            mine = rpc.RRef(number)
            assert rpc.rpc_sync("w1", echo, args=(mine,)).local_value() == number
            assert rpc.rpc_sync("w0", echo, args=([mine, mine],))[1].local_value() == number
            del mine
        # Calls that are given up at once, that expire, that fail, with RRefs in them.
        theirs = rpc.remote("w1", list)
        theirs.to_here()
        for number in range(60):
            mine = rpc.RRef(number)
            rpc.rpc_async("w1", echo, args=(mine,)).cancel()
            rpc.rpc_async("w1", echo, args=([mine, theirs],)).cancel()
            with pytest.raises(TypeError):
                rpc.rpc_sync("w1", echo, args=(mine, theirs, 1))
            del mine
        waiting = [
            rpc.rpc_async(to, nap, args=(0.4, rpc.RRef(to)), timeout=0.1)
            for to in ("w1", "w0", "w1", "w0")
        ]
        for future in waiting:
            with pytest.raises(rpc.RpcTimeoutError):
                future.wait()
        del waiting, future, theirs
        wait_until(lambda: kept_here() == (0, 0), "the end of all values of ours")
        wait_until(lambda: rpc.rpc_sync("w1", kept_here) == (0, 0), "the end of theirs")
    meet("rounds")


def test_values_are_given_up_however_the_calls_that_carried_them_ended() -> None:
    run_ranks(_rounds, 2)


def _refused(rank: int) -> None:
    if rank == 0:
        agent = rpc.current_agent()
        agent.pool.spares = 3

        def deep(level: int) -> str:
            try:
                return str(rpc.rpc_sync("w0", nested, args=(level, rpc.RRef(level))))
            except rpc.BusyError:
                return "busy"

        global nested
        nested = lambda level, rref: deep(level + 1)  # noqa: E731
        assert rpc.rpc_sync("w0", deep, args=(0,)) == "busy"
        wait_until(lambda: kept_here() == (0, 0), "the end of what the refused call carried")
    meet("refused")


nested: Any = None


def test_a_refused_call_leaves_nothing() -> None:
    run_ranks(_refused, 2)


class Slow:
    """Takes its time when it goes."""

    def __del__(self) -> None:
        time.sleep(3)


def _destructor(rank: int) -> None:
    if rank == 0:
        mine = rpc.RRef(Slow())
        there = rpc.rpc_sync("w1", echo, args=(mine,))
        del mine, there
        start = time.monotonic()
        for _ in range(5):
            with pytest.raises(rpc.RpcTimeoutError):
                rpc.rpc_sync("w1", nap, args=(10,), timeout=0.2)
        assert time.monotonic() - start < 2.5, "a destructor held up the timeouts"
    meet("destructor")


def test_a_slow_destructor_holds_up_no_timeout() -> None:
    run_ranks(_destructor, 2)


def _low_credit(rank: int) -> None:
    if rank == 0:
        for size in (1, 5, 20):
            sent = torch.full((size << 20,), 7, dtype=torch.uint8)
            assert torch.equal(rpc.rpc_sync("w1", echo, args=(sent,), timeout=30), sent)
        assert rpc.rpc_sync("w1", max, args=(1, 2), timeout=10) == 2
    meet("credit")


def test_calls_larger_than_the_credit_pass_whatever_it_is() -> None:
    run_ranks(_low_credit, 2, options={"credit": 1 << 20})


go = threading.Event()


def nested_then_waits() -> None:
    rpc.rpc_sync("w1", nap, args=(0.3,))
    go.wait(30)


def waits() -> None:
    go.wait(30)


def _resumed(rank: int) -> None:
    if rank == 0:
        first = rpc.rpc_async("w0", nested_then_waits)
        time.sleep(0.1)
        second = rpc.rpc_async("w0", waits)
        time.sleep(0.6)
        # More handlers run than there are threads for; replies get through.
        assert rpc.rpc_async("w1", echo, args=(1,)).wait(15) == 1
        go.set()
        first.wait()
        second.wait()
    meet("resumed")


def test_replies_get_through_when_handlers_go_on_past_the_limit() -> None:
    run_ranks(_resumed, 2, options={"num_worker_threads": 1})


def _limits(rank: int) -> None:
    if rank == 0:
        for timeout in (float("inf"), 1e300, 1e12, 2.0**70):
            assert rpc.rpc_sync("w1", max, args=(1, 2), timeout=timeout) == 2
            assert rpc.remote("w1", echo, args=(3,), timeout=timeout).to_here(timeout) == 3
            assert rpc.rpc_async("w1", echo, args=(4,), timeout=timeout).wait(timeout) == 4
        assert rpc.RpcBackendOptions(rpc_timeout=float("inf")).rpc_timeout == 0
        with pytest.raises(RuntimeError, match="inside a call"):
            rpc.rpc_sync("w1", rpc.shutdown)
        assert rpc.rpc_sync("w1", os.getpid, timeout=3) != os.getpid()
    meet("limits")
    rpc.shutdown(timeout=1e300)


def test_a_limit_that_nobody_lives_to_see_is_none() -> None:
    run_ranks(_limits, 2)


def _futures(rank: int) -> None:
    if rank == 0:
        # A callback that raises keeps nothing from the others.
        assert rpc.rpc_sync("w1", later, timeout=10) == 5
        # What cancel() returns is what wait() then does.
        for number in range(300):
            future = rpc.rpc_async("w1", echo, args=(number,))
            if number % 3:
                time.sleep(0.0002 * (number % 7))
            cancelled = future.cancel()
            assert cancelled == future.cancelled()
            if cancelled:
                with pytest.raises(rpc.CallCancelledError):
                    future.wait()
            else:
                assert future.wait() == number
    meet("futures")


@rpc.functions.async_execution
def later() -> Any:
    future: Any = rpc.Future()
    future.add_done_callback(lambda done: 1 / 0)
    threading.Timer(0.1, future.set_result, (5,)).start()
    return future


def test_futures_say_the_truth_and_a_bad_callback_harms_no_other() -> None:
    run_ranks(_futures, 2)


class KillsItsCallee:
    """Its callee is gone before it has been encoded."""

    def __init__(self, cluster: Any, name: str) -> None:
        self.cluster, self.name = cluster, name

    def __reduce__(self) -> Any:
        self.cluster.kill(self.name)
        time.sleep(0.5)
        return int, (1,)


def test_a_callee_that_dies_while_its_first_call_is_made_is_seen() -> None:
    with Cluster(shared_server(), ["a", "b"]) as cluster:
        options = rpc.RpcBackendOptions(broker=cluster.address)
        rpc.init_rpc("me", rpc_backend_options=options)
        try:
            with raises_within(1.0, rpc.WorkerLostError, "a"):
                rpc.rpc_sync("a", echo, args=(KillsItsCallee(cluster, "a"),), timeout=30)
            assert rpc.rpc_sync("b", max, args=(1, 2)) == 2
        finally:
            rpc.shutdown()
