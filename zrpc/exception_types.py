"""The types of exceptions that came from another worker: found, combined, and filled in.

:func:`remote_type` makes the class that is both an exception's own type and a
``RuntimeError``; :func:`find_type` looks a type up by its name on the wire, and
:func:`bare` makes an instance without calling anything of the type's own.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any, cast

import cloudpickle

from .errors import RpcError, native_base
from .exception_text import GROUP, TEXT_KEY, safe_text

__all__ = [
    "ORIGIN_KEY",
    "RemoteExceptionMixin",
    "bare",
    "check_fields",
    "class_by_value",
    "fields_of",
    "find_type",
    "is_made_in_c",
    "open_class",
    "original_type",
    "remote_type",
    "type_name",
]

#: Where an exception keeps its :class:`~zrpc.errors.RemoteOrigin`.
ORIGIN_KEY = "_zrpc_origin"

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made at run time, not in C
#: Largest class that travels by value, in bytes.
_CLASS_LIMIT = 1024 * 1024


class _OriginField:
    """An attribute that says where the exception comes from, unless it has one of that name.

    No property: a property would hide the attribute of the same name that the exception
    itself brought along in its ``__dict__``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, error: Any, owner: type | None = None) -> Any:
        if error is None:
            return self
        return getattr(error.__dict__[ORIGIN_KEY], self.name)


class RemoteExceptionMixin:
    """What an exception that came from another worker is besides its own type.

    Attributes (each only where the exception's own type has none of that name;
    :func:`~zrpc.remote_exceptions.remote_origin` tells the same for every exception):
        remote: True.
        worker: name of the worker on which it was raised.
        function: the function that raised it.
        remote_traceback: the traceback there, as text.
        route: ``(worker, function)`` of the workers that it passed on its way here.
        ran: "yes", or "no" if it was raised before any of the function's code ran.
    """

    __slots__ = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        # Not handed on: the original's own hook may register or demand something.
        pass

    def __str__(self) -> str:
        fields = self.__dict__
        return cast(str, fields[ORIGIN_KEY].explain(fields[TEXT_KEY]))

    def __reduce__(self) -> tuple[Any, ...]:
        from .remote_exceptions import dump_for_copy, load_exception

        return (load_exception, (dump_for_copy(cast(BaseException, self)),))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


# By id of the original, which the class made from it keeps alive: keyed by the type itself,
# an entry would be found by a metaclass's __eq__ and __hash__.
_remote_types: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


def remote_type(cls: type[Exception]) -> type[Exception]:
    """The class of remote exceptions of this type: it, the mixin, and RuntimeError.

    Args:
        cls: an exception type.

    Returns:
        The class; the same one for as long as it is used.  It prints as the original.

    Raises:
        TypeError: the type does not let itself be derived from.
    """
    known = _remote_types.get(id(cls))
    if known is not None:
        return cast("type[Exception]", known)
    if issubclass(cls, RuntimeError):
        bases: tuple[type, ...] = (RemoteExceptionMixin, cls)
    elif issubclass(RuntimeError, cls):  # Exception: it must come after what derives from it
        bases = (RemoteExceptionMixin, RuntimeError)
    else:
        bases = (RemoteExceptionMixin, cls, RuntimeError)
    space: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_zrpc_original": cls,
    }
    for name in ("worker", "function", "route", "ran"):
        if not hasattr(cls, name):
            space[name] = _OriginField(name)
    if not hasattr(cls, "remote_traceback"):
        space["remote_traceback"] = _OriginField("traceback")
    if not hasattr(cls, "remote"):
        space["remote"] = True
    made = types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(space))
    # Of two threads that make one at the same time, the first wins.
    return cast("type[Exception]", _remote_types.setdefault(id(cls), made))


def original_type(cls: type) -> type:
    """The type that a remote exception's class stands for; any other class itself."""
    return cast(type, vars(cls).get("_zrpc_original", cls))


# Names -------------------------------------------------------------------------------------


def type_name(cls: type) -> str:
    """A type's name on the wire, ``module:qualname``."""
    module = cls.__module__ if isinstance(cls.__module__, str) else ""
    # The same module under multiprocessing's name for it.
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}:{cls.__qualname__}"


