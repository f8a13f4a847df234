"""The process that ranks of tests are forked from: ``python -m support.fork_server FD``.

It has imported torch and whatever was asked for, runs one thread, and does nothing else: a
rank costs some 10 ms, where a fresh Python with torch takes two seconds.

:class:`support.cluster.ForkServer` is its other end.  Over the descriptor FD, a connection
of multiprocessing, it is asked for :class:`Fork` and :class:`Kill`, and answers with
:class:`Started` or :class:`Refused`, and with :class:`Ended` for each child that has ended.
When the connection closes it kills its children and ends.

What a rank leaves behind becomes a child of this process (on Linux), so that the leak check
sees whose it is, and so that it is collected when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

#: Makes a rank write the stacks of all its threads to its log.
SHOW_STACKS = signal.SIGUSR2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Fork:
    """Fork children.

    Args:
        run: comes back with the answer.
        modules: imported here before the fork.
        path: ``sys.path`` to import with.
        count: how many children.
        work: the pickle of a function that is called with the child's number.
        files: for each child, the paths (without suffix) of its log and result.
        environment: variables to set in the children.
    """

    run: int
    modules: tuple[str, ...]
    path: tuple[str, ...]
    count: int
    work: bytes
    files: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Kill:
    """Send a signal to a child, or to its whole process group, if it has not ended."""

    pid: int
    number: int
    group: bool = False


@dataclass(frozen=True)
class Started:
    """The children of a run, as process numbers."""

    run: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """Nothing was forked; says why."""

    run: int
    why: str


@dataclass(frozen=True)
class Ended:
    """A child has ended: with its exit code, or minus the signal that killed it."""

    pid: int
    status: int


@dataclass(frozen=True)
class Outcome:
    """What a child has to tell, as a pickle in its result file."""

    value: Any = None
    error: str | None = None


class Server:
    """The loop.

    Args:
        connection: to the tests.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.children: set[int] = set()
        self.wake_reader, self.wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Serve until the connection closes."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wake-up is written
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests to handle
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
        try:
            while True:
                requests = self.connection.fileno()
                ready, _, _ = select.select([requests, self.wake_reader], [], [])
                if self.wake_reader in ready:
                    os.read(self.wake_reader, 4096)
                    self.collect()
                if requests in ready:
                    self.handle(self.connection.recv())
        except (EOFError, ConnectionError):
            pass  # the tests have ended
        finally:
            for pid in self.children | adopted_children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def collect(self) -> None:
        """Tell of the children that have ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self.children:
                    self.children.remove(pid)
                    self.connection.send(Ended(pid, os.waitstatus_to_exitcode(status)))

    def handle(self, request: Fork | Kill) -> None:
        """Do what was asked for."""
        if isinstance(request, Kill):
            # Not collected yet, so the number is still that child's.
            if request.pid in self.children:
                kill = os.killpg if request.group else os.kill
                with contextlib.suppress(ProcessLookupError):
                    kill(request.pid, request.number)
            return
        try:
            self.prepare(request)
        except BaseException:
            self.connection.send(Refused(request.run, traceback.format_exc()))
            return
        pids = tuple(self.fork(request, number) for number in range(request.count))
        self.connection.send(Started(request.run, pids))

    def prepare(self, request: Fork) -> None:
        """Import what the children need."""
        sys.path[:] = [*request.path, *(p for p in sys.path if p not in request.path)]
        importlib.invalidate_caches()
        for module in request.modules:
            importlib.import_module(module)
            if threading.active_count() > 1:
                names = [thread.name for thread in threading.enumerate()]
                raise RuntimeError(
                    f"Importing {module} has started threads ({', '.join(names[1:])}); a process "
                    "with threads must not fork. Start them in a function instead."
                )

    def fork(self, request: Fork, number: int) -> int:
        """One child."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for descriptor in (self.wake_reader, self.wake_writer, self.connection.fileno()):
                    os.close(descriptor)
                become_rank(request, number, parent)
            finally:
                os._exit(1)
        # Here too: whoever is quicker, it is done before anybody signals the group.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self.children.add(pid)
        return pid


def die_with(parent: int) -> None:
    """Be killed when ``parent`` ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prctl(option: int, value: int) -> None:
    """The system call of that name; does nothing where there is none."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopted_children() -> set[int]:
    """Our children, whoever started them, as far as the system says so (on Linux)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()


def become_rank(request: Fork, number: int, parent: int) -> NoReturn:
    """In the child: its own group, streams, signals; then the work; then the end."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    die_with(parent)
    for one in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
    log = os.open(
        request.files[number] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    )
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(2, all_threads=True)
    faulthandler.register(SHOW_STACKS, 2, all_threads=True)
    os.environ.update(request.environment)
    random.seed()
    code = run_to_the_end(lambda: pickle.loads(request.work)(number), request.files[number])
    os._exit(code)


def run_to_the_end(work: Callable[[], Any], file: str) -> int:
    """Do the work, write its outcome, and do what Python does at its end."""
    try:
        outcome = Outcome(value=work())
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    try:
        encoded = pickle.dumps(outcome)
    except BaseException:
        outcome = Outcome(error=f"The result cannot be pickled:\n{traceback.format_exc()}")
        encoded = pickle.dumps(outcome)
    with open(file + ".unfinished", "wb") as result:
        result.write(encoded)
    os.rename(file + ".unfinished", file + ".result")
    code = 0 if outcome.error is None else 1
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()
            code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def main() -> None:
    """Import torch, then serve."""
    # pytest's process may be killed: then nobody closes the connection's copies in its children.
    die_with(int(sys.argv[2]))
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    importlib.import_module("support.cluster")
    importlib.import_module("torch")
    Server(connection).serve()


if __name__ == "__main__":
    # Requests are pickled as classes of this module, not of __main__.
    importlib.import_module("support.fork_server").main()
