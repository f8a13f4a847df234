"""The errors that zrpc itself raises, and the one place where their sentences are written.

Every error is an :class:`RpcError`, and so a ``RuntimeError``: what torch RPC raises for
nearly everything.  Where Python has a word of its own for the trouble, the type is that as
well, so that a general handler (``except TimeoutError``, ``except ConnectionError``) works.

The fields say what a program wants to know; the text says the same to a person.  ``ran``
is the one to read before a call is made again: "no" means that none of the function's code
has run or ever will, so that making the call again is safe.

The functions at the end (:func:`call_timed_out`, :func:`worker_lost`, ...) build errors
with their text.  They return the error; the caller raises it or gives it to a future.

``TimeoutError`` and ``ConnectionError`` are ``OSError``, whose constructor reads two
arguments as errno and message.  That is why the constructors here take one positional
argument and everything else by keyword, and why errors are rebuilt without calling
``__init__`` (:func:`rebuild`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "AuthenticationError",
    "BrokerLostError",
    "BusyError",
    "CallCancelledError",
    "CallState",
    "NotInitializedError",
    "OwnerDiedError",
    "Ran",
    "RemoteError",
    "RemoteOrigin",
    "RpcError",
    "RpcTimeoutError",
    "UnknownFunctionError",
    "UnknownWorkerError",
    "WorkerLostError",
    "authentication_failed",
    "broker_lost",
    "busy",
    "call_cancelled",
    "call_timed_out",
    "not_initialized",
    "owner_died",
    "seconds",
    "unknown_worker",
    "wait_timed_out",
    "worker_lost",
]

#: Whether the function ran: not at all, perhaps (in part), or for certain (it raised).
Ran = Literal["no", "maybe", "yes"]

#: What is known of a call that has not ended: still here and waiting for the destination's
#: credit, for the worker itself, or for nothing; sent and no more is known; arriving,
#: queued or running at the callee; ended there, with its reply on the way.
CallState = Literal[
    "unsent", "no credit", "no worker", "sent", "receiving", "queued", "running", "done"
]

#: States in which no message of the call has left this process.
_NOT_SENT: frozenset[str] = frozenset({"unsent", "no credit", "no worker"})

#: Most names that a text lists.
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class RemoteOrigin:
    """Where an exception that came from another worker was raised.

    Attributes:
        worker: name of the worker on which it was raised.
        function: the function that raised it, by its display name.
        traceback: the traceback there, as text; empty where there is none.
        route: ``(worker, function)`` of the workers that it passed on its way here.
        ran: whether the function ran.
        shown: whether ``str`` of the exception ends with all this.  False for the causes
            and members of another, whose traceback already includes theirs.
    """

    worker: str
    function: str
    traceback: str = ""
    route: tuple[tuple[str, str], ...] = ()
    ran: Ran = "yes"
    shown: bool = True

    def explain(self, text: str) -> str:
        """``text``, followed by where it comes from (if ``shown``)."""
        if not self.shown:
            return text
        lines = [text, "", f"On worker {self.worker!r} (function {self.function})"]
        if self.traceback:
            lines[-1] += ", remote traceback:"
            lines.append(self.traceback.rstrip("\n"))
        lines.extend(f"via worker {worker!r} (function {name})" for worker, name in self.route)
        return "\n".join(lines)


class RpcError(RuntimeError):
    """The base of every error that zrpc raises.

    Args:
        text: what happened, to whom, and what to do.
        worker: name of the worker that it is about; where ``remote`` is true, the worker
            on which it was raised.
        function: display name of the function that was called.
        elapsed: how long the call had been pending, in seconds.
        limit: the timeout that was in force, in seconds.
        ran: "no" if none of the function's code has run or will, "maybe" if that is not
            known, "yes" if it ran and this is what it raised, None where no call is meant.
        remote: whether it was raised on another worker and travelled here.

    A few more attributes are set on one that has travelled: ``peer`` (the worker that it
    was about where it was raised: a callee that lost *its* callee), ``remote_traceback``
    (text) and ``route`` (the workers that it passed).

    Errors can be pickled and copied; fields and notes are kept.

    Example:
        >>> error = RpcError("no luck", worker="w1", ran="no")
        >>> (str(error), error.worker, error.ran, error.remote)
        ('no luck', 'w1', 'no', False)
    """

    worker: str | None = None
    function: str | None = None
    elapsed: float | None = None
    limit: float | None = None
    ran: Ran | None = None
    remote: bool = False
    _zrpc_origin: RemoteOrigin | None = None
    _zrpc_peer: str | None = None

    def __init__(
        self,
        text: str = "",
        *,
        worker: str | None = None,
        function: str | None = None,
        elapsed: float | None = None,
        limit: float | None = None,
        ran: Ran | None = None,
        remote: bool = False,
    ) -> None:
        RuntimeError.__init__(self, text)
        self.worker = worker
        self.function = function
        self.elapsed = elapsed
        self.limit = limit
        self.ran = ran
        self.remote = remote

    @property
    def peer(self) -> str | None:
        """The worker that it was about where it was raised."""
        return self._zrpc_peer if self._zrpc_origin is not None else self.worker

    @property
    def remote_traceback(self) -> str:
        """The traceback on the other worker, as text; empty where there is none."""
        return self._zrpc_origin.traceback if self._zrpc_origin is not None else ""

    @property
    def route(self) -> tuple[tuple[str, str], ...]:
        """``(worker, function)`` of the workers that it passed on its way here."""
        return self._zrpc_origin.route if self._zrpc_origin is not None else ()

    def plain_text(self) -> str:
        """The text alone, without a remote traceback."""
        # BaseException's, not super()'s: OSError is among the bases and has its own format.
        return BaseException.__str__(self)

    def __str__(self) -> str:
        text = self.plain_text()
        return text if self._zrpc_origin is None else self._zrpc_origin.explain(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return (rebuild, (type(self), self.args, self.__dict__.copy()))

    def arrived(self, origin: RemoteOrigin) -> None:
        """Note that this error was raised at ``origin`` and came here in a reply."""
        if self._zrpc_origin is None:
            self._zrpc_peer = self.worker
        self._zrpc_origin = origin
        self.remote = True
        self.worker = origin.worker
        self.function = origin.function
        self.ran = origin.ran


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made at run time, not in C


def native_base(cls: type) -> Any:
    """The built-in type whose instances those of ``cls`` are in memory."""
    while cls.__flags__ & _HEAP_TYPE and cls.__base__ is not None:
        cls = cls.__base__
    return cls


def rebuild(cls: type[RpcError], args: tuple[Any, ...], state: Mapping[str, Any]) -> RpcError:
    """Make an error again from what its ``__reduce__`` said, without calling ``__init__``."""
    # Not cls.__new__: that is RuntimeError's, which refuses to make an OSError.
    error: RpcError = native_base(cls).__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class RpcTimeoutError(RpcError, TimeoutError):
    """A call, or a wait for one, took longer than its timeout."""


class WorkerLostError(RpcError, ConnectionError):
    """The worker died, left, or was not heard of for too long."""


class OwnerDiedError(WorkerLostError):
    """The worker that owned the value behind an RRef was lost, and the value with it."""


class UnknownWorkerError(RpcError):
    """There is no worker of this name or rank."""


class BrokerLostError(RpcError, ConnectionError):
    """The broker was not reachable for the whole of the reconnect window."""


class BusyError(RpcError):
    """The callee, or the queue towards it, is full, and the call was not taken."""


class AuthenticationError(RpcError, ConnectionError):
    """The broker refused this process: a wrong key or token, or none."""


class NotInitializedError(RpcError):
    """A call was made before ``init_rpc`` or after ``shutdown``."""


class CallCancelledError(RpcError):
    """The call was cancelled by its caller."""


class UnknownFunctionError(RpcError, AttributeError):
    """The callee has no function of this name.

    An ``AttributeError`` too, which is what ``rpc.remote(...).to_here()`` of torch raises.
    """


class RemoteError(RpcError):
    """An exception of another worker whose type is not raised here.

    That is so for types which cannot be found or rebuilt at the caller, for those outside
    ``Exception`` (``SystemExit``, ``KeyboardInterrupt``), and for ``StopIteration``, which
    would silently end a loop of the caller.

    Attributes:
        type_name: the type there, as "module:qualname".
        original_text: ``str`` of the exception there.
        original_args: its arguments; those that could not travel are their ``repr``.
    """

    type_name: str = ""
    original_text: str = ""
    original_args: tuple[Any, ...] = ()


# Sentences ---------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A duration as people read it.

    Example:
        >>> [seconds(0.5), seconds(0.0123), seconds(61), seconds(3600)]
        ['0.5 s', '12 ms', '61 s', '3600 s']
    """
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    return f"{round(value, 2):g} s" if value < 1000 else f"{value:.0f} s"


