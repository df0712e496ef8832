"""From the journal's last word to the exception that `fit()` raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from spotfit.client.failure import error_of, grouped_message
from spotfit.core.errors import (
    ControllerError,
    HangError,
    PreemptionError,
    RunCancelledError,
    TrainingFailedError,
    TransientStoreError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerSilentError,
)
from spotfit.ledger import keys
from spotfit.model.events import Blame, FitEnded, RankFailure, Taken
from spotfit.model.preemption import PreemptionInfo
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN
from spotfit.testing.clock import ManualClock

KEY = RunKey(b"k" * 32, RUN)
TOLD = "Traceback (most recent call last):\n  in train\nKeyError: 'lr'"


def kept(error: Any, *, key: RunKey = KEY) -> tuple[MemoryStore, RankFailure]:
    """A rank's exception as its agent leaves it in the bucket."""
    store = MemoryStore()
    name = keys.failure(1, 2)
    store.put(name, key.seal(cloudpickle.dumps(error), purpose=name))
    return store, RankFailure(2, "raised", TOLD, name)


def failed(*failures: RankFailure) -> FitEnded:
    return FitEnded("failed", "why", Blame.WORKER, failures)


def the_failure(error: Exception) -> BaseException:
    assert isinstance(error, WorkerGroupError)
    (only,) = error.worker_failures.values()
    return only


def test_the_users_own_exception_comes_back_with_its_rank_and_traceback() -> None:
    store, failure = kept(KeyError("lr"))
    error = error_of(failed(failure), store, KEY)
    raised = the_failure(error)
    assert isinstance(raised, KeyError)
    assert raised.args == ("lr",)
    assert raised.__notes__ == [f"raised in the worker of rank 2:\n{TOLD}"]
    assert "KeyError: 'lr'" in str(error)


def test_a_process_that_died_is_told_as_such() -> None:
    died = RankFailure(1, "died", "The worker of rank 1 was killed by SIGKILL.")
    raised = the_failure(error_of(failed(died), MemoryStore(), KEY))
    assert isinstance(raised, WorkerDiedError)
    assert raised.facts == {"rank": 1, "kind": "died"}


def test_a_hang_is_told_as_one_by_the_ranks_that_were_waited_for() -> None:
    silent = RankFailure(1, "timeout", "The worker of rank 1 hung: it has not answered for 600 s")
    error = error_of(failed(silent), MemoryStore(), KEY)
    assert isinstance(error, HangError)
    assert isinstance(the_failure(error), WorkerSilentError)
    assert "has not answered for 600 s" in str(error)


