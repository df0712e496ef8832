"""SklearnTrainer in a real worker."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sklearn")
pandas = pytest.importorskip("pandas")

from sklearn.datasets import load_breast_cancer  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402

import spotfit  # noqa: E402
from spotfit.sklearn import SklearnTrainer  # noqa: E402
from tests.live.cloud import LiveTestCloud  # noqa: E402


def load() -> Any:
    data = load_breast_cancer(as_frame=True)
    return data.frame


def test_an_estimator_is_fitted_on_a_machine(cloud: LiveTestCloud) -> None:
    trainer = SklearnTrainer(
        estimator=DecisionTreeClassifier(random_state=0),
        datasets={"train": load, "test": lambda: load()[::5]},
        label_column="target",
        cv=2,
        run_config=spotfit.RunConfig(name="run", storage_path=cloud.storage),
        provisioner=cloud.options(nodes=1),
    )
    result: Any = trainer.fit()
    assert result.metrics["test"]["test_score"] == 1.0, "rows of the training set"
    assert len(result.metrics["cv"]["test_score"]) == 2
    expected = DecisionTreeClassifier(random_state=0)
    frame = load()
    features = frame.drop(columns=["target"])
    expected.fit(features, frame["target"])
    model = SklearnTrainer.get_model(result.checkpoint)
    assert (model.predict(features) == expected.predict(features)).all()
