"""Bodies and buffers that are truncated, lying or garbage: DecodeError or a value, nothing else."""

from __future__ import annotations

import random
import resource
import tracemalloc
import warnings
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc import codec
from zrpc.codec import wire

warnings.filterwarnings("ignore", ".*(Sparse CSR|nested tensors|ComplexHalf).*")

WIDE = torch.rand(40, 40)


class Agent:
    def encode_reference(self, rref: Any) -> Any:
        return ("ref", 5)

    def decode_reference(self, data: Any) -> Any:
        tag, number = data
        return (tag, number + 1)


class Reference:
    pass


def messages() -> list[Any]:
    return [
        ("torch:add", (torch.ones(2, 2), 1), {"alpha": 2}),
        [1, 2.5, None, "text", b"bytes", bytearray(b"x"), 2**90, 1j, ..., (1, (2,)), {1}, range(3)],
        {(1, 2): slice(1, 2), frozenset([1]): torch.Size([2]), "d": torch.float32},
        [
            torch.device("cpu"),
            torch.channels_last,
            np.float32(1),
            np.datetime64("2020"),
            np.dtype("f4"),
        ],
        [
            np.arange(6).reshape(2, 3),
            np.arange(3000.0),
            np.zeros(3, [("a", "i4"), ("b", "U2", (2,))]),
        ],
        [np.asfortranarray(np.ones((30, 40))), np.array("x"), np.str_("a"), np.bytes_(b"a")],
        [
            WIDE,
            WIDE[3:],
            WIDE.t(),
            WIDE[::2, ::3],
            torch.arange(50)[3:7],
            torch.ones(1).expand(9, 9),
        ],
        [WIDE.to_sparse(), WIDE[:3, :3].to_sparse(), torch.eye(3).to_sparse().requires_grad_()],
        [WIDE.to_sparse_csr(), torch.eye(4).to_sparse_csc(), torch.eye(4).to_sparse_bsr((2, 2))],
        [torch.quantize_per_tensor(WIDE, 0.1, 3, torch.quint8)],
        [torch.quantize_per_channel(WIDE, torch.ones(40), torch.zeros(40).long(), 1, torch.qint8)],
        [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
        [torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)],
        [torch.complex(WIDE, WIDE).conj(), torch.complex(WIDE, WIDE).conj().imag],
        [torch.nn.Parameter(WIDE), torch.empty(3, 4, device="meta"), torch.nn.Buffer(WIDE)],
        [torch.eye(3).to_mkldnn()] if torch.backends.mkldnn.is_available() else [],
        [b"x" * 70_000, bytearray(70_000), torch.nn.Linear(3, 3).state_dict()],
        [Reference(), Reference()],
        list(range(1000)),
    ]


ENCODED = [
    codec.encode(value, allow_pickle=False, hooks=Agent(), reference_type=Reference)
    for value in messages()
]


def attempt(body: bytes, buffers: list[bytes]) -> None:
    """Decode; what comes must be inside of the memory that came."""
    try:
        value = codec.decode(
            body, [bytearray(buffer) for buffer in buffers], hooks=Agent(), allow_pickle=False
        )
    except (codec.DecodeError, codec.PickleRefusedError):
        return
    for tensor in tensors(value, 0):
        check(tensor)


def tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)) and depth < 10:
        for item in value:
            yield from tensors(item, depth + 1)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()), depth)


