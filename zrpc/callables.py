"""How a function is named on the wire.

A function travels as a name, ``module:qualname``, wherever the callee can get the same
function by that name; else by value, that is pickled with its code.  :func:`describe`
decides, :func:`resolve` is the other side.

A name is only used after it has been looked up here and led to the very same object: a
decorated, shadowed or deleted name says nothing about the function in hand.  Built-in
functions of torch say little about where they live (``torch.add`` is a method of
``_VariableFunctionsClass``), so the public modules of torch are indexed once.

Functions of the program file go by name too, marked ``main``: the caller compares
:func:`script_digest` with the callee's, since ``__main__`` means another file in another
program.  Where there is no file (a notebook, ``python -c``) they go by value.

Rejected: always pickling by reference (a function of ``__main__`` then runs whatever the
callee's program has of that name); always by value (slow, and globals become copies).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import UnknownFunctionError

__all__ = [
    "FunctionName",
    "FunctionValue",
    "describe",
    "display_name",
    "main_refused",
    "resolve",
    "script_digest",
]

#: What multiprocessing calls the program's module in a spawned child, and what it is.
_MP_MAIN = "__mp_main__"
_MAIN = "__main__"

#: Modules under whose names torch's built-in functions are public, best name first.
_TORCH_MODULES = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch.sparse",
    "torch.nested",
    "torch._C._nn",
)

#: Most functions without weak references whose names are remembered.
_STRONG_LIMIT = 4096

_BOUND = (types.MethodType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function that the callee finds by name.

    Attributes:
        text: ``module:qualname``; functions of the program file have ``__main__`` as module.
        main: whether it is one of the program file, so that both must run the same one.
    """

    text: str
    main: bool = False


@dataclass(frozen=True, slots=True)
class FunctionValue:
    """A function that has to travel with its code.

    Attributes:
        function: the callable itself.
    """

    function: Callable[..., Any]


# Naming ------------------------------------------------------------------------------------

# Names by id().  Not a WeakKeyDictionary: that compares keys with ==, which is a class's own
# business (NumPy's, a mock's).  The reference tells whether the id still means the same.
_weak_names: dict[int, tuple[weakref.ref[Any], FunctionName]] = {}
_strong_names: dict[int, tuple[Any, FunctionName]] = {}


def describe(function: Callable[..., Any]) -> FunctionName | FunctionValue:
    """Decide how a function travels.

    Args:
        function: any callable.

    Returns:
        A :class:`FunctionName` for what can be imported by name: functions, classes, static
        and class methods, built-ins (torch's too), ``torch.ops``, TorchScript functions.
        A :class:`FunctionValue` for the rest: lambdas, closures, local functions, bound
        methods, ``functools.partial``, callable objects, functions of a notebook.

    Raises:
        TypeError: it is not callable.

    Example:
        >>> import math
        >>> describe(math.sqrt)
        FunctionName(text='math:sqrt', main=False)
        >>> type(describe(lambda: 1)).__name__
        'FunctionValue'
    """
    key = id(function)
    weak = _weak_names.get(key)
    if weak is not None and weak[0]() is function:
        return weak[1]
    strong = _strong_names.get(key)
    if strong is not None and strong[0] is function:
        return strong[1]
    if not callable(function):
        raise TypeError(f"function should be callable. It is {_kind(function)}.")
    name = _name(function)
    if name is None:
        return FunctionValue(function)
    if isinstance(function, types.MethodType):
        return name  # made anew by each access: nothing to remember
    try:
        reference = weakref.ref(function, functools.partial(_forget, key))
        _weak_names[key] = (reference, name)
    except TypeError:  # method descriptors, ufuncs: mostly as long-lived as their module
        if len(_strong_names) < _STRONG_LIMIT:
            _strong_names[key] = (function, name)
    return name


def _forget(key: int, _reference: weakref.ref[Any]) -> None:
    """Drop the name of a function that is gone."""
    _weak_names.pop(key, None)


def _name(function: Any) -> FunctionName | None:
    """The name that leads to this function, if there is one."""
    for module, qualname in _candidates(function):
        if "<" in qualname:  # "<lambda>", "f.<locals>.g"
            continue
        is_main = module in (_MAIN, _MP_MAIN)
        if is_main and not _main_has_file():
            continue
        try:
            found = _walk(sys.modules[module], qualname)
        except Exception:  # a name that leads nowhere, or an attribute with a will of its own
            continue
        if found is function or (isinstance(function, _BOUND) and _same_bound(found, function)):
            return FunctionName(f"{_MAIN if is_main else module}:{qualname}", is_main)
    return None


