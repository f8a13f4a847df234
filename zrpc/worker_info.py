"""Who a worker is: the public :class:`WorkerInfo`, and what an agent knows beside it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from broker.messages import member_map

_NAME = re.compile(r"^[A-Za-z0-9\-_:]{1,127}$")


def check_name(name: Any) -> str:
    """Return ``name`` if it may be a worker's.

    Raises:
        RuntimeError: it is no string or has the wrong form (torch's words).
    """
    if not isinstance(name, str):
        raise RuntimeError(
            f"Argument name must be of type str but got type {type(name).__name__}: {name!r}"
        )
    if not _NAME.match(name):
        raise RuntimeError(
            "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than "
            f"128 chars, but got {name!r} of length {len(name)}"
        )
    return name


@dataclass(frozen=True, repr=False, slots=True)
class WorkerInfo:
    """A worker's name and id (its rank).

    Args:
        name: unique in its job.
        id: its rank, an integer from 0.

    Raises:
        RuntimeError: a name that no worker can have.

    Example:
        >>> WorkerInfo("trainer", 1)
        WorkerInfo(id=1, name=trainer)
    """

    name: str
    id: int
    #: The incarnation that was meant, where it is known; 0 elsewhere.  Not compared.
    session: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        if isinstance(self.id, bool) or not isinstance(self.id, int) or not 0 <= self.id < 1 << 31:
            raise TypeError(f"a worker's id is an integer from 0, not {self.id!r}")

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(slots=True)
class Member:
    """What control said of a session."""

    info: WorkerInfo
    session: int
    host: str
    pid: int
    clock: str
    machine: str
    script: str

    @classmethod
    def from_map(cls, values: dict[str, Any]) -> Member:
        """Read what :func:`broker.messages.member_map` wrote."""
        session = int(values["session"])
        return cls(
            WorkerInfo(values["worker"], int(values["rank"]), session),
            session,
            str(values["host"]),
            int(values["pid"]),
            str(values["clock"]),
            str(values["machine"]),
            str(values["script"]),
        )

    def as_map(self) -> dict[str, Any]:
        """The same as what :meth:`from_map` read."""
        return member_map(
            session=self.session,
            worker=self.info.name,
            rank=self.info.id,
            host=self.host,
            pid=self.pid,
            clock=self.clock,
            machine=self.machine,
            script=self.script,
        )

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.info.name
