"""The kit that starts processes for tests: results, failures, hangs, deaths, nothing left."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import zrpc as rpc

from support.cluster import Cluster, ForkServer, RankError, broker_process, run_ranks


def double(rank: int, factor: int = 2) -> int:
    return rank * factor


def describe(rank: int) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "parent": os.getppid(),
        "threads": threading.active_count(),
        "tensor": torch.ones(2) * rank,
        "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
        "variable": os.environ.get("A_VARIABLE"),
        "stdin": sys.stdin.read(),
        "random": os.urandom(1) and __import__("random").random(),
    }


def fail(rank: int) -> None:
    if rank == 1:
        print("printed before the failure")
        raise KeyError("the missing one")


def fail_while_others_wait(rank: int) -> None:
    if rank == 1:
        raise KeyError("the missing one")
    time.sleep(600)


def hang(rank: int) -> None:
    if rank == 1:
        hang_deep_inside()


def hang_deep_inside() -> None:
    threading.Event().wait()


def die(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def leave_with(rank: int, code: int) -> None:
    os._exit(code)


def return_a_lock(rank: int) -> Any:
    return threading.Lock()


def wait_for_the_end(rank: int) -> None:
    folder = Path(os.environ["ZRPC_TEST_FOLDER"])
    (folder / f"{rank}.ready").touch()
    time.sleep(600)


def leave_a_child(rank: int) -> int:
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    ).pid


def test_each_rank_returns_its_value() -> None:
    assert run_ranks(double, 3, 10, init=False) == [0, 10, 20]


def test_closures_travel_by_value() -> None:
    offset = 5
    assert run_ranks(lambda rank: rank + offset, 2, init=False) == [5, 6]


def test_ranks_are_clean_processes_of_their_own() -> None:
    ranks = run_ranks(describe, 2, init=False, environment={"A_VARIABLE": "set"})
    assert len({rank["pid"] for rank in ranks} | {os.getpid()}) == 3
    assert ranks[0]["parent"] == ranks[1]["parent"] != os.getpid()
    assert ranks[0]["random"] != ranks[1]["random"]
    for number, rank in enumerate(ranks):
        assert rank["group"] == rank["pid"]
        assert rank["threads"] == 1
        assert rank["tensor"].tolist() == [number, number]
        assert rank["descriptors"] == [0, 1, 2]
        assert rank["variable"] == "set"
        assert rank["stdin"] == ""


def test_a_rank_costs_less_than_a_fresh_python(fork_server: ForkServer) -> None:
    fork_server.run_ranks(double, 1, init=False)
    start = time.monotonic()
    for _ in range(5):
        fork_server.run_ranks(double, 1, init=False)
    each = (time.monotonic() - start) / 5
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    assert each < (time.monotonic() - start) / 2


def test_failure_shows_the_remote_traceback_and_output() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fail, 2, init=False)
    text = str(caught.value)
    assert "rank 1 (pid " in text and "failed:" in text
    assert "in fail\n" in text and "KeyError: 'the missing one'" in text
    assert "printed before the failure" in text
    assert "rank 0" not in text


def test_failure_is_not_hidden_by_ranks_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("support.cluster.AFTER_FAILURE", 0.2)
    with pytest.raises(RankError, match="KeyError: 'the missing one'") as caught:
        run_ranks(fail_while_others_wait, 2, init=False)
    assert "rank 0" in str(caught.value) and "still ran" in str(caught.value)


def test_hang_names_the_rank_and_shows_its_stack() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(hang, 2, init=False, timeout=0.5)
    text = str(caught.value)
    assert "rank 1 (pid " in text and "still ran after 0.5 s" in text
    assert "in hang_deep_inside" in text
    assert "rank 0" not in text
    pid = int(text.partition("(pid ")[2].partition(")")[0])
    assert not psutil.pid_exists(pid)


def test_death_is_a_failure_that_names_the_signal() -> None:
    with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
        run_ranks(die, 2, init=False)


def test_death_that_is_expected_gives_none() -> None:
    assert run_ranks(die, 3, init=False, may_die=[1]) == [0, None, 2]


@pytest.mark.parametrize("code", [0, 3])
def test_end_without_a_result_is_a_failure(code: int) -> None:
    with pytest.raises(RankError, match=f"ended with code {code}"):
        run_ranks(leave_with, 1, code, init=False)


def test_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(RankError, match=r"The result cannot be pickled:[\s\S]*lock"):
        run_ranks(return_a_lock, 1, init=False)


def test_rank_can_be_killed_while_it_runs(fork_server: ForkServer) -> None:
    with fork_server.start_ranks(wait_for_the_end, 2, init=False) as ranks:
        for rank in (0, 1):
            ranks.wait_for_file(f"{rank}.ready")
        assert ranks.alive(1)
        ranks.kill(1)
        assert ranks.wait(1) == -signal.SIGKILL
        assert not ranks.alive(1)
        assert ranks.alive(0)
        pids = ranks.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_waiting_for_a_file_ends_when_the_rank_fails(fork_server: ForkServer) -> None:
    with (
        fork_server.start_ranks(fail, 2, init=False) as ranks,
        pytest.raises(RankError, match="KeyError"),
    ):
        ranks.wait_for_file("never")


def test_what_a_rank_leaves_is_seen_as_ours() -> None:
    (pid,) = run_ranks(leave_a_child, 1, init=False)
    left = psutil.Process(pid)
    assert pid in {child.pid for child in psutil.Process().children(recursive=True)}
    left.kill()
    end = time.monotonic() + 10
    while psutil.pid_exists(pid):  # nobody but the server can collect it
        assert time.monotonic() < end
        time.sleep(0.01)


def test_module_that_cannot_be_imported_is_named(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "house_breaks_elsewhere.py"
    module.write_text(
        "import threading\n"
        "def work(rank): return rank\n"
        "if 'support.fork_server' in __import__('sys').modules['__main__'].__spec__.name:\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True, name='its').start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import house_breaks_elsewhere

    with ForkServer() as server, pytest.raises(RankError, match="has started threads") as caught:
        server.run_ranks(house_breaks_elsewhere.work, 1, init=False)
    assert "its" in str(caught.value)
    assert fork_server.run_ranks(double, 1, init=False) == [0]


def test_killed_server_takes_its_ranks_along_and_is_reported() -> None:
    with ForkServer() as server:
        ranks = server.start_ranks(wait_for_the_end, 1, init=False)
        ranks.wait_for_file("0.ready")
        os.kill(server._process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match="fork server has ended"):
            ranks.results()
        end = time.monotonic() + 10
        while psutil.pid_exists(ranks.pids[0]) and (
            psutil.Process(ranks.pids[0]).status() != psutil.STATUS_ZOMBIE
        ):
            assert time.monotonic() < end
            time.sleep(0.01)


def ask_the_other(rank: int, factor: int) -> int:
    return rpc.rpc_sync(f"w{1 - rank}", operator.mul, args=(rank, factor))


def say_who_i_am(rank: int) -> tuple[str, int]:
    info = rpc.get_worker_info()
    rpc.shutdown()
    return info.name, info.id


def multiply_at(rank: int, names: list[str], address: str) -> list[int]:
    # Without a world: workers of a cluster come and go.
    rpc.init_rpc("visitor", rpc_backend_options=rpc.RpcBackendOptions(broker=address))
    try:
        return [rpc.rpc_sync(name, operator.mul, args=(6, 7)) for name in names]
    finally:
        rpc.shutdown()


def test_ranks_are_members_of_one_job() -> None:
    assert run_ranks(ask_the_other, 2, 10) == [0, 10]


def test_rank_may_shut_down_itself() -> None:
    assert run_ranks(say_who_i_am, 2) == [("w0", 0), ("w1", 1)]


def test_broker_process_answers_and_ends() -> None:
    with broker_process() as address:
        assert address.startswith("tcp://127.0.0.1:")
        (pid,) = [child.pid for child in psutil.Process().children() if "broker" in child.cmdline()]
        assert run_ranks(ask_the_other, 2, 10, options={"broker": address}) == [0, 10]
    assert not psutil.pid_exists(pid)


def test_broker_that_cannot_start_is_shown_with_its_log() -> None:
    with (
        pytest.raises(AssertionError, match=r"ended with code 2:\n.*nonsense"),
        broker_process(bind="nonsense"),
    ):
        pass


def test_cluster_serves_until_its_block_ends(fork_server: ForkServer) -> None:
    with Cluster(fork_server, ["a", "b"]) as cluster:
        pids = [cluster.pid(name) for name in cluster.names]
        address = cluster.address
        assert run_ranks(multiply_at, 1, ["a", "b"], address, init=False) == [[42, 42]]
        cluster.kill("a")
        with pytest.raises(RankError, match="was lost"):
            run_ranks(multiply_at, 1, ["a"], address, init=False)
    assert not any(psutil.pid_exists(pid) for pid in pids)
