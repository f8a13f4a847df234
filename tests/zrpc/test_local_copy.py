"""Handles to copies that are on their way: what is recorded, in which order, what waits."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # before 3.11 one of its own
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.errors import RpcTimeoutError
from zrpc.local_copy import LocalCopy


class Fetch(Future):  # type: ignore[type-arg]
    """A future with the methods of ours."""

    def wait(self, timeout: float | None = None) -> Any:
        try:
            return self.result(timeout)
        except FutureTimeoutError as error:
            if self.done():  # the error that was set
                raise
            raise RpcTimeoutError("not there", worker="ps", limit=timeout) from error


class Box:
    """Something with attributes and methods."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def add(self, item: Any) -> Box:
        self.items.append(item)
        return self

    def fail(self) -> None:
        raise KeyError("no luck")


def pending() -> tuple[Fetch, LocalCopy]:
    fetch = Fetch()
    return fetch, LocalCopy(fetch)


def arrived(value: Any) -> LocalCopy:
    fetch, handle = pending()
    fetch.set_result(value)
    return handle


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


# What is recorded -----------------------------------------------------------------------


def test_what_is_done_with_a_handle_is_applied_to_the_copy_that_arrives_later() -> None:
    fetch, v = pending()
    row = v.view(1, 4)
    root = v.pow(0.5)
    double = v + v
    fetch.set_result(torch.full((4,), 9.0))
    assert row.wait().tolist() == [[9.0] * 4]
    assert root.wait().tolist() == [3.0] * 4
    assert double.wait().tolist() == [18.0] * 4
    assert v.wait().tolist() == [9.0] * 4


def test_an_attribute_assignment_reads_the_attribute_before_it_writes_it() -> None:
    fetch, v = pending()
    before = v.tensor
    v.tensor = v.tensor + 1
    v.tensor += 1
    fetch.set_result(Box(tensor=torch.ones(2)))
    assert v.wait().tensor.tolist() == [3.0, 3.0]
    # "+=" is in place for tensors, and what it changed was the sum, not what was there first.
    assert before.wait().tolist() == [1.0, 1.0]


def test_steps_run_in_the_order_written_whichever_handle_is_waited_for() -> None:
    fetch, v = pending()
    flat = v.view(4)
    early = v + 0
    v.add_(1)
    flat.mul_(2)  # shares its memory with v
    late = v + 0
    fetch.set_result(torch.zeros(2, 2))
    assert late.wait().tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert early.wait().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert v.wait().tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_method_whose_result_nobody_keeps_still_runs() -> None:
    fetch, v = pending()
    v.items.append(1)
    v.add(2).add(3)
    gc.collect()
    fetch.set_result(Box(items=[]))
    assert v.wait().items == [1, 2, 3]


def test_items_are_read_assigned_and_deleted() -> None:
    fetch, v = pending()
    first = v["a"]
    v["a"] = 10
    v["b"] += 1
    del v["c"]
    fetch.set_result({"a": 1, "b": 2, "c": 3})
    assert v.wait() == {"a": 10, "b": 3}
    assert first.wait() == 1
    v = arrived(Box(x=1, y=2))
    del v.x
    assert vars(v.wait()) == {"y": 2}


def test_plus_equals_leaves_an_immutable_value_of_another_handle_alone() -> None:
    fetch, h = pending()
    other = h
    h += 5
    fetch.set_result(1)
    assert (h.wait(), other.wait()) == (6, 1)


def test_what_is_recorded_after_a_wait_is_applied_by_the_next_one() -> None:
    v = arrived(torch.zeros(2))
    value = v.wait()
    v.add_(1)
    assert value.tolist() == [0.0, 0.0]
    assert v.wait() is value
    assert value.tolist() == [1.0, 1.0]


def test_a_callable_copy_is_called_with_keywords() -> None:
    fetch, v = pending()
    result = v("10", base=2)
    fetch.set_result(int)
    assert result.wait() == 2


