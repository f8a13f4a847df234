"""The first seconds of a broker that took the place of one that died.  Pure.

It knows nobody, and its clients come back one after another: those that were connected
reconnect within half a second, and hear that they are unknown when they next say something.
Until then "who is w1?" has no answer: "nobody" would be wrong.  So what cannot be answered
is held, asked again whenever somebody has come back, and answered for good when the time is
over.

A broker knows that it is such a one by the first client that takes up a session which it
has not made.  Rejected: a file that says so (it would be there, or not, for other reasons).
"""

from __future__ import annotations

from .messages import Message

#: Seconds from the first client that came back to the end of the recovery.
RECOVERY = 3.0


class Recovery:
    """What is held, and until when.

    Example:
        >>> recovery = Recovery()
        >>> recovery.hold(1, Message(), now=10.0)
        False
        >>> recovery.begin(now=10.0)
        >>> recovery.hold(1, Message(), now=11.0), recovery.due
        (True, 13.0)
        >>> recovery.is_over(now=13.0), len(recovery.take())
        (True, 1)
    """

    def __init__(self) -> None:
        self._until: float | None = None
        self._held: list[tuple[int, Message]] = []

    def begin(self, now: float) -> None:
        """Somebody has come back from before; the first one counts."""
        if self._until is None:
            self._until = now + RECOVERY

    def hold(self, session: int, message: Message, now: float) -> bool:
        """Keep a request that has no answer yet; False where the answer is final."""
        if self._until is None or now >= self._until:
            return False
        self._held.append((session, message))
        return True

    def take(self) -> list[tuple[int, Message]]:
        """All that is held, to be looked at again."""
        held, self._held = self._held, []
        return held

    def is_over(self, now: float) -> bool:
        """Has the time passed, with something held?"""
        return bool(self._held) and self._until is not None and now >= self._until

    @property
    def due(self) -> float | None:
        """When what is held must be answered."""
        return self._until if self._held else None
