"""``zrpc run``: a broker and the ranks of a script, on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass

import click

from broker.addresses import parse_address
from broker.tickets import SIZE, VARIABLE

from .launch import process
from .launch.group import Ranks
from .launch.output import screens
from .launch.process import Child, Program
from .launch.program import ProgramError, Script
from .launch.serve import python_command, wait_for_listener
from .launch.supervisor import Supervisor

#: Seconds that a broker has to listen.
_BROKER_PATIENCE = 20.0
#: Seconds to wait for a broker that was named.
_LISTENER_PATIENCE = 2.0

_EPILOG = """\b
Exit codes:
  0        every rank ended with 0
  N        of the first rank that failed (128 and the signal's number
           where a signal killed it); the others are stopped
  1        no broker
  2        wrong usage
  130,143  Ctrl-C, SIGTERM"""


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--nproc",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many ranks.",
)
@click.option(
    "--broker",
    default=None,
    help="Use the broker at this address, tcp://host:port or tcp://host:port/job, "
    "instead of one of its own.",
)
@click.option(
    "--start",
    type=click.Choice(["fork", "spawn"]),
    # Elsewhere than on Linux a fork of a process with system libraries loaded may crash.
    default="fork" if sys.platform == "linux" else "spawn",
    show_default=True,
    help="Fork ranks from this process, or start a fresh Python for each.",
)
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    nproc: int, broker: str | None, start: str, is_module: bool, arguments: tuple[str, ...]
) -> None:
    """Run a script as N ranks on this machine, with a broker of their own.

    Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ZRPC_BROKER and
    ZRPC_JOB in its environment, and its output is shown under its number. The first that
    fails ends all. Options of the script come after it; nothing that the script leaves
    behind outlives the command.

    \b
    Example:
      zrpc run --nproc 4 train.py --epochs 3
    """
    if not arguments:
        raise click.UsageError("Missing the script to run (or -m and a module).")
    script = Script(arguments[0], arguments[1:], is_module)
    try:
        script.check()
    except ProgramError as error:
        raise click.UsageError(str(error)) from None
    own = _start_broker() if broker is None else None
    endpoint, job = (own.endpoint, "") if own is not None else _named_broker(broker or "")
    environment = _environment(nproc, endpoint, job)
    programs = [
        _program(
            label, script, {**environment, "RANK": label, "LOCAL_RANK": label}, start == "spawn"
        )
        for label in map(str, range(nproc))
    ]
    sys.exit(_supervise(programs, own, say_threads="OMP_NUM_THREADS" in environment))


def _named_broker(broker: str) -> tuple[str, str]:
    """The endpoint of a broker that is there, and the job of its address."""
    try:
        address = parse_address(broker)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not wait_for_listener(address.endpoint, _LISTENER_PATIENCE):
        raise click.ClickException(
            f"No broker answers at {address.endpoint}. Start one with "
            f"`zrpc broker --bind {address.endpoint}`, or leave --broker out: then this run has "
            "one of its own."
        )
    return address.endpoint, address.job or ""


def _environment(nproc: int, endpoint: str, job: str) -> dict[str, str]:
    environment = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "ZRPC_BROKER": endpoint,
        "ZRPC_JOB": job or f"run-{secrets.token_hex(4)}",
    }
    if nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def _program(label: str, script: Script, environment: dict[str, str], spawn: bool) -> Program:
    if spawn:
        return Program(label, command=script.command(), environment=environment)
    threads = 1 if "OMP_NUM_THREADS" in environment else None
    target = functools.partial(script.run_in_rank, threads)
    return Program(label, target=target, environment=environment)


def _supervise(programs: list[Program], own: _OwnBroker | None, *, say_threads: bool) -> int:
    ranks = len(programs)
    if own is not None:
        programs = [*programs, own.again]
    labels = [program.label for program in programs]
    output, errors = screens(labels)
    if say_threads:
        errors.say(
            f"zrpc run: {ranks} ranks share this machine, so each computes with one thread "
            "(OMP_NUM_THREADS=1); set OMP_NUM_THREADS for another number"
        )
    group = Ranks("rank", labels, helper=own is not None)
    supervisor = Supervisor(programs, group, output=output, errors=errors)
    if own is not None:
        supervisor.adopt(ranks, own.child)
    return supervisor.run()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------ the broker


@dataclass(frozen=True)
class _OwnBroker:
    """The broker of this run."""

    child: Child
    endpoint: str
    #: Starts another on the same ports, should it die.
    again: Program


def _broker_program(
    bind: str, *options: str, secret: str, inherited: tuple[int, ...] = ()
) -> Program:
    return Program(
        "broker",
        command=(*python_command("broker.cli"), "broker", "--bind", bind, *options),
        # The one that is started in its place knows its sessions.
        environment={VARIABLE: secret},
        quiet=True,
        inherited=inherited,
        # Ctrl-C at the terminal is for the ranks, which say goodbye to it.
        own_session=True,
    )


def _start_broker() -> _OwnBroker:
    """Start a broker on a free port, and wait until it listens."""
    secret = secrets.token_hex(SIZE)
    reader, writer = os.pipe()
    try:
        program = _broker_program(
            "tcp://127.0.0.1:0", "--ready-fd", str(writer), secret=secret, inherited=(writer,)
        )
        child = process.start(program, {})
    finally:
        os.close(writer)
    try:
        line = _read_line(reader, _BROKER_PATIENCE)
    except BaseException:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        raise
    finally:
        os.close(reader)
    if line:
        # The address, and the port for data: another one must take both.
        endpoint, _, port = line.partition(" ")
        again = _broker_program(endpoint, *(["--data-port", port] if port else []), secret=secret)
        return _OwnBroker(child, endpoint, again)
    with contextlib.suppress(BlockingIOError):
        sys.stderr.write(os.read(child.errors, 1 << 16).decode(errors="replace"))
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    raise click.ClickException(
        "The broker of this run did not start; its messages are above. "
        "Start one with `zrpc broker` and give its address with --broker."
    )


def _read_line(descriptor: int, patience: float) -> str:
    """A whole line, or nothing where the writer ended or was too slow."""
    limit = time.monotonic() + patience
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))
        chunk = os.read(descriptor, 4096) if ready else b""
        if not chunk:
            return ""
        data += chunk
    return data.decode().strip()
