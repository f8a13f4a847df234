"""Functions that RRefs call on their owners.  They travel by name, like any other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from . import codec, errors
from .context import handler_agent, handler_call
from .futures import Future
from .options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from .agent import Agent
    from .rref import RRef

#: Special methods that a proxy may call.
CALLABLE_DUNDERS = frozenset(
    f"__{name}__"
    for name in [
        "call",
        "len",
        "getitem",
        "setitem",
        "delitem",
        "contains",
        "str",
        "repr",
        "int",
        "float",
        "bool",
        "hash",
        "iter",
        "next",
        "enter",
        "exit",
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "neg",
        "abs",
        "and",
        "or",
        "xor",
        "invert",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "radd",
        "rsub",
        "rmul",
        "rtruediv",
    ]
)


#: Seconds that a call of a name which is not registered yet waits for it.
REGISTRATION_WAIT = 10.0


class Deferred:
    """Returned by a built-in function whose result comes later."""

    __slots__ = ("future",)

    def __init__(self, future: Future[Any]) -> None:
        self.future = future


def _agent() -> Agent:
    agent = handler_agent.get()
    assert agent is not None, "built-in functions run in handlers only"
    return agent


def fetch(rref: list[int]) -> Any:
    """The value of one of our RRefs, when it is there."""
    return Deferred(_agent().references.own((rref[0], rref[1])).future)


def call_method(rref: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a method of the value of an RRef, when it is there."""
    agent = _agent()
    if not isinstance(rref, (list, tuple)):
        # A method of an RRef that travelled with it: to the owner, or to some other worker.
        if not rref.is_owner():
            return getattr(rref.rpc_sync(), name)(*args, **kwargs)
        rref = rref._id
    entry = agent.references.own((rref[0], rref[1]))
    if entry.future.done():
        return _invoke(entry.future.value(), entry.methods, name, args, kwargs)
    result: Future[Any] = agent.new_future()

    def ready(future: Any) -> None:
        try:
            value = _invoke(future.value(), entry.methods, name, args, kwargs)
        except BaseException as error:
            result.fail(error)
            return
        if isinstance(value, Deferred):
            value.future.add_done_callback(lambda done: _copy(done, result))
        else:
            result.complete(value)

    entry.future.add_done_callback(ready)
    return Deferred(result)


def _copy(done: Any, result: Future[Any]) -> None:
    try:
        value = done.value()
    except BaseException as error:
        result.fail(error)
    else:
        result.complete(value)


def _invoke(
    value: Any, methods: list[str] | None, name: str, args: Any, kwargs: dict[str, Any]
) -> Any:
    if methods is not None and name not in methods:
        raise AttributeError(
            f"the registered {type(value).__name__} has no public method {name!r}; it has: "
            f"{', '.join(methods) or 'none'}."
        )
    method = getattr(value, name)
    result = method(*args, **kwargs)
    if getattr(method, "_zrpc_async_execution", False) or hasattr(
        method, "_wrapped_async_rpc_function"
    ):
        import torch

        if not isinstance(result, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future "
                f"object, but got {type(result).__module__}.{type(result).__qualname__}"
            )
        return Deferred(result)  # type: ignore[arg-type]
    return result


def find_model(name: str | None) -> Any:
    """The name of the model that ``name`` means here, when it is registered (for 10 s)."""
    agent = _agent()
    registry = agent.registry
    try:
        return registry.model(name).name
    except LookupError:
        if (name is None and registry.models()) or (name and registry.find(name)):
            raise
    result: Future[Any] = agent.new_future()
    waiter = registry.when_registered(
        name, lambda entry: None if result.done() else result.complete(entry.name)
    )

    def give_up() -> None:
        waiter.cancel()
        if not result.done():
            try:
                result.complete(registry.model(name).name)
            except LookupError as error:
                result.fail(
                    errors.UnknownFunctionError(
                        f"{error} (Worker {agent.name!r} waited {time.monotonic() - start:.1f} s for it.)",
                        ran="no",
                    )
                )

    call = handler_call.get()
    start = time.monotonic()
    limit = start + REGISTRATION_WAIT
    if call is not None and call.deadline is not None:
        limit = min(limit, call.deadline - 0.1)
    agent.service.call_at(limit, give_up)
    return Deferred(result)


def copy_here(rref: RRef[Any]) -> Any:
    """A copy of an RRef's value, made on this worker."""
    call = handler_call.get()
    # The limit is the copy's: where it has none, its fetch has none either.
    unlimited = call is not None and call.deadline is None
    value = rref.to_here(0.0 if unlimited else UNSET_RPC_TIMEOUT)
    if rref.is_owner():
        encoded = codec.encode(value)
        value = codec.decode(encoded.body, [bytearray(buffer) for buffer in encoded.buffers])
    return value


class Held:
    """Holds a reference on a worker for ``RRef.share``."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref
