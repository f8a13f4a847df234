"""Names that a callee offers: functions, objects, models; and RRefs to them, in separate processes."""

from __future__ import annotations

import os
import time

import pytest
import torch

import zrpc as rpc

from support.cluster import run_ranks


class Counter:
    """An object of the callee's; `add` is public, `_secret` is not."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)
        self.tensor = torch.arange(4.0)

    def add(self, value: torch.Tensor) -> torch.Tensor:
        self.total = self.total + value
        return self.total

    def _secret(self) -> str:
        return "never"


remote_obj = Counter()
named_obj = Counter()


def meet(name: str) -> None:
    """All ranks come to the same point."""
    agent = rpc.current_agent()
    agent.membership.gather(f"test/{name}", b"", [], 30.0)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


# ------------------------------------------------------------------ functions


def _functions(rank: int) -> None:
    if rank == 1:
        rpc.register_function("server_func", lambda x: x * 2)
    meet("registered")
    if rank == 0:
        assert rpc.rpc_sync("w1", "server_func", args=(torch.ones(2),)).tolist() == [2.0, 2.0]
        assert rpc.sync_call("w1", "server_func", args=(3,)) == 6
        assert rpc.rpc_async("w1", "server_func", args=(4,)).wait() == 8
        assert rpc.remote("w1", "server_func", args=(5,)).to_here() == 10
    meet("done")


def test_a_registered_function_is_called_by_its_name() -> None:
    run_ranks(_functions, 2)


def _late(rank: int) -> float:
    start = time.monotonic()
    if rank == 1:
        time.sleep(0.5)
        rpc.register_function("late", lambda: "here")
    else:
        assert rpc.rpc_sync("w1", "late") == "here"
    meet("done")
    return time.monotonic() - start


def test_a_call_of_a_name_that_is_not_registered_yet_waits_for_it() -> None:
    run_ranks(_late, 2)


def _never(rank: int) -> None:
    if rank == 1:
        rpc.register_function("square", abs)
        rpc.register_rref(Counter(), "table")
    meet("registered")
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(rpc.UnknownFunctionError, match="squared") as caught:
            rpc.rpc_sync("w1", "squared", timeout=1)
        assert time.monotonic() - start < 5
        assert "square" in str(caught.value) and "table" in str(caught.value)
    meet("done")


def test_a_name_that_never_comes_is_an_error_that_lists_the_names_there_are() -> None:
    run_ranks(_never, 2)


# ------------------------------------------------------------------ objects


def _objects(rank: int) -> None:
    if rank == 1:
        rpc.register_rref(remote_obj)  # by the name that this module holds it by
        rpc.register_rref(named_obj, "other_name")
    meet("registered")
    if rank == 0:
        rref = rpc.remote("w1", "remote_obj")
        assert rref.owner_name() == "w1" and not rref.is_owner()
        assert rpc.sync_call(rref.owner, rref.add, args=(torch.tensor(2),)).item() == 2
        assert rpc.sync_call(rref.owner(), rref.add, args=torch.tensor(3)).item() == 5
        assert rref.add(torch.tensor(1)).item() == 6
        assert rref.rpc_sync().add(torch.tensor(1)).item() == 7
        assert rpc.remote("w1", "other_name").rpc_sync().add(1).item() == 1
        with pytest.raises(AttributeError, match="add"):
            rref.subtract  # noqa: B018
        with pytest.raises(AttributeError):
            rref._secret  # noqa: B018
        with pytest.raises(AttributeError, match="_secret"):
            rref.rpc_sync()._secret()
    meet("done")
    if rank == 1:
        assert remote_obj.total.item() == 7, "the calls did not reach the very object"


def test_an_rref_to_a_registered_object_calls_its_public_methods_and_only_those() -> None:
    run_ranks(_objects, 2)


def _passed_on(rank: int) -> None:
    if rank == 1:
        rpc.register_rref(remote_obj)
    meet("registered")
    if rank == 0:
        rref = rpc.remote("w1", "remote_obj")
        assert rpc.rpc_sync("w2", _use_method, args=(rref,)).item() == 2
        assert rpc.rpc_sync("w2", _call_it, args=(rref.add, torch.tensor(3))).item() == 5
        assert torch.equal(
            rpc.rpc_sync("w2", _call_it, args=(rref.fetch,)).tensor, torch.arange(4.0)
        )
        assert rpc.rpc_sync("w1", _call_it, args=(rref.local_value,)).total.item() == 5
    meet("done")


def _use_method(rref: rpc.RRef) -> torch.Tensor:
    return rref.add(torch.tensor(2))


def _call_it(method, *args):
    return method(*args)


def test_an_rref_and_its_bound_methods_may_be_passed_to_others() -> None:
    run_ranks(_passed_on, 3)


# ------------------------------------------------------------------ models


def _models(rank: int) -> None:
    if rank == 1:
        rpc.register_model("policy", linear())
    meet("registered")
    if rank == 0:
        x = torch.ones(3, 4)
        local = linear()
        model = rpc.get_model("w1")
        assert torch.allclose(model(x), local(x))
        assert torch.allclose(rpc.get_model("w1", "policy").forward_async(x).wait(), local(x))
        parameters = model.parameters()
        assert [p.owner_name() for p in parameters] == ["w1", "w1"]
        assert torch.equal(parameters[0].to_here(), local.weight)
        state = model.state_dict()
        assert set(state) == {"weight", "bias"}
        state["bias"] = torch.zeros(2)
        assert model.load_state_dict(state) == ([], [])
        assert torch.equal(model.state_dict()["bias"], torch.zeros(2))
        assert model.eval() is model
        assert rpc.rpc_sync("w1", _is_training) is False
        model.train()
        assert rpc.rpc_sync("w1", _is_training) is True
        with pytest.raises(rpc.UnknownFunctionError, match="policy"):
            rpc.get_model("w1", "other", timeout=0.5)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(3, 5))
    meet("done")


def _is_training() -> bool:
    return rpc.current_agent().registry.model().value.training


def test_a_model_is_used_through_a_handle() -> None:
    run_ranks(_models, 2)


def _two_models(rank: int) -> None:
    if rank == 1:
        rpc.register_model("a", linear())
        rpc.register_model("b", linear())
    meet("registered")
    if rank == 0:
        with pytest.raises(LookupError, match=r"'a'.*'b'"):
            rpc.get_model("w1")
    meet("done")


def test_a_model_without_a_name_where_there_are_several_is_an_error_that_lists_them() -> None:
    run_ranks(_two_models, 2)


# ------------------------------------------------------------------ arguments, copies


def _arguments(rank: int) -> None:
    if rank == 0:
        ones = torch.ones(2, 2)
        assert torch.equal(rpc.rpc_sync("w1", torch.neg, args=(ones)), -ones)  # as people write it
        assert rpc.rpc_sync("w1", abs, args=-3) == 3
        assert rpc.rpc_sync("w1", len, args="abc") == 3
        assert rpc.rpc_sync("w1", max, args=[1, 5, 2]) == 5  # a list of arguments, as in torch
        assert rpc.rpc_sync("w1", dict, kwargs={"a": 1}) == {"a": 1}
        with pytest.raises(TypeError, match=r"args=\(the_list,\)|args was a list") as caught:
            rpc.rpc_sync("w1", _one_argument, args=[1, 2])
        text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "args=(the_list,)" in text
    meet("done")


def _one_argument(values):
    return values


def test_args_that_is_no_sequence_is_one_argument_and_a_list_is_a_list_of_arguments() -> None:
    run_ranks(_arguments, 2)


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.arange(4.0)


def _local_value(rank: int) -> None:
    if rank == 0:
        four = rpc.remote("w1", torch.arange, args=(4.0,))
        handle = four.local_value()
        assert torch.equal(handle.view(2, 2).wait(), torch.arange(4.0).view(2, 2))
        assert torch.equal(four.local_value().pow(0.5).wait(), torch.arange(4.0).pow(0.5))
        v = four.local_value()
        assert torch.equal((v + v).wait(), torch.arange(4.0) * 2)
        v = rpc.remote("w1", Holder).local_value()
        v.tensor = v.tensor + 1
        v.tensor = v.tensor * 2
        assert torch.equal(v.wait().tensor, (torch.arange(4.0) + 1) * 2)
        value = [1, 2]
        mine = rpc.RRef(value)
        assert mine.local_value() is value
        assert rpc.rpc_sync("w1", _local_value_there, args=(four,)) is True
    meet("done")


def _local_value_there(rref: rpc.RRef) -> bool:
    return rref.is_owner() and isinstance(rref.local_value(), torch.Tensor)


def test_local_value_elsewhere_is_a_handle_whose_steps_apply_to_the_fetched_copy() -> None:
    run_ranks(_local_value, 2)


def _strict(rank: int) -> None:
    if rank == 0:
        rref = rpc.remote("w1", torch.ones, args=(2,))
        with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user WorkerInfo"):
            rref.local_value()
    meet("done")


def test_strict_local_value_raises_as_in_torch() -> None:
    run_ranks(_strict, 2, options={"local_value": "strict"})


def _fetch_copy_share(rank: int) -> None:
    if rank == 0:
        rref = rpc.remote("w1", Holder)
        assert torch.equal(rref.fetch(timeout=10).tensor, torch.arange(4.0))
        here = rref.copy()
        assert here.is_owner() and torch.equal(here.to_here().tensor, torch.arange(4.0))
        there = rref.copy(to="w2")
        assert there.owner_name() == "w2"
        assert torch.equal(there.to_here().tensor, torch.arange(4.0))
        same = rref.copy(to="w1")
        assert rpc.rpc_sync("w1", _same_object, args=(rref, same)) is False
        rref.share("w1", "w2")
        assert torch.equal(rpc.rpc_sync("w2", _fetch_there, args=(rref,)).tensor, torch.arange(4.0))
    meet("done")


def _same_object(one: rpc.RRef, other: rpc.RRef) -> bool:
    return one.local_value() is other.local_value()


def _fetch_there(rref: rpc.RRef) -> Holder:
    return rref.fetch()


def test_fetch_copy_and_share() -> None:
    run_ranks(_fetch_copy_share, 3)


def test_init_method_is_a_keyword_and_other_backends_are_warned_about_once(tmp_path) -> None:
    for backend in ("nccl", "gloo", "tensorpipe"):
        with pytest.warns(UserWarning, match=backend):
            rpc.init_rpc(
                "me", backend, rank=0, world_size=1, init_method=f"file://{tmp_path}/{backend}"
            )
        assert rpc.rpc_sync("me", os.getpid) == os.getpid()
        rpc.shutdown()
