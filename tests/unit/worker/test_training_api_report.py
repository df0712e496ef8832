"""The functions of `worker.training_api`: signatures, checks and calls of the session."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.committed import CheckpointReport
from spotfit.core.errors import ConfigError
from spotfit.model.events import ValidationRequest
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.validation_config import ValidationTaskConfig
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import (
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    get_preemption_info,
    report,
)


class RecordingSession(LocalSession):
    checkpoint_report: CheckpointReport | None = None
    dir_name: str | None = None

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        super().report_metrics(metrics)
        self.dir_name = dir_name

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        super().report_checkpoint(metrics, report)
        self.checkpoint_report = report


@pytest.fixture
def session() -> Iterator[RecordingSession]:
    session = RecordingSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


def test_parameters_have_the_order_of_ray_train() -> None:
    assert list(inspect.signature(report).parameters) == [
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
        "progress",  # keyword only
    ]
    assert list(inspect.signature(get_all_reported_checkpoints).parameters) == [
        "consistency_mode",
        "timeout_s",
    ]


@pytest.mark.parametrize("progress", [0, 0.25, 1])
def test_the_progress_of_a_report_is_recorded(
    session: RecordingSession, monkeypatch: pytest.MonkeyPatch, progress: float
) -> None:
    recorded: list[float] = []
    monkeypatch.setattr(session.snapshot_channel, "record_progress", recorded.append)
    report({}, progress=progress)
    assert recorded == [progress]
    report({})
    assert recorded == [progress], "the last progress is kept"


@pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan"), True, "0.5", 50])
def test_an_invalid_progress_is_rejected_before_the_report(
    session: RecordingSession, progress: Any
) -> None:
    with pytest.raises(ConfigError, match="progress must be a number from 0 to 1"):
        report({"loss": 1.0}, progress=progress)
    assert session.metrics != {"loss": 1.0}


def test_a_report_without_a_checkpoint_is_metrics_only(session: RecordingSession) -> None:
    report({"loss": 1}, checkpoint_dir_name="best")
    assert (session.metrics, session.dir_name, session.checkpoint_report) == (
        {"loss": 1},
        "best",
        None,
    )


@pytest.mark.parametrize(
    ("mode", "expected", "deletes"),
    [
        (CheckpointUploadMode.SYNC, None, False),
        (CheckpointUploadMode.ASYNC, None, True),
        (CheckpointUploadMode.NO_UPLOAD, None, False),
        (CheckpointUploadMode.SYNC, True, True),
        (CheckpointUploadMode.ASYNC, False, False),
    ],
)
def test_only_async_deletes_the_local_copy_by_default(
    session: RecordingSession,
    tmp_path: Path,
    mode: CheckpointUploadMode,
    expected: bool | None,
    deletes: bool,
) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path)
    report(
        {},
        checkpoint,
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=expected,
    )
    assert session.checkpoint_report == CheckpointReport(checkpoint, mode, deletes)
    if expected is None:
        assert mode._default_delete_local_checkpoint_after_upload() is deletes, "Ray's method"


@pytest.mark.parametrize("name", ["../up", "a/b", ".spotfit", ""])
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_an_invalid_directory_name_is_rejected(
    session: RecordingSession, tmp_path: Path, name: str, with_checkpoint: bool
) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path) if with_checkpoint else None
    with pytest.raises(ValueError, match="checkpoint_dir_name"):
        report({}, checkpoint, name)


def test_a_path_is_rejected_as_checkpoint(session: RecordingSession, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a Checkpoint, not a str"):
        report({}, str(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        (False, None),
        (True, ValidationRequest()),
        (ValidationTaskConfig(), ValidationRequest(fn_kwargs={})),
        (
            ValidationTaskConfig({"rate": float("nan")}, timeout_s=5),
            ValidationRequest(fn_kwargs={"rate": {"__float__": "nan"}}, timeout_s=5),
        ),
    ],
)
def test_a_validation_is_passed_to_the_session(
    session: RecordingSession, tmp_path: Path, validation: Any, expected: ValidationRequest | None
) -> None:
    report({}, Checkpoint.from_directory(tmp_path), validation=validation)
    assert session.checkpoint_report is not None
    assert session.checkpoint_report.validation == expected


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"fn_kwargs": {}}, "must be True, False or a ValidationTaskConfig"),
        (ValidationTaskConfig({"fn": print}), r"fn_kwargs\['fn'\] cannot be reported"),
    ],
)
def test_an_invalid_validation_is_rejected(
    session: RecordingSession, tmp_path: Path, validation: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        report({}, Checkpoint.from_directory(tmp_path), validation=validation)


def test_a_validation_without_a_checkpoint_is_rejected(session: RecordingSession) -> None:
    with pytest.raises(ValueError, match="requires a checkpoint"):
        report({}, validation=True)
    with pytest.raises(ValueError, match="requires a checkpoint"):
        report({}, validation=ValidationTaskConfig())


def test_the_other_functions_delegate_to_the_session(
    session: RecordingSession, tmp_path: Path
) -> None:
    assert get_checkpoint() is None
    report({}, Checkpoint.from_directory(tmp_path))
    assert get_checkpoint() == Checkpoint.from_directory(tmp_path)
    assert get_context().get_experiment_name() == "run"
    assert get_all_reported_checkpoints() == []
    assert get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED, timeout_s=1) == []
    assert get_preemption_info() is None


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("spotfit.report", lambda: report({})),
        ("spotfit.get_checkpoint", get_checkpoint),
        ("spotfit.get_context", get_context),
        ("spotfit.get_all_reported_checkpoints", get_all_reported_checkpoints),
        ("spotfit.get_preemption_info", get_preemption_info),
        ("spotfit.get_dataset_shard", get_dataset_shard),
    ],
)
def test_calls_outside_of_a_training_function_raise(name: str, call: Any) -> None:
    message = f"`{name}` cannot be used outside of a spotfit training function"
    with pytest.raises(RuntimeError, match=message):
        call()
