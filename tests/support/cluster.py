"""Processes for tests: ranks that run a function, a broker, workers that serve.

    def double(rank: int, factor: int) -> int:
        return rpc.rpc_sync(f"w{1 - rank}", operator.mul, args=(rank, factor))

    def test_both_ask_each_other():
        assert run_ranks(double, 2, 10) == [0, 10]

Ranks are forked from one server (:mod:`support.fork_server`).  Their function is found by
its import name, so it stands at the top of a test module; lambdas and closures travel by
value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from . import logs, resources
from .fork_server import SHOW_STACKS, Ended, Fork, Kill, Outcome, Refused, Started

ROOT = Path(__file__).parents[2]

#: Seconds that other ranks have to end when one has failed: they may wait for it in vain.
AFTER_FAILURE = 5.0
#: Seconds for a process that was asked to end.
GRACE = 5.0
#: Seconds for a process to come up; only catches what hangs.
START_LIMIT = 60.0


class RankError(AssertionError):
    """Ranks have failed, hung or died; the text says which, with tracebacks and logs."""


def environment(**variables: str) -> dict[str, str]:
    """Ours, with this checkout and tests/ to import from, and without ZRPC_BROKER and ZRPC_JOB."""
    kept = {k: v for k, v in os.environ.items() if k not in ("ZRPC_BROKER", "ZRPC_JOB")}
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


class ForkServer:
    """A process that has imported torch and forks ranks; ended with the ``with`` block.

    One thread at a time may use it.
    """

    def __init__(self) -> None:
        self._runs = itertools.count()
        self._started: dict[int, Started | Refused] = {}
        self._ended: dict[int, int] = {}

    def __enter__(self) -> ForkServer:
        self._folder = tempfile.TemporaryDirectory(prefix="zrpc-tests-")
        self._log = Path(self._folder.name) / "fork-server.log"
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "support.fork_server",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                # Many ranks, few cores.
                env=environment(OMP_NUM_THREADS="1"),
            )
        self._connection = Connection(ours.detach())
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def run_ranks(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        init: bool = True,
        options: Mapping[str, Any] | None = None,
        may_die: Iterable[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run ``function(rank, *args)`` in ``world_size`` processes at once.

        Args:
            function: what each rank runs.
            world_size: how many ranks.
            args: passed to all.
            timeout: seconds for all of it; then the ranks that still run are killed.
            init: each has called ``zrpc.init_rpc`` as ``w0``, ``w1``, ... before, over a
                rendezvous file of their own (or the broker of ``options``), and calls
                ``shutdown`` after, if the function has not.
            options: for ``zrpc.RpcBackendOptions``.
            may_die: ranks whose death is no failure; their result is then None.
            environment: variables to set in the ranks.

        Returns:
            What each rank has returned.

        Raises:
            RankError: one failed (with its traceback and log), died, or hung (with the
                stacks of its threads).
        """
        with self.start_ranks(
            function, world_size, *args, init=init, options=options, environment=environment
        ) as ranks:
            return ranks.results(timeout, may_die=may_die)

    def start_ranks(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        init: bool = True,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
    ) -> Ranks:
        """As :meth:`run_ranks`, but returns while they run: use it in a ``with`` block.

        Args:
            function: as for :meth:`run_ranks`.
            world_size: as for :meth:`run_ranks`.
            args: as for :meth:`run_ranks`.
            init: as for :meth:`run_ranks`.
            options: as for :meth:`run_ranks`.
            environment: as for :meth:`run_ranks`.
            labels: what the ranks are called in messages, in place of "rank 0", ...

        Raises:
            RankError: the function's module cannot be imported.
        """
        run = next(self._runs)
        folder = Path(self._folder.name) / f"run-{run}"
        folder.mkdir()
        work: Callable[[int], Any] = functools.partial(_call, function, args)
        if init:
            given = dict(options or {})
            if "broker" not in given:
                given.setdefault("init_method", f"file://{folder}/rendezvous")
            work = functools.partial(_call_in_world, function, args, world_size, given)
        home = getattr(function, "__module__", None)
        modules = ["zrpc"] if init else []
        if home and getattr(sys.modules.get(home), "__file__", None) and home != "__main__":
            modules.append(home)
        self._send(
            Fork(
                run,
                tuple(modules),
                tuple(entry or os.getcwd() for entry in sys.path),
                world_size,
                cloudpickle.dumps(work),
                tuple(str(folder / f"rank-{rank}") for rank in range(world_size)),
                {"ZRPC_TEST_FOLDER": str(folder), **(environment or {})},
            )
        )
        self._wait(lambda: run in self._started, START_LIMIT)
        answer = self._started.pop(run, None)
        if answer is None:
            raise RankError(f"The fork server has not answered within {START_LIMIT:g} s.")
        if isinstance(answer, Refused):
            raise RankError(f"The ranks could not be forked:\n{answer.why}")
        names = labels or [f"rank {rank}" for rank in range(world_size)]
        return Ranks(self, folder, list(names), answer.pids)

    # ------------------------------------------------------------ for Ranks

    def _send(self, request: Fork | Kill) -> None:
        try:
            self._connection.send(request)
        except OSError:
            raise self._gone() from None

    def _wait(self, condition: Callable[[], bool], limit: float) -> bool:
        """Take in what the server says until ``condition()``; whether that came in time."""
        end = time.monotonic() + limit
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                if not self._connection.poll(min(left, 0.05)):
                    continue
                answer = self._connection.recv()
            except (EOFError, OSError):
                raise self._gone() from None
            if isinstance(answer, Ended):
                self._ended[answer.pid] = answer.status
            else:
                self._started[answer.run] = answer
        return True

    def _gone(self) -> RankError:
        return RankError(f"The fork server has ended. Its log:\n{logs.end_of(self._log)}")


