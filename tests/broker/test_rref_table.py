"""RRef bookkeeping: the broker's table and the workers' ledgers, with no socket and no clock.

``World`` models the channels as they are: control of one session is in order, two sessions'
are not; data is independent of control; a session may die between any two of its messages.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.rref_table import DEATH_WAIT, Ask, Free, NotAllowed, OwnerDied, RRefTable
from zrpc.rref_ledger import ReferenceLedger

A, B, C, OWNER = 1, 2, 3, 9
R = (A, 0)


# ------------------------------------------------------------------ the rules, one by one


def test_a_row_lives_as_long_as_one_fork_does() -> None:
    table = RRefTable()
    table.add(A, R, OWNER, (A, 1), 0)
    table.add(A, R, OWNER, (A, 2), 0)
    table.take(B, R, OWNER, (A, 2), 0)
    assert table.drop(A, R, (A, 1), 0) == []
    assert table.drop(B, R, (A, 2), 0) == [Free(OWNER, R, -1)]
    assert len(table) == 0


def test_a_drop_that_is_repeated_changes_nothing() -> None:
    table = RRefTable()
    table.add(A, R, OWNER, (A, 1), 0)
    table.add(A, R, OWNER, (A, 2), 0)
    for _ in range(3):
        assert table.drop(A, R, (A, 1), 0) == []
    assert len(table) == 1


def test_an_add_that_comes_twice_is_one_fork() -> None:
    table = RRefTable()
    table.add(A, R, OWNER, (A, 1), 0)
    table.add(A, R, OWNER, (A, 1), 0)
    assert table.drop(A, R, (A, 1), 0) == [Free(OWNER, R, -1)]


def test_a_fork_taken_and_dropped_before_its_add_frees_nothing_until_the_add_comes() -> None:
    # The minter's own fork is in the same queue as that add.
    table = RRefTable()
    table.take(B, R, OWNER, (A, 2), 0)
    assert table.drop(B, R, (A, 2), 0) == []
    assert table.add(A, R, OWNER, (A, 1), 0) == []
    assert table.add(A, R, OWNER, (A, 2), 0) == []
    assert table.drop(A, R, (A, 1), 0) == [Free(OWNER, R, -1)]


def test_an_early_drop_is_forgotten_with_its_minter() -> None:
    table = RRefTable()
    table.take(B, R, OWNER, (A, 2), 0)
    table.drop(B, R, (A, 2), 0)
    assert table.session_ended(A, 10.0) == []
    assert table.due(10.0 + DEATH_WAIT) == [Free(OWNER, R, -1)]


def test_free_tells_the_highest_mint_number_seen_of_the_owner() -> None:
    table = RRefTable()
    rref = (OWNER, 3)
    table.add(OWNER, rref, OWNER, (OWNER, 7), 0)
    table.take(B, rref, OWNER, (OWNER, 7), 0)
    assert table.drop(B, rref, (OWNER, 7), 0) == [Free(OWNER, rref, 7)]


def test_an_owner_that_has_minted_since_ignores_a_free() -> None:
    ledger = ReferenceLedger(OWNER)
    rref = (OWNER, ledger.mint())
    ledger.create_owned(rref, "value")
    fork, _ = ledger.fork_for_send(rref, OWNER, "message")
    assert ledger.free(rref, seen=fork[1] - 1) is None
    assert ledger.owned_value(rref) == "value"
    assert ledger.free(rref, seen=fork[1]) == "value"


def test_a_free_before_the_creation_has_arrived_is_remembered() -> None:
    ledger = ReferenceLedger(OWNER)
    assert ledger.free(R, seen=-1) is None
    assert ledger.create_owned(R, "value") is False
    assert ledger.owned_value(R) is None


def test_a_row_emptied_by_a_death_waits_for_a_takers_announcement() -> None:
    table = RRefTable()
    table.add(A, R, OWNER, (A, 1), 0)
    table.add(A, R, OWNER, (A, 2), 0)  # on its way to B
    assert table.session_ended(A, 10.0) == []
    assert table.next_due() == 10.0 + DEATH_WAIT
    table.take(B, R, OWNER, (A, 2), 11.0)
    assert table.due(20.0) == []
    assert table.drop(B, R, (A, 2), 21.0) == [Free(OWNER, R, -1)]


def test_a_death_that_empties_a_row_for_good_frees_it_after_the_wait() -> None:
    table = RRefTable()
    table.add(A, R, OWNER, (A, 1), 0)
    table.session_ended(A, 10.0)
    assert table.due(10.0 + DEATH_WAIT - 0.01) == []
    assert table.due(10.0 + DEATH_WAIT) == [Free(OWNER, R, -1)]


def test_an_owner_that_dies_ends_its_rows_and_its_holders_are_told_in_one_go() -> None:
    table = RRefTable()
    rrefs = [(A, 2 * n) for n in range(1000)]
    for rref in rrefs:
        table.add(A, rref, OWNER, (A, rref[1] + 1), 0)
    actions = table.session_ended(OWNER, 5.0)
    assert len(actions) == 1 and isinstance(actions[0], OwnerDied)
    assert actions[0].holder == A and sorted(actions[0].rrefs) == rrefs
    assert len(table) == 0 and table.drop(A, rrefs[0], (A, 1), 6.0) == []


def test_nobody_speaks_for_others() -> None:
    table = RRefTable()
    table.add(A, R, OWNER, (A, 1), 0)
    with pytest.raises(NotAllowed):
        table.add(B, R, OWNER, (A, 5), 0)
    with pytest.raises(NotAllowed):
        table.drop(B, R, (A, 1), 0)
    table.take(B, R, OWNER, (A, 1), 0)
    with pytest.raises(NotAllowed):
        table.take(C, R, OWNER, (A, 1), 0)
    with pytest.raises(NotAllowed):
        table.add(B, R, C, (B, 7), 0)  # only its creator knows better whose it is
    assert table.drop(C, (77, 77), (77, 78), 0) == []


# ------------------------------------------------------------------ any order of events


class Worker:
    """A session: its ledger, what its program holds, and its control queues."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.ledger = ReferenceLedger(session)
        self.alive = True
        self.held: list[tuple[Any, int, Any]] = []  # rref, owner, fork (None: it is ours)
        self.to_broker: deque[Any] = deque()
        self.from_broker: deque[Any] = deque()


