"""From a value to a body and buffers."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np
import torch
from msgpack import ExtType
from torch.nn import Parameter

from . import wire
from .arrays import NUMBERS, array_form, describe_dtype, number_form, travels_as_bytes
from .paths import explain
from .pickling import FUTURE_REASON, Pickler
from .storages import plan
from .tensors import (
    DTYPE_NAMES,
    LAYOUT_NAMES,
    MEMORY_FORMAT_NAMES,
    TensorForms,
    extra_attributes,
    is_jagged,
)
from .wire import MARKS, Buffer, Encoded, Hooks, Unsendable, number

#: What msgpack says by itself, without loss.  (Integers beyond 64 bits reach ``_default``.)
_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_PLAIN_KEYS: Final = frozenset({type(None), bool, int, float, str, bytes})

_EMPTY_TUPLE: Final = ExtType(wire.CONSTANT, b"t")
_TUPLE: Final = MARKS[wire.TUPLE]

#: From this length (elements) on, a list or set of nothing but pickled values is one pickle.
_PICKLED_TOGETHER: Final = 2
#: Bytes of a packed body above which its packer is not kept: it would keep that much memory.
_PACKER_KEPT: Final = 1 << 20


class _TooDeep(Exception):
    """Beyond what msgpack takes: nested too deep (or for ever), or a string of 4 GiB."""


class _Key:
    """A form in the place of a key, where a list could not stand."""

    __slots__ = ("form",)

    def __init__(self, form: Any) -> None:
        self.form = form


def _default(value: Any) -> Any:
    if type(value) is _Key:
        return value.form
    if type(value) is int:
        size = value.bit_length() // 8 + 1
        return ExtType(wire.BIG_INT, value.to_bytes(size, "little", signed=True))
    raise TypeError(f"unexpected {type(value)}")


_packers: list[msgpack.Packer] = []


def _pack(value: Any) -> bytes:
    """One msgpack document."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_default, strict_types=True)
    try:
        body: bytes = packer.pack(value)
    except UnicodeEncodeError:
        # Lone surrogates.  Asking for them always costs every string a slower path.
        packer = msgpack.Packer(default=_default, strict_types=True, unicode_errors="surrogatepass")
        body = packer.pack(value)
        return body
    except ValueError as error:
        # The other limits of msgpack: nesting, and 4 GiB for a string.
        raise _TooDeep from error
    if len(body) < _PACKER_KEPT:
        _packers.append(packer)
    return body


