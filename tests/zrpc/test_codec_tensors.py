"""Tensors of every kind arrive as they left, share what they shared, and drag nothing along."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import re
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.masked import masked_tensor

from zrpc import codec

warnings.filterwarnings("ignore", ".*(Sparse CSR|MaskedTensors|nested tensors|quantize).*")


def sent(value: Any, **options: Any) -> Any:
    """The value as the other side gets it."""
    encoded = codec.encode(value, **options)
    allowed = options.get("allow_pickle", True)
    return codec.decode(
        encoded.body, [bytearray(buffer) for buffer in encoded.buffers], allow_pickle=allowed
    )


def size(value: Any) -> int:
    """Bytes that travel."""
    encoded = codec.encode(value)
    return len(encoded.body) + sum(len(buffer) for buffer in encoded.buffers)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements, in order, as bytes: any dtype, NaN and all."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def assert_same_tensor(got: torch.Tensor, tensor: torch.Tensor) -> None:
    assert type(got) is type(tensor)
    assert got.dtype is tensor.dtype and got.shape == tensor.shape
    assert got.layout is tensor.layout
    assert got.requires_grad == tensor.requires_grad and got.is_leaf
    assert got.is_conj() == tensor.is_conj() and got.is_neg() == tensor.is_neg()
    assert bits(got) == bits(tensor)


#: Names of dtypes without elements of their own: quantised, opaque bits, several in a byte.
ODD = re.compile(r"torch\.(u?int[1-7]|q.*|bits.*)")
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not ODD.fullmatch(str(value))
    },
    key=str,
)
B = torch.arange(24.0).reshape(2, 3, 4)
BIG = torch.arange(64 * 64.0).reshape(64, 64)
COMPLEX = torch.complex(B, B + 1)

DENSE = {
    "contiguous": B,
    "permuted": B.permute(2, 0, 1),
    "sliced": B[:, ::2, 1:3],
    "zero-dim": B[0, 0, 0],
    "zero-dim made": torch.zeros(()),
    "empty": torch.empty(0, 3),
    "empty strided": torch.empty_strided((3, 0, 2), (7, 5, 1)),
    "expanded": torch.ones(1).expand(5, 4),
    "expanded in part": torch.arange(3.0).reshape(3, 1).expand(3, 1000),
    "conjugated": COMPLEX.conj(),
    "negated": COMPLEX.conj().imag,
    "conjugated column": torch.complex(BIG, BIG)[:, 3].conj(),
    "negated column": torch.complex(BIG, BIG).conj().imag[:, 3],
    "imaginary part": COMPLEX.imag,
    "channels last": torch.ones(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "big": BIG,
    "big transposed": BIG.t(),
    "big column": BIG[:, 3],
    "big diagonal": BIG.diagonal(),
    "narrow": B.narrow(1, 1, 1),
    "unfolded": torch.arange(10.0).unfold(0, 4, 1),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    "int64": torch.tensor([1, -(2**62)]),
    "requires_grad": torch.ones(3, requires_grad=True),
    "non-leaf": torch.ones(3, requires_grad=True) * 2,
    "parameter": nn.Parameter(B.clone()),
    "parameter of ints": nn.Parameter(torch.arange(3), requires_grad=False),
    "buffer": nn.Buffer(torch.ones(2), persistent=False),
    "65 dimensions less one": torch.ones([1] * 64),
}


@pytest.mark.parametrize("name", DENSE.keys())
def test_dense_tensors_come_back_without_a_pickle(name: str) -> None:
    tensor = DENSE[name]
    got = sent(tensor, allow_pickle=False)
    assert_same_tensor(got, tensor)
    if "column" not in name and "diagonal" not in name:
        assert got.stride() == tensor.stride()
    assert got.grad_fn is None
    assert_same_tensor(sent((1, {"k": [tensor]}), allow_pickle=False)[1]["k"][0], tensor)
    assert_same_tensor(sent(Box(tensor)).content, tensor)


@pytest.mark.parametrize(
    "tensor", [B.permute(2, 0, 1), BIG.t(), DENSE["channels last"], BIG[::2, ::3]], ids=str
)
def test_strides_are_kept_where_the_memory_is_used(tensor: torch.Tensor) -> None:
    got = sent(tensor)
    if tensor.numel() * tensor.element_size() * 2 >= 64 * 64 * 4 or tensor.numel() < 100:
        assert got.stride() == tensor.stride()
    else:
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    memory = torch.arange(16 * 512, dtype=torch.int64).view(torch.uint8)
    if dtype is torch.bool:
        memory = memory % 2
    for tensor in (memory.view(dtype)[:6], memory.view(dtype), memory.view(dtype)[::700]):
        assert_same_tensor(sent(tensor, allow_pickle=False), tensor)
    assert sent(dtype, allow_pickle=False) is dtype


def test_torchs_small_values_keep_their_type() -> None:
    value = [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.device("cuda:1"),
        torch.device("cpu"),
        torch.strided,
        torch.sparse_csr,
        torch.channels_last,
    ]
    got = sent(value, allow_pickle=False)
    assert got == value and [type(x) for x in got] == [type(x) for x in value]


def test_buffers_of_modules_stay_buffers() -> None:
    got = sent(nn.Buffer(torch.ones(2), persistent=False), allow_pickle=False)
    assert isinstance(got, nn.Buffer) and got.persistent is False


def test_attributes_set_on_a_tensor_travel_pickled() -> None:
    tensor = torch.ones(3)
    tensor.tag = ["x"]
    tensor.me = tensor
    got, again = sent((tensor, [tensor]))
    assert got.tag == ["x"] and got.me is got and again[0] is got
    with pytest.raises(codec.PickleRefusedError):
        codec.encode(tensor, allow_pickle=False)


# ------------------------------------------------------------------------------- other layouts

WIDE = torch.rand(64, 64)
OTHERS = {
    "coo": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
    "coo uncoalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (3, 3)),
    "coo big": WIDE.to_sparse(),
    "coo hybrid": torch.sparse_coo_tensor([[0, 2]], torch.rand(2, 5), (4, 5)),
    "coo empty": torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0), (3, 4)),
    "coo grad": WIDE.to_sparse().requires_grad_(),
    "coo complex": torch.complex(WIDE, WIDE).to_sparse(),
    "csr": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(),
    "csr batched": torch.stack([torch.eye(3), torch.eye(3)]).to_sparse_csr(),
    "csr grad": WIDE.to_sparse_csr().requires_grad_(),
    "csc": WIDE.to_sparse_csc(),
    "bsr": WIDE.to_sparse_bsr((2, 4)),
    "bsc": WIDE.to_sparse_bsc((4, 2)),
}


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS.keys())
def test_sparse_tensors_come_back_without_a_pickle(tensor: torch.Tensor) -> None:
    for got in (sent([tensor], allow_pickle=False)[0], sent(Box(tensor)).content):
        assert got.layout is tensor.layout and got.dtype is tensor.dtype
        assert got.shape == tensor.shape and got.requires_grad == tensor.requires_grad
        if got.layout is torch.sparse_coo:
            assert got.is_coalesced() == tensor.is_coalesced()
            assert torch.equal(got.detach()._indices(), tensor.detach()._indices())
        assert torch.equal(got.detach().to_dense(), tensor.detach().to_dense())


def quantized_kinds() -> dict[str, torch.Tensor]:
    scales, points = torch.rand(64) + 0.1, torch.randint(0, 5, (64,))
    return {
        "quint8": torch.quantize_per_tensor(WIDE, 0.1, 10, torch.quint8),
        "qint8 transposed": torch.quantize_per_tensor(WIDE, 0.1, 10, torch.qint8).t(),
        "qint32": torch.quantize_per_tensor(B, 0.1, 10, torch.qint32),
        "sliced": torch.quantize_per_tensor(WIDE, 0.1, 10, torch.quint8)[:, ::2],
        "channel": torch.quantize_per_channel(WIDE, scales, points, 1, torch.qint8),
        "channel of floats": torch.quantize_per_channel(
            WIDE, scales, torch.rand(64), 0, torch.quint8
        ),
        "four bits": torch.quantize_per_channel(WIDE, scales, torch.zeros(64), 0, torch.quint4x2),
    }


@pytest.mark.parametrize("name", quantized_kinds().keys())
def test_quantised_tensors(name: str) -> None:
    tensor = quantized_kinds()[name]
    for got in (sent(tensor, allow_pickle=name == "four bits"), sent(Box(tensor)).content):
        assert got.dtype is tensor.dtype and got.qscheme() == tensor.qscheme()
        assert got.shape == tensor.shape and torch.equal(got.dequantize(), tensor.dequantize())
        if name == "qint8 transposed":
            assert got.stride() == tensor.stride()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout, grad: bool) -> None:
    parts = [torch.rand(2, 3), torch.rand(5, 3), torch.rand(1, 3)]
    tensor = torch.nested.nested_tensor(parts, layout=layout, requires_grad=grad)
    for got in (sent([tensor], allow_pickle=False)[0], sent(Box(tensor)).content):
        assert got.is_nested and got.layout is layout and got.requires_grad == grad and got.is_leaf
        for one, other in zip(got.unbind(), tensor.unbind(), strict=True):
            assert torch.equal(one.detach(), other.detach())


def test_jagged_tensors_of_one_raggedness_can_still_be_added() -> None:
    first = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(5, 3)], layout=torch.jagged)
    second = first * 2
    one, two = sent((first, second), allow_pickle=False)
    assert torch.equal((one + two).values(), (first + second).values())


def test_a_jagged_tensor_with_holes() -> None:
    base = torch.rand(2, 6, 3)
    tensor = torch.nested.narrow(base, 1, torch.tensor([0, 2]), torch.tensor([3, 4]), torch.jagged)
    got = sent(tensor, allow_pickle=False)
    for one, other in zip(got.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(one, other)


def test_an_empty_nested_tensor() -> None:
    assert sent(torch.nested.nested_tensor([]), allow_pickle=False).size(0) == 0


def test_meta_tensors_stay_meta() -> None:
    tensor = torch.empty(10**9, 10**3, device="meta", dtype=torch.float16)
    got = sent(tensor, allow_pickle=False)
    assert got.is_meta and got.shape == tensor.shape and got.dtype is torch.float16


def test_masked_tensors() -> None:
    got = sent(masked_tensor(B.clone(), B > 3))
    assert type(got).__name__ == "MaskedTensor"
    assert torch.equal(got.get_mask(), B > 3) and torch.equal(got.get_data()[B > 3], B[B > 3])


def test_opaque_and_zero_tensors() -> None:
    if torch.backends.mkldnn.is_available():
        got = sent(WIDE.to_mkldnn(), allow_pickle=False)
        assert got.layout is torch._mkldnn and torch.equal(got.to_dense(), WIDE)
    assert torch.equal(sent(torch._efficientzerotensor((3,))), torch.zeros(3))


class Tagged(torch.Tensor):
    __slots__ = ("slot",)


class OwnParameter(nn.Parameter):
    pass


@pytest.mark.parametrize("cls", [Tagged, OwnParameter])
def test_subclasses_keep_type_attributes_and_memory(cls: type) -> None:
    base = torch.arange(4096.0)
    tensor = base.as_subclass(cls)
    tensor.tag = "q"
    if cls is Tagged:
        tensor.slot = 5
    got, plain = sent((tensor, base))
    assert type(got) is cls and got.tag == "q" and got.tolist() == base.tolist()
    assert cls is OwnParameter or got.slot == 5
    plain[0] = 7
    assert got[0] == 7
    with pytest.raises(codec.PickleRefusedError):
        codec.encode(tensor, allow_pickle=False)


def test_subclass_that_requires_grad_is_a_leaf() -> None:
    got = sent(torch.ones(3).as_subclass(Tagged).requires_grad_())
    assert got.requires_grad and got.is_leaf


def test_storages_travel() -> None:
    tensor = torch.arange(5000.0)
    storage, typed, view = sent([tensor.untyped_storage(), tensor.storage(), tensor[:10]])
    assert storage.nbytes() == 20_000 and typed[4999] == 4999 and typed.dtype is torch.float32
    view[0] = 9
    assert typed[0] == 9


# ------------------------------------------------------------------------------- in objects


@dataclasses.dataclass
class Box:
    content: Any


def test_tensors_in_objects_go_out_of_band_and_share_the_table() -> None:
    tensor = torch.arange(100_000.0)
    module = nn.Linear(200, 200)
    value = (
        tensor,
        Box([tensor, tensor[:50_000]]),
        module,
        module.weight,
        {"s": module.state_dict()},
    )
    encoded = codec.encode(value)
    assert len(encoded.body) < 5000
    got, box, linear, weight, state = sent(value)
    assert box.content[0] is got and linear.weight is weight
    assert state["s"]["weight"].data_ptr() == weight.data_ptr()
    assert state["s"]._metadata == module.state_dict()._metadata
    got[0] = 5
    assert box.content[1][0] == 5
    assert type(weight) is nn.Parameter and weight.requires_grad and weight.is_leaf


def test_state_dicts_need_no_pickle() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    got = sent(module.state_dict(), allow_pickle=False)
    nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).load_state_dict(got)
    assert list(got) == list(module.state_dict())


def test_module_and_optimizer_stay_tied() -> None:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    got, tied = sent((module, optimizer))
    assert tied.param_groups[0]["params"][0] is got.weight


def test_script_modules_and_functions() -> None:
    module = torch.jit.script(nn.Linear(2, 2))
    got = sent([module])[0]
    assert isinstance(got, torch.jit.ScriptModule)
    assert torch.equal(got(torch.ones(2)), module(torch.ones(2)))
    assert sent(scripted) is scripted


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_object_arrays_of_tensors() -> None:
    array = np.empty(2, dtype=object)
    array[0] = torch.ones(5000)
    assert len(codec.encode(array).body) < 1000
    assert torch.equal(sent(array)[0], array[0])


# ------------------------------------------------------------------------------- aliasing


def test_one_tensor_twice_is_one_object() -> None:
    tensor = torch.ones(3)
    first, [second], third = sent((tensor, [tensor], {"k": tensor}))
    assert first is second and third["k"] is first
    sparse = tensor.to_sparse()
    first, second = sent((sparse, sparse))
    assert first is second


@pytest.mark.parametrize("count", [10, 10_000])
def test_overlapping_views_stay_views_of_one_storage(count: int) -> None:
    base = torch.zeros(count)
    left, right, whole = sent((base[: count - 2], base[2:], base))
    right[0] = 7
    assert left[2] == 7 and whole[2] == 7
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert base[2] == 0


def test_views_of_other_dtypes_share_too() -> None:
    base = torch.zeros(16)
    floats, ints, halves = sent((base, base.view(torch.int32)[3:5], base.view(torch.bfloat16)[9:]))
    ints[0] = 0x3F800000
    assert floats[3] == 1 and halves.shape == (23,)


def test_what_is_received_aliases_nobody() -> None:
    first, second = sent((torch.zeros(2000), torch.zeros(2000)))
    first += 1
    assert second.sum() == 0
    tensor = torch.zeros(2000)
    sent(tensor).add_(1)
    assert tensor.sum() == 0


def test_a_small_view_does_not_drag_its_storage() -> None:
    base = torch.zeros(1_000_000)
    assert size(base[500:510]) < 300
    assert size(base[::1000]) < 6000
    assert size(base.reshape(1000, 1000)[:, 3]) < 6000
    assert size(base[0].expand(1000, 1000)) < 300
    assert size([base[:1000], base[-1000:]]) < 9000
    assert size([base[:1000], base[500:1500], base[-1000:]]) < 11_000
    assert size([base[:400_000], base[600_000:]]) < 4_100_000


def test_separate_clusters_of_one_storage_arrive_each_with_its_values() -> None:
    base = torch.arange(1_000_000.0)
    first, second, far = sent((base[3:1000], base[500:1500], base[999_001:]))
    assert first[0] == 3 and second[-1] == 1499 and far[-1] == 999_999
    first[-1] = -1
    assert second[499] == -1


def test_close_views_travel_as_one_segment() -> None:
    base = torch.arange(10_000.0)
    encoded = codec.encode((base[:4000], base[5000:]))
    assert len(encoded.buffers) == 1
    left, right = sent((base[:4000], base[5000:]))
    assert left.data_ptr() + 20_000 == right.data_ptr()


def test_large_tensors_are_not_copied() -> None:
    tensor = torch.arange(100_000.0)
    encoded = codec.encode(tensor[10:])
    (buffer,) = encoded.buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), tensor.numpy())
    held = bytearray(buffer)
    got = codec.decode(encoded.body, [held])
    assert np.shares_memory(np.frombuffer(held, np.uint8), got.numpy())


def test_buffers_keep_the_memory_alive() -> None:
    encoded = codec.encode([torch.full((100_000,), 3.0), np.full(100_000, 4.0)])
    filler = [torch.full((100_000,), 9.0) for _ in range(10)]
    got = codec.decode(encoded.body, [bytearray(buffer) for buffer in encoded.buffers])
    assert (got[0] == 3).all() and (got[1] == 4).all() and filler


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_misaligned_buffers_are_copied(shift: int) -> None:
    tensor, array = torch.complex(BIG, BIG).to(torch.complex128), np.arange(5000.0)
    encoded = codec.encode((tensor, array))
    held = []
    for buffer in encoded.buffers:
        memory = bytearray(len(buffer) + shift)
        memory[shift:] = buffer
        held.append(memoryview(memory)[shift:])
    got, other = codec.decode(encoded.body, held)
    assert torch.equal(got, tensor) and got.data_ptr() % 16 == 0
    assert (other == array).all() and other.flags.aligned and other.flags.writeable


def test_read_only_buffers_are_copied() -> None:
    encoded = codec.encode(torch.zeros(5000))
    held = [bytes(buffer) for buffer in encoded.buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.decode(encoded.body, held).add_(1)
    assert held[0] == bytes(20_000)


def test_memory_is_released_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        array = np.zeros(5000)
        encoded = codec.encode([array, Box(array), torch.from_numpy(array)])
        received = [np.frombuffer(bytearray(buffer), np.uint8) for buffer in encoded.buffers]
        held = [memoryview(buffer) for buffer in received]
        got = codec.decode(encoded.body, held)
        watched = [weakref.ref(array), *map(weakref.ref, received)]
        del array, encoded, received, held, got
        assert [reference() for reference in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_sizes_beyond_four_gigabytes() -> None:
    # Never touched, so it takes no memory.
    length = 5 << 30
    with_last = mmap.mmap(-1, length)
    tensor = torch.frombuffer(with_last, dtype=torch.uint8)
    tensor[-1] = 7
    for value in (tensor, tensor.view(torch.float32), Box(tensor)):
        encoded = codec.encode(value)
        assert len(encoded.body) < 500 and [len(buffer) for buffer in encoded.buffers] == [length]
        got = codec.decode(encoded.body, [memoryview(with_last)])
        got = got.content if isinstance(got, Box) else got
        assert got.view(torch.uint8)[-1] == 7 and got.numel() * got.element_size() == length


def test_under_another_default_device() -> None:
    with torch.device("meta"):
        got = sent([B, BIG, torch.zeros(0), WIDE.to_sparse()])
    assert got[0].is_cpu and torch.equal(got[1], BIG)


def test_a_tensor_whose_storage_was_taken_away_is_refused() -> None:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(codec.EncodeError, match="resized"):
        codec.encode(("f", (tensor,), {}))


def test_a_batched_tensor_is_refused_by_name() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(codec.EncodeError, match=r"argument args\[0\] of type torch.Tensor"):
            codec.encode(("f", (x,), {}))
        return x

    torch.vmap(inside)(torch.ones(3, 2))


# ------------------------------------------------------------------------------- any view

LENGTH = 3000
SIMPLE = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.complex64]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A random strided view of a storage of LENGTH elements."""
    dtype = draw(st.sampled_from(SIMPLE))
    base = torch.arange(LENGTH, dtype=torch.int64).to(dtype)
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    stride = [draw(st.sampled_from([0, 1, 2, 5, 17, 100])) for _ in shape]
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    offset = draw(st.integers(0, LENGTH - 1 - last)) if last < LENGTH else 0
    if last >= LENGTH:
        shape, stride = [], []
    return torch.as_strided(base, shape, stride, offset)


@settings(max_examples=300, deadline=None)
@given(views())
def test_any_view_comes_back(tensor: torch.Tensor) -> None:
    got = sent(tensor, allow_pickle=False)
    assert_same_tensor(got, tensor)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)), min_size=1, max_size=6)
)
def test_any_set_of_views_shares_what_it_shared(spans: list[tuple[int, int]]) -> None:
    base = torch.arange(float(LENGTH))
    tensors = [base[start : start + length] for start, length in spans]
    got = sent(tensors, allow_pickle=False)
    for one, other in zip(got, tensors, strict=True):
        assert torch.equal(one, other)
    used = torch.zeros(LENGTH, dtype=torch.bool)
    for start, length in spans:
        used[start : start + length] = True
    assert size(tensors) <= 2 * 4 * int(used.sum()) + 4096 + 500
    # A write through one is seen in each that overlaps it, as at the sender.
    got[0][0] = base[spans[0][0]] = -1
    for one, other in zip(got, tensors, strict=True):
        assert torch.equal(one, other)
