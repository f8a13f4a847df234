"""Calls inside calls, many threads, and what waits while others go on."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from together import meet, tell, wait_for, wait_until

import zrpc as rpc

from support.cluster import run_ranks

LIMIT = 30.0


def echo(value: Any) -> Any:
    return value


def ping(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(f"w{depth % 2}", ping, (depth - 1,))


def ping_by_future(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + rpc.rpc_async(f"w{depth % 2}", ping_by_future, (depth - 1,)).wait()


def ping_by_rref(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + rpc.remote(f"w{depth % 2}", ping_by_rref, (depth - 1,)).to_here()


def ask_both() -> list[int]:
    return rpc.wait_all([rpc.rpc_async(f"w{n % 2}", abs, (-n,)) for n in range(6)])


def ask_in_callbacks() -> list[int]:
    both = rpc.collect_all([rpc.rpc_async("w0", abs, (-1,)), rpc.rpc_async("w0", abs, (-2,))])
    # The callback calls and waits, on a worker with one thread.
    return both.then(lambda f: [rpc.rpc_sync("w0", abs, (g.wait(),)) for g in f.wait()]).wait()


def _one_thread(rank: int) -> None:
    if rank == 0:
        for chain in (ping, ping_by_future, ping_by_rref):
            assert rpc.rpc_sync("w1", chain, (10,)) == 10
        for _ in range(3):
            assert rpc.rpc_sync("w1", ask_both) == [0, 1, 2, 3, 4, 5]
            assert rpc.rpc_sync("w1", ask_in_callbacks) == [1, 2]
        assert rpc.rpc_sync("w0", ping, (4,)) == 4
    meet("done")


def test_nested_calls_of_any_depth_work_with_one_thread() -> None:
    run_ranks(_one_thread, 2, options={"num_worker_threads": 1, "rpc_timeout": 20})


def _two_threads(rank: int) -> None:
    if rank == 0:
        futures = [rpc.rpc_async("w1", ping, (depth,)) for depth in (3, 5, 7, 9) for _ in range(2)]
        assert rpc.wait_all(futures, timeout=LIMIT) == [3, 3, 5, 5, 7, 7, 9, 9]
    meet("done")


def test_eight_nested_calls_at_once_end_with_two_threads_each() -> None:
    run_ranks(_two_threads, 2, options={"num_worker_threads": 2, "rpc_timeout": 20})


def _callbacks(rank: int) -> None:
    if rank == 0:
        lock = threading.Lock()
        lock.acquire()
        stuck = rpc.rpc_async("w1", abs, (-1,)).then(lambda f: (lock.acquire(), f.wait()))
        assert [rpc.rpc_sync("w1", abs, (-n,)) for n in range(100)] == list(range(100))
        chained = [rpc.rpc_async("w1", abs, (-n,)).then(lambda f: f.wait() + 1) for n in range(50)]
        assert rpc.wait_all(chained, timeout=LIMIT) == [n + 1 for n in range(50)]
        assert not stuck.done()
        lock.release()
        assert stuck.wait(LIMIT)[1] == 1
        nested = [
            rpc.rpc_async("w1", abs, (-n,)).then(lambda f: rpc.rpc_sync("w1", max, (f.wait(), 5)))
            for n in range(20)
        ]
        assert torch.futures.wait_all(nested) == [max(n, 5) for n in range(20)]
        with ThreadPoolExecutor(8) as pool:
            ways = [
                rpc.rpc_sync,
                lambda *a: rpc.rpc_async(*a).wait(),
                lambda *a: rpc.remote(*a).to_here(),
            ]

            def many(thread: int) -> bool:
                return all(
                    ways[n % 3]("w1", echo, ((thread, n),)) == (thread, n) for n in range(150)
                )

            assert all(pool.map(many, range(8)))
    meet("done")


def test_callbacks_that_block_hold_up_nobody_and_threads_get_their_own_replies() -> None:
    run_ranks(_callbacks, 2)


def _strangers(rank: int) -> None:
    agent = rpc.current_agent()
    if rank == 1:
        # We know who w0 is, but have no pair with it; its call comes, and before control has
        # said whose it is we call back.
        rpc.get_worker_info("w0")
        agent.directory.resolve("w0", 10.0)
        held = threading.Event()
        agent.call_at(0.0, lambda: held.wait(10) and None)
        tell("ready")
        wait_until(
            lambda: any(p.unintroduced for p in agent.channel.pairs.values()), "the stranger's call"
        )
        future = rpc.rpc_async("w0", abs, args=(-1,))
        held.set()
        assert future.wait() == 1
    else:
        wait_for("ready")
        assert rpc.rpc_sync("w1", max, args=(1, 2), timeout=10) == 2
    meet("strangers")


def test_two_that_call_each_other_for_the_first_time_at_once_are_both_answered() -> None:
    run_ranks(_strangers, 2)


def _full(rank: int) -> None:
    if rank == 0:
        most = 0
        done = []
        for n in range(300):
            done.append(rpc.rpc_async("w1", echo, (n,)))
            most = max(most, rpc.current_agent().caller.pending)
        assert [future.wait() for future in done] == list(range(300))
        assert most <= 20
    meet("done")


def test_past_max_pending_a_call_waits_for_room() -> None:
    run_ranks(_full, 2, options={"max_pending": 20})


# ------------------------------------------------------------------ speed of the others


class Spinner:
    """A thread that counts as fast as Python allows."""

    def __init__(self) -> None:
        self.count = 0
        self._going = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._going:
            self.count += 1

    def rate(self, seconds: float) -> float:
        start, count = time.monotonic(), self.count
        time.sleep(seconds)
        return (self.count - count) / (time.monotonic() - start)

    def stop(self) -> None:
        self._going = False
        self._thread.join()


def _spinning(rank: int) -> None:
    if rank == 0:
        spinner = Spinner()
        try:
            best = {"alone": 0.0, "waiting": 0.0, "sending": 0.0}
            data = torch.ones(25_000_000)
            for _ in range(3):
                best["alone"] = max(best["alone"], spinner.rate(0.3))
                future = rpc.rpc_async("w1", time.sleep, (0.4,))
                waiter = threading.Thread(target=future.wait)
                waiter.start()
                best["waiting"] = max(best["waiting"], spinner.rate(0.3))
                waiter.join()
                start, count = time.monotonic(), spinner.count
                assert rpc.rpc_sync("w1", echo, (data,)).numel() == data.numel()
                rate = (spinner.count - count) / (time.monotonic() - start)
                best["sending"] = max(best["sending"], rate)
        finally:
            spinner.stop()
        assert best["waiting"] > 0.4 * best["alone"], best
        assert best["sending"] > 0.3 * best["alone"], best
    meet("done")


def test_another_thread_keeps_its_speed_while_one_waits_or_sends() -> None:
    run_ranks(_spinning, 2)


def hold_the_gil(seconds: float) -> str:
    end = time.monotonic() + seconds
    number = 3**400_000
    while time.monotonic() < end:
        number * number
    return "done"


def _busy(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("w1", hold_the_gil, (6,), timeout=LIMIT) == "done"
        assert rpc.rpc_sync("w1", os.getpid) != os.getpid()
    meet("done")


def test_a_call_that_computes_for_long_is_no_dead_worker() -> None:
    run_ranks(_busy, 2)


# ------------------------------------------------------------------ large values


def bump(tensor: torch.Tensor, array: Any) -> tuple[Any, Any]:
    tensor += 1
    array += 1
    return tensor, array


def check(data: torch.Tensor) -> tuple[int, int, int]:
    return data.numel(), int(data[0]), int(data[-1])


def _large(rank: int) -> None:
    if rank == 0:
        tensor, array = torch.zeros(500_000), np.zeros(500_000)
        tensor2, array2 = rpc.rpc_sync("w1", bump, (tensor, array))
        assert tensor.sum() == 0 and array.sum() == 0, "the callee wrote into the caller's memory"
        assert tensor2.sum() == array2.sum() == 500_000
        tensor2 += 1
        array2 += 1
        mine = rpc.rpc_sync("w0", echo, (tensor,))
        mine += 1
        assert tensor.sum() == 0, "a call to oneself has to copy"
        block = os.urandom(1 << 20) * 120
        assert rpc.rpc_sync("w1", echo, (block,)) == block
        numbers = list(range(1_000_000))
        assert rpc.rpc_sync("w1", echo, (numbers,)) == numbers
        state = {f"layer{n}": torch.full((1024,), float(n)) for n in range(1000)}
        back = rpc.rpc_sync("w1", echo, (state,))
        assert list(back) == list(state) and all(torch.equal(back[k], state[k]) for k in state)
        for odd in (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.eye(3).to_sparse_csr(),
        ):
            assert rpc.rpc_sync("w1", echo, (odd,)).layout == odd.layout
    meet("done")


def test_large_and_odd_values_come_back_whole_and_alias_nobody() -> None:
    run_ranks(_large, 2)


def _huge(rank: int) -> None:
    if rank == 0:
        data = torch.zeros(3_000_000_000, dtype=torch.uint8)
        data[0], data[-1] = 1, 2
        assert rpc.rpc_sync("w1", check, (data,), timeout=200) == (3_000_000_000, 1, 2)
        back = rpc.rpc_sync("w1", echo, (data,), timeout=200)
        assert check(back) == (3_000_000_000, 1, 2)
    meet("done")


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    psutil.virtual_memory().available < 16e9, reason="takes up to 15 GB of free memory"
)
def test_three_gigabytes_go_there_and_back() -> None:
    run_ranks(_huge, 2, timeout=250)
