"""The agent: one member of a job in this process, with its sockets, threads, calls and RRefs.

An agent is an object; several live in one process.  What it does is spread over

* :mod:`zrpc.channel`    the data sockets and the pairs behind them,
* :mod:`zrpc.service`    the control socket, timers, finalisers (one thread),
* :mod:`zrpc.pool`       handlers and the reader's seat,
* :mod:`zrpc.serving`    running what others call,
* :mod:`zrpc.references` RRefs,
* :mod:`zrpc.joining`    becoming a member, and leaving.

This module is what ties them: making calls, and ending them.

One lock, ``agent.lock``, guards pairs, wheel and ledger.  It is never held while code of
the user runs, and nothing blocks under it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from broker import messages
from broker.messages import Message
from broker.protocol import Flag, Header, Kind, Meta, charge

from . import builtin, callables, codec, errors
from .calls import Call, FutureCall, SyncCall
from .channel import DataChannel
from .context import handler_call
from .directory import Directory
from .futures import Future
from .options import UNSET_RPC_TIMEOUT, RpcBackendOptions, check_timeout
from .pair import Pair, Served, Stage
from .pool import HandlerPool, Work, on_pool_thread
from .references import Opened, Packing, References
from .registry import Registry, default_registry
from .remote_exceptions import dump_exception, load_exception
from .remote_method import RemoteMethod
from .rref_types import reference_types
from .serving import Handler
from .transfer import Assembly, Outgoing
from .wheel import TimingWheel
from .worker_info import Member, WorkerInfo, check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from .joining import Membership

logger = logging.getLogger(__name__)

#: Seconds that an expired call waits for its callee to say how far it had come.
PROBE_WAIT = 0.05


class Agent:
    """A member of a job.

    Made and started by :func:`zrpc.init_rpc`; see :mod:`zrpc.joining` for how.

    Args:
        name: the worker's name.
        options: see :class:`~zrpc.options.RpcBackendOptions`.
        registry: registered functions, objects and models; default the process's.
    """

    def __init__(
        self, name: str, options: RpcBackendOptions, registry: Registry | None = None
    ) -> None:
        self.name = check_name(name)
        self.options = options
        self.registry = registry or default_registry
        self.lock = threading.Lock()
        self.process = os.getpid()
        self.info = WorkerInfo(name, 0)
        self.session = 0
        self.job = ""
        self.clock = ""
        self.world_size = 0
        self.default_timeout = options.rpc_timeout
        self.prints_errors = True
        self.draining = False
        self.ended: BaseException | None = None
        self.wheel = TimingWheel(time.monotonic())
        self.counters: Counter[str] = Counter()
        self.references = References(self)
        self.service: Any = None  # set by Membership
        self.directory: Directory = None  # type: ignore[assignment]
        self.membership: Membership = None  # type: ignore[assignment]
        self.pool = HandlerPool(
            self._read, options.num_worker_threads, name=f"zrpc-{name}", closed=self._reader_closed
        )
        self.channel = DataChannel(self, self.lock, self.call_at, options.credit)
        self._room = threading.Condition(threading.Lock())
        self._pending = 0
        self._asynchronous: set[Handler] = set()

    # ------------------------------------------------------------ small things

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run ``work`` on the service thread at that monotonic moment."""
        self.service.call_at(moment, work)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter that ``zrpc status`` shows."""
        self.counters[what] += by

    def async_started(self, handler: Handler) -> None:
        """A handler returned a future that is not done."""
        self._asynchronous.add(handler)

    def async_ended(self, handler: Handler) -> None:
        """Its future is done."""
        self._asynchronous.discard(handler)

    @property
    def asynchronous_handlers(self) -> int:
        """Calls whose function has returned a future that is not done."""
        return len(self._asynchronous)

    @property
    def pending_calls(self) -> int:
        """Calls of ours under way."""
        return self._pending

    def check_alive(self) -> None:
        """Raise what ended this agent, if anything did."""
        if self.process != os.getpid():
            raise errors.not_initialized(
                "This process was forked from one that uses zrpc; sockets and threads do not "
                "survive a fork. Call init_rpc in this process, under another name."
            )
        if self.ended is not None:
            raise self.ended

    # ------------------------------------------------------------ deadlines

    def deadline_for(self, timeout: float) -> tuple[float | None, float | None]:
        """The limit (seconds) and deadline (monotonic) of a call made now; None for no limit.

        A call that says nothing of its own has what remains of the call that its code
        serves; outside of one, the default.
        """
        timeout = check_timeout(timeout, "timeout")
        now = time.monotonic()
        if timeout == UNSET_RPC_TIMEOUT:
            outer = handler_call.get()
            if outer is not None and outer.deadline is not None:
                return max(0.0, outer.deadline - now), outer.deadline
            timeout = self.default_timeout
        if timeout == 0:
            return None, None
        return timeout, now + timeout

    # ------------------------------------------------------------ making calls

    def call_sync(
        self, to: Any, function: Any, args: Any, kwargs: Any, timeout: float = UNSET_RPC_TIMEOUT
    ) -> Any:
        """Call and wait; see :func:`zrpc.rpc_sync`."""
        member, name, packing, encoded = self._prepare(to, function, args, kwargs, timeout)
        limit, deadline = self.deadline_for(timeout)
        call = SyncCall(self._pair(member), name, limit, deadline)
        blocked = self.pool.blocked() if on_pool_thread() else contextlib.nullcontext()
        with blocked:
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
    ) -> Future[Any]:
        """Call and return a future; see :func:`zrpc.rpc_async`."""
        member, name, packing, encoded = self._prepare(to, function, args, kwargs, timeout)
        limit, deadline = self.deadline_for(timeout)
        future: Future[Any] = self.new_future()

        def finish(assembly: Assembly | None, error: BaseException | None) -> None:
            if error is None:
                assert assembly is not None
                try:
                    value = self.open_reply(assembly)
                except BaseException as failure:
                    error = failure
            if not future.done():
                if error is not None:
                    future.fail(error)
                else:
                    future.complete(value)

        call = FutureCall(self._pair(member), name, limit, deadline, finish)
        future.on_cancel = lambda: self.give_up(call, "cancelled by its caller")
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
    ) -> None:
        """A call whose result stays at the callee as the value of RRef ``result[0]``."""
        _, name, packing, encoded = self._prepare(member, function, args, kwargs, timeout)
        limit, deadline = self.deadline_for(timeout)
        call = FutureCall(self._pair(member), name, limit, deadline, finish)
        meta = Meta(result=[list(part) for part in result])
        self._start(call, encoded, packing, meta, Flag.REMOTE)

    def new_future(self) -> Future[Any]:
        """A future whose callbacks run on the pool and whose waits stand aside there."""
        return Future(executor=self.pool.submit, before_wait=self._before_wait)

    def _before_wait(self, future: Any) -> Any:
        return self.pool.blocked()

    def _prepare(
        self,
        to: Any,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
    ) -> tuple[Member, str, Packing, codec.Encoded]:
        """Everything that can go wrong before anything is sent."""
        self.check_alive()
        check_timeout(timeout, "timeout")
        if isinstance(function, RemoteMethod):
            # It runs where the RRef lives, or goes on there from `to`.
            args = (function.rref, function.name, tuple(_arguments(args)), dict(kwargs or {}))
            function, kwargs = builtin.call_method, None
        elif not isinstance(function, str) and not callable(function):
            raise TypeError(
                f"function should be callable, or the name that it is registered by; got {function!r:.200}."
            )
        name = function if isinstance(function, str) else callables.display_name(function)
        member = self.directory.resolve(to, self._control_timeout(), name)
        reference: Any = function
        if not isinstance(function, str):
            reference = self._describe(function, member)
        arguments = _arguments(args)
        packing = Packing(self)
        try:
            encoded = self.encode([reference, arguments, dict(kwargs or {})], packing, member)
        except codec.EncodeError as error:
            packing.abandon()
            error.args = (f"The call of {name} on worker {member.name!r} was not sent: {error}",)
            raise
        except BaseException:
            packing.abandon()
            raise
        return member, name, packing, encoded

    def _describe(self, function: Any, member: Member) -> Any:
        description = callables.describe(function)
        if isinstance(description, callables.FunctionName):
            if description.main and member.session != self.session:
                digest = callables.script_digest()
                if not digest or digest != member.script:
                    raise errors.UnknownFunctionError(
                        callables.main_refused(function, member.name),
                        worker=member.name,
                        function=callables.display_name(function),
                        ran="no",
                    )
            return description.text
        if not self.options.allow_pickle:
            raise codec.PickleRefusedError(
                f"The function {callables.display_name(function)} is no importable function, so it would "
                "have to travel pickled, which allow_pickle=False forbids. Move it to a module that "
                "both sides import, or register it on the callee (register_function)."
            )
        return function

    def _control_timeout(self) -> float:
        return 10.0 if self.default_timeout == 0 else max(1.0, min(self.default_timeout, 30.0))

    def _pair(self, member: Member) -> Pair:
        pair = self.channel.pairs.get(member.session)
        if pair is None or pair.member is None:
            with self.lock:
                pair = self.channel.pair(member.session)
                pair.member = member
                pair.same_clock = bool(member.clock) and member.clock == self.clock
        return pair

    def _start(
        self,
        call: Call,
        encoded: codec.Encoded,
        packing: Packing,
        meta: Meta | None = None,
        flags: int = 0,
    ) -> None:
        self._wait_for_room()
        pair = call.pair
        if packing.references:
            meta = meta or Meta()
            meta.references = packing.references
        local = pair.session == self.session
        outgoing = Outgoing(
            Kind.REQUEST,
            0,
            encoded.body,
            () if local else encoded.buffers,
            flags=flags,
            meta=meta,
            deadline=call.deadline,
        )
        call.outgoing = outgoing
        packing.post()
        with self.lock:
            if pair.lost is not None or self.ended is not None:
                failure: BaseException | None = self.ended or call.lost_error(str(pair.lost))
            else:
                failure = None
                call.number = outgoing.call = pair.start_call(call)
                self._pending += 1
                packing.sent(call.key)
                if call.deadline is not None:
                    self.wheel.add(call.key, call.deadline)
                if local:
                    outgoing.started = True
                else:
                    self.channel.send(pair, outgoing)
        self.count("calls")
        if failure is not None:
            packing.abandon()
            self._deliver(call.failed(failure))
            return
        if local:
            self._call_self(call, encoded, meta, flags)
        if call.deadline is not None:
            self.service.wake(call.deadline)

    def _wait_for_room(self) -> None:
        if self._pending < self.options.max_pending or self.service.is_current():
            return
        with self.pool.blocked(), self._room:
            while self._pending >= self.options.max_pending and self.ended is None:
                self._room.wait()

    def _call_self(self, call: Call, encoded: codec.Encoded, meta: Meta | None, flags: int) -> None:
        """A call of this very worker: the same way without the sockets; arguments are copied."""
        pair = call.pair
        with self.lock:
            served = pair.served[call.number] = Served()
        handler = Handler(
            self,
            pair,
            served,
            call.number,
            flags,
            call.deadline,
            encoded.body,
            [bytearray(buffer) for buffer in encoded.buffers],
            Opened(self, meta.references if meta else None),
            meta.result if meta else None,
        )
        served.stage = Stage.QUEUED
        self.pool.submit(handler.run, counted=True)

    # ------------------------------------------------------------ encoding

    def encode(self, value: Any, packing: Packing, member: Member | None) -> codec.Encoded:
        """Encode for ``member``."""
        main_by_value = member is not None and (
            not member.script or member.script != callables.script_digest()
        )
        return codec.encode(
            value,
            hooks=packing,
            reference_type=reference_types(),
            allow_pickle=self.options.allow_pickle,
            main_by_value=main_by_value and member is not None and member.session != self.session,
        )

    def decode(self, body: Any, buffers: Any, opened: Opened | None) -> Any:
        """Decode what came from another worker."""
        return codec.decode(
            body, buffers, hooks=opened, allow_pickle=self.options.allow_pickle
        )

    def open_reply(self, assembly: Assembly) -> Any:
        """Return the value in a reply, or raise the error in it."""
        opened: Opened = assembly.opened
        try:
            body, buffers = assembly.content()
            value = self.decode(body, buffers, opened)
        finally:
            if opened is not None:
                opened.close()
        if assembly.flags & Flag.ERROR:
            self.count("errors_received")
            raise load_exception(value, allow_pickle=self.options.allow_pickle)
        return value

    # ------------------------------------------------------------ ending calls of ours

    def give_up(self, call: Call, reason: str) -> bool:
        """Its caller no longer wants it; tells the callee.  False if it had ended already."""
        with self.lock:
            if call.pair.end_call(call.number) is None:
                return False
            self._forget(call)
            self.channel.note_ended(call.pair, 1)
        self._after_end()
        self._cancel_at_callee(call, reason)
        error = errors.call_cancelled(call.callee, call.function, ran=call.ran)
        self._deliver(call.failed(error))
        return True

    def _cancel_at_callee(self, call: Call, reason: str) -> None:
        if call.outgoing is not None:
            call.outgoing.cancelled = True
        if call.pair.session == self.session:
            self._cancelled(call.pair, call.number)
        elif call.outgoing is not None and call.outgoing.started:
            self.service.post(messages.Cancel(call.pair.session, call.number, reason))

    def _forget(self, call: Call) -> None:
        """Lock held: it is out of ``waiting``; out of the wheel with it."""
        if call.deadline is not None:
            self.wheel.cancel(call.key)
        self._pending -= 1

    def _after_end(self) -> None:
        if self._pending == self.options.max_pending - 1 or self._pending == 0:
            with self._room:
                self._room.notify_all()

    def _deliver(self, rest: Callable[[], None] | None) -> None:
        if rest is not None:
            self.pool.submit(rest)

    def fail_calls(self, pair: Pair, build: Callable[[Call], BaseException]) -> None:
        """End all calls to one peer."""
        with self.lock:
            calls = list(pair.waiting.values())
            pair.waiting.clear()
            for call in calls:
                self._forget(call)
        self._after_end()
        for call in calls:
            self.count("lost")
            self._deliver(call.failed(build(call)))

    def expire(self, now: float) -> None:
        """Service thread: end the calls whose deadline has passed.

        First the callee is asked how far the call has come, for the error's text; the
        answer, or a twentieth of a second without one, ends it.
        """
        for key in self.wheel_advance(now):
            session, number = key
            pair = self.channel.pairs.get(session)
            call = pair.waiting.get(number) if pair is not None else None
            if pair is None or call is None:
                continue
            if not call.expired:
                call.expired = True
                if self._ask_stage(pair, call, now):
                    continue
            self._expired(pair, call, -1)

    def wheel_advance(self, now: float) -> list[Any]:
        """Keys of what is due, under the lock."""
        with self.lock:
            return list(self.wheel.advance(now))

    def _ask_stage(self, pair: Pair, call: Call, now: float) -> bool:
        if call.outgoing is None or not call.outgoing.started:
            return False
        if pair.session == self.session:
            served = pair.served.get(call.number)
            self._expired(pair, call, served.stage + 1 if served is not None else 0)
            return True
        with self.lock:
            self.wheel.add(call.key, now + PROBE_WAIT)
            self.channel.send_bare(pair, Header(Kind.PROBE, call=call.number))
        return True

    def _expired(self, pair: Pair, call: Call, stage: int) -> None:
        with self.lock:
            error = call.timeout_error(stage)
            if pair.end_call(call.number) is None:
                return
            self._forget(call)
            self.channel.note_ended(pair, 1)
        self._after_end()
        self.count("timeouts")
        self._cancel_at_callee(call, "its deadline passed")
        self._deliver(call.failed(error))

    # ------------------------------------------------------------ what the channel says

    def _read(self) -> list[Work]:
        return self.channel.read()

    def _reader_closed(self) -> None:
        self.channel.close_rx()

    def stranger(self, pair: Pair) -> None:
        """A session that we have not met sends its first message (lock held)."""
        self.service.call_at(0.0, lambda: self._introduce(pair))

    def _introduce(self, pair: Pair) -> None:
        def introduced(member: Member | None) -> None:
            with self.lock:
                works, pair.unintroduced = pair.unintroduced, []
                if member is None:
                    pair.lost = errors.WorkerLostError("it was gone before it could be introduced")
                    pair.served.clear()
                    return
                pair.member = member
                pair.same_clock = bool(member.clock) and member.clock == self.clock
            for handler in works:
                self.pool.submit(handler.run, counted=True)

        if pair.member is None:
            self.directory.introduce(pair.session, introduced)

    def forks_forgotten(self, pair: Pair) -> None:
        """The caller has done with replies that carried forks (lock held)."""
        for number in pair.forgotten_forks:
            self.references.ledger.message_ended((pair.session, -number), True)
        pair.forgotten_forks.clear()

    def request_arrived(self, pair: Pair, served: Served, assembly: Assembly) -> None:
        """The first message of a request: take its forks."""
        meta = assembly.meta
        assembly.opened = Opened(self, meta.references if meta is not None else None)

    def reply_arrived(self, pair: Pair, assembly: Assembly) -> None:
        """The first message of a reply: take its forks."""
        meta = assembly.meta
        assembly.opened = Opened(self, meta.references) if meta and meta.references else Opened(self, None)

    def request_complete(self, pair: Pair, served: Served, assembly: Assembly) -> Work | None:
        """A request is whole: run it, or put it aside until control has said whose it is."""
        header = assembly.header
        deadline = None
        if header.deadline:
            seconds = header.deadline / 1e9
            deadline = seconds if header.flags & Flag.SAME_CLOCK else time.monotonic() + seconds
        body, buffers = assembly.content()
        handler = Handler(
            self,
            pair,
            served,
            header.call,
            header.flags,
            deadline,
            body,
            buffers,
            assembly.opened,
            assembly.meta.result if assembly.meta is not None else None,
        )
        self.count("served")
        if pair.is_full:
            error = errors.busy(self.name, None, f"it keeps {len(pair.served)} calls of this caller")
            return Work(lambda: handler._refuse(error), False)
        served.stage = Stage.QUEUED
        if pair.member is None:
            with self.lock:
                if pair.member is None:
                    pair.unintroduced.append(handler)
                    return None
        return Work(handler.run, True)

    def reply_complete(self, pair: Pair, call: Any, assembly: Assembly) -> Work | None:
        """A reply is whole, and its call taken out of ``waiting``."""
        with self.lock:
            self._forget(call)
        self._after_end()
        self.references.message_ended(call.key, True)
        if call.expired:
            self.count("timeouts")
            rest = call.failed(call.timeout_error(Stage.DONE + 1))
        else:
            rest = call.replied(assembly)
        return Work(rest, False) if rest is not None else None

    def stage_told(self, pair: Pair, number: int, stage: int) -> None:
        """The callee's answer to our probe."""
        call = pair.waiting.get(number)
        if call is not None and call.expired:
            self._expired(pair, call, stage)

    # ------------------------------------------------------------ replies of ours

    def reply(self, pair: Pair, served: Served, number: int, value: Any, flags: int) -> None:
        """Send a result.

        Raises:
            EncodeError: it cannot be sent.
        """
        packing = Packing(self)
        try:
            encoded = self.encode(value, packing, pair.member)
        except BaseException:
            packing.abandon()
            raise
        meta = Meta(references=packing.references) if packing.references else None
        packing.post()
        if pair.session == self.session:
            self._reply_self(pair, served, number, encoded, flags, meta)
            return
        outgoing = Outgoing(Kind.REPLY, number, encoded.body, encoded.buffers, flags=flags, meta=meta)
        with self.lock:
            served.stage = Stage.DONE
            # The caller may have given up meanwhile: then nobody wants it.
            if pair.lost is None and pair.served.get(number) is served:
                served.reply = outgoing
                packing.sent((pair.session, -number))
                served.forks = bool(packing.references)
                self.channel.send(pair, outgoing)
                return
        packing.abandon()

    def _reply_self(
        self, pair: Pair, served: Served, number: int, encoded: codec.Encoded, flags: int, meta: Any
    ) -> None:
        buffers = [bytearray(buffer) for buffer in encoded.buffers]
        header = Header(Kind.REPLY, flags, index=len(buffers), call=number, offset=len(encoded.body))
        assembly = Assembly(header, [encoded.body, *buffers])
        assembly.opened = Opened(self, meta.references if meta is not None else None)
        with self.lock:
            served.stage = Stage.DONE
            pair.served.pop(number, None)
            call = pair.end_call(number)
        if call is not None:
            work = self.reply_complete(pair, call, assembly)
            if work is not None:
                self.pool.submit(work.run)

    def reply_error(
        self,
        pair: Pair,
        served: Served,
        number: int,
        error: BaseException,
        function: str,
        ran: errors.Ran,
    ) -> None:
        """Send an error."""
        flags = Flag.ERROR | (Flag.NOT_RUN if ran == "no" else 0)
        for allow_pickle in (self.options.allow_pickle, False):
            data = dump_exception(
                error,
                worker=self.name,
                function=function,
                skip_frames_of=("zrpc",),
                allow_pickle=allow_pickle,
                ran=ran,
                pass_types=reference_types(),
            )
            try:
                self.reply(pair, served, number, data, flags)
                return
            except Exception:
                # Something in it cannot be sent after all: then its plain parts alone.
                if not allow_pickle:
                    raise

    # ------------------------------------------------------------ what control says

    def control_message(self, message: Message) -> None:
        """Service thread: a message of the broker that answers no request."""
        if isinstance(message, messages.Fate):
            self.session_ended(message)
        elif isinstance(message, messages.Cancelled):
            pair = self.channel.pairs.get(message.caller)
            if pair is not None:
                self._cancelled(pair, message.call)
        elif isinstance(message, messages.Freed):
            self.references.freed(message.rrefs)
        elif isinstance(message, messages.OwnersDied):
            pass  # the fate of the owner's session says it all
        else:
            self.membership.control_message(message)

    def _cancelled(self, pair: Pair, number: int) -> None:
        served = pair.served.get(number)
        if served is not None and served.stage != Stage.DONE:
            served.cancelled = True
            served.assembly = None
            if served.on_cancel is not None:
                served.on_cancel()

    def session_ended(self, fate: messages.Fate) -> None:
        """A session that we watch is lost, has left or was replaced."""
        member = self.directory.remove(fate.session)
        pair = self.channel.pairs.get(fate.session)
        name = member.name if member is not None else f"{fate.session:016x}"
        reason = fate.reason
        if pair is not None:
            with self.lock:
                pair.lost = errors.worker_lost(name, None, reason)
                for served in pair.served.values():
                    served.cancelled = True
                    if served.on_cancel is not None:
                        served.on_cancel()
                pair.served.clear()
                pair.outbox.clear()
                pair.streams.clear()
                pair.assemblies.clear()
                pair.unintroduced.clear()
            self.fail_calls(pair, lambda call: call.lost_error(reason))
        self.references.session_ended(fate.session, name, reason)

    def wake(self, now: float) -> float | None:
        """Service thread, each pass: timers of ours; returns when the next is due."""
        self.references.drain()
        self.expire(now)
        with self.lock:
            moment = self.wheel.next_wake()
        return self.membership.wake(now, moment)

    # ------------------------------------------------------------ the end

    def drain(self, timeout: float) -> bool:
        """Take no new calls and wait for those that run; False if some still do after ``timeout`` seconds."""
        self.draining = True
        return self.wait_quiet(timeout, own_calls=False)

    def wait_quiet(self, timeout: float | None, *, own_calls: bool = True) -> bool:
        """Wait until nothing of ours is under way and no handler runs."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.001
        while True:
            if not (own_calls and self._pending) and not self.pool.busy and not self._asynchronous:
                return True
            if end is not None and time.monotonic() >= end:
                return False
            if self.ended is not None:
                return True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def end(self, error: BaseException) -> None:
        """Nothing works from now on: all that waits ends with ``error``."""
        with self.lock:
            if self.ended is not None:
                return
            self.ended = error
            pairs = list(self.channel.pairs.values())
        for pair in pairs:
            self.fail_calls(pair, lambda call: error)
        self.service.fail_requests(error)
        with self._room:
            self._room.notify_all()


def _arguments(args: Any) -> Any:
    """What people write for ``args``: a tuple, a list, nothing, or one thing by itself."""
    if args is None:
        return ()
    if isinstance(args, (tuple, list)):
        return args
    return (args,)


def print_line(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)
