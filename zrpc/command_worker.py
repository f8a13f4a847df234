"""``zrpc worker``: processes that serve calls."""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import click

from broker.addresses import parse_address
from broker.run_folder import RunFolderError, run_folder

from .launch import serve as serving
from .launch.group import Workers
from .launch.output import RotatingLog, screens
from .launch.process import Program
from .launch.serve import Service
from .launch.supervisor import Supervisor
from .options import DEFAULT_BROKER
from .worker_info import check_name

_EPILOG = """\b
Exit codes:
  0    stopped by SIGTERM, all calls ended
  1    an import failed, no broker, name taken, broker lost, or calls
       were still running after --drain
  2    wrong usage
  130  Ctrl-C
  143  a second SIGTERM
With --nproc and no --restart, the code of the first worker that died
(128 and the signal's number where a signal killed it)."""


@click.command(epilog=_EPILOG)
@click.option("--name", required=True, help="The worker's name; with --nproc: NAME-0, NAME-1, ...")
@click.option(
    "--broker",
    envvar="ZRPC_BROKER",
    default=DEFAULT_BROKER,
    show_default=True,
    show_envvar=True,
    help="The broker's address, tcp://host:port or tcp://host:port/job.",
)
@click.option(
    "--job",
    default=None,
    help="The job to join; else the address's, else $ZRPC_JOB, else 'default'.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="A module, or the path of a .py file, to import before serving; may be repeated.",
)
@click.option(
    "--nproc", default=1, show_default=True, type=click.IntRange(min=1), help="How many workers."
)
@click.option(
    "--threads",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Calls that a worker runs at once.",
)
@click.option(
    "--drain",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds that running calls have after SIGTERM.",
)
@click.option(
    "--restart", is_flag=True, help="Start a worker that died again (after 0.1 s, at most 10 s)."
)
@click.option(
    "--wait",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds to wait for a broker.",
)
@click.option(
    "--start",
    type=click.Choice(["fork", "spawn"]),
    # Elsewhere than on Linux a fork of a process with system libraries loaded may crash.
    default="fork" if sys.platform == "linux" else "spawn",
    show_default=True,
    help="Fork workers from this process, or start a fresh Python for each.",
)
@click.option(
    "--preload",
    is_flag=True,
    help="Import before forking: faster and smaller, for modules that start no threads.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where each worker's log file goes; with --nproc or --restart default the run folder.",
)
def worker(
    name: str,
    broker: str,
    job: str | None,
    imports: tuple[str, ...],
    nproc: int,
    threads: int,
    drain: float,
    restart: bool,
    wait: float,
    start: str,
    preload: bool,
    log_dir: Path | None,
) -> None:
    """Start workers that serve calls until they are stopped.

    SIGTERM drains: no new calls, running ones end, goodbye. Ctrl-C ends all at once.
    Workers that are several, restarted or logged are looked after by this process: it shows
    what they print under their names and keeps it in a file each.

    \b
    Example:
      zrpc worker --name w1 --import train
    """
    service = _service(name, broker, job, imports, threads, drain, wait)
    if not serving.wait_for_listener(service.endpoint, wait):
        raise _Failure(
            f"No broker answers at {service.endpoint} (waited {wait:g} s). Start one with "
            f"`zrpc broker --bind {service.endpoint}`, or give the address of a running one with "
            "--broker or ZRPC_BROKER; --wait gives it more time."
        )
    if nproc == 1 and not restart and log_dir is None and start == "fork":
        try:
            code = serving.serve(service)
        except KeyboardInterrupt:
            code = serving.INTERRUPTED
        sys.exit(code)
    if preload and start == "fork" and not serving.import_modules(service.imports):
        sys.exit(serving.FAILED)
    names = [name] if nproc == 1 else [f"{name}-{number}" for number in range(nproc)]
    sys.exit(_supervise(service, names, restart=restart, spawn=start == "spawn", log_dir=log_dir))


class _Failure(click.ClickException):
    exit_code = serving.FAILED


def _service(
    name: str,
    broker: str,
    job: str | None,
    imports: tuple[str, ...],
    threads: int,
    drain: float,
    wait: float,
) -> Service:
    try:
        check_name(name)
        address = parse_address(broker)
    except (ValueError, RuntimeError) as error:
        raise click.UsageError(str(error)) from None
    return Service(
        name,
        address.endpoint,
        job or address.job or os.environ.get("ZRPC_JOB") or "default",
        imports,
        threads,
        drain,
        max(5.0, wait),
    )


def _supervise(
    service: Service, names: list[str], *, restart: bool, spawn: bool, log_dir: Path | None
) -> int:
    programs = []
    for name in names:
        one = replace(service, name=name, supervised=True)
        programs.append(
            Program(
                name,
                target=None if spawn else functools.partial(serving.serve, one),
                command=serving.command_for(one) if spawn else (),
                joined=True,
                reports=True,
            )
        )
    logs = _logs(service, names, log_dir)
    _, errors = screens(names)
    supervisor = Supervisor(
        programs,
        Workers("worker", names, restart=restart, drain=service.drain),
        output=errors,
        errors=errors,
        logs=logs,
        # Whoever watched may go; the workers have others to serve.
        output_matters=False,
        on_ready=lambda index, address, pid: supervisor.say(
            serving.ready_text(names[index], address, pid)
        ),
    )
    supervisor.say(f"logs: {logs[0].path if len(logs) == 1 else logs[0].path.parent}")
    return supervisor.run()


def _logs(service: Service, names: list[str], log_dir: Path | None) -> list[RotatingLog]:
    try:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            return [RotatingLog(log_dir / f"{name}.log") for name in names]
        # The run folder is shared by all jobs and brokers of this user.
        place = re.sub(
            r"[^A-Za-z0-9.-]+", "_", f"{service.job}@{service.endpoint.partition('://')[2]}"
        )
        folder = run_folder()
        return [RotatingLog(folder / f"{name}.{place}.log") for name in names]
    except RunFolderError as error:
        raise _Failure(f"{error} Or give --log-dir.") from None
    except OSError as error:
        raise _Failure(
            f"The log file {error.filename} cannot be opened: {error.strerror}."
        ) from None
