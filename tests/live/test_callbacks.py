"""User callbacks receive reports and failures; their exceptions end the run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import spotfit
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]


class RecordingCallback(spotfit.UserCallback):
    """Records its calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        files = None
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                files = sorted(path.name for path in Path(folder).iterdir())
        self.note("report", metrics, files, run_context.train_loop_config["rate"])

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        result = {rank: repr(error) for rank, error in worker_exceptions.items()}
        self.note("exception", result, run_context.get_run_config().name)

    def note(self, *call: Any) -> None:
        with self.path.open("a") as path:
            path.write(json.dumps(call) + "\n")

    def read(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class EnvironmentCallback(RecordingCallback):
    """Has its own path, for use from the environment."""

    def __init__(self) -> None:
        super().__init__(Path(os.environ["PAGE"]))


class RaisingCallback(spotfit.UserCallback):
    """Raises for a loss above one."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        if metrics[0]["loss"] > 1:
            raise ArithmeticError(f"a loss of {metrics[0]['loss']}")


def save(metrics: dict[str, Any]) -> None:
    rank = spotfit.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"of-rank-{rank}").touch()
        spotfit.report(metrics, checkpoint=spotfit.Checkpoint.from_directory(folder))


def test_callbacks_receive_every_report_with_the_metrics_of_all_ranks(cloud: LiveTestCloud) -> None:
    def train() -> None:
        rank = spotfit.get_context().get_world_rank()
        spotfit.report({"loss": 1.0, "rank": rank})
        save({"loss": 0.5, "rank": rank})

    recorder = RecordingCallback(cloud.folder / "calls")
    cloud.fit(train, workers=2, config={"rate": 0.1}, callbacks=[recorder])

    assert recorder.read() == [
        ["report", [{"loss": 1.0, "rank": 0}, {"loss": 1.0, "rank": 1}], None, 0.1],
        [
            "report",
            [{"loss": 0.5, "rank": 0}, {"loss": 0.5, "rank": 1}],
            ["of-rank-0", "of-rank-1"],
            0.1,
        ],
    ]


def test_callbacks_receive_each_failed_attempt_once(cloud: LiveTestCloud) -> None:
    def train() -> None:
        if spotfit.get_checkpoint() is None:
            save({"step": 1})
        if spotfit.get_context().get_world_rank() == 1:
            raise LookupError("no such data")
        spotfit.collective.barrier()

    recorder = RecordingCallback(cloud.folder / "calls")
    with pytest.raises(spotfit.WorkerGroupError):
        cloud.fit(train, workers=2, config={"rate": 1}, callbacks=[recorder], max_failures=1)

    failures = [call for call in recorder.read() if call[0] == "exception"]
    assert failures == [["exception", {"1": "LookupError('no such data')"}, "run"]] * 2


def test_exception_of_a_callback_ends_the_run_without_a_retry(cloud: LiveTestCloud) -> None:
    def train() -> None:
        import time

        spotfit.report({"loss": 0.5})
        spotfit.report({"loss": 2.0})
        time.sleep(600)

    with pytest.raises(
        spotfit.ControllerError, match=r"ArithmeticError: a loss of 2\.0"
    ) as error_info:
        cloud.fit(train, callbacks=[RaisingCallback()], max_failures=5)

    assert repr(error_info.value.controller_failure) == "ArithmeticError('a loss of 2.0')"
    assert len(cloud.rounds_opened()) == 1


def test_callback_from_the_environment_is_called(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cloud.folder / "calls"
    monkeypatch.setenv("PAGE", str(path))
    monkeypatch.setenv("SPOTFIT_CALLBACKS", f"{__name__}.EnvironmentCallback")
    cloud.fit(lambda: spotfit.report({"loss": 0.5}), name=None, config={"rate": 1})
    assert RecordingCallback(path).read() == [["report", [{"loss": 0.5}], None, 1]]


def test_run_waits_for_the_last_callback(cloud: LiveTestCloud) -> None:
    with pytest.raises(spotfit.ControllerError, match="a loss of 3"):
        cloud.fit(lambda: spotfit.report({"loss": 3}), callbacks=[RaisingCallback()])
