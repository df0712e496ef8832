"""What a training function calls, and what it may not write."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.model.events import ValidationAsked
from spotfit.model.reporting import CheckpointConsistencyMode, CheckpointUploadMode
from spotfit.model.validation import ValidationTaskConfig
from spotfit.worker import current
from spotfit.worker.local import LocalSession
from spotfit.worker.report import (
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    get_preemption_info,
    report,
)
from spotfit.worker.reported import Luggage


class Noting(LocalSession):
    luggage: Luggage | None = None
    dir_name: str | None = None

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        super().report_metrics(metrics)
        self.dir_name = dir_name

    def report_files(self, metrics: dict[str, Any], luggage: Luggage) -> None:
        super().report_files(metrics, luggage)
        self.luggage = luggage


@pytest.fixture
def session() -> Iterator[Noting]:
    session = Noting("run")
    current.enter(session)
    yield session
    current.leave()


def test_positions_are_those_of_ray_train() -> None:
    assert list(inspect.signature(report).parameters) == [
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
    ]
    assert list(inspect.signature(get_all_reported_checkpoints).parameters) == [
        "consistency_mode",
        "timeout_s",
    ]


def test_a_report_without_a_checkpoint_is_metrics_only(session: Noting) -> None:
    report({"loss": 1}, checkpoint_dir_name="best")
    assert (session.metrics, session.dir_name, session.luggage) == ({"loss": 1}, "best", None)


@pytest.mark.parametrize(
    ("mode", "asked", "deletes"),
    [
        (CheckpointUploadMode.SYNC, None, False),
        (CheckpointUploadMode.ASYNC, None, True),
        (CheckpointUploadMode.NO_UPLOAD, None, False),
        (CheckpointUploadMode.SYNC, True, True),
        (CheckpointUploadMode.ASYNC, False, False),
    ],
)
def test_only_async_deletes_the_local_copy_unasked(
    session: Noting, tmp_path: Path, mode: CheckpointUploadMode, asked: bool | None, deletes: bool
) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path)
    report(
        {},
        checkpoint,
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=asked,
    )
    assert session.luggage == Luggage(checkpoint, mode, deletes)


@pytest.mark.parametrize("name", ["../up", "a/b", ".spotfit", ""])
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_name_that_is_no_folder_is_refused(
    session: Noting, tmp_path: Path, name: str, with_checkpoint: bool
) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path) if with_checkpoint else None
    with pytest.raises(ValueError, match="checkpoint_dir_name"):
        report({}, checkpoint, name)


def test_a_path_is_no_checkpoint(session: Noting, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a Checkpoint, not a str"):
        report({}, str(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("validation", "asked"),
    [
        (False, None),
        (True, ValidationAsked()),
        (ValidationTaskConfig(), ValidationAsked({})),
        (
            ValidationTaskConfig({"rate": float("nan")}, timeout_s=5),
            ValidationAsked({"rate": {"__float__": "nan"}}, 5),
        ),
    ],
)
def test_a_validation_may_be_asked_for(
    session: Noting, tmp_path: Path, validation: Any, asked: ValidationAsked | None
) -> None:
    report({}, Checkpoint.from_directory(tmp_path), validation=validation)
    assert session.luggage is not None
    assert session.luggage.validation == asked


@pytest.mark.parametrize(
    ("validation", "told"),
    [
        ({"fn_kwargs": {}}, "must be True, False or a ValidationTaskConfig"),
        (ValidationTaskConfig({"fn": print}), r"fn_kwargs\['fn'\] cannot be reported"),
    ],
)
def test_a_validation_must_be_a_wish_that_can_be_kept(
    session: Noting, tmp_path: Path, validation: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        report({}, Checkpoint.from_directory(tmp_path), validation=validation)


def test_a_validation_needs_a_checkpoint(session: Noting) -> None:
    with pytest.raises(ValueError, match="requires a checkpoint"):
        report({}, validation=True)
    with pytest.raises(ValueError, match="requires a checkpoint"):
        report({}, validation=ValidationTaskConfig())


def test_the_session_is_asked_for_the_rest(session: Noting, tmp_path: Path) -> None:
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
def test_outside_of_a_training_function_nobody_answers(name: str, call: Any) -> None:
    words = f"`{name}` cannot be used outside of a spotfit training function"
    with pytest.raises(RuntimeError, match=words):
        call()