class Encoder:
    """What is gathered while one message is encoded."""

    __slots__ = (
        "_allow_pickle",
        "_depth",
        "_hooks",
        "_pickler",
        "_pickles",
        "buffers",
        "forms",
        "main_by_value",
        "reference_type",
    )

    def __init__(
        self,
        hooks: Hooks | None,
        reference_type: type | tuple[type, ...],
        allow_pickle: bool,
        main_by_value: bool,
    ) -> None:
        self._hooks = hooks
        self.reference_type = reference_type
        self._allow_pickle = allow_pickle
        self.main_by_value = main_by_value
        self.buffers: list[Buffer] = []
        self.forms = TensorForms()
        self._pickler: Pickler | None = None
        self._pickles: list[list[Any]] = []
        self._depth = 0

    def encode(self, value: Any) -> Encoded:
        """Encode the message's value."""
        return self._finish(self._prepare(value))

    def encode_pickled(self, value: Any) -> Encoded:
        """Encode it as one pickle."""
        return self._finish(self._pickle(value))

    def _finish(self, prepared: Any) -> Encoded:
        forms = self.forms
        if forms.forms or self._pickles:
            segments = plan(forms.storages, self.buffers) if forms.storages else []
            table = _pack([segments, forms.forms, self._pickles])
            prepared = [ExtType(wire.TABLE, table), prepared]
        # It refers to us: the sender's memory must not wait for the garbage collector.
        self._pickler = None
        body = _pack(prepared)
        if len(body) > wire.LARGEST_BODY:
            self.buffers.append(body)
            body = _pack(ExtType(wire.LARGE_BODY, number(len(self.buffers) - 1)))
        return Encoded(body, self.buffers)

    # ------------------------------------------------------- what the pickler asks for

    def reference(self, rref: Any) -> Any:
        """What stands for an RRef."""
        if self._hooks is None:
            raise Unsendable(rref, "there is no agent to refer to its value")
        return self._hooks.encode_reference(rref)

    def array(self, array: np.ndarray[Any, Any]) -> int:
        """The number of an array whose dtype travels as bytes."""
        known = self.forms.find(array)
        if known is not None:
            return known
        return self.forms.add(array, array_form(array, self.buffers))

    # ------------------------------------------------------- values to what msgpack packs

    def _prepare(self, value: Any) -> Any:
        handler = _HANDLERS.get(type(value))
        if handler is not None:
            return handler(self, value)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, self.reference_type):
            return [MARKS[wire.REFERENCE], self._prepare(self.reference(value))]
        if isinstance(value, torch.Tensor) and is_jagged(value):
            return self._jagged(value)
        return self._pickle(value)

    def _pickle(self, value: Any) -> ExtType:
        if not self._allow_pickle:
            raise Unsendable(value, "", refused=True)
        if self._pickler is None:
            self._pickler = Pickler(self)
        try:
            data, buffers = self._pickler.pickle(value)
        except Unsendable as error:
            if isinstance(error.value, torch._C.Future):
                raise Unsendable(value, FUTURE_REASON) from error
            raise Unsendable(value, error.reason) from error
        except Exception as error:
            # pickle asks the value's own code, which may raise whatever it likes.
            raise Unsendable(value, f"{error}" or type(error).__name__) from error
        content: bytes | int = data
        if len(data) >= wire.BYTES_OUT_OF_BAND:
            self.buffers.append(data)
            content = len(self.buffers) - 1
        self._pickles.append([content, buffers])
        return ExtType(wire.PICKLE, number(len(self._pickles) - 1))

    def _are_pickled(self, types: set[type]) -> bool:
        """Whether nothing of these types travels but in a pickle."""
        return (
            self._allow_pickle
            and types.isdisjoint(_HANDLERS)
            and not any(issubclass(kind, (torch.Tensor, self.reference_type)) for kind in types)
        )

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > wire.DEEPEST:
            raise _TooDeep

    def _same(self, value: Any) -> Any:
        return value

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        if not value:
            return _EMPTY_TUPLE
        self._enter()
        items: list[Any] = [_TUPLE]
        for item in value:
            items.append(item if type(item) in _PLAIN else self._prepare(item))
        self._depth -= 1
        return items

    def _list(self, value: list[Any]) -> Any:
        types = set(map(type, value))
        if types <= _PLAIN:
            return value
        if self._are_pickled(types) and len(value) >= _PICKLED_TOGETHER:
            return self._pickle(value)
        self._enter()
        items = [item if type(item) in _PLAIN else self._prepare(item) for item in value]
        self._depth -= 1
        return items

    def _dict(self, value: dict[Any, Any]) -> Any:
        if not value:
            return value
        if set(map(type, value)) <= _PLAIN_KEYS and set(map(type, value.values())) <= _PLAIN:
            return value
        self._enter()
        items = {}
        for key, item in value.items():
            name = key if type(key) in _PLAIN_KEYS else _Key(self._prepare(key))
            items[name] = item if type(item) in _PLAIN else self._prepare(item)
        self._depth -= 1
        return items

    def _ordered_dict(self, value: collections.OrderedDict[Any, Any]) -> Any:
        self._enter()
        attributes = value.__dict__
        items: list[Any] = [
            MARKS[wire.ORDERED_DICT],
            self._prepare(dict(attributes)) if attributes else None,
        ]
        for key, item in value.items():
            items += (self._prepare(key), self._prepare(item))
        self._depth -= 1
        return items

    def _bytes(self, value: bytes) -> Any:
        if len(value) < wire.BYTES_OUT_OF_BAND:
            return value
        self.buffers.append(value)
        return ExtType(wire.LARGE_BYTES, number(len(self.buffers) - 1))

    def _bytearray(self, value: bytearray) -> Any:
        # Copied: a view would forbid its owner to change its length until it has been sent.
        data = bytes(value)
        if len(data) < wire.BYTES_OUT_OF_BAND:
            return ExtType(wire.BYTEARRAY, data)
        self.buffers.append(data)
        return ExtType(wire.LARGE_BYTEARRAY, number(len(self.buffers) - 1))

    def _complex(self, value: complex) -> ExtType:
        return ExtType(wire.COMPLEX, struct.pack("<dd", value.real, value.imag))

    def _items(self, mark: int, value: Any) -> Any:
        types = set(map(type, value))
        if self._are_pickled(types) and len(value) >= _PICKLED_TOGETHER:
            return self._pickle(value)
        self._enter()
        items = [MARKS[mark], *map(self._prepare, value)]
        self._depth -= 1
        return items

    def _set(self, value: set[Any]) -> Any:
        return self._items(wire.SET, value)

    def _frozenset(self, value: frozenset[Any]) -> Any:
        return self._items(wire.FROZENSET, value)

    def _range(self, value: range) -> Any:
        return [MARKS[wire.RANGE], value.start, value.stop, value.step]

    def _slice(self, value: slice) -> Any:
        parts = (value.start, value.stop, value.step)
        self._enter()
        items = [MARKS[wire.SLICE], *map(self._prepare, parts)]
        self._depth -= 1
        return items

    def _size(self, value: torch.Size) -> Any:
        return [MARKS[wire.SIZE], *value]

    def _constant(self, value: Any) -> ExtType:
        return _CONSTANTS[value]

    def _torch_name(self, value: Any) -> ExtType:
        return ExtType(wire.TORCH_NAME, _TORCH_NAMES[value].encode())

    def _device(self, value: torch.device) -> ExtType:
        return ExtType(wire.DEVICE, str(value).encode())

    def _tensor(self, value: torch.Tensor) -> Any:
        if extra_attributes(value) is not None:
            return self._pickle(value)
        index = self.forms.add_tensor(value)
        if index is None:
            return self._pickle(value)
        return ExtType(wire.OBJECT, number(index))

    def _jagged(self, value: torch.Tensor) -> ExtType:
        return ExtType(wire.OBJECT, number(self.forms.add_jagged(value)))

    def _array(self, value: np.ndarray[Any, Any]) -> ExtType:
        if not travels_as_bytes(value.dtype):
            return self._pickle(value)
        return ExtType(wire.OBJECT, number(self.array(value)))

    def _number(self, value: Any) -> Any:
        return [MARKS[wire.NUMPY_SCALAR], *number_form(value)]

    def _numpy_item(self, value: Any) -> Any:
        array = np.array(value)
        if not travels_as_bytes(array.dtype):
            return self._pickle(value)
        return [MARKS[wire.NUMPY_ITEM], ExtType(wire.OBJECT, number(self.array(array)))]

    def _numpy_str(self, value: np.str_) -> ExtType:
        return ExtType(wire.NUMPY_STR, str.__str__(value).encode("utf-8", "surrogatepass"))

    def _numpy_bytes(self, value: np.bytes_) -> ExtType:
        return ExtType(wire.NUMPY_BYTES, bytes(value))

    def _numpy_dtype(self, value: np.dtype[Any]) -> Any:
        if not travels_as_bytes(value):
            return self._pickle(value)
        return [MARKS[wire.NUMPY_DTYPE], describe_dtype(value)]


