"""LightGBMTrainer: the arguments, and training on datasets in this process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import spotfit
from spotfit.client.trainer import DataParallelTrainer
from spotfit.lightgbm import LightGBMConfig, LightGBMTrainer

LOCAL = spotfit.ScalingConfig(num_workers=0)


def test_the_trainer_selects_the_framework() -> None:
    trainer = LightGBMTrainer(print, scaling_config=spotfit.ScalingConfig(num_workers=2))
    assert isinstance(trainer, DataParallelTrainer)
    assert trainer.backend_config == LightGBMConfig()


def test_another_configuration_is_rejected() -> None:
    with pytest.raises(spotfit.ConfigError, match="lightgbm_config"):
        LightGBMTrainer(print, lightgbm_config="rabit")  # type: ignore[arg-type]  # the mistake


def test_get_model_of_the_trainer_raises_as_in_ray() -> None:
    with pytest.raises(DeprecationWarning, match=r"RayTrainReportCallback\.get_model"):
        LightGBMTrainer.get_model(object())


def test_importing_the_package_does_not_import_lightgbm() -> None:
    program = (
        "import sys, spotfit.lightgbm as x; x.LightGBMTrainer, x.LightGBMConfig; "
        "print('lightgbm' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


def frame(rows: int) -> Any:
    pandas = pytest.importorskip("pandas")
    x = [n % 7 for n in range(rows)]
    return pandas.DataFrame({"x": x, "z": range(rows), "y": [int(n > 3) for n in x]})


def test_parameters_and_datasets_are_a_training() -> None:
    pytest.importorskip("lightgbm")
    from spotfit.lightgbm import RayTrainReportCallback

    trainer = LightGBMTrainer(
        params={"objective": "binary", "metric": ["binary_error", "auc"], "verbosity": -1},
        datasets={"valid": lambda: frame(90), "train": frame(200)},
        label_column="y",
        num_boost_round=12,
        scaling_config=LOCAL,
    )
    result: Any = trainer.fit()
    assert set(result.metrics) == {
        "train-binary_error",
        "train-auc",
        "valid-binary_error",
        "valid-auc",
    }
    assert result.metrics["valid-auc"] == 1.0
    model = RayTrainReportCallback.get_model(result.checkpoint)
    assert model.current_iteration() == 12
    assert model.feature_name() == ["x", "z"]
