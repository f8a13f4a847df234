"""Tensors: the sender's half, from a tensor to its form in the table.

A form is a list of integers, names and numbers of other forms, its kind first.  A dense tensor is
``[DENSE, segment, dtype, flags, offset, *shape, *stride]``; its segment and its offset (in
elements) are filled in when all views of its storage are known (``storages.py``).  The other kinds
are made of dense ones.  ``received.py`` has the receiver's half.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import Parameter

from .storages import Storage, View
from .wire import CPU, Unsendable

# Kinds of objects in the table.
DENSE: Final = 0
META: Final = 1
COO: Final = 2
COMPRESSED: Final = 3
NESTED: Final = 4
JAGGED: Final = 5
QUANTIZED: Final = 6
MKLDNN: Final = 7
ARRAY: Final = 8
NUMPY: Final = 9

# Flags of tensors.
REQUIRES_GRAD: Final = 1
CONJ: Final = 2
NEG: Final = 4
PARAMETER: Final = 8
BUFFER: Final = 16
PERSISTENT: Final = 32
COALESCED: Final = 64

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
    value: str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
LAYOUT_NAMES: Final[dict[torch.layout, str]] = {
    value: str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.layout)
}
MEMORY_FORMAT_NAMES: Final[dict[torch.memory_format, str]] = {
    value: str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.memory_format)
}
#: Quantised types that hold several elements in a byte: torch's own pickling knows how.
_PACKED: Final = {getattr(torch, name) for name in ("quint4x2", "quint2x4") if hasattr(torch, name)}
_COMPRESSED: Final = {
    torch.sparse_csr: True,
    torch.sparse_bsr: True,
    torch.sparse_csc: False,
    torch.sparse_bsc: False,
}
_BUFFER_ATTRIBUTES: Final = {"persistent", "_is_buffer"}


def extra_attributes(tensor: torch.Tensor) -> dict[str, Any] | None:
    """What was set on a tensor, which only a pickle can carry; None in nearly all cases."""
    attributes = tensor.__dict__
    if not attributes or attributes.keys() == _BUFFER_ATTRIBUTES:
        return None
    return attributes


class TensorForms:
    """Collects the tensors (and other objects) of one message."""

    __slots__ = ("_by_address", "_known", "forms", "storages")

    def __init__(self) -> None:
        self.forms: list[list[Any]] = []
        self.storages: list[Storage] = []
        self._by_address: dict[int, Storage] = {}
        # Each object is kept with its number: an id stands for one object only while that lives.
        self._known: dict[int, tuple[Any, int]] = {}

    def find(self, value: Any) -> int | None:
        """The number of an object that has been added before."""
        known = self._known.get(id(value))
        return None if known is None else known[1]

    def add(self, value: Any, form: list[Any]) -> int:
        """Add the form of an object; returns its number."""
        index = len(self.forms)
        self.forms.append(form)
        self._known[id(value)] = (value, index)
        return index

    def add_tensor(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor; None for a kind that only torch's own pickling can say.

        Raises:
            Unsendable: it is on a device other than the CPU, or its memory cannot be had.
        """
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        try:
            if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
                form = self._dense(tensor)
            else:
                composite = self._composite(tensor)
                if composite is None:
                    return None
                form = composite
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unsendable(tensor, f"torch gives no access to its memory: {error}") from error
        return self.add(tensor, form)

    def _dense(self, tensor: torch.Tensor) -> list[Any]:
        kind = type(tensor)
        flags = PARAMETER if kind is Parameter else 0
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD
        attributes = tensor.__dict__
        if attributes and attributes.keys() == _BUFFER_ATTRIBUTES:
            flags |= BUFFER | (PERSISTENT if attributes["persistent"] else 0)
        shape, stride = tensor.shape, tensor.stride()
        name = DTYPE_NAMES[tensor.dtype]
        if not tensor.is_cpu:
            if tensor.is_meta:
                return [META, 0, name, flags, 0, *shape, *stride]
            raise _elsewhere(tensor)
        if tensor.is_conj():
            flags |= CONJ
        if tensor.is_neg():
            flags |= NEG
        if tensor._is_zerotensor():
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=CPU)
            stride = tensor.stride()
        form = [DENSE, 0, name, flags, 0, *shape, *stride]
        count = tensor.numel()
        if count:
            self._claim(tensor, form, count)
        else:
            form[1] = -1
        return form

    def _claim(self, tensor: torch.Tensor, form: list[Any], count: int) -> None:
        """Note which bytes of its storage a tensor spans."""
        size = tensor.element_size()
        if tensor.is_contiguous():
            last = count - 1
        else:
            last = sum(
                (length - 1) * step
                for length, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
        start = int(tensor.storage_offset()) * size
        end = start + (int(last) + 1) * size
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if end > nbytes or not address:
            raise Unsendable(
                tensor, f"its storage has {nbytes} bytes and it spans {end}: it was resized"
            )
        entry = self._by_address.get(address)
        if entry is None:
            entry = self._by_address[address] = Storage(storage, nbytes)
            self.storages.append(entry)
        elif nbytes > entry.nbytes:
            entry.storage, entry.nbytes = storage, nbytes
        entry.views.append(View(tensor, form, start, end, count * size))

    def _composite(self, tensor: torch.Tensor) -> list[Any] | None:
        flags = REQUIRES_GRAD if tensor.requires_grad else 0
        if type(tensor) is Parameter:
            flags |= PARAMETER
        if not (tensor.is_cpu or tensor.is_meta):
            raise _elsewhere(tensor)
        if tensor.is_meta:
            return None
        plain = tensor.detach()
        add = self._add_part
        if tensor.is_quantized:
            return self._quantized(plain, flags)
        if tensor.layout is torch.sparse_coo:
            if tensor.is_coalesced():
                flags |= COALESCED
            return [COO, flags, add(plain._indices()), add(plain._values()), *tensor.shape]
        by_row = _COMPRESSED.get(tensor.layout)
        if by_row is not None:
            compressed = plain.crow_indices() if by_row else plain.ccol_indices()
            indices = plain.col_indices() if by_row else plain.row_indices()
            parts = [add(compressed), add(indices), add(plain.values())]
            return [COMPRESSED, flags, LAYOUT_NAMES[tensor.layout], *parts, *tensor.shape]
        if tensor.is_nested and tensor.layout is torch.strided:
            parts = [add(part) for part in plain.unbind()]
            return [NESTED, flags, DTYPE_NAMES[tensor.dtype], *parts]
        if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
            return [MKLDNN, flags, add(plain.to_dense())]
        return None

    def _add_part(self, tensor: torch.Tensor) -> int:
        index = self.add_tensor(tensor)
        if index is None:
            raise TypeError(f"a part of it has layout {tensor.layout}")
        return index

    def _quantized(self, plain: torch.Tensor, flags: int) -> list[Any] | None:
        if plain.dtype in _PACKED:
            return None
        if not is_dense(plain):
            plain = plain.contiguous()
        scheme = plain.qscheme()
        parameters: list[Any]
        if scheme is torch.per_tensor_affine:
            parameters = [plain.q_scale(), plain.q_zero_point()]
        elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            parameters = [
                self._add_part(plain.q_per_channel_scales()),
                self._add_part(plain.q_per_channel_zero_points()),
                plain.q_per_channel_axis(),
            ]
        else:
            return None
        # The bytes go as a tensor of the type that the dtype is stored as.
        stored = torch.empty(0, dtype=STORED[plain.dtype], device=CPU).set_(
            plain.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
        )
        return [QUANTIZED, flags, DTYPE_NAMES[plain.dtype], self._add_part(stored), *parameters]

    def add_jagged(self, tensor: torch.Tensor) -> int:
        """The number of a nested tensor of the jagged layout."""
        known = self.find(tensor)
        if known is not None:
            return known
        flags = REQUIRES_GRAD if tensor.requires_grad else 0
        nested: Any = tensor
        plain: Any = tensor.detach()
        lengths = plain.lengths()
        form = [
            JAGGED,
            flags,
            self._add_part(plain.values().detach()),
            self._add_part(nested.offsets()),
            -1 if lengths is None else self._add_part(nested.lengths()),
            plain._ragged_idx,
        ]
        return self.add(tensor, form)


STORED: Final[dict[torch.dtype, torch.dtype]] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their span, each once."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != expected:
                return False
            expected *= length
    return True


def _elsewhere(tensor: torch.Tensor) -> Unsendable:
    return Unsendable(tensor, f"it is on device {tensor.device}; send tensor.cpu()")


def is_jagged(tensor: torch.Tensor) -> bool:
    """Whether this is a nested tensor of the jagged layout (a subclass of torch's own)."""
    return tensor.is_nested and tensor.layout is torch.jagged
