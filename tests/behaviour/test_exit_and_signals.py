"""How scripts end: Ctrl-C, sys.exit, exceptions, or simply the last line, with calls running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zrpc as rpc

from support.cluster import environment, run_ranks

LIMIT = 30.0


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text("import os, sys, threading, time\nimport zrpc as rpc\n" + textwrap.dedent(text))
    return path


def run(path: Path, *arguments: str, broker: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env=environment(ZRPC_BROKER=f"{broker}/{path.parent.name}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ------------------------------------------------------------------ Ctrl-C


def _interrupted(rank: int) -> None:
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sleeping = rpc.remote("w1", time.sleep, args=(20,))
        ways: list[Callable[[], Any]] = [
            lambda: rpc.rpc_sync("w1", time.sleep, args=(20,)),
            lambda: rpc.rpc_async("w1", time.sleep, args=(20,)).wait(),
            lambda: rpc.wait_all([rpc.rpc_async("w1", time.sleep, args=(20,))]),
            sleeping.to_here,
            lambda: rpc.rpc_sync("w0", time.sleep, args=(20,)),
        ]
        for way in ways:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            begun = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                way()
            assert time.monotonic() - begun < 10, "it waited for the call to end"
        assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
        rpc.shutdown(graceful=False)
    else:
        while rpc.current_agent().counters["served"] < 5:
            time.sleep(0.05)
        time.sleep(1.0)
        os._exit(0)


def test_ctrl_c_lands_in_every_kind_of_wait() -> None:
    run_ranks(_interrupted, 2, may_die=(1,))


def test_ctrl_c_ends_a_script_that_waits_for_a_call(tmp_path: Path, broker: str) -> None:
    path = script(
        tmp_path,
        """
        rpc.init_rpc("me")
        print("ready", flush=True)
        rpc.rpc_sync("me", time.sleep, args=(60,))
        """,
    )
    process = run(path, broker=broker)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert time.monotonic() - begun < 10
    assert process.returncode == -signal.SIGINT or process.returncode == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


# ------------------------------------------------------------------ the end of a script

ENDINGS = {
    "the last line": ("pass", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "an exception in a thread": (
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
        0,
        "ZeroDivisionError",
    ),
    "the end of a call under way": ("rpc.rpc_async('me', time.sleep, args=(60,))", 0, ""),
    "a call in another thread": (
        "threading.Thread(target=lambda: rpc.rpc_sync('me', time.sleep, args=(60,)), daemon=True).start()",
        0,
        "",
    ),
    "an RRef in a cycle": ("r = rpc.remote('me', list); c = [r]; c.append(c)", 0, ""),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_ends_without_shutdown_ends_at_once_and_cleanly(
    ending: str, tmp_path: Path, broker: str
) -> None:
    code, status, says = ENDINGS[ending]
    process = run(script(tmp_path, f"rpc.init_rpc('me')\n{code}\n"), broker=broker)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (status, "")
    if says:
        assert says in err
    else:
        assert err == ""


# ------------------------------------------------------------------ serving past the end

SERVER = """
rpc.init_rpc("server")
rpc.register_function("square", lambda x: x * x)
print("registered", flush=True)
"""

CLIENT = """
rpc.init_rpc("client")
print(rpc.rpc_sync("server", "square", args=(7,)), flush=True)
time.sleep(0.5)
print(rpc.rpc_sync("server", "square", args=(8,)), flush=True)
rpc.shutdown()
"""


def test_a_script_that_has_registered_something_serves_until_the_others_have_left(
    tmp_path: Path, broker: str
) -> None:
    server = run(script(tmp_path, SERVER), broker=broker)
    assert server.stdout is not None and server.stdout.readline() == "registered\n"
    (tmp_path / "script.py").unlink()
    time.sleep(0.5)
    assert server.poll() is None, "nobody has come yet for whom it serves"
    client = run(script(tmp_path, CLIENT), broker=broker)
    assert client.communicate(timeout=LIMIT)[0] == "49\n64\n" and client.returncode == 0
    _, err = server.communicate(timeout=LIMIT)
    assert server.returncode == 0
    assert len(err.strip().splitlines()) == 1
    assert "still serves square until the other workers have left" in err


def test_ctrl_c_ends_a_script_that_serves_past_its_end(tmp_path: Path, broker: str) -> None:
    server = run(script(tmp_path, SERVER), broker=broker)
    assert server.stderr is not None and "still serves" in server.stderr.readline()
    server.send_signal(signal.SIGINT)
    _, err = server.communicate(timeout=LIMIT)
    assert "Traceback" not in err


def test_serving_past_the_end_can_be_turned_off(tmp_path: Path, broker: str) -> None:
    text = SERVER.replace(
        '"server")', '"server", rpc_backend_options=rpc.RpcBackendOptions(serve_after_exit=False))'
    )
    server = run(script(tmp_path, text), broker=broker)
    _, err = server.communicate(timeout=LIMIT)
    assert (server.returncode, err) == (0, "")


def _calls_go_on(rank: int) -> None:
    """A peer that has left by itself does not disturb the others."""
    if rank == 2:
        rpc.shutdown(graceful=False)
        return
    meet_two = rpc.current_agent().membership.gather
    meet_two("two", b"", ["w0", "w1"], 30.0)
    assert rpc.rpc_sync(f"w{1 - rank}", max, args=(1, 2)) == 2
    with pytest.raises(rpc.RpcError):
        rpc.rpc_sync("w2", max, args=(1, 2), timeout=5)
    meet_two("end", b"", ["w0", "w1"], 30.0)


def test_one_that_leaves_early_disturbs_nobody() -> None:
    run_ranks(_calls_go_on, 3)
