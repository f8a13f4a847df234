"""Tensors: the receiver's half, from a form in the table to a tensor.

Nothing in a form is believed: every number is checked against what came with it before torch sees
it, and sparse tensors are built with torch's own check of their invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import Parameter

from .tensors import (
    BUFFER,
    COALESCED,
    COMPRESSED,
    CONJ,
    COO,
    DENSE,
    DTYPE_NAMES,
    JAGGED,
    LAYOUT_NAMES,
    META,
    MKLDNN,
    NEG,
    NESTED,
    PARAMETER,
    PERSISTENT,
    QUANTIZED,
    REQUIRES_GRAD,
    STORED,
    is_dense,
)
from .wire import ALIGNMENT, CPU, DecodeError

DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
LAYOUTS: Final = {name: layout for layout, name in LAYOUT_NAMES.items()}
_SIZES: Final = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_QUANTIZED: Final = {DTYPE_NAMES[dtype]: dtype for dtype in STORED}
#: Most dimensions that torch's kernels are sure to take.
_MOST_DIMENSIONS: Final = 64

Part = Callable[[Any], Any]
Segment = Callable[[Any], torch.UntypedStorage]


def storage_over(memory: Any) -> torch.UntypedStorage:
    """A storage over writable memory that nobody else uses (copied where it is misaligned)."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device=CPU).untyped_storage()
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    return tensor.untyped_storage()


def read_tensor(form: list[Any], segment: Segment, part: Part) -> torch.Tensor:
    """Build a tensor.

    Args:
        form: what the table says of it.
        segment: gives the storage of a segment's number, or raises DecodeError.
        part: gives an object that stands in the table before this one, or raises DecodeError.

    Raises:
        DecodeError: the form contradicts itself or its memory.
    """
    kind = form[0]
    if kind == DENSE:
        return _dense(form, segment)
    reader = _READERS.get(kind)
    if reader is None:
        raise DecodeError(f"The message has an object of unknown kind {kind!r}.")
    return reader(form, part)


def _extents(numbers: list[Any]) -> list[int]:
    for extent in numbers:
        if type(extent) is not int or extent < 0:
            raise DecodeError(f"A tensor in the message has the extent {extent!r}.")
    return numbers


def _shape_and_stride(form: list[Any]) -> tuple[list[int], list[int]]:
    dimensions, odd = divmod(len(form) - 5, 2)
    if odd or not 0 <= dimensions <= _MOST_DIMENSIONS:
        raise DecodeError("A tensor in the message has not as many strides as dimensions.")
    return _extents(form[5 : 5 + dimensions]), _extents(form[5 + dimensions :])


def _dense(form: list[Any], segment: Segment) -> torch.Tensor:
    _, number, name, flags, offset = form[:5]
    dtype = DTYPES.get(name)
    if dtype is None or name in _QUANTIZED or type(flags) is not int:
        raise DecodeError(f"The message has a tensor of dtype {name!r}, which this torch lacks.")
    shape, stride = _shape_and_stride(form)
    last = 0
    for extent, step in zip(shape, stride, strict=True):
        if not extent:
            last = -1
            break
        last += (extent - 1) * step
    if last < 0:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=CPU)
    else:
        storage = segment(number)
        if type(offset) is not int or offset < 0:
            raise DecodeError(f"A tensor in the message begins at {offset!r}.")
        needed = (offset + last + 1) * _SIZES[name]
        if needed > storage.nbytes():
            raise DecodeError(
                f"A tensor of shape {shape} and strides {stride} needs {needed} bytes of a "
                f"segment of {storage.nbytes()}."
            )
        tensor = torch.empty(0, dtype=dtype, device=CPU).set_(storage, offset, shape, stride)
    return _finish(tensor, flags) if flags else tensor


def _finish(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & CONJ:
        tensor = tensor.conj()
    if flags & NEG:
        tensor = torch._neg_view(tensor)
    if flags & PARAMETER:
        return Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    if flags & REQUIRES_GRAD:
        tensor = tensor.requires_grad_()
    if flags & BUFFER:
        tensor.persistent = bool(flags & PERSISTENT)  # type: ignore[attr-defined]
        tensor._is_buffer = True  # type: ignore[attr-defined]
    return tensor


def _meta(form: list[Any], part: Part) -> torch.Tensor:
    dtype = DTYPES.get(form[2])
    if dtype is None or type(form[3]) is not int:
        raise DecodeError(f"The message has a tensor of dtype {form[2]!r}, which this torch lacks.")
    shape, stride = _shape_and_stride(form)
    return _finish(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), form[3])


def _plain(part: Part, number: Any) -> torch.Tensor:
    """A part that must be an ordinary tensor."""
    tensor = part(number)
    if not isinstance(tensor, torch.Tensor):
        raise DecodeError("A tensor in the message has a part that is no tensor.")
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized:
        raise DecodeError("A tensor in the message has a part of another kind than it needs.")
    if tensor.is_nested or tensor.requires_grad:
        raise DecodeError("A tensor in the message has a part of another kind than it needs.")
    return tensor


