"""Splitting a call's content into messages, and putting it together again.  Pure.

A small call is one message.  In a larger one each buffer above :data:`PIECE_FLOOR`
travels behind the first message as pieces of at most 4 MiB, each a message of its own
that says which buffer and which offset it is: small calls pass between them, a piece
that came back is sent again by itself, and no frame comes near MAXMSGSIZE.

Nothing is copied here but the smallest buffers: pieces are views of the sender's
memory, which :class:`Outgoing` keeps alive until the reply has come.  A buffer of one
piece is handed on as the frame that it came in; one of several is collected in memory
taken once for the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from broker.protocol import (
    INLINE_LIMIT,
    MAX_CALL_SIZE,
    PIECE_SIZE,
    Flag,
    Header,
    Kind,
    Meta,
    ProtocolError,
    charge,
)

Buffer = bytes | bytearray | memoryview

#: Buffers of at least so many bytes travel as pieces once a call is too large to be one message.
PIECE_FLOOR = 64 * 1024
#: Small buffers of a large call are joined in one frame up to so many bytes.
JOINED_LIMIT = PIECE_SIZE
#: Buffers that may travel as frames of their own.
MAX_SEPARATE = 64
#: A frame of so many bytes is worth sending and forwarding without a copy.
COPY_LIMIT = 64 * 1024


class Outgoing:
    """The content of one request or reply on its way out.

    ``next_message`` gives its messages one after another; ``again`` repeats one that came back.
    """

    __slots__ = (
        "again",
        "body",
        "buffers",
        "call",
        "cancelled",
        "deadline",
        "first_size",
        "flags",
        "index",
        "inline",
        "kind",
        "meta",
        "offset",
        "order",
        "size",
        "started",
    )

    def __init__(
        self,
        kind: Kind,
        call: int,
        body: Buffer,
        buffers: Sequence[Buffer] = (),
        *,
        flags: int = 0,
        meta: Meta | None = None,
        deadline: float | None = None,
    ) -> None:
        self.kind = kind
        self.call = call
        self.flags = flags
        self.deadline = deadline
        self.cancelled = False
        self.started = False
        self.again: list[tuple[int, int]] = []  # pieces that came back
        self.body = body
        self.buffers: list[Buffer] = list(buffers)
        self.order: list[int] = []  # buffers that travel as pieces
        self.inline: list[int] | None = None  # buffers joined in one frame; None: each is its own
        self.index = 0
        self.offset = 0
        self.size = len(body)
        if buffers or self.size > INLINE_LIMIT:
            meta = self._plan(meta)
        self.meta = meta.pack() if meta is not None else None
        if self.inline is None:
            first, frames = self.size, 1 + len(self.buffers)
        else:
            first, frames = len(self.body) + sum(_length(self.buffers[i]) for i in self.inline), 2
        if self.meta is not None:
            first, frames = first + len(self.meta), frames + 1
        self.first_size = charge(frames, first)

    def _plan(self, meta: Meta | None) -> Meta | None:
        lengths = [_length(buffer) for buffer in self.buffers]
        self.size += sum(lengths)
        if self.size > MAX_CALL_SIZE:
            raise ValueError(f"a call of {self.size} bytes is larger than {MAX_CALL_SIZE}")
        if self.size <= INLINE_LIMIT and len(lengths) <= MAX_SEPARATE:
            return meta
        meta = meta or Meta()
        if len(self.body) > INLINE_LIMIT:
            self.flags |= Flag.BODY_IN_PIECES
            self.buffers.insert(0, self.body)
            lengths.insert(0, len(self.body))
            self.body = b""
        self.inline = []
        room = JOINED_LIMIT
        for index, length in enumerate(lengths):
            if length < PIECE_FLOOR and length <= room:
                self.inline.append(index)
                room -= length
            else:
                self.order.append(index)
        meta.lengths = lengths
        meta.inline = self.inline
        return meta

    @property
    def is_split(self) -> bool:
        """Do pieces follow the first message?"""
        return bool(self.order)

    @property
    def finished(self) -> bool:
        """Has every message been given out?"""
        if not self.started:
            return False
        return self.cancelled or (self.index >= len(self.order) and not self.again)

    def first(self) -> tuple[Header, list[Buffer], int]:
        """The first message: header (unstamped), frames behind it, bytes to charge."""
        header = Header(
            self.kind, self.flags, index=len(self.buffers), call=self.call, offset=len(self.body)
        )
        frames: list[Buffer] = []
        if self.meta is not None:
            header.flags |= Flag.META
            frames.append(self.meta)
        frames.append(self.body)
        if self.inline is None:
            frames.extend(self.buffers)
        else:
            # Many small buffers travel as one frame: frames cost more than copies.
            frames.append(b"".join(self.buffers[index] for index in self.inline))
        if self.first_size >= COPY_LIMIT:
            header.flags |= Flag.LARGE
        return header, frames, self.first_size

    def piece(self, index: int, offset: int) -> tuple[Header, list[Buffer], int]:
        """The piece of buffer ``index`` that begins at ``offset``."""
        flags = Flag.LARGE if self.kind == Kind.REQUEST else Flag.LARGE | Flag.OF_REPLY
        data = memoryview(self.buffers[index]).cast("B")[offset : offset + PIECE_SIZE]
        header = Header(Kind.PIECE, flags, index=index, call=self.call, offset=offset)
        return header, [data], charge(1, len(data))

    def next_size(self) -> int:
        """Bytes that the next message will be charged, before it is built."""
        if not self.started:
            return self.first_size
        index, offset = self.again[0] if self.again else (self.order[self.index], self.offset)
        return charge(1, min(PIECE_SIZE, _length(self.buffers[index]) - offset))

    def next_message(self) -> tuple[Header, list[Buffer], int]:
        """Give out the next message; only while not ``finished``."""
        if not self.started:
            self.started = True
            return self.first()
        if self.again:
            return self.piece(*self.again.pop(0))
        index = self.order[self.index]
        message = self.piece(index, self.offset)
        self.offset += PIECE_SIZE
        if self.offset >= _length(self.buffers[index]):
            self.index += 1
            self.offset = 0
        return message

    def add_again(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Give out these pieces once more; False where there is nothing to give.

        Those that do not exist, or have not been given out yet, are left out.
        """
        given = set(self.again)
        split = set(self.order)
        for index, offset in pieces:
            if (
                index not in split
                or offset % PIECE_SIZE
                or not 0 <= offset < _length(self.buffers[index])
                or (index, offset) in given
                or not self._was_given(index, offset)
            ):
                continue
            given.add((index, offset))
            self.again.append((index, offset))
        return bool(self.again)

    def _was_given(self, index: int, offset: int) -> bool:
        if self.index >= len(self.order):
            return True
        position = self.order.index(index)
        return position < self.index or (position == self.index and offset < self.offset)

    def restart(self) -> None:
        """Begin again from the first message (it came back undelivered)."""
        self.started = False
        self.again.clear()
        self.index = self.offset = 0


