"""XGBoostTrainer: the arguments, and training on datasets in this process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import spotfit
from spotfit.client.trainer import DataParallelTrainer
from spotfit.xgboost import XGBoostConfig, XGBoostTrainer

LOCAL = spotfit.ScalingConfig(num_workers=0)


def test_the_trainer_selects_the_framework() -> None:
    trainer = XGBoostTrainer(print, scaling_config=spotfit.ScalingConfig(num_workers=2))
    assert isinstance(trainer, DataParallelTrainer)
    assert trainer.backend_config == XGBoostConfig()


def test_another_configuration_is_rejected() -> None:
    with pytest.raises(spotfit.ConfigError, match="xgboost_config"):
        XGBoostTrainer(print, xgboost_config="rabit")  # type: ignore[arg-type]  # the mistake


def test_get_model_of_the_trainer_raises_as_in_ray() -> None:
    with pytest.raises(DeprecationWarning, match=r"RayTrainReportCallback\.get_model"):
        XGBoostTrainer.get_model(object())


def test_importing_the_package_does_not_import_xgboost() -> None:
    program = (
        "import sys, spotfit.xgboost as x; x.XGBoostTrainer, x.XGBoostConfig; "
        "print('xgboost' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


def frame(rows: int) -> Any:
    pandas = pytest.importorskip("pandas")
    x = [n % 7 for n in range(rows)]
    return pandas.DataFrame({"x": x, "z": range(rows), "y": [int(n > 3) for n in x]})


def test_parameters_and_datasets_are_a_training() -> None:
    pytest.importorskip("xgboost")
    from spotfit.xgboost import RayTrainReportCallback

    trainer = XGBoostTrainer(
        params={"objective": "binary:logistic", "eval_metric": ["error", "logloss"]},
        datasets={"valid": lambda: frame(30), "train": frame(60)},
        label_column="y",
        num_boost_round=12,
        scaling_config=LOCAL,
    )
    result: Any = trainer.fit()
    assert list(result.metrics) == [
        "train-error",
        "train-logloss",
        "valid-error",
        "valid-logloss",
    ]
    assert result.metrics["valid-error"] == 0.0
    model = RayTrainReportCallback.get_model(result.checkpoint)
    assert model.num_boosted_rounds() == 12
    assert model.feature_names == ["x", "z"]


def test_the_last_evaluation_set_decides_on_early_stopping() -> None:
    pytest.importorskip("xgboost")
    from spotfit.xgboost import RayTrainReportCallback

    trainer = XGBoostTrainer(
        params={"objective": "binary:logistic", "eval_metric": "error"},
        datasets={"train": frame(60), "valid": frame(30)},
        label_column="y",
        num_boost_round=50,
        scaling_config=LOCAL,
        early_stopping_rounds=3,
    )
    result: Any = trainer.fit()
    model = RayTrainReportCallback.get_model(result.checkpoint)
    assert model.num_boosted_rounds() == 4
