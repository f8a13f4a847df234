"""Helpers of the tests of behaviours: meeting points, limits, and the broker of a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import zrpc as rpc


def meet(name: str) -> None:
    """All ranks of the world come to the same point."""
    rpc.current_agent().membership.gather(f"test/{name}", b"", [], 60.0)


@contextmanager
def raises_within(
    seconds: float, kind: type[BaseException], match: str | None = None, *, after: float = 0.0
) -> Iterator[Any]:
    """``pytest.raises``, and it takes from ``after`` to about ``seconds`` seconds.

    The machine may be busy: ten times as long, and five seconds in any case, are let pass.
    """
    start = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        yield caught
    took = time.monotonic() - start
    assert after <= took <= max(10 * seconds, 5.0), f"it took {took:.2f} s"


def wait_until(condition: Callable[[], bool], what: str, limit: float = 20.0) -> float:
    """Wait until ``condition()``; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit, f"{what}: not within {limit:g} s"
        time.sleep(0.01)
    return time.monotonic() - start


def brokers_of(pid: int | None = None) -> list[psutil.Process]:
    """The embedded brokers that a process (default this one) has started, and that run."""
    found = []
    for child in psutil.Process(pid or os.getpid()).children():
        try:
            if is_running(child) and "--idle-exit" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            pass  # it has ended meanwhile
    return found


def broker_of(pid: int | None = None) -> psutil.Process:
    """The one embedded broker of a process."""
    found = brokers_of(pid)
    assert len(found) == 1, found
    return found[0]


def is_running(process: psutil.Process) -> bool:
    """Does it run?  One that only waits to be collected does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tell(name: str, text: str = "") -> None:
    """Write a file for ``Ranks.wait_for_file`` of the test."""
    folder = Path(os.environ["ZRPC_TEST_FOLDER"])
    (folder / f".{name}").write_text(text)
    (folder / f".{name}").rename(folder / name)


def wait_for(name: str, limit: float = 60.0) -> None:
    """Wait for a file that another rank has written with :func:`tell`."""
    path = Path(os.environ["ZRPC_TEST_FOLDER"]) / name
    wait_until(path.exists, f"the file {name}", limit)
