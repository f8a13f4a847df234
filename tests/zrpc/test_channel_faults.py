"""Calls over a channel that loses, doubles, shuffles and returns messages, with no socket and no clock.

Two real :class:`~zrpc.channel.DataChannel` stand at either end of a wire that a random
number generator holds.  A connection that is cut loses what is on it, in the middle too;
its owner hears only that it was made anew.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.protocol import FULL, UNREACHABLE, Kind, pack_session
from zrpc import channel, pair, transfer
from zrpc.channel import DataChannel
from zrpc.data_sockets import DataSockets, Sent
from zrpc.pair import Stage
from zrpc.pool import Work
from zrpc.transfer import Assembly, Outgoing


@contextmanager
def small_pieces() -> Iterator[None]:
    """Calls of a few hundred bytes travel in pieces."""
    with (
        mock.patch.object(transfer, "INLINE_LIMIT", 200),
        mock.patch.object(transfer, "PIECE_FLOOR", 50),
        mock.patch.object(transfer, "PIECE_SIZE", 100),
        mock.patch.object(pair, "PIECE_WINDOW", 3000),
    ):
        yield


class Call:
    """What a pair waits for."""

    expired = False

    def __init__(self, outgoing: Outgoing, now: float) -> None:
        self.outgoing = outgoing
        self.started = now


class End(DataSockets):
    """One session: its channel, and its end of the wire."""

    def __init__(self, session: int, world: World) -> None:
        super().__init__()
        self.world = world
        self.session = session
        self.lock = threading.Lock()
        self.channel = DataChannel(
            self, self.lock, world.call_at, 8000, sockets=self, clock=lambda: world.now
        )
        self.channel.session = session
        self.ran: Counter[tuple[int, int]] = Counter()
        self.unfinished: list[Any] = []
        self.replied: dict[int, bytes] = {}
        self.asked: dict[int, bytes] = {}

    # its sockets
    @property
    def routers(self) -> int:
        return 1

    def send(
        self, router: int, destination: bytes, header: bytes, frames: Any, large: bool
    ) -> Sent:
        if self.world.chance.random() < self.world.full:
            return Sent.FULL
        self.world.wire.append((self.session, destination, header, [bytes(f) for f in frames]))
        return Sent.OK

    # the agent's side
    def message_arrived(self, assembly: Assembly) -> None: ...

    def forks_forgotten(self, pair: Any) -> None: ...

    def stranger(self, pair: Any) -> None: ...

    def stage_told(self, pair: Any, number: int, stage: int) -> None: ...

    def request_complete(self, pair: Any, served: Any, assembly: Assembly) -> Work | None:
        served.stage = Stage.QUEUED
        self.unfinished.append((pair, served, assembly))
        return None

    def reply_complete(self, pair: Any, call: Any, assembly: Assembly) -> Work | None:
        number = assembly.header.call
        assert number not in self.replied, "a call ended twice"
        self.replied[number] = content(assembly)
        return None

    # what its program does
    def call(self, to: int, size: int) -> None:
        data = self.world.chance.randbytes(size)
        with self.lock:
            pair = self.channel.pair(to)
            outgoing = Outgoing(Kind.REQUEST, 0, b"body", [data, data[:30]])
            outgoing.call = pair.start_call(Call(outgoing, self.world.now))
            self.asked[outgoing.call] = data
            self.channel.send(pair, outgoing)

    def run_one(self) -> None:
        if not self.unfinished:
            return
        index = self.world.chance.randrange(len(self.unfinished))
        pair, served, assembly = self.unfinished.pop(index)
        number = assembly.header.call
        self.ran[pair.session, number] += 1
        assert self.ran[pair.session, number] == 1, "a call ran twice"
        data = content(assembly)
        with self.lock:
            served.stage = Stage.DONE
            if pair.served.get(number) is served:
                served.reply = Outgoing(Kind.REPLY, number, b"body", [data[::-1], data[:20]])
                self.channel.send(pair, served.reply)


def content(assembly: Assembly) -> bytes:
    _, buffers = assembly.content()
    return bytes(buffers[0])


class World:
    """Two ends, a wire, and the time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 100.0
        self.full = 0.0
        self.wire: list[Any] = []
        self.timers: list[Any] = []
        self.number = itertools.count()
        self.ends = {session: End(session, self) for session in (1, 2)}

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (moment, next(self.number), work))

    def deliver(self, index: int) -> None:
        source, destination, header, frames = self.wire.pop(index)
        receiver = next(e for e in self.ends.values() if pack_session(e.session) == destination)
        receiver.channel.receiver.take_in(pack_session(source), header, frames)
        assert receiver.channel.receiver.dropped == 0

    def give_back(self, index: int) -> None:
        source, destination, header, _ = self.wire.pop(index)
        mark = self.chance.choice((FULL, UNREACHABLE))
        self.ends[source].channel.receiver.take_in(mark + destination, header, [])

    def cut(self) -> None:
        """A connection breaks: some of what is on it is gone; its owner hears that it is new."""
        end = self.chance.choice(list(self.ends.values()))
        sending = self.chance.random() < 0.5
        name = pack_session(end.session)
        self.wire = [
            m
            for m in self.wire
            if (m[0] == end.session if sending else m[1] == name) is False
            or self.chance.random() < 0.3
        ]
        end.channel.reconnected()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            heapq.heappop(self.timers)[2]()

    def step(self) -> None:
        """Anything may happen."""
        chance = self.chance
        what = chance.random()
        if what < 0.15:
            end = chance.choice(list(self.ends.values()))
            end.call(3 - end.session, chance.choice((0, 10, 300, 2000)))
        elif what < 0.6 and self.wire:
            self.deliver(chance.randrange(len(self.wire)) if chance.random() < 0.5 else 0)
        elif what < 0.63 and self.wire:
            self.wire.append(chance.choice(self.wire))
        elif what < 0.68 and self.wire:
            self.give_back(chance.randrange(len(self.wire)))
        elif what < 0.70:
            self.cut()
        elif what < 0.9:
            chance.choice(list(self.ends.values())).run_one()
        else:
            self.pass_time(chance.choice((0.001, 0.05, 0.5)))

    def settle(self) -> None:
        """From now on nothing is lost: every call must end, with the right answer."""
        self.full = 0.0
        for _ in range(20_000):
            while self.wire:
                self.deliver(0)
            for end in self.ends.values():
                end.run_one()
            if not any(e.unfinished or self.waiting(e) for e in self.ends.values()):
                break
            self.pass_time(0.05)
            for end in self.ends.values():
                # A first call may be lost at a callee that has never heard of its caller.
                end.channel.probe_old(10.0)
        for end in self.ends.values():
            assert not self.waiting(end), "a call was lost"
            assert end.replied == {n: d[::-1] for n, d in end.asked.items()}
            other = self.ends[3 - end.session]
            assert all(other.ran[end.session, number] == 1 for number in end.asked)

    def waiting(self, end: End) -> bool:
        return any(pair.waiting for pair in end.channel.pairs.values())


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_call_runs_once_and_ends_whatever_is_lost_doubled_or_shuffled(seed: int) -> None:
    with small_pieces():
        world = World(seed)
        world.full = world.chance.choice((0.0, 0.1))
        for _ in range(world.chance.choice((30, 200, 600))):
            world.step()
        world.settle()


