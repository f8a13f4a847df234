"""The first seconds of a broker that took the place of one that died.  Pure.

It knows nobody, and its clients come back one after another: those that were connected
reconnect within half a second, others when their network lets them.  Until then "who is
w1?" has no answer: "nobody" would be wrong.  So what cannot be answered is held, asked
again whenever somebody has come back, and answered for good when the time is over.  Who
comes back tells whom it knew: those are waited for as if their connection was cut.

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
        self.since: float | None = None
        self._held: list[tuple[float, int, Message]] = []

    def begin(self, now: float) -> None:
        """Somebody has come back from before; the first one counts."""
        if self.since is None:
            self.since = now

    def is_on(self, now: float, patience: float = 0.0) -> bool:
        """May somebody still come back?"""
        return self.since is not None and now < self.since + max(RECOVERY, patience)

    def hold(self, session: int, message: Message, now: float, patience: float = 0.0) -> bool:
        """Keep a request that has no answer yet; False where the answer is final.

        Args:
            patience: seconds after the first that came back for which it is held at most, if
                that is more than the usual.
        """
        if not self.is_on(now, patience):
            return False
        assert self.since is not None
        self._held.append((self.since + max(RECOVERY, patience), session, message))
        return True

    def take(self) -> list[tuple[int, Message]]:
        """All that is held, to be looked at again."""
        held, self._held = self._held, []
        return [(session, message) for _, session, message in held]

    def is_over(self, now: float) -> bool:
        """Has the time passed for something that is held?"""
        due = self.due
        return due is not None and now >= due

    @property
    def due(self) -> float | None:
        """When something that is held must be answered."""
        return min((until for until, _, _ in self._held), default=None)
