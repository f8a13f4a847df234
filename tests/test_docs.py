"""The pages in docs/ say what the code does: their programs run, their lists are complete.

A page is a program: its Python blocks, one after another.  In a page

* a block whose first line is ``# NAME.py`` is a file beside the program;
* a block with ``<!-- not run -->`` on the line above it is left out;
* in a line ``expression  # -> text`` the expression's ``repr`` has to be that text.

Line numbers in tracebacks are those of the page.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Seconds; only catches what hangs.
LIMIT = 60.0

_NOT_RUN = "<!-- not run -->"
_FILE = re.compile(r"^# (\w+\.py)$")
_EXPECTED = re.compile(r"# -> (.+)$")


@dataclass
class Page:
    """What a page has of Python."""

    program: str
    files: dict[str, str] = field(default_factory=dict)


def read_page(name: str) -> Page:
    """The program and the files of a page."""
    lines = (DOCS / name).read_text().splitlines()
    program = [""] * len(lines)
    page = Page("")
    start = None
    for number, line in enumerate(lines):
        if line.strip() == "```python":
            start = number + 1
        elif line.strip() == "```" and start is not None:
            block = lines[start:number]
            named = _FILE.match(block[0])
            if named:
                page.files[named[1]] = "\n".join(block) + "\n"
            elif lines[start - 2].strip() != _NOT_RUN:
                program[start:number] = block
            start = None
    page.program = "\n".join(program) + "\n"
    return page


def with_checks(program: str, name: str) -> str:
    """The program, with a check of each result that the page states; lines stay where they are."""
    lines = program.splitlines()
    for node in ast.walk(ast.parse(program, name)):
        if not isinstance(node, ast.Expr) or node.end_lineno is None:
            continue
        expected = _EXPECTED.search(lines[node.end_lineno - 1])
        if expected is None:
            continue
        first, last = node.lineno - 1, node.end_lineno - 1
        rest = f"), {expected[1].strip()!r}, {node.lineno})"
        lines[last] = lines[last][: node.end_col_offset] + rest
        lines[first] = f"{lines[first][: node.col_offset]}_check(({lines[first][node.col_offset :]}"
    assert not lines[0]
    lines[0] = (
        "def _check(value, text, line): "
        f"assert repr(value) == text, f'{name}:{{line}}: {{value!r}}, not {{text}}'"
    )
    return "\n".join(lines) + "\n"


def environment(**variables: str) -> dict[str, str]:
    """Ours without what changes how zrpc behaves, and with ``variables``."""
    dropped = ("ZRPC_BROKER", "ZRPC_JOB", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def zrpc_command(*arguments: str) -> list[str]:
    """``zrpc ARGUMENTS...``."""
    return [sys.executable, "-c", "from broker.cli import main; main()", *arguments]


@contextmanager
def running(
    command: list[str], folder: Path, log: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in ``folder``, ended at the end; what it prints goes to the file ``log``."""
    with open(folder / log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def finish(process: subprocess.Popen[bytes], folder: Path, log: str) -> str:
    """Wait until it has ended well; returns what it printed."""
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = None
    printed = (folder / log).read_text()
    assert code == 0, f"exit code {code}:\n{printed}"
    return printed


def wait_for_text(text: str, log: Path) -> None:
    """Wait until a process has printed it."""
    end = time.monotonic() + LIMIT
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


@contextmanager
def running_broker(folder: Path) -> Iterator[str]:
    """A broker; gives its address."""
    ready = folder / "ready"
    command = zrpc_command("broker", "--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready))
    with running(command, folder, "broker.log"):
        wait_for_text("zrpc worker", folder / "broker.log")
        yield ready.read_text().strip()


def test_the_examples_of_the_api_page_run_and_give_what_it_says(tmp_path: Path) -> None:
    page = read_page("api.md")
    for name, text in page.files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "example.py").write_text(with_checks(page.program, "api.md"))
    with ExitStack() as stack:
        address = stack.enter_context(running_broker(tmp_path))
        for name in ("w1", "w2"):
            command = zrpc_command("worker", "--name", name, "--import", "server")
            stack.enter_context(running(command, tmp_path, f"{name}.log", ZRPC_BROKER=address))
        for name in ("w1", "w2"):
            wait_for_text("is ready", tmp_path / f"{name}.log")
        program = stack.enter_context(
            running([sys.executable, "example.py"], tmp_path, "example.log", ZRPC_BROKER=address)
        )
        finish(program, tmp_path, "example.log")


def test_the_script_of_the_torch_page_runs_with_and_without_a_broker_given(tmp_path: Path) -> None:
    for name, text in read_page("from-torch.md").files.items():
        (tmp_path / name).write_text(text)
    with running(zrpc_command("run", "--nproc", "2", "train.py"), tmp_path, "run.log") as run:
        assert "[0] tensor([2., 2.])" in finish(run, tmp_path, "run.log")
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                running(
                    [sys.executable, "train.py"],
                    tmp_path,
                    f"{rank}.log",
                    RANK=str(rank),
                    **variables,
                )
            )
            for rank in range(2)
        ]
        printed = [finish(rank, tmp_path, f"{number}.log") for number, rank in enumerate(ranks)]
    assert "tensor([2., 2.])" in printed[0]


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_examples_of_the_protocol_page_run() -> None:
    program = with_checks(read_page("protocol.md").program, "protocol.md")
    exec(compile(program, "protocol.md", "exec"), {"__name__": "protocol"})


