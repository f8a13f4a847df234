"""The functions that training scripts call; names and words as in ``torch.distributed.rpc``."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from broker import messages

from . import context, current, registry, rref
from .agent import Agent
from .current import find_agent, get_agent
from .futures import Future
from .joining import Membership
from .options import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    BackendType,
    RpcBackendOptions,
    check_timeout,
)
from .rendezvous import Meeting, meet
from .rref import RRef
from .worker_info import WorkerInfo, check_name

logger = logging.getLogger(__name__)

_lock = threading.RLock()
_warned: set[str] = set()
_meetings: dict[Agent, Meeting] = {}


def is_available() -> bool:
    """Whether zrpc can be used here: always, where it could be imported."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    init_method: str | None = None,
) -> None:
    """Make this process a worker: it can call others and be called from now on.

    With ``world_size``, returns when all ranks are there.  Without, the worker joins the
    job at once, and workers come and go as they like.

    Args:
        name: unique in the job: letters, digits, ``-``, ``_``, ``:``, under 128.
        backend: accepted as in torch; everything runs on ZeroMQ.  The name of another
            stack ("nccl", "gloo", "tensorpipe") is warned about once.
        rank: this worker's id, from 0; needed with ``world_size`` unless the rendezvous knows it.
        world_size: number of workers, for a job that is fixed.
        rpc_backend_options: see :class:`RpcBackendOptions`.
        init_method: sets ``init_method`` of the options.

    Raises:
        RuntimeError: RPC is initialised already; a bad or taken name; the broker refused.
        TypeError: an argument of the wrong type.
        ValueError: the rendezvous lacks an address or a rank.
        RpcTimeoutError: the world did not come together within ``rpc_timeout`` (or
            ``init_timeout``); the text names the missing ranks.
        BrokerLostError: no broker answered.

    Example:
        >>> import os, zrpc as rpc
        >>> os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        >>> rpc.init_rpc("me", rank=0, world_size=1)
        >>> rpc.rpc_sync("me", max, args=(1, 2))
        2
        >>> rpc.shutdown()
    """
    check_name(name)
    _check_backend(backend)
    options = rpc_backend_options if rpc_backend_options is not None else RpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, got {options!r:.200}"
        )
    if init_method is not None:
        options.init_method = init_method
    for what, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"Argument {what} must be of type int but got {value!r}")
    if world_size is not None and (world_size < 0 or (world_size > 0 and rank >= world_size)):
        raise ValueError(
            f"rank {rank} and world_size {world_size} do not fit: ranks go from 0 to world_size - 1."
        )
    with _lock:
        existing = current._current
        if existing is not None and existing.process == os.getpid():
            raise RuntimeError(
                f"RPC is already initialized in this process, as worker {existing.name!r}. "
                "Call shutdown() first."
            )
        agent = _start_agent(name, options, rank, world_size or 0)
        current.set_agent(agent)


def _start_agent(name: str, options: RpcBackendOptions, rank: int, world_size: int) -> Agent:
    meeting = meet(options, rank, world_size)
    agent = Agent(name, options)
    membership = Membership(
        agent, meeting.address, rank=meeting.rank, world_size=meeting.world_size, job=options.job
    )
    if meeting.broker is not None:
        # From here on: if joining takes long, the broker must be looked after already.
        membership.on_started(meeting.broker.watch)
        membership.before_goodbye = meeting.broker.stop_watching
    try:
        membership.join(options.effective_init_timeout())
    except BaseException:
        _let_go(meeting)
        raise
    if meeting.world_size:
        # The world is together: nobody needs the store any more, and its port may be wanted.
        meeting.store = None
    _meetings[agent] = meeting
    return agent


def _let_go(meeting: Meeting) -> None:
    if meeting.broker is not None:
        meeting.broker.stop_watching()
        meeting.broker.reap(0.3)
    meeting.store = None


def _check_backend(backend: Any) -> None:
    if backend is None or isinstance(backend, BackendType):
        return
    if isinstance(backend, str):
        if backend.upper() not in ("ZEROMQ", "ZRPC") and backend not in _warned:
            _warned.add(backend)
            warnings.warn(
                f"init_rpc(backend={backend!r}): zrpc runs on ZeroMQ; the name has no effect.",
                stacklevel=3,
            )
        return
    raise TypeError(
        f"Argument backend must be a member of BackendType or a string, got {backend!r}"
    )


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the job and stop this process's agent.

    Args:
        graceful: wait until our calls and handlers have ended and, in a world of fixed
            size, until every member that lives has called shutdown too (after 10 s a line
            on stderr names those that have not).  False: leave at once.
        timeout: seconds for all this; 0 for no limit.

    Raises:
        RuntimeError: RPC is not initialised, or a graceful shutdown is called by a handler,
            for whose end it would wait.
        RpcTimeoutError: the others did not come in time; names them.  This process is
            down all the same.
    """
    limit = check_timeout(timeout, "timeout")
    if graceful and context.handler_call.get() is not None:
        raise RuntimeError(
            "shutdown was called inside a call that this worker serves, for whose end it would wait. "
            "Call it from the script's own thread, or leave at once with shutdown(graceful=False)."
        )
    with _lock:
        agent = current._current
        if agent is None or agent.process != os.getpid():
            get_agent()
            raise AssertionError("unreachable")
        _stop_agent(agent, graceful, limit if limit > 0 else None)


def _stop_agent(agent: Agent, graceful: bool, timeout: float | None) -> None:
    meeting = _meetings.pop(agent, None)
    try:
        agent.membership.leave(graceful, timeout)
    finally:
        if current._current is agent and not agent.exiting:
            current.set_agent(None)
        if meeting is not None:
            _let_go(meeting)


def rpc_sync(
    to: Any,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call ``func`` on worker ``to`` and return its result.

    Args:
        to: a worker's name, rank or :class:`WorkerInfo`, or something callable that
            returns one (``rref.owner``).
        func: a function that both sides can import, one registered on the callee (by its
            name), or a lambda, closure or callable object, which travels by value.
        args: a tuple of arguments; a tensor or other single thing is one argument.
        kwargs: keyword arguments.
        timeout: seconds; 0 for no limit; default: what remains of the call that this code
            serves, else ``rpc_timeout`` of the options.

    Raises:
        RpcTimeoutError: no result in time; the callee is told to stop.
        UnknownWorkerError: nobody of that name or rank.
        WorkerLostError: the callee died or left.
        Exception: what ``func`` raised there: of its own type, and a RuntimeError.

    Example:
        >>> rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))  # doctest: +SKIP
        tensor([2., 2.])
    """
    return get_agent().call_sync(to, func, args, kwargs, timeout)


