"""A broker that is killed under load, and started again: no call lost, none run twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from together import broker_of, brokers_of, meet, wait_until

import zrpc as rpc

from support.cluster import run_ranks

CALLS = 1500
UNDER_WAY = 64

_lock = threading.Lock()
_count = 0


def increment(payload: bytes) -> int:
    global _count
    with _lock:
        _count += 1
    return len(payload)


def count() -> int:
    return _count


def _clients(rank: int, where: str) -> None:
    options = rpc.RpcBackendOptions(init_method=where, rpc_timeout=60)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=4, rpc_backend_options=options)
    kept = rpc.remote("w1", list, args=([1, 2, 3],))
    assert kept.to_here() == [1, 2, 3]
    meet("before")
    if rank == 0:
        # Its agent starts the broker again.
        for _ in range(3):
            time.sleep(0.7)
            broker = broker_of()
            broker.kill()
            wait_until(
                lambda broker=broker: bool(b := brokers_of()) and b[0] != broker, "a new one"
            )
    elif rank > 1:
        waiting: list[Any] = []
        for number in range(CALLS):
            waiting.append((number, rpc.rpc_async("w1", increment, args=(b"x" * number,))))
            if len(waiting) >= UNDER_WAY:
                size, future = waiting.pop(0)
                assert future.wait() == size
            time.sleep(0.001)
        assert all(future.wait() == size for size, future in waiting)
    meet("after")
    assert kept.to_here() == [1, 2, 3]
    assert rpc.rpc_sync("w1", count) == 2 * CALLS
    # Names and meetings work, and what is given up is freed.
    assert rpc.get_worker_info("w3").name == "w3"
    del kept
    meet("end")
    if rank == 1:
        ledger = rpc.current_agent().references.ledger
        wait_until(lambda: len(ledger) == 0, "the end of the values", 40)
    rpc.shutdown()


def test_no_call_is_lost_or_run_twice_when_the_broker_is_killed(tmp_path: Path) -> None:
    run_ranks(_clients, 4, f"file://{tmp_path}/meet", init=False, timeout=100)
