"""Keras's callback: events, metrics, checkpoints, and the continuation from them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.checkpoint.committed import CheckpointReport
from spotfit.core.errors import ConfigError, MissingExtraError, NotFoundError
from spotfit.model.topology import Ranks
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import use_session
from tests.unit.tensorflow import fake_tensorflow
from tests.unit.tensorflow.fake_tensorflow import LegacyModel, Model


class Recorder(LocalSession):
    """Records the metrics of each report, and whether it has a checkpoint."""

    def __init__(self, peers: Any = None) -> None:
        super().__init__("run", peers)
        self.reports: list[tuple[dict[str, Any], bool]] = []

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        self.reports.append((metrics, False))
        super().report_metrics(metrics, dir_name)

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        super().report_checkpoint(metrics, report)
        self.reports[-1] = (metrics, True)  # it reports the metrics as well


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake_tensorflow.install(monkeypatch)
    yield importlib.import_module("spotfit.tensorflow.keras_callback")
    sys.modules.pop("spotfit.tensorflow.keras_callback", None)


def fit(callback: Any, model: Model, epochs: int, *, initial_epoch: int = 0) -> None:
    """Call the callback as `model.fit` with two batches in each epoch does."""
    callback.model, callback.params = model, {"epochs": epochs, "steps": 2}
    callback.on_train_begin()
    for epoch in range(initial_epoch, epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
            model.weight += 1
            callback.on_train_batch_end(batch, {"loss": 9.0})
        callback.on_epoch_end(epoch, {"loss": epoch / 10, "accuracy": 0.5})
    callback.on_train_end({"loss": 1.0})


def test_every_event_of_keras_can_be_reported(keras: Any) -> None:
    methods = {name.removeprefix("on_") for name in vars(keras.ReportCheckpointCallback)}
    assert set(keras.EVENTS) <= methods
    for event in keras.EVENTS:
        session = Recorder()
        with use_session(session):
            callback = keras.ReportCheckpointCallback([], event)
            arguments = (0, {"m": 1}) if "batch" in event or "epoch" in event else ({"m": 1},)
            getattr(callback, f"on_{event}")(*arguments)
        assert session.reports == [({"m": 1}, False)]


@pytest.mark.parametrize("argument", ["checkpoint_on", "report_metrics_on"])
def test_another_event_is_a_value_error(keras: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=r"on_epoch_end.*\n.*'epoch_end'") as caught:
        keras.ReportCheckpointCallback(**{argument: ["epoch_end", "on_epoch_end"]})
    assert isinstance(caught.value, ConfigError)


def test_an_epoch_is_reported_with_metrics_and_model(keras: Any) -> None:
    session = Recorder()
    with use_session(session):
        fit(keras.ReportCheckpointCallback(), Model(), 2)
    metrics = [{"loss": 0.0, "accuracy": 0.5}, {"loss": 0.1, "accuracy": 0.5}]
    assert session.reports == [(one, True) for one in metrics]


@pytest.mark.parametrize(
    ("events", "epochs", "initial_epoch", "progress"),
    [
        ("epoch_end", 4, 0, [0.25, 0.5, 0.75, 1.0]),
        ("epoch_end", 4, 2, [0.75, 1.0]),
        # A training that resumes repeats the epoch.
        ("train_batch_end", 2, 0, [0.0, 0.0, 0.5, 0.5]),
        # Training functions may call fit() for each epoch.
        ("epoch_end", 1, 0, []),
    ],
)
def test_the_progress_is_the_share_of_complete_epochs(
    keras: Any,
    monkeypatch: pytest.MonkeyPatch,
    events: str,
    epochs: int,
    initial_epoch: int,
    progress: list[float],
) -> None:
    session = Recorder()
    reported: list[float] = []
    monkeypatch.setattr(session.snapshot_channel, "record_progress", reported.append)
    with use_session(session):
        fit(keras.ReportCheckpointCallback(events), Model(), epochs, initial_epoch=initial_epoch)
    assert reported == progress


def test_metrics_and_models_have_events_of_their_own(keras: Any) -> None:
    session = Recorder()
    with use_session(session):
        fit(keras.ReportCheckpointCallback("train_end", "train_batch_end"), Model(), 1)
    assert session.reports == [({"loss": 9.0}, False), ({"loss": 9.0}, False), ({}, True)]


@pytest.mark.parametrize(
    ("metrics", "reported"),
    [
        ("loss", {"loss": 0.0}),
        (["accuracy", "loss"], {"accuracy": 0.5, "loss": 0.0}),
        ({"acc": "accuracy"}, {"acc": 0.5}),
    ],
)
def test_metrics_are_selected(keras: Any, metrics: Any, reported: dict[str, float]) -> None:
    session = Recorder()
    with use_session(session):
        fit(keras.ReportCheckpointCallback(metrics=metrics), Model(), 1)
    assert session.reports == [(reported, True)]


def test_an_unknown_metric_is_rejected_with_a_suggestion(keras: Any) -> None:
    with use_session(Recorder()), pytest.raises(ConfigError, match=r"'acuracy'(.|\n)*'accuracy'"):
        fit(keras.ReportCheckpointCallback(metrics="acuracy"), Model(), 1)


def test_only_rank_0_reports_the_model(
    keras: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(keras.tempfile, "mkdtemp", lambda prefix: make_dir(tmp_path / prefix))
    session = Recorder(SecondOfTwo())
    with use_session(session):
        fit(keras.ReportCheckpointCallback(), Model(), 1)
    assert [has_checkpoint for _, has_checkpoint in session.reports] == [False]
    assert list(tmp_path.iterdir()) == []


class SecondOfTwo:
    """A launcher's group of two processes."""

    ranks = Ranks(world_rank=1, world_size=2, local_rank=1, local_world_size=2)

    def barrier(self) -> None: ...

    def broadcast(self, value: Any) -> Any:
        return value


