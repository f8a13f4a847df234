"""zrpc's own errors: their types, their fields, their sentences, and that they can be copied."""

from __future__ import annotations

import copy
import doctest
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc import errors

ALL_TYPES = [
    errors.RpcError,
    errors.RpcTimeoutError,
    errors.WorkerLostError,
    errors.OwnerDiedError,
    errors.UnknownWorkerError,
    errors.BrokerLostError,
    errors.BusyError,
    errors.AuthenticationError,
    errors.NotInitializedError,
    errors.CallCancelledError,
    errors.UnknownFunctionError,
    errors.RemoteError,
]

FIELDS = {
    "worker": "w1",
    "function": "train:step",
    "elapsed": 1.5,
    "limit": 1.0,
    "ran": "maybe",
    "remote": True,
}


@pytest.mark.parametrize("cls", ALL_TYPES)
def test_each_error_is_a_runtime_error_with_its_fields(cls):
    error = cls("what happened", **FIELDS)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, errors.RpcError)
    assert {name: getattr(error, name) for name in FIELDS} == FIELDS
    assert str(error) == "what happened"
    assert error.args == ("what happened",)
    assert repr(error) == f"{cls.__name__}('what happened')"


def test_all_errors_of_the_module_are_tested_here():
    found = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.RpcError)
    }
    assert found == set(ALL_TYPES)


@pytest.mark.parametrize("cls", ALL_TYPES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_text_fields_and_notes(cls, protocol):
    error = cls("größer 💥", **FIELDS)
    error.__notes__ = ["seen at night"]
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(other) is cls
        assert str(other) == "größer 💥"
        assert vars(other) == vars(error)
    assert vars(copy.deepcopy(error)) == vars(error)


@pytest.mark.parametrize("cls", ALL_TYPES)
def test_fields_that_are_not_given_say_nothing(cls):
    error = cls("text")
    assert [getattr(error, name) for name in FIELDS] == [None] * 5 + [False]
    assert error.peer is None
    assert error.remote_traceback == ""
    assert error.route == ()


def test_general_handlers_of_python_catch_them():
    assert issubclass(errors.RpcTimeoutError, TimeoutError)
    assert issubclass(errors.WorkerLostError, ConnectionError)
    assert issubclass(errors.OwnerDiedError, errors.WorkerLostError)
    assert issubclass(errors.BrokerLostError, ConnectionError)
    assert issubclass(errors.UnknownFunctionError, AttributeError)
    assert not issubclass(errors.BrokerLostError, errors.WorkerLostError)


@pytest.mark.parametrize("cls", ALL_TYPES)
def test_two_arguments_are_not_taken_for_an_error_number(cls):
    error = cls("only text")
    error.args = (2, "No such file")
    assert "Errno" not in str(pickle.loads(pickle.dumps(error)))


def test_a_subclass_with_another_constructor_can_be_pickled():
    error = pickle.loads(pickle.dumps(NeedsTwo("a", "b")))
    assert (type(error), str(error), error.second) == (NeedsTwo, "a and b", "b")


class NeedsTwo(errors.BusyError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}", ran="no")
        self.second = second


# Sentences ---------------------------------------------------------------------------------


STATES = ["unsent", "no credit", "no worker", "sent", "receiving", "queued", "running", "done"]


@pytest.mark.parametrize("state", [*STATES, None])
def test_a_timeout_says_torchs_words_and_what_is_known(state):
    error = errors.call_timed_out("w1", "train:step", 0.5, 0.512, state)
    text = str(error)
    assert "RPC ran for more than set timeout (500 ms)" in text
    assert re.search(r"(?i)timed?.?out", text)
    assert "'w1'" in text
    assert "train:step" in text
    assert "0.51 s" in text
    assert (error.worker, error.function, error.limit) == ("w1", "train:step", 0.5)
    assert error.elapsed == 0.512
    assert error.ran == ("no" if state in ("unsent", "no credit", "no worker") else "maybe")


def test_each_state_of_a_call_has_a_sentence_of_its_own():
    texts = {str(errors.call_timed_out("w", "m:f", 1, 1, state)) for state in STATES}
    assert len(texts) == len(STATES)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("no credit", "not been sent"),
        ("no worker", "not been sent"),
        ("queued", "queued"),
        ("running", "running"),
    ],
)
def test_a_timeout_tells_queued_running_and_not_sent_apart(state, words):
    assert words in str(errors.call_timed_out("w1", "m:f", 1, 1, state))


@pytest.mark.parametrize(
    ("limit", "printed"),
    [(0.5, "(500 ms)"), (0.7, "(700 ms)"), (60, "(60000 ms)"), (5000, "(5000000 ms)")],
)
def test_timeouts_are_printed_as_whole_milliseconds(limit, printed):
    assert printed in str(errors.call_timed_out("w", "m:f", limit, limit, "sent"))


