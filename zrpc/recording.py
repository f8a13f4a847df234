"""Steps recorded on a value that is not here yet, and run in the order written.

The machinery of :class:`zrpc.local_copy.LocalCopy`: a handle stands for the result of a
step; what is done with handles adds steps (:func:`record`), and waiting for one runs them
(:func:`wait_for`).

The choices:

* **A program, not an expression tree.**  Steps change values (``v.add_(1)``,
  ``v.items.append(3)``) and values alias each other (``v.view(-1)``), so the result is that
  of the written order only if *all* steps on a copy run in that order, whichever handle is
  waited for.  A tree that computes just what its root needs would lose an ``append`` whose
  result nobody keeps, and would read ``v.tensor`` after a later assignment to it.
* **Copies are chained when they meet.**  Each copy has its own order, held as "the last
  step", which every new step names as its predecessor.  A step that takes two copies has two
  predecessors, and the two orders are one from there on (union-find), since either may hold
  a part of the other from then on.  Copies that never meet never wait for one another.
* **A lock for each step**, held while it runs: a step runs once however many threads wait,
  and two copies do not block each other.  Rejected: a lock for each order, since two orders
  can become one while both are being run.
* **Failures follow the values.**  Every later wait of what depends on a failed step raises
  its error: its result, what is made of that, and, if the step may have changed a value, the
  handle that it was made on and those which that one is a part of.  Reads, operators and a
  tensor's methods that change nothing (no trailing underscore) fail their results only.
"""

from __future__ import annotations

import _thread
import itertools
import linecache
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch

from zrpc.errors import RpcTimeoutError, seconds

__all__ = [
    "Fetch",
    "Handle",
    "Step",
    "become",
    "call",
    "is_ready",
    "record",
    "step_of",
    "steps_in",
    "wait_for",
    "with_values",
]

#: Guards what recording changes: the orders and their last steps.  Reentrant, because a
#: garbage collection inside may run a user's ``__del__`` that uses a handle.
_recording = threading.RLock()


def _renew_lock() -> None:
    """In a forked child: whoever held the lock is not there to release it."""
    global _recording
    _recording = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

_numbers = itertools.count()

#: Values that no method of theirs can change.
_IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset, type(None), torch.Size)


class _Order:
    """The order of the steps on one copy; a union-find node, as copies may meet."""

    __slots__ = ("last", "parent")

    def __init__(self, last: Step) -> None:
        self.last = last
        self.parent: _Order | None = None

    def root(self) -> _Order:
        """The order that this one has become a part of (under the recording lock)."""
        root = self
        while root.parent is not None:
            root = root.parent
        node = self
        while node.parent is not None:
            node.parent, node = root, node.parent
        return root


class _Part:
    """What a step's result may be a part of: known without keeping those values alive."""

    __slots__ = ("step", "wholes")

    def __init__(self, step: Step, wholes: tuple[_Part, ...]) -> None:
        self.step = weakref.ref(step)
        self.wholes = wholes

    def prune(self) -> None:
        """Leave out those that nobody can wait for any more, so that chains stay short."""
        if any(whole.step() is None for whole in self.wholes):
            alive: dict[int, _Part] = {}
            todo = list(self.wholes)
            while todo:
                whole = todo.pop()
                if whole.step() is not None:
                    alive[id(whole)] = whole
                else:
                    todo.extend(whole.wholes)
            self.wholes = tuple(alive.values())


