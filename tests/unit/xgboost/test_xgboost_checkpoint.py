"""XGBoostCheckpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

xgboost = pytest.importorskip("xgboost")

import numpy  # noqa: E402

from spotfit.core.errors import NotFoundError  # noqa: E402
from spotfit.xgboost import XGBoostCheckpoint  # noqa: E402


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_model_and_preprocessor_are_stored(tmp_path: Path) -> None:
    rows = xgboost.DMatrix(numpy.arange(8.0).reshape(4, 2), label=[0, 1, 0, 1])
    model = xgboost.train({}, rows, 2)
    checkpoint = XGBoostCheckpoint.from_model(model, preprocessor={"mean": 1}, path=tmp_path / "m")
    assert (tmp_path / "m" / "model.json").exists()
    assert checkpoint.get_model().save_raw() == model.save_raw()
    assert checkpoint.get_preprocessor() == {"mean": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"model\.json"):
        XGBoostCheckpoint.from_directory(tmp_path).get_model()


def test_the_class_is_deprecated(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="XGBoostCheckpoint is deprecated"):
        XGBoostCheckpoint(tmp_path)
