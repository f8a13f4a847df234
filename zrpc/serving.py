"""Running a call that has arrived: decode, find the function, run it, send what comes out.

A :class:`Handler` is one such call.  It runs on a pool thread, with the context
variables of :mod:`zrpc.context` set.  Whatever goes wrong in it goes to the caller:
arguments that cannot be decoded, a function that is not there, an exception, a result
that cannot be sent.  Only work whose deadline has passed is dropped without a word,
since nobody waits for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from broker.protocol import Flag

from . import callables, errors
from .builtin import REGISTRATION_WAIT, Deferred
from .codec import DecodeError, EncodeError
from .context import CallInfo, handler_agent, handler_call
from .exception_text import traceback_text
from .pair import Pair, Served, Stage
from .registry import Entry, public_methods

if TYPE_CHECKING:
    from .agent import Agent
    from .references import Opened
    from .transfer import Buffer

logger = logging.getLogger(__name__)


class Handler:
    """One call of a peer, from its arrival to its reply."""

    __slots__ = (
        "agent",
        "body",
        "buffers",
        "deadline",
        "flags",
        "function",
        "number",
        "opened",
        "pair",
        "result",
        "served",
    )

    def __init__(
        self,
        agent: Agent,
        pair: Pair,
        served: Served,
        number: int,
        flags: int,
        deadline: float | None,
        body: Buffer,
        buffers: list[Buffer],
        opened: Opened,
        result: list[Any] | None,
    ) -> None:
        self.agent = agent
        self.pair = pair
        self.served = served
        self.number = number
        self.flags = flags
        self.deadline = deadline
        self.body: Buffer | None = body
        self.buffers: list[Buffer] = buffers
        self.opened: Opened | None = opened
        self.result = result
        self.function = "?"

    # ------------------------------------------------------------ the whole way

    def run(self) -> None:
        """Do it all, on a pool thread."""
        if self._unwanted():
            return
        agent = self.agent
        if agent.draining:
            self.refuse(errors.leaving(agent.name))
            return
        self.served.stage = Stage.RUNNING
        try:
            assert self.body is not None
            request = agent.decode(self.body, self.buffers, self.opened)
            self.body, self.buffers = None, []
            function, args, kwargs = _check_request(request)
        except BaseException as error:
            self._fail(error, ran="no")
            return
        finally:
            if self.opened is not None:
                self.opened.close()
                self.opened = None
        self._find(function, args, kwargs)

    def _unwanted(self) -> bool:
        if self.served.cancelled or (
            self.deadline is not None and time.monotonic() >= self.deadline
        ):
            self.served.stage = Stage.DONE
            self.agent.count("expired")
            if self.result is not None:
                self.agent.references.creation_failed(
                    self.result[0],
                    errors.RpcTimeoutError(
                        "RRef creation via rpc.remote() timed out before it ran.", ran="no"
                    ),
                )
            if self.opened is not None:
                self.opened.close()
            return True
        return False

    def _find(self, function: Any, args: Any, kwargs: Any) -> None:
        if isinstance(function, str) and ":" not in function:
            self.function = function
            self.served.stage = Stage.QUEUED
            self._find_registered(function, args, kwargs)
            return
        try:
            if isinstance(function, str):
                self.function = function
                function = callables.resolve(function, worker=self.agent.name)
            else:
                self.function = callables.display_name(function)
            if not callable(function):
                raise TypeError(
                    f"{self.function} is {type(function).__name__}, which is not callable."
                )
        except BaseException as error:
            self._fail(error, ran="no")
            return
        self._call(function, args, kwargs)

    def _find_registered(self, name: str, args: Any, kwargs: Any) -> None:
        """Run a registered name, at once or when it is registered."""
        registry = self.agent.registry
        entry = registry.find(name)
        if entry is not None:
            self._call_entry(entry, args, kwargs)
            return
        now = time.monotonic()
        limit = now + REGISTRATION_WAIT
        if self.deadline is not None:
            # A little early: an answer that lists the names there are beats a bare time-out.
            limit = min(limit, now + (self.deadline - now) * 0.9)
        done: list[bool] = []

        def registered(entry: Entry) -> None:
            if not done:
                done.append(True)
                self.agent.pool.submit(lambda: self._call_entry(entry, args, kwargs), counted=True)

        waiter = registry.when_registered(name, registered)

        def give_up() -> None:
            if not done:
                done.append(True)
                waiter.cancel()
                error = errors.UnknownFunctionError(
                    registry.unknown_name_text(name)
                    + f" (waited {time.monotonic() - now:.1f} s for it on worker {self.agent.name!r}).",
                    worker=self.agent.name,
                    function=name,
                    ran="no",
                )
                self.agent.pool.submit(lambda: self._fail(error, ran="no"))

        self.agent.service.call_at(limit, give_up)

    def _call_entry(self, entry: Entry, args: Any, kwargs: Any) -> None:
        value = entry.value
        if self.flags & Flag.REMOTE and entry.kind != "function" and not args and not kwargs:
            # remote("server", "name"): an RRef to that very object.
            methods = public_methods(value)
            self.agent.references.creation_done(self.result, value, methods)
            self._reply_value(methods)
            return
        if not callable(value):
            self._fail(
                TypeError(
                    f"{entry.name!r} on worker {self.agent.name!r} is an object of type "
                    f"{type(value).__name__}, which cannot be called; get an RRef to it with "
                    f"remote({self.agent.name!r}, {entry.name!r})."
                ),
                ran="no",
            )
            return
        self._call(value, args, kwargs)

    # ------------------------------------------------------------ running

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        agent = self.agent
        if self._unwanted():
            return
        self.served.stage = Stage.RUNNING
        member = self.pair.member
        info = CallInfo(member.info, self.function, self.deadline, self.number, self.served)
        agent_token = handler_agent.set(agent)
        call_token = handler_call.set(info)
        try:
            try:
                value = function(*args, **kwargs)
            except TypeError as error:
                _explain_arguments(error, function, args)
                raise
            finally:
                # The context as the handler left it: callbacks that it chained see it too.
                context = contextvars.copy_context()
            asynchronous = getattr(function, "_zrpc_async_execution", False) or hasattr(
                function, "_wrapped_async_rpc_function"
            )
        except BaseException as error:
            self._fail(error)
            return
        finally:
            handler_call.reset(call_token)
            handler_agent.reset(agent_token)
        if isinstance(value, Deferred):
            self._wait_for(value.future, context)
        elif asynchronous:
            self._wait_for(value, context)
        else:
            self._finish(value)

    def _wait_for(self, future: Any, context: contextvars.Context) -> None:
        if not isinstance(future, torch._C.Future):
            self._fail(
                RuntimeError(
                    "Functions decorated with @rpc.async_function must return a "
                    f"torch.futures.Future object, but got {_type_name(future)}"
                )
            )
            return
        agent = self.agent
        agent.callee.async_started(self)
        self.served.on_cancel = lambda: agent.callee.async_ended(self)
        if self.served.cancelled:  # in the meantime
            agent.callee.async_ended(self)

        def completed(done: Any) -> None:
            agent.callee.async_ended(self)
            try:
                value = done.value()
            except BaseException as error:
                self._fail(error)
                return
            self._finish(value)

        future.add_done_callback(
            lambda done: agent.pool.submit(lambda: context.run(completed, done))
        )

    # ------------------------------------------------------------ the end

    def _finish(self, value: Any) -> None:
        if self.flags & Flag.REMOTE:
            self.agent.references.creation_done(self.result, value, None)
            value = None
        self._reply_value(value)

    def _reply_value(self, value: Any) -> None:
        try:
            self.agent.callee.reply(self.pair, self.served, self.number, value, 0)
        except BaseException as error:
            if isinstance(error, EncodeError):
                error = EncodeError(
                    f"The result of {self.function} on worker {self.agent.name!r} could not be sent "
                    f"(cannot pickle or encode it): {error}"
                )
            self._fail(error)

    def refuse(self, error: BaseException) -> None:
        if self.opened is not None:
            self.opened.close()
            self.opened = None
        self._fail(error, ran="no")

    def _fail(self, error: BaseException, ran: errors.Ran = "yes") -> None:
        agent = self.agent
        agent.count("errors")
        if self.result is not None:
            agent.references.creation_failed(self.result[0], error)
        if isinstance(error, DecodeError):
            logger.warning(
                "the arguments of a call from worker %r could not be read: %s",
                self.pair.member.name if self.pair.member is not None else "?",
                error,
            )
        try:
            agent.callee.reply_error(self.pair, self.served, self.number, error, self.function, ran)
        finally:
            # After the reply: whatever becomes of the printing, the caller has its answer.
            if isinstance(error, Exception) and ran == "yes":
                _print_error(f"On {agent.info}:\n{traceback_text(error, ('zrpc',))}")


def _print_error(text: str) -> None:
    """On stderr, as torch does; what its encoding lacks is escaped, and a closed one is no harm."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(
            text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr, flush=True
        )


def _check_request(request: Any) -> tuple[Any, Any, Any]:
    if not isinstance(request, (list, tuple)) or len(request) != 3:
        raise DecodeError("a request that is not [function, args, kwargs]")
    function, args, kwargs = request
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        raise DecodeError("a request whose arguments are no list and no map")
    return function, args, kwargs


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _explain_arguments(error: TypeError, function: Any, args: Any) -> None:
    """A TypeError of the call itself: show the other spelling of a list of arguments."""
    trace = error.__traceback__
    if trace is None or trace.tb_next is not None or not isinstance(args, list):
        return
    if hasattr(error, "add_note"):
        name = callables.display_name(function)
        error.add_note(
            f"args was a list, which is a list of {len(args)} arguments. To pass the list itself as "
            f"the one argument of {name}, write args=(the_list,)."
        )