def _milliseconds(value: float) -> str:
    """A timeout as torch prints it: whole milliseconds, unless it is under one."""
    count = value * 1000
    return f"{round(count)} ms" if count >= 1 else f"{count:g} ms"


def _who(worker: str, host: str | None, process: int | None) -> str:
    """The worker, and where it runs as far as that is known."""
    parts = []
    if process is not None:
        parts.append(f"process {process}")
    if host:
        parts.append(f"on host {host}" if parts else f"host {host}")
    return f"worker {worker!r}" + (f" ({' '.join(parts)})" if parts else "")


def _list_names(names: Iterable[str]) -> str:
    """At most ten names, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:_NAMES_SHOWN])
    more = len(ordered) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint at the name that was meant, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f" Did you mean {near[0]!r}?" if near else ""


_RAN_SENTENCE: dict[str, str] = {
    "no": "The call has not run, so it may be made again.",
    "maybe": "The call may have run.",
    "yes": "The call has run.",
}


def call_timed_out(
    worker: str,
    function: str,
    limit: float,
    elapsed: float,
    state: CallState | None = None,
    *,
    host: str | None = None,
    process: int | None = None,
    ran: Ran | None = None,
) -> RpcTimeoutError:
    """The error of a call whose deadline passed.

    Args:
        worker: name of the callee.
        function: display name of the function.
        limit: the timeout, in seconds.
        elapsed: how long the call was pending, in seconds.
        state: what is known of the call; None if nothing is.
        host: host name of the callee, if known.
        process: process id of the callee, if known.
        ran: overrides what follows from ``state``: "no" where nothing was sent, else "maybe".

    Example:
        >>> print(call_timed_out("w1", "time:sleep", 0.5, 0.51, "running"))
        RPC ran for more than set timeout (500 ms): time:sleep on worker 'w1' timed out \
