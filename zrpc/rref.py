"""RRefs: references to values that live on some worker.

The class is the face that user code sees; the bookkeeping behind it is
:mod:`zrpc.references`.  An RRef of the owner holds the value's entry; one of any other
worker holds a *fork*, and gives it up in ``__del__`` (which only queues).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from . import builtin, errors
from .codec import DecodeError
from .current import get_agent
from .futures import Future
from .local_copy import LocalCopy
from .options import UNSET_RPC_TIMEOUT, check_timeout
from .references import ForkId, OwnedValue, Packing, RRefId
from .remote_method import RemoteMethod
from .rref_types import add_reference_type
from .worker_info import Member, WorkerInfo

if TYPE_CHECKING:
    from .agent import Agent

T = TypeVar("T")
S = TypeVar("S")

_CREATION_TIMED_OUT = (
    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
    "does not exist."
)


@add_reference_type
class RRef(Generic[T]):
    """A reference to a value on a worker.

    ``RRef(value)`` makes one to a value of this worker, which then is its owner;
    :func:`zrpc.remote` makes one to what a function returns elsewhere.  An RRef may be
    passed in arguments and results, in any container.  The value lives until no RRef to
    it is left, on any worker.

    Args:
        value: the value.
        type_hint: accepted as in torch; not used.

    Raises:
        RuntimeError: no agent: ``init_rpc`` has not been called.
    """

    _agent: Agent
    _id: RRefId
    _fork: ForkId | None
    _entry: OwnedValue | None
    _owner: WorkerInfo
    _creation: Future[Any] | None
    _methods: list[str] | None
    _by_name: bool
    _creator_rank: int
    _minter_rank: int
    _shares: list[RRef[Any]]

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = get_agent(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "`rpc.init_rpc`)?"
        )
        entry = agent.references.new_value()
        entry.set(value)
        self._fill(agent, entry.id, None, agent.info, entry=entry)

    def _fill(
        self,
        agent: Agent,
        rref: RRefId,
        fork: ForkId | None,
        owner: WorkerInfo,
        *,
        entry: OwnedValue | None = None,
        creation: Future[Any] | None = None,
        methods: list[str] | None = None,
        by_name: bool = False,
        creator_rank: int | None = None,
        minter_rank: int | None = None,
    ) -> None:
        self._agent = agent
        self._id = rref
        self._fork = fork
        self._owner = owner
        self._entry = entry
        self._creation = creation
        self._methods = methods
        self._by_name = by_name
        self._creator_rank = agent.info.id if creator_rank is None else creator_rank
        self._minter_rank = agent.info.id if minter_rank is None else minter_rank
        self._shares = []

    def __del__(self) -> None:
        # Only queues: this may run in any thread, with any lock held.
        fork = getattr(self, "_fork", None)
        if fork is not None:
            agent = self._agent
            if agent.ended is None and agent.process == os.getpid():
                agent.references.release_later(fork)

    # ------------------------------------------------------------ who

    def is_owner(self) -> bool:
        """Does the value live on this worker?"""
        return self._entry is not None

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        return self._owner

    def owner_name(self) -> str:
        """Its name."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Is the reference known to exist?  False only while a ``remote`` has not been answered."""
        if self._creation is None:
            return True
        return self._creation.done() and self._creation.exception() is None

    # ------------------------------------------------------------ the value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value: a copy, or at the owner the value itself.

        Waits until it is there.

        Args:
            timeout: seconds; 0 for no limit, default that of the options.

        Raises:
            RpcTimeoutError: it did not come in time; a later call may succeed.
            OwnerDiedError: the owner was lost, and the value with it.
            Exception: whatever the function of ``remote`` raised.
        """
        if self._entry is not None:
            return self._wait_here(timeout)
        if self._creation is None or self._creation.done():
            self._check_creation()
            value: T = self._calling(
                lambda member: self._agent.call_sync(
                    member, builtin.fetch, (self._id,), None, timeout, f"to_here() of {self}"
                )
            )
            return value
        return self._wait_there(self.to_here_async(timeout))

    def fetch(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The same as :meth:`to_here`: the value, synchronously."""
        return self.to_here(timeout)

    def to_here_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Future[T]:
        """Like :meth:`to_here`, but returns a future at once."""
        if self._entry is not None:
            return self._entry.future
        self._check_creation()
        future: Future[T] = self._calling(
            lambda member: self._agent.call_async(
                member, builtin.fetch, (self._id,), None, timeout, f"to_here() of {self}"
            )
        )
        creation = self._creation
        if creation is not None and not creation.done():
            # A creation that times out, or whose owner dies, ends the wait for its value.
            creation.add_done_callback(lambda done: self._creation_ended(future))
        return future

    def _creation_ended(self, future: Future[Any]) -> None:
        try:
            self._check_creation()
        except errors.RpcError as error:
            if not future.done():
                future._cancel_with(error)

    def _wait_there(self, future: Future[T]) -> T:
        try:
            return future.wait()
        except errors.OwnerDiedError:
            raise
        except errors.WorkerLostError as error:
            raise self._owner_error(error) from None
        except BaseException:
            if not future.done():  # Ctrl-C
                future.cancel()
            raise

    def local_value(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """At the owner: the value itself, waiting until it is there.

        Elsewhere this starts fetching a copy and returns a handle at once
        (:class:`~zrpc.local_copy.LocalCopy`): its ``wait()`` gives the value, and what is
        done to it before that is applied to the copy, in order.  With
        ``RpcBackendOptions(local_value="strict")`` it raises there, as in torch.

        Args:
            timeout: seconds, 0 for no limit; default at the owner no limit, elsewhere that of
                the options.

        Raises:
            RuntimeError: "strict", and this worker is not the owner.
            RpcTimeoutError: the value did not come in time.
        """
        if self._entry is not None:
            return self._wait_here(0.0 if timeout == UNSET_RPC_TIMEOUT else timeout)
        if self._agent.options.local_value == "strict":
            me = self._agent.info
            raise RuntimeError(
                f"For UserRRef(rref_id={self._id_text()}, fork_id={self._fork_text()}), can't call "
                f"localValue() on user {me}. Call it on owner {self._owner}"
            )
        return LocalCopy(self.to_here_async(timeout))

    def _wait_here(self, timeout: float) -> T:
        assert self._entry is not None
        future: Future[T] = self._entry.future
        if future.done():
            return future.value()
        limit, _ = self._agent.deadline_for(timeout)
        with self._agent.pool.blocked():
            return future.wait(limit)

    def copy(self, to: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[T]:
        """A new RRef, owned by ``to``, to a copy of the value.

        Args:
            to: a worker's name, rank or :class:`WorkerInfo`; default this worker.
            timeout: seconds for the copy to be made.

        The value goes from owner to ``to`` directly, not over this worker.
        """
        agent = self._agent
        return make_remote(
            agent, agent.info if to is None else to, builtin.copy_here, (self,), None, timeout
        )

    def share(self, *workers: Any, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        """Hand out references ahead: each of ``workers`` holds one as long as this RRef lives.

        No data moves.  Returns when all have theirs.
        """
        agent = self._agent
        shares = [make_remote(agent, w, builtin.Held, (self,), None, timeout) for w in workers]
        for share in shares:
            if share._creation is not None:
                share._creation.wait()
        self._shares.extend(shares)

    # ------------------------------------------------------------ methods

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy whose methods run on the owner: ``rref.rpc_sync().view(1, 4)``."""
        return Proxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The same, each method returning a future."""
        return Proxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The same, each method returning an RRef to its result."""
        return Proxy(self, "remote", timeout)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            methods = self._method_names()
            if methods is not None and name in methods:
                return RemoteMethod(self, name)
            if methods is not None:
                raise AttributeError(
                    f"The registered object behind {self} has no public method {name!r}; it has: "
                    f"{', '.join(methods) or 'none'}."
                )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}. "
            f"rref.rpc_sync().{name}(...) calls a method on the owner; rref.to_here() fetches a copy."
        )

    def _creation_ok(self) -> bool:
        """False where the creation has failed; of an object by name, its answer is waited for."""
        creation = self._creation
        if creation is None or not self._by_name:
            return True
        return creation.exception() is None

    def _method_names(self) -> list[str] | None:
        if self._methods is None and self._by_name and self._creation is not None:
            answer = self._creation.wait()
            if isinstance(answer, list):
                self._methods = [str(item) for item in answer]
        if self._entry is not None:
            return self._entry.methods
        return self._methods

    # ------------------------------------------------------------ inside

    def _check_creation(self) -> None:
        creation = self._creation
        if creation is not None and creation.done():
            error = creation.exception()
            if isinstance(error, errors.RpcTimeoutError) and not error.remote:
                raise errors.RpcTimeoutError(
                    f"{_CREATION_TIMED_OUT} ({error})",
                    worker=error.worker,
                    function=error.function,
                    elapsed=error.elapsed,
                    limit=error.limit,
                    ran=error.ran,
                )
            if isinstance(error, errors.WorkerLostError):
                raise self._owner_error(error)
            if isinstance(error, errors.RpcError) and not error.remote:
                raise error

    def _member(self) -> Member:
        agent = self._agent
        dead = agent.references.dead_owners.get(self._owner.session)
        if dead is not None:
            raise errors.owner_died(self._owner.name, str(self), dead)
        return agent.directory.require(self._owner.session, self._owner.name)

    def _calling(self, call: Callable[[Member], S]) -> S:
        """Make a call to the owner; its loss is the owner's death."""
        self._agent.check_alive()
        try:
            return call(self._member())
        except errors.OwnerDiedError:
            raise
        except errors.WorkerLostError as error:
            raise self._owner_error(error) from None

    def _owner_error(self, error: errors.WorkerLostError) -> errors.WorkerLostError:
        """The loss of our owner is its death; that of anybody else is what it is."""
        if error.remote or error.worker != self._owner.name:
            return error
        reason = self._agent.references.dead_owners.get(self._owner.session, "")
        return errors.owner_died(self._owner.name, str(self), reason)

    def _fork_for(self, packing: Packing) -> list[Any]:
        agent = self._agent
        agent.check_alive()
        if self._entry is not None:
            agent.references.readopt(self._entry)
        fork = packing.mint(self._id, self._owner.session)
        return [
            list(self._id),
            list(fork),
            self._owner.session,
            self._owner.name,
            self._owner.id,
            self._creator_rank,
            agent.info.id,
            self._method_names() if self._creation_ok() else None,
        ]

    def _id_text(self) -> str:
        return f"GloballyUniqueId(created_on={self._creator_rank}, local_id={self._id[1]})"

    def _fork_text(self) -> str:
        number = self._fork[1] if self._fork is not None else 0
        return f"GloballyUniqueId(created_on={self._minter_rank}, local_id={number})"

    def __str__(self) -> str:
        if self._entry is not None:
            return f"OwnerRRef({self._id_text()})"
        return f"UserRRef(RRefId = {self._id_text()}, ForkId = {self._fork_text()})"

    __repr__ = __str__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "An RRef cannot be copied by copy.copy(); rref.copy(to) copies the value."
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()


class Proxy:
    """What ``rref.rpc_sync()``, ``rpc_async()`` and ``remote()`` return."""

    __slots__ = ("_kind", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], kind: str, timeout: float) -> None:
        self._rref = rref
        self._kind = kind
        self._timeout = check_timeout(timeout, "timeout")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in builtin.CALLABLE_DUNDERS:
            raise AttributeError(name)
        rref, kind, timeout = self._rref, self._kind, self._timeout
        rref._check_creation()
        agent = rref._agent

        def method(*args: Any, **kwargs: Any) -> Any:
            arguments = (rref._id, name, args, kwargs)

            function = builtin.call_method
            label = f"method {name!r} of {rref}"

            def call(member: Member) -> Any:
                if kind == "rpc_sync":
                    return agent.call_sync(member, function, arguments, None, timeout, label)
                if kind == "rpc_async":
                    return agent.call_async(member, function, arguments, None, timeout, label)
                return make_remote(agent, member, function, arguments, None, timeout, label)

            return rref._calling(call)

        method.__name__ = name
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return self.__getattr__("__call__")(*args, **kwargs)


def make_remote(
    agent: Agent,
    to: Any,
    function: Any,
    args: Any,
    kwargs: Any,
    timeout: float = UNSET_RPC_TIMEOUT,
    label: str | None = None,
) -> RRef[Any]:
    """See :func:`zrpc.remote`."""
    agent.check_alive()
    member = to if isinstance(to, Member) else agent.directory.resolve(to, agent.control_timeout())
    rref: RRef[Any] = RRef.__new__(RRef)
    creation: Future[Any] = agent.new_future()
    by_name = isinstance(function, str) and ":" not in function

    def finish(assembly: Any, error: BaseException | None) -> None:
        answer = None
        if error is None:
            try:
                answer = agent.caller.open_reply(assembly)
            except BaseException as failure:
                error = failure
        if creation.done():
            return
        if error is not None:
            creation.fail(error)
            if rref._entry is not None and not rref._entry.future.done():
                rref._entry.future.fail(error)
        else:
            creation.complete(answer)

    if member.session == agent.session:
        entry = agent.references.new_value()
        rref._fill(
            agent, entry.id, None, agent.info, entry=entry, creation=creation, by_name=by_name
        )
        agent.caller.call_remote(
            member, function, args, kwargs, timeout, (entry.id, entry.id), finish, label
        )
        return rref
    # Rule 1 of rref_ledger: the row goes to control before the message goes to data.
    rref_id, fork = agent.references.new_fork(member.session)
    rref._fill(agent, rref_id, fork, member.info, creation=creation, by_name=by_name)
    agent.caller.call_remote(
        member, function, args, kwargs, timeout, (rref_id, fork), finish, label
    )
    return rref


def rref_from_data(
    agent: Agent,
    data: Any,
    forks: dict[ForkId, tuple[RRefId, int]],
    made: dict[ForkId, Any],
    own: dict[RRefId, OwnedValue],
) -> tuple[RRef[Any], ForkId]:
    """Make the RRef that ``_fork_for`` described at the sender.

    Args:
        forks: those that the message has announced, not yet an RRef's.
        made: RRefs made of them.
        own: entries of values of ours that came back in the message.

    Raises:
        DecodeError: it is not of the form that it writes, or its fork was not announced.
    """
    try:
        (
            (rref_on, rref_number),
            (fork_on, fork_number),
            owner,
            name,
            rank,
            creator,
            minter,
            methods,
        ) = data
        fork = (int(fork_on), int(fork_number))
        rref_id = (int(rref_on), int(rref_number))
        announced = forks.get(fork)
        if announced is None or announced != (rref_id, owner):
            raise DecodeError("an RRef whose fork the message did not announce")
        if fork in made:
            return made[fork], fork
        rref: RRef[Any] = RRef.__new__(RRef)
        if owner == agent.session:
            rref._fill(
                agent, rref_id, None, agent.info, entry=own[rref_id], creator_rank=int(creator)
            )
            return rref, fork
        info = WorkerInfo(name, rank, owner)
        names = None if methods is None else [str(item) for item in methods]
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"an RRef that cannot be read: {error}") from None
    rref._fill(
        agent,
        rref_id,
        fork,
        info,
        methods=names,
        creator_rank=int(creator),
        minter_rank=int(minter),
    )
    return rref, fork
