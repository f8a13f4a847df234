"""``zrpc status``: asking a broker for its picture, and showing it."""

from __future__ import annotations

import sys
from typing import Any

import zmq

from . import messages
from .addresses import parse_address


class NoBroker(Exception):
    """Nobody answers at that address."""


def ask_status(address: str, timeout: float) -> dict[str, Any]:
    """Return the status document of the broker at ``address``.

    Args:
        timeout: seconds.

    Raises:
        AddressError: it is no address.
        NoBroker: no answer came in time.
    """
    endpoint = parse_address(address).endpoint
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(messages.encode(messages.Status(1)))
        if not socket.poll(int(timeout * 1000)):
            raise NoBroker(
                f"no broker answers at {endpoint} (waited {timeout:g} s). Start one with "
                f"`zrpc broker --bind {endpoint}`, or give another address with --broker or ZRPC_BROKER."
            )
        answer = messages.decode(socket.recv())
        if not isinstance(answer, messages.Answer) or not isinstance(answer.value, dict):
            raise NoBroker(f"what answers at {endpoint} is no zrpc broker of this version.")
        return answer.value
    finally:
        socket.close(0)
        context.term()


def print_status(document: dict[str, Any]) -> None:
    """Show it as tables."""
    from rich.console import Console
    from rich.table import Table

    # Into a pipe or a file nothing is cut, however long the names.
    terminal = sys.stdout.isatty()
    console = Console() if terminal else Console(width=250)
    broker = document["broker"]
    console.print(
        f"broker [bold]{broker['address']}[/bold]  zrpc {broker['version']}  pid {broker['pid']} on "
        f"{broker['host']}  up {duration(broker['up'])}  {size(broker['resident_bytes'])} resident  "
        f"{broker['messages']} messages, {size(broker['bytes'])} routed",
        highlight=False,
    )
    if not document["jobs"]:
        console.print("No workers. Start one with `zrpc worker --name w1`.", highlight=False)
    for name, job in document["jobs"].items():
        world = f", a world of {job['world_size']}" if job["world_size"] else ""
        waiting = "" if job["started"] else ", not complete yet"
        table = Table(
            title=f"job {name}{world}{waiting}: {job['rrefs']} RRefs", title_justify="left"
        )
        for heading in ("worker", "rank", "state", "process", "up"):
            table.add_column(heading)
        for heading in ("calls", "served", "errors", "timeouts", "running", "queued"):
            table.add_column(heading, justify="right")
        for worker in job["workers"]:
            counters = worker["counters"]
            table.add_row(
                worker["name"],
                str(worker["rank"]),
                worker["state"],
                f"{worker['pid']} on {worker['host']}",
                duration(worker["up"]),
                *(
                    str(counters.get(key, 0))
                    for key in ("calls", "served", "errors", "timeouts", "running", "queued")
                ),
            )
        console.print(table)


def duration(seconds: float) -> str:
    """A time span as people read it.

    Example:
        >>> [duration(5), duration(75), duration(7200)]
        ['5 s', '1 min 15 s', '2 h 0 min']
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float) -> str:
    """A number of bytes as people read it.

    Example:
        >>> [size(12), size(2048), size(5 << 30)]
        ['12 B', '2.0 KiB', '5.0 GiB']
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
