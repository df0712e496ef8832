"""RayTrainReportCallback reports a checkpoint of Lightning at the end of epochs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spotfit.data
from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.lightning import epoch_report
from spotfit.lightning.epoch_report import ReportHooks
from spotfit.model.reporting import CheckpointUploadMode
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalSession]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


class OneFileTrainer:
    """Saves as Lightning does, on rank 0 only."""

    global_step = 7
    max_epochs: int | None = -1
    max_steps = -1

    def __init__(self, epoch: int, *, writes: bool = True, loader: Any = None) -> None:
        self.current_epoch = epoch
        # Lightning has none before its loaders are set up.
        combined = None if loader is None else SimpleNamespace(flattened=[loader])
        self.fit_loop = SimpleNamespace(_combined_loader=combined)
        self.callback_metrics = {"loss": torch.tensor(0.5)}
        self.strategy = SimpleNamespace(barrier=lambda: None)
        self._writes = writes

    def save_checkpoint(self, path: Path, *, weights_only: bool) -> None:
        assert not weights_only
        if self._writes:
            path.write_text("weights")


def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return a list to which each report adds its metrics and the text of its file."""
    made = []

    def record(metrics: Any, checkpoint: Any, **_options: Any) -> None:
        file = Path(checkpoint.path, ReportHooks.CHECKPOINT_NAME) if checkpoint else None
        made.append((metrics, file.read_text() if file else None))

    monkeypatch.setattr(epoch_report, "report", record)
    return made


@pytest.mark.parametrize("writes", [True, False])
def test_metrics_and_the_files_of_this_rank_are_reported(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, writes: bool
) -> None:
    made = reports(monkeypatch)
    ReportHooks().on_train_epoch_end(OneFileTrainer(2, writes=writes), None)
    assert made == [({"loss": 0.5, "epoch": 2, "step": 7}, "weights" if writes else None)]
    assert not list(tmp_path.iterdir()), "the local files are deleted"


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "progress"),
    [
        (4, -1, 0.75),
        (-1, 14, 0.5),
        (100, 14, 0.5),
        (4, 100, 0.75),
        (-1, -1, None),
        (None, -1, None),
        (2, 5, 1.0),
    ],
)
def test_the_progress_is_that_of_the_first_limit(
    session: LocalSession,
    monkeypatch: pytest.MonkeyPatch,
    max_epochs: int | None,
    max_steps: int,
    progress: float | None,
) -> None:
    made: list[float | None] = []
    monkeypatch.setattr(
        epoch_report, "report", lambda _metrics, progress, **_: made.append(progress)
    )
    trainer = OneFileTrainer(2)
    trainer.max_epochs, trainer.max_steps = max_epochs, max_steps
    ReportHooks().on_train_epoch_end(trainer, None)
    assert made == [progress]


def test_an_upload_in_the_background_keeps_the_files(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reports(monkeypatch)
    ReportHooks(CheckpointUploadMode.ASYNC).on_train_epoch_end(OneFileTrainer(0), None)
    assert len(list(tmp_path.iterdir())) == 1


def test_only_every_nth_epoch_is_reported(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reports(monkeypatch)
    callback = ReportHooks(every_n_epochs=2)
    for epoch in range(5):
        callback.on_train_epoch_end(OneFileTrainer(epoch), None)
    assert [metrics["epoch"] for metrics, _ in made] == [1, 3]


def test_an_interval_below_one_is_rejected(session: LocalSession) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ReportHooks(every_n_epochs=0)


def test_it_is_created_in_a_training_function() -> None:
    with pytest.raises(SessionMisuseError):
        ReportHooks()


def test_a_report_ends_the_epoch_of_a_dataset_shard(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning has read a batch more than `limit_train_batches`."""
    reports(monkeypatch)
    shard = DataIterator(ShardPosition(spotfit.data.range(50), ShardGroup()))
    batches = iter(shard.iter_batches(batch_size=10))
    first = [next(batches)["id"][0] for _ in range(3)]
    ReportHooks().on_train_epoch_end(OneFileTrainer(0, loader=shard), None)
    state = shard.position.state()
    assert (first, state["epoch"], state["consumed"]) == ([0, 10, 20], 1, 0)
