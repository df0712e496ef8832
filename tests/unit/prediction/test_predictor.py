"""A worker creates the predictor from the checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.torch_checkpoint import TorchCheckpoint
from spotfit.prediction.predictor import Predictor, PredictorSource, preprocessor_of


class Scale:
    def __init__(self, directory: str, plus: float = 0.0) -> None:
        self.factor = float(Path(directory, "factor").read_text())
        self.plus = plus

    def __call__(self, batch: Any) -> Any:
        return {"y": [one * self.factor + self.plus for one in batch["x"]]}


class Double(Predictor):
    def predict_batch(self, data: Any, *, plus: float = 0.0) -> Any:
        return {"y": [2 * one + plus for one in data["x"]]}


class AddOne:
    def transform_batch(self, batch: Any) -> Any:
        return {"x": [one + 1 for one in batch["x"]]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "factor").write_text("3")
    return Checkpoint.from_directory(tmp_path)


def test_a_class_is_created_with_a_directory_and_arguments(checkpoint: Checkpoint) -> None:
    source = PredictorSource(Scale, checkpoint, {"plus": 1.0})
    source.check()
    with source.open() as function:
        assert function({"x": [1, 2]}) == {"y": [4, 7]}


def test_a_function_is_called_as_it_is() -> None:
    for function in (len, functools.partial(max, 3)):
        source = PredictorSource(function)
        source.check()
        with source.open() as opened:
            assert opened is function


def test_a_predictor_is_created_with_the_checkpoint(checkpoint: Checkpoint) -> None:
    class Reader(Predictor):
        found: tuple[Checkpoint, dict[str, Any]]

        @classmethod
        def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Reader:
            self = cls()
            self.found = (checkpoint, kwargs)
            return self

    with PredictorSource(Reader, checkpoint, {"a": 1}).open() as opened:
        assert getattr(opened, "found", None) == (checkpoint, {"a": 1})


def test_the_preprocessor_comes_first() -> None:
    predictor = Double(AddOne())
    assert predictor({"x": [1]}) == {"y": [4]}
    assert predictor.predict({"x": [1]}, plus=1.0) == {"y": [5]}
    predictor.set_preprocessor(None)
    assert predictor.get_preprocessor() is None
    assert predictor({"x": [1]}) == {"y": [2]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_a_checkpoint_of_a_framework_has_a_preprocessor(tmp_path: Path) -> None:
    stored = TorchCheckpoint.from_directory(tmp_path)
    stored.set_preprocessor(AddOne())
    assert isinstance(preprocessor_of(stored), AddOne)
    assert preprocessor_of(Checkpoint.from_directory(tmp_path)) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (PredictorSource("model"), "class or a function"),
        (PredictorSource(AddOne), "no method __call__"),
        (PredictorSource(len, arguments={"a": 1}), "need a class"),
    ],
)
def test_unsuitable_predictors_are_refused(source: PredictorSource, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        source.check()


def test_a_function_with_a_checkpoint_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="need a class"):
        PredictorSource(len, checkpoint).check()


def test_modules_of_predictors_are_preloaded() -> None:
    class WithModules(Predictor):
        preload_modules = ("xgboost",)

    assert PredictorSource(WithModules).preload_modules() == ("xgboost",)
    arguments = {"predictor_cls": WithModules, "columns": ["a"]}
    assert PredictorSource(Double, arguments=arguments).preload_modules() == ("xgboost",)
    assert PredictorSource(len).preload_modules() == ()