def _candidates(function: Any) -> Iterator[tuple[str, str]]:
    """Where a callable may be found, best name first: pairs of module and qualname."""
    name = _text_attribute(function, "__name__")
    qualname = _text_attribute(function, "__qualname__")
    module = _text_attribute(function, "__module__")
    kind = type(function)
    if isinstance(function, types.FunctionType):
        yield module, qualname
        return
    if kind.__module__.split(".")[0] == "torch" or module.split(".")[0] == "torch":
        yield from _torch_candidates(function)
    owner = _attribute(function, "__self__")
    if isinstance(function, _BOUND) and isinstance(owner, type):
        yield owner.__module__, f"{owner.__qualname__}.{name}"
    home = _attribute(function, "__objclass__")
    if isinstance(home, type):
        if home.__module__ == "torch._C" and "Tensor" in home.__name__:
            yield "torch", f"Tensor.{name}"
        yield home.__module__, f"{home.__qualname__}.{name}"
    if module and qualname:
        yield module, qualname
    if isinstance(owner, types.ModuleType):
        yield owner.__name__, name
    if isinstance(function, _BOUND) and owner is not None and not isinstance(owner, type):
        # A method of a module's hidden instance: random.random, numpy.random.rand.
        yield module, name
        yield type(owner).__module__, name


def _torch_candidates(function: Any) -> Iterator[tuple[str, str]]:
    """Names of torch's built-in functions, operators and TorchScript functions."""
    kind = type(function).__name__
    if kind in ("OpOverload", "OpOverloadPacket"):
        yield "torch", f"ops.{function}"
    elif kind == "ScriptFunction":
        yield from _script_candidates(function)
    else:
        known = _torch_index().get(id(function))
        if known is not None:
            yield known


def _script_candidates(function: Any) -> Iterator[tuple[str, str]]:
    """Where a TorchScript function may be: its qualified name drops classes and __main__."""
    parts = [
        part
        for part in str(function.qualified_name).split(".")
        if part != "__torch__" and not part.startswith("___torch_mangle_")
    ]
    name = parts[-1]
    modules = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
    for module in [*modules, _MAIN]:
        space = getattr(sys.modules.get(module), "__dict__", None)
        if space is None:
            continue
        if space.get(name) is function:
            yield module, name
        for key, value in list(space.items()):
            if isinstance(value, type) and _static(vars(value).get(name)) is function:
                yield module, f"{key}.{name}"


def _static(value: Any) -> Any:
    """What a static method wraps."""
    return value.__func__ if isinstance(value, staticmethod) else value


@functools.lru_cache(maxsize=1)
def _torch_index() -> dict[int, tuple[str, str]]:
    """Built-in functions of torch's public modules by id, and their public names."""
    index: dict[int, tuple[str, str]] = {}
    for module in _TORCH_MODULES:
        for name, value in list(vars(sys.modules.get(module, types)).items()):
            if isinstance(value, types.BuiltinFunctionType) and not name.startswith("_"):
                index.setdefault(id(value), (module, name))
    return index


def _attribute(value: Any, name: str) -> Any:
    """An attribute; None where there is none."""
    try:
        return getattr(value, name, None)
    except Exception:  # an object with a __getattr__ of its own
        return None


def _text_attribute(value: Any, name: str) -> str:
    """An attribute that should be text; empty where it is none."""
    text = _attribute(value, name)
    return text if isinstance(text, str) else ""


def _same_bound(found: Any, function: Any) -> bool:
    """Whether two bound methods are the same method of the same object."""
    return (
        type(found) is type(function)
        and getattr(found, "__self__", None) is function.__self__
        and bool(found == function)
    )


def _walk(start: Any, qualname: str) -> Any:
    """Follow a dotted name; AttributeError where it ends."""
    for part in qualname.split("."):
        start = getattr(start, part)
    return start


def _kind(value: Any) -> str:
    """What a value is, for an error text."""
    return f"{value!r:.60} of type {type(value).__qualname__}"


def display_name(function: Any) -> str:
    """A function's name for error texts and logs.  Never raises.

    Args:
        function: a callable, or the name of a registered function.

    Example:
        >>> import math, functools
        >>> display_name(math.sqrt), display_name("server_func")
        ('math:sqrt', 'server_func')
        >>> display_name(functools.partial(math.pow, 2))
        'partial of math:pow'
    """
    if isinstance(function, str):
        return function
    try:
        known = describe(function) if callable(function) else None
        if isinstance(known, FunctionName):
            return known.text
        if isinstance(function, functools.partial):
            return f"partial of {display_name(function.func)}"
        if isinstance(function, types.MethodType):
            owner = function.__self__
            kind = owner if isinstance(owner, type) else type(owner)
            return f"{_module_of(kind)}:{kind.__qualname__}.{function.__name__}"
        name = _text_attribute(function, "__qualname__") or _text_attribute(function, "__name__")
        if not name:
            kind = type(function)
            return f"{_module_of(kind)}:{kind.__qualname__} object"
        module = _module_of(function)
        if name.endswith("<lambda>") and isinstance(function, types.FunctionType):
            name += f" (line {function.__code__.co_firstlineno})"
        return f"{module}:{name}" if module else name
    except Exception:  # an object whose attributes raise
        return f"{type(function).__qualname__} object"


def _module_of(value: Any) -> str:
    """The module that a class or function says it is from."""
    module = _text_attribute(value, "__module__")
    return _MAIN if module == _MP_MAIN else module


# Finding -----------------------------------------------------------------------------------

# The last object of the way and the last name, not what it led to: so a function that was
# replaced in its module is seen.
_found: dict[str, tuple[Any, str]] = {}


