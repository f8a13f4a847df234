"""Pickles inside a message: cloudpickle, with tensors, arrays and RRefs taken out of it.

One pickler serves all pickled values of a message, so what they share stays shared.  Tensors and
arrays go to the message's table (``reducer_override``; a ``persistent_id`` would be asked for every
integer in the pickle), RRefs to the agent.  A pickle names them by two functions of this module;
the unpickler puts the decoder's methods in their place.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import numpy as np
import torch
from torch.nn import Parameter
from torch.storage import TypedStorage

from .arrays import travels_as_bytes
from .tensors import extra_attributes, is_jagged
from .wire import CPU, OUT_OF_BAND, Buffer, Unsendable

if TYPE_CHECKING:
    from .decoder import Decoder
    from .encoder import Encoder

#: ``__main__`` under its own name and under the one that multiprocessing's spawn gives it.
_MAIN_NAMES: Final = frozenset({"__main__", "__mp_main__"})

FUTURE_REASON: Final = (
    "Can not pickle torch.futures.Future: it means nothing on another worker. "
    "Wait for it and send its value."
)

_reducers: dict[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {}


def register_reducer(
    cls: type, reduce: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
) -> None:
    """Say how instances of exactly ``cls`` are pickled in messages.

    Args:
        cls: the class; subclasses are not affected.
        reduce: given an instance, returns ``(callable, arguments)``: the receiver calls the
            callable with the arguments to get the value.  Both must be sendable.

    Example::

        register_reducer(Connection, lambda connection: (connect, (connection.address,)))
    """
    _reducers[cls] = reduce


def received_object(index: int) -> Any:
    """Stands in a pickle for an object of the table; the unpickler replaces it."""
    raise pickle.UnpicklingError(f"object {index} of a zrpc message cannot be read outside of it")


def received_reference(data: Any) -> Any:
    """Stands in a pickle for an RRef; the unpickler replaces it."""
    raise pickle.UnpicklingError("an RRef of a zrpc message cannot be read outside of it")


def set_attributes(target: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give a tensor the attributes that were set on the one that was sent."""
    attributes, slots = state
    target.__dict__.update(attributes)
    for name, value in slots.items():
        setattr(target, name, value)


def build_subclass(cls: type, plain: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor of a subclass over the memory of a plain one."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor: torch.Tensor = plain.detach().as_subclass(cls)
        return tensor.requires_grad_() if requires_grad else tensor


def build_storage(content: torch.Tensor) -> torch.UntypedStorage:
    """The storage whose bytes a tensor spans."""
    storage = content.untyped_storage()
    if storage.nbytes() != content.numel():
        return content.clone().untyped_storage()
    return storage


def build_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """The typed face of a storage."""
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def load_script_module(data: bytes) -> Any:
    """A TorchScript module from what ``torch.jit.save`` wrote."""
    return torch.jit.load(io.BytesIO(data))


def find_in_module(module: str, name: str) -> Any:
    """A global of a module."""
    return getattr(importlib.import_module(module), name)


class _Sink:
    """A file that keeps what is written, to be joined once."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.write = self.chunks.append


class _OutOfBand:
    """Takes the buffers of pickled values.  (A method of the pickler's would make a cycle.)"""

    def __init__(self, buffers: list[Buffer]) -> None:
        self._buffers = buffers
        self.numbers: list[int] = []

    def __call__(self, buffer: Any) -> bool:
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND:
            return True
        self._buffers.append(view)
        self.numbers.append(len(self._buffers) - 1)
        return False


class Pickler(cloudpickle.Pickler):
    """Pickles the values of one message that need it."""

    def __init__(self, encoder: Encoder) -> None:
        self._sink = _Sink()
        self._encoder = encoder
        self._out_of_band = _OutOfBand(encoder.buffers)
        super().__init__(self._sink, protocol=5, buffer_callback=self._out_of_band)
        if encoder.main_by_value and "__mp_main__" in sys.modules:
            # cloudpickle knows by itself only of __main__ that others cannot import it.
            cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])

    def pickle(self, value: Any) -> tuple[bytes, list[int]]:
        """Pickle one value; returns the pickle and the numbers of the buffers that it uses."""
        self._sink.chunks.clear()
        self._out_of_band.numbers = []
        self.dump(value)
        return b"".join(self._sink.chunks), self._out_of_band.numbers

    def reducer_override(self, obj: Any) -> Any:
        """Called for everything that pickle has no opcode for."""
        encoder = self._encoder
        cls = type(obj)
        if isinstance(obj, encoder.reference_type):
            return received_reference, (encoder.reference(obj),)
        reduce = _reducers.get(cls)
        if reduce is not None:
            return reduce(obj)
        if isinstance(obj, _SPECIAL):
            return self._special(obj, cls)
        if not encoder.main_by_value and _is_in_main(obj):
            # To pickle's own save_global: by reference.
            return NotImplemented
        return super().reducer_override(obj)

    def _special(self, obj: Any, cls: type) -> Any:
        encoder = self._encoder
        if cls is np.ndarray:
            if travels_as_bytes(obj.dtype):
                return received_object, (encoder.array(obj),)
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj, cls)
        if isinstance(obj, torch.UntypedStorage):
            if not obj.nbytes():
                return NotImplemented
            content = torch.empty(0, dtype=torch.uint8, device=CPU).set_(obj)
            return build_storage, (content,)
        if isinstance(obj, TypedStorage):
            return build_typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.jit.ScriptModule):
            stream = io.BytesIO()
            torch.jit.save(obj, stream)
            return load_script_module, (stream.getvalue(),)
        if isinstance(obj, torch.jit.ScriptFunction):
            return find_in_module, _script_function_place(obj)
        if isinstance(obj, torch._C.Future):
            raise Unsendable(obj, FUTURE_REASON)
        return super().reducer_override(obj)

    def _tensor(self, tensor: torch.Tensor, cls: type) -> Any:
        encoder = self._encoder
        if cls is torch.Tensor or cls is Parameter:
            index = encoder.forms.add_tensor(tensor)
            if index is None:
                return NotImplemented
            attributes = extra_attributes(tensor)
            if attributes is None:
                return received_object, (index,)
            state: Any = (attributes, {})
            return received_object, (index,), state, None, None, set_attributes
        kind: Any = cls
        if is_jagged(tensor):
            return received_object, (encoder.forms.add_jagged(tensor),)
        if (
            kind.__reduce_ex__ not in _TORCHS_OWN
            or kind.__reduce__ is not torch.Tensor.__reduce__
            or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        ):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor)
            requires_grad = tensor.requires_grad
        slots = {
            name: getattr(tensor, name)
            for name in copyreg._slotnames(cls)  # type: ignore[attr-defined]
            if hasattr(tensor, name)
        }
        state = (tensor.__dict__, slots)
        return build_subclass, (cls, plain, requires_grad), state, None, None, set_attributes


