"""The wire: what travels between a worker and the broker's data routers, byte by byte.

This module and :mod:`broker.messages` (the control channel) are the one description of
the protocol; broker and workers both use them.  Nothing here imports torch.

Data channel
------------
A worker sends on its tx DEALER::

    [destination session, 8 bytes] [header] ([meta]) [body] [inline buffer]...

The data ROUTER receives it with the tx socket's routing id in front, looks up two
things (tx id -> session, destination session -> rx id), and sends to the rx DEALER of
the destination::

    [source session, 8 bytes] [header] ([meta]) [body] [inline buffer]...

The source is written by the router from its own table, so nobody sends as another.
What cannot be handed on comes back to its sender, the header unchanged::

    [b"!" + destination session] [header]      no such session, or it is unreachable
    [b"?" + destination session] [header]      its queue in the router is full

"Comes back" means that the callee never saw it.  The channel never says "lost".

The header is one fixed struct (:class:`Header`).  Rare things travel in an optional
msgpack map, the meta frame; unknown keys in it are ignored.

Flow control: ``position`` counts the bytes that the sender has charged against this
pair, this message included, and ``taken`` is the highest position of the *other*
direction that its agent has taken off the socket.  Both only grow, and each message
repeats them, so a lost message costs no credit once a later one arrives.

Rejected: msgpack headers (4 us to unpack in Python, a struct is 0.3 us); sequence
numbers acknowledged one by one (a message each way for every call); credit grants
(a lost grant is lost credit, a position is repeated).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Any

import msgpack

#: The range of protocol versions that this release speaks.
PROTOCOL_MINIMUM = 1
PROTOCOL_MAXIMUM = 1

#: Largest piece of a buffer that travels in one message, in bytes.
PIECE_SIZE = 4 * 1024 * 1024
#: Buffers and bodies up to this many bytes in all travel inside the call's own message.
INLINE_LIMIT = 1024 * 1024
#: Largest frame that a socket accepts, in bytes (ZMQ_MAXMSGSIZE).
MAX_FRAME_SIZE = 16 * 1024 * 1024
#: Most frames of one message.
MAX_FRAMES = 1024
#: Most buffers of one call.
MAX_BUFFERS = 1_000_000
#: Most bytes of one call, body and buffers together.
MAX_CALL_SIZE = 1 << 40
#: Bytes that a sender may have under way towards one destination (credit).
CREDIT_WINDOW = 64 * 1024 * 1024
#: What a message is charged on top of its frames, for the memory that holds it.
MESSAGE_OVERHEAD = 512
#: Messages that a data socket queues for one peer; credit in bytes bounds it far earlier.
HIGH_WATER_MARK = 200_000

SESSION_SIZE = 8
UNREACHABLE = b"!"
FULL = b"?"

_SESSION = struct.Struct("!Q")


def pack_session(session: int) -> bytes:
    """Write a session number as the 8 bytes that name it on the wire."""
    return _SESSION.pack(session)


def unpack_session(data: bytes) -> int:
    """Read a session number from its 8 bytes."""
    return int(_SESSION.unpack(data)[0])


class ProtocolError(ValueError):
    """A message that breaks the protocol; the text says how."""


class Kind(enum.IntEnum):
    """What a data message is."""

    ECHO = 1  #: a worker to itself: its rx can be reached
    REQUEST = 2  #: a call
    REPLY = 3  #: its result or error
    PIECE = 4  #: a part of a large buffer of a request or a reply
    CREDIT = 5  #: nothing but mark, taken and, in the body, an :class:`Acknowledgement`
    PROBE = 6  #: what became of these calls?  See :mod:`zrpc.probing` for the bodies
    STATE = 7  #: the answer to a probe


class Flag:
    """Bits of the header's ``flags``; plain integers, since an enum's ``&`` costs 2 us."""

    META = 1  #: a meta frame follows the header
    LARGE = 2  #: frames past the header are worth forwarding without a copy
    SAME_CLOCK = 4  #: the deadline is absolute CLOCK_MONOTONIC, not what remains
    ERROR = 8  #: a reply: the body is an exception
    OF_REPLY = 16  #: a piece: it belongs to a reply, not to a request
    REMOTE = 32  #: a request: keep the result, it is an RRef's value
    BODY_IN_PIECES = 64  #: the body is buffer 0 of the pieces
    NOT_RUN = 128  #: a reply: the call was refused before any of its code ran
    ASK_BACK = 256  #: a probe: its sender may have lost replies, and wants to be asked too
    TELL = 512  #: tell at once what you have taken; the sender's credit runs low


HEADER = struct.Struct("!BBHIQQqQQQ")
HEADER_SIZE = HEADER.size
#: Where the router finds the flags, without unpacking.
FLAGS_LOW_BYTE = 3


@dataclass(slots=True)
class Header:
    """The fixed part of each data message.

    Attributes:
        kind: what the message is.
        flags: see :class:`Flag`.
        index: buffers of the call (request, reply), or which buffer a piece belongs to.
        call: the call's id, counting up from 1 in each pair of caller and callee.
        mark: low-water mark of the sender's own calls to this destination: the lowest
            id that it still waits for.  The receiver forgets everything below.
        deadline: nanoseconds; absolute or remaining (``Flag.SAME_CLOCK``), 0 for none.
        position: bytes charged by the sender to this pair, this message included.
        taken: highest position of the other direction that the sender has taken.
        offset: where a piece begins in its buffer, bytes; the body's length elsewhere.
        version: protocol version.
    """

    kind: int
    flags: int = 0
    index: int = 0
    call: int = 0
    mark: int = 0
    deadline: int = 0
    position: int = 0
    taken: int = 0
    offset: int = 0
    version: int = PROTOCOL_MAXIMUM

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return HEADER.pack(
            self.version,
            self.kind,
            self.flags,
            self.index,
            self.call,
            self.mark,
            self.deadline,
            self.position,
            self.taken,
            self.offset,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Read a header.

        Raises:
            ProtocolError: wrong size, version or kind.
        """
        if len(data) != HEADER_SIZE:
            raise ProtocolError(f"a header of {len(data)} bytes, not {HEADER_SIZE}")
        version, kind, flags, index, call, mark, deadline, position, taken, offset = HEADER.unpack(
            data
        )
        if not PROTOCOL_MINIMUM <= version <= PROTOCOL_MAXIMUM:
            raise ProtocolError(
                f"protocol version {version}, where {PROTOCOL_MINIMUM} to {PROTOCOL_MAXIMUM} is spoken"
            )
        if not Kind.ECHO <= kind <= Kind.STATE:
            raise ProtocolError(f"a message of unknown kind {kind}")
        return cls(kind, flags, index, call, mark, deadline, position, taken, offset, version)


