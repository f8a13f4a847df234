"""The control channel: typed messages between a worker's agent and the broker.

Each message is one frame, a msgpack array ``[name, {field: value}]``.  A message class
is a dataclass; its annotations are what :func:`decode` holds the fields against, so
a handler never meets a wrong type.  Unknown fields are ignored and missing ones take
their defaults, so that a later release can add some; an unknown name is a
:class:`~broker.protocol.ProtocolError`.

A worker's life on this channel::

    Hello ->            <- Welcome (session, routing ids, ports) or Refused
    (dials the data routers, sees its own echo come back)
    Ready ->            <- Started (at once, or when the whole world is there)
    Resolve, Watch, References, Gather, Cancel, Report ... ->
                        <- Answer, Failure, Fate, Freed, Confirm, OwnersDied, Cancelled, Ping ...
    Goodbye ->          <- Farewell

Requests carry a number that their :class:`Answer` or :class:`Failure` repeats.
``Status`` may be asked by anyone who can connect, with no hello.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, Union

import msgpack

from .protocol import PROTOCOL_MAXIMUM, PROTOCOL_MINIMUM, ProtocolError

#: Largest control message, in bytes.
MAX_CONTROL_SIZE = 16 * 1024 * 1024

_BY_NAME: dict[str, type[Message]] = {}
_MessageType = TypeVar("_MessageType", bound="type[Message]")


class Message:
    """Base of all control messages."""

    name: ClassVar[str]


def _message(cls: _MessageType) -> _MessageType:
    cls.name = cls.__name__
    _BY_NAME[cls.name] = cls
    return cls


# ----------------------------------------------------------------- worker -> broker


@_message
@dataclass(slots=True)
class Hello(Message):
    """A worker asks to become a member of a job.

    ``rank`` and ``world_size`` are -1 and 0 where they were not given.  ``machine``
    names the kernel and process-id namespace (two processes of one ``machine`` can
    watch each other by pid), ``clock`` the kernel whose CLOCK_MONOTONIC is read.
    ``script`` is the digest of the program file.  ``resume`` is the session to take up
    again after a reconnect, with the routing ids that belong to it, and the ticket of its
    welcome.
    """

    worker: str
    job: str = "default"
    rank: int = -1
    world_size: int = 0
    pid: int = 0
    host: str = ""
    machine: str = ""
    clock: str = ""
    script: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    protocol_minimum: int = PROTOCOL_MINIMUM
    protocol_maximum: int = PROTOCOL_MAXIMUM
    resume: int = 0
    resume_tx: list[bytes] = field(default_factory=list)
    resume_rx: bytes = b""
    ticket: bytes = b""
    was_ready: bool = False


@_message
@dataclass(slots=True)
class Ready(Message):
    """The worker's rx has received its own echo through every router."""


@_message
@dataclass(slots=True)
class Resolve(Message):
    """Who is it?  By name, rank or session (one of them); its fate is told from then on."""

    request: int
    worker: str = ""
    rank: int = -1
    session: int = 0


@_message
@dataclass(slots=True)
class Watch(Message):
    """Tell me the fate of these sessions (at once for those already gone)."""

    sessions: list[int]


@_message
@dataclass(slots=True)
class ListMembers(Message):
    """All members of my job, as :func:`member_map` writes them."""

    request: int


@_message
@dataclass(slots=True)
class WhoIsMissing(Message):
    """Which ranks of my world have not come yet; with ``key``, which workers to that gather."""

    request: int
    key: str = ""


@_message
@dataclass(slots=True)
class Gather(Message):
    """Bring ``value`` to a meeting of ``workers`` (names; empty: my whole world).

    Answered with ``{name: value}`` when all are there.  ``key`` names the meeting, the
    same for all who take part.  A participant that is lost or has left ends it with a
    :class:`Failure` of code "lost", or, where ``tolerant``, is not waited for.
    """

    request: int
    key: str
    value: bytes = b""
    workers: list[str] = field(default_factory=list)
    tolerant: bool = False


