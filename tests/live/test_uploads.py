"""Asynchronous uploads survive the worker, are awaited at the end, and fail at once."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]


def report_async(text: str) -> Path:
    """Report a checkpoint that holds the text; the local directory."""
    folder = Path(tempfile.mkdtemp())
    (folder / f"rank{spotfit.get_context().get_world_rank()}").write_text(text)
    spotfit.report(
        {"text": text},
        checkpoint=spotfit.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=spotfit.CheckpointUploadMode.ASYNC,
    )
    return folder


def restored_lines() -> list[str] | None:
    """Return the content of the restored checkpoint."""
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return sorted(path.read_text() for path in Path(folder).iterdir())


def test_run_finishes_although_its_function_caught_the_error_of_a_report(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> str:
        missing = spotfit.Checkpoint.from_directory("/is/not/there")
        try:
            spotfit.report({"step": 1}, checkpoint=missing)
        except FileNotFoundError:
            spotfit.report({"step": 2})
        return "caught"

    result = cloud.fit(train)

    assert (result.return_value, result.checkpoint) == ("caught", None)
    assert result.metrics == {"step": 2}


def test_async_upload_completes_after_its_worker_is_killed(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> list[str] | None:
        if (started_at := restored_lines()) is None:
            time.sleep(1.0)  # uploads are awaited as long as the work that would be lost
            report_async("precious")
            spotfit.collective.barrier()  # both ranks have reported
            os._exit(9)
        return started_at

    result = cloud.fit(train, workers=2, nodes=2, max_failures=1)

    assert result.return_value == ["precious", "precious"]
    assert len(cloud.rounds_closed()) == 1


def test_failed_run_keeps_pending_async_uploads(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> list[str] | None:
        if (started_at := restored_lines()) is None:
            time.sleep(1.0)
            report_async("precious")
            raise ValueError("after that")
        return started_at

    with pytest.raises(spotfit.WorkerGroupError, match="after that"):
        cloud.fit(train)
    assert cloud.fit(train).return_value == ["precious"]


def test_run_end_waits_for_uploads_and_removes_local_copies(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> list[Path]:
        return [report_async(f"{n}" * 1_000_000) for n in range(3)]

    result = cloud.fit(train)

    assert result.best_checkpoints is not None
    assert [metrics["text"][0] for _, metrics in result.best_checkpoints] == ["0", "1", "2"]
    assert not any(folder.exists() for folder in result.return_value)


def test_failed_upload_ends_its_worker_during_training(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> None:
        spotfit.report(
            {},
            checkpoint=spotfit.Checkpoint.from_directory("/nowhere"),
            checkpoint_upload_mode=spotfit.CheckpointUploadMode.ASYNC,
        )
        time.sleep(3600)

    with pytest.raises(spotfit.WorkerGroupError, match="/nowhere, does not exist") as failed:
        cloud.fit(train)
    assert isinstance(failed.value.worker_failures[0], FileNotFoundError)


def test_crash_during_name_reuse_keeps_the_previous_checkpoint(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> list[str] | None:
        if (started_at := restored_lines()) is not None:
            return started_at
        through, rank = Path(config["marks"], "through"), spotfit.get_context().get_world_rank()

        def die(_: spotfit.Checkpoint, __: str) -> spotfit.Checkpoint:
            while not through.exists():
                time.sleep(0.01)
            os._exit(9)

        for text in ("one", "two"):
            folder = Path(tempfile.mkdtemp())
            (folder / f"rank{rank}").write_text(text)
            spotfit.report(
                {"text": text},
                checkpoint=spotfit.Checkpoint.from_directory(folder),
                checkpoint_dir_name="last",
                checkpoint_upload_fn=die if (rank, text) == (1, "two") else None,
            )
        through.touch()  # this rank has uploaded its files of the second report
        time.sleep(3600)
        return None

    result = cloud.fit(train, workers=2, nodes=2, max_failures=1)

    assert result.return_value == ["one", "one"]
    assert len(cloud.rounds_closed()) == 1