_shared: list[ForkServer] = []


def shared_server() -> ForkServer:
    """The fork server of this test run, started at the first call."""
    if not _shared:
        with resources.made_for_the_run():
            _shared.append(ForkServer().__enter__())
    return _shared[0]


def close_shared_server() -> None:
    """End it, at the end of the run."""
    while _shared:
        _shared.pop().__exit__()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world_size`` processes, each a member of one job.

    Args:
        function: what each rank runs.
        world_size: how many ranks.
        args: passed to all.
        how: ``timeout=60``, ``init=True``, ``options={...}``, ``may_die=()``,
            ``environment={...}``; see :meth:`ForkServer.run_ranks`.

    Returns:
        What each rank has returned.

    Raises:
        RankError: one failed, died or hung.
    """
    return shared_server().run_ranks(function, world_size, *args, **how)


class Ranks:
    """Ranks that run.  Leaving the ``with`` block kills those that still do, and their groups.

    Attributes:
        pids: their process numbers, by rank.
        folder: holds their logs and results.
    """

    def __init__(
        self, server: ForkServer, folder: Path, labels: list[str], pids: tuple[int, ...]
    ) -> None:
        self._server = server
        self.folder = folder
        self._labels = labels
        self.pids = pids
        self._killed: set[int] = set()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._kill_all()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank; after SIGKILL its death is no failure.

        Args:
            rank: which.
            number: the signal.
        """
        if number == signal.SIGKILL:
            self._killed.add(rank)
        self._server._send(Kill(self.pids[rank], number))

    def alive(self, rank: int) -> bool:
        """Whether the rank still runs."""
        self._server._wait(lambda: False, 0.001)
        return self._status(rank) is None

    def wait(self, rank: int, timeout: float = 60.0) -> int:
        """Wait until the rank has ended.

        Args:
            rank: which.
            timeout: seconds.

        Returns:
            Its exit code, or minus the signal that killed it.

        Raises:
            RankError: it still runs; with the stacks of its threads.
        """
        if not self._server._wait(lambda: self._status(rank) is not None, timeout):
            self._fail([], [rank], f"after {timeout:g} s")
        status = self._status(rank)
        assert status is not None
        return status

    def wait_for_file(self, name: str, timeout: float = 60.0) -> str:
        """Wait until a rank has written ``os.environ["ZRPC_TEST_FOLDER"]/name``.

        Args:
            name: the file's, in :attr:`folder`; written elsewhere and renamed, or empty.
            timeout: seconds.

        Returns:
            What is in it.

        Raises:
            RankError: a rank has failed meanwhile, or it has not come in time.
        """
        path = self.folder / name
        there = self._server._wait(lambda: path.exists() or bool(self._failed(())), timeout)
        if not there or not path.exists():
            running = [] if there else [r for r in self._all() if self._status(r) is None]
            self._fail(self._failed(()), running, f"while the file {name} was waited for")
        return path.read_text()

    def log(self, rank: int) -> str:
        """What the rank has written to stdout and stderr."""
        return logs.end_of(self.folder / f"rank-{rank}.log")

    def results(self, timeout: float = 60.0, *, may_die: Iterable[int] = ()) -> list[Any]:
        """Wait for all; see :meth:`ForkServer.run_ranks`.

        Args:
            timeout: seconds for all.
            may_die: ranks whose death is no failure; those killed with :meth:`kill` never are.

        Raises:
            RankError: as for :meth:`ForkServer.run_ranks`.
        """
        excused = {*may_die, *self._killed}
        done = self._server._wait(
            lambda: bool(self._failed(excused)) or not self._running(), timeout
        )
        if self._failed(excused):
            self._server._wait(lambda: not self._running(), AFTER_FAILURE)
        failed, hung = self._failed(excused), self._running()
        if failed or hung:
            when = f"after {timeout:g} s" if not done else f"{AFTER_FAILURE:g} s after the failure"
            self._fail(failed, hung, when)
        outcomes = [self._outcome(rank) for rank in self._all()]
        return [outcome.value if outcome else None for outcome in outcomes]

    # ------------------------------------------------------------ inside

    def _all(self) -> range:
        return range(len(self.pids))

    def _status(self, rank: int) -> int | None:
        return self._server._ended.get(self.pids[rank])

    def _running(self) -> list[int]:
        return [rank for rank in self._all() if self._status(rank) is None]

    def _failed(self, excused: Iterable[int]) -> list[int]:
        """Ranks that have ended otherwise than well."""
        return [
            rank
            for rank in self._all()
            if (status := self._status(rank)) is not None
            and (status != 0 or self._outcome(rank) is None)
            and not (rank in excused and self._outcome(rank) is None)
        ]

    def _outcome(self, rank: int) -> Outcome | None:
        try:
            with (self.folder / f"rank-{rank}.result").open("rb") as file:
                outcome = pickle.load(file)
        except FileNotFoundError:
            return None
        assert isinstance(outcome, Outcome)
        return outcome

    def _fail(self, failed: list[int], hung: list[int], when: str) -> None:
        for rank in hung:
            self._server._send(Kill(self.pids[rank], SHOW_STACKS))
        if hung:
            self._server._wait(lambda: False, 0.3)
        text = [f"{self._labels[rank]} {self._how(rank)}" for rank in failed]
        text += [f"{self._labels[rank]} (pid {self.pids[rank]}) still ran {when}" for rank in hung]
        for rank in [*(rank for rank in failed if self.log(rank)), *hung]:
            title = "its log, with the stacks of its threads" if rank in hung else "its log"
            text.append(f"--- {self._labels[rank]}, {title}:\n{self.log(rank) or '(empty)'}")
        self._kill_all()
        raise RankError("\n".join(text))

    def _how(self, rank: int) -> str:
        status = self._status(rank)
        outcome = self._outcome(rank)
        if outcome is not None and outcome.error is not None:
            return f"(pid {self.pids[rank]}) failed:\n{outcome.error}"
        if status is not None and status < 0:
            return f"(pid {self.pids[rank]}) was killed by {signal.Signals(-status).name}"
        late = "" if outcome is None else " after its function had returned"
        return f"(pid {self.pids[rank]}) ended with code {status}{late}"

    def _kill_all(self) -> None:
        running = self._running()
        for rank in running:
            self._server._send(Kill(self.pids[rank], signal.SIGKILL, group=True))
        if not self._server._wait(lambda: not self._running(), GRACE):
            raise RankError(f"Ranks {self._running()} cannot be killed.")