OPERATORS: list[tuple[Callable[[Any, Any], Any], Any, Any]] = [
    *(
        (op, 13, 3)
        for op in (
            operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv,
            operator.mod, divmod, operator.pow, operator.lshift, operator.rshift, operator.and_,
            operator.xor, operator.or_, operator.eq, operator.ne, operator.lt, operator.le,
            operator.gt, operator.ge, operator.iadd, operator.isub, operator.imul,
            operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
            operator.ilshift, operator.irshift, operator.iand, operator.ixor, operator.ior,
        )
    ),
    (operator.matmul, torch.eye(2) * 3, torch.ones(2, 2)),
    (operator.imatmul, numpy.eye(2) * 3, numpy.ones((2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "left", "right"), OPERATORS, ids=lambda op: getattr(op, "__name__", "")
)
def test_binary_operators_give_handles_on_either_side(op: Any, left: Any, right: Any) -> None:
    expected = op(copy.copy(left), right)
    cases = [(arrived(copy.copy(left)), right), (arrived(copy.copy(left)), arrived(right))]
    if not isinstance(left, numpy.ndarray):  # whose own "@=" has to be done at once
        cases.append((copy.copy(left), arrived(right)))
    for one, two in cases:
        result = op(one, two)
        assert type(result) is LocalCopy
        assert numpy.array_equal(numpy.asarray(result.wait()), numpy.asarray(expected))


def test_unary_operators_and_rounding_give_handles() -> None:
    import math

    for function in (operator.neg, operator.pos, abs, operator.invert):
        result = function(arrived(-5))
        assert type(result) is LocalCopy
        assert result.wait() == function(-5)
    for function in (round, math.floor, math.ceil, math.trunc):
        assert function(arrived(-2.5)).wait() == function(-2.5)  # type: ignore[attr-defined]
    assert round(arrived(2.345), 1).wait() == 2.3  # type: ignore[attr-defined]


def test_handles_inside_containers_among_the_arguments_are_resolved() -> None:
    one, two, begin = arrived(torch.ones(2)), arrived(torch.zeros(2)), arrived(1)
    assert torch.cat([one, two]).wait().tolist() == [1.0, 1.0, 0.0, 0.0]
    assert arrived([1, 2, 3])[begin:].wait() == [2, 3]
    seen = arrived(lambda *args, **kwargs: (args, kwargs))((begin, {"k": [begin]}), key=begin)
    assert seen.wait() == (((1, {"k": [1]}),), {"key": 1})


def test_an_argument_without_handles_stays_the_very_object() -> None:
    mine: list[Any] = [[1]]
    mine.append(mine)
    v = arrived([])
    v.append(mine)
    assert v.wait()[0] is mine


def test_torch_functions_are_recorded() -> None:
    fetch, h = pending()
    results = [torch.add(h, 1), torch.relu(h), torch.ones(2) + h, torch.stack([h, h]).sum(0)]
    assert all(type(result) is LocalCopy for result in results)
    linear = torch.nn.functional.linear(h, torch.ones(1, 2))
    fetch.set_result(torch.tensor([-1.0, 2.0]))
    expected = [[0.0, 3.0], [0.0, 2.0], [0.0, 3.0], [-2.0, 4.0]]
    assert [result.wait().tolist() for result in results] == expected
    assert linear.wait().tolist() == [1.0]


def test_a_tensor_of_the_callers_own_is_changed_at_once() -> None:
    h = arrived(torch.ones(2))
    mine = torch.zeros(2)
    mine += h
    mine.add_(h)
    assert mine.tolist() == [2.0, 2.0]
    mine[0] = arrived(7)
    assert mine.tolist() == [7.0, 2.0]
    out = torch.empty(2)
    assert torch.add(h, 1, out=out) is out
    assert out.tolist() == [2.0, 2.0]


def test_steps_run_in_the_gradient_mode_in_which_they_were_written() -> None:
    fetch, h = pending()
    with torch.no_grad():
        without = h * 2
    within = h * 2
    fetch.set_result(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        assert within.wait().requires_grad
    assert not without.wait().requires_grad


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "item", "sum", "copy", "nest", "iadd"]),
            st.integers(0, 5),
            st.integers(0, 5),
        ),
        max_size=12,
    ),
    st.permutations(range(6)),
)
def test_any_program_gives_what_it_gives_on_the_values(
    program: list[tuple[str, int, int]], order: list[int]
) -> None:
    def run(lists: list[Any]) -> list[Any]:
        for kind, left, right in program:
            a, b = lists[left % len(lists)], lists[right % len(lists)]
            if kind == "append":
                a.append(left)
            elif kind == "item":
                a[0] = right
            elif kind == "sum":
                lists.append(a + b)
            elif kind == "copy":
                lists.append(a[:])
            elif kind == "nest":
                a.append(b)
                lists.append(a[len_of(a) - 1])
            else:
                a += b
        return lists

    def len_of(a: Any) -> Any:
        return a.__len__() if isinstance(a, list) else arrived(len).__call__(a)

    expected = run([[1], [2, 3]])
    fetches = [pending() for _ in range(2)]
    handles = run([handle for _, handle in fetches])
    for (fetch, _), value in zip(fetches, ([1], [2, 3]), strict=True):
        fetch.set_result(value)
    got: dict[int, Any] = {i: handles[i].wait() for i in order if i < len(handles)}
    got.update({i: handles[i].wait() for i in range(len(handles))})
    # Compared as text, since a list may have come to hold itself.
    assert [repr(got[i]) for i in range(len(handles))] == [repr(value) for value in expected]


