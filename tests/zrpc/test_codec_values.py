"""Plain values, NumPy and what travels pickled: they come back equal and of the same type."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zrpc import codec


def sent(value: Any, **options: Any) -> Any:
    """The value as the other side gets it."""
    encoded = codec.encode(value, **options)
    for buffer in encoded.buffers:
        view = memoryview(buffer)
        assert view.format == "B" and view.ndim == 1 and view.c_contiguous
    allowed = options.get("allow_pickle", True)
    return codec.decode(
        encoded.body, [bytearray(buffer) for buffer in encoded.buffers], allow_pickle=allowed
    )


def assert_same(got: Any, value: Any) -> None:
    """Equal, of the same types, at every level; NaN equals NaN."""
    assert type(got) is type(value), (got, value)
    if isinstance(value, np.ndarray):
        assert got.dtype == value.dtype and got.shape == value.shape
        assert got.flags.writeable
        np.testing.assert_array_equal(got, value)
    elif isinstance(value, (list, tuple)):
        assert len(got) == len(value)
        for one, other in zip(got, value, strict=True):
            assert_same(one, other)
    elif isinstance(value, dict):
        assert len(got) == len(value)
        for one, other in zip(got.items(), value.items(), strict=True):
            assert_same(one, other)
    elif isinstance(value, float):
        assert got == value or (math.isnan(got) and math.isnan(value))
        assert math.copysign(1, got) == math.copysign(1, value)
    else:
        assert got == value, (got, value)


class Pair(collections.namedtuple("Pair", "a b")):
    __slots__ = ()


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    y: list[Any]


class Word(str):
    pass


PLAIN = [
    None,
    True,
    0,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    2**100,
    -(2**1000),
    1.5,
    float("inf"),
    -0.0,
    float("nan"),
    1 + 2j,
    complex(float("inf"), -0.0),
    "",
    "text",
    "\ud800x",
    "x" * 70_000,
    b"",
    b"\x00\xff",
    b"x" * 100_000,
    bytearray(b"ab"),
    bytearray(b"y" * 100_000),
    (),
    [],
    {},
    (1, [2, (3,)], ((),)),
    [(), [], {}, ((1,),)],
    {1: "a", b"k": 2, "k": 3, (1, (2, "x")): [4], None: 5, 2.5: 6, frozenset({1}): 7},
    {"b": 1, "a": {"d": (1,), "c": [bytearray(b"z")]}},
    {"\udfff": ("\ud800",)},
    {1, 2},
    set(),
    frozenset([3, (4, 5)]),
    range(3),
    range(2**70, 0, -3),
    slice(1, None, (2, 3)),
    Ellipsis,
    NotImplemented,
    collections.OrderedDict([("b", 1), ((1, 2), [3])]),
    list(range(300_000)),
]
PICKLED = [
    Pair(1, [2]),
    [Pair(1, 2), Pair(3, 4)],
    Point(1, [2, (3,)]),
    [Point(1, []), Point(2, [])],
    {"p": Point(1, []), "q": (Point(2, []),)},
    Color.RED,
    Level.HIGH,
    Word("w"),
    {Color.RED, "x"},
    {Color.RED},
    collections.Counter("aab"),
    collections.defaultdict(list, {"a": [1]}),
    collections.deque([1, 2], maxlen=3),
    datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    decimal.Decimal("1.10"),
    Point,
    math.sin,
    len,
    np.float32,
    int,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:40])
def test_plain_values_come_back_without_a_pickle(value: Any) -> None:
    assert_same(sent(value, allow_pickle=False), value)
    assert_same(sent([value, (value,)], allow_pickle=False), [value, (value,)])


@pytest.mark.parametrize("value", PICKLED, ids=lambda value: repr(value)[:40])
def test_other_values_come_back_pickled(value: Any) -> None:
    assert_same(sent(value), value)
    with pytest.raises(codec.PickleRefusedError, match=r"argument args\[1\]"):
        codec.encode(("f", (0, value), {}), allow_pickle=False)


def test_what_msgpack_itself_would_change_is_kept_apart() -> None:
    import msgpack

    assert_same(sent([b"a", bytearray(b"a"), "a"]), [b"a", bytearray(b"a"), "a"])
    extension = msgpack.ExtType(5, b"\0\0\0\0")
    assert_same(sent([extension, (extension,)]), [extension, (extension,)])
    assert_same(sent({b"nd": True, b"type": "<f4"}), {b"nd": True, b"type": "<f4"})
    assert_same(sent({"nan": {float("nan"): 1}}), {"nan": {float("nan"): 1}})


def scalars(allow_nan: bool) -> st.SearchStrategy[Any]:
    return (
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-(2**200), 2**200)
        | st.floats(allow_nan=allow_nan)
        | st.complex_numbers(allow_nan=False)
        | st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
        | st.binary(max_size=20)
    )


@st.composite
def keys(draw: st.DrawFn) -> Any:
    # Without NaN, which no comparison of sets could find again.
    leaf = scalars(allow_nan=False)
    pair = st.tuples(leaf, st.tuples(leaf))
    return draw(leaf | pair | st.frozensets(leaf | pair, max_size=3))


values = st.recursive(
    scalars(allow_nan=True) | st.binary(max_size=20).map(bytearray) | keys(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys(), inner, max_size=4)
        | st.sets(keys(), max_size=3)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_any_plain_value_comes_back(value: Any) -> None:
    assert_same(sent(value, allow_pickle=False), value)


# ------------------------------------------------------------------------------- NumPy

STRUCTURED = np.array([(1, 2.5, b"a")], dtype=[("i", "u4"), ("f", "f4"), ("s", "S1")])
ALIGNED = np.zeros(3, np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (2, 2))], align=True))
GAPS = np.zeros(
    2, np.dtype({"names": ["a", "b"], "formats": ["i2", "f4"], "offsets": [4, 16], "itemsize": 32})
)
ARRAYS = [
    np.zeros((3, 4)),
    np.arange(10)[::-2],
    np.arange(100_000)[::-3],
    np.array(5),
    np.empty((0, 3)),
    np.empty((2, 0), dtype="M8[ns]"),
    np.asfortranarray(np.ones((3, 2))),
    np.arange(60_000.0).reshape(20, 30, 100).transpose(2, 0, 1),
    np.arange(60_000.0).reshape(20, 30, 100)[:, ::2, 1:50],
    np.broadcast_to(np.arange(3), (500, 3)),
    np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    np.array([3, 4], dtype="m8[25s]"),
    np.array(["ab", "c\0d", ""]),
    np.array([b"ab", b""]),
    np.arange(3, dtype=">i4"),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([True, False]),
    np.ones(3, np.float16),
    np.ones(3, np.longdouble),
    np.zeros(2, "V8"),
    np.zeros(3, "S0"),
    STRUCTURED,
    np.repeat(STRUCTURED, 1000),
    ALIGNED,
    GAPS,
    np.zeros(2, np.dtype([("a", [("b", "i4"), ("c", "U3")]), ("d", "M8[s]")])),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_arrays_come_back_writable_without_a_pickle(array: np.ndarray) -> None:
    got = sent(array, allow_pickle=False)
    assert_same(got, array)
    assert got.dtype.isalignedstruct == array.dtype.isalignedstruct
    assert_same(sent([array, (array,)], allow_pickle=False), [array, (array,)])
    assert_same(sent(Point(0, [array])).y[0], array)


def test_arrays_keep_fortran_order() -> None:
    for shape in ((3, 2), (300, 200)):
        got = sent(np.asfortranarray(np.random.rand(*shape)))
        assert got.flags.f_contiguous and not got.flags.c_contiguous


@settings(max_examples=150, deadline=None)
@given(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.array_dtypes(),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ).flatmap(
        lambda array: st.tuples(
            st.just(array),
            hnp.basic_indices(array.shape, allow_newaxis=True),
            st.permutations(range(array.ndim)),
        )
    )
)
def test_any_view_of_any_array_comes_back(drawn: Any) -> None:
    array, index, axes = drawn
    view = np.asarray(array.transpose(axes)[...] if index == () else array[index])
    got = sent(view, allow_pickle=False)
    assert got.dtype == view.dtype and got.shape == view.shape and got.flags.writeable
    assert got.tobytes() == view.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["ab", 3, None], dtype=object),
        np.array([(1, "x")], dtype=[("a", "i4"), ("b", object)]),
        np.array(["a", "longer than sixteen bytes"], dtype=np.dtypes.StringDType()),
        np.matrix([[1, 2]]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}",
)
def test_arrays_of_objects_and_subclasses_come_back_pickled_only(array: np.ndarray) -> None:
    assert_same(sent(array), array)
    with pytest.raises(codec.PickleRefusedError, match="numpy"):
        codec.encode(array, allow_pickle=False)


def test_masked_array_keeps_its_mask() -> None:
    got = sent(np.ma.array([1, 2], mask=[0, 1]))
    assert got.mask.tolist() == [False, True] and got.data.tolist() == [1, 2]


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(1.5),
        np.float64("nan"),
        np.float16(2),
        np.longdouble("0.1"),
        np.int64(3),
        np.uint8(255),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.datetime64("2020-01-01"),
        np.datetime64("2020-01-01T00:00:00", "ns"),
        np.timedelta64(3, "s"),
        np.str_("a\0b\0"),
        np.bytes_(b"a\0"),
        STRUCTURED[0],
        np.dtype("f4"),
        np.dtype(">M8[s]"),
        STRUCTURED.dtype,
        ALIGNED.dtype,
    ],
    ids=repr,
)
def test_numpy_scalars_and_dtypes_keep_their_type(scalar: Any) -> None:
    got = sent((scalar, [scalar]), allow_pickle=False)[1][0]
    assert type(got) is type(scalar)
    assert got == scalar or repr(got) == repr(scalar)
    if isinstance(scalar, np.generic):
        assert got.dtype == scalar.dtype


def test_an_array_twice_arrives_as_one_and_independent_of_the_senders() -> None:
    array = np.zeros(10_000)
    first, [second], third = sent((array, [array], Point(0, [array])))
    assert first is second and third.y[0] is first
    first += 1
    assert array.sum() == 0


def test_large_memory_goes_out_of_band_without_a_copy() -> None:
    array, data = np.arange(100_000), bytes(100_000)
    encoded = codec.encode((array, data, Point(1, [array[:1000]])))
    assert len(encoded.body) < 1000
    assert np.shares_memory(np.frombuffer(encoded.buffers[0], np.uint8), array)
    assert encoded.buffers[1] is data
    assert np.shares_memory(np.frombuffer(encoded.buffers[2], np.uint8), array)
    held = [bytearray(buffer) for buffer in encoded.buffers]
    got = codec.decode(encoded.body, held)[0]
    assert np.shares_memory(np.frombuffer(held[0], np.uint8), got)


def test_read_only_buffers_are_copied_once_and_arrive_writable() -> None:
    array = np.arange(100_000)
    encoded = codec.encode((array, bytearray(100_000), b"x" * 100_000))
    held = [bytes(buffer) for buffer in encoded.buffers]
    got, changeable, data = codec.decode(encoded.body, held)
    got += 1
    changeable[0] = 1
    assert data is held[2]
    assert np.frombuffer(held[0], array.dtype)[1] == 1 and held[1][0] == 0


def test_bodies_stay_small() -> None:
    value = [list(range(200_000)), {str(n): n for n in range(50_000)}]
    encoded = codec.encode(value)
    assert len(encoded.body) < 100 and sum(map(len, encoded.buffers)) > 500_000
    assert_same(sent(value), value)


# ------------------------------------------------------------------------------- depth


@pytest.mark.parametrize("depth", [300, 399, 450, 600])
def test_deep_nesting_comes_back(depth: int) -> None:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else (value,)
    got = sent(value)
    for level in reversed(range(depth)):
        assert type(got) is (list if level % 2 else tuple)
        (got,) = got
    assert got == 1


def test_absurd_nesting_is_refused() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(codec.EncodeError, match="recursion"):
        codec.encode(value)
    while isinstance(value, list):
        # Freed level by level: the interpreter itself is slow at the whole.
        (value,) = value


def test_a_value_that_contains_itself_is_pickled_or_refused() -> None:
    value: list[Any] = [1]
    value.append(value)
    got = sent(value)
    assert got[1] is got and got[0] == 1
    keyed: dict[str, Any] = {}
    keyed["self"] = (keyed,)
    got = sent(keyed)
    assert got["self"][0] is got
    with pytest.raises(codec.PickleRefusedError, match="contains itself"):
        codec.encode(value, allow_pickle=False)


# ------------------------------------------------------------------------------- errors


class Holder:
    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda lock: ("f", ({"k": lock},), {}), r"argument args\[0\]\['k'\] of type _thread.lock"),
        (lambda lock: ("f", (1, (2, [lock])), {}), r"argument args\[1\]\[1\]\[0\] of type _thread"),
        (lambda lock: ("f", (), {"x": lock}), r"argument kwargs\['x'\] of type _thread.lock"),
        (lambda lock: ("f", (Holder(lock),), {}), r"args\[0\]\.content of type _thread.lock"),
        (
            lambda lock: ("f", (Holder([1, Holder(lock)]),), {}),
            r"args\[0\]\.content\[1\]\.content of type _thread.lock",
        ),
        (lambda lock: [lock], r"value\[0\] of type _thread.lock"),
        (lambda lock: lock, r"value of type _thread.lock"),
        (lambda lock: {1: {lock}}, r"value\[1\].* of type _thread.lock"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(call: Any, place: str) -> None:
    with pytest.raises(codec.EncodeError, match=place + ".*cannot be pickled: cannot pickle"):
        codec.encode(call(threading.Lock()))


def test_errors_are_type_and_runtime_errors() -> None:
    for kind in (TypeError, RuntimeError):
        with pytest.raises(kind, match="pickle"):
            codec.encode(threading.Lock())


def test_an_error_of_the_values_own_code_is_the_reason() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("not today")

    with pytest.raises(codec.EncodeError, match=r"Stubborn cannot be pickled: not today") as caught:
        codec.encode(("f", (Stubborn(),), {}))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_future_is_refused_in_torchs_words() -> None:
    for value in (torch.futures.Future(), [Holder(torch.futures.Future())]):
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            codec.encode(("f", (value,), {}))


def test_a_failed_encode_leaves_the_next_one_alone() -> None:
    with pytest.raises(codec.EncodeError):
        codec.encode([torch.ones(3000), threading.Lock()])
    assert_same(sent([1, (2,)]), [1, (2,)])


# ------------------------------------------------------------------------------- pickles


def test_lambdas_closures_and_local_classes_travel_by_value() -> None:
    count = 5

    class Local:
        def answer(self) -> int:
            return count

    assert sent(lambda x: x + count)(2) == 7
    assert sent(Local)().answer() == 5
    assert sent([Local()])[0].answer() == 5


def test_exceptions_come_back() -> None:
    error = ValueError("a", 1)
    got = sent(error)
    assert type(got) is ValueError and got.args == ("a", 1)


def test_identity_among_pickled_values_is_kept() -> None:
    shared = Point(1, [])
    first, (second,), holder = sent((shared, (shared,), Holder(shared)))
    assert first is second and holder.content is first


def test_registered_reducers_are_used_for_the_exact_class() -> None:
    class Handle:
        def __init__(self, lock: Any) -> None:
            self.lock = lock

    codec.register_reducer(Handle, lambda handle: (str, ("a handle",)))
    assert sent(("f", (Handle(threading.Lock()), [Handle(1)]), {}))[1] == ("a handle", ["a handle"])
    assert sent(Holder(Handle(threading.Lock()))).content == "a handle"


def test_an_object_that_cannot_be_opened_is_a_decode_error() -> None:
    class Fragile:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    encoded = codec.encode(Fragile())
    with pytest.raises(codec.DecodeError, match="ValueError: invalid literal"):
        codec.decode(encoded.body, encoded.buffers)


def test_pickles_are_refused_before_they_are_opened() -> None:
    class Spy:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit",)

    encoded = codec.encode([Spy()])
    with pytest.raises(codec.PickleRefusedError, match="allow_pickle=False"):
        codec.decode(encoded.body, encoded.buffers, allow_pickle=False)


# ------------------------------------------------------------------------------- references


class Reference:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a Reference by itself")


class Agent:
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_reference(self, rref: Reference) -> Any:
        self.encoded.append(rref.name)
        return ("ref", [rref.name], 2**80, b"id")

    def decode_reference(self, data: Any) -> Any:
        assert data[0] == "ref" and type(data) is tuple and data[2:] == (2**80, b"id")
        return Reference(data[1][0].upper())


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_references_go_through_the_agent(allow_pickle: bool) -> None:
    agent = Agent()
    options = {"hooks": agent, "allow_pickle": allow_pickle}
    value = ("f", (Reference("a"), [Reference("b"), Reference("c")]), {"d": Reference("d")})
    encoded = codec.encode(value, reference_type=Reference, **options)
    got = codec.decode(encoded.body, encoded.buffers, **options)
    assert [got[1][0].name, got[1][1][0].name, got[1][1][1].name, got[2]["d"].name] == list("ABCD")
    assert agent.encoded == list("abcd")


def test_references_inside_pickled_objects_go_through_the_agent() -> None:
    agent = Agent()
    value = [Holder(Reference("a")), lambda: Reference, {Pair(1, 2): Reference("b")}]
    encoded = codec.encode(value, hooks=agent, reference_type=(Reference,))
    got = codec.decode(encoded.body, encoded.buffers, hooks=agent)
    assert got[0].content.name == "A" and got[2][Pair(1, 2)].name == "B"


def test_a_reference_without_an_agent_is_refused() -> None:
    with pytest.raises(codec.EncodeError, match="no agent"):
        codec.encode([Reference("a")], reference_type=Reference)
    encoded = codec.encode([Reference("a")], reference_type=Reference, hooks=Agent())
    with pytest.raises(codec.DecodeError, match="no agent"):
        codec.decode(encoded.body, encoded.buffers)


def test_an_error_of_the_agent_is_passed_on() -> None:
    class Dead(Agent):
        def decode_reference(self, data: Any) -> Any:
            raise ConnectionRefusedError("owner died")  # not a RuntimeError

    class Lost(Agent):
        def decode_reference(self, data: Any) -> Any:
            raise RuntimeError("owner died")

    for value in (Reference("a"), Holder(Reference("a"))):
        encoded = codec.encode(value, reference_type=Reference, hooks=Agent())
        with pytest.raises(RuntimeError, match=r"^owner died$") as caught:
            codec.decode(encoded.body, encoded.buffers, hooks=Lost())
        assert type(caught.value) is RuntimeError
        with pytest.raises(codec.DecodeError, match="owner died"):
            codec.decode(encoded.body, encoded.buffers, hooks=Dead())


# ------------------------------------------------------------------------------- __main__

MAIN = """
import multiprocessing, pickle, sys
from zrpc import codec

