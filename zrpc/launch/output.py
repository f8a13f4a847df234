"""What children print: whole lines under their names, on one output; and logs that rotate.

:class:`LineMerger` is pure.  A line is written when it is complete.  One that is not, is
written when it is long or has waited (a prompt, a progress bar), and goes on where it
stopped unless somebody else has written in between.  A carriage return starts the line
over on a terminal, so the name is written again after it.

:class:`Sink` never blocks: where the reader of our output is slow (a pager), the
supervisor still hears signals.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds after which a line without an end is shown as it is.
HOLD = 0.2
#: Bytes after which a line without an end is shown as it is.
LONGEST = 8192
#: Bytes that wait for a slow reader before children have to wait too.
FULL = 1 << 20
#: A pipe that poll calls writable takes this much without blocking (POSIX: PIPE_BUF).
_CHUNK = 4096

_COLOURS = (36, 33, 32, 35, 34, 31)


class LineMerger:
    """Lines of several sources, each under its prefix.

    Args:
        prefixes: what each source's lines start with.
        hold: seconds that an incomplete line waits for its end.
        longest: bytes past which it does not.

    Example:
        >>> merger = LineMerger([b"[0] ", b"[1] "])
        >>> merger.feed(0, b"one\\ntw", now=0.0), merger.feed(1, b"three\\n", now=0.0)
        (b'[0] one\\n', b'[1] three\\n')
        >>> merger.due(now=1.0)
        b'[0] tw'
    """

    def __init__(
        self, prefixes: list[bytes], *, hold: float = HOLD, longest: int = LONGEST
    ) -> None:
        self._prefixes = prefixes
        self._hold = hold
        self._longest = longest
        self._rest = [b""] * len(prefixes)
        self._since = [0.0] * len(prefixes)
        self._open: int | None = None

    def feed(self, source: int, data: bytes, now: float) -> bytes:
        """Take what ``source`` printed; returns what is to be written."""
        had = bool(self._rest[source])
        lines, newline, rest = (self._rest[source] + data).rpartition(b"\n")
        written = self._write(source, lines + newline) if newline else b""
        if not had or newline:
            self._since[source] = now
        self._rest[source] = rest
        if len(rest) > self._longest:
            written += self._flush(source)
        return written

    def due(self, now: float) -> bytes:
        """What has waited long enough."""
        return b"".join(
            self._flush(source)
            for source, rest in enumerate(self._rest)
            if rest and now >= self._since[source] + self._hold
        )

    def next_wake(self) -> float | None:
        """When :meth:`due` has something to write; None for never."""
        moments = [s + self._hold for s, rest in zip(self._since, self._rest, strict=True) if rest]
        return min(moments, default=None)

    def end(self, source: int) -> bytes:
        """``source`` prints no more: its last line is closed."""
        written = self._flush(source)
        if self._open == source:
            self._open = None
            written += b"\n"
        return written

    def line(self, text: str) -> bytes:
        """A line of the supervisor's own."""
        start = b"" if self._open is None else b"\n"
        self._open = None
        return start + text.encode(errors="backslashreplace") + b"\n"

    def _flush(self, source: int) -> bytes:
        rest, self._rest[source] = self._rest[source], b""
        return self._write(source, rest) if rest else b""

    def _write(self, source: int, text: bytes) -> bytes:
        prefix = self._prefixes[source]
        written = b""
        if self._open != source:
            written = (b"" if self._open is None else b"\n") + prefix
        text = text.replace(b"\r\n", b"\n")
        complete = text.endswith(b"\n")
        body = text[:-1] if complete else text
        body = body.replace(b"\n", b"\n" + prefix).replace(b"\r", b"\r" + prefix)
        self._open = None if complete else source
        return written + body + (b"\n" if complete else b"")


