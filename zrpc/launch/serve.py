"""What a worker process does: import, join, serve, drain, leave."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import zrpc as rpc

from . import process
from .supervisor import SignalInbox

if TYPE_CHECKING:
    from zrpc.agent import Agent

#: Exit codes of ``zrpc worker``.
STOPPED, FAILED = 0, 1
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
#: Seconds that a worker takes to end at once, at most.
_AT_ONCE = 1.0
#: Seconds between looks at whether the broker is still there.
_LOOK = 0.5


@dataclass(frozen=True)
class Service:
    """What one worker is to serve.

    Args:
        name: the worker's.
        endpoint: the broker's, ``tcp://host:port``.
        job: the job to join.
        imports: modules, or paths of ``.py`` files.
        threads: calls at once.
        drain: seconds for running calls after SIGTERM.
        wait: seconds that joining may take.
        supervised: a supervisor looks after it: a second SIGTERM says nothing new then,
            since one to a whole process group comes from both.
    """

    name: str
    endpoint: str
    job: str
    imports: tuple[str, ...] = ()
    threads: int = 16
    drain: float = 30.0
    wait: float = 5.0
    supervised: bool = False

    @property
    def address(self) -> str:
        """The broker's address with the job."""
        return f"{self.endpoint}/{self.job}" if "://" in self.endpoint else self.endpoint


def serve(service: Service) -> int:
    """Serve until told to stop; returns the exit code.

    Messages go to stderr; ready is reported to the supervisor, or printed where there is none.
    """
    if not import_modules(service.imports):
        return FAILED
    options = rpc.RpcBackendOptions(
        num_worker_threads=service.threads,
        broker=service.endpoint,
        job=service.job,
        init_timeout=service.wait,
        # The command ends by its signals, not when the others have left.
        serve_after_exit=False,
    )
    try:
        rpc.init_rpc(service.name, rpc_backend_options=options)
    except Exception as error:
        _say(f"worker {service.name!r} could not join: {error}")
        return FAILED
    with SignalInbox([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]) as inbox:
        if service.supervised:
            process.report_ready(service.address)
        else:
            _say(ready_text(service.name, service.address, os.getpid()))
        return _until_told(service, inbox)


def ready_text(name: str, address: str, pid: int) -> str:
    """The line that says that a worker serves."""
    return f"worker {name} is ready at {address} (pid {pid}); stop it with Ctrl-C"


def import_modules(names: Sequence[str]) -> bool:
    """Import modules by name or path; the current folder is looked in first.

    Returns:
        False where one could not be imported; the reason is on stderr.
    """
    _look_in(os.getcwd())
    for name in names:
        try:
            _import(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Not our frames, nor those of importlib.
            frame = error.__traceback__
            while frame is not None and (
                frame.tb_frame.f_globals.get("__name__", "").split(".")[0] == "importlib"
                or frame.tb_frame.f_globals.get("__package__") == __package__
            ):
                frame = frame.tb_next
            traceback.print_exception(type(error), error, frame)
            _say(f"--import {name} has failed; no worker serves without it")
            return False
    return True


def _import(name: str) -> None:
    if not (name.endswith(".py") or os.sep in name):
        importlib.import_module(name)
        return
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name}")
    _look_in(str(path.parent))
    module = importlib.import_module(path.stem)
    found = getattr(module, "__file__", None)
    if found is None or not os.path.samefile(found, path):
        raise ImportError(
            f"{name} is to be imported as {path.stem!r}, but that is the name of "
            f"{found or 'a built-in module'}; rename the file"
        )


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _until_told(service: Service, inbox: SignalInbox) -> int:
    agent = rpc.current_agent()
    drained = _Drain(agent, service.drain)
    while True:
        readable, _, _ = select.select([inbox.reader, drained.done], [], [], _LOOK)
        for number in inbox.read():
            if number == signal.SIGINT:
                return _end_at_once(INTERRUPTED)
            if not drained.begun:
                drained.begin()
            elif not service.supervised:
                return _end_at_once(TERMINATED)
        if drained.done in readable:
            return _leave(service, drained)
        if agent.ended is not None:
            _say(f"worker {service.name!r} serves no more: {agent.ended}")
            return _end_at_once(FAILED)


