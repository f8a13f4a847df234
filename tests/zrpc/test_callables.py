"""How functions are named: what has a name, what travels by value, and what is found by a name."""

from __future__ import annotations

import doctest
import functools
import gc
import importlib
import math
import operator
import os
import random
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from zrpc import callables
from zrpc.callables import (
    FunctionName,
    FunctionValue,
    describe,
    display_name,
    main_refused,
    resolve,
    script_digest,
)
from zrpc.errors import UnknownFunctionError

ME = __name__


def plain() -> int:
    return 1


def decorator(function):
    @functools.wraps(function)
    def wrapper():
        return function()

    return wrapper


@decorator
def decorated() -> int:
    return 2


@functools.lru_cache
def cached() -> int:
    return 3


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Base:
    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def create(cls) -> type:
        return cls

    @staticmethod
    @torch.jit.script
    def scripted_inside(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    def method(self) -> int:
        return 1

    def __call__(self) -> int:
        return 1

    class Inner:
        @classmethod
        def create(cls) -> type:
            return cls


class Derived(Base):
    pass


class Awkward:
    """Answers to every name, as mocks and proxies do, and raises when asked for some."""

    def __getattr__(self, name: str):
        if name == "__self__":
            raise RuntimeError("no")
        return self

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> int:
        return 1


NAMED = [
    (plain, f"{ME}:plain"),
    (decorated, f"{ME}:decorated"),
    (cached, f"{ME}:cached"),
    (scripted, f"{ME}:scripted"),
    (Base, f"{ME}:Base"),
    (Base.static, f"{ME}:Base.static"),
    (Derived.static, f"{ME}:Base.static"),
    (Base.create, f"{ME}:Base.create"),
    (Derived.create, f"{ME}:Derived.create"),
    (Base.Inner.create, f"{ME}:Base.Inner.create"),
    (Base.method, f"{ME}:Base.method"),
    (Base.scripted_inside, f"{ME}:Base.scripted_inside"),
    (torch.add, "torch:add"),
    (torch.empty, "torch:empty"),
    (torch.matmul, "torch:matmul"),
    (torch.set_num_threads, "torch:set_num_threads"),
    (torch.norm, "torch.functional:norm"),
    (torch.manual_seed, "torch.random:manual_seed"),
    (F.relu, "torch.nn.functional:relu"),
    (F.gelu, "torch.nn.functional:gelu"),
    (F.linear, "torch.nn.functional:linear"),
    (F.conv2d, "torch:conv2d"),
    (torch.linalg.norm, "torch.linalg:norm"),
    (torch.special.expit, "torch.special:expit"),
    (torch.fft.fft, "torch.fft:fft"),
    (torch.sparse.mm, "torch.sparse:mm"),
    (torch.Tensor.add_, "torch:Tensor.add_"),
    (torch.Tensor.__add__, "torch:Tensor.__add__"),
    (torch.Tensor.backward, "torch._tensor:Tensor.backward"),
    (torch.ops.aten.add, "torch:ops.aten.add"),
    (torch.ops.aten.add.Tensor, "torch:ops.aten.add.Tensor"),
    (torch.Tensor, "torch:Tensor"),
    (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
    (torch.nn.Linear.forward, "torch.nn.modules.linear:Linear.forward"),
    (np.add, "numpy:add"),
    (np.dot, "numpy:dot"),
    (np.random.rand, "numpy.random:rand"),
    (random.random, "random:random"),
    (dict.fromkeys, "builtins:dict.fromkeys"),
    (str.upper, "builtins:str.upper"),
    (int.__add__, "builtins:int.__add__"),
    (len, "builtins:len"),
    (max, "builtins:max"),
    (dict, "builtins:dict"),
    (time.sleep, "time:sleep"),
    (math.sqrt, "math:sqrt"),
    (operator.add, "_operator:add"),
    (functools.partial, "functools:partial"),
]


@pytest.mark.parametrize(("function", "text"), NAMED, ids=[text for _, text in NAMED])
def test_what_can_be_imported_has_a_name_that_leads_back_to_it(function, text):
    for _ in range(2):  # the second answer comes from memory
        assert describe(function) == FunctionName(text)
        assert resolve(text) == function
    assert display_name(function) == text


@pytest.mark.parametrize("module", ["torch", "torch.nn.functional", "torch.linalg", "torch.fft"])
def test_every_public_function_of_torch_has_a_name(module):
    space = vars(importlib.import_module(module))
    builtin = [
        value
        for name, value in space.items()
        if not name.startswith("_") and isinstance(value, types.BuiltinFunctionType)
    ]
    assert len(builtin) > 10
    for function in builtin:
        description = describe(function)
        assert isinstance(description, FunctionName), function
        assert resolve(description.text) is function


def test_every_method_of_a_tensor_has_a_name():
    for name in dir(torch.Tensor):
        method = getattr(torch.Tensor, name)
        if isinstance(method, types.MethodDescriptorType | types.WrapperDescriptorType):
            assert isinstance(describe(method), FunctionName), name


def _closure():
    def inner() -> int:
        return 1

    return inner


VALUES = {
    "a lambda": lambda: 1,
    "a closure": _closure(),
    "the wrapped": decorated.__wrapped__,
    "a bound method": Base().method,
    "a callable object": Base(),
    "a partial": functools.partial(plain),
    "a method of a list": [].append,
    "a method of a tensor": torch.ones(1).add,
    "a module": torch.nn.Linear(1, 1),
    "a generator's method": torch.default_generator.seed,
    "a local class": type("Local", (), {}),
    "a mock": mock.MagicMock(),
    "a mock with a name": mock.MagicMock(__name__="plain", __qualname__="plain", __module__=ME),
    "an awkward object": Awkward(),
}


@pytest.mark.parametrize("function", VALUES.values(), ids=VALUES.keys())
def test_what_has_no_name_goes_by_value(function):
    description = describe(function)
    assert isinstance(description, FunctionValue)
    assert description.function is function
    assert isinstance(display_name(function), str)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (VALUES["a lambda"], f"{ME}:<lambda> (line "),
        (VALUES["a closure"], f"{ME}:_closure.<locals>.inner"),
        (VALUES["a bound method"], f"{ME}:Base.method"),
        (VALUES["a callable object"], f"{ME}:Base object"),
        (VALUES["a partial"], f"partial of {ME}:plain"),
        ("server_func", "server_func"),
        (5, "builtins:int object"),
    ],
)
def test_display_names_say_what_a_person_would(function, words):
    assert display_name(function).startswith(words)