after 0.51 s. It was still running there and has been told to stop. Give the call a longer \
timeout, or none with timeout=0.
    """
    where = _who(worker, host, process)
    longer = "Give the call a longer timeout, or none with timeout=0."
    known = {
        "unsent": f"It had not been sent yet. {longer}",
        "no credit": (
            "It had not been sent yet: as much as may be in flight to that worker was waiting "
            "there already. Send it less at a time, or give the call a longer timeout."
        ),
        "no worker": (
            "It had not been sent yet: the worker's connection was down and had not come "
            "back. See that the worker runs (`zrpc status`), or give the call a longer timeout."
        ),
        "sent": (
            "It had been sent; whether it was queued or running there is not known. "
            f"See whether the worker answers (`zrpc status`). {longer}"
        ),
        "receiving": f"Its arguments were still on their way there. {longer}",
        "queued": (
            "It was queued there behind other calls and will not be run. "
            "Give that worker more threads (num_worker_threads), or the call a longer timeout."
        ),
        "running": f"It was still running there and has been told to stop. {longer}",
        "done": f"It had ended there, and its result was on the way back. {longer}",
    }.get(state or "", f"Whether it was queued or running there is not known. {longer}")
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({_milliseconds(limit)}): {function} on {where} "
        f"timed out after {seconds(elapsed)}. {known}",
        worker=worker,
        function=function,
        elapsed=elapsed,
        limit=limit,
        ran=ran or ("no" if state in _NOT_SENT else "maybe"),
    )


def wait_timed_out(
    limit: float, *, worker: str | None = None, function: str | None = None
) -> RpcTimeoutError:
    """The error of ``future.wait(timeout)`` whose time passed; the call itself goes on.

    Args:
        limit: the timeout of the wait, in seconds.
        worker: name of the callee, if the future is that of a call.
        function: display name of the function.
    """
    what = "the future" if function is None else function
    where = "" if worker is None else f" on worker {worker!r}"
    return RpcTimeoutError(
        f"Waiting for {what}{where} timed out after {seconds(limit)}. "
        "The call goes on and may be waited for again; cancel() ends it.",
        worker=worker,
        function=function,
        elapsed=limit,
        limit=limit,
        ran="maybe",
    )


def worker_lost(
    worker: str,
    function: str | None = None,
    reason: str = "",
    ran: Ran | None = None,
    *,
    host: str | None = None,
    process: int | None = None,
    elapsed: float | None = None,
) -> WorkerLostError:
    """The error of a call whose callee was lost.

    Args:
        worker: name of the lost worker.
        function: display name of the function that was called, if it is about a call.
        reason: how it is known, as a half sentence ("it died", "no sign of life for 20 s").
        ran: "no" if the call was never delivered, "maybe" if it was or that is unknown.
        host: host name of the lost worker, if known.
        process: its process id, if known.
        elapsed: how long the call was pending, in seconds.

    Example:
        >>> print(worker_lost("w1", "train:step", "it died", "maybe", host="h", process=7))
        Worker 'w1' (process 7 on host h) was lost during train:step: it died. The call may \
