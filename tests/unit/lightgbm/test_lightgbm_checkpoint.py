"""LightGBMCheckpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

lightgbm = pytest.importorskip("lightgbm")

import numpy  # noqa: E402

from spotfit.core.errors import NotFoundError  # noqa: E402
from spotfit.lightgbm import LightGBMCheckpoint  # noqa: E402


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_model_and_preprocessor_are_stored(tmp_path: Path) -> None:
    rows = lightgbm.Dataset(numpy.arange(80.0).reshape(40, 2), label=numpy.arange(40) % 2)
    model = lightgbm.train({"verbosity": -1}, rows, 2)
    checkpoint = LightGBMCheckpoint.from_model(model, preprocessor={"mean": 1}, path=tmp_path / "m")
    assert (tmp_path / "m" / "model.txt").exists()
    assert checkpoint.get_model().model_to_string() == model.model_to_string()
    assert checkpoint.get_preprocessor() == {"mean": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"model\.txt"):
        LightGBMCheckpoint.from_directory(tmp_path).get_model()


def test_the_class_is_deprecated(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="LightGBMCheckpoint is deprecated"):
        LightGBMCheckpoint(tmp_path)