class Step:
    """One thing to do, and afterwards its result: a value or an error."""

    __slots__ = (
        "__weakref__",
        "arguments",
        "changes",
        "error",
        "finished",
        "function",
        "grad_mode",
        "keywords",
        "label",
        "lock",
        "number",
        "order",
        "part",
        "place",
        "predecessors",
        "runner",
        "traceback",
        "value",
    )

    def __init__(
        self,
        label: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        wholes: tuple[_Part, ...],
        changes: bool,
    ) -> None:
        self.label = label
        self.function: Callable[..., Any] | None = function
        self.arguments = arguments
        self.keywords = keywords
        self.part = _Part(self, wholes)
        self.changes = changes
        self.place = _caller()
        self.grad_mode = torch.is_grad_enabled()
        self.number = next(_numbers)
        self.lock = _thread.allocate_lock()
        self.runner = 0
        self.finished = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.traceback: Any = None
        self.predecessors: tuple[Step, ...] = ()
        self.order: _Order

    # Running -------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether this can be run without waiting for anything."""
        return not self.lock.locked()

    def run(self, deadline: float | None, limit: float | None) -> None:
        """Run it if nobody has; wait for whoever is running it."""
        me = threading.get_ident()
        if self.runner == me:
            raise RuntimeError(
                f"The step {self.label} of a local copy waits for a value that needs this step. "
                "Wait for that value before the step, or pass the handle as an argument."
            )
        if not _acquire(self.lock, deadline):
            raise _timed_out(f"the step {self.label} of a local copy", limit)
        try:
            if not self.finished:
                self.runner = me
                self.execute()
        finally:
            self.runner = 0
            self.lock.release()

    def execute(self) -> None:
        """Call the function; keep what it gives (the lock is held)."""
        function, arguments, keywords = self.function, self.arguments, self.keywords
        assert function is not None
        try:
            failed = _first_failed(arguments, keywords)
            if failed is not None:
                self.finish(None, failed.error, failed.traceback)
                return
            harmless = not self.changes or _changes_nothing(function, arguments)
            arguments = with_values(arguments)
            keywords = with_values(keywords)
            if torch.is_grad_enabled() == self.grad_mode:
                value = function(*arguments, **keywords)
            else:  # recorded under no_grad and run outside of it, or the other way round
                with torch.set_grad_enabled(self.grad_mode):
                    value = function(*arguments, **keywords)
        except Exception as error:
            self.fail(error, spread=not harmless)
        except BaseException as error:
            # It may have done a part of its work, so it must not run again.
            interrupted = RuntimeError(
                f"The step {self.label} of a local copy was interrupted by {type(error).__name__} "
                "and is not run again. Fetch another copy with rref.local_value()."
            )
            self.fail(interrupted, spread=not harmless)
            raise
        else:
            self.finish(value, None, None)

    def fail(self, error: BaseException, *, spread: bool) -> None:
        """End with ``error``, and let what the step may have left half changed end so too."""
        file, line, function = self.place
        source = linecache.getline(file, line).strip()
        _add_note(
            error,
            f"Raised by the step {self.label} on a local copy, recorded in\n"
            f'  File "{file}", line {line}, in {function}' + (f"\n    {source}" if source else ""),
        )
        self.finish(None, error, error.__traceback__)
        todo = list(self.part.wholes) if spread else []
        seen: set[int] = set()
        while todo:
            part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            todo.extend(part.wholes)
            step = part.step()
            if step is not None and step.error is None:
                step.traceback = error.__traceback__
                step.error = error
                step.value = None

    def finish(self, value: Any, error: BaseException | None, traceback: Any) -> None:
        """Keep the result and let go of all that led to it."""
        self.value, self.error, self.traceback = value, error, traceback
        self.finished = True
        self.function, self.arguments, self.keywords = None, (), {}
        self.predecessors = ()

    def result(self) -> Any:
        """The value, or the error raised."""
        value = self.value  # read first: a failing later step sets the error, then this
        if self.error is None:
            return value
        try:
            # Without this the traceback would grow with each wait that raises it.
            raise self.error.with_traceback(self.traceback)
        finally:
            del self


class Fetch(Step):
    """The first step of a copy: the fetch, which others carry out and any number wait for."""

    __slots__ = ("future",)

    def __init__(self, future: Any) -> None:
        super().__init__("local_value()", _not_called, (), {}, (), False)
        self.future = future
        self.order = _Order(self)

    def ready(self) -> bool:
        done = getattr(self.future, "done", None)
        return self.finished or (done is not None and bool(done()))

    def run(self, deadline: float | None, limit: float | None) -> None:
        # No lock: every waiter waits on the future itself, for its own time.
        future = self.future
        if self.finished:
            return
        while True:
            left = 0.0
            timed = deadline is not None and not self.ready()
            if timed:
                assert deadline is not None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _timed_out("the fetch of a local copy", limit)
            try:
                value = future.wait(left) if timed else future.wait()
            except Exception as error:
                if timed and isinstance(error, TimeoutError):
                    if self.ready():
                        continue  # it has ended meanwhile: was this its error, or our time?
                    raise _timed_out("the fetch of a local copy", limit, error) from None
                with self.lock:
                    if not self.finished:
                        self.fail(error, spread=False)
                        self.future = None
                return
            with self.lock:
                if not self.finished:
                    self.finish(value, None, None)
                    self.future = None
            return


def _timed_out(
    what: str, limit: float | None, cause: BaseException | None = None
) -> RpcTimeoutError:
    """The error of a wait whose time passed; another wait may succeed."""
    worker = getattr(cause, "worker", None)
    owner = "" if worker is None else f" from worker {worker!r}"
    assert limit is not None
    return RpcTimeoutError(
        f"Waiting for {what}{owner} timed out after {seconds(limit)}. It goes on: wait again, or "
        "longer.",
        worker=worker,
        function=getattr(cause, "function", None),
        elapsed=limit,
        limit=limit,
        ran="maybe",
    )


def _not_called() -> NoReturn:
    raise AssertionError("a fetch is waited for, not called")


def _acquire(lock: _thread.LockType, deadline: float | None) -> bool:
    """Take the lock before the deadline; False if that passed."""
    if lock.acquire(False):
        return True
    if deadline is None:
        return lock.acquire()
    left = deadline - time.monotonic()
    return left > 0 and lock.acquire(timeout=min(left, threading.TIMEOUT_MAX))


def _recorded(step: Step) -> list[Step]:
    """All recorded on the copy of ``step`` that has not run, in the order written."""
    with _recording:
        last = step.order.root().last
    found = {last.number: last}
    todo = [last]
    while todo:
        step = todo.pop()
        if step.finished:
            del found[step.number]
            continue
        for before in step.predecessors:
            if before.number not in found:
                found[before.number] = before
                todo.append(before)
    return [found[number] for number in sorted(found)]


