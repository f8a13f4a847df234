"""The programs in ``examples/``, run as the README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from together import wait_until

from support.cluster import ROOT, broker_process, environment

EXAMPLE = str(ROOT / "examples" / "parameter_server.py")
ZRPC = "from broker.cli import main; main()"


@pytest.fixture
def commands(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Starts commands; those that still run at the end are terminated and waited for."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment(OMP_NUM_THREADS="1", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
    for process in started:
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def workers_at(broker: str) -> set[str]:
    """The names that ``zrpc status`` shows as ready."""
    status = subprocess.run(
        [sys.executable, "-c", ZRPC, "status", "--broker", broker, "--json"],
        env=environment(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    jobs = json.loads(status.stdout)["jobs"].values()
    return {w["name"] for job in jobs for w in job["workers"] if w["state"] == "ready"}


def accuracy(process: subprocess.Popen[str]) -> float:
    """The figure of its last line; it has ended well."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    name, _, value = said.splitlines()[-1].partition(" ")
    assert name == "accuracy", said
    return float(value)


def test_the_parameter_server_trains_with_a_broker_of_its_own(commands) -> None:  # type: ignore[no-untyped-def]
    assert accuracy(commands(EXAMPLE, "--steps", "100")) > 0.9


def test_the_parameter_server_trains_across_terminals(commands) -> None:  # type: ignore[no-untyped-def]
    with broker_process() as broker:
        worker = ("-c", ZRPC, "worker", "--import", EXAMPLE, "--name")
        commands(*worker, "ps", ZRPC_BROKER=broker)
        commands(*worker, "trainer", "--nproc", "2", ZRPC_BROKER=broker)
        wait_until(
            lambda: workers_at(broker) == {"ps", "trainer-0", "trainer-1"}, "the workers", 60
        )
        script = commands(
            EXAMPLE, "--steps", "100", "--broker", broker, "--trainers", "trainer-0,trainer-1"
        )
        assert accuracy(script) > 0.9