def resolve(
    text: str, *, worker: str | None = None, import_modules: bool = True
) -> Callable[..., Any]:
    """Find the function of a name.

    Args:
        text: ``module:qualname``, as :func:`describe` gives it.
        worker: name of this worker, for the error.
        import_modules: whether a module that is not imported yet may be.

    Returns:
        The function, as it is now: a replaced one is seen.

    Raises:
        UnknownFunctionError: no such module or function, importing the module failed, or
            what is there is not callable.  Its text says which and names near ones.

    Example:
        >>> resolve("math:sqrt")(9)
        3.0
    """
    known = _found.get(text)
    if known is not None:
        function = getattr(known[0], known[1], None)
        if callable(function):
            return function  # type: ignore[no-any-return]
        del _found[text]
    module_name, _, qualname = text.partition(":")
    module_name = _MAIN if module_name == _MP_MAIN else module_name
    *path, last = qualname.split(".")
    if not module_name or not all([*path, last]):
        raise _unknown(text, worker, "that is no name of the form module:function", [])
    parent: Any = _module(text, module_name, worker, import_modules)
    for part in path:
        parent = _step(text, parent, part, worker)
        if type(parent) is types.ModuleType:
            reason = f"{part!r} is another module there; name the function by its own module"
            raise _unknown(text, worker, reason, [])
    function = _step(text, parent, last, worker)
    if not callable(function):
        raise _unknown(text, worker, f"what has this name is not callable: {_kind(function)}", [])
    _found[text] = (parent, last)
    return function  # type: ignore[no-any-return]


def _module(text: str, name: str, worker: str | None, import_modules: bool) -> types.ModuleType:
    """The module, imported if need be."""
    module = sys.modules.get(name)
    if module is not None:
        return module
    if not import_modules:
        raise _unknown(
            text,
            worker,
            f"module {name!r} is not imported there, and may not be for a call "
            f"(start the worker with --import {name})",
            [],
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = f"importing module {name!r} failed with {type(error).__name__}: {error}"
        raise _unknown(text, worker, reason, []) from error


def _step(text: str, parent: Any, part: str, worker: str | None) -> Any:
    """One attribute on the way to a function."""
    try:
        return getattr(parent, part)
    except Exception as error:
        where = getattr(parent, "__name__", type(parent).__name__)
        near = difflib.get_close_matches(part, [str(name) for name in dir(parent)], n=3)
        cause = None if isinstance(error, AttributeError) else error
        raise _unknown(text, worker, f"{where!r} has no {part!r} there", near) from cause


def _unknown(text: str, worker: str | None, reason: str, near: list[str]) -> UnknownFunctionError:
    """The error for a name that leads to no function."""
    where = "this worker" if worker is None else f"worker {worker!r}"
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    return UnknownFunctionError(
        f"Function {text} not found on {where}: {reason}.{hint} The RPC pickler does not "
        "serialize function code: ensure that the function is defined in a module that both "
        "caller and callee import.",
        worker=worker,
        function=text,
        ran="no",
    )


# The program file --------------------------------------------------------------------------

_digests: dict[str, str] = {}


def script_digest() -> str:
    """Which program this process runs: the first 32 hex digits of its file's SHA-256.

    Returns:
        The same for every process that runs the same file: ``python file.py``, ``python -m
        package``, children of ``multiprocessing`` under any start method.  Empty where there
        is no file: an interactive session, a notebook, ``python -c``.
    """
    path = _main_file()
    if path is None:
        return ""
    # Remembered by path: a spawned child gets its program only after it has started.
    digest = _digests.get(path)
    if digest is None:
        try:
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()[:32]
        except OSError:
            digest = _digest_in_archive(path)
        _digests[path] = digest
    return digest


def _digest_in_archive(path: str) -> str:
    """The digest of a program inside a zip file; empty if it cannot be read either."""
    loader = getattr(sys.modules.get(_MAIN), "__loader__", None)
    try:
        data: bytes = loader.get_data(path)  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return ""
    return hashlib.sha256(data).hexdigest()[:32]


def _main_file() -> str | None:
    """The file of the program; None in an interactive session, a notebook, ``python -c``."""
    main = sys.modules.get(_MAIN)
    path = getattr(main, "__file__", None)
    if not isinstance(path, str):
        return None
    # `python -i`, IPython's %run: what is typed next belongs to no file.
    if hasattr(sys, "ps1") or hasattr(main, "get_ipython"):
        return None
    return path


def _main_has_file() -> bool:
    """Whether functions of the program can be named."""
    return script_digest() != ""


def main_refused(function: Any, worker: str) -> str:
    """The text of the error for a function of this program, called on a worker of another.

    Args:
        function: the function, or its display name.
        worker: name of the callee.
    """
    name = display_name(function)
    return (
        f"{name} is defined in the program file of this process, and worker {worker!r} runs "
        "another one (or another version of it), where the name may mean something else. "
        f"Move {name.partition(':')[2] or name} to a module that both import "
        "(`zrpc worker --import MODULE` imports it there), run the same file on both, or call "
        f"register_function on {worker!r} and call it by that name."
    )
