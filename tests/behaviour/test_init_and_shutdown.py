"""Joining and leaving: rendezvous of all kinds, embedded brokers, jobs, worlds that do not come together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from together import broker_of, brokers_of, is_running, meet, tell, wait_for, wait_until

import zrpc as rpc

from support.cluster import environment, run_ranks, shared_server

LIMIT = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(rank: int, world: int | None, init_method: str, name: str = "", **options: Any) -> None:
    """init_rpc over that rendezvous."""
    rpc.init_rpc(
        name or f"w{rank}",
        rank=rank,
        world_size=world,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=init_method, **options),
    )


def ask_all(names: list[str]) -> list[int]:
    return [rpc.rpc_sync(name, os.getpid) for name in names]


# ------------------------------------------------------------------ rendezvous


def _three_times(rank: int, kind: str, where: str) -> int:
    if kind == "env":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=where)
    for number in range(3):
        # Each time another process is rank 0, which listens on that port.
        mine = (rank + number) % 2
        method = {"env": "env://", "tcp": f"tcp://127.0.0.1:{where}", "file": f"file://{where}"}[
            kind
        ]
        start(mine, 2, method)
        assert len(set(ask_all(["w0", "w1"]))) == 2
        rpc.shutdown()
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            rpc.rpc_sync("w0", os.getpid)
    return os.getpid()


@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
def test_a_world_meets_three_times_in_one_process_with_other_ranks(
    kind: str, tmp_path: Path
) -> None:
    where = str(tmp_path / "meet") if kind == "file" else str(free_port())
    run_ranks(_three_times, 2, kind, where, init=False)


def _come_and_go(rank: int, where: str) -> None:
    if rank == 0:
        start(0, None, where, "first")
        assert rpc.rpc_sync("first", os.getpid) == os.getpid()  # alone, it works
        tell("first")
        wait_for("second-done")
        assert rpc.rpc_sync("third", os.getpid) != os.getpid()
        tell("first-done")
    elif rank == 1:
        wait_for("first")
        start(1, None, where, "second")
        assert len(set(ask_all(["first", "second"]))) == 2
        tell("second")
        wait_for("third")
        assert len(set(ask_all(["first", "second", "third"]))) == 3
        tell("second-done")
    else:
        wait_for("second")
        start(2, None, where, "third")
        assert len(set(ask_all(["first", "second", "third"]))) == 3
        tell("third")
        wait_for("first-done")
    rpc.shutdown()


def test_without_a_world_size_workers_come_and_go(tmp_path: Path) -> None:
    run_ranks(_come_and_go, 3, f"file://{tmp_path}/meet", init=False)


def _after_the_first_has_gone(rank: int, where: str) -> None:
    if rank == 0:
        start(0, None, where, "first")
        tell("first")
        rpc.shutdown()
        tell("gone")
    else:
        wait_for("first")
        wait_for("gone")
        start(1, None, where, "later")
        assert rpc.rpc_sync("later", os.getpid) == os.getpid()
        rpc.shutdown()


def test_a_worker_that_finds_the_broker_gone_starts_the_next(tmp_path: Path) -> None:
    run_ranks(_after_the_first_has_gone, 2, f"file://{tmp_path}/meet", init=False)


def test_a_worker_without_anything_to_meet_by_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="zrpc broker") as caught:
        rpc.init_rpc(
            "me",
            rpc_backend_options=rpc.RpcBackendOptions(broker="tcp://127.0.0.1:1", rpc_timeout=1),
        )
    assert "ZRPC_BROKER" in str(caught.value)
    with pytest.raises(ValueError, match="RANK"):
        rpc.init_rpc(
            "me",
            world_size=2,
            rpc_backend_options=rpc.RpcBackendOptions(broker="tcp://127.0.0.1:1"),
        )


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"name": "a b"}, RuntimeError, "Worker name must match"),
        ({"name": ""}, RuntimeError, "must be non-empty"),
        ({"name": "x" * 128}, RuntimeError, "shorter than 128"),
        ({"name": 5}, RuntimeError, "must be of type str"),
        ({"name": "a", "backend": 5}, TypeError, "BackendType"),
        ({"name": "a", "rpc_backend_options": {}}, TypeError, "RpcBackendOptions"),
        ({"name": "a", "rank": 3, "world_size": 2}, ValueError, "do not fit"),
        ({"name": "a", "rank": "0"}, TypeError, "rank"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_started(
    arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        rpc.init_rpc(**arguments)


# ------------------------------------------------------------------ worlds that do not come together


def _missing(rank: int, where: str) -> str:
    begun = time.monotonic()
    if rank < 2:
        with pytest.raises(rpc.RpcTimeoutError) as caught:
            start(rank, 4, where, rpc_timeout=1)
        assert time.monotonic() - begun < 10
        with pytest.raises(RuntimeError, match="not been initialized"):
            rpc.get_worker_info()
        return str(caught.value)
    return ""


def test_a_peer_that_never_comes_is_named_after_the_timeout(tmp_path: Path) -> None:
    texts = run_ranks(_missing, 2, f"file://{tmp_path}/meet", init=False)
    assert all("rank 2" in text and "rank 3" in text and "rank 1 of" not in text for text in texts)


def _same_name(rank: int, where: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not unique.*process \d+"):
        start(rank, 2, where, "same", rpc_timeout=20)
    assert time.monotonic() - begun < 10


def test_a_name_that_is_taken_is_an_error_for_all_who_wait(tmp_path: Path) -> None:
    run_ranks(_same_name, 2, f"file://{tmp_path}/meet", init=False)


def _twice(rank: int) -> None:
    with pytest.raises(RuntimeError, match="already initialized in this process, as worker 'w0'"):
        rpc.init_rpc("again")


def test_a_second_init_in_one_process_is_refused() -> None:
    run_ranks(_twice, 1)


# ------------------------------------------------------------------ leaving


def _late(rank: int) -> None:
    if rank == 1:
        time.sleep(1.5)


def test_shutdown_waits_for_a_peer_that_comes_late() -> None:
    run_ranks(_late, 2)


def _never_leaves(rank: int) -> None:
    if rank == 1:
        wait_for("done")
        rpc.shutdown(graceful=False)
        return
    begun = time.monotonic()
    with pytest.raises(rpc.RpcTimeoutError, match="'w1' did not come"):
        rpc.shutdown(timeout=1)
    assert 0.9 < time.monotonic() - begun < 10
    with pytest.raises(RuntimeError, match="not been initialized"):
        rpc.rpc_sync("w1", os.getpid)
    tell("done")


def test_shutdown_with_a_limit_names_who_has_not_called_it_and_is_down_all_the_same() -> None:
    run_ranks(_never_leaves, 2)


def _write(path: str) -> None:
    time.sleep(0.7)
    Path(path).write_text("x")


def _unawaited(rank: int, path: str) -> None:
    if rank == 0:
        rpc.rpc_async("w1", _write, args=(path,))
        rpc.shutdown()
        assert Path(path).read_text() == "x"


def test_shutdown_lets_calls_end_that_nobody_waits_for(tmp_path: Path) -> None:
    run_ranks(_unawaited, 2, str(tmp_path / "written"))


def _one_dies(rank: int) -> None:
    meet("all")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    rpc.shutdown()
    assert time.monotonic() - begun < 20


def test_survivors_of_a_killed_peer_shut_down() -> None:
    run_ranks(_one_dies, 3, may_die=(2,))


def test_a_hundred_rounds_leave_no_descriptor_and_no_thread(broker: str) -> None:
    process = psutil.Process()
    options = rpc.RpcBackendOptions(broker=f"{broker}/rounds")

    def once() -> None:
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("me", max, args=(1, 2)) == 2
        rpc.shutdown()

    for _ in range(3):
        once()
    descriptors, threads = process.num_fds(), threading.active_count()
    for _ in range(100):
        once()
    assert process.num_fds() <= descriptors and threading.active_count() <= threads


# ------------------------------------------------------------------ jobs


def test_two_runs_of_one_script_on_one_broker_do_not_see_each_other(
    broker: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import zrpc as rpc
        rank = int(sys.argv[1])
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
        print(os.environ["MARK"], rpc.rpc_sync(f"w{1 - rank}", os.getenv, args=("MARK",)))
        rpc.shutdown()
        """)
    )
    runs = []
    for job in ("one", "two"):
        for rank in ("0", "1"):
            # The first run names its job by the variable, the second by the address.
            place = {"ZRPC_BROKER": broker, "ZRPC_JOB": job}
            if job == "two":
                place = {"ZRPC_BROKER": f"{broker}/two"}
            runs.append(
                subprocess.Popen(
                    [sys.executable, script, rank],
                    env=environment(MARK=job, **place),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
    said = [run.communicate(timeout=60)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert said == ["one one", "one one", "two two", "two two"]


# ------------------------------------------------------------------ the broker of a job


def _stay(rank: int, where: str, fork: bool) -> None:
    start(rank, 2, where)
    if rank == 0:
        child = os.fork() if fork else -1
        if child == 0:
            time.sleep(60)  # a child that was left over: it holds all connections open
            os._exit(0)
        tell("child", str(child))
        tell("broker", str(broker_of().pid))
    tell(f"here{rank}")
    time.sleep(60)


@pytest.mark.parametrize(("killed", "fork"), [((0, 1), False), ((0,), False), ((0, 1), True)])
def test_the_broker_of_a_job_does_not_outlive_it(
    killed: tuple[int, ...], fork: bool, tmp_path: Path
) -> None:
    with shared_server().start_ranks(
        _stay, 2, f"file://{tmp_path}/meet", fork, init=False
    ) as ranks:
        for rank in (0, 1):
            ranks.wait_for_file(f"here{rank}")
        broker = psutil.Process(int(ranks.wait_for_file("broker")))
        child = int(ranks.wait_for_file("child"))
        for rank in killed:
            ranks.kill(rank)
        if len(killed) == 1:
            time.sleep(0.5)
            assert is_running(broker), "a worker is left that needs it"
            ranks.kill(1)
        try:
            wait_until(lambda: not is_running(broker), "the end of the broker", 20)
        finally:
            if child > 0:
                os.kill(child, signal.SIGKILL)


def _in_a_thread(rank: int, where: str) -> None:
    thread = threading.Thread(target=start, args=(rank, 2, where))
    thread.start()
    thread.join()
    time.sleep(0.3)
    if rank == 0:
        assert is_running(broker_of())
    assert rpc.rpc_sync(f"w{1 - rank}", os.getpid) != os.getpid()
    rpc.shutdown()


def test_init_in_a_thread_that_ends_leaves_a_broker_that_lives(tmp_path: Path) -> None:
    run_ranks(_in_a_thread, 2, f"file://{tmp_path}/meet", init=False)


def _broker_dies(rank: int, where: str) -> None:
    start(rank, 2, where)
    meet("before")
    if rank == 0:
        broker = broker_of()
        broker.kill()
        wait_until(lambda: not is_running(broker), "its end")
        wait_until(lambda: bool(brokers_of()), "a new one")
    deadline = time.monotonic() + 40
    while True:
        try:
            assert rpc.rpc_sync(f"w{1 - rank}", max, args=(1, 2), timeout=2) == 2
            break
        except rpc.RpcTimeoutError:
            assert time.monotonic() < deadline
    meet("after")
    rpc.shutdown()


def test_a_broker_that_dies_is_started_again_and_its_workers_go_on(tmp_path: Path) -> None:
    run_ranks(_broker_dies, 2, f"file://{tmp_path}/meet", init=False, timeout=80)


# ------------------------------------------------------------------ processes forked from a worker


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def _forked(rank: int) -> None:
    if rank == 0:
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
        for _ in range(2):
            assert sorted(int(x) for batch in loader for x in batch) == list(range(8))
            assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                rpc.rpc_sync("w1", max, args=(1, 2))
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            text = file.read()
        os.wait()
        assert re.search("forked from one that uses zrpc.*Call init_rpc in this process", text), (
            text
        )
        assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
    meet("done")


def test_data_loaders_fork_inside_a_worker_and_a_child_that_calls_gets_a_clear_error() -> None:
    run_ranks(_forked, 2)
