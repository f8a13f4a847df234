"""Splitting calls into messages and putting them together, with no socket."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.protocol import (
    INLINE_LIMIT,
    MAX_FRAME_SIZE,
    PIECE_SIZE,
    Flag,
    Header,
    Kind,
    Meta,
    ProtocolError,
)
from zrpc.transfer import Assembly, Outgoing


def travel(outgoing: Outgoing, order: random.Random | None = None) -> Assembly:
    """Send all messages of ``outgoing``; pieces in a random order if asked for."""
    messages = []
    while not outgoing.finished:
        assert outgoing.next_size() >= 0
        header, frames, size = outgoing.next_message()
        assert all(len(memoryview(frame).cast("B")) <= MAX_FRAME_SIZE for frame in frames)
        assert size >= sum(len(memoryview(frame).cast("B")) for frame in frames)
        messages.append((Header.unpack(header.pack()), [bytes(frame) for frame in frames]))
    assembly = Assembly(*messages[0])
    pieces = messages[1:]
    if order is not None:
        pieces += [order.choice(pieces) for _ in range(min(3, len(pieces)))]
        order.shuffle(pieces)
    for header, frames in pieces:
        assert header.kind == Kind.PIECE and len(frames) == 1
        assembly.add_piece(header, frames[0])
    assert assembly.complete
    return assembly


def content(assembly: Assembly) -> tuple[bytes, list[bytes]]:
    body, buffers = assembly.content()
    return bytes(body), [bytes(buffer) for buffer in buffers]


SIZES = [
    0,
    1,
    1000,
    64 * 1024,
    INLINE_LIMIT,
    INLINE_LIMIT + 1,
    PIECE_SIZE,
    PIECE_SIZE + 1,
    2 * PIECE_SIZE + 17,
]


@pytest.mark.parametrize("body", [0, 10, INLINE_LIMIT + 1, PIECE_SIZE * 2 + 1])
@pytest.mark.parametrize("size", SIZES)
def test_bodies_and_buffers_of_any_size_come_back(body: int, size: int) -> None:
    data = [random.randbytes(size), b"x" * 5, random.randbytes(size)]
    assembly = travel(Outgoing(Kind.REQUEST, 1, b"b" * body, data))
    assert content(assembly) == (b"b" * body, data)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 100, 70_000, 900_000, PIECE_SIZE + 3]), max_size=8),
    st.integers(0, 1 << 20),
)
def test_pieces_may_come_in_any_order_and_twice(sizes: list[int], seed: int) -> None:
    data = [bytes([n % 256]) * size for n, size in enumerate(sizes)]
    assembly = travel(Outgoing(Kind.REPLY, 3, b"body", data), random.Random(seed))
    assert content(assembly) == (b"body", data)


def test_a_thousand_small_buffers_travel_in_one_message() -> None:
    data = [random.randbytes(4096) for _ in range(1000)]
    outgoing = Outgoing(Kind.REQUEST, 1, b"state", data)
    _, frames, _ = outgoing.next_message()
    assert outgoing.finished and len(frames) == 3
    assert content(travel(Outgoing(Kind.REQUEST, 1, b"state", data))) == (b"state", data)


def test_a_large_buffer_is_sent_from_its_own_memory() -> None:
    memory = bytearray(3 * PIECE_SIZE)
    outgoing = Outgoing(Kind.REQUEST, 1, b"", [memory])
    outgoing.next_message()
    _, frames, _ = outgoing.next_message()
    memory[5] = 7
    assert frames[0][5] == 7


def test_a_piece_that_came_back_is_sent_again_by_itself() -> None:
    outgoing = Outgoing(Kind.REQUEST, 1, b"", [bytes(2 * PIECE_SIZE)])
    while not outgoing.finished:
        outgoing.next_message()
    outgoing.again.append((0, PIECE_SIZE))
    assert not outgoing.finished
    header, _, _ = outgoing.next_message()
    assert (header.kind, header.index, header.offset) == (Kind.PIECE, 0, PIECE_SIZE)
    assert outgoing.finished


def test_a_restarted_transfer_begins_with_its_first_message() -> None:
    data = [random.randbytes(PIECE_SIZE + 1)]
    outgoing = Outgoing(Kind.REQUEST, 1, b"", data)
    outgoing.next_message()
    outgoing.next_message()
    outgoing.restart()
    assert content(travel(outgoing)) == (b"", data)


def test_references_and_result_travel_in_the_meta_frame() -> None:
    meta = Meta(references=[[[1, 2], 3, [4, 5]]], result=[[1, 2], [1, 3]])
    assembly = travel(Outgoing(Kind.REQUEST, 1, b"b", [b"x" * (PIECE_SIZE + 1)], meta=meta))
    assert assembly.meta is not None
    assert assembly.meta.references == [[[1, 2], 3, [4, 5]]]
    assert assembly.meta.result == [[1, 2], [1, 3]]


def lie(header: Header, frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Assembly(header, frames)


def test_a_message_that_lies_about_itself_is_refused() -> None:
    lie(Header(Kind.REQUEST, call=1), [])
    lie(Header(Kind.REQUEST, call=1, offset=5), [b"four"])
    lie(Header(Kind.REQUEST, call=1, index=2, offset=1), [b"b", b"only one"])
    lie(Header(Kind.REQUEST, call=1, flags=Flag.META, offset=1), [b"b"])
    lie(Header(Kind.REQUEST, call=1, flags=Flag.META, offset=1), [b"\xc1", b"b"])
    meta = Meta(lengths=[1 << 39] * 4, inline=[])
    lie(Header(Kind.REQUEST, call=1, flags=Flag.META, index=4, offset=1), [meta.pack(), b"b", b""])
    meta = Meta(lengths=[10], inline=[0])
    lie(
        Header(Kind.REQUEST, call=1, flags=Flag.META, index=1, offset=1),
        [meta.pack(), b"b", b"short"],
    )
    meta = Meta(lengths=[10], inline=[3])
    lie(Header(Kind.REQUEST, call=1, flags=Flag.META, index=1, offset=1), [meta.pack(), b"b", b""])
    meta = Meta(lengths=[5, 5], inline=[0, 0])
    lie(
        Header(Kind.REQUEST, call=1, flags=Flag.META, index=2, offset=1),
        [meta.pack(), b"b", b"0123456789"],
    )


@pytest.mark.parametrize(
    ("index", "offset", "length"),
    [
        (1, 0, PIECE_SIZE),
        (0, 1, PIECE_SIZE),
        (0, PIECE_SIZE, PIECE_SIZE),
        (0, 1 << 50, 1),
        (0, 0, 10),
    ],
)
def test_a_piece_outside_of_what_was_announced_is_refused(
    index: int, offset: int, length: int
) -> None:
    outgoing = Outgoing(Kind.REQUEST, 1, b"", [bytes(PIECE_SIZE + 10)])
    header, frames, _ = outgoing.next_message()
    assembly = Assembly(header, frames)
    with pytest.raises(ProtocolError):
        assembly.add_piece(Header(Kind.PIECE, index=index, offset=offset, call=1), bytes(length))


def test_an_announced_terabyte_takes_no_memory_before_it_arrives() -> None:
    meta = Meta(lengths=[1 << 39], inline=[])
    header = Header(Kind.REQUEST, call=1, flags=Flag.META, index=1, offset=1)
    assembly = Assembly(header, [meta.pack(), b"b", b""])
    assert not assembly.complete
