"""The agent: one member of a job in this process, with its sockets, threads, calls and RRefs.

An agent is an object; several live in one process.  What it does is spread over

* :mod:`zrpc.caller`     calls to others,
* :mod:`zrpc.callee`     calls from others, run by :mod:`zrpc.serving`,
* :mod:`zrpc.references` RRefs,
* :mod:`zrpc.channel`    the data sockets and the pairs behind them,
* :mod:`zrpc.service`    the control socket, timers, finalisers (one thread),
* :mod:`zrpc.pool`       handlers and the reader's seat,
* :mod:`zrpc.joining`    becoming a member, and leaving.

This module ties them together.  One lock, ``agent.lock``, guards pairs, wheel and ledger.
It is never held while code of the user runs, and nothing blocks under it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from broker import messages
from broker.messages import Message

from . import callables, codec, errors
from .callee import Callee
from .caller import Caller
from .channel import DataChannel
from .context import handler_call
from .directory import Directory
from .futures import Future
from .options import UNSET_RPC_TIMEOUT, RpcBackendOptions, check_timeout
from .pair import Pair, Served
from .pool import HandlerPool, Work
from .references import Opened, Packing, References
from .registry import Registry, default_registry
from .rref_types import reference_types
from .transfer import Assembly
from .wheel import TimingWheel
from .worker_info import Member, WorkerInfo, check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from .joining import Membership


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
        self.draining = False
        #: The interpreter ends: threads that wait are not told, they end with it.
        self.exiting = False
        self.ended: BaseException | None = None
        self.wheel = TimingWheel(time.monotonic())
        self.counters: Counter[str] = Counter()
        self.references = References(self)
        self.service: Any = None  # set by Membership
        self.directory: Directory = None  # type: ignore[assignment]
        self.membership: Membership = None  # type: ignore[assignment]
        self.caller = Caller(self)
        self.callee = Callee(self)
        self.channel = DataChannel(self, self.lock, self.call_at, options.credit)
        self.pool = HandlerPool(
            self.channel.read,
            options.num_worker_threads,
            name=f"zrpc-{name}",
            closed=self.channel.close_rx,
        )
        self.call_sync = self.caller.call_sync
        self.call_async = self.caller.call_async

    # ------------------------------------------------------------ small things

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run ``work`` on the service thread at that monotonic moment."""
        self.service.call_at(moment, work)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter that ``zrpc status`` shows."""
        self.counters[what] += by

    def check_alive(self) -> None:
        """Raise what ended this agent, if anything did."""
        if self.process != os.getpid():
            raise errors.not_initialized(
                "This process was forked from one that uses zrpc; sockets and threads do not "
                "survive a fork. Call init_rpc in this process, under another name."
            )
        if self.exiting and threading.current_thread() is not threading.main_thread():
            # A daemon thread, in the last moments of the interpreter: it ends with it.
            threading.Event().wait()
        if self.ended is not None:
            raise self.ended

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

    def control_timeout(self) -> float:
        """Seconds that the broker has for an answer."""
        return 10.0 if self.default_timeout == 0 else max(1.0, min(self.default_timeout, 30.0))

    def new_future(self) -> Future[Any]:
        """A future whose callbacks run on the pool and whose waits stand aside there."""
        return Future(executor=self.pool.submit, before_wait=lambda future: self.pool.blocked())

    def encode(self, value: Any, packing: Packing, member: Member | None) -> codec.Encoded:
        """Encode for ``member``.

        Raises:
            EncodeError: something in it cannot be sent.
        """
        other_script = (
            member is not None
            and member.session != self.session
            and (not member.script or member.script != callables.script_digest())
        )
        return codec.encode(
            value,
            hooks=packing,
            reference_type=reference_types(),
            allow_pickle=self.options.allow_pickle,
            main_by_value=other_script,
        )

    def decode(self, body: Any, buffers: Any, opened: Opened | None) -> Any:
        """Decode what came from another worker."""
        return codec.decode(body, buffers, hooks=opened, allow_pickle=self.options.allow_pickle)

    # ------------------------------------------------------------ what the channel says

    def stranger(self, pair: Pair) -> None:
        """A session that we have not met sends its first message (lock held)."""
        self.service.call_at(0.0, lambda: self.callee.introduce(pair))

    def forks_forgotten(self, pair: Pair) -> None:
        """The caller has done with replies that carried forks (lock held)."""
        numbers, pair.forgotten_forks = pair.forgotten_forks, []
        self.references.sent_replies_ended(pair.session, numbers)

    def message_arrived(self, assembly: Assembly) -> None:
        """The first message of a request or reply: take its forks."""
        meta = assembly.meta
        assembly.opened = Opened(self, meta.references if meta is not None else None)

    def request_complete(self, pair: Pair, served: Served, assembly: Assembly) -> Work | None:
        """A request is whole."""
        return self.callee.request_complete(pair, served, assembly)

    def reply_complete(self, pair: Pair, call: Any, assembly: Assembly) -> Work | None:
        """A reply is whole."""
        return self.caller.reply_complete(pair, call, assembly)

    def stage_told(self, pair: Pair, number: int, stage: int) -> None:
        """The callee has answered a probe."""
        self.caller.stage_told(pair, number, stage)

    # ------------------------------------------------------------ what control says

    def control_message(self, message: Message) -> None:
        """Service thread: a message of the broker that answers no request."""
        if isinstance(message, messages.Fate):
            self.session_ended(message)
        elif isinstance(message, messages.Cancelled):
            pair = self.channel.pairs.get(message.caller)
            if pair is not None:
                self.callee.cancelled(pair, message.call)
        elif isinstance(message, messages.Freed):
            self.references.freed(message.rrefs)
        elif isinstance(message, messages.OwnersDied):
            pass  # the fate of the owner's session says it all
        else:
            self.membership.control_message(message)

    def session_ended(self, fate: messages.Fate) -> None:
        """A session that we watch is lost, has left or was replaced."""
        reason = fate.reason
        with self.lock:
            # Together: who makes a pair looks here whether its peer has ended.
            member = self.directory.remove(fate.session, reason)
            pair = self.channel.pairs.get(fate.session)
        name = member.name if member is not None else f"{fate.session:016x}"
        if pair is not None:
            with self.lock:
                pair.lost = reason
                pair.forget_peer()
            self.caller.fail_all(pair, lambda call: call.lost_error(reason))
        self.references.session_ended(fate.session, name, reason)

    def wake(self, now: float) -> float | None:
        """Service thread, each pass: timers of ours; returns when the next is due."""
        self.references.drain()
        self.caller.expire(now)
        with self.lock:
            moment = self.wheel.next_wake()
        return self.membership.wake(now, moment)

    # ------------------------------------------------------------ the end

    def drain(self, timeout: float) -> bool:
        """Take no new calls and wait for those that run.

        Args:
            timeout: seconds.

        Returns:
            False if some still run after ``timeout``.
        """
        self.draining = True
        return self.wait_quiet(timeout, own_calls=False)

    def wait_quiet(self, timeout: float | None, *, own_calls: bool = True) -> bool:
        """Wait until nothing of ours is under way and no handler runs."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.001
        while True:
            pending = own_calls and self.caller.pending
            if not pending and not self.pool.busy and not self.callee.asynchronous:
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
        if self.exiting:
            return
        for pair in pairs:
            self.caller.fail_all(pair, lambda call: error)
        self.service.fail_requests(error)
        self.caller.wake_waiting()
