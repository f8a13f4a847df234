"""What a process offers by name."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zrpc import registry as registry_module
from zrpc.registry import Entry, Registry, public_methods


class Thing:
    def method(self) -> int:
        return 1


def function() -> None: ...


held = Thing()
twice = also_twice = Thing()
_hidden = shown = Thing()
_only_hidden = Thing()


@pytest.fixture
def registry() -> Registry:
    return Registry()


# Registering --------------------------------------------------------------------------------


def test_three_kinds_share_one_namespace(registry: Registry) -> None:
    thing, module = Thing(), torch.nn.Linear(1, 1)
    registry.register_function("f", function)
    registry.register_rref(thing, "o")
    registry.register_model("m", module)
    assert registry.names() == ["f", "m", "o"]
    assert registry.find("f") == Entry("f", "function", function)
    assert registry.find("o") == Entry("o", "object", thing)
    assert registry.find("m") == Entry("m", "model", module)
    assert registry.find("x") is None


def test_the_same_object_may_be_registered_again(registry: Registry) -> None:
    thing = Thing()
    first = registry.register_rref(thing, "o")
    assert registry.register_rref(thing, "o") is first
    registry.register_function("bound", thing.method)
    registry.register_function("bound", thing.method)  # another bound method object
    assert registry.names() == ["bound", "o"]


def test_another_object_under_a_taken_name_is_refused_naming_both(registry: Registry) -> None:
    registry.register_function("x", function)
    with pytest.raises(ValueError, match="taken") as caught:
        registry.register_rref(held, "x")
    assert "test_registry:function" in str(caught.value)
    assert "the object of type Thing" in str(caught.value)
    with pytest.raises(ValueError, match="math:sqrt"):
        registry.register_function("x", math.sqrt)
    with pytest.raises(ValueError, match="taken"):
        registry.register_function("x", Thing().method)
    entry = registry.find("x")
    assert entry is not None
    assert entry.value is function


def test_one_object_as_two_kinds_under_a_name_is_refused(registry: Registry) -> None:
    module = torch.nn.Linear(1, 1)
    registry.register_model("m", module)
    with pytest.raises(ValueError, match="the model of type Linear"):
        registry.register_rref(module, "m")


def test_an_unregistered_name_is_free_again(registry: Registry) -> None:
    registry.register_function("x", function)
    assert registry.unregister("x").value is function
    assert registry.find("x") is None
    registry.register_function("x", math.sqrt)
    with pytest.raises(LookupError, match=r"here as 'y'.*Registered: 'x'"):
        registry.unregister("y")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", ValueError, "empty"),
        ("torch:add", ValueError, "'torch.add' would do"),
        ("x" * 128, ValueError, "127"),
        ("\ud800", ValueError, "UTF-8"),
        (5, TypeError, "string"),
        (b"x", TypeError, "string"),
    ],
)
def test_bad_names_are_refused(registry: Registry, name: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        registry.register_function(name, function)
    with pytest.raises(error, match=text):
        registry.register_rref(held, name)
    assert registry.names() == []
    registry.register_function("x" * 127, function)


def test_what_is_no_function_or_module_is_refused(registry: Registry) -> None:
    with pytest.raises(TypeError, match="callable"):
        registry.register_function("x", 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        registry.register_model("x", held)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="make an instance"):
        registry.register_model("x", torch.nn.Linear)  # type: ignore[arg-type]


# The name by which the caller holds an object -------------------------------------------------


def test_with_no_name_it_is_that_of_the_callers_module(registry: Registry) -> None:
    alias = held
    assert registry.register_rref(alias).name == "held"
    assert registry.register_rref(shown).name == "shown"
    assert registry.register_rref(_only_hidden).name == "_only_hidden"


def test_an_object_of_no_module_has_the_name_of_the_local_variable(registry: Registry) -> None:
    mine = Thing()
    assert registry.register_rref(mine).name == "mine"


def test_an_object_with_several_names_or_none_needs_one(registry: Registry) -> None:
    with pytest.raises(ValueError, match="'twice', 'also_twice'"):
        registry.register_rref(twice)
    with pytest.raises(ValueError, match=r"No variable of the module .*register_rref\(obj, "):
        registry.register_rref(Thing())

    class Server:
        def offer(self) -> Entry:
            return registry.register_rref(self)

    with pytest.raises(ValueError, match="No variable"):
        Server().offer()
    assert registry.names() == []


def test_the_module_is_that_of_the_script_also_through_zrpcs_own_functions(
    registry: Registry,
) -> None:
    names: dict[str, Any] = {"__name__": "zrpc.api", "registry": registry}
    exec("def register_rref(held_here):\n    return registry.register_rref(held_here)", names)
    assert names["register_rref"](held).name == "held"


# Looking up -----------------------------------------------------------------------------------


def test_the_only_model_needs_no_name(registry: Registry) -> None:
    with pytest.raises(LookupError, match="No model is registered here"):
        registry.model()
    module = torch.nn.Linear(1, 1)
    registry.register_model("net", module)
    registry.register_function("f", function)
    assert registry.model().value is module
    assert registry.model("net").value is module
    registry.register_model("critic", torch.nn.ReLU())
    with pytest.raises(LookupError, match=r"give a name.*'critic', 'net'"):
        registry.model()
    with pytest.raises(LookupError, match="not a model but the function"):
        registry.model("f")
    with pytest.raises(LookupError, match="Did you mean 'net'"):
        registry.model("nett")
    assert registry.models() == ["critic", "net"]


def test_the_text_for_an_unknown_name_lists_near_ones_first(registry: Registry) -> None:
    assert "No name is registered" in registry.unknown_name_text("x")
    for name in ("alpha", "server_func", "beta"):
        registry.register_function(name, function)
    text = registry.unknown_name_text("Server_Fun")
    assert "as 'Server_Fun'" in text
    assert "Did you mean 'server_func'?" in text
    assert text.endswith("Registered: 'server_func', 'alpha', 'beta'.")
    assert "Did you mean" not in registry.unknown_name_text("zzz")


def test_the_text_for_an_unknown_name_stays_short(registry: Registry) -> None:
    for n in range(500):
        registry.register_function(f"function_{n}", function)
    text = registry.unknown_name_text("x" * 10_000_000)
    assert len(text) < 1000
    assert "and 480 more" in text


# Waiting for a name ---------------------------------------------------------------------------


def test_a_waiter_is_called_once_in_the_registering_thread_without_the_lock(
    registry: Registry,
) -> None:
    calls: list[tuple[str, int, list[str]]] = []

    def called(entry: Entry) -> None:
        calls.append((entry.name, threading.get_ident(), registry.names()))

    waiter = registry.when_registered("x", called)
    registry.register_function("y", function)
    assert calls == []
    registry.register_function("x", function)
    registry.register_function("x", function)
    assert calls == [("x", threading.get_ident(), ["x", "y"])]
    assert not waiter.cancel()


def test_a_waiter_for_a_name_that_is_there_is_called_at_once(registry: Registry) -> None:
    calls: list[Entry] = []
    registry.register_function("x", function)
    waiter = registry.when_registered("x", calls.append)
    assert [entry.value for entry in calls] == [function]
    registry.unregister("x")
    registry.register_function("x", function)
    assert len(calls) == 1
    assert not waiter.cancel()


def test_a_cancelled_waiter_is_not_called(registry: Registry) -> None:
    calls: list[Entry] = []
    cancelled = registry.when_registered("x", calls.append)
    registry.when_registered("x", calls.append)
    assert cancelled.cancel()
    assert not cancelled.cancel()
    registry.register_function("x", function)
    assert len(calls) == 1


def test_a_waiter_for_any_model_is_called_for_the_first(registry: Registry) -> None:
    calls: list[str] = []
    note: Callable[[Entry], None] = lambda entry: calls.append(entry.name)  # noqa: E731
    registry.when_registered(None, note)
    registry.register_function("f", function)
    registry.register_model("net", torch.nn.ReLU())
    registry.register_model("other", torch.nn.ReLU())
    registry.when_registered(None, note)
    assert calls == ["net", "net"]


def test_a_waiter_that_fails_is_logged_and_the_others_are_called(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Entry] = []
    registry.when_registered("x", lambda entry: 1 / 0)
    registry.when_registered("x", calls.append)
    with caplog.at_level(logging.ERROR):
        registry.register_function("x", function)
    assert len(calls) == 1
    assert "ZeroDivisionError" in caplog.text


def test_of_many_threads_that_register_one_name_one_wins_and_each_waiter_is_called_once(
    registry: Registry,
) -> None:
    for n in range(50):
        name, calls, refused = f"x{n}", [], []  # type: ignore[var-annotated]
        start = threading.Barrier(6)

        def register(name: str = name, refused: list[Any] = refused, start: Any = start) -> None:
            start.wait(30)
            try:
                registry.register_rref(Thing(), name)
            except ValueError:
                refused.append(1)

        def wait(name: str = name, calls: list[Any] = calls, start: Any = start) -> None:
            start.wait(30)
            registry.when_registered(name, calls.append)

        threads = [threading.Thread(target=target) for target in [register, wait] * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 2
        assert [entry is registry.find(name) for entry in calls] == [True] * 3


# Public methods -------------------------------------------------------------------------------


class Base:
    def inherited(self) -> None: ...

    def hidden_below(self) -> None: ...


class Full(Base):
    hidden_below = None  # type: ignore[assignment]
    number = 3

    class Inner: ...

    def __init__(self) -> None:
        self.callback = function
        self.data = [1]
        vars(self)["guarded"] = function  # behind the property, which goes before it

    def method(self) -> None: ...

    def _private(self) -> None: ...

    def __call__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("looked up through __getattr__")

    def __dir__(self) -> list[str]:
        raise AssertionError("looked up through __dir__")

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    partial = functools.partialmethod(method)

    @property
    def guarded(self) -> Any:
        raise AssertionError("evaluated")

    @functools.cached_property
    def cached(self) -> Any:
        raise AssertionError("evaluated")


class Slotted:
    __slots__ = ("empty", "filled", "value")

    def __init__(self) -> None:
        self.filled = function
        self.value = 3

    def method(self) -> None: ...


def test_public_methods_are_the_callables_of_class_and_instance() -> None:
    expected = ["callback", "inherited", "method", "of_class", "partial", "static"]
    assert public_methods(Full()) == expected


def test_public_methods_of_other_kinds_of_objects() -> None:
    assert public_methods(Slotted()) == ["filled", "method"]
    assert public_methods(Thing) == ["method"]
    assert {"append", "pop", "sort"} <= set(public_methods([]))
    assert {"add", "add_", "numpy"} <= set(public_methods(torch.zeros(1)))
    assert not {"grad", "shape", "T"} & set(public_methods(torch.zeros(1)))
    assert "forward" in public_methods(torch.nn.Linear(1, 1))
    assert "sqrt" in public_methods(math)
    assert public_methods(None) == []


# Processes ------------------------------------------------------------------------------------


def _names_in_child(registry: Registry, pipe: Any) -> None:
    registry.register_function("child", function)
    pipe.send(registry.names())


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_keeps_the_names_while_a_thread_of_the_parent_holds_the_lock(
    registry: Registry,
) -> None:
    calls: list[Entry] = []
    registry.register_function("parent", function)
    registry.when_registered("child", calls.append)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_names_in_child, args=(registry, there))
    with registry._lock:
        process.start()
    try:
        assert here.poll(30)
        assert here.recv() == ["child", "parent"]
    finally:
        process.join(30)
        process.close()
        here.close()
        there.close()
    assert calls == []
    assert registry.names() == ["parent"]


def test_the_process_has_a_default_registry() -> None:
    assert isinstance(registry_module.default_registry, Registry)