def check(tensor: torch.Tensor) -> None:
    tensor = tensor.detach()
    if tensor.is_meta:
        return
    if tensor.layout is torch.strided and not tensor.is_nested:
        if tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = (tensor.storage_offset() + last + 1) * tensor.element_size()
            assert end <= tensor.untyped_storage().nbytes()
    elif tensor.layout is torch.sparse_coo:
        check(tensor._values())
        check(tensor._indices())
        if tensor.numel() < 10_000:
            tensor.to_dense()
    elif tensor.is_nested:
        for part in tensor.unbind():
            check(part)
    elif tensor.numel() < 10_000:
        tensor.to_dense()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One of the things that go wrong with bytes."""
    kind = chance.randrange(6)
    if not data:
        return bytes(chance.randrange(20))
    place = chance.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data + chance.randbytes(chance.randrange(1, 9))
    if kind == 2:
        return data[:place] + chance.randbytes(chance.randrange(1, 5)) + data[place:]
    if kind == 3:
        return data[:place] + data[place + chance.randrange(1, 5) :]
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(data))
        changed[place] = chance.choice([chance.randrange(256), changed[place] ^ 1, 0, 0xFF, 0x7F])
    return bytes(changed)


@pytest.mark.parametrize("number", range(len(ENCODED)))
def test_damaged_bytes(number: int) -> None:
    encoded, chance = ENCODED[number], random.Random(number)
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    for _ in range(400):
        attempt(damaged(encoded.body, chance), buffers)
        if buffers:
            wrong = list(buffers)
            place = chance.randrange(len(wrong))
            wrong[place] = damaged(wrong[place], chance)
            attempt(encoded.body, wrong)


EVIL = [
    *(0, 1, -1, 2, 3, 7, 64, 255, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**64 - 1),
    *(True, None, 0.5, b"", b"x", [], [0], [1, 2], {}, {"a": 1}),
    *("", "O", "float32", "qint8", "quint4x2", "V99999999", "f4,f4", "sparse_bsr", "strided"),
    *(
        msgpack.ExtType(code, data)
        for code in (2, 5, 6, 7, 9, 10, 32, 99)
        for data in (b"", bytes(4))
    ),
]


def altered(value: Any, chance: random.Random) -> Any:
    """The same structure with a few parts replaced, doubled, dropped or swapped."""
    sequence = isinstance(value, (list, tuple)) and not isinstance(value, msgpack.ExtType)
    if sequence and value and chance.random() < 0.8:
        value = list(value)
        place = chance.randrange(len(value))
        kind = chance.randrange(8)
        if kind == 0:
            del value[place]
        elif kind == 1:
            value.insert(place, chance.choice(value))
        elif kind == 2:
            other = chance.randrange(len(value))
            value[place], value[other] = value[other], value[place]
        else:
            value[place] = altered(value[place], chance)
        return value
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        return {**value, key: altered(value[key], chance)}
    if isinstance(value, msgpack.ExtType) and value.code == wire.TABLE:
        table = altered(msgpack.unpackb(value.data), chance)
        for _ in range(chance.randrange(3)):
            table = altered(table, chance)
        return msgpack.ExtType(wire.TABLE, msgpack.packb(table))
    if type(value) is int and chance.random() < 0.5:
        return value + chance.choice([-1, 1, 16, -16])
    return chance.choice(EVIL)


def repacked(document: Any, chance: random.Random) -> bytes | None:
    """An altered document; None where msgpack itself cannot say it."""
    try:
        lying = altered(document, chance)
        if isinstance(lying, list) and lying and chance.random() < 0.7:
            lying[0] = altered(lying[0], chance)
        return msgpack.packb(lying)
    except (OverflowError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("number", range(len(ENCODED)))
def test_lying_structures(number: int) -> None:
    encoded, chance = ENCODED[number], random.Random(number)
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    # As tuples: lists could not be keys.
    document = msgpack.unpackb(encoded.body, strict_map_key=False, use_list=False)
    for _ in range(600):
        body = repacked(document, chance)
        if body is not None:
            attempt(body, buffers)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.lists(st.binary(max_size=30), max_size=3))
def test_random_bytes(body: bytes, buffers: list[bytes]) -> None:
    attempt(body, buffers)


def test_every_truncation() -> None:
    for encoded in ENCODED:
        buffers = [bytes(buffer) for buffer in encoded.buffers]
        for end in range(0, len(encoded.body), max(1, len(encoded.body) // 100)):
            with pytest.raises(codec.DecodeError):
                codec.decode(encoded.body[:end], buffers, hooks=Agent(), allow_pickle=False)
        for count in range(len(buffers)):
            with pytest.raises(codec.DecodeError):
                codec.decode(encoded.body, buffers[:count], hooks=Agent(), allow_pickle=False)


def table(segments: list[Any], forms: list[Any], value: Any = None) -> bytes:
    content = msgpack.packb([segments, forms, []])
    item = msgpack.ExtType(wire.OBJECT, wire.number(len(forms) - 1))
    return msgpack.packb([msgpack.ExtType(wire.TABLE, content), item if value is None else value])


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ([0, 0, "float32", 0, 0, 5, 1], "needs 20 bytes of a segment of 16"),
        ([0, 0, "float32", 0, 1, 4, 1], "needs 20 bytes"),
        ([0, 0, "float32", 0, 0, 2, 2**62], "needs"),
        ([0, 0, "float32", 0, 0, 2, -1], "extent -1"),
        ([0, 0, "float32", 0, 0, -4, 1], "extent -4"),
        ([0, 0, "float32", 0, -1, 4, 1], "begins at -1"),
        ([0, 0, "float32", 0, 0, 4], "not as many strides"),
        ([0, 1, "float32", 0, 0, 4, 1], "segment 1, and has 1"),
        ([0, -1, "float32", 0, 0, 4, 1], "segment -1"),
        ([0, 0, "float99", 0, 0, 4, 1], "float99"),
        ([0, 0, "qint8", 0, 0, 4, 1], "qint8"),
        ([0, 0, "int32", 1, 0, 4, 1], "gradients"),
        ([99, 0], "unknown kind 99"),
        ([8, "O", [0], [1], b"x" * 8], "object, which needs a pickle"),
        ([8, "<f4", [0], [5], b"x" * 16], "does not fit its 16 bytes"),
        ([8, "<f4", [1], [4], b"x" * 16], "no permutation"),
        ([8, "<f4", [0, 1], [-2, -2], b"x" * 16], "shape"),
        ([9, "O", [2], b"x" * 16], "pickle"),
        ([9, "<f4", [2**40], b"x" * 16], "does not fit"),
    ],
    ids=str,
)
def test_a_form_that_contradicts_its_memory_is_named(form: list[Any], words: str) -> None:
    with pytest.raises(codec.DecodeError, match=words):
        codec.decode(table([b"\0" * 16], [form]), [])


def test_sparse_indices_beyond_the_shape_are_refused() -> None:
    memory = np.array([0, 5], dtype=np.int64).tobytes()
    forms = [
        [0, 0, "int64", 0, 0, 1, 2, 2, 1],
        [0, 0, "int64", 0, 0, 2, 1],
        [2, 0, 0, 1, 3],
    ]
    with pytest.raises(codec.DecodeError, match=r"indices|size"):
        codec.decode(table([memory], forms), [])
    forms[2] = [3, 0, "sparse_csr", 1, 1, 1, 1, 3]
    with pytest.raises(codec.DecodeError):
        codec.decode(table([memory], forms), [])


def test_unsorted_indices_that_claim_to_be_coalesced_are_refused() -> None:
    memory = np.array([5, 0], dtype=np.int64).tobytes()
    forms = [[0, 0, "int64", 0, 0, 1, 2, 2, 1], [0, 0, "int64", 0, 0, 2, 1], [2, 64, 0, 1, 9]]
    with pytest.raises(codec.DecodeError):
        codec.decode(table([memory], forms), [])


def test_jagged_offsets_beyond_the_values_are_refused() -> None:
    for offsets in ([0, 5, 4], [0, 2, 9], [-1, 2, 4], [3, 2, 4]):
        memory = np.array(offsets, dtype=np.int64).tobytes()
        forms = [[0, 0, "int64", 0, 0, 3, 1], [0, 1, "float32", 0, 0, 4, 1], [5, 0, 1, 0, -1, 1]]
        with pytest.raises(codec.DecodeError, match="offsets"):
            codec.decode(table([memory, bytes(16)], forms), [])


def test_a_buffer_is_used_once() -> None:
    forms = [[8, "|u1", [0], [8], 0], [8, "|u1", [0], [8], 0]]
    with pytest.raises(codec.DecodeError, match="uses buffer 0 twice"):
        codec.decode(table([], forms), [bytearray(8)])


def test_marks_and_tables_in_wrong_places_are_refused() -> None:
    mark = msgpack.ExtType(wire.TUPLE, b"")
    inner = msgpack.ExtType(wire.TABLE, msgpack.packb([[], [], []]))
    for value in (mark, [1, mark], {"k": mark}, [inner, [inner, 1]], [inner], inner):
        with pytest.raises(codec.DecodeError):
            codec.decode(msgpack.packb(value), [])
    body = msgpack.packb(msgpack.ExtType(wire.LARGE_BODY, wire.number(0)))
    with pytest.raises(codec.DecodeError, match="body"):
        codec.decode(body, [body, body])
    with pytest.raises(codec.DecodeError):
        codec.decode(body, [])


def test_pickles_stay_closed_however_they_are_named() -> None:
    encoded = codec.encode([max])
    for buffers in (encoded.buffers, [b""]):
        with pytest.raises(codec.PickleRefusedError):
            codec.decode(encoded.body, buffers, allow_pickle=False)


def test_claims_allocate_nothing() -> None:
    # Arrays inside one another, each of which claims as many items as there are bytes.
    size = 300_000
    claim = b"\xdd" + (size - 10).to_bytes(4, "big")
    body = (claim * 500).ljust(size, b"\xc0")
    # One part named again and again; memory that is there once and many times in the shape.
    repeated = table(
        [bytes(4000)], [[0, 0, "float32", 0, 0, 1000, 1], [4, 0, "float32", *[0] * 60_000]]
    )
    expanded = table([bytes(16)], [[0, 0, "float32", 0, 0, 10**9, 0], [4, 0, "float32", 0]])
    broadcast = table([bytes(16)], [[0, 0, "uint8", 0, 0, 10**9, 0], [6, 0, "quint8", 0, 1.0, 0]])
    opaque = table([bytes(16)], [[0, 0, "float32", 0, 0, 10**9, 0], [7, 0, 0]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    for data in (
        body,
        repeated,
        expanded,
        broadcast,
        opaque,
        b"\xdb\x7f\xff\xff\xff",
        b"\xdf\x7f\xff\xff\xff",
        b"\xdd\x7f\xff\xff\xff",
        b"\xc9\x7f\xff\xff\xff\x05",
    ):
        with pytest.raises(codec.DecodeError):
            codec.decode(data, [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
