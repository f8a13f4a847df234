"""Taking calls and answering them: one half of an agent.  The other is :mod:`zrpc.caller`.

What a call runs through on a pool thread is :mod:`zrpc.serving`; this is what comes
before (whose is it, is it whole) and after (the reply, once, and kept).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from broker.protocol import Flag, Header, Kind, Meta

from . import codec, errors
from .pair import Pair, Served, Stage
from .pool import Work
from .references import Opened, Packing
from .remote_exceptions import dump_exception
from .rref_types import reference_types
from .serving import Handler
from .transfer import Assembly, Buffer, Outgoing

if TYPE_CHECKING:
    from .agent import Agent
    from .worker_info import Member


class Callee:
    """An agent's calls from others.

    Args:
        agent: whom they call.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._asynchronous: set[Handler] = set()

    # ------------------------------------------------------------ requests

    def introduce(self, pair: Pair) -> None:
        """Service thread: a session has called that we have not met; control says who it is.

        Its calls wait until then: whoever is answered is watched, so that its end is known.
        """
        self._agent.directory.introduce(pair.session, lambda member: self.met(pair, member))

    def met(self, pair: Pair, member: Member | None) -> None:
        """We know now who a session is (None: it is gone), from control or since we call it."""
        agent = self._agent
        with agent.lock:
            handlers, pair.unintroduced = pair.unintroduced, []
            if member is None:
                pair.lost = "it was gone before it could be introduced"
                pair.served.clear()
                return
            pair.member = member
            pair.same_clock = bool(member.clock) and member.clock == agent.clock
        for handler in handlers:
            agent.pool.submit(handler.run, counted=True)

    def request_complete(self, pair: Pair, served: Served, assembly: Assembly) -> Work | None:
        """A request is whole: run it, or put it aside until its caller is known."""
        agent, header = self._agent, assembly.header
        deadline = None
        if header.deadline:
            seconds = header.deadline / 1e9
            deadline = seconds if header.flags & Flag.SAME_CLOCK else time.monotonic() + seconds
        body, buffers = assembly.content()
        handler = Handler(
            agent,
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
        agent.count("served")
        if pair.is_full:
            reason = f"it keeps {len(pair.served)} unfinished calls of this caller"
            error = errors.busy(agent.name, None, reason)
            return Work(lambda: handler.refuse(error), False)
        served.stage = Stage.QUEUED
        if pair.member is None:
            with agent.lock:
                if pair.member is None:
                    pair.unintroduced.append(handler)
                    return None
        return Work(handler.run, True)

    def run_local(
        self,
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
        """Run a call of this worker to itself."""
        agent = self._agent
        handler = Handler(
            agent, pair, served, number, flags, deadline, body, buffers, opened, result
        )
        agent.pool.submit(handler.run, counted=True)

    def cancelled(self, pair: Pair, number: int) -> None:
        """The caller no longer wants that call."""
        served = pair.served.get(number)
        if served is not None and served.stage != Stage.DONE:
            served.end()

    # ------------------------------------------------------------ handlers with futures

    def async_started(self, handler: Handler) -> None:
        """A handler returned a future that is not done."""
        self._asynchronous.add(handler)

    def async_ended(self, handler: Handler) -> None:
        """Its future is done, or nobody waits for it any more."""
        self._asynchronous.discard(handler)

    @property
    def asynchronous(self) -> int:
        """Calls whose function has returned a future that is not done."""
        return len(self._asynchronous)

    # ------------------------------------------------------------ replies

    def reply(self, pair: Pair, served: Served, number: int, value: Any, flags: int) -> None:
        """Send a result.

        Raises:
            EncodeError: it cannot be sent.
        """
        agent = self._agent
        packing = Packing(agent)
        try:
            encoded = agent.encode(value, packing, pair.member)
        except BaseException:
            packing.abandon()
            raise
        meta = Meta(references=packing.references) if packing.references else None
        packing.post()
        if pair.session == agent.session:
            self._reply_self(pair, served, number, encoded, flags, meta, packing)
            return
        outgoing = Outgoing(
            Kind.REPLY, number, encoded.body, encoded.buffers, flags=flags, meta=meta
        )
        with agent.lock:
            served.stage = Stage.DONE
            # The caller may have given up meanwhile: then nobody wants it.
            if pair.lost is None and pair.served.get(number) is served:
                served.reply = outgoing
                packing.sent((pair.session, -number))
                served.forks = bool(packing.references)
                agent.channel.send(pair, outgoing)
                return
        packing.abandon()

    def _reply_self(
        self,
        pair: Pair,
        served: Served,
        number: int,
        encoded: codec.Encoded,
        flags: int,
        meta: Meta | None,
        packing: Packing,
    ) -> None:
        agent = self._agent
        buffers = [bytearray(buffer) for buffer in encoded.buffers]
        header = Header(
            Kind.REPLY, flags, index=len(buffers), call=number, offset=len(encoded.body)
        )
        assembly = Assembly(header, [encoded.body, *buffers])
        assembly.opened = Opened(agent, meta.references if meta is not None else None)
        if meta is not None:
            with agent.lock:
                packing.sent((pair.session, -number))
            agent.references.message_ended((pair.session, -number), True)
        with agent.lock:
            served.stage = Stage.DONE
            pair.served.pop(number, None)
            call = pair.end_call(number)
        if call is not None:
            work = agent.caller.reply_complete(pair, call, assembly)
            if work is not None:
                agent.pool.submit(work.run)

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
        agent = self._agent
        flags = Flag.ERROR | (Flag.NOT_RUN if ran == "no" else 0)
        for allow_pickle in (agent.options.allow_pickle, False):
            data = dump_exception(
                error,
                worker=agent.name,
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
