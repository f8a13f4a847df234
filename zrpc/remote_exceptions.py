"""Exceptions that cross from one worker to another.

:func:`dump_exception` turns an exception into plain data and objects that are known to
travel; :func:`load_exception` makes of that an exception which is of its own type *and* a
``RuntimeError``, so that both ``except MyError`` and torch's ``except RuntimeError`` work.

The choices:

- **Rebuilt, not constructed.** ``__init__`` is never called at the caller: constructors
  have required arguments, other signatures and side effects, which is what breaks pickled
  exceptions.  The instance is made by the built-in base's ``__new__``; then come ``args``,
  the fields that live in C or in ``__slots__``, and ``__dict__``.
- **Both types** by a class made at run time, ``(RemoteExceptionMixin, Original,
  RuntimeError)``, which prints as the original.  Its ``str`` is the text that the exception
  had there, then where it comes from and the remote traceback.
- **One exception, many nodes.** Cause, context, members of a group and exceptions among
  the arguments are numbered children before parents, and a link to a number that is not
  smaller is ignored.  So shared nodes (``raise X from e`` names ``e`` twice) stay shared,
  cycles cannot be written, and what is nested deeply does not nest on the wire.
- **Nothing is trusted.** A value that is not plain is sent as a pickle of its own, which has
  been opened here; otherwise its ``repr`` goes, and so it does where the pickle cannot be
  opened at the caller (a module that only the callee has).  There, a type is looked up and
  never called; without pickling, no module is imported for it either.

An exception that passes several workers is wrapped once: it keeps the worker and the
traceback of where it was raised, and collects one line for each worker on the way.

Rejected: pickling the exception (loses ``__cause__``; fails at the caller for required
constructor arguments); sending text and type only, as torch does (loses what handlers
look at); a ``RemoteError`` with the original inside (no ``except MyError``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from .errors import Ran, RemoteError, RemoteOrigin, RpcError
from .exception_text import (
    GROUP,
    TEXT_KEY,
    notes_of,
    own_traceback_text,
    safe_repr,
    safe_text,
    traceback_text,
)
from .exception_types import (
    ORIGIN_KEY,
    RemoteExceptionMixin,
    bare,
    check_fields,
    class_by_value,
    fields_of,
    find_type,
    is_made_in_c,
    open_class,
    original_type,
    remote_type,
    type_name,
)
from .exception_values import ValueWriter, read_value

__all__ = [
    "RemoteExceptionMixin",
    "dump_exception",
    "dump_for_copy",
    "load_exception",
    "remote_origin",
]

#: Most exceptions of one dump, and how deeply they may hang from one another.
_NODE_LIMIT = 1000
_DEPTH_LIMIT = 64
_RESERVED = frozenset({ORIGIN_KEY, TEXT_KEY, "_zrpc_peer", "__notes__"})
_STOP_TYPES = (StopIteration, StopAsyncIteration)


def remote_origin(error: BaseException) -> RemoteOrigin | None:
    """Where an exception that came from another worker was raised; None for a local one.

    Example:
        >>> data = dump_exception(KeyError("x"), worker="w1", function="train:step")
        >>> remote_origin(load_exception(data)).worker
        'w1'
        >>> remote_origin(KeyError("x")) is None
        True
    """
    if isinstance(error, (RemoteExceptionMixin, RpcError)):
        return error.__dict__.get(ORIGIN_KEY)
    return None


# Out ---------------------------------------------------------------------------------------


def dump_exception(
    error: BaseException,
    *,
    worker: str,
    function: str,
    skip_frames_of: Collection[str] = (),
    allow_pickle: bool = True,
    ran: Ran = "yes",
    pass_types: tuple[type, ...] = (),
) -> dict[str, Any]:
    """Describe an exception for its way to the caller.  Never raises.

    Args:
        error: the exception; one that already came from another worker keeps its origin
            and gets a line of route.
        worker: name of this worker.
        function: display name of the function that raised it.
        skip_frames_of: names of modules and packages whose frames are left out of the
            tracebacks (the machinery between the agent and the function).
        allow_pickle: whether anything but plain data, tensors and arrays may be sent.
        ran: "no" if none of the function's code ran (the call was refused).
        pass_types: types of values that the codec sends by itself (RRefs).

    Returns:
        A dict for :func:`load_exception`: "type" ("module:qualname"), "text", "args",
        "attributes", "notes", "traceback" (with the whole chain), "worker", "function",
        "route", "ran", links "cause", "context" and "members", and "others": what they
        link to.  It holds plain data, arrays, tensors and ``pass_types`` only: other values
        are pickled already.

    Example:
        >>> data = dump_exception(ValueError("no"), worker="w1", function="train:step")
        >>> (data["type"], data["text"])
        ('builtins:ValueError', 'no')
    """
    dumper = _Dumper(
        worker=worker,
        function=function,
        skip_frames_of=tuple(skip_frames_of),
        allow_pickle=allow_pickle,
        ran=ran,
        pass_types=pass_types,
    )
    try:
        return dumper.dump(error)
    except Exception as trouble:  # an exception with hostile methods: its name must arrive
        text = f"{safe_text(error)} (it could not be described: {safe_text(trouble)})"
        return {
            "type": type_name(original_type(type(error))),
            "text": text,
            "args": [],
            "attributes": {},
            "traceback": own_traceback_text(error, ()),
            "worker": worker,
            "function": function,
            "ran": ran,
            "others": [],
        }


def dump_for_copy(error: BaseException) -> dict[str, Any]:
    """Describe an exception that came from another worker, to pickle or copy it here."""
    return _Dumper(for_copy=True).dump(error)


class _Dumper:
    """One dump: the nodes that were made so far."""

    def __init__(
        self,
        *,
        worker: str = "",
        function: str = "",
        skip_frames_of: tuple[str, ...] = (),
        allow_pickle: bool = True,
        ran: Ran = "yes",
        pass_types: tuple[type, ...] = (),
        for_copy: bool = False,
    ) -> None:
        self.worker = worker
        self.function = function
        self.skip_frames_of = skip_frames_of
        self.allow_pickle = allow_pickle
        self.ran = ran
        self.values = ValueWriter(allow_pickle, pass_types)
        # A copy passes no worker, and takes no exception along that was raised here.
        self.for_copy = for_copy
        self.nodes: list[dict[str, Any]] = []
        self.numbers: dict[int, int | None] = {}  # by id(); None while it is being made

    def dump(self, error: BaseException) -> dict[str, Any]:
        """The node of ``error``, with all others in it."""
        self.numbers[id(error)] = None
        return {**self.node(error, 0), "others": self.nodes}

    def number(self, error: BaseException | None, depth: int) -> int | None:
        """The number of another exception; None if there is none, or it cannot be linked."""
        if error is None or (self.for_copy and remote_origin(error) is None):
            return None
        if id(error) in self.numbers:
            return self.numbers[id(error)]
        if depth > _DEPTH_LIMIT or len(self.numbers) >= _NODE_LIMIT:
            return None
        self.numbers[id(error)] = None
        node = self.node(error, depth)
        self.nodes.append(node)
        self.numbers[id(error)] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def node(self, error: BaseException, depth: int) -> dict[str, Any]:
        """What one exception is."""
        cls = original_type(type(error))
        node: dict[str, Any] = {
            "type": type_name(cls),
            "text": safe_text(error),
            "notes": notes_of(error),
            "cause": self.number(error.__cause__, depth + 1),
            "context": self.number(error.__context__, depth + 1),
            "suppress": error.__suppress_context__,
            **self.origin(error, top=depth == 0),
        }
        if GROUP is not None and isinstance(error, GROUP):
            members = [self.number(member, depth + 1) for member in cast(Any, error).exceptions]
            node["members"] = [member for member in members if member is not None]
            if None in members:
                lost = f"{members.count(None)} members of this group were left out on the way"
                node["notes"] = [*node["notes"], lost]
            node["args"] = [self.value(cast(Any, error).message, depth)]
        else:
            node["args"] = [self.value(value, depth) for value in error.args]
        node["attributes"] = {
            name: self.value(value, depth) for name, value in _attributes(error, cls).items()
        }
        if self.allow_pickle and find_type(node["type"], import_modules=False)[0] is not cls:
            by_value = class_by_value(cls)
            if by_value is not None:
                node["class"] = by_value
        return node

    def origin(self, error: BaseException, *, top: bool) -> dict[str, Any]:
        """Where it was raised: here, unless it already came from somewhere else."""
        known = remote_origin(error)
        if known is None:
            text_of = traceback_text if top else own_traceback_text
            return {
                "traceback": text_of(error, self.skip_frames_of),
                "worker": self.worker,
                "function": self.function,
                "route": [],
                "ran": self.ran,
                "shown": top,
            }
        route = [list(stop) for stop in known.route]
        if top and not self.for_copy:
            route.append([self.worker, self.function])
        return {
            "traceback": known.traceback,
            "worker": known.worker,
            "function": known.function,
            "route": route[-_DEPTH_LIMIT:],
            # To the next caller its call has run, whatever became of a call that it made.
            "ran": known.ran if self.for_copy else self.ran,
            "shown": top and (known.shown or not self.for_copy),
        }

    def value(self, value: Any, depth: int) -> list[Any]:
        """An argument or attribute, as :meth:`_Loader.value` reads it."""
        if isinstance(value, BaseException) and not (
            self.for_copy and remote_origin(value) is None
        ):
            number = self.number(value, depth + 1)
            return [0, safe_repr(value)] if number is None else [1, number]
        return self.values.write(value)


def _attributes(error: BaseException, cls: type) -> dict[str, Any]:
    """The instance's attributes: in ``__dict__``, in ``__slots__`` and in C."""
    found: dict[str, Any] = {}
    for name, field in fields_of(cls).items():
        try:
            value = field.__get__(error, cls)
        except Exception:  # a slot that was never filled
            continue
        if value is None and is_made_in_c(field):
            continue  # in C, None and "not set" print differently (OSError.errno)
        found[name] = value
    for name, value in object.__getattribute__(error, "__dict__").items():
        if isinstance(name, str) and name not in _RESERVED:
            found[str.__str__(name)] = value
    if isinstance(error, RpcError) and error.remote and ORIGIN_KEY in error.__dict__:
        found["worker"] = error.peer
    return found


