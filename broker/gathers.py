"""Meetings: barriers and gathers of a job's workers.  Pure.

A meeting is named by a key that all who take part use.  It ends when everybody who is
wanted has come: each gets the map of all values.  One who is gone ends it with an error
for those who wait, or, in a tolerant meeting, is not waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

#: Meetings that ended before a restart of which the outcome is kept.
REMEMBERED = 100
#: Who waits: a session and the number of its request.
Token = tuple[int, int]
#: A map of values, or names of those who are gone and a sentence.
Outcome = dict[str, bytes] | tuple[list[str], str]


@dataclass
class Meeting:
    """One meeting under way."""

    wanted: set[str]
    tolerant: bool
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, Token] = field(default_factory=dict)


class Gathers:
    """The meetings of one job."""

    def __init__(self) -> None:
        self._meetings: dict[str, Meeting] = {}
        self._finished: OrderedDict[str, dict[str, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._meetings)

    def come(
        self,
        key: str,
        name: str,
        value: bytes,
        wanted: set[str],
        *,
        tolerant: bool,
        token: Token,
    ) -> list[tuple[Token, Outcome]]:
        """``name`` comes with ``value``; returns whom to answer, and with what.

        ``wanted`` counts when the meeting begins; coming again replaces one's value.
        """
        finished = self._finished.get(key)
        if finished is not None:
            return [(token, dict(finished))]
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(set(wanted), tolerant)
        meeting.wanted.add(name)
        meeting.values[name] = value
        meeting.waiting[name] = token
        return self._check(key)

    def finished(self, key: str, values: dict[str, bytes]) -> list[tuple[Token, Outcome]]:
        """Somebody says that this meeting ended so, before this broker was started.

        Who had not got its answer then comes again, or has come already.
        """
        self._finished[key] = values
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        meeting = self._meetings.pop(key, None)
        if meeting is None:
            return []
        return [(token, dict(values)) for token in meeting.waiting.values()]

    def leave(self, key: str, name: str) -> None:
        """``name`` no longer waits; its value stays for the others."""
        meeting = self._meetings.get(key)
        if meeting is not None:
            meeting.waiting.pop(name, None)
            if not meeting.waiting:
                del self._meetings[key]

    def gone(self, name: str, how: str) -> list[tuple[Token, Outcome]]:
        """``name`` has left or was lost; returns whom to answer."""
        results: list[tuple[Token, Outcome]] = []
        for key, meeting in list(self._meetings.items()):
            if name not in meeting.wanted:
                continue
            meeting.waiting.pop(name, None)
            if name in meeting.values and not meeting.tolerant:
                # It had come: its value counts, and the meeting may still end well.
                meeting.wanted.discard(name)
            elif meeting.tolerant:
                meeting.wanted.discard(name)
                meeting.values.pop(name, None)
            else:
                text = f"worker {name!r} {how}, so the meeting {key!r} cannot take place"
                results += [(token, ([name], text)) for token in meeting.waiting.values()]
                del self._meetings[key]
                continue
            if not meeting.waiting:
                self._meetings.pop(key, None)
                continue
            results += self._check(key)
        return results

    def missing(self, key: str) -> set[str]:
        """Who has not come yet."""
        meeting = self._meetings.get(key)
        return set() if meeting is None else meeting.wanted - meeting.values.keys()

    def waiting(self) -> dict[str, Any]:
        """What a status document says of the meetings under way."""
        return {
            key: {"here": sorted(m.values), "missing": sorted(m.wanted - m.values.keys())}
            for key, m in self._meetings.items()
        }

    def _check(self, key: str) -> list[tuple[Token, Outcome]]:
        meeting = self._meetings[key]
        if meeting.wanted - meeting.values.keys():
            return []
        del self._meetings[key]
        return [(token, dict(meeting.values)) for token in meeting.waiting.values()]