@dataclass(slots=True)
class Meta:
    """What few calls carry: the optional map behind the header.

    Attributes:
        lengths: bytes of each buffer, where they do not all travel inline.
        inline: indices of the buffers that do travel inline, in order, where ``lengths`` is given.
        references: forks in the message, outside the body, so that whoever ends the
            message can drop them: ``[rref, owner, fork]`` each, see :mod:`zrpc.rref_ledger`.
        result: ``[rref, fork]`` of a ``remote`` call: the id under which to keep the result.
        extra: further keys, handed on as they came.
    """

    lengths: list[int] | None = None
    inline: list[int] | None = None
    references: list[Any] | None = None
    result: list[Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Return the frame's bytes."""
        values: dict[str, Any] = dict(self.extra)
        for key in ("lengths", "inline", "references", "result"):
            value = getattr(self, key)
            if value is not None:
                values[key] = value
        return bytes(msgpack.packb(values, use_bin_type=True))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Meta:
        """Read a meta frame and check each field that this release knows.

        Raises:
            ProtocolError: the frame is no map, or a field has the wrong shape.
        """
        try:
            values = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except Exception as error:
            raise ProtocolError(f"an unreadable meta frame: {error}") from None
        if not isinstance(values, dict):
            raise ProtocolError("a meta frame that is no map")
        meta = cls()
        meta.lengths = _integers(values.pop("lengths", None), "lengths", MAX_CALL_SIZE)
        meta.inline = _integers(values.pop("inline", None), "inline", MAX_BUFFERS)
        for key, size in (("references", None), ("result", 2)):
            value = values.pop(key, None)
            if value is not None and (
                not isinstance(value, list) or (size is not None and len(value) != size)
            ):
                raise ProtocolError(f"meta field {key!r} has the wrong shape")
            setattr(meta, key, value)
        for row in meta.references or ():
            _check_reference(row)
        if meta.result is not None:
            for part in meta.result:
                _check_identifier(part)
        meta.extra = values
        return meta


def _integers(value: Any, name: str, limit: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_BUFFERS + 1:
        raise ProtocolError(f"meta field {name!r} is no list of integers")
    for item in value:
        if type(item) is not int or not 0 <= item <= limit:
            raise ProtocolError(f"meta field {name!r} holds {item!r:.40}")
    return value


def _check_identifier(value: Any) -> None:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(part) is int and 0 <= part < 1 << 64 for part in value)
    ):
        raise ProtocolError("an identifier that is no pair of integers")


def _check_reference(row: Any) -> None:
    if not isinstance(row, list) or len(row) != 3 or type(row[1]) is not int:
        raise ProtocolError("a reference that is not [rref, owner, fork]")
    _check_identifier(row[0])
    _check_identifier(row[2])


@dataclass(slots=True)
class Acknowledgement:
    """Which calls a caller has done with, finer than the low-water mark.

    Of the ids up to ``highest``, only those in ``pending`` are still waited for; the
    callee forgets the others (their replies, not the fact that they ran).  One slow
    call so does not pin the replies of a million quick ones.
    """

    highest: int
    pending: list[int]

    def pack(self) -> bytes:
        """Return the body of a CREDIT message."""
        return bytes(msgpack.packb([self.highest, self.pending]))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Acknowledgement:
        """Read it back.

        Raises:
            ProtocolError: it is not what :meth:`pack` writes.
        """
        try:
            highest, pending = msgpack.unpackb(data)
        except Exception as error:
            raise ProtocolError(f"an unreadable acknowledgement: {error}") from None
        values = [highest, *pending] if isinstance(pending, list) else [None]
        if not all(type(value) is int and 0 <= value < 1 << 64 for value in values):
            raise ProtocolError("an acknowledgement that holds no integers")
        return cls(highest, pending)


def charge(frames: int, size: int) -> int:
    """Return what a message of so many bytes costs of its pair's credit, in bytes."""
    return MESSAGE_OVERHEAD + 64 * frames + size
