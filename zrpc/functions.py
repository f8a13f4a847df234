"""Decorators for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Say that ``fn`` returns a future, whose value is the call's result.

    The caller's reply goes out when the future is done; no thread is held until then.

    Args:
        fn: a function, or a method (put ``staticmethod`` or ``classmethod`` outside).

    Returns:
        ``fn``, wrapped; called locally, it still returns the future.

    At the callee, anything but a future as result is a ``RuntimeError`` for the caller.

    Example:
        >>> import torch, zrpc as rpc
        >>> @rpc.functions.async_execution
        ... def add_there(to, x, y):
        ...     return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + 1)
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # torch's name for the mark: its own code looks for it.
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
