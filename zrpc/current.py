"""The process's agent, and the one that the calling code means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import errors
from .context import handler_agent

if TYPE_CHECKING:
    from .agent import Agent

_current: Agent | None = None
_was_shut_down = False


def set_agent(agent: Agent | None) -> None:
    """Make ``agent`` the process's."""
    global _current, _was_shut_down
    if agent is None and _current is not None:
        _was_shut_down = True
    _current = agent


def find_agent() -> Agent | None:
    """The agent of the handler that runs, else the process's; None if there is none."""
    agent = handler_agent.get()
    if agent is None:
        agent = _current
    return agent


def get_agent(text: str | None = None) -> Agent:
    """The same, or an error.

    Raises:
        NotInitializedError: there is none.
    """
    agent = find_agent()
    if agent is None or (agent.process != os.getpid()):
        if agent is not None:
            agent.check_alive()
        if text is not None:
            raise errors.NotInitializedError(text, ran="no")
        raise errors.not_initialized(
            "It has been shut down in this process." if _was_shut_down else ""
        )
    return agent
