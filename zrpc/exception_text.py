"""The text of exceptions, taken without trusting their methods: message, repr, notes, traceback.

An exception that goes to another worker may have a ``__str__`` that raises, a repr of a
gigabyte, or notes that are no text; its name and traceback must arrive all the same.
"""

from __future__ import annotations

import builtins
import traceback
import types
from typing import Any, cast

from .errors import RpcError

__all__ = [
    "GROUP",
    "TEXT_KEY",
    "notes_of",
    "own_traceback_text",
    "safe_repr",
    "safe_text",
    "traceback_text",
]

#: ``BaseExceptionGroup``, which Python has from 3.11 on.
GROUP: type | None = getattr(builtins, "BaseExceptionGroup", None)

#: Where an exception that came from another worker keeps the text that it had there.
TEXT_KEY = "_zrpc_text"

#: Longest text, traceback and repr that is sent, in characters.
_TEXT_LIMIT = 256 * 1024
_REPR_LIMIT = 4096


def safe_text(error: BaseException) -> str:
    """``str(error)`` without a remote traceback, whatever its ``__str__`` does."""
    try:
        if isinstance(error, RpcError):
            text = error.plain_text()
        else:
            text = error.__dict__[TEXT_KEY] if TEXT_KEY in error.__dict__ else str(error)
        return _shorten(str.__str__(text), _TEXT_LIMIT)
    except Exception as trouble:
        return f"<str() of this {type(error).__qualname__} raised {type(trouble).__qualname__}>"


def safe_repr(value: Any) -> str:
    """``repr(value)``, whatever its ``__repr__`` does."""
    try:
        return _shorten(str.__str__(repr(value)), _REPR_LIMIT)
    except Exception as trouble:
        kind = type(value).__qualname__
        return f"<{kind} object; its repr() raised {type(trouble).__qualname__}>"


def _shorten(text: str, limit: int) -> str:
    """``text`` with its middle left out where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def notes_of(error: BaseException) -> list[str]:
    """What ``add_note`` added; anything else in ``__notes__`` as its repr."""
    notes = error.__dict__.get("__notes__", ())
    if not isinstance(notes, (list, tuple)):
        notes = (notes,)
    return [str.__str__(note) if isinstance(note, str) else safe_repr(note) for note in notes]


def traceback_text(error: BaseException, skip_frames_of: tuple[str, ...]) -> str:
    """The formatted traceback, with causes and contexts, without the frames of some modules.

    Args:
        error: the exception.
        skip_frames_of: names of modules and packages whose frames are left out.

    Returns:
        The text.  Empty for one of zrpc's own errors in which no other frame is left:
        its own text says all.  Any other exception in which none is left keeps them all.
    """
    try:
        summary = traceback.TracebackException(type(error), error, error.__traceback__)
        frames = list(summary.stack)
        _prune(summary, _skipped_files(error, skip_frames_of))
        if not summary.stack:
            if isinstance(error, RpcError):
                return ""
            if frames:
                summary.stack = traceback.StackSummary.from_list(frames)
        return _shorten("".join(summary.format()), _TEXT_LIMIT)
    except Exception:  # a type with hostile attributes: the frames alone
        return own_traceback_text(error, skip_frames_of)


def own_traceback_text(error: BaseException, skip_frames_of: tuple[str, ...]) -> str:
    """The formatted traceback of one exception alone.

    Not by ``TracebackException``, which takes in the whole chain to format any part of it:
    done for each exception of a chain, that is quadratic.
    """
    lines = traceback.StackSummary.extract(
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_of(frame, skip_frames_of)
    ).format()
    if lines:
        lines.insert(0, "Traceback (most recent call last):\n")
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    text = safe_text(error)
    return _shorten("".join(lines), _TEXT_LIMIT) + (f"{name}: {text}" if text else name)


def _is_of(frame: types.FrameType, modules: tuple[str, ...]) -> bool:
    """Whether a frame is of one of these modules and packages."""
    name = frame.f_globals.get("__name__") or ""
    return any(name == module or name.startswith(module + ".") for module in modules)


def _skipped_files(error: BaseException, modules: tuple[str, ...]) -> set[str]:
    """The files of the modules whose frames are left out, in the whole chain."""
    files: set[str] = set()
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and modules:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        waiting += [current.__cause__, current.__context__]
        if GROUP is not None and isinstance(current, GROUP):
            waiting += cast(Any, current).exceptions
        for frame, _line in traceback.walk_tb(current.__traceback__):
            if _is_of(frame, modules):
                files.add(frame.f_code.co_filename)
    return files


def _prune(summary: traceback.TracebackException, files: set[str]) -> None:
    """Take the frames of some files out of a traceback and of those it is chained to."""
    waiting: list[Any] = [summary]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        waiting += [current.__cause__, current.__context__]
        waiting += getattr(current, "exceptions", None) or ()
        frames = [frame for frame in current.stack or () if frame.filename not in files]
        # None, not an empty list: that would print a header with nothing below it.
        current.stack = traceback.StackSummary.from_list(frames) if frames else None
