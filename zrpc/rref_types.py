"""The classes that the codec must treat as RRefs (a list, so that nothing imports in a circle)."""

from __future__ import annotations

_types: list[type] = []
_tuple: tuple[type, ...] = ()


def add_reference_type(cls: type) -> type:
    """Class decorator: instances travel as RRefs."""
    global _tuple
    _types.append(cls)
    _tuple = tuple(_types)
    return cls


def reference_types() -> tuple[type, ...]:
    """All of them."""
    return _tuple