class World:
    """Workers, a table, and what is on the way."""

    def __init__(self, chance: random.Random, workers: int) -> None:
        self.chance = chance
        self.table = RRefTable()
        self.workers = {n: Worker(n) for n in range(1, workers + 1)}
        self.data: list[dict[str, Any]] = []
        self.now = 0.0
        self.keys = 0

    # what must always hold -------------------------------------------------

    def needed(self, rref: Any, owner: int) -> bool:
        for worker in self.workers.values():
            others = worker.alive and worker.session != owner
            if others and any(held[0] == rref for held in worker.held):
                return True
        return any(
            rref in [fork[0] for fork in message["forks"]]
            for message in self.data
            if self.workers[message["to"]].alive and self.workers[message["from"]].alive
        )

    # steps -----------------------------------------------------------------

    def some(self) -> Worker | None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        return self.chance.choice(alive) if alive else None

    def create(self) -> None:
        """remote(): a new RRef at another worker."""
        caller, owner = self.some(), self.some()
        if caller is None or owner is None or caller is owner:
            return
        rref, fork, operations = caller.ledger.new_fork(owner.session)
        caller.to_broker.extend(operations)
        caller.held.append((rref, owner.session, fork))
        self.send(caller, owner.session, [], creates=rref)

    def own(self) -> None:
        """RRef(value)."""
        worker = self.some()
        if worker is not None:
            rref = (worker.session, worker.ledger.mint())
            worker.held.append((rref, worker.session, None))

    def fork(self) -> None:
        """A message that carries some of what its sender holds."""
        sender = self.some()
        if sender is None or not sender.held:
            return
        to = self.chance.choice(list(self.workers))
        if to == sender.session:
            return
        self.keys += 1
        forks = []
        for rref, owner, _ in self.chance.sample(
            sender.held, self.chance.randint(1, min(3, len(sender.held)))
        ):
            if owner == sender.session and sender.ledger.owned_value(rref) is None:
                sender.ledger.create_owned(rref, "value")
            fork, operations = sender.ledger.fork_for_send(rref, owner, (to, self.keys))
            sender.to_broker.extend(operations)
            forks.append((rref, owner, fork))
        self.send(sender, to, forks, key=(to, self.keys))

    def send(self, sender: Worker, to: int, forks: list[Any], **more: Any) -> None:
        self.data.append({"from": sender.session, "to": to, "forks": forks, **more})

    def deliver(self) -> None:
        """Some message arrives: it is taken, then used, or ended undecoded; or it comes back."""
        if not self.data:
            return
        message = self.data[self.chance.randrange(len(self.data))]
        sender, receiver = self.workers[message["from"]], self.workers[message["to"]]
        comes_back = not receiver.alive or ("creates" not in message and self.chance.random() < 0.1)
        if not comes_back:
            self.receive(receiver, message)
        self.data.remove(message)
        if sender.alive and "key" in message:
            sender.to_broker.extend(sender.ledger.message_ended(message["key"], not comes_back))

    def receive(self, receiver: Worker, message: dict[str, Any]) -> None:
        if "creates" in message:
            rref = message["creates"]
            if not receiver.ledger.create_owned(rref, "value"):
                assert not self.needed(rref, receiver.session), "freed before it was created"
        undecoded = self.chance.random() < 0.2
        for rref, owner, fork in message["forks"]:
            operations = receiver.ledger.take(rref, owner, fork)
            receiver.to_broker.extend(operations)
            if owner == receiver.session:
                receiver.held.append((rref, owner, None))
            elif undecoded:
                receiver.to_broker.extend(receiver.ledger.release(fork))
            else:
                receiver.held.append((rref, owner, fork))

    def drop(self) -> None:
        worker = self.some()
        if worker is not None and worker.held:
            self.release(worker, worker.held.pop(self.chance.randrange(len(worker.held))))

    def release(self, worker: Worker, held: tuple[Any, int, Any]) -> None:
        if held[2] is not None:
            operations = worker.ledger.release(held[2])
            worker.to_broker.extend(operations)
            if self.chance.random() < 0.1:
                worker.to_broker.extend(operations)  # said twice

    def to_broker(self) -> None:
        worker = self.some()
        if worker is not None and worker.to_broker:
            self.table_hears(worker)

    def table_hears(self, worker: Worker) -> None:
        verb, rref, owner, fork, *_ = worker.to_broker.popleft()
        if verb == "add":
            actions = self.table.add(worker.session, rref, owner, fork, self.now)
        elif verb == "take":
            actions = self.table.take(worker.session, rref, owner, fork, self.now)
        else:
            actions = self.table.drop(worker.session, rref, fork, self.now)
        self.act(actions)

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            to = action.owner if isinstance(action, Free) else action.holder
            self.workers[to].from_broker.append(action)

    def from_broker(self) -> None:
        worker = self.some()
        if worker is not None and worker.from_broker:
            self.worker_hears(worker)

    def worker_hears(self, worker: Worker) -> None:
        action = worker.from_broker.popleft()
        if isinstance(action, Free):
            if worker.ledger.free(action.rref, action.seen) is not None:
                assert not self.needed(action.rref, worker.session), "freed while it was held"
        elif isinstance(action, int):
            dead, _, operations = worker.ledger.session_lost(action)
            worker.to_broker.extend(operations)
            worker.held = [held for held in worker.held if held[0] not in dead]
            # Once told, it drops whatever still arrives from that session.
            self.data = [
                m for m in self.data if not (m["from"] == action and m["to"] == worker.session)
            ]

    def die(self) -> None:
        """A worker ends between any two of its control messages."""
        worker = self.some()
        if worker is None or sum(w.alive for w in self.workers.values()) <= 2:
            return
        for _ in range(self.chance.randint(0, len(worker.to_broker))):
            self.table_hears(worker)
        worker.alive = False
        worker.to_broker.clear()
        worker.held.clear()
        self.data = [
            m for m in self.data if m["from"] != worker.session or self.chance.random() < 0.5
        ]
        self.act(self.table.session_ended(worker.session, self.now))
        for other in self.workers.values():
            if other.alive:
                other.from_broker.append(worker.session)

    def settle(self) -> None:
        """Everything on its way arrives."""
        while (
            any(w.alive and (w.to_broker or w.from_broker) for w in self.workers.values())
            or self.data
        ):
            while self.data:
                self.deliver()
            for worker in self.workers.values():
                while worker.alive and worker.to_broker:
                    self.table_hears(worker)
                while worker.alive and worker.from_broker:
                    self.worker_hears(worker)

    def wait(self) -> None:
        """Time passes: what the dead have sent has arrived by then."""
        self.settle()
        self.now += DEATH_WAIT
        self.act(self.table.due(self.now))


