"""The leader-and-followers pool, driven by a fake socket (a queue)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from zrpc.errors import BusyError
from zrpc.pool import HandlerPool, PoolClosed, Work

LIMIT = 10.0


class Wire:
    """Stands for the receiving socket: works in, one a read."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Work | None] = queue.Queue()
        self.readers = 0
        self.most_readers = 0
        self.closed = threading.Event()

    def read(self) -> list[Work]:
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        try:
            work = self.queue.get()
        finally:
            self.readers -= 1
        if work is None:
            self.queue.put(None)
            raise PoolClosed
        return [work]

    def request(self, run: Callable[[], object]) -> None:
        self.queue.put(Work(run, True))

    def callback(self, run: Callable[[], object]) -> None:
        self.queue.put(Work(run, False))


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Wire, HandlerPool]]]:
    started = []

    def make(limit: int, **options: int) -> tuple[Wire, HandlerPool]:
        wire = Wire()
        pool = HandlerPool(wire.read, limit, closed=wire.closed.set, **options)
        pool.start()
        started.append((wire, pool))
        return wire, pool

    yield make
    for wire, pool in started:
        wire.queue.put(None)
        assert pool.close(LIMIT) == []
        assert wire.closed.wait(LIMIT)


def test_each_work_runs_once_and_one_thread_reads_at_a_time(start) -> None:
    wire, _ = start(4)
    seen = []
    done = threading.Event()

    def work(number: int) -> None:
        seen.append(number)
        if len(seen) == 500:
            done.set()

    for number in range(500):
        wire.request(lambda number=number: work(number))
    assert done.wait(LIMIT)
    assert sorted(seen) == list(range(500))
    assert wire.most_readers == 1


def test_never_more_handlers_than_the_limit_run_at_once(start) -> None:
    wire, _ = start(3)
    running = most = ended = 0
    lock = threading.Lock()
    gate = threading.Event()
    all_ended = threading.Event()

    def work() -> None:
        nonlocal running, most, ended
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                gate.set()
        assert gate.wait(LIMIT)
        with lock:
            running -= 1
            ended += 1
            if ended == 50:
                all_ended.set()

    for _ in range(50):
        wire.request(work)
    assert all_ended.wait(LIMIT)
    assert most == 3


def test_reading_goes_on_while_every_handler_is_busy(start) -> None:
    wire, _ = start(1)
    release, busy, read = threading.Event(), threading.Event(), threading.Event()
    wire.request(lambda: (busy.set(), release.wait(LIMIT)))
    assert busy.wait(LIMIT)
    wire.request(lambda: None)  # queued
    wire.callback(read.set)
    assert read.wait(LIMIT), "a callback waited behind a handler"
    release.set()


def test_a_blocked_callback_does_not_hold_up_others(start) -> None:
    wire, _ = start(1)
    release = threading.Event()
    others = [threading.Event() for _ in range(20)]
    wire.callback(lambda: release.wait(LIMIT))
    for event in others:
        wire.callback(event.set)
    for event in others:
        assert event.wait(LIMIT)
    release.set()


@pytest.mark.parametrize("limit", [1, 2])
def test_a_chain_of_nested_waits_deeper_than_the_pool_ends(start, limit: int) -> None:
    wire, pool = start(limit)
    depth = 30
    answers = [threading.Event() for _ in range(depth + 1)]

    def handler(level: int) -> None:
        if level < depth:
            wire.request(lambda: handler(level + 1))
            with pool.blocked():
                assert answers[level + 1].wait(LIMIT)
        answers[level].set()

    wire.request(lambda: handler(0))
    assert answers[0].wait(LIMIT)


def test_a_wait_past_the_last_spare_is_refused_and_the_pool_goes_on(start) -> None:
    wire, pool = start(1, spares=3)
    release, refused = threading.Event(), threading.Event()

    def handler() -> None:
        try:
            with pool.blocked():
                release.wait(LIMIT)
        except BusyError:
            refused.set()
            release.set()

    for _ in range(4):
        wire.request(handler)
    assert refused.wait(LIMIT)
    after = threading.Event()
    wire.request(after.set)
    assert after.wait(LIMIT)


def test_threads_beyond_the_need_end_again(start) -> None:
    wire, pool = start(2)
    gate = threading.Event()
    waiting = threading.Semaphore(0)

    def handler() -> None:
        with pool.blocked():
            waiting.release()
            gate.wait(LIMIT)

    for _ in range(20):
        wire.request(handler)
    for _ in range(20):
        assert waiting.acquire(timeout=LIMIT)
    assert pool.counts["threads"] > 20
    gate.set()
    end = threading.Event()
    for _ in range(200):
        if pool.counts["threads"] <= 2 + 2:
            break
        end.wait(0.02)
    assert pool.counts["threads"] <= 2 + 2


def test_an_error_in_a_work_is_logged_and_harms_nobody(start, caplog) -> None:
    wire, _ = start(1)
    after = threading.Event()
    wire.request(lambda: 1 / 0)
    wire.request(after.set)
    assert after.wait(LIMIT)
    assert "ZeroDivisionError" in caplog.text


def test_the_reader_survives_an_unexpected_error_of_the_socket(caplog) -> None:
    events: list[object] = [ValueError("odd"), None]
    done = threading.Event()

    def read() -> list[Work]:
        event = events.pop(0)
        if isinstance(event, Exception):
            raise event
        done.set()
        raise PoolClosed

    pool = HandlerPool(read, 1)
    pool.start()
    assert done.wait(LIMIT)
    assert pool.close(LIMIT) == []
    assert "odd" in caplog.text
