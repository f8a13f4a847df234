"""What this process offers by name: functions, objects and models.

One namespace for the three kinds, since ``rpc_sync("server", "server_func")`` and
``remote("server", "remote_obj")`` name them in the same way.  A registry knows nothing of
calls; the agent asks it (:meth:`Registry.find`) and may be told of a name that comes later
(:meth:`Registry.when_registered`), so that a call which arrives before the registration can
wait for it.

Registering the same object again under its name is fine (a script that is imported twice);
another object under a name that is taken is an error, since callers cannot tell which of
the two they reach.

The registry is the process's, not an agent's: scripts register before ``init_rpc``, and
workers that are forked from one parent have what its imports registered.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partialmethod, singledispatchmethod
from types import FrameType
from typing import Any, Literal

import torch

__all__ = ["Entry", "Kind", "Registry", "Waiter", "default_registry", "public_methods"]

Kind = Literal["function", "object", "model"]

#: Longest name, in characters.
MAX_NAME_LENGTH = 127

#: Most names that an error lists.
_NAMES_SHOWN = 20

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What is registered under a name.

    Attributes:
        name: the name.
        kind: how it was registered: "function", "object" or "model".
        value: the function, object or module itself.
    """

    name: str
    kind: Kind
    value: Any

    def describe(self) -> str:
        """A short description for errors; user code (``repr``) is not run.

        Example:
            >>> import math
            >>> Entry("root", "function", math.sqrt).describe()
            'the function math:sqrt'
        """
        value = self.value
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if self.kind == "function" and isinstance(name, str):
            module = getattr(value, "__module__", None)
            return f"the function {module}:{name}" if module else f"the function {name}"
        return f"the {self.kind} of type {type(value).__qualname__} at {id(value):#x}"


class Waiter:
    """A callback that waits for a name: what :meth:`Registry.when_registered` returns."""

    __slots__ = ("_callback", "_name", "_registry")

    def __init__(
        self, registry: Registry, name: str | None, callback: Callable[[Entry], object]
    ) -> None:
        self._registry = registry
        self._name = name
        self._callback = callback

    def cancel(self) -> bool:
        """Stop waiting.

        Returns:
            True if the callback has not run and never will; False if it has, is running,
            or was cancelled before.
        """
        return self._registry._forget(self._name, self)

    def _run(self, entry: Entry) -> None:
        try:
            self._callback(entry)
        except Exception:
            # Whoever registers is not to blame, and the others have to be told as well.
            _logger.exception("What waited for %r to be registered here failed.", entry.name)