# What waits, and what does not ------------------------------------------------------------


def test_python_protocols_that_want_a_real_answer_wait_for_it() -> None:
    numbers, three = arrived([1, 2, 3]), arrived(3)
    assert (len(numbers), list(numbers), list(reversed(numbers))) == (3, [1, 2, 3], [3, 2, 1])
    one, *_ = numbers
    assert one == 1
    assert 2 in numbers
    assert three in [1, 2, 3]
    assert (int(three), float(three), complex(three), bool(three)) == (3, 3.0, 3 + 0j, True)
    assert not arrived([])
    assert ["a", "b", "c", "d"][three] == "d"
    assert f"{three:03d}" == "003"
    assert bytes(arrived([65])) == b"A"


def test_numpy_and_torch_take_a_handle_for_an_array() -> None:
    h = arrived(torch.ones(2))
    assert numpy.asarray(h, dtype="int64").tolist() == [1, 1]
    assert numpy.add(h, 1).tolist() == [2.0, 2.0]
    assert torch.as_tensor(h).tolist() == [1.0, 1.0]
    assert type(numpy.ones(2) + arrived(numpy.ones(2))) is LocalCopy


def test_repr_never_waits() -> None:
    fetch, h = pending()
    step = h.view(4)
    assert "not fetched yet" in repr(h)
    assert ".view(...) not run yet" in repr(step)
    assert f"{h}" == str(h) == repr(h)
    fetch.set_result(torch.zeros(4))
    step.wait()
    assert "of type Tensor" in repr(step)
    failed = arrived(1).nope
    with pytest.raises(AttributeError):
        failed.wait()
    assert "failed with AttributeError" in repr(failed)


def test_a_handle_is_hashed_by_identity() -> None:
    _, one = pending()
    _, two = pending()
    assert {one: 1, two: 2}[two] == 2


def test_special_names_are_not_made_up() -> None:
    _, h = pending()
    for name in ("__array_interface__", "__cuda_array_interface__", "__dict__", "__len_hint__"):
        with pytest.raises(AttributeError, match="wait"):
            getattr(h, name)


@pytest.mark.parametrize("name", ["wait", "done", "_zrpc_step", "__class__"])
def test_own_names_cannot_be_assigned_or_deleted(name: str) -> None:
    h = arrived(Box())
    with pytest.raises(AttributeError, match=r"handle\.wait\(\)"):
        setattr(h, name, 1)
    with pytest.raises(AttributeError, match=r"handle\.wait\(\)"):
        delattr(h, name)
    assert vars(h.wait()) == {}


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_or_copying_a_handle_says_the_remedy(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"Call \.wait\(\) first"):
        use(arrived(1))


