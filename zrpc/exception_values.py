"""The values inside an exception (arguments, attributes) on their way to another worker.

What the codec sends by itself goes as it is.  Anything else is pickled here, in bytes of
its own: where a module is missing at the caller, that one value becomes its ``repr``
instead of taking the whole exception with it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from typing import Any

import cloudpickle

from .exception_text import safe_repr

__all__ = ["ValueWriter", "read_value"]

#: How deeply plain containers are looked into before they are treated as one object.
_VALUE_DEPTH = 8

_PLAIN_TYPES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, type(Ellipsis)}
)
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})


class ValueWriter:
    """Writes values as :func:`read_value` reads them.

    Args:
        allow_pickle: whether values may be pickled; without it they become their repr.
        pass_types: types of values that the codec sends by itself.
    """

    def __init__(self, allow_pickle: bool, pass_types: tuple[type, ...]) -> None:
        self.allow_pickle = allow_pickle
        self.pass_types = pass_types

    def write(self, value: Any) -> list[Any]:
        """``[0, value]``, or ``[2, pickle, repr]``."""
        if self.is_plain(value, _VALUE_DEPTH, {}):
            return [0, value]
        if not self.allow_pickle:
            return [0, self.replaced(value, _VALUE_DEPTH, {})]
        data = _pickled(value)
        if data is None:
            value = self.replaced(value, _VALUE_DEPTH, {})
            if self.is_plain(value, _VALUE_DEPTH, {}):
                return [0, value]
            data = _pickled(value)
        return [0, safe_repr(value)] if data is None else [2, data, safe_repr(value)]

    def is_plain(self, value: Any, depth: int, seen: dict[int, bool]) -> bool:
        """Whether the codec sends this without a pickle, with all that is in it."""
        kind = type(value)
        if kind in _PLAIN_TYPES or self.passes(value):
            return True
        if depth == 0 or kind not in _CONTAINERS:
            return False
        if id(value) not in seen:
            seen[id(value)] = False  # what is met inside itself is not plain
            items = list(value)
            if kind is dict:
                items += value.values()
            seen[id(value)] = all(self.is_plain(item, depth - 1, seen) for item in items)
        return seen[id(value)]

    def replaced(self, value: Any, depth: int, seen: dict[int, Any]) -> Any:
        """A copy of a container in which whatever cannot be sent is its repr."""
        kind = type(value)
        if kind in _PLAIN_TYPES or self.passes(value):
            return value
        if id(value) not in seen:
            seen[id(value)] = "..."  # what stands for it inside itself
            if kind is dict and depth > 0:
                seen[id(value)] = {
                    key if self.is_plain(key, depth, {}) else safe_repr(key): (
                        self.replaced(item, depth - 1, seen)
                    )
                    for key, item in value.items()
                }
            elif kind in (list, tuple) and depth > 0:
                seen[id(value)] = kind([self.replaced(item, depth - 1, seen) for item in value])
            elif self.allow_pickle and kind not in _CONTAINERS and _pickled(value) is not None:
                seen[id(value)] = value
            else:
                seen[id(value)] = safe_repr(value)
        return seen[id(value)]

    def passes(self, value: Any) -> bool:
        """Whether the codec sends this without a pickle, as it is."""
        if isinstance(value, self.pass_types):
            return True
        torch = sys.modules.get("torch")
        if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            return True
        numpy = sys.modules.get("numpy")
        return (
            numpy is not None
            and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
            and not value.dtype.hasobject
        )


def read_value(item: Any, allow_pickle: bool) -> Any:
    """The value of ``[0, value]`` or ``[2, pickle, repr]``; the repr if it cannot be opened."""
    if item[0] != 2:
        return item[1]
    if allow_pickle:
        with contextlib.suppress(Exception):  # a module that is missing here
            return _Unpickler(io.BytesIO(item[1])).load()
    return item[2] if len(item) > 2 and isinstance(item[2], str) else None


def _pickled(value: Any) -> bytes | None:
    """A value's pickle; None if it cannot be made, or cannot be opened again.

    In bytes, and not left to the codec: a pickle that fails at the caller, where a module
    may be missing, must not take the whole exception with it.
    """
    for dumps in (pickle.dumps, cloudpickle.dumps):  # by name where that will do
        try:
            data = bytes(dumps(value))
            pickle.loads(data)
        except Exception:
            continue
        return data
    return None


class _Unpickler(pickle.Unpickler):
    """Finds what a spawned child calls ``__mp_main__`` in ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == "__mp_main__" else module, name)
