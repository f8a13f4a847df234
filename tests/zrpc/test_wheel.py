"""The timing wheel against a plain sorted list, with a clock that is a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.wheel import TimingWheel

TICK = 0.01


class SortedTimers:
    """The same by the simplest means: what the wheel is held against."""

    def __init__(self) -> None:
        self.timers: dict[int, float] = {}

    def due(self, now: float) -> set[int]:
        found = {key for key, deadline in self.timers.items() if deadline <= now}
        for key in found:
            del self.timers[key]
        return found


delays = st.one_of(
    st.floats(-1, 3),
    st.floats(0, 700),
    st.floats(0, 2e5),
    st.floats(0, 5e8),
    st.integers(0, 700).map(lambda n: n * TICK),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 20), delays),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0.0)),
        st.tuples(
            st.just("advance"),
            st.just(0),
            st.one_of(st.floats(0, 0.05), st.floats(0, 5), st.floats(0, 1000), st.floats(0, 1e6)),
        ),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(st.floats(0, 1e6), operations)
def test_it_expires_what_a_sorted_list_expires_never_early_and_at_most_a_tick_late(
    start: float, steps: list[tuple[str, int, float]]
) -> None:
    wheel, model, now = TimingWheel(start, TICK), SortedTimers(), start
    for action, key, value in steps:
        if action == "add":
            wheel.add(key, now + value)
            model.timers[key] = now + value
        elif action == "cancel":
            assert wheel.cancel(key) == (model.timers.pop(key, None) is not None)
        else:
            now += value
            expired = wheel.advance(now)
            assert len(expired) == len(set(expired))
            for expired_key in expired:
                assert model.timers[expired_key] <= now, "expired early"  # type: ignore[index]
                del model.timers[expired_key]  # type: ignore[arg-type]
            # A tick for rounding up, one more where the timer was set in the running tick.
            late = [k for k, deadline in model.timers.items() if deadline <= now - 2 * TICK - 1e-6]
            assert not late, "more than a tick late"
        assert len(wheel) == len(model.timers)
        wake = wheel.next_wake()
        assert (wake is None) == (not model.timers)
        if wake is not None:
            earliest = max(min(model.timers.values()), now)
            assert wake <= earliest + 2 * TICK + 1e-6, "it would sleep past a deadline"
    now += 1e9
    assert set(wheel.advance(now)) == set(model.timers)
    assert len(wheel) == 0 and wheel.next_wake() is None


def test_timers_are_returned_earliest_first() -> None:
    wheel = TimingWheel(0.0, TICK)
    for key, deadline in enumerate([500.0, 3.0, 0.02, 70000.0, 2.56, 655.36]):
        wheel.add(key, deadline)
    assert wheel.advance(1e6) == [2, 4, 1, 0, 5, 3]


def test_a_timer_added_again_is_moved() -> None:
    wheel = TimingWheel(0.0, TICK)
    wheel.add("a", 1.0)
    wheel.add("a", 2.0)
    assert wheel.advance(1.5) == [] and len(wheel) == 1 and "a" in wheel
    assert wheel.advance(2.5) == ["a"]


def test_cancelling_leaves_nothing_behind() -> None:
    wheel = TimingWheel(0.0, TICK)
    for key in range(10_000):
        wheel.add(key, key * 7.3)
    for key in range(10_000):
        assert wheel.cancel(key)
    assert not wheel.cancel(0)
    assert len(wheel) == 0 and wheel.next_wake() is None
    assert not any(slot for level in wheel._slots for slot in level)


def test_a_wheel_that_was_empty_for_long_goes_on_at_once() -> None:
    wheel = TimingWheel(0.0, TICK)
    assert wheel.advance(1e8) == []
    wheel.add("a", 1e8 + 0.5)
    assert wheel.advance(1e8 + 0.49) == []
    assert wheel.advance(1e8 + 0.52) == ["a"]


def test_what_is_past_is_due_at_the_next_tick() -> None:
    wheel = TimingWheel(100.0, TICK)
    wheel.add("a", 5.0)
    assert wheel.advance(100.0 + 2 * TICK) == ["a"]


@pytest.mark.parametrize("tick", [0.001, 0.01, 0.1])
def test_deadlines_are_rounded_up_to_a_tick(tick: float) -> None:
    wheel = TimingWheel(0.0, tick)
    wheel.add("a", 10.3 * tick)
    assert wheel.advance(math.nextafter(11 * tick, 0)) == []
    assert wheel.advance(11 * tick + 1e-9) == ["a"]