def _changes_nothing(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Whether a call is known to leave the object that it is made on as it was."""
    if function is not call:
        return False
    method = with_values(arguments[0])
    owner = getattr(method, "__self__", None)
    if isinstance(owner, torch.Tensor):
        name = getattr(method, "__name__", "_")
        return not name.endswith("_") and name != "backward"
    return hasattr(method, "__self__") and isinstance(owner, _IMMUTABLE)


def _caller() -> tuple[str, int, str]:
    """File, line and function of the code that uses a handle: not ours, nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    nearest = frame
    while frame is not None:
        nearest = frame
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("zrpc", "torch"):
            break
        frame = frame.f_back
    assert nearest is not None
    return nearest.f_code.co_filename, nearest.f_lineno, nearest.f_code.co_name


def _add_note(error: BaseException, note: str) -> None:
    """``error.add_note``, which Python 3.10 does not have."""
    try:
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            notes = [*getattr(error, "__notes__", ()), note]
            setattr(error, "__notes__", notes)  # noqa: B010 - typeshed knows it from 3.11 on
    except Exception:  # one that takes no attributes: its own text has to do
        return


# Handles among arguments -------------------------------------------------------------------


class Handle:
    """What stands for the result of a step."""

    __slots__ = ("__weakref__", "_zrpc_step")

    _zrpc_step: Step


def step_of(handle: Handle) -> Step:
    """The step, whatever attributes the handle's class makes up."""
    step: Step = _read_step(handle)
    return step


def become(handle: Handle, step: Step) -> None:
    """Let a new handle stand for the step's result."""
    _write_step(handle, step)


_read_step = Handle.__dict__["_zrpc_step"].__get__
_write_step = Handle.__dict__["_zrpc_step"].__set__


def steps_in(value: Any, found: list[Step], inside: tuple[int, ...] = ()) -> bool:
    """Add the steps of the handles in ``value``; True if there are any."""
    kind = type(value)
    if isinstance(value, Handle):
        found.append(step_of(value))
        return True
    members: Any
    if kind is list or kind is tuple or isinstance(value, tuple):
        members = value
    elif kind is dict:
        members = value.values()
    elif kind is slice:
        members = (value.start, value.stop, value.step)
    else:
        return False
    if id(value) in inside:  # a list that holds itself
        return False
    inside = (*inside, id(value))
    # A list, not any() over a generator: all of them count, not just the first.
    return any([steps_in(member, found, inside) for member in members])


def with_values(value: Any) -> Any:
    """``value`` with each handle replaced; containers without any stay the same objects."""
    kind = type(value)
    if isinstance(value, Handle):
        return step_of(value).value
    if not steps_in(value, []):
        return value
    if kind is dict:
        return {key: with_values(member) for key, member in value.items()}
    if kind is slice:
        return slice(*map(with_values, (value.start, value.stop, value.step)))
    members = [with_values(member) for member in value]
    if kind is list:
        return members
    if hasattr(value, "_make"):
        return value._make(members)
    return kind(members)


def _first_failed(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Step | None:
    """The first of the handles among the arguments whose step has failed."""
    steps: list[Step] = []
    steps_in(arguments, steps)
    steps_in(keywords, steps)
    return next((step for step in steps if step.error is not None), None)


# Recording ---------------------------------------------------------------------------------


def record(
    label: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
    *,
    part_of: tuple[Handle, ...] = (),
    changes: bool = False,
) -> Step:
    """Add a step to the order of each copy among the arguments.

    ``part_of``: the handles whose values the result may be a part of (or share memory with).
    """
    keywords = keywords or {}
    steps: list[Step] = []
    steps_in(arguments, steps)
    steps_in(keywords, steps)
    wholes = tuple(step_of(handle).part for handle in part_of)
    with _recording:
        for whole in wholes:
            whole.prune()
        step = Step(label, function, arguments, keywords, wholes, changes)
        roots = {id(root): root for root in (before.order.root() for before in steps)}
        order, *others = roots.values()
        step.predecessors = tuple(root.last for root in roots.values())
        for other in others:
            other.parent = order
            del other.last
        order.last = step
        step.order = order
    return step


def wait_for(step: Step, timeout: float | None = None) -> Any:
    """Run all that was recorded so far on the copy that ``step`` belongs to; its result.

    Raises as :meth:`zrpc.local_copy.LocalCopy.wait` does.
    """
    deadline = None
    if timeout is not None:
        if math.isnan(timeout) or timeout < 0:
            raise ValueError(f"timeout must be 0 or more seconds, or None, not {timeout!r}.")
        deadline = time.monotonic() + timeout
    for before in _recorded(step):
        before.run(deadline, timeout)
    return step.result()


def is_ready(step: Step) -> bool:
    """Whether :func:`wait_for` would not have to wait for another thread or worker."""
    return all(before.ready() for before in _recorded(step))


def call(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """The call of a handle's value, as a step."""
    return function(*arguments, **keywords)
