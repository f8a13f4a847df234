"""Becoming a member of a job, staying one, and leaving it.

``join``: dial control, hello, welcome, dial the data routers, see our own echo come back,
say ready, wait until the world is there.  Each wait has the one limit of ``init_rpc`` and
an error that says what was waited for.

``leave``: wait for our calls and handlers, meet the others (a static world leaves
together), drop RRefs, goodbye, close.  Whatever happens, the process is down afterwards.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import zmq

from broker import messages
from broker.addresses import parse_address
from broker.machine import clock_identity, machine_identity
from broker.messages import Message

from . import callables, errors
from .data_sockets import apply_heartbeat, apply_socket_options, drain_monitor, monitor
from .directory import Directory
from .service import RequestFailed, Service
from .worker_info import WorkerInfo

if TYPE_CHECKING:
    from .agent import Agent

logger = logging.getLogger(__name__)

#: Seconds between reports of this worker's counters; they are also its sign of life.
REPORT_INTERVAL = 2.0
#: Seconds after which a wait for others says on stderr for whom.
PATIENCE = 10.0
#: Seconds after a hello in which "who are you?" is its echo.
HELLO_PAUSE = 0.2
#: RRefs and peers in one message of an announcement.
ANNOUNCED_AT_ONCE = 10_000
#: Ended meetings that are announced to a broker that was started again, and the largest in bytes.
GATHERS_REMEMBERED = 8
LARGEST_REMEMBERED = 65_536
#: Seconds for which a broker that does not answer may come back.
RECONNECT_WINDOW = 30.0


class Membership:
    """One agent's membership of a job.

    Args:
        agent: the agent.
        address: the broker's, ``tcp://host:port/job``.
        rank: -1 for none.
        world_size: 0 for a job whose members come and go.
    """

    def __init__(
        self,
        agent: Agent,
        address: str,
        *,
        rank: int = -1,
        world_size: int = 0,
        job: str | None = None,
    ) -> None:
        self.agent = agent
        parsed = parse_address(address)
        self.endpoint = parsed.endpoint
        self.job = job or parsed.job or os.environ.get("ZRPC_JOB") or "default"
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._welcome: messages.Welcome | None = None
        self._refused: messages.Refused | None = None
        self._start_failed: str | None = None
        self._started = threading.Event()
        self._welcomed = threading.Event()
        self._farewell = threading.Event()
        self._ready = False
        self._was_connected = False
        self._hello_at = 0.0
        self._gathered: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._leaving = False
        self._gathers: dict[str, itertools.count[int]] = {}
        self._last_heard = time.monotonic()
        self._last_report = 0.0
        self._reported: dict[str, int] = {}
        self._closed = False
        self._on_started: list[Any] = []
        #: Called right before our goodbye, after which the broker may end.
        self.before_goodbye: Any = None
        agent.membership = self

    def on_started(self, work: Any) -> None:
        """Call ``work(service)`` once the service thread runs."""
        self._on_started.append(work)

    # ------------------------------------------------------------ joining

    def join(self, timeout: float | None) -> None:
        """Do it all.

        Args:
            timeout: seconds in all, None for no limit.

        Raises:
            BrokerLostError: no broker answered.
            RpcTimeoutError: the world did not come together; names who is missing.
            RuntimeError: the broker refused us; says why.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            self._dial()
            self._wait_for_welcome(end)
            self._open_data(end)
            self.agent.service.post(messages.Ready())
            self._ready = True
            self._wait_for_world(end, timeout)
        except BaseException:
            if self._welcome is not None and not self._start_failed:
                # So that the broker need not wait for the end of this process.
                self._leaving = True
                self.agent.service.post(messages.Goodbye("it could not join"))
                _wait(self._farewell, 0.5)
            self.close(abort=True)
            raise

    def _dial(self) -> None:
        agent = self.agent
        control = self._context.socket(zmq.DEALER)
        apply_socket_options(control)
        control.setsockopt(zmq.ROUTING_ID, b"c" + secrets.token_bytes(15))
        apply_heartbeat(control, 2.5, 10.0)
        connections = monitor(self._context, control)
        try:
            control.connect(self.endpoint)
        except zmq.ZMQError as error:
            control.close(0)
            connections.close(0)
            self._context.term()
            raise errors.BrokerLostError(
                f"The broker's address {self.endpoint!r} cannot be dialled: {error}."
            ) from None
        agent.service = Service(
            control,
            on_message=agent.control_message,
            on_wake=agent.wake,
            name=f"zrpc-{agent.name}-service",
        )
        agent.directory = Directory(agent.service)
        agent.service.watch_socket(connections, lambda: self._control_connected(connections))
        agent.service.start()
        for work in self._on_started:
            work(agent.service)
        agent.service.post(self._hello())

    def _control_connected(self, connections: zmq.Socket[bytes]) -> None:
        """Service thread: control has connected; again means that messages may be lost."""
        count = drain_monitor(connections)
        first, self._was_connected = not self._was_connected, True
        if (count > 1 or not first) and not self._leaving:
            self._say_hello_again()

    def _say_hello_again(self) -> None:
        self._hello_at = time.monotonic()
        self.agent.service.post(self._hello(resume=True))

    def _taken_up_again(self, welcome: messages.Welcome) -> None:
        """What was asked of the broker, said to it, or to others by way of it, may be lost."""
        agent = self.agent
        assert self._welcome is not None
        if welcome.epoch != self._welcome.epoch:
            logger.info("worker %r goes on with a broker that was started again", agent.name)
        self._welcome = welcome
        agent.references.announce(welcome.heard, self._announcement)
        sessions = [member.session for member in agent.directory.known()]
        if sessions:
            agent.service.post(messages.Watch(sessions))
        agent.service.ask_again()
        agent.channel.reconnected()

    def _announcement(
        self, forks: list[Any], owned: list[Any], minted: int, sequence: int, fresh: bool
    ) -> list[Message]:
        parts: list[messages.Announce] = []
        peers = [member.as_map() for member in self.agent.directory.known()]
        longest = max(len(forks), len(owned), len(peers), 1)
        for start in range(0, longest, ANNOUNCED_AT_ONCE):
            rows = slice(start, start + ANNOUNCED_AT_ONCE)
            parts.append(
                messages.Announce(
                    forks[rows],
                    owned[rows],
                    minted,
                    sequence,
                    peers[rows],
                    fresh=fresh,
                    more=True,
                )
            )
        parts[-1].gathers = [[key, values] for key, values in self._gathered.items()]
        parts[-1].more = False
        return list(parts)

    def _data_connected(self, connections: zmq.Socket[bytes]) -> None:
        """Service thread: the same of a data socket."""
        drain_monitor(connections)
        if self._ready:
            self.agent.channel.reconnected()

    def _hello(self, resume: bool = False) -> messages.Hello:
        hello = messages.Hello(
            worker=self.agent.name,
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=machine_identity(),
            clock=clock_identity(),
            script=callables.script_digest(),
            versions={
                "python": platform.python_version(),
                "zrpc": _version(),
                "torch": _torch_version(),
            },
        )
        if resume and self._welcome is not None:
            hello.resume = self._welcome.session
            hello.resume_tx = self._welcome.tx
            hello.resume_rx = self._welcome.rx
            hello.ticket = self._welcome.ticket
            hello.rank = self._welcome.rank
            hello.was_ready = self._ready
        return hello

    def _wait_for_welcome(self, end: float | None) -> None:
        limit = 10.0 if end is None else max(0.0, min(10.0, end - time.monotonic()))
        answered = _wait(self._welcomed, limit)
        if self._refused is not None:
            raise _refusal(self._refused, self.agent.name)
        if not answered or self._welcome is None:
            raise errors.BrokerLostError(
                f"init_rpc of worker {self.agent.name!r}: no broker answered at {self.endpoint} "
                f"within {limit:.3g} s. Start one with `zrpc broker --bind {self.endpoint}`, or correct "
                "the address (broker=..., ZRPC_BROKER).",
                elapsed=limit,
                limit=limit,
            )
        welcome = self._welcome
        agent = self.agent
        agent.session = welcome.session
        agent.info = WorkerInfo(agent.name, welcome.rank, welcome.session)
        agent.job = self.job
        agent.clock = clock_identity()
        agent.world_size = self.world_size
        agent.references.begin(welcome.session)

    def _open_data(self, end: float | None) -> None:
        assert self._welcome is not None
        welcome, agent = self._welcome, self.agent
        monitors = agent.channel.open(
            self._context,
            welcome.session,
            [self._data_endpoint(port) for port in welcome.data],
            welcome.tx,
            welcome.rx,
            welcome.heartbeat,
        )
        for connections in monitors:
            agent.service.watch_socket(
                connections, lambda connections=connections: self._data_connected(connections)
            )
        agent.pool.start()
        pause, limit = 0.001, time.monotonic() + 10.0
        while not agent.channel.send_echoes():
            self._check_start()
            if time.monotonic() > (limit if end is None else min(limit, end)):
                raise errors.BrokerLostError(
                    f"init_rpc of worker {agent.name!r}: the broker at {self.endpoint} answers, but its "
                    f"data port ({', '.join(welcome.data)}) cannot be reached. Is it open in the firewall?"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _data_endpoint(self, port: str) -> str:
        if "://" in port:
            return port
        return f"{self.endpoint.rsplit(':', 1)[0]}:{port}"

    def _wait_for_world(self, end: float | None, timeout: float | None) -> None:
        start = time.monotonic()
        told = False
        while True:
            rest = None if end is None else end - time.monotonic()
            step = PATIENCE if not told else 3600.0
            if self._started.wait(step if rest is None else max(0.0, min(step, rest))):
                break
            if rest is not None and rest <= step:
                missing = self._missing(f"rank {{}} of {self.world_size}")
                raise errors.RpcTimeoutError(
                    f"init_rpc of worker {self.agent.name!r} (rank {self.rank}) timed out after "
                    f"{time.monotonic() - start:.1f} s: of its world of {self.world_size}, "
                    f"{missing} did not come. Start them, or give init_rpc more time "
                    "(rpc_timeout or init_timeout in the options).",
                    elapsed=time.monotonic() - start,
                    limit=timeout,
                )
            if not told:
                told = True
                logger.warning(
                    "worker %r still waits for %s", self.agent.name, self._missing("rank {}")
                )
        self._check_start()

    def _check_start(self) -> None:
        """Raise what makes joining pointless."""
        if self._start_failed is not None:
            raise RuntimeError(
                f"init_rpc of worker {self.agent.name!r} (rank {self.rank}): {self._start_failed}"
            )
        if self.agent.ended is not None:
            raise self.agent.ended

    def _missing(self, form: str, key: str = "") -> str:
        try:
            missing = self.agent.service.request(
                lambda number: messages.WhoIsMissing(number, key), 2.0, "say who is missing"
            )
        except Exception:
            return "somebody (the broker did not say who)"
        names = [form.format(item) for item in missing[:10]]
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        return (", ".join(names) + more) or "nobody"

    # ------------------------------------------------------------ staying

    def control_message(self, message: Message) -> None:
        """Service thread: what concerns membership."""
        self._last_heard = time.monotonic()
        if isinstance(message, messages.Welcome):
            if self._welcome is None:
                self._welcome = message
                self._welcomed.set()
            else:
                self._taken_up_again(message)
        elif isinstance(message, messages.Refused):
            self._let_broker_end()
            self._refused = message
            self._welcomed.set()
            if self._started.is_set():
                self.agent.end(
                    errors.BrokerLostError(
                        f"The broker no longer accepts worker {self.agent.name!r}: {message.text}"
                    )
                )
        elif isinstance(message, messages.Confirm):
            self.agent.references.confirm(message.forks)
        elif isinstance(message, messages.Started):
            self._started.set()
        elif isinstance(message, messages.StartFailed):
            self._let_broker_end()
            self._start_failed = message.text
            self._started.set()
        elif isinstance(message, messages.Pong):
            self.agent.references.heard(message.heard)
        elif isinstance(message, messages.Ping):
            self.agent.service.post(messages.Pong(message.number))
        elif isinstance(message, messages.WhoAreYou):
            if not self._leaving and time.monotonic() - self._hello_at > HELLO_PAUSE:
                self._say_hello_again()
        elif isinstance(message, messages.Farewell):
            self._let_broker_end()
            self._farewell.set()
            if not self._leaving:
                text = message.text or "it ended the session"
                self.agent.end(
                    errors.BrokerLostError(
                        f"The broker at {self.endpoint} has ended this worker's session: {text}. "
                        "Start it again (`zrpc broker`), then call init_rpc again."
                    )
                )

    def _let_broker_end(self) -> None:
        if self.before_goodbye is not None:
            self.before_goodbye()

    def wake(self, now: float, moment: float | None) -> float | None:
        """Service thread, each pass: report, and see whether the broker is there."""
        if not self._ready or self._leaving or self.agent.ended is not None:
            return moment
        if now - self._last_report >= REPORT_INTERVAL:
            self._last_report = now
            agent = self.agent
            counters = dict(agent.counters)
            counters.update(agent.pool.counts)
            counters["pending"] = agent.caller.pending
            counters["owned"] = len(agent.references.ledger)
            agent.service.post(messages.Report(counters))
            agent.service.post(messages.Ping(0))
            assert self._welcome is not None
            agent.channel.probe_old(self._welcome.heartbeat)
            silent = now - self._last_heard
            if silent > RECONNECT_WINDOW:
                agent.end(errors.broker_lost(self.endpoint, silent))
        following = self._last_report + REPORT_INTERVAL
        return following if moment is None else min(moment, following)

    # ------------------------------------------------------------ meeting others

    def gather(
        self,
        key: str,
        value: bytes,
        workers: list[str],
        timeout: float | None,
        *,
        tolerant: bool = False,
        patience: float | None = None,
    ) -> dict[str, bytes]:
        """Meet ``workers`` (empty: the whole world); returns each one's value by name.

        Raises:
            RpcTimeoutError: not all came; names those who did not.
            WorkerLostError: one of them is gone (unless ``tolerant``).
        """
        counter = self._gathers.setdefault(key, itertools.count())
        full_key = f"{key}#{next(counter)}"
        done = threading.Event()
        result: list[Any] = [None, None]

        def answered(found: Any, error: Exception | None) -> None:
            result[:] = found, error
            done.set()

        service = self.agent.service
        service.ask(
            lambda number: messages.Gather(number, full_key, value, workers, tolerant), answered
        )
        start = time.monotonic()
        step = timeout if patience is None else min(patience, timeout or patience)
        with self.agent.pool.blocked():
            if not _wait(done, step) and step != timeout:
                print(
                    f"zrpc: worker {self.agent.name!r} waits for "
                    f"{self._missing('{!r}', full_key)} ({key})",
                    file=sys.stderr,
                    flush=True,
                )
                rest = None if timeout is None else timeout - (time.monotonic() - start)
                _wait(done, rest)
        if not done.is_set():
            missing = self._missing("{!r}", full_key)
            service.post(messages.LeaveGather(full_key))
            elapsed = time.monotonic() - start
            raise errors.RpcTimeoutError(
                f"{key} of worker {self.agent.name!r} timed out after {elapsed:.2f} s: "
                f"{missing} did not come.",
                elapsed=elapsed,
                limit=timeout,
            )
        error = result[1]
        if isinstance(error, RequestFailed):
            if error.code == "lost":
                raise errors.WorkerLostError(
                    str(error), worker=error.names[0] if error.names else None
                ) from None
            raise errors.RpcError(str(error)) from None
        if error is not None:
            raise error
        values = dict(result[0])
        self._remember(full_key, values)
        return values

    def _remember(self, key: str, values: dict[str, bytes]) -> None:
        """For those whose answer is lost with the broker: it learns from us how it ended."""
        if sum(map(len, values.values())) <= LARGEST_REMEMBERED:
            self._gathered[key] = values
            while len(self._gathered) > GATHERS_REMEMBERED:
                self._gathered.popitem(last=False)

    # ------------------------------------------------------------ leaving

    def leave(self, graceful: bool, timeout: float | None) -> None:
        """Leave; this process is down afterwards, also where this raises.

        Raises:
            RpcTimeoutError: others did not call shutdown in time; names them.
        """
        problem: BaseException | None = None
        agent = self.agent
        if graceful and agent.ended is None:
            try:
                self._leave_together(timeout)
            except BaseException as error:
                problem = error
        self._leaving = True
        self._let_broker_end()
        if agent.ended is None:
            agent.channel.set_linger(1000 if graceful else 0)
            agent.service.post(
                messages.Goodbye("shutdown" if problem is None else str(problem)[:200])
            )
            _wait(self._farewell, 1.0)
        self.close(abort=not graceful)
        if problem is not None:
            raise problem

    def _leave_together(self, timeout: float | None) -> None:
        agent = self.agent
        end = None if timeout is None else time.monotonic() + timeout

        def rest() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        if not agent.wait_quiet(rest()):
            raise errors.RpcTimeoutError(
                f"shutdown of worker {agent.name!r} timed out after {timeout:g} s: "
                f"{agent.caller.pending} of its calls and {agent.pool.counts['running']} of its handlers "
                "had not ended.",
                elapsed=timeout,
                limit=timeout,
            )
        if not self.world_size:
            return
        # Twice: what others sent before they came to the first meeting may have made work.
        for _ in range(2):
            try:
                self.gather("shutdown", b"", [], rest(), tolerant=True, patience=PATIENCE)
            except (errors.BrokerLostError, errors.WorkerLostError):
                return
            agent.wait_quiet(rest())

    def close(self, *, abort: bool) -> None:
        """Close sockets and threads; never raises, never blocks for long."""
        if self._closed:
            return
        self._closed = True
        self._leaving = True
        self._let_broker_end()
        agent = self.agent
        if agent.service is not None:
            with_error = agent.ended or errors.not_initialized("This worker has been shut down.")
            agent.end(with_error)
        agent.channel.close_tx()
        if agent.service is None:
            self._context.term()
            return
        # term() waits for every socket, and each thread closes its own when it meets ETERM.
        closer = threading.Thread(target=self._context.term, name="zrpc-term", daemon=True)
        closer.start()
        agent.pool.close(0.5 if abort else 2.0)
        if threading.current_thread() is not agent.service.thread:
            agent.service.thread.join(2.0)
        closer.join(2.0)
        if closer.is_alive():
            logger.warning("a socket of worker %r did not close in time", agent.name)


def _refusal(refused: messages.Refused, name: str) -> Exception:
    if refused.code == "identity":
        return errors.AuthenticationError(refused.text)
    return RuntimeError(f"init_rpc of worker {name!r} was refused: {refused.text}")


def _wait(event: threading.Event, timeout: float | None) -> bool:
    return event.wait(timeout if timeout is None else max(0.0, timeout))


def _version() -> str:
    from broker import __version__

    return __version__


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