class Registry:
    """Names, and the functions, objects and models behind them.  Any thread may use it.

    Most programs use :data:`default_registry`, that of the process.

    Example:
        >>> registry = Registry()
        >>> registry.register_function("square", lambda x: x * x).kind
        'function'
        >>> registry.find("square").value(3)
        9
        >>> print(registry.unknown_name_text("sqare"))
        Nothing is registered here as 'sqare'. Did you mean 'square'? Registered: 'square'.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        # Under None: those who wait for any model.
        self._waiters: dict[str | None, list[Waiter]] = {}
        _registries.add(self)

    # Registering ---------------------------------------------------------------------------

    def register_function(self, name: str, function: Callable[..., Any]) -> Entry:
        """Let callers call ``function`` by ``name``.

        Args:
            name: 1 to 127 characters, without ":", which import names ("torch:add") have.
            function: anything callable.

        Returns:
            What is registered now.

        Raises:
            TypeError: ``name`` is not a string, or ``function`` is not callable.
            ValueError: the name is empty, too long or has a ":", or it is taken by another.
        """
        if not callable(function):
            raise TypeError(
                f"register_function({name!r}, ...) needs something callable, not an object of "
                f"type {type(function).__qualname__}; register_rref registers objects."
            )
        return self._register(name, "function", function)

    def register_rref(self, obj: Any, name: str | None = None) -> Entry:
        """Let callers get an RRef to this very object by its name.

        Args:
            obj: the object; callers reach its :func:`public_methods`.
            name: as for :meth:`register_function`.  None: the name by which the caller's
                module holds it; if it does not, the caller's local variable.

        Returns:
            What is registered now; its ``name`` tells the name that was found.

        Raises:
            TypeError: ``name`` is not a string.
            ValueError: as for :meth:`register_function`; or no name was given and the object
                has none there, or several.

        Example:
            >>> registry = Registry()
            >>> counter = [0]
            >>> registry.register_rref(counter, "counter").name
            'counter'
        """
        if name is None:
            name = _name_in_caller(obj)
        return self._register(name, "object", obj)

    def register_model(self, name: str, module: torch.nn.Module) -> Entry:
        """Let callers run a module and reach its parameters by a name.

        Args:
            name: as for :meth:`register_function`.
            module: the module.

        Returns:
            What is registered now.

        Raises:
            TypeError: ``name`` is not a string, or ``module`` is not a ``torch.nn.Module``.
            ValueError: as for :meth:`register_function`.
        """
        if not isinstance(module, torch.nn.Module):
            what = (
                f"the class {module.__qualname__}; make an instance of it"
                if isinstance(module, type)
                else f"an object of type {type(module).__qualname__}"
            )
            raise TypeError(f"register_model({name!r}, ...) needs a torch.nn.Module, not {what}.")
        return self._register(name, "model", module)

    def unregister(self, name: str) -> Entry:
        """Take back a name; RRefs that exist to its object stay good.

        Returns:
            What was registered.

        Raises:
            LookupError: nothing is registered by this name; the text lists what is.
        """
        with self._lock:
            entry = self._entries.pop(name, None)
        if entry is None:
            raise LookupError(self.unknown_name_text(name))
        return entry

    # Looking up ----------------------------------------------------------------------------

    def find(self, name: str) -> Entry | None:
        """What is registered by this name, or None."""
        with self._lock:
            return self._entries.get(name)

    def names(self) -> list[str]:
        """All names, sorted."""
        with self._lock:
            return sorted(self._entries)

    def models(self) -> list[str]:
        """The names of the models, sorted."""
        with self._lock:
            return self._model_names()

    def model(self, name: str | None = None) -> Entry:
        """The model of this name; with None, the only one.

        Raises:
            LookupError: there is none of this name, it is no model, or no name was given
                where there are none or several.  The text lists the models.
        """
        with self._lock:
            models = self._model_names()
            entry = self._entries.get(
                models[0] if name is None and len(models) == 1 else name or ""
            )
        if entry is not None and entry.kind == "model":
            return entry
        listed = f"Models here: {_listed(models)}." if models else "No model is registered here."
        if name is None:
            if models:
                raise LookupError(f"{len(models)} models are registered; give a name. {listed}")
            raise LookupError(f"{listed} register_model(name, module) registers one.")
        if entry is not None:
            raise LookupError(f"{_shown(name)} is not a model but {entry.describe()}. {listed}")
        hint = _did_you_mean(name, models)
        raise LookupError(f"No model is registered here as {_shown(name)}.{hint} {listed}")

    def when_registered(self, name: str | None, callback: Callable[[Entry], object]) -> Waiter:
        """Have ``callback(entry)`` called once ``name`` is registered.

        It is called exactly once, unless cancelled: in the thread that registers the name,
        or at once in this one if it is there already.  The registry is not locked
        meanwhile.  An exception of the callback is logged.

        Args:
            name: the name; None for any model.
            callback: should be short, as it holds up the thread that registers.

        Returns:
            A handle, whose ``cancel()`` stops the waiting.
        """
        waiter = Waiter(self, name, callback)
        with self._lock:
            if name is None:
                models = self._model_names()
                entry = self._entries[models[0]] if models else None
            else:
                entry = self._entries.get(name)
            if entry is None:
                self._waiters.setdefault(name, []).append(waiter)
        if entry is not None:
            waiter._run(entry)
        return waiter

    def unknown_name_text(self, name: str) -> str:
        """The sentence for a caller who asked for a name that is not there.

        It lists the names there are, those like ``name`` first.
        """
        names = self.names()
        start = f"Nothing is registered here as {_shown(name)}."
        if not names:
            return f"{start} No name is registered here at all."
        near = _near(name, names)
        ordered = near + [other for other in names if other not in near]
        return f"{start}{_did_you_mean(name, names)} Registered: {_listed(ordered)}."

    # Inside --------------------------------------------------------------------------------

    def _register(self, name: str, kind: Kind, value: Any) -> Entry:
        _check_name(name)
        entry = Entry(name, kind, value)
        with self._lock:
            there = self._entries.get(name)
            if there is not None:
                if there.kind == kind and _same(there.value, value):
                    return there
                raise ValueError(
                    f"The name {name!r} is taken by {there.describe()}, so {entry.describe()} "
                    f"cannot have it. Choose another name, or call unregister({name!r}) first."
                )
            self._entries[name] = entry
            waiters = self._waiters.pop(name, [])
            if kind == "model":
                waiters += self._waiters.pop(None, [])
        for waiter in waiters:
            waiter._run(entry)
        return entry

    def _model_names(self) -> list[str]:
        return sorted(name for name, entry in self._entries.items() if entry.kind == "model")

    def _forget(self, name: str | None, waiter: Waiter) -> bool:
        with self._lock:
            waiting = self._waiters.get(name, [])
            if waiter not in waiting:
                return False
            waiting.remove(waiter)
            if not waiting:
                del self._waiters[name]
            return True

    def _after_fork(self) -> None:
        """In a forked child: the parent's threads do not hold the lock here, nor wait."""
        self._lock = threading.Lock()
        self._waiters = {}


