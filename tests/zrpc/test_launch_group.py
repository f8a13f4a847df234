"""What a supervisor decides about its children, without any process."""

from __future__ import annotations

import signal

import pytest

from zrpc.launch.backoff import Backoff
from zrpc.launch.group import (
    DRAIN_SLACK,
    HELPER_GRACE,
    INTERRUPT_GRACE,
    INTERRUPT_PATIENCE,
    TERMINATE_GRACE,
    Finish,
    Group,
    Ranks,
    Say,
    Signal,
    Start,
    Workers,
)

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def started(group: Group, count: int, now: float = 0.0) -> None:
    assert group.begin(now) == [Start(index) for index in range(count)]
    for index in range(count):
        group.started(index, 100 + index, now)


def ranks(count: int) -> Ranks:
    group = Ranks("rank", [str(rank) for rank in range(count)])
    started(group, count)
    return group


def workers(count: int, **options: bool | float) -> Workers:
    group = Workers("worker", [f"w-{number}" for number in range(count)], **options)  # type: ignore[arg-type]
    started(group, count)
    return group


# ------------------------------------------------------------------ pauses


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff()
    pauses = []
    for _ in range(9):
        backoff.started(now=5.0)
        pauses.append(backoff.ended(now=6.0))
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


def test_a_life_of_thirty_seconds_starts_the_pauses_over() -> None:
    backoff = Backoff()
    for lived in (0.0, 29.9):
        backoff.started(now=0.0)
        backoff.ended(now=lived)
    backoff.started(now=0.0)
    assert backoff.ended(now=30.0) == 0.1
    backoff.started(now=0.0)
    assert backoff.ended(now=0.0) == 0.2


# ------------------------------------------------------------------ ranks


def test_ranks_that_all_end_well_end_the_run_with_0() -> None:
    group = ranks(2)
    assert group.ended(0, 0, now=1.0) == []
    assert group.ended(1, 0, now=2.0) == [Finish(0)]


def test_the_first_rank_that_fails_ends_all_with_its_code() -> None:
    group = ranks(3)
    assert group.ended(1, 3, now=1.25) == [
        Say("rank 1 (pid 101) ended with code 3 after 1.2 s; the others were stopped"),
        Signal(0, TERM),
        Signal(2, TERM),
    ]
    assert group.next_wake() == 1.25 + TERMINATE_GRACE
    assert group.ended(0, -TERM, now=1.3) == []
    assert group.due(now=1.25 + TERMINATE_GRACE) == [Signal(2, KILL)]
    assert group.ended(2, -KILL, now=3.3) == [Finish(3)]


def test_a_rank_killed_by_a_signal_gives_128_and_the_signal() -> None:
    group = ranks(1)
    assert group.ended(0, -11, now=2.0) == [
        Say("rank 0 (pid 100) was killed by SIGSEGV after 2.0 s"),
        Finish(139),
    ]


def test_ranks_to_which_the_terminal_sent_ctrl_c_are_left_to_clean_up_first() -> None:
    group = ranks(2)
    assert group.interrupt(now=1.0, delivered=True) == []
    assert group.due(now=1.0 + INTERRUPT_PATIENCE) == [Signal(0, TERM), Signal(1, TERM)]
    assert group.ended(0, -INT, now=2.0) == []
    assert group.due(now=1.0 + INTERRUPT_GRACE) == [Signal(1, KILL)]
    assert group.ended(1, -KILL, now=2.6) == [Finish(130)]


def test_a_sigint_to_the_supervisor_alone_is_passed_on() -> None:
    group = ranks(1)
    assert group.interrupt(now=1.0, delivered=False) == [Signal(0, INT)]


def test_a_second_ctrl_c_kills_at_once() -> None:
    group = ranks(1)
    group.interrupt(now=1.0, delivered=True)
    assert group.interrupt(now=1.1, delivered=True) == [Signal(0, KILL)]
    assert group.ended(0, -KILL, now=1.2) == [Finish(130)]


def test_ranks_are_terminated_by_sigterm_and_killed_by_a_second() -> None:
    group = ranks(1)
    assert group.terminate(now=1.0) == [Signal(0, TERM)]
    assert group.terminate(now=1.1) == [Signal(0, TERM), Signal(0, KILL)]
    assert group.ended(0, -KILL, now=1.2) == [Finish(143)]


def test_output_that_nobody_reads_ends_the_ranks_once() -> None:
    group = ranks(1)
    assert group.abandon(141, now=1.0) == [Signal(0, TERM)]
    assert group.abandon(141, now=1.1) == []
    assert group.ended(0, 0, now=1.2) == [Finish(141)]


# ------------------------------------------------------------------ the broker of a run


def run_with_broker() -> Ranks:
    group = Ranks("rank", ["0", "broker"], helper=True)
    group.started(1, 55, now=0.0)
    assert group.begin(now=0.0) == [Start(0)]
    group.started(0, 100, now=0.0)
    return group


