"""Predictors apply the preprocessor of the trainer's dataset, without code of the user for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spotfit
import spotfit.data
from spotfit.data.preprocessors import Concatenator, StandardScaler, checkpoint_metadata
from tests.live.cloud import LiveTestCloud

torch = pytest.importorskip("torch")


def make_model() -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def read_batches(config: dict[str, Any]) -> None:
    for _ in spotfit.get_dataset_shard("train").iter_torch_batches(batch_size=2):
        pass


def report_files(config: dict[str, Any]) -> None:
    read_batches(config)
    if spotfit.get_context().get_world_rank() == 0:
        spotfit.report({}, checkpoint=None)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(make_model().state_dict(), Path(folder, "model.pt"))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        if config.get("is_explicit"):
            checkpoint.set_metadata({"epoch": 1, **checkpoint_metadata(Concatenator(["x"], "x"))})
        spotfit.report({}, checkpoint=checkpoint)


def save_snapshot(config: dict[str, Any]) -> None:
    from spotfit.torch import Checkpointer

    checkpointer = Checkpointer(model=make_model(), every=1)
    checkpointer.restore()
    read_batches(config)
    checkpointer.step({})


def scaled_rows() -> spotfit.data.Dataset:
    rows = spotfit.data.from_items([{"x": value} for value in (2.0, 4.0, 6.0, 8.0)])
    scaled = StandardScaler(["x"]).fit_transform(rows)
    return Concatenator(["x"], "x", dtype=np.float32).transform(scaled)


def predictions(checkpoint: spotfit.Checkpoint) -> list[float]:
    from spotfit.prediction import TorchPredictor

    predictor = TorchPredictor.from_checkpoint(checkpoint, make_model())
    predicted = predictor.predict({"x": np.array([5.0, 10.0], np.float32)})["predictions"]
    return [float(value) for value in predicted.ravel()]


@pytest.mark.parametrize("save", [report_files, save_snapshot])
def test_a_predictor_applies_the_preprocessor_of_the_training_rows(
    save: Any, cloud: LiveTestCloud
) -> None:
    result = cloud.fit(
        save,
        workers=2,
        trainer_type=spotfit.torch.TorchTrainer,
        datasets={"train": scaled_rows()},
    )
    assert result.checkpoint is not None
    assert predictions(result.checkpoint) == pytest.approx([0.0, 5 / 5**0.5])
    copied = spotfit.Checkpoint(result.checkpoint.to_directory())
    assert copied.get_metadata() == result.checkpoint.get_metadata()


def test_the_preprocessor_of_the_user_is_applied_instead(cloud: LiveTestCloud) -> None:
    result = cloud.fit(
        report_files, workers=2, datasets={"train": scaled_rows()}, config={"is_explicit": True}
    )
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata()["epoch"] == 1
    assert predictions(result.checkpoint) == [5.0, 10.0]