@given(st.floats(min_value=0, max_value=1e7), st.floats(min_value=0, max_value=1e7))
def test_any_duration_can_be_printed(limit, elapsed):
    text = str(errors.call_timed_out("w", "m:f", limit, elapsed, "sent"))
    assert "e+" not in text
    assert "set timeout (" in text


def test_where_a_worker_runs_is_named():
    text = str(errors.call_timed_out("w1", "m:f", 1, 1, "running", host="node7", process=42))
    assert "worker 'w1' (process 42 on host node7)" in text
    lost = errors.worker_lost("w1", "m:f", "it died", "maybe", host="node7", process=42)
    assert str(lost).startswith("Worker 'w1' (process 42 on host node7) was lost")


@pytest.mark.parametrize(("ran", "words"), [("no", "has not run"), ("maybe", "may have run")])
def test_a_lost_worker_says_who_why_and_whether_the_call_ran(ran, words):
    error = errors.worker_lost("w1", "train:step", "it died", ran, elapsed=3.0)
    assert all(part in str(error) for part in ("'w1'", "train:step", "it died", words, "3 s"))
    assert (error.worker, error.function, error.ran) == ("w1", "train:step", ran)


def test_a_lost_worker_without_a_call_speaks_of_no_call():
    text = str(errors.worker_lost("w1", reason="it left"))
    assert "run" not in text.replace("running", "")
    assert "during" not in text


def test_an_unknown_worker_says_torchs_words_near_names_and_who_is_there():
    error = errors.unknown_worker("trainer3", ["ps", "trainer1"])
    assert "could not find destination" in str(error)
    assert "Did you mean 'trainer1'?" in str(error)
    assert "'ps', 'trainer1'" in str(error)
    assert (error.worker, error.ran) == ("trainer3", "no")


def test_an_unknown_worker_lists_ten_names_at_most():
    text = str(errors.unknown_worker("x", [f"w{number:03}" for number in range(500)]))
    assert "and 490 more" in text
    assert len(text) < 400


def test_an_unknown_rank_is_called_a_rank():
    text = str(errors.unknown_worker(7, []))
    assert "rank 7" in text
    assert "No other worker is there" in text


def test_the_other_sentences_say_what_happened_to_whom_and_what_to_do():
    busy = errors.busy("w1", "m:f", "256 calls are waiting there")
    assert "256 calls are waiting there" in str(busy)
    assert (busy.worker, busy.ran) == ("w1", "no")
    assert str(errors.busy(None, None, "full")).startswith("This worker")
    broker = errors.broker_lost(
        "tcp://h:5555", 30, worker="w1", function="m:f", elapsed=31, ran="maybe"
    )
    assert all(part in str(broker) for part in ("tcp://h:5555", "30 s", "m:f", "may have run"))
    died = errors.owner_died("w1", "UserRRef(7)", "it died")
    assert all(part in str(died) for part in ("w1", "UserRRef(7)", "it died"))
    refused = errors.authentication_failed("tcp://h:5555", "the token is wrong")
    assert all(part in str(refused) for part in ("tcp://h:5555", "the token is wrong"))
    cancelled = errors.call_cancelled("w1", "m:f", ran="no")
    assert all(part in str(cancelled) for part in ("w1", "m:f", "cancelled", "has not run"))
    waited = errors.wait_timed_out(2.0, worker="w1", function="m:f")
    assert re.search(r"(?i)timed?.?out", str(waited))
    assert isinstance(waited, TimeoutError)


def test_not_initialized_begins_as_torchs_does():
    text = str(errors.not_initialized("It was shut down."))
    assert text.startswith("RPC has not been initialized. Call zrpc.init_rpc first.")
    assert text.endswith("It was shut down.")


def test_an_error_that_arrived_says_where_it_was_raised_and_whom_it_was_about():
    error = errors.worker_lost("c", "m:inner", "it died", "no")
    error.arrived(errors.RemoteOrigin("b", "m:outer", "Traceback ...", (("x", "m:g"),)))
    assert (error.remote, error.worker, error.peer) == (True, "b", "c")
    # The caller's own call did run, whatever became of the call that the callee made.
    assert error.ran == "yes"
    assert str(error).splitlines()[-4:] == [
        "",
        "On worker 'b' (function m:outer), remote traceback:",
        "Traceback ...",
        "via worker 'x' (function m:g)",
    ]
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.peer, other.route) == (str(error), "c", (("x", "m:g"),))


def test_the_examples_in_the_documentation_run():
    result = doctest.testmod(errors)
    assert result.attempted > 0
    assert result.failed == 0
