"""Calls of ours that are under way, and what becomes of them.

A :class:`Call` sits in its pair's ``waiting`` and in the wheel until exactly one of
reply, expiry, loss or cancel ends it; whoever takes it out of ``waiting`` owns its end.
:class:`SyncCall` wakes the thread that waits in ``rpc_sync``, which decodes the reply
itself; :class:`FutureCall` completes a future on a pool thread, since decoding and
callbacks may run code of the user.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import CallState, Ran

if TYPE_CHECKING:
    from .pair import Pair
    from .transfer import Assembly, Outgoing

_STATES: dict[int, CallState] = {1: "receiving", 2: "queued", 3: "running", 4: "done"}


class Call:
    """One call under way."""

    __slots__ = (
        "deadline",
        "expired",
        "function",
        "limit",
        "number",
        "outgoing",
        "pair",
        "started",
    )

    def __init__(
        self, pair: Pair, function: str, limit: float | None, deadline: float | None
    ) -> None:
        self.pair = pair
        self.function = function
        self.limit = limit
        self.deadline = deadline
        self.started = time.monotonic()
        self.number = 0
        self.outgoing: Outgoing | None = None
        self.expired = False

    @property
    def key(self) -> tuple[int, int]:
        """Its key in the wheel."""
        return self.pair.session, self.number

    @property
    def callee(self) -> str:
        """The callee's name."""
        member = self.pair.member
        return member.name if member is not None else f"{self.pair.session:016x}"

    @property
    def ran(self) -> Ran:
        """What is known of whether it ran, while no reply has come."""
        return "maybe" if self.outgoing is not None and self.outgoing.started else "no"

    def stop_sending(self) -> None:
        """Nobody wants it any more (lock held): what has not left stays here."""
        if self.outgoing is not None:
            self.outgoing.cancelled = True

    def timeout_error(self, stage: int = -1) -> errors.RpcTimeoutError:
        """The error of its expiry; ``stage`` is what the callee said, -1 if nothing."""
        member = self.pair.member
        if self.outgoing is None or not self.outgoing.started:
            state: CallState = "no credit" if self.outgoing in self.pair.outbox else "no worker"
        else:
            state = _STATES.get(stage, "sent")
        return errors.call_timed_out(
            self.callee,
            self.function,
            self.limit or 0.0,
            time.monotonic() - self.started,
            state,
            host=member.host if member else None,
            process=member.pid if member else None,
        )

    def lost_error(self, reason: str) -> errors.WorkerLostError:
        """The error of its callee's loss."""
        member = self.pair.member
        return errors.worker_lost(
            self.callee,
            self.function,
            reason,
            self.ran,
            host=member.host if member else None,
            process=member.pid if member else None,
            elapsed=time.monotonic() - self.started,
        )

    def replied(self, assembly: Assembly) -> Callable[[], None] | None:
        """Its reply is whole; returns what is still to be run on a pool thread, if anything."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> Callable[[], None] | None:
        """It ends without a reply; returns what is still to be run on a pool thread."""
        raise NotImplementedError


class SyncCall(Call):
    """A call whose thread waits for it."""

    __slots__ = ("error", "gate", "reply")

    def __init__(
        self, pair: Pair, function: str, limit: float | None, deadline: float | None
    ) -> None:
        super().__init__(pair, function, limit, deadline)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.reply: Assembly | None = None
        self.error: BaseException | None = None

    def replied(self, assembly: Assembly) -> None:
        self.reply = assembly
        self.gate.release()

    def failed(self, error: BaseException) -> None:
        self.error = error
        self.gate.release()


class FutureCall(Call):
    """A call whose result goes into a future, or elsewhere by ``finish``.

    Args:
        finish: called on a pool thread with ``(assembly, None)`` or ``(None, error)``.
    """

    __slots__ = ("finish",)

    def __init__(
        self,
        pair: Pair,
        function: str,
        limit: float | None,
        deadline: float | None,
        finish: Callable[[Any, BaseException | None], Any],
    ) -> None:
        super().__init__(pair, function, limit, deadline)
        self.finish = finish

    def replied(self, assembly: Assembly) -> Callable[[], None]:
        return lambda: self.finish(assembly, None)

    def failed(self, error: BaseException) -> Callable[[], None]:
        return lambda: self.finish(None, error)


def outcome(value: Any, error: BaseException | None) -> Any:
    """Return ``value`` or raise ``error``."""
    if error is not None:
        raise error
    return value