@pytest.mark.parametrize("lost", ["all", "requests", "replies"])
def test_more_than_all_credit_may_be_lost_in_one_cut(lost: str) -> None:
    with small_pieces():
        world = World(7)
        caller, callee = world.ends[1], world.ends[2]
        for _ in range(40):
            caller.call(2, 2000)
        if lost == "replies":
            for _ in range(50):
                while world.wire and world.wire[0][0] == 1:
                    world.deliver(0)
                callee.run_one()
        world.wire.clear()
        (callee if lost == "replies" else caller).channel.reconnected()
        world.settle()
        assert len(caller.replied) == 40


def test_a_loss_that_nobody_has_seen_is_found_when_a_call_has_waited_for_long() -> None:
    world = World(3)
    world.ends[1].call(2, 10)
    world.wire.clear()
    world.pass_time(5.0)
    world.ends[1].channel.probe_old(10.0)
    assert not world.wire
    world.pass_time(6.0)
    world.ends[1].channel.probe_old(10.0)
    world.settle()


def test_a_call_that_waits_for_long_costs_one_question_an_age() -> None:
    world = World(3)
    world.ends[1].call(2, 10)
    world.deliver(0)  # it runs, and runs
    asked = 0
    for _ in range(100):
        world.pass_time(1.0)
        world.ends[1].channel.probe_old(10.0)
        while world.wire:
            asked += world.wire[0][0] == 1
            world.deliver(0)
    assert 5 <= asked <= 25
    assert channel.MARK_DELAY < 1
