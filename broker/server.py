"""The broker process: sockets, process descriptors and timers around the pure cores.

One thread.  Control goes first: data is drained in batches of a hundred between two looks
at control, so that a hello or a cancel never waits behind a gigabyte of tensor.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import signal
import socket as sockets
import time
from typing import Any

import zmq

from . import __version__, messages
from .addresses import Address
from .machine import machine_identity, open_pidfd
from .member import (
    Action,
    Member,
    RemoveRoutes,
    Send,
    SessionEnded,
    SetRoutes,
    WatchProcess,
)
from .members import Membership
from .protocol import HIGH_WATER_MARK, MAX_FRAME_SIZE, ProtocolError
from .references import ReferenceTables
from .router import Router
from .tickets import SIZE as SECRET_SIZE
from .tickets import Tickets

logger = logging.getLogger(__name__)

#: Data messages routed between two looks at control.
BATCH = 100
#: Seconds between two questions to a worker whose words were lost.
ASK_PAUSE = 0.5
#: Seconds after the watched process has gone that members may still come back in.
ORPHAN_WAIT = 10.0


class BindError(Exception):
    """The broker cannot listen where it was told to; the text says why."""


class Broker:
    """A broker.

    Args:
        address: where control listens; port 0 for any.
        data_port: port of the data router; 0 for the next one, or any if that is taken.
        watch_pid: the process that started this one, 0 for none: without it and without
            members, the broker ends.
        idle_exit: end when the last session has left.
        grace: seconds that a member may be unreachable.
        secret: signs the tickets with which sessions are taken up again; default: a new one,
            which no broker after this one has.

    Raises:
        BindError: the address cannot be used.
    """

    def __init__(
        self,
        address: Address,
        *,
        data_port: int = 0,
        watch_pid: int = 0,
        idle_exit: bool = False,
        grace: float = 10.0,
        secret: bytes | None = None,
    ) -> None:
        _raise_file_limit()
        self.started = time.monotonic()
        self.started_at = time.time()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65535)
        try:
            self._control = self._socket(10_000)
            self._control.setsockopt(zmq.HEARTBEAT_IVL, 2500)
            self._control.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
            self._control.setsockopt(zmq.MAXMSGSIZE, messages.MAX_CONTROL_SIZE)
            self.endpoint = _bind(self._control, address.endpoint)
            data = self._socket(HIGH_WATER_MARK)
            data.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_SIZE)
            data_endpoint = self._bind_data(data, address, data_port)
        except BaseException:
            self._context.destroy(0)
            raise
        port = data_endpoint.rsplit(":", 1)[1] if data_endpoint.startswith("tcp") else data_endpoint
        self.router = Router(data)
        tickets = Tickets(secret or secrets.token_bytes(SECRET_SIZE))
        self.membership = Membership(
            secrets.randbits(31),
            lambda: b"z" + secrets.token_bytes(15),
            [port],
            machine=machine_identity(),
            grace=grace,
            make_ticket=tickets.make,
            check_ticket=tickets.check,
        )
        self.references = ReferenceTables()
        self.idle_exit = idle_exit
        self._watch_pid = watch_pid
        self._watch_gone_at: float | None = None
        self._processes: dict[int, int] = {}  # descriptor -> session
        self._descriptors: dict[int, int] = {}  # session -> descriptor
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(data, zmq.POLLIN)
        self._watch_descriptor = open_pidfd(watch_pid) if watch_pid else None
        if self._watch_descriptor is not None:
            self._poller.register(self._watch_descriptor, zmq.POLLIN)
        elif watch_pid:
            self._watch_gone_at = self.started
        self._stop_reader, self._stop_writer = sockets.socketpair()
        self._stop_writer.setblocking(False)
        self._poller.register(self._stop_reader, zmq.POLLIN)
        self._stopping = False
        self._reported: set[bytes] = set()
        self.control_dropped = 0
        self._next_ping = self.started
        self._traffic_at = self.started
        self._trimmed = True

    # ------------------------------------------------------------ sockets

    def _socket(self, mark: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A reconnecting socket takes its place at once; ids are secrets.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, mark)
        socket.setsockopt(zmq.RCVHWM, mark)
        socket.setsockopt(zmq.BACKLOG, 1024)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        return socket

    def _bind_data(self, data: zmq.Socket[bytes], address: Address, data_port: int) -> str:
        if not address.host:
            return _bind(data, address.endpoint + ".data")
        if data_port:
            return _bind(data, address.with_port(data_port))
        if address.port and address.port < 65535:
            try:
                return _bind(data, address.with_port(address.port + 1))
            except BindError:
                pass  # the welcome tells the port, so any will do
        return _bind(data, address.with_port(0))

    # ------------------------------------------------------------ the loop

    def stop(self, *_: Any) -> None:
        """End soon; may be called from a signal handler."""
        self._stopping = True
        try:
            self._stop_writer.send(b"\0")
        except OSError:
            pass

    def run(self) -> None:
        """Serve until :meth:`stop`, or until nobody needs this broker."""
        signal.set_wakeup_fd(self._stop_writer.fileno(), warn_on_full_buffer=False)
        more = False
        try:
            while not self._stopping:
                now = time.monotonic()
                timeout = 0 if more else self._timeout(now)
                events = dict(self._poller.poll(timeout))
                now = time.monotonic()
                if self._control in events:
                    self._control_messages(now)
                if more or self.router.socket in events:
                    more = self.router.drain(BATCH)
                    self._traffic_at, self._trimmed = now, False
                if len(events) > (self._control in events) + (self.router.socket in events):
                    self._descriptor_events(events, now)
                self._timers(now)
                if self._is_done(now):
                    logger.info("nobody needs this broker any more")
                    break
        finally:
            signal.set_wakeup_fd(-1)
            self._close()

    def _timeout(self, now: float) -> int:
        moments = [self._next_ping]
        due = self.membership.next_due()
        if due is not None:
            moments.append(due)
        reference_due = self.references.next_due()
        if reference_due is not None:
            moments.append(reference_due)
        if not self._trimmed:
            moments.append(self._traffic_at + 1.0)
        if self._watch_gone_at is not None:
            moments.append(self._watch_gone_at + ORPHAN_WAIT)
        return max(0, int((min(moments) - now) * 1000) + 1)

    def _timers(self, now: float) -> None:
        if now >= self._next_ping:
            self._next_ping = now + self.membership.heartbeat / 4
            for member in list(self.membership.members.values()):
                # Those whose process is watched are known to live.
                if not member.watched or member.suspect_since is not None:
                    self._send(member.connection, messages.Ping(0))
        due = self.membership.next_due()
        if due is not None and due <= now:
            self._act(self.membership.due(now), now)
        reference_due = self.references.next_due()
        if reference_due is not None and reference_due <= now:
            self._tell_references(self.references.due(now))
        if not self._trimmed and now - self._traffic_at > 1.0:
            self._trimmed = True
            _trim_memory()

    def _is_done(self, now: float) -> bool:
        if self.membership.members:
            return False
        if self.idle_exit and self.membership.ever_joined:
            return True
        gone = self._watch_gone_at
        if gone is None:
            return False
        return not self.membership.ever_joined or now - gone >= ORPHAN_WAIT

    def _descriptor_events(self, events: dict[Any, int], now: float) -> None:
        if self._stop_reader.fileno() in events:
            self._stop_reader.recv(4096)
        watch = self._watch_descriptor
        if watch is not None and watch in events:
            self._poller.unregister(watch)
            os.close(watch)
            self._watch_descriptor = None
            self._watch_gone_at = now
        for descriptor in [d for d in events if isinstance(d, int) and d in self._processes]:
            session = self._processes[descriptor]
            self._unwatch(session)
            self._act(self.membership.process_ended(session), now)

    def _unwatch(self, session: int) -> None:
        descriptor = self._descriptors.pop(session, None)
        if descriptor is not None:
            del self._processes[descriptor]
            self._poller.unregister(descriptor)
            os.close(descriptor)

    def _close(self) -> None:
        text = "the broker was stopped"
        for member in list(self.membership.members.values()):
            self._send(member.connection, messages.Farewell(text))
        for session in list(self._descriptors):
            self._unwatch(session)
        if self._watch_descriptor is not None:
            os.close(self._watch_descriptor)
        self._control.close(500)
        self.router.socket.close(500)
        self._context.term()
        self._stop_reader.close()
        self._stop_writer.close()

    # ------------------------------------------------------------ control

    def _control_messages(self, now: float) -> None:
        for _ in range(1000):
            try:
                frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                logger.warning("control: %s", error)
                return
            connection = frames[0]
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a control message of {len(frames)} frames")
                message = messages.decode(frames[1])
                self._control_message(connection, message, now)
            except ProtocolError as error:
                self.control_dropped += 1
                if connection not in self._reported and len(self._reported) < 1000:
                    self._reported.add(connection)
                    logger.warning(
                        "dropped a control message: %s (peer %s; further ones of it are counted, not logged)",
                        error,
                        connection.hex()[:8],
                    )
            except Exception:
                logger.exception("a control message was not handled; the broker goes on")

    def _control_message(self, connection: bytes, message: messages.Message, now: float) -> None:
        membership = self.membership
        if isinstance(message, messages.Hello):
            if message.resume and message.resume not in membership.members:
                self.references.freeze(message.job, now + membership.grace)
            self._act(membership.hello(connection, message, now), now)
            return
        if isinstance(message, messages.Status):
            self._send(connection, messages.Answer(message.request, self.status()))
            return
        member = membership.by_connection.get(connection)
        if member is None:
            self._send(connection, messages.WhoAreYou())
            return
        self._act(membership.heard(member), now)
        if isinstance(message, messages.Ready):
            self._act(membership.ready(member), now)
        elif isinstance(message, messages.Resolve):
            self._act(membership.resolve(member, message, now), now)
        elif isinstance(message, messages.Watch):
            self._act(membership.watch(member, message.sessions, now), now)
        elif isinstance(message, messages.ListMembers):
            self._act(membership.list_members(member, message), now)
        elif isinstance(message, messages.WhoIsMissing):
            self._act(membership.who_is_missing(member, message), now)
        elif isinstance(message, messages.Gather):
            self._act(membership.gather(member, message, now), now)
        elif isinstance(message, messages.LeaveGather):
            self._act(membership.leave_gather(member, message.key), now)
        elif isinstance(message, messages.Linger):
            self._act(membership.linger(member, message), now)
        elif isinstance(message, messages.Cancel):
            self._cancel(member, message)
        elif isinstance(message, messages.References):
            self._reference_operations(member, message, now)
        elif isinstance(message, messages.Announce):
            self._announcement(member, message, now)
        elif isinstance(message, messages.Report):
            member.counters = message.counters
        elif isinstance(message, messages.Ping):
            self._send(connection, messages.Pong(message.number, max(0, member.sequence)))
        elif isinstance(message, messages.Goodbye):
            self._act(membership.goodbye(member, message), now)

    def _cancel(self, member: Member, message: messages.Cancel) -> None:
        callee = self.membership.members.get(message.callee)
        if callee is not None and callee.hello.job == member.hello.job:
            self._send(
                callee.connection, messages.Cancelled(member.session, message.call, message.reason)
            )

    def _announcement(self, member: Member, message: messages.Announce, now: float) -> None:
        member.announcing.append(message)
        if message.more:
            return
        parts, member.announcing = member.announcing, []
        if not message.fresh and member.sequence != message.sequence:
            self._ask_again(member, now)  # some of what it said before was lost
            return
        self._act(self.membership.announced(member, parts, now), now)
        told, owners = self.references.announce(
            member.hello.job, member.session, parts, now, self.membership.grace
        )
        for owner in owners:
            self.membership.watch_one(member, owner, now)
        self._act(self.membership.watch(member, (), now), now)
        self._tell_references(told)

    def _ask_again(self, member: Member, now: float) -> None:
        if now - member.asked_at > ASK_PAUSE:
            member.asked_at = now
            self._send(member.connection, messages.WhoAreYou())

    def _reference_operations(
        self, member: Member, message: messages.References, now: float
    ) -> None:
        if message.sequence != member.sequence + 1:
            if message.sequence > member.sequence:
                self._ask_again(member, now)  # some before it were lost
            return
        member.sequence = message.sequence
        told, owners = self.references.operations(
            member.hello.job, member.session, message.operations, now
        )
        for owner in owners:
            self.membership.watch_one(member, owner, now)
        self._act(self.membership.watch(member, (), now), now)
        self._tell_references(told)

    def _tell_references(self, told: dict[int, list[messages.Message]]) -> None:
        for session, out in told.items():
            member = self.membership.members.get(session)
            if member is not None:
                for message in out:
                    self._send(member.connection, message)

    def _send(self, connection: bytes, message: messages.Message) -> None:
        try:
            self._control.send_multipart([connection, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                logger.warning("control: %s", error)
            self._act(self.membership.unreachable(connection, time.monotonic()), time.monotonic())

    def _act(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action.connection, action.message)
            elif isinstance(action, SetRoutes):
                self.router.set_routes(action.session, action.tx[0], action.rx)
            elif isinstance(action, RemoveRoutes):
                self.router.remove_routes(action.session)
                self._unwatch(action.session)
            elif isinstance(action, WatchProcess):
                self._watch(action, now)
            elif isinstance(action, SessionEnded):
                if action.ending != "left":
                    logger.info("worker %r is %s: %s", action.worker, action.ending, action.reason)
                self._tell_references(
                    self.references.session_ended(action.job, action.session, action.ending, now)
                )

    def _watch(self, action: WatchProcess, now: float) -> None:
        descriptor = open_pidfd(action.pid)
        if descriptor is None:
            member = self.membership.members.get(action.session)
            if member is not None:
                member.watched = False
            if not os.path.exists(f"/proc/{action.pid}"):
                self._act(self.membership.process_ended(action.session), now)
            return
        self._processes[descriptor] = action.session
        self._descriptors[action.session] = descriptor
        self._poller.register(descriptor, zmq.POLLIN)

    # ------------------------------------------------------------ status

    def status(self) -> dict[str, Any]:
        """The whole picture, as plain data."""
        now = time.monotonic()
        jobs = {}
        for job in self.membership.jobs.values():
            jobs[job.name] = {
                "world_size": job.world_size,
                "started": job.started or not job.world_size,
                "gathers": job.gathers.waiting(),
                "rrefs": self.references.count(job.name),
                "workers": [
                    {
                        "name": m.name,
                        "rank": m.rank,
                        "session": f"{m.session:016x}",
                        "state": "unreachable"
                        if m.suspect_since is not None
                        else "leaving"
                        if m.lingering
                        else "ready"
                        if m.ready
                        else "joining",
                        "host": m.hello.host,
                        "pid": m.hello.pid,
                        "up": round(now - m.since, 3),
                        "versions": m.hello.versions,
                        "counters": m.counters,
                    }
                    for m in sorted(job.by_name.values(), key=lambda m: m.rank)
                ],
            }
        return {
            "broker": {
                "version": __version__,
                "address": self.endpoint,
                "data": self.membership.ports,
                "pid": os.getpid(),
                "host": sockets.gethostname(),
                "up": round(now - self.started, 3),
                "epoch": self.membership.epoch,
                "resident_bytes": _resident_bytes(),
                "control_dropped": self.control_dropped,
                **self.router.snapshot(),
            },
            "jobs": jobs,
        }


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    try:
        socket.bind(endpoint[:-1] + "*" if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        reasons = {
            errno.EADDRINUSE: "another process listens there already; stop it, or take another port",
            errno.EADDRNOTAVAIL: "this machine has no such address",
            errno.ENODEV: "this machine has no such address or interface",
            errno.EACCES: "this user may not listen there; take a port above 1023",
            errno.EINVAL: "it is no address",
        }
        raise BindError(
            f"The broker cannot listen on {endpoint}: {reasons.get(error.errno or 0, str(error))}."
        ) from None
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    return last.decode().rstrip("\0") if isinstance(last, bytes) else endpoint


def _raise_file_limit() -> None:
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, ValueError, OSError):
        logger.debug("the limit of open files stays as it is")


def _trim_memory() -> None:
    """Give freed memory back to the system, where the C library can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
