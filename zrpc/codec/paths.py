"""Where in a message the thing is that cannot be sent.

The path is looked for only once something has failed, so that encoding need not keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import cloudpickle

from .wire import EncodeError, PickleRefusedError, Unsendable

#: Most objects that are looked at for a path.
_MOST_VISITED: Final = 100_000
#: Deepest attribute that is named inside an object that cannot be pickled.
_MOST_ATTRIBUTES: Final = 6


def explain(
    root: Any, failure: Unsendable, reference_type: type | tuple[type, ...]
) -> EncodeError | PickleRefusedError:
    """The error for a value of ``root`` that cannot be sent."""
    path, value = find_path(root, failure.value), failure.value
    if failure.refused:
        return PickleRefusedError(
            f"{_place(root, path)} of type {type_name(value)} would have to be pickled, which "
            "allow_pickle=False forbids. Send plain data, arrays, tensors or RRefs."
        )
    deeper, value = _culprit(value, reference_type)
    return EncodeError(
        f"{_place(root, path + deeper)} of type {type_name(value)} cannot be pickled: "
        f"{failure.reason}"
    )


def type_name(value: Any) -> str:
    """A type as people write it: without the module for builtins."""
    cls = type(value)
    name: str = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"


def find_path(root: Any, target: Any) -> str:
    """The subscripts that lead from ``root`` to ``target``; empty where they are the same."""
    visited = 0
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(root, "")]
    while waiting:
        value, path = waiting.pop()
        if value is target:
            return path
        visited += 1
        if visited > _MOST_VISITED or id(value) in seen:
            continue
        children = list(_children(value))
        if children:
            seen.add(id(value))
            waiting.extend((child, path + step) for child, step in reversed(children))
    return ""


def _children(value: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield item, f"[{index}]"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield item, f"[{_short(key)}]"
            yield key, f" key {_short(key)}"
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield item, f" item {_short(item)}"


def _short(key: Any) -> str:
    try:
        text = repr(key)
    except Exception as error:
        # The text of an error must not fail for a key's own repr.
        text = f"<{type_name(key)} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def _place(root: Any, path: str) -> str:
    """A path in words; that of a call's arguments is said with their names."""
    is_call = type(root) is tuple and len(root) == 3
    if is_call and type(root[1]) is tuple and type(root[2]) is dict:
        for index, name in enumerate(("function", "args", "kwargs")):
            if path.startswith(f"[{index}]"):
                rest = path[len(f"[{index}]") :]
                return f"argument {name}{rest}" if index else f"the function{rest}"
    return f"value{path}"


def _culprit(value: Any, reference_type: type | tuple[type, ...]) -> tuple[str, Any]:
    """Which attribute of an object, or of that one's, is what pickle fails for."""
    path = ""
    for _ in range(_MOST_ATTRIBUTES):
        for child, step in _attributes(value):
            if not isinstance(child, reference_type) and not _can_be_pickled(child):
                path += step
                value = child
                break
        else:
            return path, value
    return path, value


def _attributes(value: Any) -> Iterator[tuple[Any, str]]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, type):
        for name, child in attributes.items():
            yield child, f".{name}"
    yield from _children(value)


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        # Whatever its own code raises is the answer.
        return False
    return True