def test_the_broker_ends_after_the_last_rank() -> None:
    group = run_with_broker()
    assert group.ended(0, 0, now=1.0) == [Signal(1, TERM)]
    assert group.due(now=1.0 + HELPER_GRACE) == [Signal(1, KILL)]
    assert group.ended(1, -KILL, now=2.1) == [Finish(0)]


def test_a_failed_rank_leaves_the_broker_until_the_others_have_ended() -> None:
    group = Ranks("rank", ["0", "1", "broker"], helper=True)
    started(group, 3)
    assert group.ended(0, 7, now=1.0)[1:] == [Signal(1, TERM)]
    assert group.ended(1, -TERM, now=1.1) == [Signal(2, TERM)]
    assert group.ended(2, 0, now=1.2) == [Finish(7)]


def test_a_broker_that_dies_is_started_again() -> None:
    group = run_with_broker()
    assert group.ended(1, -KILL, now=3.0) == [
        Say("broker (pid 55) was killed by SIGKILL after 3.0 s; it is started again in 0.1 s")
    ]
    assert group.due(now=3.05) == []
    assert group.due(now=group.next_wake() or 0.0) == [Start(1)]


def test_a_run_ends_where_the_broker_is_dead() -> None:
    group = run_with_broker()
    group.ended(1, -KILL, now=3.0)
    assert group.ended(0, 0, now=3.05) == [Finish(0)]
    assert group.next_wake() is None


# ------------------------------------------------------------------ workers


def test_a_worker_that_could_not_serve_ends_all_with_1() -> None:
    group = workers(2, restart=True)
    assert group.ended(1, 1, now=0.5) == [
        Say(
            "worker w-1 (pid 101) ended with code 1 after 0.5 s, before it could serve; "
            "the others were stopped"
        ),
        Signal(0, INT),
    ]
    assert group.ended(0, 130, now=0.6) == [Finish(1)]


def test_a_dead_worker_is_started_again_where_asked() -> None:
    group = workers(2, restart=True)
    group.ready(0)
    assert group.ended(0, -KILL, now=2.0) == [
        Say("worker w-0 (pid 100) was killed by SIGKILL after 2.0 s; it is started again in 0.1 s")
    ]
    assert group.due(now=2.1) == [Start(0)]


def test_a_restarted_worker_that_cannot_serve_yet_is_tried_again() -> None:
    group = workers(1, restart=True)
    group.ready(0)
    group.ended(0, -KILL, now=1.0)
    assert group.due(now=1.1) == [Start(0)]
    group.started(0, 200, now=1.1)
    assert group.ended(0, 1, now=1.5) == [
        Say("worker w-0 (pid 200) ended with code 1 after 0.4 s; it is started again in 0.2 s")
    ]


def test_without_restart_the_others_go_on_and_the_code_tells() -> None:
    group = workers(2)
    group.ready(0)
    group.ready(1)
    assert group.ended(0, -KILL, now=2.0) == [
        Say(
            "worker w-0 (pid 100) was killed by SIGKILL after 2.0 s; "
            "the others go on (with --restart it would be started again)"
        )
    ]
    assert group.ended(1, 1, now=3.0)[-1] == Finish(137)


def test_sigterm_drains_and_ends_with_0() -> None:
    group = workers(2, drain=10.0)
    assert group.terminate(now=1.0) == [Signal(0, TERM), Signal(1, TERM)]
    assert group.next_wake() == 11.0 + DRAIN_SLACK
    assert group.ended(0, 0, now=2.0) == []
    assert group.ended(1, 0, now=3.0) == [Finish(0)]


def test_a_worker_whose_calls_did_not_end_while_draining_gives_1() -> None:
    group = workers(2, drain=10.0)
    group.terminate(now=1.0)
    group.ended(0, 1, now=11.0)
    assert group.ended(1, 0, now=11.1) == [Finish(1)]


def test_nobody_is_started_again_while_draining() -> None:
    group = workers(2, restart=True)
    group.ready(0)
    group.ended(0, -KILL, now=1.0)
    group.terminate(now=1.05)
    assert group.due(now=2.0) == []


def test_a_second_sigterm_ends_workers_at_once() -> None:
    group = workers(1)
    group.terminate(now=1.0)
    assert group.terminate(now=2.0) == [Signal(0, INT)]
    assert group.due(now=2.0 + INTERRUPT_GRACE) == [Signal(0, KILL)]
    assert group.ended(0, -KILL, now=4.0) == [Finish(143)]


def test_ctrl_c_while_draining_ends_workers_at_once() -> None:
    group = workers(1)
    group.terminate(now=1.0)
    assert group.interrupt(now=2.0, delivered=True) == [Signal(0, INT)]
    assert group.ended(0, 130, now=2.1) == [Finish(130)]


def test_stopping_is_over_at_once_where_all_wait_for_their_restart() -> None:
    group = workers(1, restart=True)
    group.ready(0)
    group.ended(0, -KILL, now=1.0)
    assert group.terminate(now=1.05) == [Finish(0)]
