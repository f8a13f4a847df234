"""Exceptions on their way to another worker: what arrives is what was raised there."""

from __future__ import annotations

import abc
import asyncio
import builtins
import copy
import dataclasses
import doctest
import gc
import json
import pickle
import subprocess
import sys
import threading
import traceback
import types
import weakref
from typing import Any, ClassVar, Generic, TypeVar

import cloudpickle
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc import errors, remote_exceptions
from zrpc.errors import RemoteError, RpcError
from zrpc.exception_types import remote_type
from zrpc.remote_exceptions import (
    RemoteExceptionMixin,
    dump_exception,
    load_exception,
    remote_origin,
)

needs_groups = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="exception groups came with 3.11"
)


def travel(error: BaseException, worker: str = "w1", function: str = "train:step", **options: Any):
    """The exception as the caller gets it, through bytes."""
    data = dump_exception(error, worker=worker, function=function, **options)
    return load_exception(pickle.loads(pickle.dumps(data)))


def raised(function, *arguments: Any) -> BaseException:
    """What a call raises."""
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


# The kinds of exceptions that people write -----------------------------------------------


class NeedsArguments(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail


class ForgetsSuper(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code is {self.code}"


class WithSlots(Exception):
    __slots__ = ("_WithSlots__hidden", "never_set", "position")

    def __init__(self, position: int) -> None:
        super().__init__("slotted")
        self.position = position
        self.__hidden = "h"

    def hidden(self) -> str:
        return self.__hidden


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    detail: str = "d"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Exception):
    code: int


@dataclasses.dataclass
class Unhashable(ValueError):
    code: int


class OwnRuntimeError(RuntimeError):
    pass


class OwnOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(13, "keep out", path)
        self.extra = 5


class OwnKeyError(KeyError):
    def __str__(self) -> str:
        return "a key is missing"


class Abstract(abc.ABC, Exception):
    @abc.abstractmethod
    def method(self) -> None: ...


class Concrete(Abstract):
    def method(self) -> None: ...


T = TypeVar("T")


class Parametrised(Exception, Generic[T]):
    pass


class Registered(Exception):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls, *, tag: str, **arguments: Any) -> None:
        Registered.known.append(cls)


class WithNames(Exception):
    """Its own attributes have the names that zrpc would give it."""

    def __init__(self) -> None:
        super().__init__("names")
        self.worker = "mine"
        self.ran = 3

    @property
    def function(self) -> str:
        return "my property"


class Outer:
    class Nested(LookupError):
        pass


class OwnReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("reduced")
        self.a, self.b = a, b

    def __reduce__(self):
        return (OwnReduce, (self.a, self.b))


class OwnNew(Exception):
    def __new__(cls, first: int, second: int):
        return super().__new__(cls, first)

    def __init__(self, first: int, second: int) -> None:
        self.second = second


KINDS = [
    NeedsArguments(3, detail="größer 💥"),
    ForgetsSuper(4),
    WithSlots(5),
    Frozen(6),
    FrozenSlots(7),
    Unhashable(8),
    OwnRuntimeError("own", 1),
    OwnOSError("/x"),
    OwnKeyError("k"),
    Concrete("c"),
    Parametrised("p"),
    Registered("r"),
    Outer.Nested("n"),
    OwnReduce(1, 2),
    OwnNew(1, 2),
    KeyError("k"),
    KeyError(),
    OSError(2, "No such file", "a.txt"),
    OSError(18, "Cross-device", "a", None, "b"),
    OSError("only text"),
    PermissionError(13, "no", b"bytes"),
    BlockingIOError(11, "would block", 7),
    raised(open, "/no/such/file"),
    UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "äö", 0, 2, "not in range"),
    UnicodeTranslateError("äö", 0, 1, "why"),
    raised(b"\xff".decode),
    raised(compile, "a b", "f.py", "exec"),
    raised(json.loads, "{"),
    raised(__import__, "no_such_module_at_all"),
    raised(lambda: undefined_name),  # noqa: F821
    subprocess.CalledProcessError(3, ["ls", "-l"], b"out", b"err"),
    subprocess.TimeoutExpired("ls", 2.0),
    asyncio.IncompleteReadError(b"ab", 4),
    ZeroDivisionError("division by zero"),
    TimeoutError("own time-out"),
    ConnectionResetError(104, "reset"),
    torch.cuda.OutOfMemoryError("no memory"),
    np.linalg.LinAlgError("singular"),
    ValueError("a", 1, None, (2, b"b"), {"k": [1.5]}),
    Exception("plain"),
]