@_message
@dataclass(slots=True)
class LeaveGather(Message):
    """I no longer wait in that meeting."""

    key: str


@_message
@dataclass(slots=True)
class Linger(Message):
    """Answered when no other member of my job is left that does not linger too."""

    request: int


@_message
@dataclass(slots=True)
class Cancel(Message):
    """Tell session ``callee`` that its call ``call`` of mine is no longer wanted."""

    callee: int
    call: int
    reason: str = ""


@_message
@dataclass(slots=True)
class References(Message):
    """RRef bookkeeping, in order; see :mod:`broker.rref_table` for the rules.

    Each operation is ``["add", rref, owner, fork, type, made_at]``,
    ``["take", rref, owner, fork]``, ``["drop", rref, owner, fork]`` or
    ``["give", rref, owner, fork, receiver]``; ``rref`` and ``fork`` are ``[session, number]``.
    ``sequence`` counts these messages of a session.  They are heard once, and in order: the
    sender keeps them until a ``heard`` says so, and says again what was lost on a cut connection.
    """

    operations: list[list[Any]]
    sequence: int = 0


@_message
@dataclass(slots=True)
class Announce(Message):
    """All that control must know of me, after a reconnect; may come in parts.

    ``forks`` holds ``[rref, owner, fork, held]`` of all forks that I hold, or have minted and
    sent; ``owned`` the RRefs of mine that others may hold; ``minted`` the next number that I
    shall mint; ``sequence`` that of my last :class:`References`; ``fresh`` that this stands
    for all of those, heard or not.  ``peers`` holds the members
    that I know (:func:`member_map`), ``gathers`` the last meetings that have ended for me,
    ``[key, {name: value}]``: a broker that was started again learns from them.
    """

    forks: list[list[Any]] = field(default_factory=list)
    owned: list[list[int]] = field(default_factory=list)
    minted: int = 0
    sequence: int = 0
    peers: list[dict[str, Any]] = field(default_factory=list)
    gathers: list[list[Any]] = field(default_factory=list)
    fresh: bool = False
    more: bool = False


@_message
@dataclass(slots=True)
class Report(Message):
    """Counters of this worker since it started (calls, errors, timeouts, pending, ...)."""

    counters: dict[str, int]


@_message
@dataclass(slots=True)
class Goodbye(Message):
    """The worker leaves by its own will."""

    reason: str = ""


@_message
@dataclass(slots=True)
class Pong(Message):
    """The answer to :class:`Ping`; the broker's tells which :class:`References` it has heard last."""

    number: int = 0
    heard: int = 0


@_message
@dataclass(slots=True)
class Status(Message):
    """The whole picture: jobs, members, counters.  Asked by ``zrpc status``; needs no hello."""

    request: int = 0


# ----------------------------------------------------------------- broker -> worker


@_message
@dataclass(slots=True)
class Welcome(Message):
    """You are a member.

    ``tx`` holds the routing id for each data router, ``rx`` the one for the receiving
    socket; both are secrets.  ``data`` holds each router's port (or ipc path); the host
    is the one that the worker dialled for control.  ``ticket`` proves, also to a broker that
    was started again, that the session is this worker's.  ``heard`` is the sequence number of
    its last :class:`References` that was heard, -1 where none is before an :class:`Announce`.
    ``heartbeat`` and ``grace`` are seconds: how long a connection may be silent, and a worker
    unreachable.
    """

    session: int
    epoch: int
    rank: int
    tx: list[bytes]
    rx: bytes
    data: list[str]
    heartbeat: float = 10.0
    grace: float = 10.0
    ticket: bytes = b""
    heard: int = 0


@_message
@dataclass(slots=True)
class Refused(Message):
    """You are not: ``text`` says why.

    ``code`` is for programs: "name", "rank", "protocol", "world", "mixed", "identity", "lost".
    """

    code: str
    text: str


@_message
@dataclass(slots=True)
class Started(Message):
    """``init_rpc`` may return: the whole world is there (or none was asked for)."""


