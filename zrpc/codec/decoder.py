"""From a body and buffers to the value."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import torch
from msgpack import ExtType

from . import wire
from .arrays import read_array, read_dtype, read_number, read_small_array
from .pickling import Unpickler
from .received import DTYPES, LAYOUTS, read_tensor, storage_over
from .tensors import ARRAY, MEMORY_FORMAT_NAMES, NUMPY
from .wire import Buffer, DecodeError, Hooks, PickleRefusedError, checked_index

#: Bodies above this size (bytes) are walked through once before anything is built: a body may claim
#: arrays inside one another, each as long as the whole, and reserving them takes size squared.
_CHECKED_FIRST: Final = 4096

_unpackb = msgpack.unpackb


class _Mark:
    """Stands first in a list and says how the list is read."""

    __slots__ = ("build",)

    def __init__(self, build: Callable[[Decoder, list[Any]], Any]) -> None:
        self.build = build


class Decoder:
    """What is known while one message is decoded."""

    __slots__ = (
        "_allow_pickle",
        "_buffers",
        "_forms",
        "_hooks",
        "_large_body",
        "_marks",
        "_objects",
        "_opened",
        "_pickles",
        "_segments",
        "_storages",
        "_taken",
        "_unpickler",
        "agent_error",
    )

    def __init__(self, buffers: Sequence[Buffer], hooks: Hooks | None, allow_pickle: bool) -> None:
        self._buffers = buffers
        self._hooks = hooks
        self._allow_pickle = allow_pickle
        self._marks = 0
        self._large_body = False
        self._taken: set[int] = set()
        self._segments: list[Any] | None = None
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._forms: list[Any] = []
        self._objects: list[Any] = []
        self._pickles: list[Any] = []
        self._opened: list[Any] = []
        self._unpickler: Unpickler | None = None
        self.agent_error: RuntimeError | None = None

    def unpack(self, body: Buffer) -> Any:
        """Read the body."""
        if len(body) > _CHECKED_FIRST:
            _check(body)
        value = _unpackb(
            body,
            list_hook=self._list,
            ext_hook=self._ext,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        if self._marks:
            raise DecodeError("The message has a mark in a place where none can be.")
        return value

    def close(self) -> None:
        """Let go of what refers back: received memory must not wait for the garbage collector."""
        self._unpickler = None
        self.agent_error = None

    def _list(self, items: list[Any]) -> Any:
        if items and type(items[0]) is _Mark:
            self._marks -= 1
            return items[0].build(self, items)
        return items

    def _ext(self, code: int, data: bytes) -> Any:
        if code == wire.OBJECT:
            return self.object(int.from_bytes(data, "little"))
        mark = _MARKS.get(code)
        if mark is not None:
            self._marks += 1
            return mark
        reader = _ATOMS.get(code)
        if reader is None:
            raise DecodeError(f"The message has an extension of unknown type {code}.")
        return reader(self, data)

    # ------------------------------------------------------- the table

    def _table(self, data: bytes) -> _Mark:
        if self._segments is not None:
            raise DecodeError("The message has two tables.")
        segments, forms, pickles = _plain(data)
        if not all(type(part) is list for part in (segments, forms, pickles)):
            raise DecodeError("The message has a malformed table.")
        self._segments, self._forms, self._pickles = segments, forms, pickles
        self._marks += 1
        return _TABLE

    def _with_table(self, items: list[Any]) -> Any:
        _, value = items
        return value

    def object(self, index: Any) -> Any:
        """An object of the table."""
        objects, forms = self._objects, self._forms
        checked_index(index, forms, "object")
        while len(objects) <= index:
            # In order, so that the parts of one have been built before it.
            form = forms[len(objects)]
            kind = form[0]
            if kind == ARRAY:
                built: Any = read_array(form, self._take, self._buffers)  # type: ignore[arg-type]
            elif kind == NUMPY:
                built = read_small_array(form)
            else:
                built = read_tensor(form, self._storage, self._part)
            objects.append(built)
        return objects[index]

    def _part(self, index: Any) -> Any:
        return self._objects[checked_index(index, self._objects, "object")]

    def _storage(self, index: Any) -> torch.UntypedStorage:
        storage = self._storages.get(index)
        if storage is None:
            segments = self._segments or []
            data = segments[checked_index(index, segments, "segment")]
            memory = bytearray(data) if type(data) is bytes else self._take(data)
            storage = self._storages[index] = storage_over(memory)
        return storage

    def _buffer(self, index: Any) -> Buffer:
        """A buffer, once: nothing else can share its memory."""
        checked_index(index, self._buffers, "buffer")
        if index in self._taken:
            raise DecodeError(f"The message uses buffer {index} twice.")
        self._taken.add(index)
        buffer: Buffer = self._buffers[index]
        return buffer

    def _take(self, index: Any) -> bytearray | memoryview:
        """A buffer that is writable and ours."""
        buffer = self._buffer(index)
        if type(buffer) is bytearray:
            return buffer
        if isinstance(buffer, memoryview) and not buffer.readonly:
            return buffer
        return bytearray(buffer)

    # ------------------------------------------------------- pickles and references

    def _pickle(self, data: bytes) -> Any:
        if not self._allow_pickle:
            raise PickleRefusedError(
                "The message has a pickle, and this worker opens none (allow_pickle=False)."
            )
        index = checked_index(int.from_bytes(data, "little"), self._pickles, "pickle")
        if self._unpickler is None:
            self._unpickler = Unpickler(self)
        while len(self._opened) <= index:
            content, numbers = self._pickles[len(self._opened)]
            if type(content) is not bytes:
                content = self._buffer(content)
            buffers = [self._take(number) for number in numbers]
            try:
                self._opened.append(self._unpickler.unpickle(content, buffers))
            except (wire.DecodeError, wire.PickleRefusedError):
                raise
            except Exception as error:
                if error is self.agent_error:
                    raise
                # Opening a pickle runs the code of its classes, which may raise anything.
                raise DecodeError(
                    f"A pickled value in the message cannot be opened here: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return self._opened[index]

    def reference(self, data: Any) -> Any:
        """The RRef for what the sender's agent said of it."""
        if self._hooks is None:
            raise DecodeError("The message has an RRef, and there is no agent to read it.")
        try:
            return self._hooks.decode_reference(data)
        except RuntimeError as error:
            self.agent_error = error
            raise

    # ------------------------------------------------------- atoms

    def _big_int(self, data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    def _bytearray(self, data: bytes) -> bytearray:
        return bytearray(data)

    def _complex(self, data: bytes) -> complex:
        return complex(*struct.unpack("<dd", data))

    def _constant(self, data: bytes) -> Any:
        return wire.CONSTANTS[data]

    def _large_bytes(self, data: bytes) -> bytes:
        buffer = self._buffer(int.from_bytes(data, "little"))
        return buffer if type(buffer) is bytes else bytes(buffer)

    def _large_bytearray(self, data: bytes) -> bytearray:
        buffer = self._buffer(int.from_bytes(data, "little"))
        return buffer if type(buffer) is bytearray else bytearray(buffer)

    def _body(self, data: bytes) -> Any:
        if self._large_body or self._segments is not None:
            raise DecodeError("The message has a body inside its body.")
        self._large_body = True
        return self.unpack(self._buffer(int.from_bytes(data, "little")))

    def _torch_name(self, data: bytes) -> Any:
        return _TORCH_NAMES[data.decode()]

    def _device(self, data: bytes) -> torch.device:
        return torch.device(data.decode())

    def _numpy_str(self, data: bytes) -> np.str_:
        text: np.str_ = np.str_(data.decode("utf-8", "surrogatepass"))
        return text

    def _numpy_bytes(self, data: bytes) -> np.bytes_:
        content: np.bytes_ = np.bytes_(data)
        return content

    # ------------------------------------------------------- lists with a mark

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        del items[0]
        return tuple(items)

    def _set(self, items: list[Any]) -> set[Any]:
        return set(items[1:])

    def _frozenset(self, items: list[Any]) -> frozenset[Any]:
        return frozenset(items[1:])

    def _range(self, items: list[Any]) -> range:
        _, start, stop, step = items
        return range(start, stop, step)

    def _slice(self, items: list[Any]) -> slice:
        _, start, stop, step = items
        return slice(start, stop, step)

    def _size(self, items: list[Any]) -> torch.Size:
        return torch.Size(items[1:])

    def _ordered_dict(self, items: list[Any]) -> collections.OrderedDict[Any, Any]:
        _, attributes, *rest = items
        pairs = iter(rest)
        value = collections.OrderedDict(zip(pairs, pairs, strict=True))
        if attributes is not None:
            value.__dict__.update(attributes)
        return value

    def _reference(self, items: list[Any]) -> Any:
        _, data = items
        return self.reference(data)

    def _number(self, items: list[Any]) -> Any:
        _, dtype, data = items
        return read_number(dtype, data)

    def _numpy_item(self, items: list[Any]) -> Any:
        _, array = items
        if not isinstance(array, np.ndarray) or array.ndim:
            raise DecodeError("A NumPy scalar in the message is malformed.")
        return array[()]

    def _numpy_dtype(self, items: list[Any]) -> Any:
        _, description = items
        return read_dtype(description)


_TABLE: Final = _Mark(Decoder._with_table)
_ATOMS: Final[dict[int, Callable[[Decoder, bytes], Any]]] = {
    wire.BIG_INT: Decoder._big_int,
    wire.BYTEARRAY: Decoder._bytearray,
    wire.COMPLEX: Decoder._complex,
    wire.CONSTANT: Decoder._constant,
    wire.PICKLE: Decoder._pickle,
    wire.LARGE_BYTES: Decoder._large_bytes,
    wire.LARGE_BYTEARRAY: Decoder._large_bytearray,
    wire.TABLE: Decoder._table,
    wire.LARGE_BODY: Decoder._body,
    wire.TORCH_NAME: Decoder._torch_name,
    wire.DEVICE: Decoder._device,
    wire.NUMPY_STR: Decoder._numpy_str,
    wire.NUMPY_BYTES: Decoder._numpy_bytes,
}
_MARKS: Final = {
    wire.TUPLE: _Mark(Decoder._tuple),
    wire.SET: _Mark(Decoder._set),
    wire.FROZENSET: _Mark(Decoder._frozenset),
    wire.RANGE: _Mark(Decoder._range),
    wire.SLICE: _Mark(Decoder._slice),
    wire.SIZE: _Mark(Decoder._size),
    wire.ORDERED_DICT: _Mark(Decoder._ordered_dict),
    wire.REFERENCE: _Mark(Decoder._reference),
    wire.NUMPY_SCALAR: _Mark(Decoder._number),
    wire.NUMPY_ITEM: _Mark(Decoder._numpy_item),
    wire.NUMPY_DTYPE: _Mark(Decoder._numpy_dtype),
}
_TORCH_NAMES: Final[dict[str, Any]] = {
    **DTYPES,
    **LAYOUTS,
    **{name: value for value, name in MEMORY_FORMAT_NAMES.items()},
}


def _check(body: Buffer) -> None:
    """Raise where a body is truncated or claims more than it has, without building anything."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(body))
    unpacker.feed(body)
    unpacker.skip()
    if unpacker.tell() != len(body):
        raise DecodeError("The message goes on after its end.")


def _plain(data: bytes) -> Any:
    """A msgpack document without extensions."""
    if len(data) > _CHECKED_FIRST:
        _check(data)
    return _unpackb(data, ext_hook=_no_extension, unicode_errors="surrogatepass")


def _no_extension(code: int, data: bytes) -> ExtType:
    raise DecodeError("The message has an extension inside its table.")


def decode(
    body: Buffer,
    buffers: Sequence[Buffer],
    *,
    hooks: Hooks | None = None,
    allow_pickle: bool = True,
) -> Any:
    """Give back the value that was encoded.

    Args:
        body: what ``encode`` gave as the body.
        buffers: what it gave as the buffers, in order.  Writable ones (``bytearray``, writable
            ``memoryview``) are the decoder's from here on: tensors and arrays are built over them
            without a copy.  Read-only ones (``bytes``) are copied where the value is writable.
        hooks: the agent's, for RRefs.  A RuntimeError that they raise is passed on.
        allow_pickle: whether pickles are opened.

    Returns:
        the value; its tensors and arrays are writable and share memory with nobody else's.

    Raises:
        DecodeError: the body or the buffers are malformed, or a pickled value cannot be
            opened here (a module is missing, its own code raised).
        PickleRefusedError: there is a pickle and ``allow_pickle`` is False.
    """
    decoder = Decoder(buffers, hooks, allow_pickle)
    try:
        return decoder.unpack(body)
    except (DecodeError, PickleRefusedError):
        raise
    except Exception as error:
        if error is decoder.agent_error:
            raise
        # msgpack, NumPy and torch each have errors of their own for malformed input.
        raise DecodeError(f"The message cannot be read: {type(error).__name__}: {error}") from error
    finally:
        decoder.close()
