"""Measures zrpc on this machine.  Figures of one run compare; those of two runs may not."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 120)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` per cent of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1)]


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table(title=title, title_justify="left")
    made.add_column(columns[0])
    for column in columns[1:]:
        made.add_column(column, justify="right")
    return made


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure zrpc on this machine."""


# ------------------------------------------------------------------ the wheel


def _per_operation(work: Callable[[int], None], count: int = 20_000, rounds: int = 9) -> float:
    """Median seconds of one ``work(number)``."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for number in range(count):
            work(number)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


@bench.command()
@click.option(
    "--seconds", default=10.0, show_default=True, help="Over which the timers are spread."
)
@click.option("--timers", default=100_000, show_default=True)
def wheel(seconds: float, timers: int) -> None:
    """Starting and cancelling a timer beside a dict's insert and pop; lateness under load."""
    from zrpc.wheel import TimingWheel

    rows = table(
        "start + cancel of one timer", "pending", "wheel, us", "dict insert + pop, us", "ratio"
    )
    for pending in (1_000, 100_000, 1_000_000):
        chance = random.Random(0)
        timing = TimingWheel(0.0)
        plain: dict[Any, float] = {}
        for number in range(pending):
            timing.add((0, number), chance.uniform(0.1, 60))
            plain[0, number] = 1.0
        keys = [(1, number) for number in range(20_000)]

        def with_wheel(number: int, timing: Any = timing, keys: Any = keys) -> None:
            timing.add(keys[number], 60.0)
            timing.cancel(keys[number])

        def with_dict(number: int, plain: Any = plain, keys: Any = keys) -> None:
            plain[keys[number]] = 60.0
            plain.pop(keys[number])

        ours, theirs = _per_operation(with_wheel), _per_operation(with_dict)
        rows.add_row(
            f"{pending:,}", f"{ours * 1e6:.2f}", f"{theirs * 1e6:.3f}", f"{ours / theirs:.1f}"
        )
    console.print(rows)

    tick = 0.01
    chance = random.Random(1)
    start = time.monotonic()
    timing = TimingWheel(start, tick)
    deadlines = {n: start + 0.5 + chance.uniform(0, seconds) for n in range(timers)}
    for number, deadline in deadlines.items():
        timing.add(number, deadline)
    late = []
    while len(timing):
        wake = timing.next_wake()
        assert wake is not None
        time.sleep(max(0.0, wake - time.monotonic()))
        now = time.monotonic()
        late += [(time.monotonic() - deadlines[key]) / tick for key in timing.advance(now)]  # type: ignore[index]
    rows = table(
        f"lateness of {timers:,} timers over {seconds:g} s, ticks of 10 ms", "", "p50", "p99", "max"
    )
    rows.add_row(
        "ticks", f"{percentile(late, 50):.2f}", f"{percentile(late, 99):.2f}", f"{max(late):.2f}"
    )
    console.print(rows)
    if min(late) < 0:
        raise click.ClickException("a timer expired early")


# ------------------------------------------------------------------ processes that call each other


