"""SklearnTrainer in this process, and the checks of its arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import spotfit
from spotfit.sklearn import SklearnTrainer

pytest.importorskip("sklearn")
pandas = pytest.importorskip("pandas")
joblib = pytest.importorskip("joblib")

from sklearn import model_selection  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402

LOCAL = spotfit.ScalingConfig(num_workers=0)


def frame(rows: int) -> Any:
    x = [n % 7 for n in range(rows)]
    return pandas.DataFrame({"x": x, "y": [int(n > 3) for n in x]})


def fit(**arguments: Any) -> Any:
    defaults = {
        "estimator": DecisionTreeClassifier(max_depth=2),
        "datasets": {"train": frame(70), "test": lambda: frame(14)},
        "label_column": "y",
        "scaling_config": LOCAL,
    }
    return SklearnTrainer(**(defaults | arguments)).fit()


def test_the_fitted_estimator_is_in_the_checkpoint() -> None:
    result = fit()
    assert result.metrics == {"test": {"test_score": 1.0}}
    assert result.checkpoint is not None
    model = SklearnTrainer.get_model(result.checkpoint)
    assert list(model.predict(frame(7)[["x"]])) == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("scoring", "names"),
    [
        ("roc_auc", {"test_score"}),
        (["accuracy", "roc_auc"], {"test_accuracy", "test_roc_auc"}),
        ({"a": "accuracy", "b": lambda _model, _x, _y: 0.5}, {"test_a", "test_b"}),
    ],
)
def test_all_scorers_are_reported(scoring: Any, names: set[str]) -> None:
    assert fit(scoring=scoring).metrics["test"].keys() == names


def test_a_cross_validation_is_reported_with_all_folds() -> None:
    metrics = fit(cv=3, return_train_score_cv=True, parallelize_cv=False).metrics["cv"]
    assert len(metrics["test_score"]) == len(metrics["train_score"]) == 3
    assert metrics["test_score_mean"] == pytest.approx(sum(metrics["test_score"]) / 3)


@pytest.mark.parametrize(
    ("parallelize_cv", "set_cpus", "jobs"),
    [(True, False, 2), (True, True, 2), (False, True, 1), (None, True, 2), (None, False, 1)],
)
def test_folds_run_in_parallel_as_selected(
    parallelize_cv: bool | None, set_cpus: bool, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def cross_validate(*args: Any, n_jobs: int, **kwargs: Any) -> Any:
        used.append(n_jobs)
        with joblib.parallel_config("threading"):  # processes take seconds to start
            return original(*args, n_jobs=n_jobs, **kwargs)

    original = model_selection.cross_validate
    monkeypatch.setattr(model_selection, "cross_validate", cross_validate)
    scaling = spotfit.ScalingConfig(num_workers=0, resources_per_worker={"CPU": 2})
    arguments = {"parallelize_cv": parallelize_cv, "set_estimator_cpus": set_cpus}
    metrics = fit(cv=2, scaling_config=scaling, **arguments).metrics
    assert len(metrics["cv"]["test_score"]) == 2
    assert used == [jobs]


def test_parameters_and_arguments_of_fit_are_passed() -> None:
    result = fit(params={"max_depth": 1}, sample_weight=[1.0] * 70)
    assert SklearnTrainer.get_model(result.checkpoint).get_depth() == 1


@pytest.mark.parametrize(("set_cpus", "jobs"), [(True, 1), (False, 2)])
def test_nested_estimators_use_the_cpus_of_the_worker(set_cpus: bool, jobs: int) -> None:
    pipeline = make_pipeline(StandardScaler(), RandomForestClassifier(3, n_jobs=2))
    result = fit(estimator=pipeline, set_estimator_cpus=set_cpus)
    model = SklearnTrainer.get_model(result.checkpoint)
    assert model.get_params()["randomforestclassifier__n_jobs"] == jobs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": DecisionTreeClassifier}, "is not an estimator"),
        ({"scaling_config": spotfit.ScalingConfig(num_workers=2)}, "num_workers is 2"),
        ({"datasets": {"test": frame(3)}}, "must have a dataset 'train'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(spotfit.ConfigError, match=message):
        fit(**arguments)


def test_importing_the_trainer_does_not_import_sklearn() -> None:
    program = "import sys, spotfit.sklearn as s; s.SklearnTrainer; print('sklearn' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"