def _coo(form: list[Any], part: Part) -> torch.Tensor:
    flags = form[1]
    tensor = torch.sparse_coo_tensor(
        _plain(part, form[2]),
        _plain(part, form[3]),
        _extents(form[4:]),
        check_invariants=True,
        device=CPU,
        is_coalesced=bool(flags & COALESCED),
    )
    return _finish(tensor, flags)


def _compressed(form: list[Any], part: Part) -> torch.Tensor:
    layout = LAYOUTS[form[2]]
    compressed, values = _plain(part, form[3]), _plain(part, form[5])
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        # torch takes blocks without elements, and dies of a division by their size later.
        first = compressed.dim()
        if not all(values.shape[first : first + 2]):
            raise DecodeError("A sparse tensor in the message has empty blocks.")
    tensor = torch.sparse_compressed_tensor(
        compressed,
        _plain(part, form[4]),
        values,
        _extents(form[6:]),
        layout=layout,
        check_invariants=True,
        device=CPU,
    )
    return _finish(tensor, form[1])


def _nested(form: list[Any], part: Part) -> torch.Tensor:
    parts = [_plain(part, number) for number in form[3:]]
    dtype = DTYPES[form[2]]
    if any(component.dtype is not dtype for component in parts):
        raise DecodeError("A nested tensor in the message has parts of several dtypes.")
    _check_copy(parts)
    tensor = torch.nested.nested_tensor(parts, dtype=dtype, device=CPU)
    return _finish(tensor, form[1])


def _check_copy(parts: list[torch.Tensor]) -> None:
    """Raise where a copy of tensors (expanded, or named many times) is larger than what came."""
    came: dict[int, int] = {}
    for tensor in parts:
        storage = tensor.untyped_storage()
        came[storage.data_ptr()] = storage.nbytes()
    if sum(tensor.numel() * tensor.element_size() for tensor in parts) > sum(came.values()):
        raise DecodeError("A tensor in the message needs more memory than came with it.")


def _jagged(form: list[Any], part: Part) -> torch.Tensor:
    _, flags, values_number, offsets_number, lengths_number, dimension = form
    values = _plain(part, values_number)
    offsets = _plain(part, offsets_number)
    lengths = None if lengths_number == -1 else _plain(part, lengths_number)
    if type(dimension) is not int or not 1 <= dimension <= values.dim():
        raise DecodeError(f"A nested tensor in the message is ragged in dimension {dimension!r}.")
    available = values.shape[dimension - 1]
    integers = (torch.int32, torch.int64)
    if offsets.dim() != 1 or not offsets.numel() or offsets.dtype not in integers:
        raise DecodeError("A nested tensor in the message has malformed offsets.")
    if lengths is not None:
        count = offsets.numel() if lengths.numel() == offsets.numel() else offsets.numel() - 1
        if lengths.dim() != 1 or lengths.numel() != count or lengths.dtype not in integers:
            raise DecodeError("A nested tensor in the message has malformed lengths.")
        ends = offsets[:count] + lengths
        fits = not count or (int(lengths.min()) >= 0 and int(ends.max()) <= available)
    else:
        steps = offsets.diff()
        whole = int(offsets[0]) == 0 and int(offsets[-1]) == available
        fits = whole and not bool((steps < 0).any())
    if not fits or int(offsets.min()) < 0 or int(offsets.max()) > available:
        raise DecodeError("A nested tensor in the message has offsets beyond its values.")
    tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=dimension
    ).detach()
    return _finish(tensor, flags)


def _quantized(form: list[Any], part: Part) -> torch.Tensor:
    _, flags, name, number, *parameters = form
    dtype = _QUANTIZED[name]
    stored = _plain(part, number)
    if stored.dtype is not STORED[dtype] or not is_dense(stored):
        raise DecodeError("A quantised tensor in the message does not fit its memory.")
    shape = list(stored.shape)
    if len(parameters) == 2:
        scale, zero_point = parameters
        tensor = torch._empty_affine_quantized(
            shape, scale=scale, zero_point=zero_point, dtype=dtype, device=CPU
        )
    else:
        scales, zero_points, axis = parameters
        if type(axis) is not int or not 0 <= axis < len(shape):
            raise DecodeError(f"A quantised tensor in the message has the axis {axis!r}.")
        scales, zero_points = _plain(part, scales), _plain(part, zero_points)
        if scales.shape != (shape[axis],) or zero_points.shape != (shape[axis],):
            raise DecodeError("A quantised tensor in the message lacks scales.")
        tensor = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=CPU
        )
    tensor.set_(stored.untyped_storage(), stored.storage_offset(), stored.shape, stored.stride())
    return _finish(tensor, flags)


def _mkldnn(form: list[Any], part: Part) -> torch.Tensor:
    dense = _plain(part, form[2])
    _check_copy([dense])
    return _finish(dense.to_mkldnn(), form[1])


_READERS: Final[dict[Any, Callable[[list[Any], Part], torch.Tensor]]] = {
    META: _meta,
    COO: _coo,
    COMPRESSED: _compressed,
    NESTED: _nested,
    JAGGED: _jagged,
    QUANTIZED: _quantized,
    MKLDNN: _mkldnn,
}
