"""What a process holds right now: children, threads, descriptors, shared memory.

Reads /proc; where there is none (macOS), processes and threads are all that is seen.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

#: Set in our environment, so whatever tests start by exec can be told from all else.
MARK_VARIABLE = "ZRPC_TEST_MARK"

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Process:
    """A process, told from later ones of its number by when it started."""

    pid: int
    started: float

    def __str__(self) -> str:
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return f"process {self.pid} ({process.name()}): has ended, nobody waited for it"
            command = " ".join(process.cmdline())[:200] or process.name()
            return f"process {self.pid} ({process.status()}): {command}"
        except psutil.Error:
            return f"process {self.pid} (gone)"

    def ancestors(self) -> list[int]:
        """The numbers of its parent, that one's parent, and so on."""
        try:
            return [parent.pid for parent in psutil.Process(self.pid).parents()]
        except psutil.Error:
            return []

    def end(self) -> None:
        """Kill it, if it is still the same."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if process.create_time() == self.started:
                process.kill()
                process.wait(5)


@dataclass(frozen=True)
class Thread:
    """A thread of ours: Python's, or one of libzmq's own (a context that was not ended)."""

    identity: int
    name: str

    def __str__(self) -> str:
        return f"thread {self.name}"


@dataclass(frozen=True)
class Descriptor:
    """An open file descriptor of ours, and what it is open on."""

    number: int
    target: str

    def __str__(self) -> str:
        return f"file descriptor {self.number}: {self.target}"


@dataclass(frozen=True)
class Segment:
    """A file of shared memory."""

    name: str

    def __str__(self) -> str:
        return f"shared memory {_SHARED_MEMORY}/{self.name}"

    def end(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            os.unlink(f"{_SHARED_MEMORY}/{self.name}")


Resource = Process | Thread | Descriptor | Segment


@dataclass
class Holdings:
    """All that was held at one moment."""

    processes: set[Process] = field(default_factory=set)
    threads: set[Thread] = field(default_factory=set)
    descriptors: set[Descriptor] = field(default_factory=set)
    segments: set[Segment] = field(default_factory=set)

    def all(self) -> set[Resource]:
        """Everything in one set."""
        return {*self.processes, *self.threads, *self.descriptors, *self.segments}


def mark() -> str:
    """This test run's own mark, put into our environment at the first call."""
    # Not setdefault: a test run that was started by a test has a mark of its own.
    if not _own_mark:
        _own_mark.append(uuid.uuid4().hex)
        os.environ[MARK_VARIABLE] = _own_mark[0]
    return _own_mark[0]


_own_mark: list[str] = []


def holdings(*, marked: bool = False) -> Holdings:
    """What we hold now.

    Args:
        marked: look also for processes that carry our mark and are no descendants of ours
            any more; reads the environment of every process of the machine.
    """
    _collect_ended_children()
    processes = _descendants()
    if marked:
        processes |= _marked_processes()
    return Holdings(
        processes - _kept, _threads() - _kept, _descriptors() - _kept, _segments() - _kept
    )


@contextlib.contextmanager
def made_for_the_run() -> Iterator[None]:
    """What is made in this block is no test's: from then on it does not count as held."""
    before = holdings().all()
    yield
    _kept.update(holdings().all() - before)


_kept: set[Resource] = set()


def start_singletons() -> None:
    """Start what libraries start once a process and keep to its end, so that no test is blamed.

    That is pyzmq's thread which frees zero-copy messages, with a context of its own.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.copy_threshold = 0
        receiver.bind("inproc://start-singletons")
        sender.connect("inproc://start-singletons")
        sender.send(bytearray(1 << 17), copy=False)
        receiver.recv()
    context.term()


def of_others(segment: Segment) -> bool:
    """Whether a process that is not of this test run has the segment open or mapped."""
    ours = {process.pid for process in holdings(marked=True).processes} | {os.getpid()}
    path = f"{_SHARED_MEMORY}/{segment.name}"
    for pid in psutil.pids():
        if pid in ours:
            continue
        with contextlib.suppress(OSError, ValueError):
            if path in open(f"/proc/{pid}/maps").read():  # noqa: SIM115
                return True
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}") == path:
                    return True
    return False


# ------------------------------------------------------------------ processes


def _collect_ended_children() -> None:
    if "multiprocessing.process" in sys.modules:
        multiprocessing.active_children()
    # A Popen that was dropped before its end is collected here, or at the next Popen.
    subprocess._cleanup()  # type: ignore[attr-defined]


def _descendants() -> set[Process]:
    if os.path.exists("/proc/self/task") and not _has_children():
        return set()
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.ppid() != os.getpid() and process.status() == psutil.STATUS_ZOMBIE:
                continue  # its parent's business
            if process.pid != _resource_tracker():
                found.add(Process(process.pid, process.create_time()))
    return found


def _has_children() -> bool:
    """Whether we have any child: far cheaper than to list all processes."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                if file.read(1):
                    return True
        except FileNotFoundError:
            # The thread has ended; or this kernel does not tell, and we must look.
            if task == str(os.getpid()):
                return True
    return False


def _resource_tracker() -> int | None:
    """The process by which multiprocessing watches over shared memory, to our end."""
    return getattr(_tracker(), "_pid", None)


def _tracker() -> object:
    return getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)


def _marked_processes() -> set[Process]:
    return {
        Process(process.pid, process.create_time())
        for process in _alive_processes()
        if process.pid not in (os.getpid(), _resource_tracker()) and _is_marked(process.pid)
    }


def _alive_processes() -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(pid)


def _is_marked(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK_VARIABLE}={mark()}".encode() in file.read().split(b"\0")
    except OSError:
        return False  # ended, or somebody else's


# ------------------------------------------------------------------ threads, descriptors, segments


def _threads() -> set[Thread]:
    found = {
        Thread(thread.ident or 0, f"{thread.name!r} (started by Python)")
        for thread in threading.enumerate()
        if thread.is_alive()
    }
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
                name = file.read().strip()
                # Other libraries keep theirs for good (OpenMP); libzmq's end with their context.
                if name.startswith("ZMQ"):
                    found.add(Thread(int(task), f"{name!r} (of a ZeroMQ context not terminated)"))
    return found


def _descriptors() -> set[Descriptor]:
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            # One of them is that of this listing, gone by now.
            with contextlib.suppress(FileNotFoundError):
                found.add(Descriptor(int(name), os.readlink(f"/proc/self/fd/{name}")))
    tracker = getattr(
        sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None
    )
    number = getattr(tracker, "_fd", None)
    return {descriptor for descriptor in found if descriptor.number != number}


def _segments() -> set[Segment]:
    try:
        return {Segment(name) for name in os.listdir(_SHARED_MEMORY)}
    except OSError:
        return set()
