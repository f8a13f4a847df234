"""A handle to a copy that is on its way: what ``rref.local_value()`` gives to a non-owner.

What is done with the handle is recorded and carried out, in the order in which it was
written, once somebody waits for a value::

    v = rref.local_value()          # the fetch starts, nothing is waited for
    v.tensor = v.tensor + 1         # recorded
    row = v.tensor.view(1, 4)       # recorded; ``row`` is a handle as well
    row.wait()                      # waits for the copy, then runs all three steps

How it is carried out, and why so: :mod:`zrpc.recording`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from zrpc.recording import (
    Fetch,
    Handle,
    Step,
    become,
    call,
    is_ready,
    record,
    step_of,
    steps_in,
    wait_for,
    with_values,
)

__all__ = ["LocalCopy"]


def _record(label: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> LocalCopy:
    """A handle to the result of a new step."""
    handle = object.__new__(LocalCopy)
    become(handle, record(label, function, *arguments, **more))
    return handle


def _binary(function: Callable[[Any, Any], Any], sign: str) -> Callable[[LocalCopy, Any], Any]:
    def method(self: LocalCopy, other: Any) -> Any:
        return _record(f"`{sign}`", function, (self, other))

    return method


def _reflected(function: Callable[[Any, Any], Any], sign: str) -> Callable[[LocalCopy, Any], Any]:
    def method(self: LocalCopy, other: Any) -> Any:
        return _record(f"`{sign}`", function, (other, self))

    return method


def _in_place(function: Callable[[Any, Any], Any], sign: str) -> Callable[[LocalCopy, Any], Any]:
    def method(self: LocalCopy, other: Any) -> Any:
        return _record(f"`{sign}`", function, (self, other), part_of=(self,), changes=True)

    return method


def _unary(function: Callable[..., Any], sign: str) -> Callable[..., Any]:
    def method(self: LocalCopy, *arguments: Any) -> Any:
        return _record(f"`{sign}`", function, (self, *arguments))

    return method


def _waits(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LocalCopy, *arguments: Any) -> Any:
        return function(LocalCopy.wait(self), *arguments)

    return method


class LocalCopy(Handle):
    """A handle to a copy of a value that another worker owns, while it is being fetched.

    Its own names are :meth:`wait` and :meth:`done`, and no others; ask for attributes of
    these names on the value (``handle.wait().done``).  Everything else is recorded and
    applied to the copy, in the order written, when a value is waited for:

    * attributes, items, calls, operators and comparisons give a further handle, as do torch
      functions (``torch.relu(h)``, ``torch.cat([h, other])``);
    * assignments (``h.x = 1``, ``h[0] = 1``, ``del h.x``, ``h += 1``) and methods that
      change their object (``h.add_(1)``, ``h.items.append(3)``) change the copy, never the
      owner's value.

    These wait for the value, since Python wants a real answer: ``bool``, ``len``, ``int``,
    ``float``, ``complex``, ``bytes``, ``in``, iteration and unpacking, use as an index, a format
    with a specification (``f"{h:.2f}"``), NumPy (``numpy.asarray(h)``).  So does an
    in-place operation on a tensor of your own (``mine.add_(h)``), which is done at once.
    ``repr`` and ``str`` never wait.  As with tensors, ``==`` is applied to the values (and
    gives a handle) while the hash is that of the handle.

    Arguments are kept by reference until the step runs; other handles among them, also inside
    lists, tuples, dicts and slices, are replaced by their values.  A step runs under
    the gradient mode (``torch.no_grad``) in which it was written.  Each runs once, in a
    thread that waits; steps of a copy that is never waited for never run.

    Any thread may use a handle.  It cannot be pickled: send the value.

    Args:
        fetch: the future of the copy: ``wait()`` and ``wait(seconds)`` give it or raise,
            ``done()`` tells whether it is there.

    Example:
        >>> from concurrent.futures import Future
        >>> class Fetch(Future):
        ...     wait = Future.result
        >>> fetch = Fetch()
        >>> v = LocalCopy(fetch)
        >>> row = v.view(1, 4)
        >>> _ = v.add_(1)
        >>> v.done()
        False
        >>> fetch.set_result(torch.zeros(4))
        >>> row.wait(timeout=10)
        tensor([[1., 1., 1., 1.]])
    """

    __slots__ = ()

    #: Lets ``array + handle`` be recorded, where NumPy would take the handle as a scalar.
    __array_priority__ = 10_000

    def __init__(self, fetch: Any) -> None:
        become(self, Fetch(fetch))

    def wait(self, timeout: float | None = None) -> Any:
        """The value, after all that was recorded on its copy so far.

        Every call returns the same object, and what is recorded afterwards is applied to
        it by the next wait of any handle of this copy.

        Args:
            timeout: how long to wait at most, in seconds; 0 takes what is there; None waits
                as long as the fetch does.  It bounds waiting, not the steps that this
                thread runs itself.

        Raises:
            RpcTimeoutError: the copy was not there in time (a later wait may succeed), or
                the fetch itself timed out.
            ValueError: ``timeout`` is negative.
            Exception: the error of the fetch or of a step that this value depends on, with
                a note that names the step and its line; the same one at every wait.
        """
        return wait_for(step_of(self), timeout)

    def done(self) -> bool:
        """Whether :meth:`wait` would return or raise without waiting for another worker."""
        return is_ready(step_of(self))

    # What is recorded ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Python and libraries probe for special names; a "yes" to all would mislead them.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(
                f"{name!r} is not looked up on a copy that may not be here yet. "
                f"Call .wait() first: handle.wait().{name}"
            )
        return _record(f".{name}", getattr, (self, name), part_of=(self,))

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_own_name(name, f"handle.wait().{name} = ...")
        _record(f".{name} = ...", setattr, (self, name, value), part_of=(self,), changes=True)

    def __delattr__(self, name: str) -> None:
        _refuse_own_name(name, f"del handle.wait().{name}")
        _record(f"del .{name}", delattr, (self, name), part_of=(self,), changes=True)

    def __getitem__(self, key: Any) -> Any:
        return _record("[...]", operator.getitem, (self, key), part_of=(self,))

    def __setitem__(self, key: Any, value: Any) -> None:
        arguments = (self, key, value)
        _record("[...] = ...", operator.setitem, arguments, part_of=(self,), changes=True)

    def __delitem__(self, key: Any) -> None:
        _record("del [...]", operator.delitem, (self, key), part_of=(self,), changes=True)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        label = f"{step_of(self).label}(...)"
        arguments = (self, *arguments)
        return _record(label, call, arguments, keywords, part_of=(self,), changes=True)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """A torch function was called with a handle: recorded, unless it changes a real one."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "function")
        special = name.startswith("__")
        in_place = name in ("__setitem__", "__delitem__", "__set__") or (
            name.startswith("__i") and name != "__invert__"
        )
        changes = in_place or "out" in kwargs or (name.endswith("_") and not special)
        changed = kwargs.get("out", args[0] if args else None)
        if changes and not steps_in(changed, []):
            # The caller's own tensor: it has to be changed when this returns.
            return function(*_waited(args), **_waited(kwargs))
        handles = (changed,) if changes and type(changed) is cls else ()
        label = f"torch function {name}"
        return _record(label, function, args, kwargs, part_of=handles, changes=changes)

    __hash__ = object.__hash__  # by identity, as defining ``==`` would take it away

    __eq__ = _binary(operator.eq, "==")
    __ne__ = _binary(operator.ne, "!=")
    __lt__ = _binary(operator.lt, "<")
    __le__ = _binary(operator.le, "<=")
    __gt__ = _binary(operator.gt, ">")
    __ge__ = _binary(operator.ge, ">=")

    __add__ = _binary(operator.add, "+")
    __sub__ = _binary(operator.sub, "-")
    __mul__ = _binary(operator.mul, "*")
    __matmul__ = _binary(operator.matmul, "@")
    __truediv__ = _binary(operator.truediv, "/")
    __floordiv__ = _binary(operator.floordiv, "//")
    __mod__ = _binary(operator.mod, "%")
    __divmod__ = _binary(divmod, "divmod")
    __pow__ = _binary(operator.pow, "**")
    __lshift__ = _binary(operator.lshift, "<<")
    __rshift__ = _binary(operator.rshift, ">>")
    __and__ = _binary(operator.and_, "&")
    __xor__ = _binary(operator.xor, "^")
    __or__ = _binary(operator.or_, "|")

    __radd__ = _reflected(operator.add, "+")
    __rsub__ = _reflected(operator.sub, "-")
    __rmul__ = _reflected(operator.mul, "*")
    __rmatmul__ = _reflected(operator.matmul, "@")
    __rtruediv__ = _reflected(operator.truediv, "/")
    __rfloordiv__ = _reflected(operator.floordiv, "//")
    __rmod__ = _reflected(operator.mod, "%")
    __rdivmod__ = _reflected(divmod, "divmod")
    __rpow__ = _reflected(operator.pow, "**")
    __rlshift__ = _reflected(operator.lshift, "<<")
    __rrshift__ = _reflected(operator.rshift, ">>")
    __rand__ = _reflected(operator.and_, "&")
    __rxor__ = _reflected(operator.xor, "^")
    __ror__ = _reflected(operator.or_, "|")

    __iadd__ = _in_place(operator.iadd, "+=")
    __isub__ = _in_place(operator.isub, "-=")
    __imul__ = _in_place(operator.imul, "*=")
    __imatmul__ = _in_place(operator.imatmul, "@=")
    __itruediv__ = _in_place(operator.itruediv, "/=")
    __ifloordiv__ = _in_place(operator.ifloordiv, "//=")
    __imod__ = _in_place(operator.imod, "%=")
    __ipow__ = _in_place(operator.ipow, "**=")
    __ilshift__ = _in_place(operator.ilshift, "<<=")
    __irshift__ = _in_place(operator.irshift, ">>=")
    __iand__ = _in_place(operator.iand, "&=")
    __ixor__ = _in_place(operator.ixor, "^=")
    __ior__ = _in_place(operator.ior, "|=")

    __neg__ = _unary(operator.neg, "-")
    __pos__ = _unary(operator.pos, "+")
    __abs__ = _unary(operator.abs, "abs")
    __invert__ = _unary(operator.invert, "~")
    __round__ = _unary(round, "round")
    __trunc__ = _unary(math.trunc, "trunc")
    __floor__ = _unary(math.floor, "floor")
    __ceil__ = _unary(math.ceil, "ceil")

    # What waits ----------------------------------------------------------------------------

    __bool__ = _waits(bool)
    __int__ = _waits(int)
    __float__ = _waits(float)
    __complex__ = _waits(complex)
    __bytes__ = _waits(bytes)
    __index__ = _waits(operator.index)
    __len__ = _waits(len)
    __reversed__ = _waits(reversed)

    def __contains__(self, item: Any) -> bool:
        return _waited(item) in LocalCopy.wait(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(LocalCopy.wait(self))

    def __format__(self, specification: str) -> str:
        return format(LocalCopy.wait(self), specification) if specification else repr(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy  # here, so that a handle of something else costs no import

        # ``copy`` came with NumPy 2, where asarray has it as well.
        options: dict[str, Any] = {} if copy is None else {"copy": copy}
        return numpy.asarray(LocalCopy.wait(self), dtype=dtype, **options)

    # torch.as_tensor and torch.tensor ask for these two; they would take the handle for a list.
    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        return _tensor_like(self).__dlpack__(*arguments, **keywords)

    def __dlpack_device__(self) -> Any:
        return _tensor_like(self).__dlpack_device__()

    # What does neither ---------------------------------------------------------------------

    def __repr__(self) -> str:
        step = step_of(self)
        if step.error is not None:
            state = f"failed with {type(step.error).__name__}"
        elif step.finished:
            state = f"of type {type(step.value).__qualname__}"
        else:
            state = "not fetched yet" if isinstance(step, Fetch) else f"{step.label} not run yet"
        return f"<LocalCopy, {state}; .wait() gives the value>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A LocalCopy cannot be pickled, copied or sent: it stands for a value that may not "
            "be here yet. Call .wait() first and use what that returns."
        )


def _tensor_like(handle: LocalCopy) -> Any:
    """The value, as something that has ``__dlpack__``."""
    value = LocalCopy.wait(handle)
    return value.detach() if isinstance(value, torch.Tensor) else handle.__array__()


def _waited(value: Any) -> Any:
    """``value`` with its handles replaced by their values, which are waited for."""
    steps: list[Step] = []
    steps_in(value, steps)
    for step in steps:
        wait_for(step)
    return with_values(value)


def _refuse_own_name(name: str, instead: str) -> None:
    """Raise if assigning to ``name`` would mean one of the handle's own names."""
    if name in ("wait", "done", "_zrpc_step") or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(
            f"{name!r} of a LocalCopy cannot be assigned or deleted: handles use this name "
            f"themselves. Wait for the value first: {instead}"
        )
