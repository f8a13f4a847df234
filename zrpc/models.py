"""Handles of models that live on other workers: ``get_model(worker)(x)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import builtin
from .context import handler_agent
from .current import get_agent
from .futures import Future
from .options import UNSET_RPC_TIMEOUT, check_timeout
from .rref import RRef
from .worker_info import WorkerInfo

if TYPE_CHECKING:
    import torch

    from .agent import Agent


def _model(name: str | None) -> torch.nn.Module:
    agent = handler_agent.get()
    assert agent is not None
    return agent.registry.model(name).value  # type: ignore[no-any-return]


def _forward(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    return _model(name)(*args, **kwargs)


def _parameters(name: str) -> list[RRef[Any]]:
    return [RRef(parameter) for parameter in _model(name).parameters()]


def _state_dict(name: str) -> dict[str, Any]:
    return dict(_model(name).state_dict())


def _load_state_dict(name: str, state: dict[str, Any], strict: bool) -> Any:
    result = _model(name).load_state_dict(state, strict=strict)
    return list(result.missing_keys), list(result.unexpected_keys)


def _train(name: str, mode: bool) -> None:
    _model(name).train(mode)


class ModelHandle:
    """A model on another worker; calling it runs ``forward`` there.

    Made by :func:`zrpc.get_model`.  All methods raise what the model raises, and
    :class:`~zrpc.errors.RpcTimeoutError` after ``timeout``.

    Attributes:
        worker: where it lives.
        name: the name that it is registered by.
        timeout: seconds that each of its calls may take; 0 for no limit, -1 for the
            options' default.
    """

    def __init__(self, agent: Agent, worker: WorkerInfo, name: str, timeout: float) -> None:
        self._agent = agent
        self.worker = worker
        self.name = name
        self.timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's ``forward`` (hooks included) there and return its result."""
        return self._call(_forward, args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same, returning a future."""
        return self._agent.call_async(
            self.worker, _forward, (self.name, args, kwargs), None, self.timeout
        )

    def parameters(self) -> list[RRef[Any]]:
        """RRefs to its parameters, in the model's order."""
        return list(self._call(_parameters))

    def state_dict(self) -> dict[str, Any]:
        """A copy of its state."""
        return dict(self._call(_state_dict))

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load a state there; returns missing and unexpected keys."""
        missing, unexpected = self._call(_load_state_dict, dict(state_dict), strict)
        return list(missing), list(unexpected)

    def train(self, mode: bool = True) -> ModelHandle:
        """Put it in training mode (or not); returns this handle."""
        self._call(_train, mode)
        return self

    def eval(self) -> ModelHandle:
        """Put it in evaluation mode; returns this handle."""
        return self.train(False)

    def _call(self, function: Any, *args: Any) -> Any:
        return self._agent.call_sync(self.worker, function, (self.name, *args), None, self.timeout)

    def __repr__(self) -> str:
        return f"<model {self.name!r} on {self.worker.name!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self.worker, self.name, self.timeout)


def _handle(worker: WorkerInfo, name: str, timeout: float) -> ModelHandle:
    return ModelHandle(get_agent(), worker, name, timeout)


def get_model(
    worker: Any, name: str | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> ModelHandle:
    """A handle of a model that ``worker`` has registered (or will, within 10 s).

    Args:
        worker: its name, rank, or :class:`~zrpc.WorkerInfo`.
        name: the model's name; not needed where there is only one.
        timeout: seconds for finding it and for each call of the handle.

    Raises:
        UnknownWorkerError: no such worker.
        UnknownFunctionError: no such model; the text lists those that there are.
    """
    agent = get_agent()
    timeout = check_timeout(timeout, "timeout")
    member = agent.directory.resolve(worker, agent.control_timeout())
    found = agent.call_sync(member, builtin.find_model, (name,), None, timeout)
    return ModelHandle(agent, member.info, found, timeout)
