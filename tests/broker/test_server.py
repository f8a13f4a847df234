"""The broker as a process: what it tells people, and what it makes of hostile bytes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from broker import messages
from broker.protocol import pack_session
from broker.status import ask_status

from support.cluster import ROOT, environment

LIMIT = 30


def zrpc(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from broker.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
        cwd=ROOT,
        **options,
    )


def start(*arguments: str, module: bool = False) -> subprocess.Popen[str]:
    command = (
        ["-m", "broker"] if module else ["-c", "from broker.cli import main; main()", "broker"]
    )
    return subprocess.Popen(
        [sys.executable, *command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------ for people


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_and_what_to_type_next_and_ends_when_told(
    number: int, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    port = free_port()
    process = start("--bind", f"tcp://127.0.0.1:{port}", "--ready-file", str(ready), module=True)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert ready.read_text() == f"tcp://127.0.0.1:{port}\n"
    code, out, err = stop(process, number)
    assert (code, err) == (0, "")
    assert f"listens at tcp://127.0.0.1:{port}" in out
    assert f"zrpc worker --name w1 --broker tcp://127.0.0.1:{port}" in out
    assert not ready.exists()


def test_a_taken_port_is_one_sentence_and_code_2(broker: str) -> None:
    result = zrpc("broker", "--bind", broker)
    assert result.returncode == 2 and result.stdout == ""
    assert "another process listens there already" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nonsense", "tcp://host:port"),
        ("tcp://127.0.0.1", "names no port"),
        ("tcp://127.0.0.1:99999", "up to 65535"),
        ("tcp://127.0.0.1:5555/job", "names a job"),
        ("tcp://203.0.113.7:5599", "no such address"),
        ("udp://127.0.0.1:1", "tcp://host:port"),
    ],
)
def test_a_bad_address_is_one_sentence_and_code_2(address: str, says: str) -> None:
    result = zrpc("broker", "--bind", address)
    assert result.returncode == 2 and says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen on every port")
def test_a_port_that_this_user_may_not_have_is_one_sentence_and_code_2() -> None:
    result = zrpc("broker", "--bind", "tcp://127.0.0.1:80")
    assert result.returncode == 2 and "above 1023" in result.stderr


def test_a_ready_file_that_cannot_be_written_is_one_sentence_and_code_2() -> None:
    result = zrpc("broker", "--bind", "tcp://127.0.0.1:0", "--ready-file", "/nowhere/at/all")
    assert result.returncode == 2 and "ready file" in result.stderr


def test_status_shows_workers_as_a_table_and_as_json(broker: str) -> None:
    table = zrpc("status", "--broker", broker)
    assert table.returncode == 0 and broker in table.stdout
    document = json.loads(zrpc("status", "--json", "--broker", broker).stdout)
    assert document["broker"]["address"] == broker and document["jobs"] == {}


def test_status_without_a_broker_says_what_to_do_and_exits_with_1() -> None:
    result = zrpc("status", "--broker", f"tcp://127.0.0.1:{free_port()}", "--timeout", "0.5")
    assert result.returncode == 1
    assert "no broker answers" in result.stderr and "zrpc broker --bind" in result.stderr


def test_the_command_line_and_the_broker_load_neither_torch_nor_zrpc() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from broker.cli import zrpc\n"
        "result = CliRunner().invoke(zrpc, ['--help'])\n"
        "assert result.exit_code == 0 and 'worker' in result.output, result.output\n"
        "import broker.server, broker.status\n"
        "bad = {'torch', 'numpy', 'zrpc', 'rich'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment(), cwd=ROOT, timeout=LIMIT
    )


def test_an_idle_broker_takes_less_than_60_mb(broker: str) -> None:
    pid = ask_status(broker, 5)["broker"]["pid"]
    assert psutil.Process(pid).memory_info().rss < 60e6


# ------------------------------------------------------------------ hostile bytes


def honest(broker: str) -> None:
    """A worker can still join, be seen and leave."""
    context: zmq.Context[Any] = zmq.Context()
    control = context.socket(zmq.DEALER)
    control.setsockopt(zmq.LINGER, 0)
    try:
        control.connect(broker)
        control.send(messages.encode(messages.Hello(worker="honest")))
        assert control.poll(LIMIT * 1000)
        welcome = messages.decode(control.recv())
        assert isinstance(welcome, messages.Welcome)
        control.send(messages.encode(messages.Ready()))
        said = None
        while not isinstance(said, messages.Started):  # it may be asked whether it is there
            assert control.poll(LIMIT * 1000)
            said = messages.decode(control.recv())
            assert isinstance(said, messages.Started | messages.Ping)
        control.send(messages.encode(messages.Goodbye()))
        assert control.poll(LIMIT * 1000)
    finally:
        control.close(0)
        context.term()


def ports(broker: str) -> list[int]:
    document = ask_status(broker, 5)["broker"]
    return [int(broker.rsplit(":", 1)[1]), int(document["data"][0])]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\x03" + bytes(100),
        bytes(100_000),
    ],
    ids=["http", "scan", "tls", "greeting", "zeros"],
)
def test_a_stray_connection_on_either_port_disturbs_nobody(broker: str, data: bytes) -> None:
    for port in ports(broker):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as connection:
                try:
                    connection.sendall(data)
                    connection.settimeout(0.05)
                    connection.recv(1000)
                except OSError:
                    pass
    honest(broker)


CONTROL = {
    "nothing": b"",
    "no msgpack": b"\xc1\xc1",
    "no array": b"\x01",
    "an unknown name": b"\x92\xa3abc\x80",
    "a wrong field": b"\x92\xa5Hello\x81\xa6worker\x01",
    "a missing field": b"\x92\xa5Hello\x80",
    "deep": b"\x91" * 5000,
    "a lying length": b"\xdd\xff\xff\xff\xff",
    "a reference to nothing": messages.encode(messages.References([["add"]])),
}


@pytest.mark.parametrize("kind", CONTROL)
def test_garbage_on_control_is_dropped_and_counted(broker: str, kind: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    control = context.socket(zmq.DEALER)
    control.setsockopt(zmq.LINGER, 500)
    try:
        control.connect(broker)
        control.send(CONTROL[kind])
        control.send_multipart([CONTROL[kind], b"second"])
        control.send(messages.encode(messages.Status(3)))
        answers = []
        while not answers or not isinstance(answers[-1], messages.Answer):
            assert control.poll(LIMIT * 1000)
            answers.append(messages.decode(control.recv()))
        assert answers[-1].value["broker"]["control_dropped"] > 0
    finally:
        control.close(0)
        context.term()
    honest(broker)


def test_a_stranger_on_the_data_port_gets_nothing_and_disturbs_nobody(broker: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    data = context.socket(zmq.DEALER)
    data.setsockopt(zmq.LINGER, 500)
    try:
        data.connect(f"tcp://127.0.0.1:{ports(broker)[1]}")
        for _ in range(100):
            data.send_multipart([pack_session(1), bytes(56), b"body"])
        assert not data.poll(200)
    finally:
        data.close(0)
        context.term()
    honest(broker)


# ------------------------------------------------------------------ a broker that a job has started


def embedded(watch: int) -> tuple[subprocess.Popen[str], str]:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from broker.cli import main; main()",
            "broker",
            "--bind",
            "tcp://127.0.0.1:0",
            "--ready-fd",
            str(writer),
            "--watch-pid",
            str(watch),
            "--idle-exit",
        ],
        pass_fds=[writer],
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    os.close(writer)
    with os.fdopen(reader) as file:
        return process, file.readline().split()[0]


def test_an_embedded_broker_ends_when_its_last_worker_has_left() -> None:
    process, address = embedded(os.getpid())
    honest(address)
    assert process.wait(LIMIT) == 0


def test_an_embedded_broker_ends_with_its_starter_if_nobody_ever_came() -> None:
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, _ = embedded(starter.pid)
    assert process.poll() is None
    starter.communicate()
    assert process.wait(LIMIT) == 0


def test_an_embedded_broker_whose_starter_is_gone_already_ends() -> None:
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    process, _ = embedded(starter.pid)
    assert process.wait(LIMIT) == 0
