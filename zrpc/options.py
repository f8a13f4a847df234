"""Options of :func:`zrpc.init_rpc`, constants, and the names that torch gives them."""

from __future__ import annotations

import enum
import math
import os
from typing import Any

from broker.addresses import parse_address

#: Seconds that a call may take where nothing else is said.
DEFAULT_RPC_TIMEOUT_SEC = 60.0
#: "Use the default": a timeout that was not given.
UNSET_RPC_TIMEOUT = -1.0
#: ``shutdown``: no limit.
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
#: Calls of one process under way, past which ``rpc_async`` waits for room.
DEFAULT_MAX_PENDING = 100_000
#: Where ``zrpc broker`` listens, and where workers look for it.
DEFAULT_BROKER = "tcp://127.0.0.1:5555"


class BackendType(enum.Enum):
    """The transports that ``init_rpc(backend=...)`` takes.

    There is one.  ``TENSORPIPE`` is accepted because torch scripts name it; it means the same.
    """

    ZEROMQ = "ZEROMQ"
    TENSORPIPE = "TENSORPIPE"


#: Seconds past which a timeout is none: thirty years.
LONGEST_TIMEOUT = 1e9


def check_timeout(timeout: float, what: str) -> float:
    """Return ``timeout`` as a float; one that nobody lives to see (infinity too) as 0, no limit.

    Raises:
        ValueError: it is negative (other than -1, "the default") or not a number.
        TypeError: it is no number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        total = getattr(timeout, "total_seconds", None)
        if total is None:
            raise TypeError(
                f"{what} must be a number of seconds, not {type(timeout).__name__} {timeout!r}."
            )
        timeout = total()
    if timeout > LONGEST_TIMEOUT:
        return 0.0
    if math.isnan(timeout) or (timeout < 0 and timeout != UNSET_RPC_TIMEOUT):
        raise ValueError(
            f"{what} is {timeout!r}; it must be 0 (no limit) or a positive number of seconds."
        )
    return float(timeout)


class RpcBackendOptions:
    """How an agent works.

    Args:
        rpc_timeout: seconds that a call may take where it says nothing else; 0 for no limit.
        init_method: where workers meet when no ``broker`` is given: ``env://``,
            ``tcp://host:port`` or ``file:///path``.
        num_worker_threads: calls that this worker runs at once, at least 1.
        broker: address of a broker, ``tcp://host:port`` or ``tcp://host:port/job``.
            Default: the environment's ``ZRPC_BROKER``; without it the first worker
            starts a broker and publishes its address through ``init_method``.
        job: name of the job; default the address's, else ``ZRPC_JOB``, else "default".
        init_timeout: seconds that ``init_rpc`` waits for broker and world; default
            ``rpc_timeout``, and where that is 0, no limit.
        max_pending: calls under way past which ``rpc_async`` waits for room.
        local_value: "copy" (``RRef.local_value`` on a worker that is not the owner starts
            fetching a copy) or "strict" (there it raises, as in torch).
        serve_after_exit: a script that ends without ``shutdown`` and has registered
            something serves until the other members have left.
        allow_pickle: send and open pickles.  Without them plain data, arrays and tensors
            still work.
        credit: bytes that may be under way towards one worker before a call waits here.
        device_maps: accepted empty, as torch scripts pass it; see ``set_device_map``.
        devices: accepted empty or with CPU devices only.

    Raises:
        RuntimeError: a negative timeout, ``num_worker_threads`` below 1.
        ValueError: another value that makes no sense, or a ``broker`` that is no address; the
            text names it.

    Example:
        >>> RpcBackendOptions(rpc_timeout=5).rpc_timeout
        5.0
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        broker: str | None = None,
        job: str | None = None,
        init_timeout: float | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        local_value: str = "copy",
        serve_after_exit: bool = True,
        allow_pickle: bool = True,
        credit: int = 64 * 1024 * 1024,
        device_maps: dict[str, dict[Any, Any]] | None = None,
        devices: list[Any] | None = None,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        if isinstance(num_worker_threads, bool) or not isinstance(num_worker_threads, int):
            raise TypeError(f"num_worker_threads must be an integer, got {num_worker_threads!r}")
        if num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive, got {num_worker_threads}")
        if max_pending <= 0:
            raise ValueError(f"max_pending must be positive, got {max_pending}")
        if broker is not None:
            parse_address(broker)
        if local_value not in ("copy", "strict"):
            raise ValueError(f'local_value must be "copy" or "strict", got {local_value!r}')
        if credit < 1024 * 1024:
            raise ValueError(f"credit must be at least 1 MiB (1048576 bytes), got {credit}")
        self.num_worker_threads = num_worker_threads
        self.broker = broker
        self.job = job
        self.init_timeout = (
            None if init_timeout is None else check_timeout(init_timeout, "init_timeout")
        )
        self.max_pending = max_pending
        self.local_value = local_value
        self.serve_after_exit = serve_after_exit
        self.allow_pickle = allow_pickle
        self.credit = credit
        self.device_maps: dict[str, dict[Any, Any]] = {}
        self.devices: list[Any] = []
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: dict[Any, Any]) -> None:
        """Which of our devices go to which of ``to``'s; so far none but an empty map is supported.

        Raises:
            ValueError: the map is not empty: move tensors to the CPU before sending them.
        """
        if device_map:
            raise ValueError(
                f"set_device_map({to!r}, ...): device maps are not supported; tensors travel over "
                "the CPU. Move them there before sending (tensor.cpu())."
            )

    def set_devices(self, devices: list[Any]) -> None:
        """The CUDA devices that calls use; so far none.

        Raises:
            ValueError: one of them is no CPU device.
        """
        for device in devices:
            if str(device) != "cpu":
                raise ValueError(
                    f"set_devices: {device!r} is not supported; calls work on CPU tensors only."
                )

    @property
    def rpc_timeout(self) -> float:
        """Default timeout of a call in seconds; 0 means none."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, value: float) -> None:
        try:
            self._rpc_timeout = check_timeout(value, "rpc_timeout")
            if self._rpc_timeout < 0:
                raise ValueError
        except ValueError:
            raise RuntimeError(f"RPC Timeout must be non-negative, got {value!r}") from None

    def effective_init_timeout(self) -> float | None:
        """Seconds that ``init_rpc`` may take; None for no limit."""
        limit = self.rpc_timeout if self.init_timeout is None else self.init_timeout
        return limit if limit > 0 else None

    def address(self) -> str | None:
        """The broker's address that was given here or in the environment, if any."""
        return self.broker or os.environ.get("ZRPC_BROKER") or None

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name.lstrip('_')}={value!r}" for name, value in sorted(vars(self).items())
        )
        return f"{type(self).__name__}({fields})"


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """torch's name for :class:`RpcBackendOptions`: everything by keyword, and two more that do nothing.

    Args:
        _transports: accepted and ignored.
        _channels: accepted and ignored.
        options: those of :class:`RpcBackendOptions`.
    """

    def __init__(self, *, _transports: Any = None, _channels: Any = None, **options: Any) -> None:
        super().__init__(**options)