# In ----------------------------------------------------------------------------------------


def load_exception(data: Mapping[str, Any], *, allow_pickle: bool = True) -> BaseException:
    """Make the exception that :func:`dump_exception` described.  Never raises.

    Args:
        data: the description.  It need not be trusted: types are only looked up, and
            nothing of theirs is called.
        allow_pickle: whether modules may be imported to find a type, and classes that came
            by value may be opened.  Without it only what is imported already is found.

    Returns:
        An exception that is of its own type and of ``RuntimeError``, with ``remote`` True.
        ``zrpc``'s own errors come as their own type.  What cannot be rebuilt, types outside
        ``Exception`` and ``StopIteration`` come as :class:`~zrpc.errors.RemoteError`.

    Example:
        >>> data = dump_exception(KeyError("x"), worker="w1", function="train:step")
        >>> error = load_exception(data)
        >>> (isinstance(error, KeyError), isinstance(error, RuntimeError), error.args)
        (True, True, ('x',))
        >>> (error.worker, str(error).splitlines()[0])
        ('w1', "'x'")
    """
    try:
        loader = _Loader(allow_pickle)
        others = data.get("others", ())
        for node in others if isinstance(others, (list, tuple)) else ():
            loader.built.append(loader.build(node if isinstance(node, Mapping) else {}))
        return loader.build(data)
    except Exception as trouble:
        return _stand_in({}, f"its description cannot be read ({safe_text(trouble)})")


