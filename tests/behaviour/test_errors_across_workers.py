"""What goes wrong on another worker, as its caller sees it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from together import meet, tell, wait_for, wait_until

import zrpc as rpc

from support.cluster import run_ranks, shared_server


class NeedsTwo(Exception):
    """Its constructor wants what its args do not have."""

    def __init__(self, name: str, *, code: int) -> None:
        super().__init__(f"{name}: käputt ☃")
        self.code = code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def inner(kind: str) -> None:
    if kind == "value":
        raise ValueError("expected-text")
    if kind == "key":
        raise KeyError("missing-key")
    if kind == "os":
        os.stat("/nowhere/at/all")
    if kind == "own":
        raise NeedsTwo("motor", code=7)
    if kind == "cause":
        try:
            raise LookupError("the cause")
        except LookupError as error:
            raise OSError(5, "the effect") from error
    if kind == "note":
        error = ValueError("noted")
        if hasattr(error, "add_note"):
            error.add_note("a note")
        raise error
    if kind == "locked":
        locked = RuntimeError("lock-inside")
        locked.lock = threading.Lock()  # type: ignore[attr-defined]
        raise locked
    if kind == "unprintable":
        raise Unprintable
    if kind == "exit":
        sys.exit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "stop":
        raise StopIteration("end")
    if kind == "utf8":
        raise ValueError("grüße, 世界 \ud800")


def outer(kind: str) -> None:
    inner(kind)


def passed_on(kind: str) -> None:
    rpc.rpc_sync("w2", outer, (kind,))


def unsendable() -> Any:
    return threading.Lock()


EXPECTED: dict[str, tuple[type[BaseException], str]] = {
    "value": (ValueError, "expected-text"),
    "key": (KeyError, "missing-key"),
    "os": (FileNotFoundError, "/nowhere/at/all"),
    "own": (NeedsTwo, "käputt ☃"),
    "cause": (OSError, "the effect"),
    "note": (ValueError, "noted"),
    "locked": (RuntimeError, "lock-inside"),
    "unprintable": (Unprintable, ""),
    "exit": (rpc.RemoteError, "SystemExit"),
    "interrupt": (rpc.RemoteError, "KeyboardInterrupt"),
    "stop": (rpc.RemoteError, "StopIteration"),
    "utf8": (ValueError, "grüße, 世界"),
}


def _ways(kind: str) -> list[Any]:
    return [
        lambda: rpc.rpc_sync("w1", outer, (kind,)),
        lambda: rpc.rpc_async("w1", outer, (kind,)).wait(),
        lambda: rpc.remote("w1", outer, (kind,)).to_here(),
        lambda: rpc.rpc_sync("w1", passed_on, (kind,)),
        lambda: rpc.rpc_sync("w0", outer, (kind,)),
    ]


def _types(rank: int) -> None:
    if rank == 0:
        for kind, (expected, text) in EXPECTED.items():
            for number, way in enumerate(_ways(kind)):
                with pytest.raises(expected) as caught:
                    way()
                error: Any = caught.value
                assert isinstance(error, RuntimeError), kind
                assert text in str(error) or kind == "unprintable", (kind, str(error))
                if kind != "unprintable":
                    assert "inner" in str(error), "no remote traceback"
                assert error.remote and error.worker == {3: "w2", 4: "w0"}.get(number, "w1")
                if kind == "own":
                    assert error.code == 7
                if kind == "cause":
                    assert isinstance(error.__cause__, LookupError) and error.errno == 5
                if kind == "note" and hasattr(error, "__notes__"):
                    assert "a note" in error.__notes__
        assert rpc.rpc_sync("w1", max, (1, 2)) == rpc.rpc_sync("w2", max, (1, 2)) == 2
    meet("done")


def test_an_exception_arrives_as_what_it_was_with_its_traceback_over_one_worker_or_two() -> None:
    run_ranks(_types, 3)


def _unsendable(rank: int) -> None:
    if rank == 0:
        with pytest.raises(Exception, match=r"unsendable.*'w1'.*pickle"):
            rpc.rpc_sync("w1", unsendable)
        with pytest.raises(Exception, match="pickle"):
            rpc.remote("w1", unsendable).to_here()
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(
                TypeError, match=r"was not sent: argument args\[0\]\['k'\].*lock.*pickle"
            ):
                call("w1", max, ({"k": threading.Lock()},))
            with pytest.raises(TypeError, match="kwargs"):
                call("w1", max, (), {"key": threading.Lock()})
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            rpc.rpc_sync("w1", max, (torch.futures.Future(),))
        with pytest.raises(rpc.UnknownFunctionError, match=r"gone.*'w1'"):
            module: Any = sys.modules[__name__]
            module.gone = type(unsendable)(unsendable.__code__, globals(), "gone")
            module.gone.__qualname__ = "gone"
            rpc.rpc_sync("w1", module.gone)
        for bad in (5, None):
            with pytest.raises(TypeError, match="callable"):
                rpc.rpc_sync("w1", bad)  # type: ignore[arg-type]
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    meet("done")


def test_what_cannot_be_sent_or_found_is_an_error_that_names_it_and_the_worker_goes_on() -> None:
    run_ranks(_unsendable, 2)


# ------------------------------------------------------------------ a callee that dies


def _killed(rank: int) -> None:
    meet("all")
    if rank != 0:
        if rank == 2:
            wait_for("done")
            rpc.shutdown(graceful=False)
        else:
            time.sleep(60)
        return
    pending = [rpc.rpc_async("w1", time.sleep, args=(50,)) for _ in range(10)]
    rref = rpc.remote("w1", list)
    waiting = rpc.remote("w1", time.sleep, args=(50,))
    rref.to_here()
    fetch = waiting.to_here_async()
    victim = rpc.rpc_sync("w1", os.getpid)
    os.kill(victim, signal.SIGKILL)
    for future in pending:
        with pytest.raises(rpc.WorkerLostError, match=rf"'w1' \(process {victim}.*sleep") as caught:
            future.wait(timeout=20)
        assert caught.value.ran == "maybe" and not caught.value.remote
    with pytest.raises(rpc.WorkerLostError, match=r"was lost.*has ended") as caught:
        rpc.rpc_sync("w1", max, args=(1, 2))
    assert caught.value.ran == "no"
    with pytest.raises(rpc.WorkerLostError):
        fetch.wait(timeout=20)
    for use in (rref.to_here, waiting.to_here, lambda: rref.rpc_sync().append(1)):
        with pytest.raises(rpc.OwnerDiedError, match=r"'w1'.*was lost.*has ended"):
            use()
    assert rpc.rpc_sync("w2", max, args=(1, 2)) == 2
    tell("done")
    rpc.shutdown(graceful=False)


def test_a_killed_callee_ends_pending_and_later_calls_with_its_name_and_others_go_on() -> None:
    run_ranks(_killed, 3, may_die=(1,))


def _holder(rank: int) -> None:
    meet("all")
    if rank == 1:
        ledger = rpc.current_agent().references.ledger
        wait_for("held")
        assert len(ledger) == 100
        wait_until(lambda: len(ledger) == 0, "the values of the dead", 20)
        tell("freed")
    elif rank == 0:
        kept = [rpc.remote("w1", torch.ones, args=(100,)) for _ in range(100)]
        assert all(r.to_here().sum() == 100 for r in kept)
        tell("held")
        time.sleep(60)
    wait_for("freed")
    rpc.shutdown(graceful=False)


def test_what_a_killed_user_held_is_freed_at_its_owner() -> None:
    with shared_server().start_ranks(_holder, 3) as ranks:
        ranks.wait_for_file("held")
        time.sleep(0.2)
        ranks.kill(0)
        ranks.results()
