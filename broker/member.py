"""Members and jobs, and what the membership asks its shell to do: plain data.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from . import messages
from .gathers import Gathers
from .messages import Message


@dataclass(slots=True)
class Send:
    """Send a control message to a connection."""

    connection: bytes
    message: Message


@dataclass(slots=True)
class SetRoutes:
    """Let a session send and receive."""

    session: int
    tx: list[bytes]
    rx: bytes


@dataclass(slots=True)
class RemoveRoutes:
    """Cut a session off."""

    session: int


@dataclass(slots=True)
class WatchProcess:
    """Say when this process of ours ends."""

    session: int
    pid: int


@dataclass(slots=True)
class SessionEnded:
    """A session has ended (for the RRef table and the shell)."""

    job: str
    session: int
    worker: str
    ending: str
    reason: str


Action = Send | SetRoutes | RemoveRoutes | WatchProcess | SessionEnded


@dataclass(slots=True)
class Member:
    """A session that lives."""

    session: int
    connection: bytes
    hello: messages.Hello
    rank: int
    tx: list[bytes]
    rx: bytes
    since: float
    ready: bool = False
    lingering: int = 0
    suspect_since: float | None = None
    watched: bool = False
    ghost: bool = False  # others have told of it after a restart; it has not come back yet
    # Of its last message about RRefs that was heard; -1: it is to announce itself first.
    sequence: int = 0
    asked_at: float = float("-inf")  # when it was last asked to announce itself
    announcing: list[messages.Announce] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    subscribers: set[int] = field(default_factory=set)
    watching: set[int] = field(default_factory=set)
    contenders: list[tuple[float, bytes, messages.Hello]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.hello.worker

    def as_map(self) -> dict[str, Any]:
        """What resolvers get."""
        hello = self.hello
        return messages.member_map(
            session=self.session,
            worker=hello.worker,
            rank=self.rank,
            host=hello.host,
            pid=hello.pid,
            clock=hello.clock,
            machine=hello.machine,
            script=hello.script,
        )


@dataclass(slots=True)
class Job:
    """The members of one job."""

    name: str
    world_size: int
    by_name: dict[str, Member] = field(default_factory=dict)
    by_rank: dict[int, Member] = field(default_factory=dict)
    started: bool = False
    joined: int = 0  # sessions that it ever had
    gathers: Gathers = field(default_factory=Gathers)
    ended: OrderedDict[str, str] = field(default_factory=OrderedDict)
