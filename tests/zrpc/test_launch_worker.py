"""``zrpc worker``: real processes that serve, drain, die and come back."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from launching import (
    LIMIT,
    ROOT,
    alive,
    command,
    completed,
    end_by,
    environment,
    started,
)

import zrpc as rpc
from zrpc.command_worker import worker


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    """The address of a broker."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:1] = [{str(ROOT)!r}]; from broker.cli import main; main()",
            "broker",
            "--bind",
            "tcp://127.0.0.1:0",
            "--ready-fd",
            str(writer),
        ],
        pass_fds=[writer],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], LIMIT)
        assert ready
        address = os.read(reader, 1000).decode().split()[0]
        yield address
    finally:
        os.close(reader)
        process.terminate()
        process.wait(LIMIT)


@pytest.fixture
def caller(broker: str) -> Iterator[str]:
    """The name of this process, as a member of the job ``default``."""
    name = f"caller-{time.monotonic_ns()}"
    options = rpc.RpcBackendOptions(broker=broker, job="default")
    rpc.init_rpc(name, rpc_backend_options=options)
    try:
        yield name
    finally:
        rpc.shutdown(graceful=False)


class Watched:
    """What a command has printed on stderr, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self._descriptor = process.stderr.fileno()
        self.text = ""

    def wait_for(self, pattern: str, count: int = 1) -> list[Any]:
        """Read until ``pattern`` has been found ``count`` times."""
        end = time.monotonic() + LIMIT
        while len(found := re.findall(pattern, self.text)) < count:
            ready, _, _ = select.select([self._descriptor], [], [], max(0, end - time.monotonic()))
            data = os.read(self._descriptor, 65536) if ready else b""
            assert data, f"{pattern!r} did not come; what came is:\n{self.text}"
            self.text += data.decode()
        return found


READY = r"worker (\S+) is ready at \S+ \(pid (\d+)\); stop it with Ctrl-C\n"


def test_workers_are_named_logged_restarted_and_ended_together(broker: str, tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("print('imported by', __name__)\n")
    folder = tmp_path / "run"
    arguments = ["--name", "w", "--broker", broker, "--nproc", "2", "--restart"]
    with started(
        command("worker", *arguments, "--import", "chatty"), tmp_path, ZRPC_RUN_DIR=str(folder)
    ) as process:
        watched = Watched(process)
        ready = dict(watched.wait_for(READY, 2))
        assert sorted(ready) == ["w-0", "w-1"]
        # The program itself has not imported it: each worker did.
        watched.wait_for(r"\[w-[01]\] imported by chatty\n", 2)

        os.kill(int(ready["w-1"]), signal.SIGKILL)
        watched.wait_for(r"worker w-1 \(pid \d+\) was killed by SIGKILL .* started again in 0.1 s")
        again = watched.wait_for(READY, 3)[-1]
        assert again[0] == "w-1"
        assert again[1] != ready["w-1"]

        # As a service manager does it: to every process, on top of what the command sends.
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    logs = {path.name.split(".")[0]: path.read_text() for path in folder.iterdir()}
    assert sorted(logs) == ["w-0", "w-1"]
    assert logs["w-0"].splitlines() == ["imported by chatty"]
    assert logs["w-1"].splitlines() == ["imported by chatty"] * 2


def test_a_fresh_python_serves_where_asked(broker: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('imported')\n")
    arguments = ["--name", "fresh", "--broker", broker, "--start", "spawn", "--log-dir", "logs"]
    with started(command("worker", *arguments, "--import", "beside.py"), tmp_path) as process:
        found = Watched(process).wait_for(READY)
        assert found[0][1] != str(process.pid)
        assert end_by(process, signal.SIGTERM)[0] == 0
    assert (tmp_path / "logs" / "fresh.log").read_text() == "imported\n"


@pytest.mark.parametrize("count", [1, 2])
def test_an_import_that_fails_is_shown_and_ends_all(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    name = f"broken{count}"
    (tmp_path / f"{name}.py").write_text("def deep():\n    return 1 / 0\n\ndeep()\n")
    arguments = ["--name", "w", "--broker", broker, "--import", name]
    if count == 1:
        monkeypatch.syspath_prepend(tmp_path)
        result = CliRunner().invoke(worker, arguments)
        code, errors = result.exit_code, result.output
    else:
        arguments += ["--nproc", "2", "--restart", "--log-dir", "logs"]
        ended = completed(command("worker", *arguments), tmp_path)
        code, errors = ended.returncode, ended.stderr
        assert "before it could serve" in errors
    assert code == 1
    assert "ZeroDivisionError: division by zero" in errors
    assert "in deep" in errors
    assert "serve.py" not in errors
    assert f"--import {name} has failed" in errors


def test_no_broker_is_a_sentence_and_code_1() -> None:
    arguments = ["--name", "w", "--broker", "tcp://127.0.0.1:9", "--wait", "0.2"]
    result = CliRunner().invoke(worker, arguments)
    assert result.exit_code == 1
    assert "No broker answers at tcp://127.0.0.1:9" in result.output
    assert "zrpc broker --bind" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--name"),
        (["--name", "with space"], "with space"),
        (["--name", "w", "--broker", "carrier pigeon"], "carrier pigeon"),
        (["--name", "w", "--nproc", "0"], "--nproc"),
        (["--name", "w", "--drain", "-1"], "--drain"),
    ],
)
def test_wrong_usage_is_a_sentence_and_code_2(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(worker, arguments)
    assert result.exit_code == 2
    assert text in result.output


# ------------------------------------------------------------------ with calls


def test_a_worker_keeps_its_name_serves_and_drains_on_sigterm(
    broker: str, caller: str, tmp_path: Path
) -> None:
    with started(command("worker", "--name", "busy", "--broker", broker), tmp_path) as process:
        assert Watched(process).wait_for(READY) == [("busy", str(process.pid))]
        second = completed(command("worker", "--name", "busy", "--broker", broker), tmp_path)
        assert second.returncode == 1
        assert "not unique" in second.stderr
        assert "Traceback" not in second.stderr
        assert rpc.rpc_sync("busy", max, args=(1, 2)) == 2
        # More than may be under way at once, so it takes a while after its handler has ended.
        large = 40_000_000
        future = rpc.rpc_async("busy", lambda: (time.sleep(1.0), torch.ones(large))[1])
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(RuntimeError, match="leav"):
            rpc.rpc_sync("busy", max, args=(1, 2))
        assert future.wait().sum() == large
        assert process.wait(LIMIT) == 0


@pytest.mark.parametrize(
    ("arguments", "name", "signals", "code"),
    [
        (["--drain", "0.3"], "stuck", [signal.SIGTERM], 1),
        ([], "stuck", [signal.SIGTERM, signal.SIGTERM], 143),
        (["--nproc", "2", "--log-dir", "logs"], "stuck-1", [signal.SIGINT], 130),
    ],
)
def test_a_call_that_goes_on_does_not_keep_a_worker(
    broker: str,
    caller: str,
    tmp_path: Path,
    arguments: list[str],
    name: str,
    signals: list[signal.Signals],
    code: int,
) -> None:
    start = ["--name", "stuck", "--broker", broker, *arguments]
    with started(command("worker", *start), tmp_path) as process:
        watched = Watched(process)
        watched.wait_for(READY, 2 if "-" in name else 1)
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        future = rpc.rpc_async(name, time.sleep, args=(60.0,))
        time.sleep(0.2)
        begin = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        assert process.wait(LIMIT) == code
        assert time.monotonic() - begin < 20
        assert not [pid for pid in family if alive(pid)]
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        with pytest.raises(rpc.WorkerLostError):
            future.wait()