@_message
@dataclass(slots=True)
class StartFailed(Message):
    """The world that you wait for cannot come about; ``text`` says why."""

    text: str


@_message
@dataclass(slots=True)
class Answer(Message):
    """The answer to a request."""

    request: int
    value: Any = None


@_message
@dataclass(slots=True)
class Failure(Message):
    """A request failed: ``code`` "unknown" or "lost"; ``names`` says who is there, or who was lost."""

    request: int
    code: str
    text: str
    names: list[str] = field(default_factory=list)


@_message
@dataclass(slots=True)
class Fate(Message):
    """A watched session ended: ``ending`` is "lost", "left" or "replaced".

    ``replacement`` is the session that has its name now, or 0.
    """

    session: int
    ending: str
    reason: str
    replacement: int = 0


@_message
@dataclass(slots=True)
class Cancelled(Message):
    """Session ``caller`` no longer wants its call ``call``."""

    caller: int
    call: int
    reason: str = ""


@_message
@dataclass(slots=True)
class Freed(Message):
    """Nobody holds these RRefs of yours any more: ``[rref, highest mint number seen of you]`` each."""

    rrefs: list[list[Any]]


@_message
@dataclass(slots=True)
class Confirm(Message):
    """Do you hold these forks?  ``[rref, owner, fork]`` each; say take, or take and drop."""

    forks: list[list[Any]]


@_message
@dataclass(slots=True)
class OwnersDied(Message):
    """The owner of these RRefs, which you hold, is gone."""

    owner: int
    rrefs: list[list[int]]


@_message
@dataclass(slots=True)
class Ping(Message):
    """Are you there?"""

    number: int = 0


@_message
@dataclass(slots=True)
class WhoAreYou(Message):
    """The broker does not know this connection (it was restarted): say hello again."""


@_message
@dataclass(slots=True)
class Farewell(Message):
    """Your goodbye was heard, or (``text``) the broker ends your session or itself."""

    text: str = ""


def encode(message: Message) -> bytes:
    """Write a control message as one frame."""
    fields = {
        spec.name: getattr(message, spec.name)
        for spec in dataclasses.fields(message)  # type: ignore[arg-type]
    }
    return bytes(msgpack.packb([message.name, fields], use_bin_type=True))


def decode(data: bytes) -> Message:
    """Read a control message.

    Raises:
        ProtocolError: it is no message, of no known name, or a field has the wrong type.

    Example:
        >>> decode(encode(Watch(sessions=[7])))
        Watch(sessions=[7])
    """
    if len(data) > MAX_CONTROL_SIZE:
        raise ProtocolError(f"a control message of {len(data)} bytes")
    try:
        content = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except Exception as error:
        raise ProtocolError(f"an unreadable control message: {error}") from None
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[1], dict):
        raise ProtocolError("a control message that is not [name, fields]")
    name, values = content
    cls = _BY_NAME.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"a control message of unknown name {name!r:.60}")
    checked: dict[str, Any] = {}
    hints = _hints(cls)
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]
        if spec.name in values:
            value = values[spec.name]
            if not _fits(value, hints[spec.name]):
                raise ProtocolError(f"field {spec.name!r} of {name} holds {value!r:.60}")
            checked[spec.name] = value
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ProtocolError(f"{name} lacks its field {spec.name!r}")
    return cls(**checked)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_fits(part, item) for part in value)
    if origin is dict:
        key, item = typing.get_args(hint)
        return isinstance(value, dict) and all(
            _fits(k, key) and _fits(part, item) for k, part in value.items()
        )
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is int:
        return type(value) is int and 0 - (1 << 63) <= value < 1 << 64
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def member_map(
    *,
    session: int,
    worker: str,
    rank: int,
    host: str,
    pid: int,
    clock: str,
    machine: str,
    script: str,
) -> dict[str, Any]:
    """Write a member as the plain map that :class:`Answer` carries to those who resolve it."""
    return {
        "session": session,
        "worker": worker,
        "rank": rank,
        "host": host,
        "pid": pid,
        "clock": clock,
        "machine": machine,
        "script": script,
    }
