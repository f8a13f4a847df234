"""``zrpc run``: real ranks of real scripts."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from launching import (
    LIMIT,
    alive,
    command,
    completed,
    end_by,
    environment,
    started,
    wait_for_files,
    wait_until,
)

from zrpc.command_run import run

SHOW = """
import atexit, json, os, random, subprocess, sys, threading, time
import beside
import numpy, torch
from zrpc.callables import script_digest

class Defined:
    pass

print(json.dumps(dict(
    variables={k: os.environ.get(k) for k in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "ZRPC_BROKER", "ZRPC_JOB", "OMP_NUM_THREADS")},
    argv=sys.argv, file=__file__, path=sys.path[0], main=sys.modules["__main__"].__file__,
    module=Defined.__module__, digest=script_digest(),
    random=[random.random(), numpy.random.rand(), torch.rand(1).item()],
    threads=torch.get_num_threads(), stdin=sys.stdin.read(),
    open=[os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
          if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
    handlers=[signal_name for signal_name in ("SIGTERM", "SIGHUP", "SIGCHLD")
              if __import__("signal").getsignal(getattr(__import__("signal"), signal_name)) != 0],
    daemon=subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
)))
print("to stderr", file=sys.stderr)
atexit.register(lambda: print("at exit", sys.modules["__main__"].Defined.__name__))
threading.Timer(0.05, lambda: print("thread")).start()
sys.stdout.write("x" * 100_000 + "\\n")
print("no end of line", end="")
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "show.py").write_text(SHOW)
    (folder / "beside.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def shown(
    scripts: Path, tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    script = os.path.relpath(scripts / "show.py", elsewhere)
    return completed(command("run", "--nproc", "3", script, "--nproc", "9", "-m"), elsewhere)


@pytest.fixture(scope="module")
def reports(shown: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    assert shown.returncode == 0, shown.stderr
    found = {}
    for line in shown.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        if text.startswith("{"):
            found[int(prefix.strip("[]"))] = json.loads(text)
    assert sorted(found) == [0, 1, 2]
    return found


def test_each_rank_finds_its_place_in_the_environment(reports: dict[int, dict[str, Any]]) -> None:
    for rank, report in reports.items():
        variables = report["variables"]
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "3"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["ZRPC_BROKER"].startswith("tcp://127.0.0.1:")
    for name in ("MASTER_PORT", "ZRPC_BROKER", "ZRPC_JOB"):
        assert len({report["variables"][name] for report in reports.values()}) == 1


def test_a_script_runs_as_python_would_run_it(
    scripts: Path, reports: dict[int, dict[str, Any]]
) -> None:
    for report in reports.values():
        assert report["argv"][1:] == ["--nproc", "9", "-m"]
        assert os.path.samefile(report["file"], scripts / "show.py")
        assert os.path.isabs(report["file"])
        assert report["main"] == report["file"]
        assert report["module"] == "__main__"
        assert os.path.samefile(report["path"], scripts)


def test_ranks_run_the_same_program(scripts: Path, reports: dict[int, dict[str, Any]]) -> None:
    import hashlib

    digest = hashlib.sha256((scripts / "show.py").read_bytes()).hexdigest()[:32]
    assert {report["digest"] for report in reports.values()} == {digest}


def test_forked_ranks_look_like_fresh_processes(reports: dict[int, dict[str, Any]]) -> None:
    for kind in range(3):
        assert len({report["random"][kind] for report in reports.values()}) == 3
    for report in reports.values():
        assert report["stdin"] == ""
        assert report["handlers"] == []
        assert not [name for name in report["open"] if name.startswith("pipe:")]


def test_several_ranks_compute_with_one_thread_each_and_it_is_said_once(
    shown: subprocess.CompletedProcess[str], reports: dict[int, dict[str, Any]]
) -> None:
    for report in reports.values():
        assert report["threads"] == 1
        assert report["variables"]["OMP_NUM_THREADS"] == "1"
    assert shown.stderr.count("OMP_NUM_THREADS=1") == 1


def test_all_output_arrives_under_the_ranks_number(
    shown: subprocess.CompletedProcess[str], reports: dict[int, dict[str, Any]]
) -> None:
    lines = shown.stdout.splitlines()
    for rank in reports:
        mine = [line.partition(" ")[2] for line in lines if line.startswith(f"[{rank}] ")]
        # The long line may be continued; nothing of it is lost.
        assert sum(line.count("x") for line in mine if set(line) <= {"x"}) == 100_000
        assert any("no end of line" in line for line in mine)
        assert any("thread" in line for line in mine)
        assert mine[-1].endswith("at exit Defined")
        assert f"[{rank}] to stderr" in shown.stderr.splitlines()
    assert all(line.startswith("[") for line in lines)


def test_nothing_that_a_rank_left_behind_survives(reports: dict[int, dict[str, Any]]) -> None:
    assert not [report["daemon"] for report in reports.values() if alive(report["daemon"])]


def test_the_first_failure_ends_all_and_shows_the_scripts_frames_only(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "def deep():\n"
        "    raise ValueError('wrong')\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    pathlib.Path('ready').touch()\n"
        "    time.sleep(100)\n"
        "while not os.path.exists('ready'): time.sleep(0.01)\n"
        "deep()\n"
    )
    result = completed(command("run", "-n", "2", "fail.py"), tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"rank 1 \(pid \d+\) ended with code 1 after \d+\.\d s; the others were stopped", last
    )
    lines = [line[4:] for line in result.stderr.splitlines() if line.startswith("[1] ")]
    path = os.path.realpath(script)
    assert [line.strip() for line in lines if "File " in line] == [
        f'File "{path}", line 9, in <module>',
        f'File "{path}", line 3, in deep',
    ]
    assert lines[-1] == "ValueError: wrong"


@pytest.mark.parametrize(("start", "loaded"), [("fork", True), ("spawn", False)])
def test_a_module_is_run_as_python_would_and_its_code_is_returned(
    tmp_path: Path, start: str, loaded: bool
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "program.py").write_text(
        "import os, sys\nfrom . import __name__ as parent\n"
        "print(__name__, parent, sys.argv[1:], 'torch' in sys.modules)\n"
        "sys.exit(3)\n"
    )
    arguments = command("run", "--start", start, "-m", "package.program", "--help", "-n", "7")
    result = completed(arguments, tmp_path)
    assert result.returncode == 3
    expected = f"[0] __main__ package ['--help', '-n', '7'] {loaded}"
    assert result.stdout.splitlines() == [expected]


STAY = """
import os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
shell = "trap '' INT TERM; sleep 1000 & wait"
child = subprocess.Popen(["sh", "-c", shell], start_new_session=True)
pathlib.Path(f"pid{rank}.part").write_text(f"{os.getpid()} {child.pid}\\n")
os.replace(f"pid{rank}.part", f"pid{rank}")
try:
    time.sleep(100)
except KeyboardInterrupt:
    print("cleaning up")
    time.sleep(0.1)
    print("cleaned up")
    raise
"""


@pytest.fixture
def staying(tmp_path: Path) -> Path:
    (tmp_path / "stay.py").write_text(STAY)
    return tmp_path


def below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_ctrl_c_at_the_terminal_ends_all_and_lets_scripts_clean_up(staying: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(staying)
            arguments = command("run", "-n", "2", "stay.py")
            os.execve(arguments[0], arguments, environment())
        finally:
            os._exit(127)
    try:
        wait_for_files(None, staying, "pid?", 2)
        family = below(pid)
        assert len(family) >= 6
        start = time.monotonic()
        os.write(terminal, b"\x03")
        shown = b""
        while True:
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            if not data:
                break
            shown += data
        _, status = os.waitpid(pid, 0)
        assert time.monotonic() - start < 20
        assert os.waitstatus_to_exitcode(status) == 130
        for rank in range(2):
            name = f"[{rank}]".encode()
            lines = [line for line in shown.splitlines() if name in line]
            assert sum(line.endswith(b"cleaning up") for line in lines) == 1
            assert sum(line.endswith(b"cleaned up") for line in lines) == 1
        assert b"\x1b[" in shown
        assert not [one for one in family if alive(one)]
    finally:
        os.close(terminal)


def test_ranks_that_ignore_signals_end_all_the_same(staying: Path) -> None:
    with started(command("run", "-n", "2", "stay.py", "stubborn"), staying) as process:
        wait_for_files(process, staying, "pid?", 2)
        family = below(process.pid)
        code, took, _ = end_by(process, signal.SIGINT)
        assert code == 130
        assert took < 20
        assert not [one for one in family if alive(one)]


def test_a_killed_broker_is_started_again_and_nobody_outlives_a_killed_supervisor(
    tmp_path: Path,
) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, pathlib, signal, socket, time, urllib.parse\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "address = urllib.parse.urlparse(os.environ['ZRPC_BROKER'])\n"
        "def listens():\n"
        "    try:\n"
        "        socket.create_connection((address.hostname, address.port), 1).close()\n"
        "        return True\n"
        "    except OSError:\n"
        "        return False\n"
        "def say(name):\n"
        "    pathlib.Path('part').write_text(f'{os.getpid()}\\n')\n"
        "    os.replace('part', name)\n"
        "assert listens()\n"
        "say('first')\n"
        "while listens(): time.sleep(0.001)\n"
        "while not listens(): time.sleep(0.01)\n"
        "say('second')\n"
        "time.sleep(100)\n"
    )
    with started(command("run", "wait.py"), tmp_path) as process:
        (rank,) = wait_for_files(process, tmp_path, "first", 1)
        (broker,) = {child.pid for child in psutil.Process(process.pid).children()} - {rank}
        os.kill(broker, signal.SIGKILL)
        wait_for_files(process, tmp_path, "second", 1)
        family = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(family) == 2
        process.kill()
        wait_until(lambda: not any(map(alive, family)), "rank and broker end")
        assert process.stderr is not None
        assert f"broker (pid {broker}) was killed by SIGKILL" in process.stderr.read()


def test_a_reader_that_goes_away_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("while True: print('on and on' * 100)\n")
    reader, writer = os.pipe()
    with started(command("run", "talk.py"), tmp_path, stdout=writer) as process:
        os.close(writer)
        os.read(reader, 100)
        os.close(reader)
        assert process.wait(LIMIT) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing the script"),
        (["--nproc", "0", "x.py"], "--nproc"),
        (["nowhere.py"], "There is no script 'nowhere.py'"),
        (["--broker", "carrier pigeon", __file__], "carrier pigeon"),
    ],
)
def test_wrong_usage_is_a_sentence_and_code_2(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(run, arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_a_named_broker_that_is_not_there_is_a_sentence_and_code_1() -> None:
    result = CliRunner().invoke(run, ["--broker", "tcp://127.0.0.1:9", __file__])
    assert result.exit_code == 1
    assert "No broker answers at tcp://127.0.0.1:9" in result.output