class Sink:
    """An output of ours, written to when it has room.

    Args:
        descriptor: its file descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._pending = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be added."""
        return len(self._pending) > FULL

    def write(self, data: bytes) -> None:
        """Write now what there is room for, and the rest later."""
        if self.broken or not data:
            return
        self._pending += data
        while self._pending and self._has_room() and self.write_some():
            pass

    def write_some(self) -> bool:
        """Write a chunk; whether it could be written."""
        try:
            done = os.write(self.descriptor, self._pending[:_CHUNK])
        except BlockingIOError:
            return False
        except OSError:
            # The reader has gone (`| head`), or the disk is full: the output is lost to us.
            self.broken = True
            self._pending.clear()
            return False
        del self._pending[:done]
        return True

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Write the rest; asks ``give_up()`` while it has to wait."""
        while self._pending:
            if not (self._has_room(100) and self.write_some()) and give_up():
                return

    def _has_room(self, milliseconds: int = 0) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(milliseconds))


class Screen:
    """One output of the supervisor with the lines of all children.

    Args:
        descriptor: of the output, 1 or 2.
        labels: the children's names.
    """

    def __init__(self, descriptor: int, labels: list[str]) -> None:
        self.sink = Sink(descriptor)
        self.merger = LineMerger(prefixes(labels, colours=_wants_colours(descriptor)))

    def feed(self, source: int, data: bytes) -> None:
        """A child printed something."""
        self.sink.write(self.merger.feed(source, data, time.monotonic()))

    def end(self, source: int) -> None:
        """A child prints no more."""
        self.sink.write(self.merger.end(source))

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        self.sink.write(self.merger.line(text))

    def due(self, now: float) -> None:
        """Show what has waited."""
        self.sink.write(self.merger.due(now))


def screens(labels: list[str]) -> tuple[Screen, Screen]:
    """Those for stdout and stderr: the same one where both are one terminal or file."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    errors = Screen(2, labels)
    try:
        one, two = os.fstat(1), os.fstat(2)
        same = (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)
    except OSError:
        same = True
    return (errors if same else Screen(1, labels)), errors


def prefixes(labels: list[str], *, colours: bool) -> list[bytes]:
    """What the lines of each child start with: ``[label] ``.

    Example:
        >>> prefixes(["0", "1"], colours=False)
        [b'[0] ', b'[1] ']
    """
    found = []
    for number, label in enumerate(labels):
        text = f"[{label}]"
        if colours:
            text = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"
        found.append(text.encode() + b" ")
    return found


def _wants_colours(descriptor: int) -> bool:
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR")


class RotatingLog:
    """A log file that starts anew when it has grown, keeping the last few.

    As ``logging.handlers.RotatingFileHandler``, for bytes as they come: that one wants text,
    and closes its descriptor at the exit of every process forked meanwhile.

    Args:
        path: the file; older ones are ``path.1``, ``path.2``...
        longest: bytes of a file.
        kept: how many older ones.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, longest: int = 10 << 20, kept: int = 3) -> None:
        self.path = path
        self.failure: OSError | None = None
        self._longest = longest
        self._kept = kept
        self._descriptor = -1
        self._size = 0
        self._mid_line = False
        self._open()

    def write(self, data: bytes) -> None:
        """Append; a failure (a full disk) is kept in ``failure`` and ends logging."""
        if self.failure is not None:
            return
        try:
            if self._size and self._size + len(data) > self._longest:
                if self._mid_line:
                    # Its rest belongs to the old file.
                    head, newline, data = data.partition(b"\n")
                    self._append(head + newline)
                self._rotate()
            self._append(data)
        except OSError as error:
            self.failure = error

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _append(self, data: bytes) -> None:
        if not data:
            return
        self._mid_line = not data.endswith(b"\n")
        view = memoryview(data)
        while view:
            done = os.write(self._descriptor, view)
            view = view[done:]
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                os.replace(older, self._numbered(number + 1))
        if self._kept:
            os.replace(self.path, self._numbered(1))
        else:
            self.path.unlink()
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