def _call(function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> Any:
    return function(rank, *args)


def _call_in_world(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    options: dict[str, Any],
    rank: int,
) -> Any:
    # By its name: the kit works, and is tested, without zrpc.
    rpc = importlib.import_module("zrpc")
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(**options),
    )
    try:
        value = function(rank, *args)
    except BaseException:
        # The others are not waited for: they may be stuck because of this failure.
        with contextlib.suppress(rpc.NotInitializedError):
            rpc.shutdown(graceful=False)
        raise
    with contextlib.suppress(rpc.NotInitializedError):
        rpc.shutdown()
    return value


# ------------------------------------------------------------------ broker and workers


@contextlib.contextmanager
def broker_process(*arguments: str, bind: str = "tcp://127.0.0.1:0") -> Iterator[str]:
    """A broker in a process of its own; yields its address, and ends it after the block.

    Its log is shown with tests that fail meanwhile.

    Args:
        arguments: more arguments of ``zrpc broker``.
        bind: where it listens; port 0 is any that is free.

    Raises:
        AssertionError: it did not come up, or did not end within 5 s of SIGTERM; with its log.
    """
    with tempfile.TemporaryDirectory(prefix="zrpc-broker-") as name:
        folder = Path(name)
        log, ready = folder / "broker.log", folder / "address"
        command = [sys.executable, "-m", "broker", "broker", "--bind", bind]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--ready-file", str(ready), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=environment(),
            )
        with logs.shown_on_failure(f"the broker (pid {process.pid})", log):
            try:
                yield _address(process, ready, log)
            finally:
                _end(process, log)


