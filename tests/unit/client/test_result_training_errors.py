"""`FitEnded` is translated into the exception that `fit()` raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from spotfit.client.result import build_run_error, format_worker_failures
from spotfit.core.errors import (
    ControllerError,
    HangError,
    PreemptionError,
    RunCancelledError,
    TimeBudgetExceededError,
    TrainingFailedError,
    TransientStoreError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerTimeoutError,
)
from spotfit.ledger import keys
from spotfit.model.events import FailureCause, FitEnded, PreemptedNodes, RankFailure
from spotfit.model.topology import PreemptionInfo
from spotfit.security.run_key import RunKey
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, ManualClock

KEY = RunKey(b"k" * 32, RUN_ID)
TRACEBACK = "Traceback (most recent call last):\n  in train\nKeyError: 'lr'"


def kept(error: Any, *, key: RunKey = KEY) -> tuple[MemoryStore, RankFailure]:
    """Store a rank's exception as its agent does."""
    store = MemoryStore()
    name = keys.failure(1, 2)
    store.put(name, key.seal(cloudpickle.dumps(error), purpose=name))
    return store, RankFailure(rank=2, kind="raised", message=TRACEBACK, pickle_key=name)


def failed(*failures: RankFailure) -> FitEnded:
    return FitEnded(outcome="failed", reason="why", cause=FailureCause.WORKER, failures=failures)


def the_failure(error: Exception) -> BaseException:
    assert isinstance(error, WorkerGroupError)
    (only,) = error.worker_failures.values()
    return only


def test_the_original_exception_has_rank_and_traceback() -> None:
    store, failure = kept(KeyError("lr"))
    error = build_run_error(failed(failure), store, KEY)
    raised = the_failure(error)
    assert isinstance(raised, KeyError)
    assert raised.args == ("lr",)
    assert raised.__notes__ == [f"raised in the worker of rank 2:\n{TRACEBACK}"]
    assert "KeyError: 'lr'" in str(error)


def test_a_died_process_is_a_worker_died_error() -> None:
    failure = RankFailure(
        rank=1, kind="died", message="The worker of rank 1 was killed by SIGKILL."
    )
    raised = the_failure(build_run_error(failed(failure), MemoryStore(), KEY))
    assert isinstance(raised, WorkerDiedError)
    assert raised.details == {"rank": 1, "kind": "died"}


def test_a_timeout_is_a_hang_error() -> None:
    silent = RankFailure(
        rank=1, kind="timeout", message="The worker of rank 1 hung: it has not answered for 600 s"
    )
    error = build_run_error(failed(silent), MemoryStore(), KEY)
    assert isinstance(error, HangError)
    assert isinstance(the_failure(error), WorkerTimeoutError)
    assert "has not answered for 600 s" in str(error)


