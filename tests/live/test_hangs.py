"""A hanging rank is detected, stacks of all ranks are stored, and the attempt ends."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.model.events import FailureCause
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def rank() -> int:
    return spotfit.get_context().get_world_rank()


def hold_the_lock() -> None:
    """Hold the GIL, so that no thread of this process runs."""
    re.match("(a+)+$", "a" * 60 + "b")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stacks(cloud: LiveTestCloud, text: str) -> str:
    """Return the stack file that the message names."""
    found = re.search(r"the stacks of all ranks are in (\S+\.txt)", text)
    assert found is not None, text
    assert found[1].startswith(cloud.url())
    return Path(found[1]).read_text()


@pytest.mark.parametrize(
    ("hang", "seen"),
    [(hold_the_lock, "in hold_the_lock"), (stop, "kernel state: stopped")],
    ids=["in compiled code", "stopped"],
)
def test_unresponsive_rank_ends_its_attempt_with_a_stack_dump(
    cloud: LiveTestCloud, hang: Any, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config) -> str:
        mark = Path(config["marks"], "hung once")
        if rank() == 1 and not mark.exists():
            mark.touch()
            hang()
        wait_for_the_others()
        return "finished"

    def wait_for_the_others() -> None:
        spotfit.collective.barrier()

    monkeypatch.setenv("SPOTFIT_WORKER_HEALTH_CHECK_TIMEOUT_S", "2")
    assert cloud.fit(train, workers=2, nodes=2, max_failures=1).return_value == "finished"

    [closed] = cloud.rounds_closed()
    assert closed.cause is FailureCause.WORKER
    [failure] = closed.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    assert re.search(r"rank 0 at \S+test_hangs\.py:\d+ in wait_for_the_others", failure.message)
    kept = stacks(cloud, failure.message)
    assert kept.index("=== rank 1") < kept.index("=== rank 0")
    assert seen in kept.partition("=== rank 0")[0]
    assert "in wait_for_the_others" in kept.partition("=== rank 0")[2]


def test_round_without_progress_is_ended_if_configured(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        spotfit.report({"step": 0})
        if rank() == 1:
            spotfit.report({"step": 1})
        time.sleep(600)

    monkeypatch.setenv("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "1")
    monkeypatch.setenv("SPOTFIT_HANG_CONFIRM_DURATION_S", "1")
    monkeypatch.setenv("SPOTFIT_HANG_ACTION", "fail")
    with pytest.raises(
        spotfit.HangError, match="rank 0 has made less progress than the others"
    ) as error_info:
        cloud.fit(train, workers=2)
    assert isinstance(error_info.value, spotfit.WorkerGroupError)
    assert set(error_info.value.worker_failures) == {0}
    assert "in train" in stacks(cloud, str(error_info.value))


def test_round_without_progress_continues_if_only_observed(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config) -> str:
        stacks_dir = Path(config["url"], ".spotfit", "stacks")
        while not stacks_dir.exists():
            time.sleep(0.05)
        return "only slow"

    monkeypatch.setenv("SPOTFIT_ENABLE_HANG_DETECTOR", "1")
    monkeypatch.setenv("SPOTFIT_HANG_CONFIRM_DURATION_S", "1")
    handle = cloud.submit(train, config={"url": cloud.url()})
    assert handle.result(60).return_value == "only slow"

    def run_lines() -> list[str]:
        lines = [line for line in handle.logs() if line.startswith("(run)")]
        return lines if len(lines) > 1 else []

    size, report = eventually(run_lines)
    assert "GiB memory" in size
    assert "in train" in stacks(cloud, report)
