"""Many processes that all call each other, with payloads of all sizes: `scripts/bench soak`.

Every result is compared by checksum; the broker's resident memory is read after each half.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zrpc as rpc

#: Calls of one process under way.
IN_FLIGHT = 8


@contextlib.contextmanager
def broker_process() -> Iterator[tuple[str, int]]:
    """A broker of our own: its address and process id."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        process = subprocess.Popen(
            [sys.executable, "-m", "broker", "--bind", "tcp://127.0.0.1:0", "--ready-file", ready],
            stdout=subprocess.DEVNULL,
        )
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the broker ended with code {process.returncode}")
                time.sleep(0.01)
            yield ready.read_text().strip(), process.pid
        finally:
            process.terminate()
            process.wait(10)


def status(address: str) -> dict[str, Any]:
    """What `zrpc status --json` says."""
    output = subprocess.run(
        [
            sys.executable,
            "-c",
            "from broker.cli import main; main()",
            *("status", "--json", "--broker", address),
        ],
        check=True,
        capture_output=True,
    ).stdout
    return dict(json.loads(output))


def echo(data: torch.Tensor, checksum: int) -> torch.Tensor:
    """Check what came, and send it back."""
    if zlib.crc32(data.numpy()) != checksum:
        raise AssertionError("the callee got other bytes than were sent")
    return data


def caller(
    rank: int, processes: int, calls: int, largest: int, address: str, half: Any, results: Any
) -> None:
    """One process: half its calls, a meeting, the other half."""
    torch.set_num_threads(1)
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=processes,
        rpc_backend_options=rpc.RpcBackendOptions(
            broker=address, rpc_timeout=300, num_worker_threads=4
        ),
    )
    chance = random.Random(rank)
    pool = torch.randint(0, 256, (2 * largest,), dtype=torch.uint8)
    wrong = lost = moved = 0
    first_error = ""
    for part in range(2):
        under_way: list[tuple[Any, int, int]] = []

        def finish(entry: tuple[Any, int, int]) -> None:
            nonlocal wrong, lost, first_error
            future, checksum, size = entry
            try:
                back = future.wait()
            except Exception as error:
                lost += 1
                first_error = first_error or f"{type(error).__name__}: {error}"[:500]
            else:
                if back.numel() != size or zlib.crc32(back.numpy()) != checksum:
                    wrong += 1

        for number in range(calls // 2):
            size = int(math.exp(chance.uniform(0, math.log(largest + 1)))) - 1
            offset = chance.randrange(largest)
            data = pool[offset : offset + size]
            checksum = zlib.crc32(data.numpy())
            to = (rank + 1 + chance.randrange(processes - 1)) % processes
            under_way.append((rpc.rpc_async(f"w{to}", echo, args=(data, checksum)), checksum, size))
            moved += 2 * size
            if len(under_way) >= IN_FLIGHT:
                finish(under_way.pop(0))
            if number % 50 == 0:
                results.put(("progress", rank, part * (calls // 2) + number))
        for entry in under_way:
            finish(entry)
        results.put(("half", rank, part))
        half[part].wait()
    rpc.shutdown()
    results.put(("done", rank, (wrong, lost, moved, first_error)))


def run(processes: int, calls: int, largest: int, show: Any) -> bool:
    """Do it, and say what came of it.

    Args:
        processes: how many.
        calls: calls that each makes.
        largest: bytes of the largest payload; sizes are log-uniform from 0.
        show: called with lines of text.

    Returns:
        True if every result was right and the broker's memory stayed.
    """
    context = multiprocessing.get_context("spawn")
    with broker_process() as (address, _):
        half = [context.Event(), context.Event()]
        results = context.Queue()
        workers = [
            context.Process(
                target=caller, args=(rank, processes, calls, largest, address, half, results)
            )
            for rank in range(processes)
        ]
        start = time.monotonic()
        for worker in workers:
            worker.start()
        memory, halves, totals, at = [], [0, 0], [], [0] * processes
        shown = start
        while len(totals) < processes:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                show(f"a process ended with codes {[worker.exitcode for worker in workers]}")
                break
            try:
                kind, rank, value = results.get(timeout=5)
            except Exception:
                continue
            if kind == "progress":
                at[rank] = value
                if time.monotonic() - shown > 10:
                    shown = time.monotonic()
                    show(f"{shown - start:5.0f} s: {sum(at)} of {processes * calls} calls")
            elif kind == "half":
                halves[value] += 1
                if halves[value] == processes:
                    time.sleep(2)
                    memory.append(status(address)["broker"]["resident_bytes"])
                    half[value].set()
            else:
                totals.append(value)
        elapsed = time.monotonic() - start
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
    wrong, lost = sum(t[0] for t in totals), sum(t[1] for t in totals)
    moved = sum(t[2] for t in totals)
    show(
        f"{processes} processes, {processes * calls} calls in {elapsed:.0f} s "
        f"({processes * calls / elapsed:.0f} calls/s, {moved / elapsed / 1e6:.0f} MB/s)"
    )
    show(f"wrong results {wrong}, lost calls {lost}")
    for total in totals:
        if total[3]:
            show(f"  {total[3]}")
    if len(memory) == 2:
        grown = (memory[1] - memory[0]) / 1e6
        show(
            f"broker resident after the first half {memory[0] / 1e6:.1f} MB, after the second "
            f"{memory[1] / 1e6:.1f} MB ({grown:+.1f} MB)"
        )
    return (
        len(totals) == processes
        and not wrong
        and not lost
        and len(memory) == 2
        and memory[1] - memory[0] <= 10e6
    )