def test_the_api_page_has_every_public_name_and_option() -> None:
    import zrpc as rpc

    text = (DOCS / "api.md").read_text()
    missing = [name for name in rpc.__all__ if f"`{name}" not in text and f".{name}" not in text]
    missing += [
        name.lstrip("_")
        for name in vars(rpc.RpcBackendOptions())
        if f"`{name.lstrip('_')}`" not in text
    ]
    missing += [
        f"RRef.{name}" for name in vars(rpc.RRef) if name[0] != "_" and f"`{name}" not in text
    ]
    missing += [
        f"Future.{name}" for name in vars(rpc.Future) if name[0] != "_" and f"`{name}" not in text
    ]
    # For the agent, not for scripts.
    assert set(missing) <= {"Future.has_callbacks"}


@pytest.mark.parametrize("name", ["broker", "worker", "run", "status"])
def test_the_command_line_page_has_every_option_and_no_other(name: str) -> None:
    from broker.cli import zrpc

    command = zrpc.get_command(click.Context(zrpc), name)
    assert command is not None
    real = {
        option
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for option in parameter.opts
    }
    text = (DOCS / "command-line.md").read_text()
    _, _, section = text.partition(f"\n## zrpc {name}\n")
    section, _, _ = section.partition("\n## ")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `-")]
    told = {option for row in rows for option in re.findall(r"`(--?[a-z-]+)", row)}
    assert told == real


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_a_page_names_only_files_and_modules_that_exist(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (path.parent / link).exists(), link
    for file in re.findall(r"`((?:zrpc|broker|tests|examples|scripts)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), file


def test_the_modules_of_the_architecture_page_are_all_there_are() -> None:
    text = (DOCS / "architecture.md").read_text()
    for package in ("zrpc", "broker"):
        modules = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).glob("*.py")
            if not path.name.startswith("_")
        }
        told = set(re.findall(rf"`({package}/\w+\.py)`", text))
        assert told == modules


def test_the_protocol_page_has_every_kind_flag_and_control_message() -> None:
    protocol = importlib.import_module("broker.protocol")
    messages = importlib.import_module("broker.messages")
    text = (DOCS / "protocol.md").read_text()
    names = [kind.name for kind in protocol.Kind]
    names += [name for name in vars(protocol.Flag) if name[0] != "_"]
    names += list(messages._BY_NAME)
    assert [name for name in names if f"`{name}`" not in text] == []
    fields = [
        name
        for cls in messages._BY_NAME.values()
        for name in cls.__dataclass_fields__
        if f"`{name}`" not in text and f" {name}" not in text
    ]
    assert fields == []
