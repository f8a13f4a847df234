"""No broker address given: the first worker starts one and publishes where it is.

The address goes through torch's own rendezvous (``env://``, ``tcp://``, ``file://``),
under a prefix of its own, so that a script written for torch RPC runs unchanged and a
process group may use the same store.

* A *static* world (a size is given): rank 0 starts the broker.  Each ``init_rpc`` of a
  process counts up the prefix, as in torch, so that a second one meets its own peers.
  The store is let go as soon as the world is together: the next world may have another
  rank 0, which must be able to listen on the same port.
* A *dynamic* one: whoever finds no living broker in the store tries for the right to
  start one.  Brokers are numbered in the store, so a later member that finds a dead one
  starts the next.  The store is kept as long as the agent, since late comers need it.

The broker is a process of its own, started by exec in its own session: a Ctrl-C at the
terminal reaches the workers and lets the broker end when the last of them has gone.  It
watches the process that started it through a pidfd, and is started again on the same
ports by this agent if it dies.
"""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed

from broker.machine import open_pidfd
from broker.tickets import SIZE, VARIABLE

from .errors import BrokerLostError, RpcTimeoutError
from .options import DEFAULT_BROKER, DEFAULT_INIT_METHOD, RpcBackendOptions

logger = logging.getLogger(__name__)
_dist: Any = torch.distributed  # it exports what it offers only in part

_static_count = itertools.count()
_leftover: list[subprocess.Popen[bytes]] = []


class EmbeddedBroker:
    """A broker that this process has started.

    Args:
        host: the address to listen on.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.address = ""
        self._data_port = "0"
        # Each that is started in the place of one that died knows the sessions of that one.
        self._secret = secrets.token_hex(SIZE)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._descriptor: int | None = None

    def start(self, timeout: float = 20.0) -> str:
        """Start it; returns its address once it listens.

        Raises:
            BrokerLostError: it ended, or did not say that it listens.
        """
        for process in [p for p in _leftover if p.poll() is not None]:
            _leftover.remove(process)
        # A restart takes the ports of the one that died: workers reconnect to them.
        bind = self.address or f"tcp://{self.host}:0"
        reader, writer = os.pipe()
        try:
            command = [
                sys.executable,
                "-c",
                # Not `-m broker`: a broker.py in the script's folder would be found first.
                f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); "
                "from broker.cli import main; main()",
                "broker",
                "--bind",
                bind,
                "--ready-fd",
                str(writer),
                "--watch-pid",
                str(os.getpid()),
                "--data-port",
                self._data_port,
                "--idle-exit",
            ]
            self._process = subprocess.Popen(
                command,
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, VARIABLE: self._secret},
            )
        finally:
            os.close(writer)
        try:
            line = _read_line(reader, timeout)
        finally:
            os.close(reader)
        if not line:
            code = self._process.poll()
            self._process.kill()
            self._process.wait()
            raise BrokerLostError(
                "The broker that this process started "
                + (
                    f"ended with code {code}"
                    if code is not None
                    else f"did not listen within {timeout:g} s"
                )
                + "; its messages are above. Start one by hand with `zrpc broker` and give its address "
                "(broker=..., or ZRPC_BROKER)."
            )
        self.address, self._data_port = line.split()
        return self.address

    def watch(self, service: Any) -> None:
        """Start it again whenever it dies, from the agent's service thread."""
        process = self._process
        descriptor = open_pidfd(process.pid) if process is not None else None
        self._descriptor = descriptor
        if descriptor is None:
            return

        def ended() -> None:
            self._close_descriptor()
            if process is not None:
                process.wait()
            if self._stopped:
                return
            logger.warning(
                "the broker of this job (pid %s) has died; it is started again at %s",
                process.pid if process else "?",
                self.address,
            )
            self.start()
            self.watch(service)

        service.watch_descriptor(descriptor, ended)

    def stop_watching(self) -> None:
        """It may end now: its last worker is about to leave."""
        self._stopped = True

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def reap(self, timeout: float) -> None:
        """Collect its exit status, if it ends within ``timeout`` seconds; the service has ended."""
        self._close_descriptor()
        if self._process is not None:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                _leftover.append(self._process)
            self._process = None


def _read_line(descriptor: int, timeout: float) -> str:
    end = time.monotonic() + timeout
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return ""
        chunk = os.read(descriptor, 4096)
        if not chunk:
            break
        data += chunk
    return data.decode().strip()


class Meeting:
    """Where this worker found its broker.

    Attributes:
        address: the broker's.
        rank: this worker's, -1 for none.
        world_size: 0 for a dynamic job.
        broker: the broker, where this process has started it.
        store: kept alive as long as somebody may need it.
    """

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        self.address = address
        self.rank = rank
        self.world_size = world_size
        self.broker: EmbeddedBroker | None = None
        self.store: Any = None