#: Parameter's loses the type of its subclasses; Tensor's copies the memory.
_TORCHS_OWN: Final[tuple[Any, ...]] = (torch.Tensor.__reduce_ex__, Parameter.__reduce_ex__)

_SPECIAL: Final = (
    np.ndarray,
    torch.Tensor,
    torch.UntypedStorage,
    TypedStorage,
    torch.jit.ScriptModule,
    torch.jit.ScriptFunction,
    torch._C.Future,
)


def _script_function_place(function: Any) -> tuple[str, str]:
    """Module and name under which a ScriptFunction is found; its own ``__module__`` is torch's."""
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    module = module or "__main__"
    if getattr(sys.modules.get(module), name, None) is function:
        return module, name
    raise pickle.PicklingError(
        f"Can't pickle the ScriptFunction {function.qualified_name}: it is no global of a module, "
        "and its code does not travel"
    )


def _is_in_main(obj: Any) -> bool:
    """Whether this is a function or class that can be found by name in ``__main__``."""
    if not isinstance(obj, (type, _FUNCTION)) or obj.__module__ not in _MAIN_NAMES:
        return False
    found: Any = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
        if found is None:
            return False
    return found is obj


_FUNCTION: Final = type(_is_in_main)


class _Source:
    """A file that reads one pickle after another."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()

    def read(self, count: int = -1) -> bytes:
        return self.stream.read(count)

    def readinto(self, target: Any) -> int:
        return self.stream.readinto(target)

    def readline(self) -> bytes:
        return self.stream.readline()


class _Buffers:
    """The buffers of the pickle that is being read."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()


class Unpickler(pickle.Unpickler):
    """Opens the pickles of one message, in the order in which they were made."""

    def __init__(self, decoder: Decoder) -> None:
        self._source = _Source()
        self._waiting = _Buffers()
        self._replaced = {
            "received_object": decoder.object,
            "received_reference": decoder.reference,
        }
        super().__init__(self._source, buffers=self._waiting)

    def unpickle(self, data: Any, buffers: list[Any]) -> Any:
        """Open the next pickle."""
        self._source.stream = io.BytesIO(data)
        self._waiting.waiting = deque(buffers)
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        """Called for each global that a pickle names."""
        if module == __name__ and name in self._replaced:
            return self._replaced[name]
        if module == "__mp_main__":
            module = "__main__"
        return super().find_class(module, name)