def state_of(error: BaseException) -> dict[str, Any]:
    """Attributes, wherever they are kept, without those of zrpc."""
    found = {name: value for name, value in vars(error).items() if not name.startswith("_zrpc_")}
    for base in type(error).__mro__:
        for name, field in vars(base).items():
            if isinstance(field, types.MemberDescriptorType) and not name.startswith("__"):
                value = getattr(error, name, None)
                if value is not None and not isinstance(value, BaseException):
                    found[name] = value
    found.pop("obj", None)
    return found


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__qualname__)
def test_type_arguments_attributes_and_text_arrive(error):
    arrived = travel(error)
    assert isinstance(arrived, type(error))
    assert isinstance(arrived, RuntimeError)
    assert isinstance(arrived, RemoteExceptionMixin)
    assert arrived.args == error.args
    assert repr(arrived) == repr(error)
    assert state_of(arrived) == state_of(error)
    assert str(arrived).startswith(f"{error}\n\nOn worker 'w1' (function train:step)")
    assert type(arrived).__name__ == type(error).__name__
    assert type(arrived).__module__ == type(error).__module__
    assert type(arrived).__qualname__ == type(error).__qualname__


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__qualname__)
def test_a_received_exception_can_be_raised_pickled_and_copied(error):
    arrived = travel(error)
    with pytest.raises(type(error)):
        raise arrived
    copies = [copy.copy(arrived), copy.deepcopy(arrived)]
    copies += [
        pickle.loads(pickle.dumps(arrived, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    copies.append(pickle.loads(cloudpickle.dumps(arrived)))
    for other in copies:
        assert type(other) is type(arrived)
        assert str(other) == str(arrived)
        assert other.args == arrived.args
        assert state_of(other) == state_of(arrived)
        assert remote_origin(other) == remote_origin(arrived)


def _builtin_exceptions() -> list[type[BaseException]]:
    return [
        value
        for value in vars(builtins).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    ]


def _make(cls: type[BaseException]) -> BaseException:
    if issubclass(cls, UnicodeDecodeError):
        return cls("utf-8", b"\xff", 0, 1, "bad")
    if issubclass(cls, UnicodeEncodeError):
        return cls("ascii", "ä", 0, 1, "bad")
    if issubclass(cls, UnicodeTranslateError):
        return cls("ä", 0, 1, "bad")
    if cls.__name__.endswith("ExceptionGroup"):
        return cls("text", [ValueError("member")])
    return cls("text")


@pytest.mark.parametrize("cls", _builtin_exceptions(), ids=lambda cls: cls.__name__)
def test_every_builtin_exception_arrives(cls):
    error = _make(cls)
    arrived = travel(error)
    assert isinstance(arrived, RuntimeError)
    stands_in = not issubclass(type(error), Exception) or issubclass(
        cls, (StopIteration, StopAsyncIteration)
    )
    if stands_in:
        assert type(arrived) is RemoteError
        assert arrived.type_name == f"builtins:{cls.__name__}"
        assert arrived.original_text == str(error)
        assert "Original exception on remote side was" in str(arrived)
        assert cls.__name__ in str(arrived)
    else:
        assert isinstance(arrived, cls)
        assert repr(arrived) == repr(error)
        assert str(arrived).startswith(str(error))


def test_exceptions_outside_exception_keep_their_arguments():
    arrived = travel(SystemExit(3))
    assert type(arrived) is RemoteError
    assert arrived.original_args == (3,)
    assert "SystemExit: 3" in str(arrived)
    assert type(travel(asyncio.CancelledError())) is RemoteError
    assert travel(StopIteration("value")).original_args == ("value",)


def test_the_message_comes_first_and_the_remote_traceback_last():
    def boom_inner() -> None:
        raise ValueError("expected-text")

    def boom() -> None:
        boom_inner()

    arrived = travel(raised(boom), function="train:boom")
    lines = str(arrived).splitlines()
    assert lines[0] == "expected-text"
    assert lines[2] == "On worker 'w1' (function train:boom), remote traceback:"
    assert lines[3] == "Traceback (most recent call last):"
    assert "boom_inner" in str(arrived)
    assert lines[-1] == "ValueError: expected-text"
    assert arrived.remote is True
    assert (arrived.worker, arrived.function, arrived.ran) == ("w1", "train:boom", "yes")
    assert arrived.remote_traceback.startswith("Traceback (most recent call last):")
    assert arrived.route == ()


def test_the_local_report_prints_the_original_name():
    arrived = travel(raised(json.loads, "{"))
    report = "".join(traceback.format_exception(arrived))
    assert report.startswith("json.decoder.JSONDecodeError: Expecting property name")
    report = "".join(traceback.format_exception(travel(ValueError("x"))))
    assert report.startswith("ValueError: x")


def test_attributes_of_the_exception_win_over_those_of_zrpc():
    arrived = travel(WithNames())
    assert (arrived.worker, arrived.ran, arrived.function) == ("mine", 3, "my property")
    origin = remote_origin(arrived)
    assert (origin.worker, origin.function, origin.ran) == ("w1", "train:step", "yes")


def test_a_class_hook_of_the_original_is_not_run():
    Registered.known.clear()
    assert isinstance(travel(Registered("x")), Registered)
    assert Registered.known == []


def test_the_class_of_a_type_is_made_once_while_it_is_used():
    first, second = travel(ValueError("a")), travel(ValueError("b"))
    assert type(first) is type(second)


def test_types_are_not_kept_alive():
    space: dict[str, Any] = {}
    exec("class Gone(Exception): pass", {"__name__": __name__}, space)
    reference = weakref.ref(space["Gone"])
    assert isinstance(remote_type(space["Gone"]), type)
    space.clear()
    gc.collect()
    assert reference() is None


# Chains, notes, groups --------------------------------------------------------------------


def raise_from() -> None:
    try:
        {}["key"]
    except KeyError as error:
        raise OwnRuntimeError("outer") from error


def raise_during() -> None:
    try:
        {}["key"]
    except KeyError:
        raise ValueError("second")  # noqa: B904


def test_a_cause_arrives_and_is_printed_once():
    arrived = travel(raised(raise_from))
    assert isinstance(arrived.__cause__, KeyError)
    assert isinstance(arrived.__cause__, RuntimeError)
    assert arrived.__cause__.args == ("key",)
    assert arrived.__context__ is arrived.__cause__
    assert arrived.__suppress_context__ is True
    assert "direct cause" in arrived.remote_traceback
    # Its traceback is part of the outer one's: not in its own text, but to be had.
    assert str(arrived.__cause__) == "'key'"
    assert "raise_from" in arrived.__cause__.remote_traceback
    assert str(arrived).count('{}["key"]') == 1


def test_a_context_arrives():
    arrived = travel(raised(raise_during))
    assert arrived.__cause__ is None
    assert isinstance(arrived.__context__, KeyError)
    assert arrived.__suppress_context__ is False


def test_a_suppressed_context_stays_suppressed():
    def suppress() -> None:
        try:
            {}["key"]
        except KeyError:
            raise ValueError("second") from None

    arrived = travel(raised(suppress))
    assert arrived.__suppress_context__ is True
    assert isinstance(arrived.__context__, KeyError)
    assert "KeyError" not in str(arrived)


def test_a_chain_in_a_circle_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    arrived = travel(first)
    assert str(arrived.__context__) == "second"
    assert arrived.__context__.__context__ is None


def test_an_exception_that_is_its_own_argument_ends():
    error = ValueError("text")
    error.args = ("text", error)
    error.itself = error
    arrived = travel(error)
    assert arrived.args[0] == "text"
    assert "text" in arrived.itself


def test_shared_causes_stay_shared_and_do_not_multiply():
    error: Exception = ValueError("root")
    for number in range(40):  # as a tree this would be 2 ** 40 exceptions
        outer = ValueError(number)
        outer.__cause__ = outer.__context__ = error
        error = outer
    arrived = travel(error)
    assert len(dump_exception(error, worker="w", function="f")["others"]) == 40
    for _ in range(40):
        assert arrived.__cause__ is arrived.__context__
        arrived = arrived.__cause__
    assert str(arrived) == "root"


def test_a_very_long_chain_is_cut():
    error: Exception = ValueError("root")
    for number in range(5000):
        outer = ValueError(number)
        outer.__context__ = error
        error = outer
    arrived = travel(error)
    count = 0
    while arrived is not None:
        arrived, count = arrived.__context__, count + 1
    assert 50 < count < 200


def test_notes_arrive():
    error = ValueError("x")
    error.__notes__ = ["größer", 5]
    arrived = travel(error)
    assert arrived.__notes__ == ["größer", "5"]
    assert pickle.loads(pickle.dumps(arrived)).__notes__ == ["größer", "5"]


def test_exceptions_among_arguments_and_attributes_arrive():
    inner = NeedsArguments(1, detail="in")
    error = ValueError("outer", inner)
    error.reason = inner
    arrived = travel(error)
    assert isinstance(arrived.args[1], NeedsArguments)
    assert arrived.args[1].code == 1
    assert arrived.reason is arrived.args[1]


@needs_groups
def test_the_members_of_a_group_arrive():
    group = builtins.ExceptionGroup(
        "two",
        [raised(raise_from), builtins.ExceptionGroup("inner", [NeedsArguments(2, detail="d")])],
    )
    group.extra = 7
    for arrived in (travel(group), pickle.loads(pickle.dumps(travel(group)))):
        assert isinstance(arrived, builtins.ExceptionGroup)
        assert isinstance(arrived, RuntimeError)
        assert arrived.message == "two"
        assert arrived.extra == 7
        assert str(arrived).startswith("two (2 sub-exceptions)")
        first, second = arrived.exceptions
        assert isinstance(first.__cause__, KeyError)
        assert isinstance(second.exceptions[0], NeedsArguments)
        match, rest = arrived.split(NeedsArguments)
        assert match.exceptions[0].exceptions[0].code == 2
        assert rest.exceptions == (first,)


@needs_groups
def test_a_group_with_members_outside_exception_is_a_remote_error():
    arrived = travel(builtins.BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("v")]))
    assert type(arrived) is RemoteError
    assert "KeyboardInterrupt" in str(arrived)


@needs_groups
def test_a_group_of_more_members_than_fit_says_how_many_are_missing():
    group = builtins.ExceptionGroup("many", [ValueError(number) for number in range(3000)])
    arrived = travel(group)
    missing = 3000 - len(arrived.exceptions)
    assert missing > 0
    assert arrived.__notes__ == [f"{missing} members of this group were left out on the way"]


# Several workers -----------------------------------------------------------------------------


def test_an_exception_is_wrapped_once_however_many_workers_it_passes():
    error = travel(raised(raise_from), worker="c", function="m:inner")
    text = str(error)
    error = travel(error, worker="b", function="m:middle")
    error = travel(error, worker="a", function="m:outer")
    assert isinstance(error, OwnRuntimeError)
    assert error.worker == "c"
    assert error.function == "m:inner"
    assert error.route == (("b", "m:middle"), ("a", "m:outer"))
    expected = "via worker 'b' (function m:middle)\nvia worker 'a' (function m:outer)"
    assert str(error) == f"{text}\n{expected}"
    assert len(type(error).__mro__) == len(remote_type(OwnRuntimeError).__mro__)
    assert type(error) is remote_type(OwnRuntimeError)
    assert isinstance(error.__cause__, KeyError)


def test_a_new_exception_with_a_remote_cause_keeps_both_origins():
    remote = travel(raised(raise_from), worker="c", function="m:inner")

    def handle() -> None:
        try:
            raise remote
        except RuntimeError as error:
            raise ValueError("handled") from error

    arrived = travel(raised(handle), worker="b", function="m:middle")
    assert arrived.worker == "b"
    assert arrived.__cause__.worker == "c"
    assert isinstance(arrived.__cause__, OwnRuntimeError)
    assert "m:inner" in str(arrived)  # all of the story is in the outer text
    assert str(arrived).count('{}["key"]') == 1


def test_a_cause_that_is_sent_on_by_itself_shows_its_origin():
    cause = travel(raised(raise_from), worker="c", function="m:inner").__cause__
    arrived = travel(cause, worker="b", function="m:middle")
    assert isinstance(arrived, KeyError)
    assert "On worker 'c' (function m:inner), remote traceback:" in str(arrived)


def test_an_exception_that_came_remotely_and_was_raised_in_a_handler_copies_without_it():
    remote = travel(ValueError("x"))

    def handle() -> None:
        try:
            {}["local"]
        except KeyError:
            raise remote  # noqa: B904

    error = raised(handle)
    assert isinstance(error.__context__, KeyError)
    assert pickle.loads(pickle.dumps(error)).__context__ is None


@pytest.mark.parametrize(
    "error",
    [
        errors.worker_lost("c", "m:inner", "it died", "no", elapsed=2.0),
        errors.call_timed_out("c", "m:inner", 1.0, 1.1, "queued"),
        errors.unknown_worker("c", ["d"], function="m:inner"),
        errors.busy("c", "m:inner", "full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_zrpc_arrive_as_their_own_type(error):
    arrived = travel(error, worker="b", function="m:outer")
    assert type(arrived) is type(error)
    assert str(arrived) == f"{error}\n\nOn worker 'b' (function m:outer)"
    # Its own trouble: the worker is the one where it arose, the lost one is the peer.
    assert (arrived.remote, arrived.worker, arrived.peer) == (True, "b", "c")
    assert (arrived.function, arrived.ran) == ("m:outer", "yes")
    assert (arrived.elapsed, arrived.limit) == (error.elapsed, error.limit)
    again = travel(arrived, worker="a", function="m:first")
    assert (again.worker, again.peer) == ("b", "c")
    assert again.route == (("a", "m:first"),)
    assert vars(pickle.loads(pickle.dumps(again))) == vars(again)


def test_a_refusal_says_that_nothing_ran():
    arrived = travel(errors.busy(None, "m:f", "full"), ran="no")
    assert (arrived.ran, arrived.remote) == ("no", True)
    assert travel(ValueError("bad argument"), ran="no").ran == "no"


def test_an_error_of_the_machinery_shows_no_frames_of_the_machinery():
    def refuse() -> None:
        raise errors.busy(None, "m:f", "full")

    arrived = travel(raised(refuse), skip_frames_of=(__name__,), ran="no")
    assert arrived.remote_traceback == ""
    assert str(arrived).endswith("On worker 'w1' (function train:step)")


def test_frames_of_the_machinery_are_left_out():
    module = types.ModuleType("machinery.inner")
    code = (
        "def run(function):\n    try:\n        {}['k']\n    except KeyError:\n        function()\n"
    )
    exec(compile(code, "/machinery/inner.py", "exec"), vars(module))

    def user() -> None:
        raise ValueError("of the user")

    error = raised(module.run, user)
    assert "/machinery/inner.py" in str(travel(error))
    for names in (("machinery",), ("machinery.inner",)):
        text = str(travel(error, skip_frames_of=names))
        assert "/machinery/inner.py" not in text
        assert "in user" in text
        assert "KeyError" in text
    assert "/machinery/inner.py" in str(travel(error, skip_frames_of=("machine",)))


def test_trouble_in_the_machinery_itself_keeps_its_frames():
    def fail() -> None:
        raise ValueError("a bug")

    assert "in fail" in str(travel(raised(fail), skip_frames_of=(__name__,)))


# What cannot travel --------------------------------------------------------------------------


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Unreducible(Exception):
    def __reduce_ex__(self, protocol):
        raise ValueError("cannot be pickled")


class BadValue:
    def __reduce__(self):
        raise ValueError("cannot be pickled")

    def __repr__(self) -> str:
        raise ValueError("no repr")


def _fail_to_open() -> None:
    raise ValueError("cannot be opened")


class FailsToOpen:
    def __reduce__(self):
        return (_fail_to_open, ())

    def __repr__(self) -> str:
        return "<FailsToOpen>"


def test_an_exception_with_a_lock_arrives_with_the_rest():
    error = RuntimeError("lock-inside", threading.Lock(), 5)
    error.lock = threading.Lock()
    error.code = 7
    error.mixed = {"lock": threading.Lock(), "number": 3, "list": [1, threading.Lock()]}
    arrived = travel(error)
    assert "lock-inside" in str(arrived)
    assert arrived.args[0] == "lock-inside"
    assert arrived.args[2] == 5
    assert "lock" in arrived.args[1]
    assert "lock" in arrived.lock
    assert arrived.code == 7
    assert arrived.mixed["number"] == 3
    assert arrived.mixed["list"][0] == 1
    assert "lock" in arrived.mixed["list"][1]


def test_an_exception_whose_text_cannot_be_had_arrives_with_its_name():
    arrived = travel(raised(lambda: (_ for _ in ()).throw(Hostile("x"))))
    assert isinstance(arrived, Hostile)
    assert arrived.args == ("x",)
    assert "str() of this Hostile raised ValueError" in str(arrived)
    assert isinstance(travel(Unreducible("y")), Unreducible)


def test_values_that_cannot_be_pickled_or_opened_are_their_repr():
    error = ValueError(BadValue(), FailsToOpen())
    arrived = travel(error)
    assert "repr() raised ValueError" in arrived.args[0]
    assert arrived.args[1] == "<FailsToOpen>"


def test_a_value_of_a_module_that_the_caller_lacks_is_its_repr(monkeypatch):
    module = types.ModuleType("only_at_the_callee")
    exec("class Thing:\n    def __repr__(self): return '<Thing>'", vars(module))
    monkeypatch.setitem(sys.modules, "only_at_the_callee", module)
    data = dump_exception(ValueError("x", module.Thing()), worker="w", function="f")
    assert isinstance(load_exception(data).args[1], module.Thing)
    monkeypatch.delitem(sys.modules, "only_at_the_callee")
    arrived = load_exception(data)
    assert isinstance(arrived, ValueError)
    assert arrived.args == ("x", "<Thing>")


def test_tensors_arrays_and_objects_arrive():
    error = ValueError(torch.arange(3), np.float32(2.5), Frozen, lambda x: x + 1)
    error.array = np.arange(4)
    error.info = Outer()
    arrived = travel(error)
    assert torch.equal(arrived.args[0], torch.arange(3))
    assert arrived.args[1] == np.float32(2.5)
    assert arrived.args[2] is Frozen
    assert arrived.args[3](1) == 2
    assert arrived.array.tolist() == [0, 1, 2, 3]
    assert isinstance(arrived.info, Outer)


def test_values_of_types_that_the_codec_knows_are_left_to_it():
    thing = threading.Lock()  # stands for an RRef: no pickle, and the codec sends it
    data = dump_exception(
        ValueError(thing, [thing]), worker="w", function="f", pass_types=(type(thing),)
    )
    assert load_exception(data).args == (thing, [thing])


def test_without_pickling_only_plain_data_is_sent():
    error = ValueError("x", 5, [1, Outer()], torch.ones(1), {"a": (1, b"b", {2})})
    error.info = Outer()
    data = dump_exception(error, worker="w", function="f", allow_pickle=False)
    arrived = load_exception(data, allow_pickle=False)
    assert arrived.args[:2] == ("x", 5)
    assert "Outer" in arrived.args[2][1]
    assert torch.equal(arrived.args[3], torch.ones(1))
    assert arrived.args[4] == {"a": (1, b"b", {2})}
    assert "Outer" in arrived.info


def test_containers_that_hold_themselves_end():
    error = ValueError("x")
    error.items = [1]
    error.items += [error.items] * 50
    error.lock_too = [threading.Lock()]
    error.lock_too += [error.lock_too] * 50
    arrived = travel(error)
    assert arrived.items[0] == 1
    assert arrived.items[1] is arrived.items
    assert len(arrived.lock_too) == 51
    data = dump_exception(error, worker="w", function="f", allow_pickle=False)
    assert load_exception(data, allow_pickle=False).items[0] == 1


def test_enormous_texts_are_cut_in_the_middle():
    arrived = travel(ValueError("a" * 10_000_000 + "z"))
    assert len(str(arrived)) < 2_000_000
    assert "characters left out" in str(arrived)


def test_a_type_that_the_caller_lacks_is_a_remote_error(monkeypatch):
    module = types.ModuleType("only_at_the_callee")
    exec("class Special(Exception): pass", {"__name__": module.__name__}, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    error = module.Special("the text")
    error.__cause__ = KeyError("k")
    data = dump_exception(error, worker="w1", function="m:f")
    assert isinstance(load_exception(data), module.Special)
    monkeypatch.delitem(sys.modules, module.__name__)
    arrived = load_exception(data)
    assert type(arrived) is RemoteError
    text = "Original exception on remote side was only_at_the_callee.Special: the text"
    assert str(arrived).startswith(text)
    assert "cannot be imported" in str(arrived)
    assert arrived.type_name == "only_at_the_callee:Special"
    assert arrived.original_args == ("the text",)
    assert (arrived.worker, arrived.remote) == ("w1", True)
    assert isinstance(arrived.__cause__, KeyError)
    again = travel(arrived, worker="b")
    assert (again.type_name, again.worker) == ("only_at_the_callee:Special", "w1")


def test_a_local_class_arrives_where_it_was_made():
    class Local(Exception):
        pass

    arrived = travel(Local("x"))
    assert isinstance(arrived, Local)
    assert arrived.args == ("x",)
    # Through a closure that runs in another process, and back.
    function = pickle.loads(cloudpickle.dumps(lambda: Local("y")))
    assert isinstance(travel(function()), Local)


def test_a_type_that_cannot_be_derived_from_is_a_remote_error():
    class Meta(type):
        def __new__(mcs, name, bases, space, **arguments):
            if name == "Final" and any(base.__name__ == "Final" for base in bases):
                raise TypeError("Final is final")
            return super().__new__(mcs, name, bases, space)

    Final = Meta("Final", (Exception,), {"__module__": __name__})
    arrived = travel(Final("x"))
    assert type(arrived) is RemoteError
    assert "Final is final" in str(arrived)


def test_exceptions_of_a_spawned_main_module_are_found_in_main(monkeypatch):
    main = types.ModuleType("__main__")
    exec("class Mine(Exception): pass", {"__name__": "__mp_main__"}, vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    error = main.Mine("x")
    data = dump_exception(error, worker="w", function="f")
    assert data["type"] == "__main__:Mine"
    assert isinstance(load_exception(data), main.Mine)


def test_values_of_a_spawned_main_module_are_found_in_main(monkeypatch):
    main = types.ModuleType("__mp_main__")
    exec("class Thing: pass", vars(main))
    with monkeypatch.context() as child:
        child.setitem(sys.modules, "__mp_main__", main)
        data = dump_exception(ValueError(main.Thing()), worker="w", function="f")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert isinstance(load_exception(data).args[0], main.Thing)


# Descriptions that nobody wrote -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "builtins:SystemExit",
        "builtins:int",
        "builtins:print",
        "os:system",
        "builtins:ValueError.__init__",
        "builtins:__dict__",
        "sys:modules",
        "",
        ":",
        "a:",
        ":b",
        "no_such:Thing",
        "zrpc.remote_exceptions:Ran",
    ],
)
def test_names_that_are_no_exception_type_become_remote_errors(name):
    for allow_pickle in (True, False):
        arrived = load_exception({"type": name, "text": "t"}, allow_pickle=allow_pickle)
        assert type(arrived) is RemoteError
        assert "t" in str(arrived)


def test_no_module_is_imported_and_no_pickle_opened_without_pickling():
    assert "antigravity" not in sys.modules
    opened: list[int] = []
    _opened.append(opened.append)
    evil = pickle.dumps(Evil())
    data = {
        "type": "antigravity:Error",
        "text": "t",
        "class": evil,
        "args": [[2, evil, "the repr"]],
        "attributes": {"x": [2, evil, "the repr"]},
    }
    arrived = load_exception(data, allow_pickle=False)
    assert type(arrived) is RemoteError
    assert arrived.original_args == ("the repr",)
    assert opened == []
    assert "antigravity" not in sys.modules


_opened: list[Any] = []


def _open(number: int) -> None:
    _opened[-1](number)


class Evil:
    def __reduce__(self):
        return (_open, (1,))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("UnicodeDecodeError", {"object": b"x", "start": -(10**9), "end": 1, "encoding": "u"}),
        ("UnicodeDecodeError", {"object": "no bytes", "start": 0, "end": 1}),
        ("UnicodeEncodeError", {"object": b"no text", "start": 0, "end": 1}),
        ("UnicodeTranslateError", {"object": 5, "start": 0, "end": 1}),
        ("SyntaxError", {"lineno": "x", "offset": [], "text": 5}),
    ],
)
def test_fields_that_would_crash_the_interpreter_are_refused(name, fields):
    attributes = {key: [0, value] for key, value in fields.items()}
    arrived = load_exception({"type": f"builtins:{name}", "text": "t", "attributes": attributes})
    assert type(arrived) is RemoteError
    assert str(arrived)


def test_links_that_do_not_lead_back_are_ignored():
    node = {"type": "builtins:ValueError", "text": "t", "cause": 5, "context": -1, "members": [9]}
    arrived = load_exception({**node, "others": [{**node, "cause": 0}, {**node, "cause": 0}]})
    assert isinstance(arrived, ValueError)
    assert arrived.__cause__ is None
    assert arrived.__context__ is None


def test_attributes_cannot_replace_what_zrpc_or_python_keeps():
    attributes = {
        name: [0, "evil"]
        for name in ("_zrpc_origin", "_zrpc_text", "__class__", "__traceback__", "args")
    }
    arrived = load_exception(
        {"type": "builtins:ValueError", "text": "t", "args": [[0, 1]], "attributes": attributes}
    )
    assert type(arrived) is remote_type(ValueError)
    assert arrived.args == (1,)
    assert arrived.__traceback__ is None
    assert str(arrived).startswith("t")


_anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["builtins:ValueError", "builtins:OSError", "zrpc.errors:BusyError"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["errno", "worker"]), inner)
    ),
    max_leaves=8,
)
_types = st.sampled_from(
    [f"builtins:{cls.__name__}" for cls in _builtin_exceptions()]
    + ["zrpc.errors:RpcTimeoutError", "zrpc.errors:RemoteError", "json.decoder:JSONDecodeError"]
)
_keys = ["text", "args", "attributes", "notes", "cause", "context", "suppress", "members"]
_keys += ["traceback", "worker", "function", "route", "ran", "shown", "class", "type"]
_names = ["errno", "strerror", "filename", "object", "start", "end", "encoding", "reason"]
_names += ["lineno", "text", "msg", "name", "worker", "elapsed", "args", "__cause__"]
_nodes = st.builds(
    lambda node, name, attributes: {"type": name, "attributes": attributes, **node},
    st.dictionaries(st.sampled_from(_keys), _anything, max_size=6),
    _types,
    st.dictionaries(st.sampled_from(_names), st.tuples(st.integers(0, 2), _anything), max_size=5),
)