def meet(options: RpcBackendOptions, rank: int, world_size: int) -> Meeting:
    """Find the broker, or start it.

    Args:
        options: of ``init_rpc``.
        rank: -1 where none was given.
        world_size: 0 where none was given.

    Raises:
        ValueError: the rendezvous lacks something (torch's words).
        RpcTimeoutError: nobody published an address in time.
        BrokerLostError: the broker did not start.
    """
    address = options.address()
    if address is not None:
        if world_size and rank < 0:
            # As torch's env:// does: the launcher has said which rank this is.
            if "RANK" not in os.environ:
                raise ValueError(
                    "init_rpc was given a world_size but no rank: rank parameter missing, and "
                    "environment variable RANK expected, but not set."
                )
            rank = int(os.environ["RANK"])
        return Meeting(address, rank, world_size)
    if not world_size and options.init_method == DEFAULT_INIT_METHOD and not _has_environment():
        # Nothing says where to meet: then it is the broker that `zrpc broker` starts.
        if _listens(DEFAULT_BROKER):
            return Meeting(DEFAULT_BROKER, rank, world_size)
        raise BrokerLostError(
            f"init_rpc: no broker listens at {DEFAULT_BROKER} and nothing else says where to meet. Start "
            "one with `zrpc broker`, or give an address (broker=..., ZRPC_BROKER), an init_method, or "
            "MASTER_ADDR, MASTER_PORT, rank and world_size."
        )
    timeout = options.effective_init_timeout()
    limit = datetime.timedelta(seconds=timeout if timeout is not None else 10 * 365 * 86400)
    if world_size:
        store, rank, world_size = next(
            iter(
                _dist.rendezvous(
                    options.init_method, rank=rank, world_size=world_size, timeout=limit
                )
            )
        )
        prefix = f"zrpc/world/{next(_static_count)}"
        return _meet_world(
            _dist.PrefixStore(prefix, store), options, rank, world_size, timeout, limit
        )
    store = _dist._create_store_from_options(options, rank)
    return _meet_any(_dist.PrefixStore("zrpc/any", store), options, rank, timeout)


def _meet_world(
    store: Any,
    options: RpcBackendOptions,
    rank: int,
    world_size: int,
    timeout: float | None,
    limit: datetime.timedelta,
) -> Meeting:
    if rank == 0:
        broker = EmbeddedBroker(_host(options.init_method))
        meeting = Meeting(broker.start(), rank, world_size)
        meeting.broker = broker
        store.set("broker", meeting.address)
    else:
        try:
            store.wait(["broker"], limit)
        except Exception as error:
            raise RpcTimeoutError(
                f"init_rpc of rank {rank}: rank 0, which starts the broker, did not publish its address "
                f"within {timeout:g} s over {options.init_method}: {error}",
                limit=timeout,
                elapsed=timeout,
            ) from None
        meeting = Meeting(store.get("broker").decode(), rank, world_size)
    meeting.store = store
    return meeting


def _meet_any(store: Any, options: RpcBackendOptions, rank: int, timeout: float | None) -> Meeting:
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        number = store.add("number", 0)
        if number:
            address = store.get(f"broker/{number}").decode()
            if _listens(address):
                meeting = Meeting(address, rank, 0)
                break
        if store.add(f"starter/{number}", 1) == 1:
            broker = EmbeddedBroker(_host(options.init_method))
            meeting = Meeting(broker.start(), rank, 0)
            meeting.broker = broker
            store.set(f"broker/{number + 1}", meeting.address)
            store.add("number", 1)
            break
        if end is not None and time.monotonic() > end:
            raise RpcTimeoutError(
                f"init_rpc: the worker that was to start the broker did not publish its address within "
                f"{timeout:g} s over {options.init_method}.",
                limit=timeout,
                elapsed=timeout,
            )
        time.sleep(0.02)
    meeting.store = store
    return meeting


def _listens(address: str) -> bool:
    """Does anybody listen at that control port?"""
    parsed = urlparse(address)
    try:
        with socket.create_connection((parsed.hostname or "", parsed.port or 0), timeout=3):
            return True
    except OSError:
        return False


def _has_environment() -> bool:
    return any(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))


def _host(init_method: str) -> str:
    """The interface for the broker: the rendezvous' host if it is one of ours, else loopback."""
    parsed = urlparse(init_method)
    host = os.environ.get("MASTER_ADDR") if parsed.scheme == "env" else parsed.hostname
    if not host or parsed.scheme == "file":
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(host)
        if ipaddress.ip_address(address).is_loopback:
            return "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((address, 0))
        return address
    except (OSError, ValueError):
        return "127.0.0.1"
