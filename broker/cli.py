"""The command line: ``zrpc``.

Commands that need torch live in :mod:`zrpc` and are loaded when they are run, so that
``zrpc --help`` and ``zrpc broker`` start as quickly as ZeroMQ allows.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from ._version import __version__

DEFAULT_ADDRESS = "tcp://127.0.0.1:5555"

#: Commands of zrpc, and the help that is shown without loading them.
_LAZY = {
    "worker": ("zrpc.command_worker:worker", "Start workers that serve calls."),
    "run": ("zrpc.command_run:run", "Run a script on N ranks of this machine, with a broker."),
}


class LazyGroup(click.Group):
    """A group whose commands in ``_LAZY`` are imported when they are needed."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *_LAZY])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        found = super().get_command(context, name)
        if found is not None or name not in _LAZY:
            return found
        module, _, attribute = _LAZY[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(context):
            command = super().get_command(context, name)
            rows.append((name, command.get_short_help_str() if command else _LAZY[name][1]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="zrpc")
def zrpc() -> None:
    """Remote procedure calls for PyTorch training scripts.

    \b
    zrpc broker                       in one terminal
    zrpc worker --name w1             in another
    python -c 'import zrpc as rpc; rpc.init_rpc("me"); print(rpc.rpc_sync("w1", max, (1, 2)))'
    """


def fail(text: str, code: int) -> None:
    """Say a sentence on stderr and exit."""
    click.echo(f"zrpc: {text}", err=True)
    sys.exit(code)


@zrpc.command()
@click.option(
    "--bind", default=DEFAULT_ADDRESS, show_default=True, help="Where to listen; port 0 for any."
)
@click.option("--data-port", default=0, help="Port for data; default the next one, or any.")
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the address there once listening.",
)
@click.option(
    "--grace", default=10.0, show_default=True, help="Seconds that a worker may be unreachable."
)
@click.option("--verbose", is_flag=True, help="Log who comes and goes.")
@click.option("--ready-fd", type=int, hidden=True)
@click.option("--watch-pid", default=0, hidden=True)
@click.option("--idle-exit", is_flag=True, hidden=True)
def broker(
    bind: str,
    data_port: int,
    ready_file: Path | None,
    grace: float,
    verbose: bool,
    ready_fd: int | None,
    watch_pid: int,
    idle_exit: bool,
) -> None:
    """Start a broker; runs until Ctrl-C or SIGTERM.

    Exit codes: 0 stopped, 2 cannot listen there.
    """
    import signal

    from .addresses import AddressError, parse_address
    from .server import BindError, Broker

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s zrpc broker: %(message)s",
    )
    try:
        address = parse_address(bind)
        if address.job:
            raise AddressError(
                f"{bind!r} names a job; a broker serves all jobs, workers name theirs."
            )
        server = Broker(
            address,
            data_port=data_port,
            watch_pid=watch_pid,
            idle_exit=idle_exit,
            grace=grace,
            secret=_secret(address.endpoint if address.port or not address.host else ""),
        )
    except (AddressError, BindError) as error:
        fail(str(error), 2)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.stop)
    if ready_fd is not None:
        os.write(ready_fd, f"{server.endpoint} {server.membership.ports[0]}\n".encode())
        os.close(ready_fd)
    else:
        _announce(server.endpoint, address.is_loopback)
    if ready_file is not None:
        try:
            part = ready_file.with_name(ready_file.name + ".part")
            part.write_text(server.endpoint + "\n")
            part.rename(ready_file)
        except OSError as error:
            server.stop()
            server.run()
            fail(f"the ready file {str(ready_file)!r} cannot be written: {error.strerror}.", 2)
    try:
        server.run()
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _secret(endpoint: str) -> bytes | None:
    """What sessions are taken up again with after a restart; at any port there will be none."""
    from .run_folder import RunFolderError
    from .tickets import handed_secret, kept_secret

    handed = handed_secret()
    if handed is not None or not endpoint:
        return handed
    try:
        return kept_secret(endpoint)
    except RunFolderError as error:
        click.echo(
            f"zrpc: {error} Workers will have to join anew after a restart of this broker.",
            err=True,
        )
        return None


def _announce(endpoint: str, is_loopback: bool) -> None:
    click.echo(f"The broker listens at {endpoint} (stop it with Ctrl-C). Now start a worker:")
    option = "" if endpoint == DEFAULT_ADDRESS else f" --broker {endpoint}"
    click.echo(f"  zrpc worker --name w1{option}")
    if not is_loopback:
        click.echo(
            "zrpc: this address can be reached from other machines, and there is no authentication yet: "
            "whoever reaches it can run code on the workers. Bind it only in a network that you trust.",
            err=True,
        )
    sys.stdout.flush()


@zrpc.command()
@click.option(
    "--broker",
    "url",
    default=None,
    help="The broker's address; default ZRPC_BROKER, else " + DEFAULT_ADDRESS,
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole status document.")
@click.option("--timeout", default=3.0, show_default=True, help="Seconds to wait for the answer.")
def status(url: str | None, as_json: bool, timeout: float) -> None:
    """Show jobs, workers, their state, calls and errors.

    Exit codes: 0 shown, 1 no broker answers, 2 a bad address.
    """
    from .addresses import AddressError
    from .status import NoBroker, ask_status, print_status

    address = url or os.environ.get("ZRPC_BROKER") or DEFAULT_ADDRESS
    try:
        document: dict[str, Any] = ask_status(address, timeout)
    except AddressError as error:
        fail(str(error), 2)
        return
    except NoBroker as error:
        fail(str(error), 1)
        return
    if as_json:
        import json

        click.echo(json.dumps(document, indent=2))
    else:
        print_status(document)


def main() -> None:
    """Entry point of ``zrpc``."""
    zrpc(prog_name="zrpc")