@settings(max_examples=300, deadline=None)
@given(_nodes, st.lists(_nodes, max_size=3) | _anything)
def test_any_description_gives_an_exception_that_can_be_printed(node, others):
    arrived = load_exception({**node, "others": others}, allow_pickle=False)
    assert isinstance(arrived, RuntimeError)
    assert isinstance(arrived, Exception)
    str(arrived)
    repr(arrived)
    "".join(traceback.format_exception(arrived))
    dump_exception(arrived, worker="b", function="g")


def test_something_that_is_no_map_gives_a_remote_error():
    for value in (None, 5, "x", [], [1, 2]):
        assert type(load_exception(value)) is RemoteError


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=10,
        )
    )
)
def test_plain_arguments_arrive_exactly(args):
    arrived = travel(ValueError(*args), allow_pickle=False)
    assert repr(arrived.args) == repr(tuple(args))
    assert all(type(new) is type(old) for new, old in zip(arrived.args, args, strict=True))


def test_a_description_of_plain_values_is_plain():
    data = dump_exception(raised(raise_from), worker="w1", function="train:step")
    assert isinstance(load_exception(msgpack.unpackb(msgpack.packb(data))), OwnRuntimeError)


def test_a_local_error_of_zrpc_has_no_origin():
    assert remote_origin(RpcError("x")) is None
    assert remote_origin(ValueError("x")) is None
    assert remote_origin(travel(ValueError("x"))).worker == "w1"


def test_the_examples_in_the_documentation_run():
    result = doctest.testmod(remote_exceptions)
    assert result.attempted > 0
    assert result.failed == 0
