"""The leak check reports what tests leave behind, by name, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1]

# One run of pytest in a process of its own; each test of it is one case.
CASES = """
import multiprocessing, os, subprocess, sys, threading, time
from multiprocessing import shared_memory
import pytest, zmq

kept = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

@pytest.fixture(scope="module")
def module_process():
    process = subprocess.Popen([*SLEEP, "of-the-module"])
    yield process
    process.kill()
    process.wait()

@pytest.fixture(scope="module")
def module_thread():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="of-the-module")
    thread.start()
    yield
    end.set()
    thread.join()

@pytest.fixture
def function_descriptor():
    descriptor = os.open("/dev/null", os.O_RDONLY)
    yield
    os.close(descriptor)

def test_clean():
    assert subprocess.run([sys.executable, "-c", "pass"]).returncode == 0

def test_uses_module_process(module_process, module_thread, function_descriptor):
    pass

def test_asks_for_a_module_fixture_late(request):
    request.getfixturevalue("late")

@pytest.fixture(scope="module")
def late():
    process = subprocess.Popen([*SLEEP, "late"])
    yield
    process.kill()
    process.wait()

def test_ends_within_grace():
    threading.Thread(target=time.sleep, args=(0.15,)).start()

def test_cycle_is_collected():
    cycle = [open("/dev/null")]
    cycle.append(cycle)

def test_sends_without_copy():
    with zmq.Context() as context:
        a, b = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        a.bind("inproc://x"); b.connect("inproc://x")
        a.send(bytearray(1 << 20), copy=False)
        assert len(b.recv()) == 1 << 20
        a.close(); b.close()

def test_leaks_thread():
    end = threading.Event()
    threading.Thread(target=end.wait, name="leaked-thread", daemon=True).start()

def test_leaks_descriptor():
    kept.append(open("leaked-file", "w"))

def test_leaks_process():
    kept.append(subprocess.Popen([*SLEEP, "leaked-child"]))

def test_leaks_unwaited_child():
    pid = os.fork()
    if pid == 0:
        os._exit(0)

def test_leaks_grandchild():
    # Its parent ends, so it is no descendant any more; seen by its mark with the module.
    code = "import time; time.sleep(600)"
    command = f"exec >/dev/null 2>&1; {sys.executable} -c '{code}' leaked-orphan &"
    subprocess.run(["sh", "-c", command], start_new_session=True)

def test_leaks_segment():
    name = f"leaked-segment-{os.getpid()}"
    open(f"/dev/shm/{name}", "w").close()

def test_leaks_context():
    context = zmq.Context()
    context.socket(zmq.PAIR).close()
    kept.append(context)

def test_not_blamed_for_earlier_leaks():
    pass

def test_fails_and_leaks():
    kept.append(subprocess.Popen([*SLEEP, "leaked-by-a-failure"]))
    assert False

@pytest.mark.leaks_checked_by_module
def test_may_grow():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="grown-thread", daemon=True).start()
"""

CLEAN = """
def test_nothing():
    pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "conftest.py").write_text('pytest_plugins = ["support.leaks"]\n')
    (folder / "pytest.ini").write_text("[pytest]\nleak_grace = 0.3\n")
    (folder / "test_cases.py").write_text(CASES)
    (folder / "test_next.py").write_text(CLEAN)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", "--color=no"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_ADDOPTS": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(run.stdout, run.stderr)
    return run.stdout


@pytest.mark.parametrize(
    "name",
    [
        "clean",
        "uses_module_process",
        "asks_for_a_module_fixture_late",
        "ends_within_grace",
        "cycle_is_collected",
        "sends_without_copy",
        "not_blamed_for_earlier_leaks",
    ],
)
def test_tidy_test_passes(report: str, name: str) -> None:
    assert f"PASSED test_cases.py::test_{name}" in report
    assert f"ERROR test_cases.py::test_{name}" not in report


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("leaks_thread", "thread 'leaked-thread'"),
        ("leaks_descriptor", "leaked-file"),
        ("leaks_process", "leaked-child"),
        ("leaks_unwaited_child", "nobody waited for it"),
        ("leaks_segment", "/dev/shm/leaked-segment-"),
        ("leaks_context", "of a ZeroMQ context not terminated"),
    ],
)
def test_leak_is_reported_with_its_name(report: str, name: str, shown: str) -> None:
    assert f"ERROR test_cases.py::test_{name} - Failed: The test test_{name} left behind" in report
    _, _, section = report.partition(f"ERROR at teardown of test_{name} _")
    section, _, _ = section.partition("\n____")
    assert shown in section


def test_failed_test_is_not_an_error_too_but_its_leak_is_shown(report: str) -> None:
    assert "FAILED test_cases.py::test_fails_and_leaks" in report
    assert "ERROR test_cases.py::test_fails_and_leaks" not in report
    _, _, section = report.partition("_ test_fails_and_leaks _")
    assert "leaked-by-a-failure" in section.partition("\n____")[0]


def test_module_is_checked_at_its_end(report: str) -> None:
    assert "PASSED test_cases.py::test_leaks_grandchild" in report
    assert "PASSED test_cases.py::test_may_grow" in report
    _, _, section = report.partition("ERROR at teardown of test_may_grow _")
    section, _, _ = section.partition("\n____")
    assert "The module test_cases.py left behind" in section
    assert "leaked-orphan" in section
    assert "thread 'grown-thread'" in section
    assert "leaked-thread" not in section


def test_later_modules_are_not_blamed(report: str) -> None:
    assert "PASSED test_next.py::test_nothing" in report
    assert "ERROR test_next.py" not in report
