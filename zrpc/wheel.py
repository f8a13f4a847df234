"""A hierarchical timing wheel: start and cancel a timer in constant time.

After G. Varghese and T. Lauck, "Hashed and Hierarchical Timing Wheels: Data Structures
for the Efficient Implementation of a Timer Facility", SOSP 1987 (their scheme 7).

Time is counted in ticks since the wheel was made.  A tick's number is read as digits of
six bits, and a timer sits at the level of the highest digit in which its deadline
differs from the current tick, in the slot of that digit's value.  Two things follow:

* every timer of a level is due before every timer of the levels above, so the next one
  is found from one bit mask a level, and a jump of hours visits only slots that hold
  something;
* a timer's slot follows from its deadline and the current tick alone, so nothing needs
  to be stored to cancel it: the slots are dicts, and the key is deleted from one.

When the current tick reaches a slot above level 0, the slot's timers move down, each to
the level where it now belongs.  A timer moves at most once a level.

Rejected: a binary heap (a cancelled entry stays in it as a tombstone until its deadline,
and nearly every call of a training run is cancelled long before its 60 s); a sorted
container (start and cancel cost the logarithm of a million); one flat wheel (its slots
either span more than a tick or have to be looked at once a round); a
``threading.Timer`` a call (a thread each).

The wheel is pure: it reads no clock and starts no thread.  It is not thread-safe;
whoever shares one guards it with a lock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

#: Bits of a digit: 64 slots a level.
_BITS = 6
_MASK = (1 << _BITS) - 1
#: Ticks beyond which floats no longer tell neighbours apart (a million years at 10 ms).
_FARTHEST = 1 << 52


class TimingWheel:
    """Timers by key, each with a deadline.

    Args:
        now: the clock's reading, in seconds.  Every later ``deadline`` and ``now`` is a
            reading of the same clock.
        tick: the wheel's resolution, in seconds.  Deadlines are rounded up to it: a
            timer is never due early, and less than one tick late.

    Raises:
        ValueError: ``tick`` is not a positive number, or ``now`` is not finite.

    Example:
        >>> wheel = TimingWheel(now=100.0, tick=0.01)
        >>> wheel.add("call 1", 100.5)
        >>> wheel.add("call 2", 160.0)
        >>> wheel.cancel("call 2")
        True
        >>> wheel.advance(100.49), wheel.advance(100.51)
        ([], ['call 1'])
        >>> wheel.next_wake() is None
        True
    """

    __slots__ = ("_current", "_filled", "_origin", "_slots", "_tick", "_ticks")

    def __init__(self, now: float, tick: float = 0.01) -> None:
        if not (tick > 0 and math.isfinite(tick)):
            raise ValueError(f"tick must be a positive number of seconds, but is {tick!r}")
        if not math.isfinite(now):
            raise ValueError(f"now must be a finite number of seconds, but is {now!r}")
        self._origin = now
        self._tick = tick
        self._current = 0
        self._ticks: dict[Hashable, int] = {}
        # Level by level: which slots hold something (a bit each), and the slots.
        self._filled: list[int] = []
        self._slots: list[list[dict[Hashable, None]]] = []

    @property
    def tick(self) -> float:
        """The resolution, in seconds."""
        return self._tick

    def add(self, key: Hashable, deadline: float) -> None:
        """Start a timer; one that runs under ``key`` already moves to the new deadline.

        Args:
            key: names the timer.
            deadline: the moment, in seconds, from which it is due.  A past one is due at
                the next :meth:`advance`.

        Raises:
            ValueError: ``deadline`` is infinite or not a number (a call without a limit
                gets no timer).
        """
        ticks = self._ticks
        if key in ticks:
            self.cancel(key)
        origin, width = self._origin, self._tick
        try:
            tick = math.ceil((deadline - origin) / width)
        except (OverflowError, ValueError):
            raise ValueError(
                f"deadline must be a finite number of seconds, but is {deadline!r}"
            ) from None
        current = self._current
        if tick > _FARTHEST:
            tick = _FARTHEST
        # The division rounds; what counts is the moment that the tick stands for.
        elif origin + tick * width < deadline:
            tick += 1
        elif origin + (tick - 1) * width >= deadline:
            tick -= 1
        if tick < current:
            tick = current
        ticks[key] = tick
        self._place(key, tick)

    def _place(self, key: Hashable, tick: int) -> None:
        level = ((tick ^ self._current) | 1).bit_length() - 1
        level //= _BITS
        digit = (tick >> (level * _BITS)) & _MASK
        try:
            self._slots[level][digit][key] = None
        except IndexError:
            while len(self._slots) <= level:
                self._slots.append([{} for _ in range(_MASK + 1)])
                self._filled.append(0)
            self._slots[level][digit][key] = None
        self._filled[level] |= 1 << digit

    def cancel(self, key: Hashable) -> bool:
        """Stop a timer: O(1), and nothing of it stays behind.

        Returns:
            True if it was running; False if it is due already, was cancelled before or
            never existed.
        """
        tick = self._ticks.pop(key, None)
        if tick is None:
            return False
        level = (((tick ^ self._current) | 1).bit_length() - 1) // _BITS
        digit = (tick >> (level * _BITS)) & _MASK
        slot = self._slots[level][digit]
        del slot[key]
        if not slot:
            # An emptied dict keeps its table; a slot that once held a million must not.
            slot.clear()
            self._filled[level] &= ~(1 << digit)
        return True

    def advance(self, now: float) -> list[Hashable]:
        """Move to ``now`` and return the keys that have become due.

        They come in the order of their ticks, those of one tick in the order in which
        they came to it, and are no longer in the wheel.  A ``now`` before an earlier
        one counts as that.
        """
        target = max(self._current, self._reached(now))
        due: list[Hashable] = []
        while self._ticks:
            level, digit, start = self._next_slot()
            if start > target:
                break
            slot = self._slots[level][digit]
            self._slots[level][digit] = {}
            self._filled[level] &= ~(1 << digit)
            self._current = start
            if level == 0:
                for key in slot:
                    del self._ticks[key]
                due.extend(slot)
            else:
                for key in slot:
                    self._place(key, self._ticks[key])
        self._current = target
        return due

    def next_wake(self) -> float | None:
        """The moment, in seconds, at which :meth:`advance` is to be called next.

        Exact for timers within the next few ticks, else a moment no later than the next
        deadline, at which the wheel only has to sort it more finely.  None while the
        wheel is empty.
        """
        if not self._ticks:
            return None
        return self._origin + self._next_slot()[2] * self._tick

    def deadline_of(self, key: Hashable) -> float:
        """The moment, in seconds, at which ``key`` becomes due: its deadline, rounded up to a tick.

        Raises:
            KeyError: there is no such timer.
        """
        return self._origin + self._ticks[key] * self._tick

    def __len__(self) -> int:
        return len(self._ticks)

    def __contains__(self, key: object) -> bool:
        return key in self._ticks

    def _next_slot(self) -> tuple[int, int, int]:
        """Level, digit and first tick of the next slot that holds something."""
        for level, filled in enumerate(self._filled):
            if filled:
                digit = (filled & -filled).bit_length() - 1
                shift = level * _BITS
                above = self._current >> (shift + _BITS) << _BITS
                return level, digit, (above | digit) << shift
        raise AssertionError("the wheel holds timers but no slot does")

    def _reached(self, now: float) -> int:
        """The last tick that has begun at ``now``."""
        origin, width = self._origin, self._tick
        if not math.isfinite(now):
            raise ValueError(f"now must be a finite number of seconds, but is {now!r}")
        tick = min(math.floor((now - origin) / width), _FARTHEST)
        if origin + tick * width > now:
            tick -= 1
        elif tick < _FARTHEST and origin + (tick + 1) * width <= now:
            tick += 1
        return tick
