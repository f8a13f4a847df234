"""Logs of processes that run now; those are shown with a test that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_shown: dict[str, Path] = {}


@contextlib.contextmanager
def shown_on_failure(name: str, path: Path) -> Iterator[None]:
    """Show the end of this file with each test that fails meanwhile."""
    _shown[name] = path
    try:
        yield
    finally:
        _shown.pop(name, None)


def current() -> Iterator[tuple[str, str]]:
    """Name and end of each log that is not empty."""
    for name, path in _shown.items():
        text = end_of(path)
        if text:
            yield name, text


def end_of(path: Path, characters: int = 8000) -> str:
    """The end of a file, or nothing where there is none."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return ""
    return text if len(text) <= characters else "...\n" + text[-characters:]