def test_a_handle_is_done_once_nothing_has_to_be_waited_for() -> None:
    fetch, h = pending()
    total = h + 1
    assert not h.done()
    assert not total.done()
    fetch.set_result(1)
    assert total.done()
    assert total.wait() == 2
    failed, h = pending()
    failed.set_exception(ValueError("x"))
    assert h.done()


# Timeouts ---------------------------------------------------------------------------------


def test_a_wait_that_times_out_may_be_followed_by_one_that_succeeds() -> None:
    fetch, h = pending()
    total = h + 1
    begin = time.monotonic()
    with pytest.raises(RpcTimeoutError, match=r"from worker 'ps' timed out after 50 ms") as caught:
        total.wait(timeout=0.05)
    assert time.monotonic() - begin >= 0.05
    assert caught.value.limit == 0.05
    with pytest.raises(TimeoutError):
        total.wait(0)
    fetch.set_result(1)
    assert total.wait(0) == 2


def test_a_timeout_of_the_fetch_itself_is_final() -> None:
    fetch, h = pending()
    error = RpcTimeoutError("RPC ran for more than set timeout (50 ms)", worker="ps")
    fetch.set_exception(error)
    for timeout in (5, None, 5):
        with pytest.raises(RpcTimeoutError) as caught:
            h.wait(timeout)
        assert caught.value is error


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_bad_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be"):
        arrived(1).wait(timeout)


def test_a_wait_times_out_while_another_thread_runs_a_long_step() -> None:
    started, go = threading.Event(), threading.Event()

    def slow() -> int:
        started.set()
        assert go.wait(30)
        return 5

    result = arrived(slow)()
    thread = threading.Thread(target=result.wait)
    thread.start()
    try:
        assert started.wait(30)
        assert not result.done()
        with pytest.raises(RpcTimeoutError, match="step"):
            result.wait(0.05)
    finally:
        go.set()
        thread.join()
    assert result.wait() == 5


# Errors -----------------------------------------------------------------------------------


def test_an_error_names_its_step_and_line_and_comes_at_every_wait() -> None:
    h = arrived(torch.zeros(3))
    bad = h.view(2, 2)  # the line that the note shows
    further = (bad + 1).sum()
    with pytest.raises(RuntimeError, match="invalid for input") as first:
        further.wait()
    with pytest.raises(RuntimeError) as second:
        bad.wait()
    assert second.value is first.value
    note = notes_of(first.value)
    assert ".view(...)" in note
    assert "bad = h.view(2, 2)  # the line that the note shows" in note
    assert __file__ in note
    assert note.count("Raised by") == 1
    # A view changes nothing, so that the tensor itself is as good as before.
    assert h.wait().tolist() == [0.0, 0.0, 0.0]


def test_the_traceback_does_not_grow_with_each_wait() -> None:
    bad = arrived(1) + "a"
    lengths = []
    for _ in range(5):
        with pytest.raises(TypeError) as caught:
            bad.wait()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.fail(),
        lambda v: v.items.pop(),
        lambda v: setattr(v, "frozen", 1),
        lambda v: operator.setitem(v.items, 0, 1),
        lambda v: operator.delitem(v.items, 0),
        lambda v: operator.iadd(v.number, "a"),
        lambda v: v.tensor.add_("a"),
        lambda v: torch.relu_(v.number),
    ],
)
def test_a_change_that_fails_is_raised_by_the_handle_it_was_made_on(change: Any) -> None:
    class Careful(Box):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError("frozen")

    fetch, v = pending()
    before = v.number + 0
    change(v)
    gc.collect()
    after = v.number
    fetch.set_result(Careful(items=[], number=1, tensor=torch.zeros(1)))
    with pytest.raises((KeyError, IndexError, AttributeError, TypeError)) as caught:
        v.wait()
    assert "Raised by the step" in notes_of(caught.value)
    with pytest.raises(type(caught.value)):
        after.wait()
    assert before.wait() == 1


def test_a_read_that_fails_spoils_nothing_else() -> None:
    v = arrived([1])
    missing, far, wrong = v.nope, v[7], v + 1
    for bad, kind in ((missing, AttributeError), (far, IndexError), (wrong, TypeError)):
        with pytest.raises(kind):
            bad.wait()
    assert v.wait() == [1]


