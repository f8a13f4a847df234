"""zrpc: remote procedure calls for PyTorch training scripts, over ZeroMQ.

``import zrpc as rpc`` and use the names of ``torch.distributed.rpc``::

    rpc.init_rpc("trainer0", rank=0, world_size=2)
    rpc.rpc_sync("trainer1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()

See the README for a tour, and ``docs/`` for one topic a page.
"""

from broker import __version__

from . import functions
from .api import (
    _set_rpc_timeout as _set_rpc_timeout,
)
from .api import (
    current_agent,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    register_function,
    register_model,
    register_rref,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    sync_call,
    unregister,
)
from .codec import DecodeError, EncodeError, PickleRefusedError
from .context import CallInfo, current_call
from .errors import (
    AuthenticationError,
    BrokerLostError,
    BusyError,
    CallCancelledError,
    NotInitializedError,
    OwnerDiedError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    UnknownFunctionError,
    UnknownWorkerError,
    WorkerLostError,
)
from .futures import Future, collect_all, wait_all
from .local_copy import LocalCopy
from .models import ModelHandle, get_model
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from .rref import RRef
from .worker_info import WorkerInfo

__all__ = [
    "AuthenticationError",
    "BackendType",
    "BrokerLostError",
    "BusyError",
    "CallCancelledError",
    "CallInfo",
    "DecodeError",
    "EncodeError",
    "Future",
    "LocalCopy",
    "ModelHandle",
    "NotInitializedError",
    "OwnerDiedError",
    "PickleRefusedError",
    "RRef",
    "RemoteError",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "TensorPipeRpcBackendOptions",
    "UnknownFunctionError",
    "UnknownWorkerError",
    "WorkerInfo",
    "WorkerLostError",
    "__version__",
    "collect_all",
    "current_agent",
    "current_call",
    "functions",
    "get_model",
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
    "wait_all",
]