have run. Start the worker again under its name to go on; `zrpc status` shows who is there.
    """
    text = _who(worker, host, process)
    during = f" during {function}" if function else ""
    after = f" after {seconds(elapsed)}" if function and elapsed is not None else ""
    sentences = [
        f"{text[0].upper()}{text[1:]} was lost{during}{after}{': ' if reason else ''}{reason}."
    ]
    if ran is not None:
        sentences.append(_RAN_SENTENCE[ran])
    sentences.append(
        "Start the worker again under its name to go on; `zrpc status` shows who is there."
    )
    return WorkerLostError(
        " ".join(sentences), worker=worker, function=function, elapsed=elapsed, ran=ran
    )


def owner_died(
    worker: str, what: str = "the RRef", reason: str = "", *, function: str | None = None
) -> OwnerDiedError:
    """The error of using an RRef whose owner was lost.

    Args:
        worker: name of the lost owner.
        what: which RRef, for example its ``str``.
        reason: how the loss is known, as a half sentence.
        function: display name of the function that made the value, if known.
    """
    return OwnerDiedError(
        f"The owner of {what}, worker {worker!r}, was lost{': ' if reason else ''}{reason}. "
        "Its value is gone; make it anew on a worker that lives.",
        worker=worker,
        function=function,
        ran=None,
    )


def unknown_worker(
    name: str | int, known_names: Iterable[str] = (), *, function: str | None = None
) -> UnknownWorkerError:
    """The error of a call to a worker that is not there.

    Args:
        name: the name or rank that was asked for.
        known_names: names of the workers that are there.
        function: display name of the function that was called.

    Example:
        >>> print(unknown_worker("trainer3", ["ps", "trainer1"]))
        RPC could not find destination name 'trainer3'. Did you mean \
