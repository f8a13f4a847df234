"""Making calls, and ending them: one half of an agent.  The other is :mod:`zrpc.callee`.

A call is prepared (everything that can go wrong before anything is sent), started (under
the agent's lock: id, wheel, send) and ended exactly once, by whoever takes it out of its
pair's ``waiting``: its reply, its deadline, the loss of its callee, or its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

from broker import messages
from broker.protocol import Flag, Kind, Meta

from . import builtin, callables, codec, errors, probing
from .calls import Call, FutureCall, SyncCall
from .futures import Future
from .options import UNSET_RPC_TIMEOUT, check_timeout
from .pair import Pair, Served, Stage
from .pool import Work, on_pool_thread
from .references import Opened, Packing
from .remote_exceptions import load_exception
from .remote_method import RemoteMethod
from .transfer import Assembly, Outgoing
from .worker_info import Member

if TYPE_CHECKING:
    from .agent import Agent

#: Seconds that an expired call waits for its callee to say how far it had come.
PROBE_WAIT = 0.05

#: What :meth:`Caller._prepare` has made ready.
_Prepared = tuple[Member, str, Packing, codec.Encoded]


class Caller:
    """An agent's calls to others.

    Args:
        agent: whose they are.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._room = Condition(Lock())
        self.pending = 0

    # ------------------------------------------------------------ the three kinds

    def call_sync(
        self,
        to: Any,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float = UNSET_RPC_TIMEOUT,
        label: str | None = None,
    ) -> Any:
        """Call and wait; see :func:`zrpc.rpc_sync`.

        Args:
            label: what error texts call the function; default its own name.
        """
        agent = self._agent
        member, name, packing, encoded = self._prepare(to, function, args, kwargs, timeout, label)
        limit, deadline = agent.deadline_for(timeout)
        call = SyncCall(self.pair(member), name, limit, deadline)
        blocked = agent.pool.blocked() if on_pool_thread() else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(blocked)
            except BaseException:  # BusyError
                packing.abandon()
                raise
            self._start(call, encoded, packing)
            try:
                call.gate.acquire()
            except BaseException as error:  # Ctrl-C
                self.give_up(call, f"its caller was interrupted by {type(error).__name__}")
                raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                del call
        assert call.reply is not None
        return self.open_reply(call.reply)

    def call_async(
        self,
        to: Any,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float = UNSET_RPC_TIMEOUT,
        label: str | None = None,
    ) -> Future[Any]:
        """Call and return a future; see :func:`zrpc.rpc_async`."""
        agent = self._agent
        member, name, packing, encoded = self._prepare(to, function, args, kwargs, timeout, label)
        limit, deadline = agent.deadline_for(timeout)
        future: Future[Any] = agent.new_future()
        future.worker, future.function = member.name, name

        def finish(assembly: Assembly | None, error: BaseException | None) -> None:
            value = None
            if error is None:
                assert assembly is not None
                try:
                    value = self.open_reply(assembly)
                except BaseException as failure:
                    error = failure
            # It may have been cancelled meanwhile: then that is its result.
            with contextlib.suppress(RuntimeError):
                if error is not None:
                    future.fail(error)
                else:
                    future.complete(value)

        call = FutureCall(self.pair(member), name, limit, deadline, finish)
        future.on_cancel = lambda: self.give_up(call, "its caller has cancelled it")
        self._start(call, encoded, packing)
        return future

    def call_remote(
        self,
        member: Member,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
        result: tuple[tuple[int, int], tuple[int, int]],
        finish: Callable[[Any, BaseException | None], Any],
        label: str | None = None,
    ) -> None:
        """A call whose result stays at the callee as the value of RRef ``result[0]``."""
        _, name, packing, encoded = self._prepare(member, function, args, kwargs, timeout, label)
        limit, deadline = self._agent.deadline_for(timeout)
        call = FutureCall(self.pair(member), name, limit, deadline, finish)
        meta = Meta(result=[list(part) for part in result])
        self._start(call, encoded, packing, meta, Flag.REMOTE)

    # ------------------------------------------------------------ before sending

    def _prepare(
        self, to: Any, function: Any, args: Any, kwargs: Any, timeout: float, label: str | None
    ) -> _Prepared:
        agent = self._agent
        agent.check_alive()
        check_timeout(timeout, "timeout")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"kwargs must be a dict of keyword arguments, got {kwargs!r:.100}.")
        if kwargs and not all(isinstance(key, str) for key in kwargs):
            raise TypeError(f"the keys of kwargs must be strings, got {kwargs!r:.100}.")
        if isinstance(function, RemoteMethod):
            # It runs where the RRef lives, or goes on there from `to`.
            label = label or f"method {function.name!r} of {function.rref}"
            args = (function.rref, function.name, tuple(_arguments(args)), dict(kwargs or {}))
            function, kwargs = builtin.call_method, None
        elif not isinstance(function, str) and not callable(function):
            raise TypeError(
                "function should be callable, or the name that it is registered by; "
                f"got {function!r:.200}."
            )
        is_name = isinstance(function, str)
        name = label or (function if is_name else callables.display_name(function))
        member = agent.directory.resolve(to, agent.control_timeout(), name)
        reference = function if is_name else self._describe(function, member)
        packing = Packing(agent)
        try:
            encoded = agent.encode(
                (reference, _arguments(args), dict(kwargs or {})), packing, member
            )
        except codec.EncodeError as error:
            packing.abandon()
            error.args = (f"The call of {name} on worker {member.name!r} was not sent: {error}",)
            raise
        except BaseException:
            packing.abandon()
            raise
        return member, name, packing, encoded

    def _describe(self, function: Any, member: Member) -> Any:
        """What stands for the function on the wire: its name, or itself (to be pickled)."""
        agent = self._agent
        description = callables.describe(function)
        if isinstance(description, callables.FunctionName):
            if description.main and member.session != agent.session:
                digest = callables.script_digest()
                if not digest or digest != member.script:
                    raise errors.UnknownFunctionError(
                        callables.main_refused(function, member.name),
                        worker=member.name,
                        function=callables.display_name(function),
                        ran="no",
                    )
            return description.text
        if not agent.options.allow_pickle:
            raise codec.PickleRefusedError(
                f"The function {callables.display_name(function)} is no importable function, so "
                "it would have to travel pickled, which allow_pickle=False forbids. Move it to a "
                "module that both sides import, or register it on the callee (register_function)."
            )
        return function

    def pair(self, member: Member) -> Pair:
        """The pair with that member."""
        agent = self._agent
        pair = agent.channel.pairs.get(member.session)
        if pair is None or pair.member is None:
            with agent.lock:
                pair = agent.channel.pair(member.session)
                reason = agent.directory.ended(member.session)
                if reason is not None:
                    # It was lost between our look-up and now: nobody will say so again.
                    pair.lost = reason
            agent.callee.met(pair, member)
        return pair

    # ------------------------------------------------------------ sending

    def _start(
        self,
        call: Call,
        encoded: codec.Encoded,
        packing: Packing,
        meta: Meta | None = None,
        flags: int = 0,
    ) -> None:
        agent, pair = self._agent, call.pair
        try:
            self._wait_for_room()
        except BaseException:
            packing.abandon()
            raise
        if packing.references:
            meta = meta or Meta()
            meta.references = packing.references
        local = pair.session == agent.session
        call.outgoing = outgoing = Outgoing(
            Kind.REQUEST,
            0,
            encoded.body,
            () if local else encoded.buffers,
            flags=flags,
            meta=meta,
            deadline=call.deadline,
        )
        packing.post()
        failure: BaseException | None = None
        with agent.lock:
            if pair.lost is not None or agent.ended is not None:
                failure = agent.ended or call.lost_error(pair.lost or "")
            else:
                call.number = outgoing.call = pair.start_call(call)
                self.pending += 1
                packing.sent(call.key)
                if call.deadline is not None:
                    agent.wheel.add(call.key, call.deadline)
                if local:
                    outgoing.started = True
                else:
                    agent.channel.send(pair, outgoing)
        agent.count("calls")
        if failure is not None:
            packing.abandon()
            if agent.ended is not None:
                agent.check_alive()
            self._deliver(call.failed(failure))
            return
        if local:
            self._call_self(call, encoded, meta, flags)
        if call.deadline is not None:
            agent.service.wake(call.deadline)

    def _wait_for_room(self) -> None:
        agent = self._agent
        if self.pending < agent.options.max_pending or agent.service.is_current():
            return
        with agent.pool.blocked(), self._room:
            while self.pending >= agent.options.max_pending and agent.ended is None:
                self._room.wait(1.0)

    def _call_self(self, call: Call, encoded: codec.Encoded, meta: Meta | None, flags: int) -> None:
        """A call of this very worker: the same way without the sockets; arguments are copied."""
        agent, pair = self._agent, call.pair
        with agent.lock:
            served = pair.served[call.number] = Served()
        served.stage = Stage.QUEUED
        agent.callee.run_local(
            pair,
            served,
            call.number,
            flags,
            call.deadline,
            encoded.body,
            [bytearray(buffer) for buffer in encoded.buffers],
            Opened(agent, meta.references if meta else None),
            meta.result if meta else None,
        )

    # ------------------------------------------------------------ the reply

    def reply_complete(self, pair: Pair, call: Any, assembly: Assembly) -> Work | None:
        """A reply is whole, and its call taken out of ``waiting``."""
        agent = self._agent
        with agent.lock:
            self._forget(call)
        self._after_end()
        agent.references.message_ended(call.key, True)
        if call.expired:
            agent.count("timeouts")
            rest = call.failed(call.timeout_error(Stage.DONE + 1))
        else:
            rest = call.replied(assembly)
        return Work(rest, False) if rest is not None else None

    def open_reply(self, assembly: Assembly) -> Any:
        """Return the value in a reply, or raise the error in it."""
        agent = self._agent
        opened: Opened | None = assembly.opened
        try:
            body, buffers = assembly.content()
            value = agent.decode(body, buffers, opened)
        finally:
            if opened is not None:
                opened.close()
        if assembly.flags & Flag.ERROR:
            agent.count("errors_received")
            raise load_exception(value, allow_pickle=agent.options.allow_pickle)
        return value

    # ------------------------------------------------------------ other ends

    def give_up(self, call: Call, reason: str) -> BaseException | None:
        """Its caller no longer wants it; tells the callee.

        Returns the call's error, or None if it had ended already.
        """
        agent = self._agent
        with agent.lock:
            if call.pair.end_call(call.number) is None:
                return None
            self._forget(call)
            agent.channel.note_ended(call.pair, 1)
            error = errors.call_cancelled(call.callee, call.function, ran=call.ran)
            call.stop_sending()
        self._after_end()
        self._cancel_at_callee(call, reason)
        if not isinstance(call, SyncCall):
            self._deliver(call.failed(error))
        return error

    def fail_all(self, pair: Pair, build: Callable[[Call], BaseException]) -> None:
        """End all calls to one peer."""
        agent = self._agent
        with agent.lock:
            calls = list(pair.waiting.values())
            pair.waiting.clear()
            for call in calls:
                self._forget(call)
        self._after_end()
        for call in calls:
            agent.count("lost")
            self._deliver(call.failed(build(call)))

    def expire(self, now: float) -> None:
        """Service thread: end the calls whose deadline has passed.

        First the callee is asked how far the call has come, for the error's text; the
        answer, or a twentieth of a second without one, ends it.
        """
        agent = self._agent
        with agent.lock:
            keys: list[Any] = agent.wheel.advance(now)
        for session, number in keys:
            pair = agent.channel.pairs.get(session)
            call = pair.waiting.get(number) if pair is not None else None
            if pair is None or call is None:
                continue
            if not call.expired:
                call.expired = True
                if self._ask_stage(pair, call, now):
                    continue
            self._expired(pair, call, -1)

    def _ask_stage(self, pair: Pair, call: Call, now: float) -> bool:
        agent = self._agent
        if call.outgoing is None or not call.outgoing.started:
            return False
        if pair.session == agent.session:
            served = pair.served.get(call.number)
            self._expired(pair, call, served.stage + 1 if served is not None else 0)
            return True
        with agent.lock:
            agent.wheel.add(call.key, now + PROBE_WAIT)
            agent.channel.send_bare(pair, Kind.PROBE, probing.question(call.number))
        return True

    def stage_told(self, pair: Pair, number: int, stage: int) -> None:
        """The callee's answer to our probe."""
        call = pair.waiting.get(number)
        if call is not None and call.expired:
            self._expired(pair, call, stage)

    def _expired(self, pair: Pair, call: Call, stage: int) -> None:
        agent = self._agent
        with agent.lock:
            error = call.timeout_error(stage)
            if pair.end_call(call.number) is None:
                return
            self._forget(call)
            agent.channel.note_ended(pair, 1)
            call.stop_sending()
        self._after_end()
        agent.count("timeouts")
        self._cancel_at_callee(call, "its deadline has passed")
        self._deliver(call.failed(error))

    def _cancel_at_callee(self, call: Call, reason: str) -> None:
        agent, outgoing = self._agent, call.outgoing
        if outgoing is None:
            return
        if call.pair.session == agent.session:
            agent.callee.cancelled(call.pair, call.number)
            agent.references.message_lost_sight_of(call.key)
        elif outgoing.started:
            agent.service.post(messages.Cancel(call.pair.session, call.number, reason))
            agent.references.message_lost_sight_of(call.key)
        else:
            # It never left, and will not: what it carried is given back.
            agent.references.message_ended(call.key, False)

    def _forget(self, call: Call) -> None:
        """Lock held: it is out of ``waiting``; out of the wheel with it."""
        if call.deadline is not None:
            self._agent.wheel.cancel(call.key)
        self.pending -= 1

    def _after_end(self) -> None:
        if self.pending == self._agent.options.max_pending - 1 or self.pending == 0:
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Let those that wait for room look again."""
        with self._room:
            self._room.notify_all()

    def _deliver(self, rest: Callable[[], None] | None) -> None:
        if rest is not None:
            self._agent.pool.submit(rest)


def _arguments(args: Any) -> Any:
    """What people write for ``args``: a tuple, a list, nothing, or one thing by itself."""
    if args is None:
        return ()
    if isinstance(args, (tuple, list)):
        return args
    return (args,)
