"""Who is there: the membership state machine, with a fake clock and no socket."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from broker import messages
from broker.member import RemoveRoutes, Send, SessionEnded, SetRoutes, WatchProcess
from broker.members import Membership
from broker.messages import Hello
from broker.run_folder import RunFolderError
from broker.tickets import Tickets, kept_secret


class House:
    """A membership, and what it told whom."""

    def __init__(self, **options: Any) -> None:
        numbers = itertools.count(1)
        self.membership = Membership(
            7, lambda: b"z" + next(numbers).to_bytes(15, "big"), ["5556"], **options
        )
        self.told: dict[bytes, list[Any]] = {}
        self.others: list[Any] = []
        self.now = 0.0

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.told.setdefault(action.connection, []).append(action.message)
            else:
                self.others.append(action)

    def hello(self, name: str, **fields: Any) -> bytes:
        connection = fields.pop("connection", name.encode() + b"@")
        self.act(self.membership.hello(connection, Hello(worker=name, **fields), self.now))
        return connection

    def ready(self, connection: bytes) -> None:
        self.act(self.membership.ready(self.member(connection)))

    def join(self, name: str, **fields: Any) -> bytes:
        connection = self.hello(name, **fields)
        self.ready(connection)
        return connection

    def member(self, connection: bytes) -> Any:
        return self.membership.by_connection[connection]

    def last(self, connection: bytes) -> Any:
        return self.told[connection][-1]

    def kinds(self, connection: bytes) -> list[str]:
        return [message.name for message in self.told.get(connection, [])]

    def resolve(self, connection: bytes, **what: Any) -> Any:
        self.act(
            self.membership.resolve(self.member(connection), messages.Resolve(1, **what), self.now)
        )
        return self.last(connection)

    def end(self, connection: bytes) -> None:
        self.act(self.membership.process_ended(self.member(connection).session))

    def leave(self, connection: bytes) -> None:
        self.act(self.membership.goodbye(self.member(connection), messages.Goodbye()))

    def gather(self, connection: bytes, key: str, value: bytes = b"", **more: Any) -> None:
        request = messages.Gather(9, key, value, **more)
        self.act(self.membership.gather(self.member(connection), request, self.now))


def test_a_worker_is_welcomed_routed_and_started() -> None:
    house = House()
    a = house.join("a")
    assert house.kinds(a) == ["Welcome", "Started"]
    welcome = house.told[a][0]
    assert welcome.session >> 32 == 7 and welcome.rank == 0 and welcome.data == ["5556"]
    assert welcome.rx[0] != 0 and all(len(item) == 16 for item in [*welcome.tx, welcome.rx])
    assert house.others == [SetRoutes(welcome.session, welcome.tx, welcome.rx)]


def test_a_process_of_the_brokers_machine_is_watched_and_no_other() -> None:
    house = House(machine="here")
    house.join("a", machine="here", pid=10)
    house.join("b", machine="there", pid=11)
    assert [o.pid for o in house.others if isinstance(o, WatchProcess)] == [10]


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 128, "a/b"])
def test_a_name_that_no_worker_can_have_is_refused(name: str) -> None:
    house = House()
    connection = house.hello(name, connection=b"c")
    assert house.last(connection).code == "name"
    assert (
        "must match" in house.last(connection).text
        and "shorter than 128" in house.last(connection).text
    )


def test_no_common_protocol_version_is_refused_and_says_whom_to_upgrade() -> None:
    house = House()
    old = house.hello("a", protocol_minimum=0, protocol_maximum=0)
    new = house.hello("b", protocol_minimum=99, protocol_maximum=99)
    assert house.last(old).code == house.last(new).code == "protocol"
    assert "worker's side" in house.last(old).text and "broker's side" in house.last(new).text


def test_ranks_are_given_out_from_the_lowest_that_is_free() -> None:
    house = House()
    a, b = house.join("a"), house.join("b")
    assert house.member(b).rank == 1
    house.leave(a)
    assert house.member(house.join("c")).rank == 0


# ------------------------------------------------------------------ worlds


def test_a_world_starts_when_all_are_ready_and_not_before() -> None:
    house = House()
    a = house.join("a", rank=0, world_size=2)
    assert house.kinds(a) == ["Welcome"]
    b = house.hello("b", rank=1, world_size=2)
    assert house.kinds(a) == ["Welcome"]
    house.ready(b)
    assert house.kinds(a) == house.kinds(b) == ["Welcome", "Started"]


def test_who_is_missing_in_a_world_is_told() -> None:
    house = House()
    a = house.join("a", rank=1, world_size=4)
    house.act(house.membership.who_is_missing(house.member(a), messages.WhoIsMissing(3)))
    assert house.last(a).value == [0, 2, 3]


def test_fixed_and_open_jobs_do_not_mix() -> None:
    house = House()
    house.join("a", rank=0, world_size=2)
    b = house.hello("b")
    assert house.last(b).code == "mixed"
    assert "mixes statically and dynamically" in house.last(b).text


def test_another_world_size_is_refused() -> None:
    house = House()
    house.join("a", rank=0, world_size=2)
    assert house.last(house.hello("b", rank=1, world_size=3)).code == "world"


def test_jobs_do_not_see_each_other() -> None:
    house = House()
    a = house.join("a", job="one")
    house.join("b", job="two")
    assert house.member(house.hello("a", job="two", connection=b"c")).rank == 1
    assert isinstance(house.resolve(a, worker="b"), messages.Failure)


def test_a_refusal_that_makes_a_world_impossible_ends_the_wait_of_all() -> None:
    house = House(machine="here")
    a = house.join("a", rank=0, world_size=2, machine="here", pid=5)
    house.hello("a", rank=1, world_size=2, connection=b"c")
    assert house.last(b"c").code == "name" and "not unique" in house.last(b"c").text
    assert house.last(a).name == "StartFailed" and "not unique" in house.last(a).text
    assert not house.membership.members and not house.membership.jobs


def test_a_lost_rank_of_a_started_world_may_be_taken_by_a_new_worker_of_its_name() -> None:
    house = House()
    house.join("a", rank=0, world_size=2)
    b = house.join("b", rank=1, world_size=2)
    house.end(b)
    again = house.join("b", rank=1, world_size=2, connection=b"again")
    assert house.kinds(again) == ["Welcome", "Started"]


def test_a_job_whose_members_have_all_gone_is_forgotten() -> None:
    house = House()
    for size in (1, 3):
        connection = house.hello("a", rank=0, world_size=size, connection=b"%d" % size)
        assert house.kinds(connection)[0] == "Welcome"
        house.leave(connection)
    assert not house.membership.jobs


# ------------------------------------------------------------------ duplicate names


def test_a_name_whose_holder_is_known_to_live_is_refused_at_once() -> None:
    house = House(machine="here")
    house.join("a", machine="here", pid=5, host="h")
    house.hello("a", connection=b"c")
    assert house.last(b"c").code == "name" and "process 5 on host h" in house.last(b"c").text


def test_a_name_whose_holder_answers_a_ping_is_refused() -> None:
    house = House()
    a = house.join("a")
    house.hello("a", connection=b"c")
    assert house.last(a).name == "Ping" and b"c" not in house.told
    house.act(house.membership.heard(house.member(a)))
    assert house.last(b"c").code == "name"


def test_a_name_whose_holder_is_silent_goes_to_the_new_one_and_the_old_session_is_lost() -> None:
    house = House()
    a, watcher = house.join("a"), house.join("w")
    session = house.member(a).session
    house.resolve(watcher, worker="a")
    house.hello("a", connection=b"c")
    house.act(house.membership.due(0.9))
    assert b"c" not in house.told
    house.act(house.membership.due(1.0))
    assert house.last(b"c").name == "Welcome"
    fate = house.last(watcher)
    assert (fate.session, fate.ending) == (session, "replaced")


# ------------------------------------------------------------------ resolve, watch, fates


def test_a_worker_can_be_found_by_name_rank_and_session_once_it_is_ready() -> None:
    house = House()
    a = house.join("a")
    b = house.hello("b")
    assert house.resolve(a, worker="b").code == "unknown"
    house.ready(b)
    session = house.member(b).session
    for what in ({"worker": "b"}, {"rank": 1}, {"session": session}):
        assert house.resolve(a, **what).value["session"] == session


def test_an_unknown_name_lists_who_is_there_near_names_first() -> None:
    house = House()
    a = house.join("trainer1")
    for name in ("ps", "aaa"):
        house.join(name)
    failure = house.resolve(a, worker="trainer2")
    assert (
        failure.code == "unknown" and "could not find destination name 'trainer2'" in failure.text
    )
    assert failure.names[0] == "trainer1" and set(failure.names) == {"trainer1", "ps", "aaa"}


def test_a_lost_worker_is_named_as_lost_and_one_that_left_as_unknown() -> None:
    house = House()
    a, b, c = house.join("a"), house.join("b"), house.join("c")
    house.end(b)
    house.leave(c)
    assert house.resolve(a, worker="b").code == "lost"
    left = house.resolve(a, worker="c")
    assert left.code == "unknown" and "has left" in left.text


def test_who_has_resolved_a_worker_is_told_its_fate_and_nobody_else() -> None:
    house = House()
    a, b, c = house.join("a"), house.join("b"), house.join("c")
    house.resolve(a, worker="b")
    session = house.member(b).session
    house.end(b)
    assert house.last(a) == messages.Fate(session, "lost", house.last(a).reason)
    assert "has ended" in house.last(a).reason
    assert "Fate" not in house.kinds(c)
    assert RemoveRoutes(session) in house.others
    assert [o.ending for o in house.others if isinstance(o, SessionEnded)] == ["lost"]


def test_watching_a_session_that_is_gone_or_was_never_there_answers_at_once() -> None:
    house = House()
    a, b = house.join("a"), house.join("b")
    session = house.member(b).session
    house.leave(b)
    house.act(house.membership.watch(house.member(a), [session, 12345], 0.0))
    assert [m.ending for m in house.told[a] if m.name == "Fate"] == ["left", "lost"]


def test_an_unreachable_worker_is_lost_after_the_grace_and_not_if_it_is_heard() -> None:
    house = House(grace=10.0)
    a, b = house.join("a"), house.join("b")
    house.act(house.membership.unreachable(a, 5.0))
    house.act(house.membership.unreachable(b, 5.0))
    assert house.membership.next_due() == 15.0
    house.act(house.membership.heard(house.member(b)))
    house.act(house.membership.due(14.9))
    assert len(house.membership.members) == 2
    house.act(house.membership.due(15.0))
    assert list(house.membership.by_connection) == [b]


# ------------------------------------------------------------------ resuming


def test_a_known_session_is_taken_up_under_a_new_connection() -> None:
    house = House()
    a = house.join("a")
    welcome = house.told[a][0]
    house.hello(
        "a", connection=b"new", resume=welcome.session, resume_tx=welcome.tx, resume_rx=welcome.rx
    )
    assert house.last(b"new") == welcome
    assert list(house.membership.by_connection) == [b"new"]


def test_a_session_is_not_taken_up_with_other_routing_ids() -> None:
    house = House()
    a = house.join("a")
    welcome = house.told[a][0]
    house.hello(
        "a", connection=b"c", resume=welcome.session, resume_tx=[b"x" * 16], resume_rx=b"y" * 16
    )
    assert house.last(b"c").code == "identity" and house.member(a).session == welcome.session


def test_a_restarted_broker_takes_up_the_sessions_of_the_old_one() -> None:
    house = House()
    old = 3 << 32 | 1
    ids = {"resume": old, "resume_tx": [b"t" * 16], "resume_rx": b"r" * 16}
    a = house.hello("a", rank=0, world_size=2, was_ready=True, **ids)
    assert house.kinds(a) == ["Welcome", "Started"] and house.member(a).session == old
    house.hello("b", connection=b"c", rank=0, world_size=2, **{**ids, "resume": old + 1})
    assert house.last(b"c").code == "lost"


def _back(house: House, name: str, rank: int, world_size: int = 0) -> bytes:
    return house.hello(
        name,
        rank=rank,
        world_size=world_size,
        was_ready=True,
        resume=3 << 32 | rank + 1,
        resume_tx=[bytes([rank + 1]) * 16],
        resume_rx=bytes([rank + 101]) * 16,
    )


def test_a_restarted_broker_says_who_is_unknown_only_when_all_had_time_to_come_back() -> None:
    house = House()
    a = _back(house, "a", 0)
    assert house.resolve(a, worker="b").name == "Started"
    house.now = 1.0
    _back(house, "b", 1)
    assert house.last(a).value["worker"] == "b"
    house.resolve(a, worker="c")
    house.act(house.membership.watch(house.member(a), [3 << 32 | 3], house.now))
    assert house.last(a).value["worker"] == "b" and house.membership.next_due() == 3.0
    house.now = 3.0
    house.act(house.membership.due(house.now))
    failure, fate = house.told[a][-2:]
    assert failure.code == "unknown" and failure.names == ["a", "b"] and fate.ending == "lost"
    assert house.membership.next_due() is None
    assert house.resolve(a, worker="c").code == "unknown"


def test_a_world_whose_broker_was_restarted_meets_when_all_are_back() -> None:
    house = House()
    a = _back(house, "a", 0, 3)
    house.gather(a, "k", b"1", tolerant=True)
    b = _back(house, "b", 1, 3)
    house.gather(b, "k", b"2", tolerant=True)
    assert house.kinds(a)[-1] == "Started"
    c = _back(house, "c", 2, 3)
    house.gather(c, "k", b"3", tolerant=True)
    assert house.last(a).value == house.last(c).value == {"a": b"1", "b": b"2", "c": b"3"}


def test_a_session_that_was_declared_lost_is_not_taken_up_again() -> None:
    house = House()
    a = house.join("a")
    welcome = house.told[a][0]
    house.end(a)
    house.hello(
        "a", connection=b"c", resume=welcome.session, resume_tx=welcome.tx, resume_rx=welcome.rx
    )
    assert house.last(b"c").code == "lost"


# ------------------------------------------------------------------ lingering, meetings


def test_a_server_that_lingers_stays_until_the_others_have_left() -> None:
    house = House()
    server, client = house.join("s"), house.join("c")
    house.act(house.membership.linger(house.member(server), messages.Linger(4)))
    assert "Answer" not in house.kinds(server)
    house.leave(client)
    assert house.last(server) == messages.Answer(4, None)


def test_a_server_that_nobody_has_met_yet_stays() -> None:
    house = House()
    server = house.join("s")
    house.act(house.membership.linger(house.member(server), messages.Linger(4)))
    assert "Answer" not in house.kinds(server)
    client = house.join("c")
    house.leave(client)
    assert house.last(server) == messages.Answer(4, None)


def test_a_world_meets_when_all_have_come() -> None:
    house = House()
    a = house.join("a", rank=0, world_size=2)
    b = house.join("b", rank=1, world_size=2)
    house.gather(a, "k", b"1")
    assert house.last(a).name == "Started"
    house.gather(b, "k", b"2")
    assert house.last(a).value == house.last(b).value == {"a": b"1", "b": b"2"}


def test_a_meeting_ends_with_an_error_when_one_is_lost_unless_it_is_tolerant() -> None:
    for tolerant in (False, True):
        house = House()
        a, b, c = (house.join(n, rank=r, world_size=3) for r, n in enumerate("abc"))
        house.gather(a, "k", b"1", tolerant=tolerant)
        house.end(c)
        if tolerant:
            house.gather(b, "k", b"2", tolerant=True)
            assert house.last(a).value == {"a": b"1", "b": b"2"}
        else:
            assert house.last(a).code == "lost" and house.last(a).names == ["c"]


def test_who_is_missing_at_a_meeting_is_told() -> None:
    house = House()
    a = house.join("a", rank=0, world_size=3)
    house.join("b", rank=1, world_size=3)
    house.join("c", rank=2, world_size=3)
    house.gather(a, "k")
    house.act(house.membership.who_is_missing(house.member(a), messages.WhoIsMissing(3, "k")))
    assert house.last(a).value == ["b", "c"]


# ------------------------------------------------------------------ tickets


def test_a_session_is_taken_up_only_with_the_ticket_of_its_welcome() -> None:
    tickets = Tickets(b"s" * 32)
    how = {"make_ticket": tickets.make, "check_ticket": tickets.check}
    house = House(**how)
    welcome = house.told[house.join("a", rank=0)][0]
    assert isinstance(welcome, messages.Welcome) and len(welcome.ticket) == 32
    resume = {
        "rank": 0,
        "resume": welcome.session,
        "resume_tx": welcome.tx,
        "resume_rx": welcome.rx,
        "was_ready": True,
    }
    # The same broker, and one that was started again with its secret.
    for again in (house, House(**how)):
        again.membership.epoch = 8
        for worker, ticket in (("a", b""), ("a", b"x" * 32), ("b", welcome.ticket)):
            again.hello(worker, connection=b"thief", ticket=ticket, **resume)
            assert again.last(b"thief").code == "identity"
        again.hello("a", connection=b"new", ticket=welcome.ticket, **resume)
        assert "Welcome" in again.kinds(b"new")
    other = House(make_ticket=Tickets(b"o" * 32).make, check_ticket=Tickets(b"o" * 32).check)
    other.membership.epoch = 8
    other.hello("a", connection=b"new", ticket=welcome.ticket, **resume)
    assert other.last(b"new").code == "identity"


def test_the_secret_of_an_address_is_kept_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRPC_RUN_DIR", str(tmp_path))
    secret = kept_secret("tcp://127.0.0.1:5555")
    assert len(secret) == 32 and kept_secret("tcp://127.0.0.1:5555") == secret
    assert kept_secret("tcp://127.0.0.1:5556") != secret
    (file,) = tmp_path.glob("*5555.secret")
    assert file.stat().st_mode & 0o777 == 0o600 and len(list(tmp_path.iterdir())) == 2
    file.chmod(0o644)
    with pytest.raises(RunFolderError, match="chmod 600"):
        kept_secret("tcp://127.0.0.1:5555")
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(RunFolderError, match="Remove it"):
        kept_secret("tcp://127.0.0.1:5555")