class Late(ManualClock):
    """Calls a function on the first wait."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._happens()


def test_an_exception_that_is_still_uploaded_is_awaited() -> None:
    there, failure = kept(KeyError("lr"))
    assert failure.pickle_key is not None
    name, store = failure.pickle_key, MemoryStore()
    clock = Late(lambda: store.put(name, there.get(name)))
    assert isinstance(
        the_failure(build_run_error(failed(failure), store, KEY, clock=clock)), KeyError
    )


class Down(MemoryStore):
    """A store whose reads fail."""

    def get(self, key: str) -> bytes:
        raise TransientStoreError("no answer")


@pytest.mark.parametrize("how", ["deleted", "tampered", "other key", "no key", "store down"])
def test_an_unreadable_exception_is_replaced_by_its_text(how: str) -> None:
    store, failure = kept(
        KeyError("lr"), key=RunKey(b"x" * 32, RUN_ID) if how == "other key" else KEY
    )
    assert failure.pickle_key is not None
    if how == "deleted":
        store.delete(failure.pickle_key)
    if how == "tampered":
        store.put(failure.pickle_key, store.get(failure.pickle_key)[:-1] + b"!")
    where = Down() if how == "store down" else store
    key, clock = None if how == "no key" else KEY, ManualClock()
    raised = the_failure(build_run_error(failed(failure), where, key, clock=clock))
    assert isinstance(raised, TrainingFailedError)
    assert "KeyError: 'lr'" in str(raised)


def test_a_pickle_of_another_type_is_not_raised() -> None:
    store, failure = kept("just a text")
    assert isinstance(
        the_failure(build_run_error(failed(failure), store, KEY)), TrainingFailedError
    )


@pytest.mark.parametrize(
    ("ended", "kind", "message"),
    [
        (FitEnded(outcome="cancelled", reason="Ctrl-C"), RunCancelledError, "Ctrl-C"),
        (
            FitEnded(outcome="cancelled", reason="the time budget", is_time_budget=True),
            TimeBudgetExceededError,
            "was ended: the time budget",
        ),
        (
            FitEnded(outcome="failed", reason="4 of 3", cause=FailureCause.PREEMPTION),
            PreemptionError,
            "than max_preemption_failures allows",
        ),
        (
            FitEnded(outcome="failed", reason="no quota", cause=FailureCause.PLATFORM),
            ControllerError,
            "no quota",
        ),
        (
            FitEnded(
                outcome="failed",
                reason="a callback raised",
                cause=FailureCause.PLATFORM,
                failures=(RankFailure(rank=-1, kind="raised", message=TRACEBACK),),
            ),
            ControllerError,
            "KeyError: 'lr'",
        ),
        (FitEnded(outcome="failed", reason="odd", cause=None), TrainingFailedError, "odd"),
        (
            FitEnded(outcome="failed", reason="odd", cause=FailureCause.RESIZE),
            TrainingFailedError,
            "odd",
        ),
    ],
)
def test_each_outcome_has_an_exception(
    ended: FitEnded, kind: type[Exception], message: str
) -> None:
    error = build_run_error(ended, MemoryStore(), KEY)
    assert type(error) is kind
    assert message in str(error)


def test_a_failed_machine_is_explained_by_its_output_and_a_remedy() -> None:
    printed = RankFailure(rank=-1, kind="died", message="python: No module named spotfit")
    ended = FitEnded(
        outcome="failed",
        reason="no machine has started an agent",
        cause=FailureCause.PLATFORM,
        failures=(printed,),
        failed_machine="t-1/0",
    )
    store = MemoryStore()
    error = build_run_error(ended, store, KEY)
    assert isinstance(error, ControllerError)
    assert "No module named spotfit" in str(error)
    assert f"spotfit logs --machine t-1/0 {store.url}" in str(error)


def test_another_failure_of_the_platform_has_no_remedy_for_machines() -> None:
    ended = FitEnded(outcome="failed", reason="no quota", cause=FailureCause.PLATFORM)
    assert "--machine" not in str(build_run_error(ended, MemoryStore(), KEY))


@pytest.mark.parametrize("timed_out", [False, True])
def test_a_preemption_error_has_the_last_machines(timed_out: bool) -> None:
    gone = PreemptedNodes(
        node_to_ranks={"t-2/0": (3, 2), "t-1/1": (1,)}, deadline_ms=77, drain_timed_out=timed_out
    )
    ended = FitEnded(
        outcome="failed",
        reason="failure 2 with cause 'preemption'",
        cause=FailureCause.PREEMPTION,
        preempted=gone,
    )
    error = build_run_error(ended, MemoryStore(), KEY)
    assert isinstance(error, PreemptionError)
    assert not isinstance(error, WorkerGroupError)
    assert error.preemption_info == PreemptionInfo(77, {"t-2/0": [3, 2], "t-1/1": [1]})
    assert error.drain_timed_out == timed_out
    assert "[1, 2, 3]" in str(error)
    assert error.__notes__ == ["failure 2 with cause 'preemption'"]


def test_a_preemption_without_notice_has_no_deadline() -> None:
    ended = FitEnded(
        outcome="failed",
        reason="",
        cause=FailureCause.PREEMPTION,
        preempted=PreemptedNodes(node_to_ranks={"t-1/1": (1,)}),
    )
    error = build_run_error(ended, MemoryStore(), KEY)
    assert isinstance(error, PreemptionError)
    assert error.preemption_info.deadline_ms is None


def test_a_controller_error_has_the_exception_of_the_callback() -> None:
    store, name = MemoryStore(), keys.hook_failure("0" * 64)
    store.put(name, KEY.seal(cloudpickle.dumps(KeyError("lr")), purpose=name))
    failure = RankFailure(rank=-1, kind="raised", message=TRACEBACK, pickle_key=name)
    ended = FitEnded(
        outcome="failed",
        reason="a callback raised",
        cause=FailureCause.PLATFORM,
        failures=(failure,),
    )
    error = build_run_error(ended, store, KEY)
    assert isinstance(error, ControllerError)
    assert isinstance(error.controller_failure, KeyError)
    assert error.__cause__ is error.controller_failure
    assert error.controller_failure.__notes__ == [f"raised outside of the workers:\n{TRACEBACK}"]
    assert "KeyError: 'lr'" in str(error)


# --- the error message ---------------------------------------------------------------------------


def test_equal_tracebacks_are_grouped_by_rank() -> None:
    text = format_worker_failures(
        [
            RankFailure(rank=0, kind="raised", message="ValueError: step 17"),
            RankFailure(rank=1, kind="raised", message="KeyError: 'x'"),
            RankFailure(rank=2, kind="raised", message="ValueError: step 18"),
        ]
    )
    assert text == (
        "Training failed due to worker errors:\n"
        "[Rank 0,2 Error Snippet]:\nValueError: step 17\n"
        "[Rank 1 Error Snippet]:\nKeyError: 'x'"
    )


def test_a_long_traceback_is_truncated_in_the_middle() -> None:
    text = format_worker_failures(
        [RankFailure(rank=0, kind="raised", message="head" + "x" * 5000 + "tail")]
    )
    assert len(text) < 2300
    assert "head" in text
    assert text.endswith("tail")
    assert "… 3008 characters omitted …" in text


def traceback_text(*paths: str) -> str:
    frames = [f'  File "{path}", line {n}, in f\n    call()\n' for n, path in enumerate(paths)]
    return "Traceback (most recent call last):\n" + "".join(frames) + "KeyError: 'x'"


def shortened(text: str) -> str:
    return format_worker_failures([RankFailure(rank=0, kind="raised", message=text)])


def test_a_long_traceback_keeps_the_frames_of_the_user_and_the_innermost_one() -> None:
    library = "/venv/lib/python3.11/site-packages/torch/module.py"
    text = shortened(
        traceback_text(*[library] * 30, "/project/train.py", *[library] * 30, "/opt/x.py")
    )
    assert '  File "/project/train.py", line 30, in f\n    call()\n  File "/opt/x.py"' in text
    assert library not in text
    assert "(60 frames of libraries omitted)" in text
    assert "characters omitted" not in text
    assert text.endswith("KeyError: 'x'")


def test_a_long_traceback_of_an_installed_project_is_truncated_in_the_middle() -> None:
    text = shortened(traceback_text(*["/venv/lib/python3.11/site-packages/mine/train.py"] * 60))
    assert "characters omitted" in text
    assert text.count("mine/train.py") > 10


def test_a_worker_error_names_the_command_for_the_whole_output() -> None:
    error = build_run_error(
        failed(RankFailure(rank=0, kind="died", message="exited")), MemoryStore(), KEY
    )
    assert error.__notes__ == [
        f"The whole output of the workers: `spotfit logs {MemoryStore().url}`"
    ]


def test_control_characters_of_a_traceback_are_not_in_the_message() -> None:
    failure = RankFailure(
        rank=0, kind="raised", message="\x1b[31mValueError\x1b[2J: bad\nlast\x9b2K"
    )
    assert format_worker_failures([failure]).endswith("ValueError: bad\nlast")
