"""How long to wait before something that died is started again."""

from __future__ import annotations


class Backoff:
    """Pauses that double, and start over after a life that was long enough.

    Args:
        first: seconds of the first pause.
        longest: seconds that no pause exceeds.
        reset_after: seconds of life after which the next pause is the first again.

    Example:
        >>> backoff = Backoff()
        >>> backoff.started(now=0.0)
        >>> backoff.ended(now=1.0)
        0.1
        >>> backoff.started(now=1.1)
        >>> backoff.ended(now=2.0)
        0.2
    """

    def __init__(
        self, first: float = 0.1, longest: float = 10.0, reset_after: float = 30.0
    ) -> None:
        self._first = first
        self._longest = longest
        self._reset_after = reset_after
        self._next = first
        self._started_at = 0.0

    def started(self, now: float) -> None:
        """It was started at ``now`` (seconds on any clock that never goes back)."""
        self._started_at = now

    def ended(self, now: float) -> float:
        """It ended at ``now``; returns how many seconds to wait before the next start."""
        if now - self._started_at >= self._reset_after:
            self._next = self._first
        pause = self._next
        self._next = min(self._longest, pause * 2)
        return pause