class Late(ManualClock):
    """Lets something happen while somebody waits."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._happens()


def test_an_exception_that_its_node_is_still_writing_is_waited_for() -> None:
    there, failure = kept(KeyError("lr"))
    assert failure.pickle_key is not None
    name, store = failure.pickle_key, MemoryStore()
    clock = Late(lambda: store.put(name, there.get(name)))
    assert isinstance(the_failure(error_of(failed(failure), store, KEY, clock=clock)), KeyError)


class Down(MemoryStore):
    """Cannot be read just now."""

    def get(self, key: str) -> bytes:
        raise TransientStoreError("no answer")


@pytest.mark.parametrize("how", ["deleted", "tampered", "other key", "no key", "store down"])
def test_an_exception_that_cannot_be_had_is_told_by_its_text(how: str) -> None:
    store, failure = kept(KeyError("lr"), key=RunKey(b"x" * 32, RUN) if how == "other key" else KEY)
    assert failure.pickle_key is not None
    if how == "deleted":
        store.delete(failure.pickle_key)
    if how == "tampered":
        store.put(failure.pickle_key, store.get(failure.pickle_key)[:-1] + b"!")
    where = Down() if how == "store down" else store
    key, clock = None if how == "no key" else KEY, ManualClock()
    raised = the_failure(error_of(failed(failure), where, key, clock=clock))
    assert isinstance(raised, TrainingFailedError)
    assert "KeyError: 'lr'" in str(raised)


def test_what_is_no_exception_is_not_raised() -> None:
    store, failure = kept("just a text")
    assert isinstance(the_failure(error_of(failed(failure), store, KEY)), TrainingFailedError)


@pytest.mark.parametrize(
    ("ended", "kind", "says"),
    [
        (FitEnded("cancelled", "Ctrl-C"), RunCancelledError, "Ctrl-C"),
        (FitEnded("failed", "4 of 3", Blame.PREEMPTION), PreemptionError, "than its budget"),
        (FitEnded("failed", "no quota", Blame.PLATFORM), ControllerError, "no quota"),
        (
            FitEnded(
                "failed", "a callback raised", Blame.PLATFORM, (RankFailure(-1, "raised", TOLD),)
            ),
            ControllerError,
            "KeyError: 'lr'",
        ),
        (FitEnded("failed", "odd", None), TrainingFailedError, "odd"),
        (FitEnded("failed", "odd", Blame.RESIZE), TrainingFailedError, "odd"),
    ],
)
def test_every_end_has_its_exception(ended: FitEnded, kind: type[Exception], says: str) -> None:
    error = error_of(ended, MemoryStore(), KEY)
    assert type(error) is kind
    assert says in str(error)


@pytest.mark.parametrize("timed_out", [False, True])
def test_too_many_reclaims_tell_which_machines_were_the_last(timed_out: bool) -> None:
    gone = Taken({"t-2/0": (3, 2), "t-1/1": (1,)}, 77, timed_out)
    ended = FitEnded("failed", "failure 2 of kind 'preemption'", Blame.PREEMPTION, taken=gone)
    error = error_of(ended, MemoryStore(), KEY)
    assert isinstance(error, PreemptionError)
    assert not isinstance(error, WorkerGroupError)
    assert error.preemption_info == PreemptionInfo(77, {"t-2/0": [3, 2], "t-1/1": [1]})
    assert error.drain_timed_out == timed_out
    assert "[1, 2, 3]" in str(error)
    assert error.__notes__ == ["failure 2 of kind 'preemption'"]


def test_a_reclaim_that_nobody_announced_had_no_deadline() -> None:
    ended = FitEnded("failed", "", Blame.PREEMPTION, taken=Taken({"t-1/1": (1,)}))
    error = error_of(ended, MemoryStore(), KEY)
    assert isinstance(error, PreemptionError)
    assert error.preemption_info.deadline_ms is None


def test_what_a_callback_raised_is_the_cause_itself() -> None:
    store, name = MemoryStore(), keys.hook_failure("0" * 64)
    store.put(name, KEY.seal(cloudpickle.dumps(KeyError("lr")), purpose=name))
    told = RankFailure(-1, "raised", TOLD, name)
    ended = FitEnded("failed", "a callback raised", Blame.PLATFORM, (told,))
    error = error_of(ended, store, KEY)
    assert isinstance(error, ControllerError)
    assert isinstance(error.controller_failure, KeyError)
    assert error.__cause__ is error.controller_failure
    assert error.controller_failure.__notes__ == [f"raised beside the workers:\n{TOLD}"]
    assert "KeyError: 'lr'" in str(error)


# --- the message ---------------------------------------------------------------------------------


def test_equal_tracebacks_are_told_once_with_all_their_ranks() -> None:
    told = grouped_message(
        [
            RankFailure(0, "raised", "ValueError: step 17"),
            RankFailure(1, "raised", "KeyError: 'x'"),
            RankFailure(2, "raised", "ValueError: step 18"),
        ]
    )
    assert told == (
        "Training failed due to worker errors:\n"
        "[Rank 0,2 Error Snippet]:\nValueError: step 17\n"
        "[Rank 1 Error Snippet]:\nKeyError: 'x'"
    )


def test_a_long_traceback_loses_its_middle_and_says_so() -> None:
    told = grouped_message([RankFailure(0, "raised", "head" + "x" * 5000 + "tail")])
    assert len(told) < 1300
    assert "head" in told
    assert told.endswith("tail")
    assert "… 4008 characters left out …" in told