'trainer1'? Workers there are: 'ps', 'trainer1'.
    """
    names = list(known_names)
    kind = "name" if isinstance(name, str) else "rank"
    there = f"Workers there are: {_list_names(names)}." if names else "No other worker is there."
    hint = _did_you_mean(name, names) if isinstance(name, str) else ""
    return UnknownWorkerError(
        f"RPC could not find destination {kind} {name!r}.{hint} {there}",
        worker=str(name),
        function=function,
        ran="no",
    )


def busy(worker: str | None, function: str | None, reason: str, *, ran: Ran = "no") -> BusyError:
    """The error of a call that was not taken because something is full.

    Args:
        worker: name of the worker that is busy, None if it is this one.
        function: display name of the function that was called.
        reason: what is full, as a sentence without a full stop.
        ran: "no", unless it is not known whether an earlier attempt ran.
    """
    whom = "This worker" if worker is None else f"Worker {worker!r}"
    what = "a call" if function is None else function
    return BusyError(
        f"{whom} is too busy to take {what}: {reason}. {_RAN_SENTENCE[ran]} "
        "Make fewer calls at a time, or try later.",
        worker=worker,
        function=function,
        ran=ran,
    )


def leaving(worker: str) -> BusyError:
    """The error of a call to a worker that is draining."""
    return BusyError(
        f"Worker {worker!r} is leaving and takes no new calls. {_RAN_SENTENCE['no']} "
        "Call another worker, or this one again when it has been started anew.",
        worker=worker,
        ran="no",
    )


def broker_lost(
    address: str,
    window: float,
    *,
    worker: str | None = None,
    function: str | None = None,
    elapsed: float | None = None,
    ran: Ran | None = None,
) -> BrokerLostError:
    """The error of everything that waits when the broker does not come back.

    Args:
        address: the broker's address.
        window: how long it was tried to reach it, in seconds.
        worker: name of the callee, if it is about a call.
        function: display name of the function that was called.
        elapsed: how long the call was pending, in seconds.
        ran: whether the call ran, as far as is known.
    """
    call = f" The call of {function} on worker {worker!r} was given up." if function else ""
    sentence = f" {_RAN_SENTENCE[ran]}" if ran is not None else ""
    return BrokerLostError(
        f"The broker at {address} could not be reached for {seconds(window)}.{call}{sentence} "
        "Start it again (`zrpc broker`), then call init_rpc again.",
        worker=worker,
        function=function,
        elapsed=elapsed,
        limit=window,
        ran=ran,
    )


def authentication_failed(address: str, reason: str) -> AuthenticationError:
    """The error of a process that the broker does not let in.

    Args:
        address: the broker's address.
        reason: why, with what to do about it, as a sentence without a full stop.
    """
    return AuthenticationError(f"The broker at {address} refused this process: {reason}.")


def not_initialized(detail: str = "") -> NotInitializedError:
    """The error of a call before ``init_rpc`` or after ``shutdown``.

    Args:
        detail: a further sentence, for example that RPC was shut down.
    """
    text = "RPC has not been initialized. Call zrpc.init_rpc first."
    return NotInitializedError(f"{text} {detail}" if detail else text, ran="no")


def call_cancelled(
    worker: str | None = None, function: str | None = None, *, ran: Ran = "maybe"
) -> CallCancelledError:
    """The error of a call that its caller cancelled.

    Args:
        worker: name of the callee.
        function: display name of the function.
        ran: "no" if it had not been sent, else "maybe".
    """
    what = "The call" if function is None else f"The call of {function}"
    where = "" if worker is None else f" on worker {worker!r}"
    return CallCancelledError(
        f"{what}{where} was cancelled by its caller. {_RAN_SENTENCE[ran]}",
        worker=worker,
        function=function,
        ran=ran,
    )