STEPS = [
    "create",
    "own",
    "fork",
    "deliver",
    "deliver",
    "drop",
    "to_broker",
    "to_broker",
    "from_broker",
]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(2, 5), st.integers(10, 150))
def test_never_freed_while_held_and_always_freed_in_the_end(
    seed: int, workers: int, steps: int
) -> None:
    world = World(random.Random(seed), workers)
    for _ in range(steps):
        chance = world.chance.random()
        if chance < 0.02:
            world.die()
        elif chance < 0.04:
            world.wait()
        else:
            getattr(world, world.chance.choice(STEPS))()
    world.settle()
    for worker in world.workers.values():
        while worker.held:
            world.release(worker, worker.held.pop())
    for _ in range(3):
        world.wait()
    world.settle()
    assert len(world.table) == 0
    assert not any(world.table._held.values()) and not any(world.table._awaited.values())
    assert not any(world.table._owned.values()) and world.table.next_due() is None
    for worker in world.workers.values():
        if worker.alive:
            assert worker.ledger.held == 0
            assert worker.ledger.in_transit == 0
            assert len(worker.ledger) == 0, "a value was never freed"


# ------------------------------------------------------------------ cut connections and restarts

GRACE = 5.0


class FaultyWorld(World):
    """The same, where control connections are cut in the middle and the broker is killed.

    Each operation carries its number, is kept by its worker until the broker is known to have
    heard it, and is heard once and in order.
    """

    def __init__(self, chance: random.Random, workers: int) -> None:
        super().__init__(chance, workers)
        self.sequence = dict.fromkeys(self.workers, 0)  # of what was numbered last
        self.unheard: dict[int, list[Any]] = {session: [] for session in self.workers}
        self.heard = dict.fromkeys(self.workers, 0)
        self.known = dict.fromkeys(self.workers, True)  # does the broker know the connection?
        self.dead: set[int] = set()
        self.restarted_at: float | None = None

    def number(self, worker: Worker) -> None:
        """Give what was queued since its numbers, in order."""
        session = worker.session
        for index, item in enumerate(worker.to_broker):
            if item[0] in ("add", "take", "drop", "give"):
                self.sequence[session] += 1
                worker.to_broker[index] = (self.sequence[session], item)
                self.unheard[session].append(worker.to_broker[index])

    def lose(self, worker: Worker) -> None:
        """What was under way on a connection is gone, in either direction."""
        self.number(worker)
        for _ in range(self.chance.randint(0, len(worker.to_broker))):
            worker.to_broker.popleft()
        for _ in range(self.chance.randint(0, len(worker.from_broker))):
            worker.from_broker.popleft()
        worker.to_broker.append(("hello",))

    def cut(self) -> None:
        worker = self.some()
        if worker is not None:
            self.lose(worker)

    def restart(self) -> None:
        """The broker is killed, and starts with nothing."""
        self.table = RRefTable()
        self.table.freeze(self.now + GRACE + DEATH_WAIT)
        self.restarted_at = self.now
        self.heard = dict.fromkeys(self.workers, -1)
        for worker in self.workers.values():
            if worker.alive:
                worker.from_broker.clear()
                self.lose(worker)
                self.known[worker.session] = False

    def table_hears(self, worker: Worker) -> None:
        self.number(worker)
        item = worker.to_broker.popleft()
        session = worker.session
        if item[0] == "hello":
            self.known[session] = True
            worker.from_broker.append(("welcome", self.heard[session]))
        elif not self.known[session]:
            pass
        elif item[0] == "announce":
            _, forks, owned, minted, sequence, fresh = item
            if not fresh and self.heard[session] != sequence:
                worker.to_broker.append(("hello",))
                return
            self.heard[session] = sequence
            patience = GRACE + DEATH_WAIT
            self.act(self.table.announce(session, forks, owned, minted, self.now, patience))
            for dead in self.dead:  # it asks for the fate of all whom it knows
                worker.from_broker.append(dead)
        elif item[0] == self.heard[session] + 1:
            self.heard[session] += 1
            self.operation(session, *item[1])
        elif item[0] > self.heard[session] and ("hello",) not in worker.to_broker:
            worker.to_broker.append(("hello",))  # it is asked who it is

    def operation(
        self, session: int, verb: str, rref: Any, owner: int, fork: Any, *more: Any
    ) -> None:
        if verb == "add":
            actions = self.table.add(session, rref, owner, fork, self.now)
        elif verb == "take":
            actions = self.table.take(session, rref, owner, fork, self.now)
        elif verb == "give":
            actions = self.table.give(session, rref, fork, more[0], self.now)
        else:
            actions = self.table.drop(session, rref, fork, self.now)
        self.act(actions)

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Ask):
                self.workers[action.receiver].from_broker.append(action)
            else:
                super().act([action])

    def worker_hears(self, worker: Worker) -> None:
        action = worker.from_broker[0]
        if isinstance(action, tuple):
            worker.from_broker.popleft()
            self.welcomed(worker, *action[1:])
        elif isinstance(action, Ask):
            worker.from_broker.popleft()
            worker.to_broker.extend(worker.ledger.confirm(action.rref, action.owner, action.fork))
        else:
            super().worker_hears(worker)

    def welcomed(self, worker: Worker, heard: int) -> None:
        session = worker.session
        self.number(worker)
        forks, owned, minted = worker.ledger.announcement()
        again = [item for item in self.unheard[session] if item[0] > heard]
        following = again[0][0] if again else self.sequence[session] + 1
        fresh = heard < 0 or following != heard + 1
        more: list[Any] = []
        if fresh:
            more = worker.ledger.to_say_again(item[1] for item in again)
            forks += [
                (rref, owner, fork, False) for verb, rref, owner, fork, *_ in more if verb == "give"
            ]
            again = []
        self.unheard[session] = again
        worker.to_broker.extend(again)
        worker.to_broker.append(("announce", forks, owned, minted, self.sequence[session], fresh))
        worker.to_broker.extend(more)

    def die(self) -> None:
        before = {w.session for w in self.workers.values() if w.alive}
        super().die()
        self.dead |= before - {w.session for w in self.workers.values() if w.alive}

    def give_up(self) -> None:
        """A caller no longer waits for the answer of a message that is under way, or lost."""
        candidates = [m for m in self.data if "key" in m and self.workers[m["from"]].alive]
        if candidates:
            message = self.chance.choice(candidates)
            sender = self.workers[message["from"]]
            sender.to_broker.extend(sender.ledger.message_of_unknown_fate(message["key"]))
            # Dead at its receiver: what still arrives is taken and dropped with it.
            receiver = self.workers[message["to"]]
            if receiver.alive and self.chance.random() < 0.5:
                for rref, owner, fork in message["forks"]:
                    receiver.to_broker.extend(receiver.ledger.take(rref, owner, fork))
                    receiver.to_broker.extend(receiver.ledger.release(fork))
            self.data.remove(message)

    def wait(self) -> None:
        self.settle()
        self.now += GRACE + 2 * DEATH_WAIT
        if self.restarted_at is not None:
            # Whoever has not come back by now is lost, and the table hears so.
            self.restarted_at = None
            for dead in self.dead:
                self.act(self.table.session_ended(dead, self.now))
            self.settle()
            self.now += DEATH_WAIT
        self.act(self.table.due(self.now))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 40), st.integers(2, 5), st.integers(10, 200))
def test_the_same_where_connections_are_cut_and_the_broker_is_killed(
    seed: int, workers: int, steps: int
) -> None:
    world = FaultyWorld(random.Random(seed), workers)
    for _ in range(steps):
        chance = world.chance.random()
        if chance < 0.02:
            world.die()
        elif chance < 0.04:
            world.wait()
        elif chance < 0.08:
            world.cut()
        elif chance < 0.10:
            world.restart()
        elif chance < 0.12:
            world.give_up()
        else:
            getattr(world, world.chance.choice(STEPS))()
    world.settle()
    for worker in world.workers.values():
        while worker.held:
            world.release(worker, worker.held.pop())
    for _ in range(4):
        world.wait()
    world.settle()
    assert len(world.table) == 0
    assert not any(world.table._held.values()) and not any(world.table._awaited.values())
    for worker in world.workers.values():
        if worker.alive:
            assert worker.ledger.held == 0 and worker.ledger.in_transit == 0
            assert len(worker.ledger) == 0, "a value was never freed"