#: Another name for :func:`rpc_sync`.
sync_call = rpc_sync


def rpc_async(
    to: Any,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Call ``func`` on worker ``to`` and return a :class:`~zrpc.futures.Future` at once.

    Arguments as in :func:`rpc_sync`; errors of the call come out of the future.  A large
    tensor among the arguments is read until it has been sent: do not change it before
    the future is done.

    Raises:
        UnknownWorkerError, TypeError, ValueError: what can be known before sending.
    """
    future = get_agent().call_async(to, func, args, kwargs, timeout)
    collected = getattr(_thread_local, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


def remote(
    to: Any,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call ``func`` on worker ``to``, leave the result there, and return an RRef to it at once.

    ``remote("server", "name")`` of a registered object gives an RRef to that very object.
    Arguments as in :func:`rpc_sync`; errors come out when the RRef is used.
    """
    return rref.make_remote(get_agent(), to, func, args, kwargs, timeout)


def get_worker_info(worker_name: Any = None) -> WorkerInfo:
    """Who a worker is.

    Args:
        worker_name: a name or rank; None for this worker.

    Raises:
        UnknownWorkerError: nobody of that name or rank.
    """
    agent = get_agent()
    if worker_name is None:
        return agent.info
    agent.check_alive()
    return agent.directory.resolve(worker_name, agent.control_timeout()).info


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds; 0 for none."""
    return get_agent().default_timeout


def _set_rpc_timeout(timeout: float) -> None:
    """Change the default timeout of later calls."""
    value = check_timeout(timeout, "timeout")
    get_agent().default_timeout = value


def current_agent() -> Agent:
    """The agent that this code speaks to: a handler's own, else the process's."""
    return get_agent()


_thread_local = threading.local()


# ------------------------------------------------------------------ registered things


def register_function(name: str, fn: Callable[..., Any]) -> None:
    """Let others call ``fn`` by ``name``: ``rpc_sync("server", name, args=(x,))``.

    May be called before ``init_rpc``; a call that comes first waits up to 10 s for it.

    Raises:
        ValueError: the name is taken by something else, or no name.
    """
    registry.default_registry.register_function(name, fn)


def register_rref(obj: Any, name: str | None = None) -> None:
    """Let others get an RRef to ``obj``: ``remote("server", name)``.

    The RRef knows the object's public methods, and only those.

    Args:
        obj: any object.
        name: default: the name that the calling module holds it by.
    """
    registry.default_registry.register_rref(obj, name)


def unregister(name: str) -> None:
    """Take back what was registered as ``name``.

    Raises:
        LookupError: nothing was; the text lists what is.
    """
    registry.default_registry.unregister(name)


def register_model(name: str, module: torch.nn.Module) -> None:
    """Let others use a model: ``get_model("server", name)(x)`` runs ``forward`` here."""
    registry.default_registry.register_model(name, module)


# ------------------------------------------------------------------ the end of a script


def _at_exit() -> None:
    agent = current._current
    if agent is None or agent.process != os.getpid():
        return
    serves = (
        agent.options.serve_after_exit
        and agent.ended is None
        and agent.registry.names()
        and not getattr(sys, "last_type", None)
        and threading.current_thread() is threading.main_thread()
    )
    try:
        if serves:
            _serve_until_others_left(agent)
        # An error in a thread of the user's that still waits would be printed for nothing.
        agent.exiting = agent.service.exiting = True
        with _lock:
            _stop_agent(agent, False, None)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            logger.debug("leaving at exit: %s", error)


def _serve_until_others_left(agent: Agent) -> None:
    names = ", ".join(agent.registry.names())
    done = threading.Event()
    agent.service.ask(messages.Linger, lambda value, error: done.set())
    if done.wait(0.2):
        return
    print(
        f"zrpc: worker {agent.name!r} has reached the end of its script and still serves {names} until the "
        "other workers have left; Ctrl-C ends it (serve_after_exit=False in the options turns this off).",
        file=sys.stderr,
        flush=True,
    )
    done.wait()
    agent.wait_quiet(5.0)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

__all__ = [
    "find_agent",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "register_function",
    "register_model",
    "register_rref",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "sync_call",
    "unregister",
]