class _Drain:
    """Draining in a thread, so that signals are heard meanwhile; ``done`` becomes readable."""

    def __init__(self, agent: Agent, timeout: float) -> None:
        self._agent = agent
        self._timeout = timeout
        self.begun = False
        self.quiet = False
        #: Monotonic seconds by which the process is to have ended.
        self.limit = 0.0
        self.done, self._end = os.pipe()

    def begin(self) -> None:
        self.begun = True
        self.limit = time.monotonic() + self._timeout + 2.0
        threading.Thread(target=self._run, name="zrpc-drain", daemon=True).start()

    def _run(self) -> None:
        end = time.monotonic() + self._timeout
        try:
            self.quiet = self._agent.drain(self._timeout) and _replies_taken(self._agent, end)
        finally:
            os.close(self._end)


def _replies_taken(agent: Agent, end: float) -> bool:
    """Wait until callers have taken the replies given so far; False if not by ``end``.

    A goodbye overtakes a large reply, and the callers would be told that we have left.
    """
    with agent.lock:
        # Only these: whoever still calls gets refusals, which are replies too.
        given = [(pair, number) for pair in agent.channel.pairs.values() for number in pair.served]
    pause = 0.001
    while True:
        with agent.lock:
            given = [(pair, number) for pair, number in given if number in pair.served]
        if not given or agent.ended is not None:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _leave(service: Service, drained: _Drain) -> int:
    if not drained.quiet:
        _say(
            f"worker {service.name!r} has ended while calls were still running, or replies under "
            f"way: they took longer than the {service.drain:g} s of --drain"
        )
        return _end_at_once(FAILED)
    # Gracefully, so that the last replies leave; there is nothing else to wait for.
    with contextlib.suppress(rpc.RpcTimeoutError):
        rpc.shutdown(timeout=2.0)
    # The program's own functions for the exit have what remains of the time.
    _exit_soon(STOPPED, within=max(_AT_ONCE, drained.limit - time.monotonic()))
    return STOPPED


def _end_at_once(code: int) -> int:
    _exit_soon(code)
    with contextlib.suppress(Exception):
        rpc.shutdown(graceful=False)
    return code


def _exit_soon(code: int, within: float = _AT_ONCE) -> None:
    """Handlers that still run, or threads of theirs, must not keep this process."""

    def end() -> None:
        time.sleep(within)
        os._exit(code)

    threading.Thread(target=end, name="zrpc-exit", daemon=True).start()


def listens(endpoint: str) -> bool:
    """Whether anybody listens at ``endpoint`` (tcp or ipc)."""
    parsed = urlparse(endpoint)
    try:
        if parsed.scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(endpoint.removeprefix("ipc://"))
            return True
        with socket.create_connection((parsed.hostname or "", parsed.port or 0), timeout=1.0):
            return True
    except OSError:
        return False


def wait_for_listener(endpoint: str, wait: float) -> bool:
    """Wait at most ``wait`` seconds until somebody listens at ``endpoint``; whether so."""
    limit = time.monotonic() + wait
    pause = 0.05
    while not listens(endpoint):
        if time.monotonic() + pause > limit:
            return False
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)
    return True


def command_for(service: Service) -> tuple[str, ...]:
    """The command that serves ``service`` in a fresh Python."""
    return (*python_command(__name__), json.dumps(asdict(service)))


def python_command(module: str, *, function: str = "main") -> tuple[str, ...]:
    """A fresh Python that calls ``module.function()``.

    Not ``-m``: that would look for it in the current folder first.
    """
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[0] = {root!r}; from {module} import {function}; {function}()"
    return (sys.executable, "-c", code)


def main() -> None:
    """Serve what the command line's JSON describes; for ``--start spawn``."""
    values = json.loads(sys.argv[1])
    values["imports"] = tuple(values["imports"])
    sys.exit(serve(Service(**values)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
