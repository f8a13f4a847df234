"""Which machine this is: whose process ids can be watched, whose clock can be compared."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@lru_cache(maxsize=1)
def machine_identity() -> str:
    """Equal for two processes that can see each other's process ids; empty where that is unknown."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    return f"{boot}/{_namespace('pid')}" if boot else ""


@lru_cache(maxsize=1)
def clock_identity() -> str:
    """Equal for two processes that read the same CLOCK_MONOTONIC."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    return f"{boot}/{_namespace('time')}" if boot else f"{socket.gethostname()}/{os.getpid()}"


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is none to be had.

    A process that has ended already gives None too.
    """
    opener = getattr(os, "pidfd_open", None)
    if opener is None or pid <= 0:
        return None
    try:
        return int(opener(pid))
    except OSError:
        return None