def make_dir(path: Path) -> str:
    path.mkdir()
    return str(path)


def test_a_model_continues_after_the_last_whole_epoch(keras: Any) -> None:
    with use_session(Recorder()):
        assert keras.restore_model(Model()) == 0
        fit(keras.ReportCheckpointCallback("train_batch_begin"), Model(), 3)
        restored = Model()
        assert keras.restore_model(restored) == 2
        assert restored.weight == 5
        fit(keras.ReportCheckpointCallback(), restored, 4, initial_epoch=3)
        assert keras.restore_model(restored) == 4


@pytest.mark.parametrize("state", [[0.25], []])
def test_the_state_of_a_legacy_optimizer_is_restored(keras: Any, state: list[float]) -> None:
    pytest.importorskip("numpy")
    with use_session(Recorder()):
        model = LegacyModel()
        model.optimizer.state = state
        fit(keras.ReportCheckpointCallback(), model, 1)
        restored = LegacyModel()
        assert keras.restore_model(restored) == 1
    assert (restored.weight, restored.optimizer.state) == (2, state or [0.0])


def test_a_checkpoint_without_the_state_of_a_legacy_optimizer_is_rejected(keras: Any) -> None:
    pytest.importorskip("numpy")
    with use_session(Recorder()):
        fit(keras.ReportCheckpointCallback(), Model(), 1)
        with pytest.raises(NotFoundError, match=r"no file optimizer\.npz"):
            keras.restore_model(LegacyModel())


@pytest.mark.parametrize(("optimizer", "reason"), [(None, "no optimizer"), (3, "optimizer int")])
def test_a_model_that_could_not_be_restored_is_rejected_at_the_start(
    keras: Any, optimizer: Any, reason: str
) -> None:
    model = Model()
    model.optimizer = optimizer
    with use_session(Recorder()), pytest.raises(ConfigError, match=reason):
        keras.restore_model(model)


def test_a_checkpoint_of_another_origin_is_rejected(keras: Any, tmp_path: Path) -> None:
    with use_session(Recorder()):
        spotfit.report({}, checkpoint=spotfit.Checkpoint.from_directory(str(tmp_path)))
        with pytest.raises(NotFoundError, match="number of epochs"):
            keras.restore_model(Model())


def test_an_environment_without_tensorflow_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.delitem(sys.modules, "spotfit.tensorflow.keras_callback", raising=False)
    with pytest.raises(MissingExtraError, match="tensorflow"):
        importlib.import_module("spotfit.tensorflow.keras_callback")