class Thing:
    def __init__(self, n): self.n = n
def double(x): return 2 * x

def child(pipe):
    encoded = pipe.recv()
    thing, function = codec.decode(encoded.body, encoded.buffers)
    assert type(thing) is Thing and function is double, (thing, function)
    pipe.send(codec.encode((Thing(function(thing.n)), double)))
    pipe.send(codec.encode(double, main_by_value=True))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    ours.send(codec.encode((Thing(4), double)))
    encoded = ours.recv()
    thing, function = codec.decode(encoded.body, encoded.buffers)
    assert type(thing) is Thing and thing.n == 8 and function is double
    by_value = ours.recv()
    copy = codec.decode(by_value.body, by_value.buffers)
    assert copy is not double and copy(5) == 10
    process.join()
    with open(sys.argv[1], "wb") as file:
        pickle.dump([codec.encode(double), codec.encode(double, main_by_value=True)], file)
"""


def test_functions_of_main_go_by_name_or_by_value(tmp_path: Any) -> None:
    script, result = tmp_path / "train.py", tmp_path / "result"
    script.write_text(MAIN)
    subprocess.run([sys.executable, str(script), str(result)], check=True, timeout=60)
    import pickle

    by_name, by_value = pickle.loads(result.read_bytes())
    with pytest.raises(codec.DecodeError, match="double"):
        codec.decode(by_name.body, by_name.buffers)
    assert codec.decode(by_value.body, by_value.buffers)(4) == 8
