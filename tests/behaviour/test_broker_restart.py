"""A broker that is killed under load, and started again: no call lost, none run twice."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from together import broker_of, brokers_of, meet, wait_until

import zrpc as rpc

from support.cluster import Cluster, environment, run_ranks, shared_server

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


def _broker_at(address: str, folder: Path) -> subprocess.Popen[bytes]:
    """A broker at a fixed address, once it listens."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "broker", "--bind", address, "--ready-file", str(ready)],
        env=environment(ZRPC_RUN_DIR=str(folder)),
        stdout=subprocess.DEVNULL,
    )
    wait_until(ready.exists, "the broker")
    return process


def test_a_broker_that_is_started_again_by_hand_knows_its_workers(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    broker = _broker_at(address, tmp_path)
    try:
        with Cluster(shared_server(), ["a"], broker=address):
            options = rpc.RpcBackendOptions(broker=address, rpc_timeout=60)
            rpc.init_rpc("me", rpc_backend_options=options)
            try:
                rref = rpc.remote("a", list, args=([1],))
                assert rref.to_here() == [1]
                slow = rpc.rpc_async("a", time.sleep, args=(1.0,))
                broker.send_signal(signal.SIGKILL)
                broker.wait()
                broker = _broker_at(address, tmp_path)
                assert slow.wait() is None and rref.to_here() == [1]
                assert rpc.get_worker_info("a").name == "a"
            finally:
                rpc.shutdown()
    finally:
        broker.terminate()
        broker.wait()
