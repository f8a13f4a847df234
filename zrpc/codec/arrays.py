"""NumPy arrays, scalars and dtypes.

Numbers and small contiguous arrays of plain dtypes have the form that msgpack-numpy gives them.
The rest has a form of its own, since msgpack-numpy loses the memory order (Fortran), offsets and
alignment of structured dtypes, the unstructured void, text scalars, fails for dates, copies what
is not contiguous, and pickles objects without being asked.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgpack_numpy
import numpy as np

from .tensors import ARRAY, NUMPY
from .wire import OUT_OF_BAND, Buffer, DecodeError, checked_index

#: Kinds of dtype whose elements are their bytes.
_PLAIN_KINDS: Final = frozenset("biufcSUmMV")
#: Kinds that msgpack-numpy gives back as they were.
_MSGPACK_NUMPY_KINDS: Final = frozenset("biufcSU")
#: Deepest structured dtype that is read.
_DEEPEST_DTYPE: Final = 32

#: Types of NumPy scalars that msgpack-numpy gives back as they were.
NUMBERS: Final[tuple[type, ...]] = tuple(
    {
        kind
        for kind in np.sctypeDict.values()
        if issubclass(kind, (np.bool_, np.number)) and not issubclass(kind, np.timedelta64)
    }
)


def travels_as_bytes(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be sent without a pickle."""
    if dtype.hasobject:
        return False
    if dtype.subdtype is not None:
        return travels_as_bytes(dtype.subdtype[0])
    if dtype.fields is not None:
        return all(travels_as_bytes(field[0]) for field in dtype.fields.values())
    return dtype.kind in _PLAIN_KINDS


def array_form(array: np.ndarray[Any, Any], buffers: list[Buffer]) -> list[Any]:
    """The form of an array whose dtype ``travels_as_bytes``."""
    dtype = array.dtype
    if (
        array.nbytes < OUT_OF_BAND
        and dtype.kind in _MSGPACK_NUMPY_KINDS
        and dtype.itemsize
        and array.flags.c_contiguous
    ):
        form = msgpack_numpy.encode(array)
        return [NUMPY, form[b"type"], list(array.shape), bytes(form[b"data"])]
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    turned = array.transpose(order)
    if not turned.flags.c_contiguous:
        if array.flags.c_contiguous:
            order, turned = list(range(array.ndim)), array
        else:
            turned = turned.copy(order="C")
    data: bytes | int
    if turned.nbytes < OUT_OF_BAND:
        data = turned.tobytes()
    else:
        buffers.append(turned.reshape(-1).view(np.uint8).data)
        data = len(buffers) - 1
    return [ARRAY, describe_dtype(dtype), order, list(turned.shape), data]


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """A dtype in plain data: its array protocol string, or the parts of a structured one."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [describe_dtype(base), list(shape)]
    if dtype.fields is None:
        return dtype.str
    names, formats, offsets, titles = [], [], [], []
    for name in dtype.names or ():
        field = dtype.fields[name]
        names.append(name)
        formats.append(describe_dtype(field[0]))
        offsets.append(field[1])
        titles.append(field[2] if len(field) > 2 else None)
    if not all(title is None or isinstance(title, str) for title in titles):
        titles = [None] * len(titles)
    return {
        "names": names,
        "formats": formats,
        "offsets": offsets,
        "titles": titles,
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def read_dtype(data: Any, depth: int = 0) -> np.dtype[Any]:
    """The dtype that ``describe_dtype`` described."""
    if depth > _DEEPEST_DTYPE:
        raise DecodeError("A NumPy dtype in the message is nested too deep.")
    if isinstance(data, str):
        dtype: np.dtype[Any] = np.dtype(data)
    elif isinstance(data, list):
        base, shape = data
        dtype = np.dtype((read_dtype(base, depth + 1), tuple(shape)))
    else:
        titles = data["titles"]
        spec = {
            "names": data["names"],
            "formats": [read_dtype(part, depth + 1) for part in data["formats"]],
            "offsets": data["offsets"],
            "itemsize": data["itemsize"],
        }
        if any(title is not None for title in titles):
            spec["titles"] = titles
        dtype = np.dtype(spec, align=bool(data["aligned"]))  # type: ignore[call-overload]
    if not travels_as_bytes(dtype):
        raise DecodeError(f"The message has an array of dtype {dtype}, which needs a pickle.")
    return dtype


def read_small_array(form: list[Any]) -> np.ndarray[Any, Any]:
    """The array of a NUMPY form."""
    _, dtype, shape, data = form
    read_dtype(dtype)
    _check_size(np.dtype(dtype), shape, len(data))
    content = bytearray(data)
    array: np.ndarray[Any, Any] = msgpack_numpy.decode(
        {b"nd": True, b"type": dtype, b"kind": b"", b"shape": shape, b"data": content}
    )
    return array


def read_array(form: list[Any], take: Any, buffers: list[Any]) -> np.ndarray[Any, Any]:
    """The array of an ARRAY form; ``take(index)`` gives a buffer that is ours and writable."""
    _, description, order, shape, data = form
    dtype = read_dtype(description)
    memory = (
        bytearray(data) if type(data) is bytes else take(checked_index(data, buffers, "buffer"))
    )
    _check_size(dtype, shape, len(memory))
    if sorted(order) != list(range(len(shape))):
        raise DecodeError("The axes of an array in the message are no permutation.")
    if not len(memory):
        array: np.ndarray[Any, Any] = np.empty(shape, dtype)
    else:
        array = np.ndarray(shape, dtype, memory)
        if not array.flags.aligned:
            array = array.copy()
    return array.transpose(np.argsort(order)) if len(shape) > 1 else array


def _check_size(dtype: np.dtype[Any], shape: Any, length: int) -> None:
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise DecodeError(f"An array in the message has the shape {shape!r}.")
    if math.prod(shape) * dtype.itemsize != length:
        raise DecodeError(
            f"An array of shape {shape} and dtype {dtype} does not fit its {length} bytes."
        )


def number_form(scalar: Any) -> list[Any]:
    """What stands for a NumPy number, after its mark."""
    form = msgpack_numpy.encode(scalar)
    return [form[b"type"], bytes(form[b"data"])]


def read_number(dtype: Any, data: Any) -> Any:
    """The NumPy number."""
    if type(dtype) is not str or type(data) is not bytes:
        raise DecodeError("A NumPy number in the message is malformed.")
    if len(data) != np.dtype(dtype).itemsize or np.dtype(dtype).kind not in "biufc":
        raise DecodeError(f"{len(data)} bytes are no NumPy number of dtype {dtype}.")
    return msgpack_numpy.decode({b"nd": False, b"type": dtype, b"data": data})