def find_type(name: str, *, import_modules: bool) -> tuple[type[BaseException] | None, str]:
    """The exception type of this name, or None and why there is none, as a half sentence."""
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None and import_modules and module_name:
        try:
            module = importlib.import_module(module_name)
        except Exception as trouble:
            return None, f"its module {module_name!r} cannot be imported ({safe_text(trouble)})"
    if module is None:
        return None, f"its module {module_name!r} is not imported here"
    found: Any = module
    for part in qualname.split("."):
        try:
            # Static: no property or __getattr__ of a module runs on somebody else's behalf.
            found = inspect.getattr_static(found, part)
        except AttributeError:
            return None, f"module {module_name!r} has no {qualname!r} here"
    if not isinstance(found, type) or not issubclass(found, BaseException):
        return None, f"{qualname!r} of module {module_name!r} is no exception type here"
    if type_name(found) != name:
        return None, f"module {module_name!r} has another type in the place of {qualname!r}"
    return found, ""


def class_by_value(cls: type) -> bytes | None:
    """A class that has no name to import it by, as cloudpickle writes it.

    Where it was made at the caller and came here with a closure, cloudpickle's own
    tracking turns it into the very class again there, so that ``except`` meets it.
    """
    try:
        data = bytes(cloudpickle.dumps(cls))
        pickle.loads(data)
    except Exception:
        return None
    return data if len(data) <= _CLASS_LIMIT else None


def open_class(data: bytes, reason: str) -> tuple[type[BaseException] | None, str]:
    """An exception type that travelled by value, or None and why there is none."""
    try:
        found = pickle.loads(data)
    except Exception as trouble:
        return None, f"{reason}, and it cannot be opened ({safe_text(trouble)})"
    if isinstance(found, type) and issubclass(found, BaseException):
        return found, ""
    return None, f"{reason}, and what came in its place is no exception type"


# Instances ---------------------------------------------------------------------------------


def fields_of(cls: type) -> dict[str, Any]:
    """Descriptors of the fields that instances keep outside of ``__dict__``: slots and C."""
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, field in vars(base).items():
            if not isinstance(field, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue
            if name == "args" or (name.startswith("__") and name.endswith("__")):
                continue
            if field.__objclass__ is GROUP:
                continue  # message and members, which only __new__ sets
            if field.__objclass__ is AttributeError and name == "obj":
                continue  # the object that lacks the attribute: a whole model, perhaps
            fields[name] = field
    return fields


def is_made_in_c(field: Any) -> bool:
    """Whether a field belongs to a built-in type (None then means that it is not set)."""
    return not field.__objclass__.__flags__ & _HEAP_TYPE


def bare(cls: type[Any], args: tuple[Any, ...], members: list[BaseException]) -> BaseException:
    """An instance with these args, made by the built-in base's ``__new__`` and no more.

    Args:
        cls: the type of the instance.
        args: what its ``args`` are to be.
        members: the members, if it is an exception group.

    Raises:
        TypeError: the type is made in C in a way that only it can make instances of.
    """
    native: Any = native_base(cls)
    if issubclass(native, GROUP or ()):
        message = args[0] if args and isinstance(args[0], str) else ""
        return cast(BaseException, native.__new__(cls, message, members))
    error: BaseException = native.__new__(cls)
    vars(BaseException)["args"].__set__(error, args)
    return error


def check_fields(cls: type, attributes: Mapping[str, Any]) -> None:
    """Check the values that the C code behind some types takes on trust (it can crash).

    Args:
        cls: an exception type.
        attributes: the fields that its instance is to get.

    Raises:
        ValueError: one of them does not fit.
    """
    positioned = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
    if issubclass(cls, positioned) and "object" in attributes:
        text, start, end = (attributes.get(name) for name in ("object", "start", "end"))
        fits = (
            type(text) is (bytes if issubclass(cls, UnicodeDecodeError) else str)
            and type(start) is int
            and type(end) is int
            and start >= 0
            and end >= 0
            and all(type(attributes.get(name, "")) is str for name in ("encoding", "reason"))
        )
        if not fits:
            raise ValueError("the position of a UnicodeError does not fit its text")
    elif issubclass(cls, SyntaxError):
        for name in ("lineno", "offset", "end_lineno", "end_offset"):
            if name in attributes and type(attributes[name]) is not int:
                raise ValueError(f"{name} of a SyntaxError is no number")
        if type(attributes.get("text", "")) is not str:
            raise ValueError("text of a SyntaxError is no text")
    elif issubclass(cls, RpcError):
        for name in ("worker", "function"):
            if not isinstance(attributes.get(name), (str, type(None))):
                raise ValueError(f"{name} of an RpcError is no text")
        for name in ("elapsed", "limit"):
            if not isinstance(attributes.get(name), (int, float, type(None))):
                raise ValueError(f"{name} of an RpcError is no number")