def _length(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


class Assembly:
    """A request or reply that is being received."""

    __slots__ = (
        "body",
        "buffers",
        "flags",
        "header",
        "lengths",
        "meta",
        "missing",
        "opened",
        "received",
    )

    def __init__(self, header: Header, frames: Sequence[Any]) -> None:
        """Take in the first message.

        Raises:
            ProtocolError: frames, counts and lengths do not agree.
        """
        self.header = header
        self.flags = header.flags
        self.opened: Any = None  # the agent's: the forks in it
        self.meta: Meta | None = None
        self.missing = 0
        self.received: set[tuple[int, int]] = set()
        self.lengths: list[int] = []
        frames = list(frames)
        if header.flags & Flag.META:
            if not frames:
                raise ProtocolError("a message whose meta frame is missing")
            self.meta = Meta.unpack(_view(frames.pop(0)))
        if not frames:
            raise ProtocolError("a message without a body")
        self.body: Buffer = _buffer(frames.pop(0))
        if _length(self.body) != header.offset:
            raise ProtocolError(f"a body of {_length(self.body)} bytes that claims {header.offset}")
        if self.meta is None or self.meta.lengths is None:
            if len(frames) != header.index:
                raise ProtocolError(f"{len(frames)} buffers where {header.index} were announced")
            self.buffers: list[Any] = [_buffer(frame) for frame in frames]
        else:
            self._expect(frames)

    def _expect(self, frames: list[Any]) -> None:
        assert self.meta is not None and self.meta.lengths is not None
        self.lengths = lengths = self.meta.lengths
        inline = self.meta.inline or []
        if len(lengths) != self.header.index or len(frames) != 1:
            raise ProtocolError("a message whose lengths do not match its buffers")
        if sum(lengths) > MAX_CALL_SIZE:
            raise ProtocolError(f"a call of {sum(lengths)} bytes")
        self.buffers = [None] * len(lengths)
        packed = memoryview(_buffer(frames[0]))
        if any(index >= len(lengths) for index in inline) or len(set(inline)) != len(inline):
            raise ProtocolError("an inline buffer that does not exist")
        if sum(lengths[index] for index in inline) != packed.nbytes:
            raise ProtocolError("inline buffers whose lengths do not match their frame")
        start = 0
        for index in inline:
            # Copied apart: each must own its memory, and be aligned.
            self.buffers[index] = bytearray(packed[start : start + lengths[index]])
            start += lengths[index]
        for index, buffer in enumerate(self.buffers):
            if buffer is None:
                self.missing += (lengths[index] + PIECE_SIZE - 1) // PIECE_SIZE
                if lengths[index] == 0:
                    self.buffers[index] = b""

    def add_piece(self, header: Header, frame: Any) -> None:
        """Take in a piece; one that is here already changes nothing.

        Raises:
            ProtocolError: it lies outside of what was announced.
        """
        data = _buffer(frame)
        index, offset, length = header.index, header.offset, _length(data)
        if index >= len(self.lengths) or offset % PIECE_SIZE:
            raise ProtocolError("a piece of a buffer that was not announced")
        if length != min(PIECE_SIZE, self.lengths[index] - offset) or length <= 0:
            raise ProtocolError("a piece that does not fit its buffer")
        if (index, offset) in self.received:
            return
        if self.lengths[index] <= PIECE_SIZE:
            if self.buffers[index] is not None:
                return
            self.buffers[index] = data
        else:
            target = self.buffers[index]
            if target is None:
                target = self.buffers[index] = np.empty(self.lengths[index], dtype=np.uint8)
            # numpy copies without the GIL: other threads go on.
            target[offset : offset + length] = np.frombuffer(data, dtype=np.uint8)
        self.received.add((index, offset))
        self.missing -= 1

    @property
    def has_references(self) -> bool:
        """Are there RRefs in it?"""
        return self.meta is not None and bool(self.meta.references)

    def missing_pieces(self, limit: int) -> list[tuple[int, int]]:
        """Buffer and offset of up to ``limit`` pieces that have not come yet."""
        missing: list[tuple[int, int]] = []
        inline = set(self.meta.inline or ()) if self.meta is not None else set()
        for index, length in enumerate(self.lengths):
            if index in inline:
                continue
            for offset in range(0, length, PIECE_SIZE):
                if (index, offset) not in self.received:
                    missing.append((index, offset))
                    if len(missing) >= limit:
                        return missing
        return missing

    @property
    def complete(self) -> bool:
        """Is everything here?"""
        return self.missing == 0

    def content(self) -> tuple[Buffer, list[Buffer]]:
        """Return the body and the buffers; each writable buffer is the caller's own."""
        buffers = [b.data if isinstance(b, np.ndarray) else b for b in self.buffers]
        if self.flags & Flag.BODY_IN_PIECES:
            return buffers[0], buffers[1:]
        return self.body, buffers


def _buffer(frame: Any) -> Buffer:
    return frame if isinstance(frame, (bytes, bytearray, memoryview)) else frame.buffer


def _view(frame: Any) -> Any:
    return frame if isinstance(frame, bytes) else frame.buffer
