"""The loop that carries out what a :class:`~zrpc.launch.group.Group` decides.

One thread, one ``poll`` over: the pipes of all children, a pipe on which Python's signal
machinery writes, and our own outputs while they are slow.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from . import process
from .group import Action, Finish, Group, Say, Signal, Start
from .output import RotatingLog, Screen
from .process import Child, Program

#: Seconds that orphans have between SIGTERM and SIGKILL.
_ORPHAN_GRACE = 0.3
_READ = 1 << 16


class SignalInbox:
    """Signals as bytes in a pipe, in the order of arrival.

    A handler that did the work itself would run in the middle of anything.

    Args:
        numbers: the signals to take; one that was ignored before stays so, save for SIGINT.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        #: The handlers that were there before, by signal.
        self.previous: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> SignalInbox:
        self.reader, self._writer = os.pipe()
        for descriptor in (self.reader, self._writer):
            os.set_blocking(descriptor, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._numbers:
            previous = signal.getsignal(number)
            if previous is signal.SIG_IGN and number != signal.SIGINT:
                continue
            self.previous[number] = previous
            signal.signal(number, _ignore)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self.previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.reader)
        os.close(self._writer)

    def read(self) -> list[int]:
        """The signals that have arrived."""
        try:
            return [number for number in os.read(self.reader, 4096) if number in self.previous]
        except BlockingIOError:
            return []


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, since children would inherit that, and no byte would be written."""


class Supervisor:
    """Starts the programs of a group, shows what they print, and ends them.

    Args:
        programs: one for each member of ``group``.
        group: decides.
        output: where the children's stdout goes.
        errors: where their stderr and our own messages go.
        logs: a file for each child, if wanted.
        output_matters: end all when nobody reads ``output`` any more.
        on_ready: called with a member's index and what it said when it was ready.
    """

    def __init__(
        self,
        programs: list[Program],
        group: Group,
        *,
        output: Screen,
        errors: Screen,
        logs: list[RotatingLog] | None = None,
        output_matters: bool = True,
        on_ready: Callable[[int, str, int], None] | None = None,
    ) -> None:
        self.programs = programs
        self.group = group
        self._screens = (output, errors)
        self._logs = logs
        self._output_matters = output_matters
        self._on_ready = on_ready
        self._children: dict[int, int] = {}
        #: Descriptor -> (member, stream): 0 for status, 1 for stdout, 2 for stderr.
        self._pipes: dict[int, tuple[int, int]] = {}
        self._code: int | None = None
        self._strangers = set(process.children_of(os.getpid()))
        self._inbox = SignalInbox([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD])

    def run(self) -> int:
        """Run all to the end; returns the exit code.

        Raises:
            OSError: a process could not be started (all others have been ended).
        """
        process.adopt_orphans()
        with self._inbox:
            try:
                self._perform(self.group.begin(time.monotonic()))
                while self._code is None:
                    self._pass()
                self._end_orphans()
                self._drain_all()
                return self._finish_output(self._code)
            finally:
                self._kill_all()

    def adopt(self, index: int, child: Child) -> None:
        """Member ``index`` runs already, as ``child``."""
        self._strangers.discard(child.pid)
        self._register(index, child)

    # ------------------------------------------------------------ the loop

    def _pass(self) -> None:
        poll = select.poll()
        poll.register(self._inbox.reader, select.POLLIN)
        sinks = {screen.sink.descriptor: screen.sink for screen in self._screens}
        for descriptor, sink in sinks.items():
            if sink.waiting:
                poll.register(descriptor, select.POLLOUT)
        if not any(sink.full for sink in sinks.values()):
            for descriptor in self._pipes:
                poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(self._patience())}
        for descriptor in ready & set(self._pipes):
            self._read(descriptor)
        for descriptor in ready & set(sinks):
            sinks[descriptor].write_some()
        numbers = self._inbox.read() if self._inbox.reader in ready else []
        for number in numbers:
            self._signalled(number)
        now = time.monotonic()
        self._perform(self.group.due(now))
        for screen in self._screens:
            screen.due(now)
        if self._output_matters and any(sink.broken for sink in sinks.values()):
            self._perform(self.group.abandon(128 + signal.SIGPIPE, now))

    def _patience(self) -> float | None:
        moments = [screen.merger.next_wake() for screen in self._screens]
        moments.append(self.group.next_wake())
        known = [moment for moment in moments if moment is not None]
        if not known:
            return None
        return max(0.0, min(known) - time.monotonic()) * 1000 + 1

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                program = self.programs[action.member]
                self._register(action.member, process.start(program, self._inbox.previous))
            elif isinstance(action, Signal):
                pid = next(p for p, member in self._children.items() if member == action.member)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, action.number)
            elif isinstance(action, Say):
                self.say(action.text)
            elif isinstance(action, Finish) and self._code is None:
                self._code = action.code

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        self._screens[1].say(text)

    def _register(self, index: int, child: Child) -> None:
        self._children[child.pid] = index
        streams = ((child.status, 0), (child.output, 1), (child.errors, 2))
        self._pipes.update({pipe: (index, stream) for pipe, stream in streams if pipe >= 0})
        self.group.started(index, child.pid, time.monotonic())

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGINT:
            self._perform(self.group.interrupt(now, delivered=_terminal_is_ours()))
        else:
            self._perform(self.group.terminate(now))

    def _reap(self) -> None:
        for pid in [*self._children, *self._orphans()]:
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if found and pid in self._children:
                index = self._children[pid]
                self._close_pipes(index)
                del self._children[pid]
                code = os.waitstatus_to_exitcode(status)
                self._perform(self.group.ended(index, code, time.monotonic()))

    # ------------------------------------------------------------ pipes

    def _read(self, descriptor: int) -> bool:
        """Read once; whether there was something."""
        index, stream = self._pipes[descriptor]
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return False
        if not data:
            del self._pipes[descriptor]
            os.close(descriptor)
            if stream:
                self._screen(stream).end(index)
        elif stream == 0:
            self._is_ready(index, data)
        else:
            self._screen(stream).feed(index, data)
            if self._logs is not None:
                self._log(index, data)
        return bool(data)

    def _is_ready(self, index: int, data: bytes) -> None:
        self.group.ready(index)
        if self._on_ready is not None:
            pid = next(pid for pid, member in self._children.items() if member == index)
            self._on_ready(index, data.decode(errors="replace").strip(), pid)

    def _log(self, index: int, data: bytes) -> None:
        assert self._logs is not None
        log = self._logs[index]
        failed_before = log.failure
        log.write(data)
        if log.failure is not None and failed_before is None:
            self.say(
                f"{log.path} cannot be written ({log.failure.strerror}): "
                "nothing more is logged there"
            )

    def _screen(self, stream: int) -> Screen:
        return self._screens[stream - 1]

    def _close_pipes(self, index: int) -> None:
        """Take what is left in a dead child's pipes; its own children may hold them open."""
        for descriptor in [d for d, (member, _) in self._pipes.items() if member == index]:
            _, stream = self._pipes[descriptor]
            # Bounded: what still writes there could go on for ever.
            for _ in range(64):
                if descriptor not in self._pipes or not self._read(descriptor):
                    break
            if stream == 0 and self._pipes.pop(descriptor, None) is not None:
                os.close(descriptor)

    def _drain_all(self) -> None:
        for index in {index for index, _ in self._pipes.values()}:
            self._close_pipes(index)
        for descriptor, (index, stream) in list(self._pipes.items()):
            self._screen(stream).end(index)
            os.close(descriptor)
        self._pipes.clear()

    def _finish_output(self, code: int) -> int:
        patience = time.monotonic() + 0.3 if code >= 128 else None

        def give_up() -> bool:
            if patience is not None and time.monotonic() > patience:
                return True
            return bool({signal.SIGINT, signal.SIGTERM} & set(self._inbox.read()))

        for screen in self._screens:
            screen.sink.finish(give_up)
        return code

    # ------------------------------------------------------------ the end

    def _orphans(self) -> list[int]:
        """Children of ours that we did not start: descendants of a dead child."""
        return [
            pid
            for pid in process.children_of(os.getpid())
            if pid not in self._children and pid not in self._strangers
        ]

    def _end_orphans(self) -> None:
        """End what children have left behind, and what that leaves behind."""
        limit = time.monotonic() + _ORPHAN_GRACE
        told: set[int] = set()
        while orphans := self._orphans():
            late = time.monotonic() >= limit
            for pid in orphans:
                with contextlib.suppress(OSError):
                    if late or pid not in told:
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                told.add(pid)
            self._reap()
            for descriptor in list(self._pipes):
                # One that writes into a full pipe could not end.
                self._read(descriptor)
            if time.monotonic() > limit + 1.0:
                return
            time.sleep(0.005)

    def _kill_all(self) -> None:
        """Only where something went wrong is anybody left."""
        for pid in list(self._children):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._children.clear()
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes.clear()
        for log in self._logs or []:
            log.close()


def _terminal_is_ours() -> bool:
    """Whether a Ctrl-C of the terminal goes to our process group, so to all children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