class _Loader:
    """One load: the exceptions that were built so far, by number."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.built: list[BaseException] = []

    def build(self, node: Mapping[str, Any]) -> BaseException:
        """The exception of one node."""
        cls, reason = find_type(_string(node, "type"), import_modules=self.allow_pickle)
        if cls is None and self.allow_pickle and isinstance(node.get("class"), bytes):
            cls, reason = open_class(node["class"], reason)
        if cls is not None and not issubclass(cls, Exception):
            cls, reason = (
                None,
                "types outside Exception end the process, thread or task that meets them",
            )
        elif cls is not None and issubclass(cls, _STOP_TYPES):
            cls, reason = None, "it would silently end a loop of the caller"
        error: BaseException | None = None
        if cls is not None:
            try:
                error = self.instance(cls, node)
            except Exception as trouble:
                reason = f"it cannot be rebuilt here ({safe_text(trouble)})"
        if error is None:
            error = _stand_in(node, reason)
            error.__dict__["original_args"] = tuple(self.values(node))
        self.link(error, node)
        return error

    def instance(self, cls: type[Exception], node: Mapping[str, Any]) -> BaseException:
        """An exception of this type, and a RuntimeError, without calling ``__init__``."""
        is_own = issubclass(cls, RpcError)
        kind = cls if is_own else remote_type(cls)
        args = tuple(self.values(node))
        attributes = {
            name: self.value(item)
            for name, item in _mapping(node, "attributes").items()
            if isinstance(name, str) and name not in _RESERVED
        }
        error = bare(kind, args, self.members(node))
        fields = fields_of(cls)
        check_fields(cls, attributes)
        own = object.__getattribute__(error, "__dict__")
        for name, value in attributes.items():
            if name not in fields:
                own[name] = value
                continue
            try:
                fields[name].__set__(error, value)
            except (AttributeError, TypeError):  # read-only in C, and set by __new__
                continue
        origin = _origin(node)
        if is_own:
            cast(RpcError, error).arrived(origin)
        else:
            own[ORIGIN_KEY] = origin
            own[TEXT_KEY] = _string(node, "text")
        return error

    def link(self, error: BaseException, node: Mapping[str, Any]) -> None:
        """Cause, context and notes.  By descriptor: a frozen dataclass forbids the rest."""
        notes = node.get("notes")
        if isinstance(notes, (list, tuple)) and notes:
            own = object.__getattribute__(error, "__dict__")
            own["__notes__"] = [note for note in notes if isinstance(note, str)]
        slots = vars(BaseException)
        slots["__cause__"].__set__(error, self.other(node.get("cause")))
        slots["__context__"].__set__(error, self.other(node.get("context")))
        slots["__suppress_context__"].__set__(error, bool(node.get("suppress")))

    def members(self, node: Mapping[str, Any]) -> list[BaseException]:
        """The members of an exception group."""
        numbers = node.get("members")
        found = [self.other(number) for number in numbers] if isinstance(numbers, list) else []
        return [member for member in found if member is not None]

    def values(self, node: Mapping[str, Any]) -> list[Any]:
        """The arguments."""
        items = node.get("args")
        return [self.value(item) for item in items] if isinstance(items, (list, tuple)) else []

    def value(self, item: Any) -> Any:
        """An argument or attribute.

        ``[0, value]`` is that value, ``[1, number]`` an exception of this dump, and
        ``[2, pickle, repr]`` what the pickle holds, or the repr if it cannot be opened.
        """
        if not isinstance(item, (list, tuple)) or len(item) < 2:
            return None
        if item[0] == 1:
            return self.other(item[1])
        return read_value(item, self.allow_pickle)

    def other(self, number: Any) -> BaseException | None:
        """The exception of this number; None if it does not come before this one."""
        if isinstance(number, int) and 0 <= number < len(self.built):
            return self.built[number]
        return None


def _string(node: Mapping[str, Any], key: str) -> str:
    """A text field, empty if it is none."""
    value = node.get(key)
    return value if isinstance(value, str) else ""


def _mapping(node: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    """A map field, empty if it is none."""
    value = node.get(key)
    return value if isinstance(value, Mapping) else {}


def _origin(node: Mapping[str, Any]) -> RemoteOrigin:
    """Where the node says that it was raised."""
    route = node.get("route")
    stops = (
        [stop for stop in route if isinstance(stop, (list, tuple)) and len(stop) == 2]
        if (isinstance(route, (list, tuple)))
        else []
    )
    ran = node.get("ran")
    return RemoteOrigin(
        worker=_string(node, "worker"),
        function=_string(node, "function"),
        traceback=_string(node, "traceback"),
        route=tuple((str(worker), str(function)) for worker, function in stops),
        ran=ran if ran in ("no", "maybe") else "yes",
        shown=bool(node.get("shown", True)),
    )


def _stand_in(node: Mapping[str, Any], reason: str) -> RemoteError:
    """The RemoteError for an exception whose own type is not raised here."""
    name = _string(node, "type") or "unknown"
    text = _string(node, "text")
    shown = name.removeprefix("builtins:").replace(":", ".")
    error = RemoteError(
        f"Original exception on remote side was {shown}{': ' if text else ''}{text}\n"
        f"(It arrives as a RemoteError: {reason}.)"
    )
    error.type_name = name
    error.original_text = text
    error.arrived(_origin(node))
    return error