def test_only_callables_are_described():
    for value in (5, None, "x", [1]):
        with pytest.raises(TypeError, match=r"function should be callable\."):
            describe(value)


def test_a_shadowed_name_is_not_used(monkeypatch):
    original = plain
    monkeypatch.setattr(sys.modules[ME], "plain", lambda: 2)
    callables._weak_names.pop(id(original), None)
    assert isinstance(describe(original), FunctionValue)


def test_a_name_is_forgotten_with_its_function():
    module = types.ModuleType("short_lived")
    exec("def f(): pass", vars(module))
    sys.modules["short_lived"] = module
    try:
        function = module.f
        assert describe(function) == FunctionName("short_lived:f")
        key, reference = id(function), weakref.ref(function)
        assert key in callables._weak_names
        del function, module.f
        gc.collect()
        assert reference() is None
        assert key not in callables._weak_names
    finally:
        del sys.modules["short_lived"]


# Finding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch:ad", "Did you mean 'add'"),
        (f"{ME}:plian", "Did you mean 'plain'?"),
        (f"{ME}:Base.statik", "Did you mean 'static'?"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("torch:os.system", "'os' is another module"),
        ("os:path.join", "'path' is another module"),
        ("math:pi", "not callable"),
        ("", "module:function"),
        ("plain", "module:function"),
        (":f", "module:function"),
        ("math:", "module:function"),
        ("torch:Tensor..add", "module:function"),
        (".relative:f", "failed with TypeError"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_that_names_it(text, words):
    with pytest.raises(UnknownFunctionError) as caught:
        resolve(text, worker="w7")
    error = caught.value
    assert text in str(error)
    assert words in str(error)
    assert "not found on worker 'w7'" in str(error)
    assert "RPC pickler does not serialize function code" in str(error)
    assert (error.worker, error.function, error.ran) == ("w7", text, "no")
    assert isinstance(error, AttributeError)


@given(st.text() | st.from_regex(r"[a-z]{1,9}:[a-z.]{1,9}", fullmatch=True))
@example("math:sqrt.__call__.__self__")
@example("\0:\0")
def test_any_text_finds_a_function_or_is_an_unknown_function(text):
    try:
        found = resolve(text, import_modules=False)
    except UnknownFunctionError:
        return
    assert callable(found)


def test_a_module_is_imported_when_it_may_be(tmp_path, monkeypatch):
    (tmp_path / "lazily_found.py").write_text("def f():\n    return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownFunctionError, match="--import lazily_found"):
        resolve("lazily_found:f", import_modules=False)
    try:
        assert resolve("lazily_found:f")() == 5
    finally:
        sys.modules.pop("lazily_found", None)


def test_a_module_whose_import_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise ValueError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownFunctionError, match="ValueError: at import") as caught:
        resolve("broken_module:f")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_replaced_function_is_seen(monkeypatch):
    assert resolve(f"{ME}:plain") is plain
    other = _closure()
    monkeypatch.setattr(sys.modules[ME], "plain", other)
    assert resolve(f"{ME}:plain") is other
    monkeypatch.delattr(sys.modules[ME], "plain")
    with pytest.raises(UnknownFunctionError):
        resolve(f"{ME}:plain")


# The program file --------------------------------------------------------------------------

# Imports the module without its package, whose import takes seconds.
PROGRAM = """
import functools, multiprocessing, os, sys, types
package = types.ModuleType("zrpc")
package.__path__ = [os.environ["ZRPC_PACKAGE"]]
sys.modules["zrpc"] = package
from zrpc import callables

def step(): return 1
class Model:
    @classmethod
    def create(cls): return cls

def report():
    digest = callables.script_digest()
    named = [callables.describe(f) for f in (step, Model, Model.create)]
    back = [
        d.text.startswith("__main__:") and callables.resolve(d.text).__name__
        for d in named if isinstance(d, callables.FunctionName) and d.main
    ]
    local = type(callables.describe(lambda: 1)).__name__
    print(os.getpid(), digest or "none", *back, local, callables.display_name(step), flush=True)

if __name__ == "__main__":
    report()
    for method in sys.argv[1:]:
        process = multiprocessing.get_context(method).Process(target=report)
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def _run(arguments: list[str], cwd: Path, text: str | None = None) -> list[list[str]]:
    package = str(Path(callables.__file__).parent)
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "ZRPC_PACKAGE": package},
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [line.split(maxsplit=1) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    for path in ("script.py", "pkg/mod.py"):
        (folder / path).write_text(PROGRAM)
    (folder / "other.py").write_text(PROGRAM + "\n# another version\n")
    return folder


def test_processes_of_one_program_have_one_digest_and_name_its_functions(program):
    lines = _run(["script.py", "spawn", "fork", "forkserver"], program)
    lines += _run(["-m", "pkg.mod", "spawn"], program)
    lines += _run([str(program / "script.py")], Path("/"))
    assert len({process for process, _ in lines}) == 7
    reports = {report for _, report in lines}
    assert len(reports) == 1
    digest, *names = reports.pop().split()
    assert len(digest) == 32
    assert names == ["step", "Model", "create", "FunctionValue", "__main__:step"]
    [[_, other]] = _run(["other.py"], program)
    assert other.split()[0] != digest


def test_a_program_without_a_file_has_no_digest_and_its_functions_go_by_value(program):
    lines = _run(["-c", PROGRAM], program) + _run(["-"], program, PROGRAM)
    for _, report in lines:
        assert report == "none FunctionValue __main__:step"


def test_functions_of_an_interactive_session_go_by_value(monkeypatch):
    main = types.ModuleType("__main__")
    main.__file__ = __file__
    exec("def typed(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert describe(main.typed) == FunctionName("__main__:typed", main=True)
    callables._weak_names.clear()
    main.get_ipython = lambda: None
    assert script_digest() == ""
    assert isinstance(describe(main.typed), FunctionValue)
    del main.get_ipython
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert isinstance(describe(main.typed), FunctionValue)


def test_a_program_that_cannot_be_read_has_no_digest(monkeypatch):
    main = types.ModuleType("__main__")
    main.__file__ = "/no/such/file.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_digest() == ""


def test_multiprocessings_name_of_the_program_is_understood(monkeypatch):
    main = types.ModuleType("__mp_main__")
    main.__file__ = __file__
    exec("def step(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    assert describe(main.step) == FunctionName("__main__:step", main=True)
    assert resolve("__main__:step") is main.step
    assert resolve("__mp_main__:step") is main.step
    callables._found.clear()


def test_the_refusal_of_a_program_function_tells_the_remedies():
    text = main_refused("__main__:step", "w1")
    for words in ("__main__:step", "'w1'", "--import", "register_function"):
        assert words in text
    assert f"{ME}:plain" in main_refused(plain, "w1")


def test_the_examples_in_the_documentation_run():
    result = doctest.testmod(callables)
    assert result.attempted > 0
    assert result.failed == 0
