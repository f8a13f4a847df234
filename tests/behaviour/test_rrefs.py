"""References to values on other workers: identity, containers, lifetimes."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
from together import meet, raises_within, wait_until

import zrpc as rpc

from support.cluster import run_ranks


class Box:
    """Counts, and knows what it has seen."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.count = 0

    def bump(self, by: int = 1) -> int:
        self.count += by
        return self.count

    @rpc.functions.async_execution
    def later(self, value: int) -> Any:
        return rpc.rpc_async("w0", abs, args=(value,)).then(lambda f: f.wait() + 1)

    def __len__(self) -> int:
        return self.count


class Holder:
    """An object of the user's with an RRef inside."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref


kept: list[Any] = []


def owned_here() -> int:
    gc.collect()
    return len(rpc.current_agent().references.ledger)


def identity(one: Any, nested: Any) -> tuple[bool, bool, int]:
    other = nested["k"][0]
    return one.is_owner(), one.local_value() is other.local_value(), other.local_value().bump()


def fetch_all(
    holder: Holder, items: list[Any], by_name: dict[str, Any], pair: tuple[Any, Any]
) -> list[int]:
    return [r.to_here().count for r in (holder.rref, items[0], by_name["a"], *pair)]


def keep(rref: Any) -> bool:
    kept.append(rref)
    return True


def use_kept() -> float:
    return float(sum(rref.to_here().sum() for rref in kept))


def drop_kept() -> None:
    kept.clear()


def give_back() -> Any:
    return rpc.RRef(Box("mine")), Box("copied")


def slow(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def fails() -> None:
    raise LookupError("never made")


def _identity(rank: int) -> None:
    if rank == 0:
        rref = rpc.remote("w1", Box)
        assert rref.rpc_sync().bump() == 1
        # Back at its owner it is that very object, also twice in one message.
        assert rpc.rpc_sync("w1", identity, (rref, {"k": [rref]})) == (True, True, 2)
        assert not rref.is_owner() and rref.owner() == rpc.get_worker_info("w1")
        assert rref.owner_name() == "w1" and rref.confirmed_by_owner()
        # In any container, on a third worker.
        assert (
            rpc.rpc_sync("w2", fetch_all, (Holder(rref), [rref], {"a": rref}, (rref, rref)))
            == [2] * 5
        )
        # One of our own, sent away and back.
        mine = rpc.RRef(Box())
        assert mine.is_owner() and mine.local_value() is mine.to_here()
        assert rpc.rpc_sync("w1", _bump_there, (mine,)) == 5 and mine.local_value().count == 5
        assert rpc.rpc_sync("w0", identity, (mine, {"k": [mine]})) == (True, True, 6)
        # Made elsewhere, and given to us.
        theirs, copied = rpc.rpc_sync("w1", give_back)
        assert theirs.owner_name() == "w1" and theirs.to_here().value == "mine"
        assert copied.value == "copied"
        for refused in (
            pickle.dumps,
            copy.copy,
            copy.deepcopy,
            lambda r: torch.save(r, "/dev/null"),
        ):
            with pytest.raises(RuntimeError, match=r"(?i)pickle|cop"):
                refused(rref)
    meet("done")


def _bump_there(rref: Any) -> int:
    return int(rref.rpc_sync().bump(5))


def test_an_rref_is_the_same_value_wherever_it_goes() -> None:
    run_ranks(_identity, 3)


def _proxies(rank: int) -> None:
    if rank == 0:
        for to in ("w1", "w0"):
            rref = rpc.remote(to, Box)
            assert rref.rpc_async().bump().wait() == 1
            assert rref.remote().bump(2).to_here() == 3
            assert rref.rpc_sync().later(-4) == 5
            assert rref.rpc_async().later(-4).wait() == 5
            assert rref.remote().later(-4).to_here() == 5
            assert rref.rpc_sync().__len__() == 3
            for way in (rref.rpc_sync, rref.rpc_async, rref.remote):
                with pytest.raises(AttributeError, match="nope"):
                    result = way().nope()
                    result.wait() if way == rref.rpc_async else result.to_here()
            with pytest.raises(TypeError, match="bump"):
                rref.rpc_sync().bump(1, 2, 3)
        # A call on a value that is not there yet waits for it.
        late = rpc.remote("w1", slow, (0.5, Box()))
        assert late.rpc_sync().bump() == 1
        broken = rpc.remote("w1", fails)
        for use in (broken.to_here, lambda: broken.rpc_sync().bump(), broken.fetch):
            with pytest.raises(LookupError, match="never made"):
                use()
        with raises_within(0.5, rpc.RpcTimeoutError):
            rpc.remote("w1", slow, (3,)).rpc_sync(timeout=0.3).bump()
    meet("done")


def test_methods_run_at_the_owner_in_every_way_of_calling() -> None:
    run_ranks(_proxies, 2)


def _lifetimes(rank: int) -> None:
    def owned(at: str) -> int:
        return int(rpc.rpc_sync(at, owned_here))

    if rank == 0:
        many = [rpc.remote("w1", torch.zeros, (1000,)) for _ in range(200)]
        assert all(r.to_here().numel() == 1000 for r in many) and owned("w1") == 200
        del many
        wait_until(lambda: owned("w1") == 0, "the values' end")
        # Handed on and dropped at once.
        for _ in range(30):
            assert rpc.rpc_async("w2", keep, (rpc.remote("w1", torch.ones, (10,)),)).wait()
        gc.collect()
        time.sleep(0.3)
        assert rpc.rpc_sync("w2", use_kept) == 300.0 and owned("w1") == 30
        rpc.rpc_sync("w2", drop_kept)
        wait_until(lambda: owned("w1") == 0, "the values' end")
        # Dropped before anybody has answered, and in results that nobody reads: at once, not
        # when the garbage collector comes by.
        gc.disable()
        for _ in range(50):
            rpc.remote("w1", slow, (0.01, 1))
            rpc.rpc_async("w1", give_back)
            rpc.rpc_async("w1", give_back).then(lambda done: done.wait())
        wait_until(lambda: owned("w1") == 0, "the values' end")
        gc.enable()
        # In a cycle: when it does.
        for _ in range(50):
            cycle = [rpc.remote("w1", list)]
            cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        gc.collect()
        wait_until(lambda: owned("w1") == 0, "the values' end")
        # Of ours: kept as long as anybody holds it, and no longer.
        mine = rpc.RRef(Box())
        rpc.rpc_sync("w2", keep, (mine,))
        del mine
        assert owned_here() == 1
        rpc.rpc_sync("w2", drop_kept)
        wait_until(lambda: owned_here() == 0, "our value's end")
        # A message that cannot be decoded, or is refused, leaves nothing either.
        with pytest.raises(rpc.UnknownFunctionError):
            rpc.rpc_sync("w2", "nobody", (rpc.remote("w1", list),), timeout=0.5)
        with pytest.raises(TypeError):
            rpc.rpc_sync(
                "w2",
                keep,
                (rpc.remote("w1", list), time.sleep.__self__.__loader__, (x for x in [])),
            )  # type: ignore[attr-defined]
        gc.collect()
        wait_until(lambda: owned("w1") == 0, "the values' end")
    meet("done")


def test_a_value_lives_as_long_as_anybody_refers_to_it_and_no_longer() -> None:
    run_ranks(_lifetimes, 3)