def _rank(
    rank: int, world: int, module: str, rendezvous: str, work: Any, args: Any, results: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    rpc = importlib.import_module(module)
    options: Any = getattr(rpc, "TensorPipeRpcBackendOptions", None) or rpc.RpcBackendOptions
    rpc.init_rpc(
        f"w{rank}", rank=rank, world_size=world, rpc_backend_options=options(init_method=rendezvous)
    )
    if rank == 0:
        results.put(work(rpc, *args))
    rpc.shutdown()


def in_world(module: str, world: int, work: Any, *args: Any) -> Any:
    """Run ``work(rpc, *args)`` on rank 0 of a world of fresh processes; its result."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank,
                args=(rank, world, module, f"file://{folder}/meet", work, args, results),
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise click.ClickException(f"a rank ended with {[process.exitcode for process in ranks]}")
    return results.get()


def _time_timeouts(rpc: Any, tries: int, limit: float) -> tuple[list[float], int]:
    took = []
    good = 0
    for _ in range(tries):
        start = time.monotonic()
        try:
            rpc.rpc_sync("w1", time.sleep, args=(3,), timeout=limit)
        except rpc.RpcTimeoutError:
            took.append(time.monotonic() - start)
        good += rpc.rpc_sync("w1", max, args=(1, 2)) == 2
    return took, good


@bench.command()
@click.option("--tries", default=20, show_default=True)
@click.option("--limit", default=0.5, show_default=True, help="Timeout of each call, seconds.")
def timeouts(tries: int, limit: float) -> None:
    """How long a call of 3 s with a timeout takes to fail, and whether the next one works."""
    took, good = in_world("zrpc", 2, _time_timeouts, tries, limit)
    rows = table(
        f"RpcTimeoutError after a timeout of {limit:g} s",
        "tries",
        "timed out",
        "min",
        "median",
        "p99",
        "max",
        "next call right",
    )
    rows.add_row(
        str(tries),
        str(len(took)),
        *(
            f"{value:.3f} s"
            for value in (min(took), statistics.median(took), percentile(took, 99), max(took))
        ),
        f"{good} of {tries}",
    )
    console.print(rows)


def _echo(value: Any) -> Any:
    return value


def _time_calls(rpc: Any, sizes: list[int]) -> dict[str, float]:
    import torch

    found = {}
    for _ in range(200):
        rpc.rpc_sync("w1", _echo, args=(1,))
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        rpc.rpc_sync("w1", _echo, args=(1,))
        times.append((time.perf_counter() - start) * 1e6)
    found["sync no-op, p50 us"] = percentile(times, 50)
    found["sync no-op, p99 us"] = percentile(times, 99)
    start = time.perf_counter()
    waiting: list[Any] = []
    for _ in range(5000):
        waiting.append(rpc.rpc_async("w1", _echo, args=(1,)))
        if len(waiting) == 100:
            waiting.pop(0).wait()
    for future in waiting:
        future.wait()
    found["no-ops a second, 100 in flight"] = 5000 / (time.perf_counter() - start)
    for size in sizes:
        data = torch.ones(size << 20, dtype=torch.uint8)
        rpc.rpc_sync("w1", _echo, args=(data,))
        start = time.perf_counter()
        for _ in range(5):
            rpc.rpc_sync("w1", _echo, args=(data,))
        found[f"echo of {size} MiB, GB/s each way"] = (
            5 * data.nbytes / 1e9 / (time.perf_counter() - start)
        )
    return found


@bench.command()
@click.option("--against", type=click.Choice(["torch"]), help="Measure TensorPipe in the same run.")
@click.option("--rounds", default=3, show_default=True)
def calls(against: str | None, rounds: int) -> None:
    """Latency, calls a second and tensors, between two processes of this machine."""
    modules = ["zrpc"] + (["torch.distributed.rpc"] if against else [])
    found: dict[str, list[dict[str, float]]] = {module: [] for module in modules}
    for _ in range(rounds):
        for module in modules:
            found[module].append(in_world(module, 2, _time_calls, [1, 16, 64]))
    rows = table(
        f"medians of {rounds} alternated rounds", "", *modules, *(["ratio"] if against else [])
    )
    for name in found["zrpc"][0]:
        medians = [statistics.median(f[name] for f in found[module]) for module in modules]
        ratio = [f"{medians[0] / medians[1]:.2f}"] if against else []
        rows.add_row(name, *(f"{value:,.2f}" for value in medians), *ratio)
    console.print(rows)


# ------------------------------------------------------------------ starting, lasting


@bench.command()
@click.option("--tries", default=7, show_default=True)
def startup(tries: int) -> None:
    """`zrpc --help` and a ready broker beside a Python that imports zmq and click."""
    import soak

    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    plain, helped, ready, resident = [], [], [], 0
    for _ in range(tries):
        plain.append(seconds("-c", "import zmq, click"))
        helped.append(seconds("-c", "from broker.cli import main; main()", "--help"))
        start = time.perf_counter()
        with soak.broker_process() as (_, pid):
            ready.append(time.perf_counter() - start)
            resident = psutil.Process(pid).memory_info().rss
    rows = table(f"medians of {tries}", "", "seconds", "ratio")
    base = statistics.median(plain)
    for name, values in (
        ('python -c "import zmq, click"', plain),
        ("zrpc --help", helped),
        ("zrpc broker, until its ready file", ready),
    ):
        median = statistics.median(values)
        rows.add_row(name, f"{median:.3f}", f"{median / base:.2f}")
    console.print(rows)
    console.print(f"an idle broker is {resident / 1e6:.1f} MB resident")


@bench.command()
@click.option("--processes", default=10, show_default=True)
@click.option("--calls", "each", default=20_000, show_default=True, help="Of each process.")
@click.option("--largest", default=8_000_000, show_default=True, help="Payload, bytes.")
def soak(processes: int, each: int, largest: int) -> None:
    """Every process calls the others with payloads of all sizes; checksums, losses, broker memory."""
    import soak as module

    if not module.run(processes, each, largest, console.print):
        raise click.ClickException(
            "a result was wrong or lost, or the broker's memory grew by 10 MB"
        )


if __name__ == "__main__":
    bench()
