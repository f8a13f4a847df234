"""What a supervisor decides: pure, events and times in, actions out.

A group has *members* (ranks or workers) and may have one *helper* (the broker of a run).

* Ranks: the first that fails ends all, and its exit code is the group's.
* Workers: one that dies is started again after a pause (``restart``), or missed while the
  others go on; one that never came to serve ends all, since it would fail again.
* The helper is started again whenever it dies, and ended after the last member.

Ending goes by a *plan*, signals at times: SIGTERM, then SIGKILL for those still there.
Asking again for the end makes it quicker.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from .backoff import Backoff

#: Seconds from SIGTERM to SIGKILL for ranks.
TERMINATE_GRACE = 2.0
#: Seconds from Ctrl-C to SIGKILL: all is gone within two.
INTERRUPT_GRACE = 1.2
#: Seconds from Ctrl-C to SIGTERM for ranks that do not react to it.
INTERRUPT_PATIENCE = 0.8
#: Seconds that a worker has beyond its time for draining.
DRAIN_SLACK = 5.0
#: Seconds that the helper has to end.
HELPER_GRACE = 1.0


@dataclass(frozen=True)
class Start:
    """Start this member."""

    member: int


@dataclass(frozen=True)
class Signal:
    """Send a signal to this member."""

    member: int
    number: int


@dataclass(frozen=True)
class Say:
    """A line for the person at the terminal."""

    text: str


@dataclass(frozen=True)
class Finish:
    """Everything has ended: this is the exit code."""

    code: int


Action = Start | Signal | Say | Finish
Plan = list[tuple[float, int]]


@dataclass
class _Member:
    label: str
    backoff: Backoff = field(default_factory=Backoff)
    process: int | None = None
    started_at: float = 0.0
    restart_at: float | None = None
    was_ready: bool = False


class Group:
    """The members of one ``zrpc run`` or ``zrpc worker``.

    Args:
        noun: what a member is called in messages, "rank" or "worker".
        labels: a name for each member.
        helper: whether the last label is that of the helper.

    Example:
        >>> group = Ranks("rank", ["0", "1"])
        >>> group.begin(now=0.0)
        [Start(member=0), Start(member=1)]
    """

    def __init__(self, noun: str, labels: list[str], *, helper: bool = False) -> None:
        self.noun = noun
        self._members = [_Member(label) for label in labels]
        self._helper = self._members[-1] if helper else None
        self._counted = self._members[:-1] if helper else self._members
        self._plan: Plan | None = None
        self._code = 0
        self._helper_stopped = False

    # ------------------------------------------------------------ events

    def begin(self, now: float) -> list[Action]:
        """Start all that do not run yet."""
        return [Start(i) for i, member in enumerate(self._members) if member.process is None]

    def started(self, index: int, process: int, now: float) -> None:
        """Member ``index`` runs as process ``process``."""
        member = self._members[index]
        member.process, member.started_at, member.restart_at = process, now, None
        member.backoff.started(now)

    def ready(self, index: int) -> None:
        """Member ``index`` serves."""
        self._members[index].was_ready = True

    def ended(self, index: int, status: int, now: float) -> list[Action]:
        """Member ``index`` has ended.

        Args:
            status: its exit code, or minus the signal that killed it.
            now: monotonic seconds.
        """
        member = self._members[index]
        how = self._how(member, status, now)
        member.process = None
        if member is self._helper:
            return self._helper_ended(member, how, now)
        if self._plan is not None:
            self._ended_while_stopping(status)
            return self._wind_up(now)
        return self._ended_by_itself(member, status, how, now)

    def interrupt(self, now: float, *, delivered: bool) -> list[Action]:
        """Ctrl-C.

        Args:
            now: monotonic seconds.
            delivered: the terminal has sent it to the members as well.
        """
        if self._code == 130 and self._plan is not None:
            return self._stop(130, [(0.0, signal.SIGKILL)], now)
        return self._stop(130, self._interrupt_plan(delivered), now)

    def terminate(self, now: float) -> list[Action]:
        """SIGTERM or SIGHUP."""
        raise NotImplementedError

    def abandon(self, code: int, now: float) -> list[Action]:
        """End all: what they do has no purpose any more."""
        if self._plan is not None:
            return []
        return self._stop(code, [(0.0, signal.SIGTERM), (TERMINATE_GRACE, signal.SIGKILL)], now)

    def due(self, now: float) -> list[Action]:
        """What the time has come for."""
        actions: list[Action] = []
        for index, member in enumerate(self._members):
            if member.restart_at is not None and member.restart_at <= now:
                member.restart_at = None
                actions.append(Start(index))
        while self._plan and self._plan[0][0] <= now:
            _, number = self._plan.pop(0)
            targets = [self._helper] if self._helper_stopped else self._counted
            actions += [
                Signal(index, number)
                for index, member in enumerate(self._members)
                if member.process is not None and any(member is target for target in targets)
            ]
        return actions

    def next_wake(self) -> float | None:
        """When :meth:`due` is to be called next; None for not before another event."""
        moments = [m.restart_at for m in self._members if m.restart_at is not None]
        if self._plan:
            moments.append(self._plan[0][0])
        return min(moments, default=None)

    @property
    def stopping(self) -> bool:
        """Whether the end has begun."""
        return self._plan is not None

    # ------------------------------------------------------------ decisions

    def _ended_by_itself(self, member: _Member, status: int, how: str, now: float) -> list[Action]:
        raise NotImplementedError

    def _ended_while_stopping(self, status: int) -> None:
        """A member's status may change the group's code."""

    def _interrupt_plan(self, delivered: bool) -> Plan:
        raise NotImplementedError

    def _how(self, member: _Member, status: int, now: float) -> str:
        noun = member.label if member is self._helper else f"{self.noun} {member.label}"
        what = (
            f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with code {status}"
        )
        return f"{noun} (pid {member.process}) {what} after {now - member.started_at:.1f} s"

    def _others(self) -> bool:
        return any(m.process is not None or m.restart_at is not None for m in self._counted)

    def _stop(self, code: int, plan: Plan, now: float) -> list[Action]:
        self._code = code
        for member in self._members:
            member.restart_at = None
        if not self._helper_stopped:
            self._plan = [(now + delay, number) for delay, number in plan]
        return self.due(now) + self._wind_up(now)

    def _wind_up(self, now: float) -> list[Action]:
        if any(member.process is not None for member in self._counted):
            return []
        if self._helper is None or self._helper.process is None:
            return [Finish(self._code)]
        if self._helper_stopped:
            return []
        self._helper_stopped = True
        self._plan = [(now, signal.SIGTERM), (now + HELPER_GRACE, signal.SIGKILL)]
        return self.due(now)

    def _helper_ended(self, member: _Member, how: str, now: float) -> list[Action]:
        if self._plan is not None:
            return self._wind_up(now)
        pause = member.backoff.ended(now)
        member.restart_at = now + pause
        return [Say(f"{how}; it is started again in {pause:g} s")]


class Ranks(Group):
    """The ranks of a run: all of them or none."""

    def terminate(self, now: float) -> list[Action]:
        """SIGTERM or SIGHUP: all end, with the code of a program that it has killed."""
        grace = 0.0 if self._plan is not None else TERMINATE_GRACE
        return self._stop(
            128 + signal.SIGTERM, [(0.0, signal.SIGTERM), (grace, signal.SIGKILL)], now
        )

    def _ended_by_itself(self, member: _Member, status: int, how: str, now: float) -> list[Action]:
        others = any(m.process is not None for m in self._counted)
        if status == 0:
            return [] if others else self._stop(0, [], now)
        end = "; the others were stopped" if others else ""
        plan: Plan = [(0.0, signal.SIGTERM), (TERMINATE_GRACE, signal.SIGKILL)]
        return [Say(how + end), *self._stop(exit_code(status), plan, now)]

    def _interrupt_plan(self, delivered: bool) -> Plan:
        # A second KeyboardInterrupt would cut short how a script cleans up after the first.
        plan: Plan = [] if delivered else [(0.0, signal.SIGINT)]
        return [
            *plan,
            (INTERRUPT_PATIENCE, signal.SIGTERM),
            (INTERRUPT_GRACE, signal.SIGKILL),
        ]


class Workers(Group):
    """Workers that serve, each by itself.

    Args:
        noun: as for :class:`Group`.
        labels: as for :class:`Group`.
        restart: start a dead one again.
        drain: seconds that a worker has for running calls after SIGTERM.
    """

    def __init__(
        self, noun: str, labels: list[str], *, restart: bool = False, drain: float = 30.0
    ) -> None:
        super().__init__(noun, labels)
        self._restart = restart
        self._drain = drain
        self._draining = False

    def terminate(self, now: float) -> list[Action]:
        """SIGTERM or SIGHUP: they drain; the second time they end at once."""
        if self._plan is not None:
            at_once = self._code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            return self._stop(
                self._code or 128 + signal.SIGTERM,
                [(0.0, signal.SIGINT), (0.0 if at_once else INTERRUPT_GRACE, signal.SIGKILL)],
                now,
            )
        self._draining = True
        return self._stop(
            0, [(0.0, signal.SIGTERM), (self._drain + DRAIN_SLACK, signal.SIGKILL)], now
        )

    def _ended_by_itself(self, member: _Member, status: int, how: str, now: float) -> list[Action]:
        others = self._others()
        if status > 0 and not member.was_ready:
            end = "; the others were stopped" if others else ""
            plan: Plan = [(0.0, signal.SIGINT), (INTERRUPT_GRACE, signal.SIGKILL)]
            return [Say(f"{how}, before it could serve{end}"), *self._stop(1, plan, now)]
        if self._restart:
            pause = member.backoff.ended(now)
            member.restart_at = now + pause
            return [Say(f"{how}; it is started again in {pause:g} s")]
        if status != 0 and self._code == 0:
            self._code = exit_code(status)
        if not others:
            return [Say(how), *self._stop(self._code, [], now)]
        return [Say(f"{how}; the others go on (with --restart it would be started again)")]

    def _ended_while_stopping(self, status: int) -> None:
        # A worker that could not end its calls in time says so by its code.
        if self._draining and status != 0 and self._code == 0:
            self._code = 1

    def _interrupt_plan(self, delivered: bool) -> Plan:
        # To a worker the second one says the same as the first.
        return [(0.0, signal.SIGINT), (INTERRUPT_GRACE, signal.SIGKILL)]


def exit_code(status: int) -> int:
    """What a shell would show for a status: the code, or 128 and the signal's number."""
    return status if status >= 0 else 128 - status


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
