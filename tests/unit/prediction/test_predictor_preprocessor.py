"""Predictors find the preprocessor of the training in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import numpy as np

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.data.preprocessors import Concatenator, StandardScaler, Tokenizer, checkpoint_metadata
from spotfit.frameworks.torch.torch_checkpoint import TorchCheckpoint
from spotfit.prediction.predictor import Predictor, preprocessor_of


class Sum(Predictor):
    def predict_batch(self, data: Any) -> Any:
        return {"y": data["x"].sum(keepdims=True)}


def test_a_preprocessor_without_code_is_read_from_any_checkpoint(tmp_path: Path) -> None:
    scaler = StandardScaler(["x"])
    scaler.stats_ = {"mean(x)": 1.0, "std(x)": 2.0}
    checkpoint = Checkpoint.from_directory(tmp_path)
    checkpoint.update_metadata(checkpoint_metadata(scaler))
    predictor = Sum(preprocessor_of(checkpoint))
    assert predictor.predict({"x": np.array([1.0, 5.0])})["y"].tolist() == [2.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_reported_checkpoint_of_a_framework_has_its_preprocessor(tmp_path: Path) -> None:
    stored = TorchCheckpoint.from_directory(tmp_path)
    stored.set_preprocessor(Tokenizer(["t"], str.split))
    stored.set_preprocessor(Concatenator(["x"]))
    # A report returns a plain Checkpoint, of which nothing is unpickled.
    for reported in (Checkpoint.from_directory(tmp_path), stored):
        assert preprocessor_of(reported).parameters() == Concatenator(["x"]).parameters()


def test_a_preprocessor_with_code_is_read_from_checkpoints_of_frameworks(tmp_path: Path) -> None:
    plain = Checkpoint.from_directory(tmp_path)
    plain.update_metadata(checkpoint_metadata(Tokenizer(["t"], str.split)))
    assert preprocessor_of(plain) is None
    with pytest.warns(DeprecationWarning, match="TorchCheckpoint is deprecated"):
        stored = TorchCheckpoint.from_directory(tmp_path)
    assert isinstance(preprocessor_of(stored), Tokenizer)
