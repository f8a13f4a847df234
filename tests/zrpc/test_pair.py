"""Ids, marks and credit between two sessions, with no socket: two pairs that talk through lists."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.protocol import Acknowledgement, Flag, Header, Kind
from zrpc.pair import Pair, Stage


def message(pair: Pair, size: int = 100, kind: Kind = Kind.REQUEST, call: int = 0) -> Header:
    return pair.stamp(Header(kind, call=call), size)


def test_the_mark_is_the_lowest_call_still_waited_for() -> None:
    pair = Pair(1)
    numbers = [pair.start_call(object()) for _ in range(4)]
    assert numbers == [1, 2, 3, 4] and pair.mark == 1
    pair.end_call(2)
    assert pair.mark == 1
    pair.end_call(1)
    assert pair.mark == 3
    pair.end_call(3)
    pair.end_call(4)
    assert pair.mark == 5


def test_a_call_ends_once() -> None:
    pair = Pair(1)
    call = object()
    number = pair.start_call(call)
    assert pair.end_call(number) is call
    assert pair.end_call(number) is None


def test_a_second_copy_of_a_request_is_not_admitted() -> None:
    pair = Pair(1)
    assert pair.admit(1) is not None
    assert pair.admit(1) is None


def test_what_lies_below_the_mark_is_dead_for_good() -> None:
    caller, callee = Pair(2), Pair(1)
    for number in range(1, 6):
        caller.start_call(object())
        assert callee.admit(number) is not None
    for number in (1, 2, 3):
        caller.end_call(number)
    callee.receive(message(caller))
    assert sorted(callee.served) == [4, 5]
    assert callee.admit(2) is None


def test_a_slow_call_does_not_pin_the_replies_of_quick_ones() -> None:
    caller, callee = Pair(2), Pair(1)
    for number in range(1, 1001):
        caller.start_call(object())
        served = callee.admit(number)
        assert served is not None
        served.stage = Stage.DONE if number > 1 else Stage.RUNNING
    for number in range(2, 1001):
        caller.end_call(number)
    caller.unacknowledged_bytes = 1
    told = caller.acknowledgement()
    assert told == Acknowledgement(1000, [1])
    callee.receive_acknowledgement(Acknowledgement.unpack(told.pack()))
    assert list(callee.served) == [1]
    assert callee.admit(500) is None, "a finished call ran again"


def test_a_call_that_is_still_on_its_way_may_arrive_after_an_acknowledgement() -> None:
    callee = Pair(1)
    callee.receive_acknowledgement(Acknowledgement(10, [7]))
    assert callee.admit(7) is not None
    assert callee.admit(6) is None


def test_an_unfinished_call_that_its_caller_has_done_with_is_told() -> None:
    for how in ("mark", "acknowledgement", "loss"):
        callee = Pair(1)
        served = callee.admit(1)
        assert served is not None
        told: list[bool] = []
        served.on_cancel = lambda told=told: told.append(True)
        if how == "mark":
            callee.receive(Header(Kind.CREDIT, mark=2))
        elif how == "acknowledgement":
            callee.receive_acknowledgement(Acknowledgement(1, []))
        else:
            callee.forget_peer()
        assert served.cancelled and told == [True], how


def test_an_older_acknowledgement_brings_nothing_back() -> None:
    callee = Pair(1)
    callee.receive_acknowledgement(Acknowledgement(10, []))
    callee.receive_acknowledgement(Acknowledgement(5, [3]))
    assert callee.admit(3) is None


def test_a_sender_stops_at_the_window_and_goes_on_when_the_peer_has_taken() -> None:
    sender, receiver = Pair(2, 1000), Pair(1, 1000)
    sent = []
    while sender.has_room(300):
        sent.append(message(sender, 300))
    assert len(sent) == 3
    receiver.receive(sent[0])
    receiver.receive(sent[1])
    sender.outbox.append(None)  # type: ignore[arg-type]
    assert sender.receive(message(receiver, 100, Kind.CREDIT))
    assert sender.has_room(300) and not sender.has_room(800)


def test_one_message_larger_than_the_window_may_always_go_alone() -> None:
    pair = Pair(1, 1000)
    assert pair.has_room(5000)
    message(pair, 5000)
    assert not pair.has_room(1)


def test_pieces_stop_earlier_than_calls() -> None:
    pair = Pair(1)
    while pair.has_room(4 << 20, piece=True):
        message(pair, 4 << 20, Kind.PIECE)
    assert pair.has_room(1000), "a small call must find room beside pieces"
    assert pair.position <= 16 << 20


def test_a_lost_message_costs_no_credit_once_a_later_one_arrives() -> None:
    sender, receiver = Pair(2, 1000), Pair(1, 1000)
    message(sender, 400)  # lost
    receiver.receive(message(sender, 400))
    sender.receive(message(receiver, 10, Kind.CREDIT))
    assert sender.position - sender.peer_taken == 0


def test_a_returned_message_is_no_longer_under_way() -> None:
    pair = Pair(1, 1000)
    header = message(pair, 900)
    assert not pair.has_room(900)
    assert pair.returned(header.position)
    assert pair.has_room(900)


def test_a_lying_peer_cannot_take_more_than_was_sent() -> None:
    pair = Pair(1, 1000)
    message(pair, 500)
    pair.receive(Header(Kind.CREDIT, taken=1 << 60))
    assert pair.peer_taken == 500
    assert not pair.has_room(1001) or pair.position == pair.peer_taken


def test_a_sender_that_waits_for_room_asks_once_what_was_taken() -> None:
    pair = Pair(1, 1 << 20)
    message(pair, 1000)
    assert not pair.has_room(4 << 20) and pair.must_ask
    pair.stamp(Header(Kind.CREDIT, Flag.TELL), 100)
    assert not pair.must_ask
    pair.receive(Header(Kind.CREDIT, taken=1100))
    assert pair.has_room(4 << 20)


@pytest.mark.parametrize("window", [1 << 20, 64 << 20])
def test_taken_bytes_are_told_before_the_sender_runs_dry(window: int) -> None:
    # The receiver's own window may be another.
    sender, receiver = Pair(2, window), Pair(1)
    told = 0
    for _ in range(10_000):
        assert sender.has_room(20_000), "it ran out of credit although all was taken"
        header = message(sender, 20_000)
        receiver.receive(header)
        if header.flags & Flag.TELL:
            sender.receive(message(receiver, 0, Kind.CREDIT))
            told += 1
    assert 0 < told < 1000


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_no_call_runs_twice_and_none_is_forgotten_under_duplication_and_reordering(
    seed: int,
) -> None:
    """Requests and acknowledgements are copied and shuffled; what ran, ran once; live calls can run."""
    chance = random.Random(seed)
    caller, callee = Pair(2), Pair(1)
    wire: list[Header | Acknowledgement] = []
    ran: dict[int, int] = {}
    for _ in range(200):
        action = chance.random()
        if action < 0.35:
            number = caller.start_call("call")
            wire.append(message(caller, call=number))
        elif action < 0.5 and caller.waiting:
            done = [n for n in caller.waiting if ran.get(n)]
            if done:
                caller.end_call(chance.choice(done))
        elif action < 0.6:
            caller.unacknowledged_bytes += 1
            told = caller.acknowledgement()
            if told is not None:
                wire.append(told)
        elif wire:
            index = chance.randrange(len(wire))
            item = wire[index] if chance.random() < 0.3 else wire.pop(index)
            if isinstance(item, Acknowledgement):
                callee.receive_acknowledgement(item)
            else:
                callee.receive(item)
                if callee.admit(item.call) is not None:
                    ran[item.call] = ran.get(item.call, 0) + 1
    assert all(count == 1 for count in ran.values())
    # What is still waited for and has not run may still arrive, and must then run.
    for number in list(caller.waiting):
        if number not in ran:
            assert callee.admit(number) is not None
