"""What a handler knows of the call that it runs: context variables.

"The current agent" is, inside a handler, the agent that runs it; elsewhere the one that
the last :func:`zrpc.init_rpc` made.  The context variables follow the code into
callbacks that are chained inside a handler and into asyncio tasks, not into threads
that user code starts itself: those see the process's agent.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent import Agent
    from .pair import Served
    from .worker_info import WorkerInfo

#: The agent that runs the current handler.
handler_agent: ContextVar[Agent | None] = ContextVar("zrpc_handler_agent", default=None)
#: The call that the current handler serves.
handler_call: ContextVar[CallInfo | None] = ContextVar("zrpc_handler_call", default=None)


@dataclass(frozen=True)
class CallInfo:
    """A call, seen from its handler.

    Attributes:
        caller: who called.
        function: the function's display name.
        deadline: monotonic seconds (``time.monotonic()``) by which the caller wants the
            result, or None.
        id: the call's number among those of its caller to this worker.
    """

    caller: WorkerInfo
    function: str
    deadline: float | None
    id: int
    _served: Served | None = None

    def remaining(self) -> float | None:
        """Seconds left until the deadline (never below 0), or None where there is none."""
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - time.monotonic())

    def cancelled(self) -> bool:
        """Has the caller given up: cancelled, timed out, or died?"""
        served = self._served
        return (served is not None and served.cancelled) or (
            self.deadline is not None and time.monotonic() >= self.deadline
        )


def current_call() -> CallInfo | None:
    """The call that the calling code is serving, or None outside of a handler.

    Example:
        >>> current_call() is None
        True
    """
    return handler_call.get()