def _address(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    end = time.monotonic() + START_LIMIT
    while not (ready.exists() and (text := ready.read_text().strip())):
        assert process.poll() is None, (
            f"The broker ended with code {process.returncode}:\n{logs.end_of(log)}"
        )
        assert time.monotonic() < end, f"The broker did not come up:\n{logs.end_of(log)}"
        time.sleep(0.005)
    return text


def _end(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(
            f"The broker did not end within {GRACE:g} s of SIGTERM; its log:\n{logs.end_of(log)}"
        ) from None


class Cluster:
    """Workers that serve calls, each in a process of its own, and a broker.

    Args:
        server: forks the workers.
        names: the workers'.
        module: imported in each, for functions that it defines or registers.
        broker: a broker's address; with None one is started.
        options: for ``zrpc.RpcBackendOptions``.

    Example:
        with Cluster(fork_server, ["w0", "w1"]) as cluster:
            rpc.init_rpc("me", rpc_backend_options=rpc.RpcBackendOptions(broker=cluster.address))
    """

    def __init__(
        self,
        server: ForkServer,
        names: Sequence[str],
        *,
        module: str | None = None,
        broker: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.names = list(names)
        self._server = server
        self._module = module
        self._broker = broker
        self._options = dict(options or {})
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            #: The broker's address.
            self.address = self._broker or stack.enter_context(broker_process())
            self.ranks = self._server.start_ranks(
                _serve,
                len(self.names),
                self.names,
                self._module,
                {**self._options, "broker": self.address},
                init=False,
                labels=[f"worker {name}" for name in self.names],
            )
            stack.enter_context(self.ranks)
            for rank, name in enumerate(self.names):
                log = self.ranks.folder / f"rank-{rank}.log"
                stack.enter_context(logs.shown_on_failure(f"worker {name}", log))
            for name in self.names:
                self.ranks.wait_for_file(f"{name}.ready")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._stack:
            living = [rank for rank in range(len(self.names)) if self.ranks.alive(rank)]
            for rank in living:
                self.ranks.kill(rank, signal.SIGTERM)
            for rank in living:
                self.ranks.wait(rank, GRACE)

    def pid(self, name: str) -> int:
        """The process number of a worker."""
        return self.ranks.pids[self.names.index(name)]

    def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL, and wait for its end."""
        rank = self.names.index(name)
        self.ranks.kill(rank)
        self.ranks.wait(rank)

    def log(self, name: str) -> str:
        """What a worker has written."""
        return self.ranks.log(self.names.index(name))


def _serve(rank: int, names: list[str], module: str | None, options: dict[str, Any]) -> None:
    rpc = importlib.import_module("zrpc")
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    if module is not None:
        importlib.import_module(module)
    rpc.init_rpc(names[rank], rpc_backend_options=rpc.RpcBackendOptions(**options))
    (Path(os.environ["ZRPC_TEST_FOLDER"]) / f"{names[rank]}.ready").touch()
    end.wait()
    rpc.shutdown(graceful=False)
