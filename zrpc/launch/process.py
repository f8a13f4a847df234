"""A child between ``fork`` and its program.

A forked child must look like a fresh process to what it runs: signals as they were, no
descriptor of the supervisor's, streams of its own, other random numbers than its
brothers.  And it must not outlive the supervisor, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

#: The environment variable by which an executed child learns where to say that it is ready.
STATUS_VARIABLE = "ZRPC_STATUS_FD"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Program:
    """What a child runs: a function of this process, or a command.

    Args:
        label: its name in messages.
        target: called in a forked child; returns the exit code, or None for 0.
        command: executed instead, where there is no target.
        environment: variables to set.
        quiet: its stdout goes nowhere.
        joined: stdout and stderr are one stream, in the order of writing.
        reports: it says when it is ready, with :func:`report_ready`.
        inherited: descriptors that an executed child keeps.
        own_session: the terminal's Ctrl-C does not reach it.
    """

    label: str
    target: Callable[[], int | None] | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False
    joined: bool = False
    reports: bool = False
    inherited: tuple[int, ...] = ()
    own_session: bool = False


@dataclass(frozen=True)
class Child:
    """A process that was started, and our ends of its pipes (-1 where there is none)."""

    pid: int
    output: int
    errors: int
    status: int


def start(program: Program, signals: Mapping[int, Any]) -> Child:
    """Start ``program``.

    Args:
        program: what to run.
        signals: handlers to put back in the child, by signal.

    Raises:
        OSError: no more processes, or descriptors.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        for wanted in (not program.quiet, not program.joined, program.reports):
            reader, writer = os.pipe() if wanted else (-1, -1)
            ours.append(reader)
            theirs.append(writer)
        for stream in (sys.stdout, sys.stderr):
            # What is in a buffer would be written by every child as well.
            with contextlib.suppress(Exception):
                stream.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # The threads that Python 3.12 warns of are OpenBLAS's, which stops them for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _become(program, parent, theirs[0], theirs[1], theirs[2], signals)
    except BaseException:
        for descriptor in ours:
            if descriptor >= 0:
                os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            if descriptor >= 0:
                os.close(descriptor)
    for descriptor in ours:
        if descriptor >= 0:
            os.set_blocking(descriptor, False)
    return Child(pid, *ours)


def report_ready(text: str) -> None:
    """Tell the supervisor, if there is one, that this child serves."""
    descriptor = os.environ.pop(STATUS_VARIABLE, "")
    if descriptor:
        with contextlib.suppress(OSError):
            os.write(int(descriptor), text.encode() + b"\n")
        with contextlib.suppress(OSError):
            os.close(int(descriptor))


def die_with_parent(parent: int) -> None:
    """Be killed when ``parent`` ends, whatever ends it (on Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before we could ask.
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of what our descendants leave behind (on Linux); whether it worked."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """The child processes of ``pid``, as far as the system says so (on Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


# ------------------------------------------------------------------ in the child


def _become(
    program: Program, parent: int, output: int, errors: int, status: int, signals: Mapping[int, Any]
) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        _restore_signals(signals)
        if program.own_session:
            os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null if output < 0 else output, 1)
        os.dup2((null if output < 0 else output) if errors < 0 else errors, 2)
        os.environ.update(program.environment)
        if status >= 0:
            os.environ[STATUS_VARIABLE] = str(status)
        if program.target is None:
            code = 127
            _execute(program, status)
        else:
            _close_as_exec_does(status)
            _renew_streams()
            _renew_randomness()
            code = run_to_the_end(program.target)
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _execute(program: Program, status: int) -> None:
    for descriptor in (status, *program.inherited):
        if descriptor >= 0:
            os.set_inheritable(descriptor, True)
    # Python ignores it, and what is ignored stays so over an exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(program.command[0], program.command)
    except OSError as error:
        os.write(2, f"{program.command[0]} cannot be executed: {error.strerror}\n".encode())


def _restore_signals(signals: Mapping[int, Any]) -> None:
    signal.set_wakeup_fd(-1)
    for number, handler in signals.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _close_as_exec_does(kept: int) -> None:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            if descriptor > 2 and descriptor != kept and not os.get_inheritable(descriptor):
                os.close(descriptor)


def _renew_streams() -> None:
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        old = getattr(sys, f"__{name}__", None)
        stream = open(  # noqa: SIM115  (it lives as long as the process)
            descriptor,
            mode,
            buffering=1,
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors="backslashreplace" if name == "stderr" else getattr(old, "errors", None),
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renew_randomness() -> None:
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        # Not torch.seed(): that seeds CUDA too, which starts from a constant in a fresh process.
        torch.default_generator.seed()


def limit_threads(count: int) -> None:
    """Let torch and NumPy compute with ``count`` threads in this process.

    For a process forked after they were loaded, when it is too late for ``OMP_NUM_THREADS``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    for path in _loaded_libraries("openblas"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
                with contextlib.suppress(AttributeError):
                    getattr(library, name)(count)


def _loaded_libraries(word: str) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            # address, rights, offset, device, inode, path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and word in fields[5]:
                found.add(fields[5].strip())
    return found


def run_to_the_end(target: Callable[[], int | None]) -> int:
    """Run ``target`` and then all that Python does at its end; returns the exit code.

    An uncaught KeyboardInterrupt ends the process by SIGINT, as Python does.
    """
    code, interrupted = 0, False
    try:
        code = target() or 0
    except SystemExit as error:
        code = _code_of(error)
    except KeyboardInterrupt as error:
        interrupted = True
        _show(error)
    except BaseException as error:
        code = 1
        _show(error)
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except KeyboardInterrupt:
            interrupted = True
        except BaseException as error:
            _show(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            code = code or 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__package__") == __package__:
        traceback = traceback.tb_next
    if traceback is not None or isinstance(error, SyntaxError):
        # Otherwise our own frames are all there is to show.
        error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    with contextlib.suppress(Exception):
        sys.excepthook(type(error), error, error.__traceback__)