_TORCH_NAMES: Final[dict[Any, str]] = {**DTYPE_NAMES, **LAYOUT_NAMES, **MEMORY_FORMAT_NAMES}
_CONSTANTS: Final = {
    Ellipsis: ExtType(wire.CONSTANT, b"e"),
    NotImplemented: ExtType(wire.CONSTANT, b"n"),
}
_HANDLERS: Final[dict[type, Callable[[Encoder, Any], Any]]] = {
    **{kind: Encoder._same for kind in _PLAIN},
    tuple: Encoder._tuple,
    list: Encoder._list,
    dict: Encoder._dict,
    collections.OrderedDict: Encoder._ordered_dict,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytearray,
    complex: Encoder._complex,
    set: Encoder._set,
    frozenset: Encoder._frozenset,
    range: Encoder._range,
    slice: Encoder._slice,
    type(Ellipsis): Encoder._constant,
    type(NotImplemented): Encoder._constant,
    torch.Tensor: Encoder._tensor,
    Parameter: Encoder._tensor,
    torch.Size: Encoder._size,
    torch.dtype: Encoder._torch_name,
    torch.layout: Encoder._torch_name,
    torch.memory_format: Encoder._torch_name,
    torch.device: Encoder._device,
    np.ndarray: Encoder._array,
    np.datetime64: Encoder._numpy_item,
    np.timedelta64: Encoder._numpy_item,
    np.void: Encoder._numpy_item,
    np.str_: Encoder._numpy_str,
    np.bytes_: Encoder._numpy_bytes,
    **{kind: Encoder._number for kind in NUMBERS},
    **{
        kind: Encoder._numpy_dtype
        for kind in {np.dtype, *map(type, map(np.dtype, "?bhilqBHILQefdgFDGSUVMm"))}
    },
}


def encode(
    value: Any,
    *,
    hooks: Hooks | None = None,
    reference_type: type | tuple[type, ...] = (),
    allow_pickle: bool = True,
    main_by_value: bool = False,
) -> Encoded:
    """Turn a value into what travels.

    The receiver gets an equal value of the same types.  One tensor or array that stands in it
    twice arrives as one object, tensors that share memory share it again, and what is shared
    among pickled values stays shared; a list, dict, set or tuple that stands in it twice
    arrives as two, unless all of the value is pickled.  A value that contains itself, or that is
    nested deeper than some 400 containers, is pickled whole.  Tensors arrive as leaves, without
    history and gradient.

    Args:
        value: what to send.
        hooks: the agent's, for RRefs; without them a value with an RRef is refused.
        reference_type: the class or classes whose instances are RRefs.
        allow_pickle: whether what msgpack cannot say may be pickled.
        main_by_value: whether functions and classes of ``__main__`` travel with their code
            (the receiver runs another script, or there is no script: a notebook).

    Returns:
        the body and the buffers.  The buffers are views of the memory of the tensors and arrays
        in ``value``: they are sent as they are at the time of sending.

    Raises:
        EncodeError: something in it cannot be sent; the text names where it is, its type, why.
        PickleRefusedError: something in it needs a pickle and ``allow_pickle`` is False.
    """
    encoder = Encoder(hooks, reference_type, allow_pickle, main_by_value)
    try:
        try:
            return encoder.encode(value)
        except (_TooDeep, RecursionError):
            if not allow_pickle:
                raise wire.PickleRefusedError(
                    "The value contains itself or is nested too deep for msgpack, so that it "
                    "would have to be pickled, which allow_pickle=False forbids."
                ) from None
        encoder = Encoder(hooks, reference_type, allow_pickle, main_by_value)
        return encoder.encode_pickled(value)
    except Unsendable as error:
        raise explain(value, error, reference_type) from error.__cause__