def test_a_failing_copy_does_not_spoil_one_that_it_met() -> None:
    one, two = arrived([1]), arrived([2])
    both = one + two
    one.remove(7)
    with pytest.raises(ValueError, match="not in list"):
        one.wait()
    assert two.wait() == [2]
    assert both.wait() == [1, 2]


def test_an_error_of_the_fetch_is_raised_by_all_that_came_of_it() -> None:
    fetch, h = pending()
    ok = arrived(1)
    total = ok + h
    fetch.set_exception(ValueError("owner said no"))
    for handle in (h, total, h.x.y):
        with pytest.raises(ValueError, match="owner said no") as caught:
            handle.wait()
    assert "local_value()" in notes_of(caught.value)
    assert ok.wait() == 1


def test_a_step_that_is_interrupted_is_not_run_again() -> None:
    runs = []

    def interrupted() -> None:
        runs.append(1)
        raise KeyboardInterrupt

    result = arrived(interrupted)()
    with pytest.raises(KeyboardInterrupt):
        result.wait()
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        result.wait()
    assert runs == [1]


def test_a_step_that_waits_for_its_own_result_is_told_so() -> None:
    results: list[LocalCopy] = []
    results.append(arrived(lambda: results[0].wait())())
    with pytest.raises(RuntimeError, match="waits for a value that needs this step"):
        results[0].wait(5)


# Threads, and many steps --------------------------------------------------------------------


def test_each_step_runs_once_however_many_threads_wait() -> None:
    fetch, v = pending()
    parts = []
    for n in range(50):
        v.append(n)
        parts.append(v[n])
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(v.wait(30))) for _ in range(4)]
    threads += [
        threading.Thread(target=lambda part=part: results.append(part.wait(30)))
        for part in parts[:4]
    ]
    for thread in threads:
        thread.start()
    fetch.set_result([])
    for thread in threads:
        thread.join()
    assert v.wait() == list(range(50))
    assert [part.wait() for part in parts] == list(range(50))
    assert len(results) == 8


def test_copies_that_meet_while_threads_wait_do_not_block_each_other() -> None:
    for _ in range(30):
        one_fetch, one = pending()
        two_fetch, two = pending()
        ends: list[Any] = []

        def use(a: LocalCopy, b: LocalCopy, ends: list[Any] = ends) -> None:
            for n in range(10):
                a.append(n)
                ends.append((a + b).wait(30))

        threads = [threading.Thread(target=use, args=pair) for pair in ((one, two), (two, one))]
        for thread in threads:
            thread.start()
        one_fetch.set_result([])
        two_fetch.set_result([])
        for thread in threads:
            thread.join()
        assert len(ends) == 20
        assert one.wait() == two.wait() == list(range(10))


def test_copies_that_never_meet_do_not_wait_for_each_other() -> None:
    _, never = pending()
    never.append(1)
    assert (arrived(1) + 1).wait(5) == 2


def test_long_chains_run_and_are_let_go_of_without_recursion() -> None:
    fetch, h = pending()
    for _ in range(20_000):
        h += 1
    fetch.set_result(0)
    assert h.wait() == 20_000
    _, unused = pending()
    for _ in range(20_000):
        unused = unused[0]
    del unused


def test_values_that_nobody_can_wait_for_any_more_are_freed() -> None:
    class Value:
        def next(self) -> Value:
            return Value()

    first = Value()
    gone = weakref.ref(first)
    h = arrived(first)
    del first
    for _ in range(3):
        h = h.next()
        h.wait()
    gc.collect()
    assert gone() is None


def test_a_handle_that_is_changed_over_and_over_keeps_no_trace_of_each_change() -> None:
    h = arrived(0)
    sizes = []
    for _ in range(2):
        for _ in range(200):
            h += 1
            h.wait()
        gc.collect()
        sizes.append(sum(type(thing).__module__ == "zrpc.recording" for thing in gc.get_objects()))
    assert sizes[1] - sizes[0] < 20
