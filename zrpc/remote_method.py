"""Methods of registered objects, called through an RRef to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rref import RRef


class RemoteMethod:
    """A public method of a registered object: callable, and accepted as a function to call.

    ``rpc_sync(rref.owner, rref.add, args=(x,))`` runs it on the owner.
    """

    __slots__ = ("name", "rref")

    def __init__(self, rref: RRef[Any], name: str) -> None:
        self.rref = rref
        self.name = name

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on the owner and return its result."""
        return getattr(self.rref.rpc_sync(), self.name)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<method {self.name!r} of {self.rref}>"