def public_methods(obj: Any) -> list[str]:
    """The names of the methods that callers may call on a registered object, sorted.

    These are the callables of its class and of the instance without a leading underscore.
    Nothing of the object is run for this: no property, ``__getattr__`` or ``__dir__``.
    Classes that it holds are no methods.

    Example:
        >>> class Counter:
        ...     limit = 3
        ...     def add(self, n): ...
        ...     def _reset(self): ...
        ...     @property
        ...     def count(self): ...
        >>> public_methods(Counter())
        ['add']
    """
    found: dict[str, Any] = {}
    classes = obj.__mro__ if isinstance(obj, type) else type(obj).__mro__
    for cls in reversed(classes):
        found.update(vars(cls))
    if not isinstance(obj, type):
        own: Any = {}
        if not isinstance(found.get("__dict__"), property):
            with suppress(AttributeError):  # it has slots only
                own = object.__getattribute__(obj, "__dict__")
        for name, value in dict(own).items():
            if not inspect.isdatadescriptor(found.get(name)):  # those go before the instance
                found[name] = value
        for name, value in list(found.items()):
            if isinstance(value, types.MemberDescriptorType):  # a slot
                found[name] = _slot_value(value, obj)
    return sorted(
        name
        for name, value in found.items()
        if isinstance(name, str) and not name.startswith("_") and _is_method(value)
    )


def _slot_value(slot: types.MemberDescriptorType, obj: Any) -> Any:
    try:
        return slot.__get__(obj, type(obj))
    except (AttributeError, TypeError):  # empty
        return None


def _is_method(value: Any) -> bool:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, type):
        return False
    # These two are not callable themselves, only what they give.
    return callable(value) or isinstance(value, (partialmethod, singledispatchmethod))


def _same(one: Any, other: Any) -> bool:
    """Whether the two are one object; a bound method is a new object at each look-up."""
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return one is other


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"A name to register must be a string, not {type(name).__qualname__}.")
    if not name:
        raise ValueError("A name to register must not be empty.")
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"A name to register has at most {MAX_NAME_LENGTH} characters; "
            f"{_shown(name)} has {len(name)}."
        )
    if ":" in name:
        raise ValueError(
            f"The name {name!r} must not contain ':', which marks import names such as "
            f"'torch:add'. For example, {name.replace(':', '.')!r} would do."
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"The name {name!r} cannot be encoded as UTF-8.") from None


def _name_in_caller(obj: Any) -> str:
    """The name by which the code that called zrpc holds ``obj``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    remedy = 'Give one: register_rref(obj, "name").'
    if frame is None:
        raise ValueError(f"There is no calling module to look for the object's name in. {remedy}")
    what = f"the object of type {type(obj).__qualname__}"
    module = frame.f_globals.get("__name__")
    for where, variables in (
        (f"The module {module!r}", frame.f_globals),
        (f"The function {frame.f_code.co_name!r}", frame.f_locals),
    ):
        names = [name for name, value in list(variables.items()) if value is obj]
        # "_" and "_3" are what interactive shells call their last results.
        names = [name for name in names if not name.startswith("_")] or names
        names = [name for name in names if name not in ("self", "cls")]
        if len(names) == 1:
            return names[0]
        if names:
            raise ValueError(
                f"{where} holds {what} by {len(names)} names: {_listed(names)}. {remedy}"
            )
    raise ValueError(
        f"No variable of the module {module!r} holds {what}, so it has no name. {remedy}"
    )


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "zrpc"


def _shown(name: str) -> str:
    """A name as errors show it: what a stranger sent may be of any length."""
    return repr(name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 3] + "...")


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _near(name: str, names: list[str]) -> list[str]:
    """Those like ``name``, nearest first; upper and lower case count as the same."""
    lowered: dict[str, list[str]] = {}
    for other in names:
        lowered.setdefault(other.lower(), []).append(other)
    wanted = name[:MAX_NAME_LENGTH].lower()
    matches = difflib.get_close_matches(wanted, list(lowered), n=_NAMES_SHOWN, cutoff=0.6)
    return [other for match in matches for other in lowered[match]]


def _did_you_mean(name: str, names: list[str]) -> str:
    near = _near(name, names)
    return f" Did you mean {near[0]!r}?" if near else ""


_registries: weakref.WeakSet[Registry] = weakref.WeakSet()


def _after_fork() -> None:
    for registry in list(_registries):
        registry._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

#: The registry of this process.
default_registry = Registry()
