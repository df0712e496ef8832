"""Checkpoints are validated outside the workers, and get the resulting metrics."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.model.events import (
    GroupPlanned,
    JournalEvent,
    NodeLost,
    TrainingEnded,
    ValidationEnded,
    ValidationStarted,
)
from spotfit_provisioners.local.state_dir import LocalNode
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def save(epoch: int, **how: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "epoch").write_text(str(epoch))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"epoch": epoch}, checkpoint, f"epoch-{epoch}", **how)


def epoch_in(checkpoint: Any) -> int:
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "epoch").read_text())


def all_of(cloud: LiveTestCloud, kind: type[JournalEvent]) -> list[Any]:
    return [event for event in cloud.events() if isinstance(event, kind)]


def node_of(cloud: LiveTestCloud, started: ValidationStarted) -> LocalNode:
    return next(n for n in cloud.reclaimer.running_nodes() if n.group.token == started.token)


def test_validations_run_on_a_separate_machine_during_training(
    cloud: LiveTestCloud,
) -> None:
    def validate(checkpoint: Any, base: float, offset: float = 0.0) -> dict[str, float]:
        epoch = epoch_in(checkpoint)
        print("validating epoch", epoch)
        if epoch == 2:
            raise ArithmeticError("nothing there")
        return {"accuracy": base - epoch + offset}

    def train(config: Config) -> Any:
        save(1, validation=True)
        save(2, validation=True)
        save(3, validation=spotfit.ValidationTaskConfig(fn_kwargs={"offset": 0.5}))
        save(4)
        found = spotfit.get_all_reported_checkpoints()
        return [(one.metrics.get("accuracy"), one.status.name) for one in found]

    task = spotfit.ValidationTaskConfig(fn_kwargs={"base": 10.0})
    result = cloud.fit(
        train,
        validation=spotfit.ValidationConfig(validate, task),
        checkpoint_config=spotfit.CheckpointConfig(1, "accuracy"),
    )
    # Two have no accuracy: one validation failed, and the latest was not validated.
    assert result.return_value == [(None, "COMMITTED"), (9.0, "VALIDATED")]
    assert result.best_checkpoints is not None
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [1]
    assert result.metrics == {"epoch": 4}
    requests = [event.request for event in all_of(cloud, GroupPlanned)]
    assert [(one.role, one.num_workers) for one in requests] == [("train", 1), ("validate", 1)]
    started = all_of(cloud, ValidationStarted)
    assert [(one.checkpoint_name, one.token) for one in started] == [
        (f"epoch-{epoch}", requests[1].token) for epoch in (1, 2, 3)
    ]
    output = list(spotfit.attach(cloud.url()).logs())
    assert "(validation) validating epoch 3" in output
    assert "(validation) ArithmeticError: nothing there" in output


def test_validation_on_a_worker_node_is_a_process_with_a_timeout(
    cloud: LiveTestCloud,
) -> None:
    def validate(checkpoint: Any, marks: str) -> Any:
        if epoch_in(checkpoint) == 1:
            Path(marks, "sleeping").write_text(str(os.getpid()))
            time.sleep(60)
        return {"pid": os.getpid()} if epoch_in(checkpoint) == 2 else "no dictionary"

    def train(config: Config) -> Any:
        every = spotfit.CheckpointConsistencyMode
        save(1, validation=spotfit.ValidationTaskConfig(timeout_s=1.0))
        save(2, validation=True)
        save(3, validation=True)
        at_once = spotfit.get_all_reported_checkpoints(every.COMMITTED)
        too_soon = spotfit.get_all_reported_checkpoints(timeout_s=0.01)
        validated = spotfit.get_all_reported_checkpoints()
        output = [[one.status.name for one in some] for some in (at_once, too_soon, validated)]
        return os.getpid(), output

    task = spotfit.ValidationTaskConfig(fn_kwargs={"marks": str(cloud.marks)})
    result = cloud.fit(
        train, validation=spotfit.ValidationConfig(validate, task, own_machine=False)
    )
    worker, output = result.return_value
    pending = ["PENDING_VALIDATION"] * 3
    assert output == [pending, pending, ["VALIDATION_TIMEOUT", "VALIDATED", "VALIDATION_FAILED"]]
    assert result.best_checkpoints is not None
    pid = result.best_checkpoints[1][1]["pid"]
    sleeping_pid = int(cloud.wait_for_mark("sleeping").read_text())
    assert len({worker, sleeping_pid, pid}) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(sleeping_pid, 0)
    assert [event.request.role for event in all_of(cloud, GroupPlanned)] == ["train"]
    assert "no dictionary" not in all_of(cloud, ValidationEnded)[2].reason
    assert "must return a dictionary" in all_of(cloud, ValidationEnded)[2].reason


def test_validation_survives_the_loss_of_its_machine_and_the_end_of_training(
    cloud: LiveTestCloud,
) -> None:
    def validate(checkpoint: Any, marks: str) -> dict[str, Any]:
        tries = len(list(Path(marks).glob("try-*"))) + 1
        Path(marks, f"try-{tries}").touch()
        while not Path(marks, "go").exists():
            time.sleep(0.02)
        return {"tries": tries}

    def train(config: Config) -> str:
        if spotfit.get_checkpoint() is None:
            save(1, validation=True)
        return "trained"

    task = spotfit.ValidationTaskConfig(fn_kwargs={"marks": str(cloud.marks)})
    how = {"validation": spotfit.ValidationConfig(validate, task), "workers": 2, "nodes": 2}
    handle = cloud.submit(train, **how)
    cloud.wait_for_mark("try-1")
    eventually(lambda: all_of(cloud, TrainingEnded))
    first = all_of(cloud, ValidationStarted)[0]
    eventually(
        lambda: len(cloud.reclaimer.running_nodes()) == 1
    )  # the machines of workers are not needed
    assert handle.status().state == "validating"

    cloud.reclaimer.kill(node_of(cloud, first))  # it was the leader as well: no agent remains
    cloud.wait_for_mark("try-2")
    assert any(lost.agent == first.agent for lost in all_of(cloud, NodeLost))
    handle.cancel()
    with pytest.raises(spotfit.RunCancelledError):
        handle.result()

    again = cloud.submit(train, **how)
    cloud.wait_for_mark("try-3")
    cloud.write_mark("go")
    result = again.result()
    assert (result.return_value, result.metrics) == ("trained", {"epoch": 1, "tries": 3})
    assert [one.status for one in all_of(cloud, ValidationEnded)] == ["validated"]
