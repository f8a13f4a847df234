"""Helpers of the tests of ``zrpc run`` and ``zrpc worker``: commands as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
#: Only catches what hangs.
LIMIT = 60.0


def command(name: str, *arguments: str) -> list[str]:
    """``zrpc NAME ARGUMENTS...``, as a command of this Python."""
    code = f"from zrpc.command_{name} import {name}; {name}()"
    return [sys.executable, "-c", code, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Ours without what changes how zrpc behaves, and with ``variables``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ZRPC_BROKER", "ZRPC_JOB"))}
    kept.pop("OMP_NUM_THREADS", None)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {**kept, "PYTHONPATH": path, **variables}


@contextmanager
def started(
    arguments: list[str], folder: Path, *, stdout: int = subprocess.PIPE, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A command under way in ``folder``, in a process group of its own; killed at the end."""
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def completed(
    arguments: list[str], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command that has run to its end."""
    with started(arguments, folder, **variables) as process:
        output, errors = process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def wait_until(condition: Callable[[], bool], what: str, limit: float = 10.0) -> None:
    """Wait until ``condition()``."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for_files(
    process: subprocess.Popen[str] | None, folder: Path, pattern: str, count: int
) -> list[int]:
    """Wait until ``count`` files match, and return the process ids that they hold."""

    def texts() -> list[str]:
        return [path.read_text() for path in folder.glob(pattern)]

    def there() -> bool:
        if process is not None and process.poll() is not None and process.stderr is not None:
            raise AssertionError(f"it ended with {process.returncode}:\n{process.stderr.read()}")
        found = texts()
        return len(found) == count and all(text.endswith("\n") for text in found)

    wait_until(there, f"{count} files {pattern}", LIMIT)
    return [int(number) for text in texts() for number in text.split()]


def end_by(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, float, str]:
    """Send a signal; returns the exit code, the seconds it took, and what stderr held."""
    start = time.monotonic()
    process.send_signal(number)
    code = process.wait(LIMIT)
    took = time.monotonic() - start
    assert process.stderr is not None
    return code, took, process.stderr.read()
