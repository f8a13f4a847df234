"""Lines of many children on one output, logs that rotate, and the run folder."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.run_folder import RunFolderError, run_folder
from zrpc.launch.output import HOLD, LineMerger, RotatingLog, Sink, prefixes


def merger(count: int = 2) -> LineMerger:
    return LineMerger([b"[%d] " % number for number in range(count)])


# ------------------------------------------------------------------ lines


def test_a_line_is_written_when_it_is_complete() -> None:
    lines = merger()
    assert lines.feed(0, b"on", now=0.0) == b""
    assert lines.feed(1, b"two\n", now=0.0) == b"[1] two\n"
    assert lines.feed(0, b"e\nthree\n", now=0.1) == b"[0] one\n[0] three\n"


def test_a_line_without_an_end_is_shown_after_a_while_and_goes_on() -> None:
    lines = merger()
    lines.feed(0, b"50%", now=1.0)
    assert lines.next_wake() == 1.0 + HOLD
    assert lines.due(now=1.0) == b""
    assert lines.due(now=1.0 + HOLD) == b"[0] 50%"
    assert lines.next_wake() is None
    assert lines.feed(0, b" done\n", now=2.0) == b" done\n"


def test_another_childs_line_does_not_run_into_an_open_one() -> None:
    lines = merger()
    lines.feed(0, b"50%", now=0.0)
    lines.due(now=HOLD)
    assert lines.feed(1, b"hello\n", now=1.0) == b"\n[1] hello\n"
    assert lines.feed(0, b" done\n", now=2.0) == b"[0]  done\n"


def test_a_long_line_without_an_end_does_not_wait() -> None:
    lines = merger()
    assert lines.feed(0, b"x" * 10_000, now=0.0) == b"[0] " + b"x" * 10_000


def test_what_is_left_at_the_end_is_written_and_closed() -> None:
    lines = merger()
    lines.feed(0, b"last words", now=0.0)
    assert lines.end(0) == b"[0] last words\n"
    assert lines.end(1) == b""


def test_a_carriage_return_starts_the_line_over_under_the_name() -> None:
    lines = merger()
    assert lines.feed(0, b"10%\r20%\r\n", now=0.0) == b"[0] 10%\r[0] 20%\n"


def test_the_supervisors_own_line_stands_by_itself() -> None:
    lines = merger()
    lines.feed(0, b"50%", now=0.0)
    lines.due(now=HOLD)
    assert lines.line("rank 1 ended") == b"\nrank 1 ended\n"


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.binary(max_size=20).map(lambda b: b.replace(b"\r", b""))),
        max_size=30,
    ),
    st.integers(1, 30),
)
def test_nothing_is_lost_or_mixed(prints: list[tuple[int, bytes]], longest: int) -> None:
    marks = [b"\xff0 ", b"\xff1 ", b"\xff2 "]
    prints = [(source, data.replace(b"\xff", b"")) for source, data in prints]
    lines = LineMerger(marks, longest=longest)
    written = b""
    for moment, (source, data) in enumerate(prints):
        written += lines.feed(source, data, now=moment * HOLD / 2)
        written += lines.due(now=moment * HOLD / 2)
    written += b"".join(lines.end(source) for source in range(3))
    for source, mark in enumerate(marks):
        shown = b"".join(
            line.removeprefix(mark) for line in written.split(b"\n") if line.startswith(mark)
        )
        printed = b"".join(data for who, data in prints if who == source)
        assert shown == printed.replace(b"\n", b"")


def test_names_are_coloured_only_where_asked() -> None:
    assert prefixes(["0"], colours=False) == [b"[0] "]
    assert b"\x1b[" in prefixes(["0"], colours=True)[0]


# ------------------------------------------------------------------ slow and gone readers


def test_a_slow_reader_delays_nobody_and_gets_everything() -> None:
    reader, writer = os.pipe()
    try:
        sink = Sink(writer)
        data = os.urandom(300_000)
        sink.write(data)
        assert sink.waiting
        received = bytearray()

        def read() -> None:
            while len(received) < len(data):
                received.extend(os.read(reader, 65536))

        thread = threading.Thread(target=read)
        thread.start()
        sink.finish(give_up=lambda: False)
        thread.join(10)
        assert bytes(received) == data
    finally:
        os.close(reader)
        os.close(writer)


def test_a_reader_that_has_gone_is_noticed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        sink = Sink(writer)
        sink.write(b"hello\n")
        assert sink.broken
        assert not sink.waiting
        sink.write(b"more\n")
        assert not sink.waiting
    finally:
        os.close(writer)


# ------------------------------------------------------------------ logs


def test_a_log_starts_anew_when_it_is_long_and_keeps_the_last_few(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "w.log", longest=100, kept=2)
    for number in range(40):
        log.write(b"line %02d\n" % number)
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["w.log", "w.log.1", "w.log.2"]
    text = b"".join((tmp_path / name).read_bytes() for name in reversed(files))
    kept = text.splitlines()
    assert kept == [b"line %02d" % number for number in range(40 - len(kept), 40)]
    assert all((tmp_path / name).stat().st_size <= 100 for name in files)


def test_a_log_is_continued_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        log = RotatingLog(tmp_path / "w.log")
        log.write(text)
        log.close()
    assert (tmp_path / "w.log").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "w.log").stat().st_mode & 0o077 == 0


def test_a_disk_that_is_full_ends_the_log_and_nothing_else() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    log = RotatingLog(Path("/dev/full"))
    log.write(b"hello\n")
    log.write(b"again\n")
    log.close()
    assert log.failure is not None


# ------------------------------------------------------------------ the run folder


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("ZRPC_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_the_run_folder_is_made_for_its_owner_only(bare: Path) -> None:
    folder = run_folder()
    assert folder == bare / f"zrpc-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run_folder() == folder


def test_the_run_folder_follows_the_environment(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(bare))
    assert run_folder() == bare / "zrpc"
    monkeypatch.setenv("ZRPC_RUN_DIR", str(bare / "a" / "b"))
    assert run_folder() == bare / "a" / "b"


def test_a_run_folder_of_somebody_else_is_refused(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder()
    someone = os.getuid() + 1
    (bare / f"zrpc-{os.getuid()}").rename(bare / f"zrpc-{someone}")
    monkeypatch.setattr(os, "getuid", lambda: someone)
    with pytest.raises(RunFolderError, match="belongs to somebody else"):
        run_folder()


def test_a_run_folder_that_is_a_link_or_open_to_others_is_refused(bare: Path) -> None:
    (bare / "elsewhere").mkdir()
    link = bare / f"zrpc-{os.getuid()}"
    link.symlink_to(bare / "elsewhere")
    with pytest.raises(RunFolderError, match="is not a folder"):
        run_folder()
    link.unlink()
    link.mkdir()
    link.chmod(0o777)
    with pytest.raises(RunFolderError, match="Others may write"):
        run_folder()
