"""Predictors of torch and scikit-learn load their models and predict both formats.

Those of XGBoost, LightGBM and Keras are tested in tests/frameworks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.prediction.framework_predictors import (
    SklearnPredictor,
    TorchPredictor,
    find_model_file,
    to_matrix,
)
from spotfit.torch import Checkpointer, TorchCheckpoint

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2))


def inputs() -> Any:
    return np.random.default_rng(7).random((5, 3)).astype(np.float32)


def expected(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(torch.as_tensor(inputs())).numpy()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_a_model_file_are_loaded() -> None:
    checkpoint = TorchCheckpoint.from_state_dict(make_model().state_dict())
    predictor = TorchPredictor.from_checkpoint(checkpoint, model=make_model(seed=1))
    assert np.array_equal(predictor({"data": inputs()})["predictions"], expected(make_model()))
    assert not predictor.model.training


def test_a_job_with_another_initialization_of_the_model_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    torch.save(make_model().state_dict(), tmp_path / "checkpoint/model.pt")
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path / "checkpoint")

    def start(model: Any) -> Any:
        return spotfit.predict(
            TorchPredictor,
            inputs(),
            output=tmp_path / "output",
            checkpoint=checkpoint,
            fn_constructor_kwargs={"model": model},
            output_format="npz",
            scaling_config=spotfit.ScalingConfig(num_workers=0),
        )

    first = start(make_model(seed=1))
    assert first.result is not None
    assert np.allclose(first.to_numpy()["predictions"], expected(make_model()), atol=1e-6)
    assert start(make_model(seed=2)).result is None
    with pytest.raises(ConfigError, match="another job"):
        start(torch.nn.Linear(3, 2))


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_code_of_a_model_file_runs_if_there_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    torch.save(Exploit(tmp_path / "executed"), tmp_path / "checkpoint/model.pt")
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="may run code"):
        TorchPredictor.from_checkpoint(checkpoint, model=make_model())
    assert not (tmp_path / "executed").exists()
    with pytest.raises(ConfigError, match="neither a state dict nor a model"):
        TorchPredictor.from_checkpoint(checkpoint)
    assert (tmp_path / "executed").exists(), "a whole model is unpickled"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_whole_model_is_loaded_without_a_model() -> None:
    predictor = TorchPredictor.from_checkpoint(TorchCheckpoint.from_model(make_model()))
    assert np.array_equal(predictor({"data": inputs()})["predictions"], expected(make_model()))


def test_a_file_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "model.pt")
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="contains a Tensor, which is no state dict"):
        TorchPredictor.from_checkpoint(checkpoint, model=make_model())


def test_weights_of_a_checkpointer_are_loaded() -> None:
    def train() -> None:
        checkpointer = Checkpointer(model=make_model(), every=1)
        checkpointer.restore()
        checkpointer.step({})

    trainer = spotfit.DataParallelTrainer(
        train, scaling_config=spotfit.ScalingConfig(num_workers=0)
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None
    predictor = TorchPredictor.from_checkpoint(checkpoint, model=make_model(seed=1))
    assert np.array_equal(predictor({"data": inputs()})["predictions"], expected(make_model()))
    with pytest.raises(ConfigError, match="no model to load them into"):
        TorchPredictor.from_checkpoint(checkpoint)


def test_a_dataframe_of_arrays_gives_a_dataframe() -> None:
    model = make_model()
    predictions = TorchPredictor(model)(pd.DataFrame({"image": list(inputs())}))
    assert isinstance(predictions, pd.DataFrame)
    assert np.array_equal(np.stack(predictions["predictions"]), expected(model))


def test_several_columns_are_passed_by_name() -> None:
    class Add(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, columns: Any) -> Any:
            return {"sum": columns["a"] + columns["b"], "double": 2 * columns["a"]}

    predictor = TorchPredictor(Add())
    batch = {"a": np.arange(3), "b": np.ones(3)}
    predicted = predictor.predict(batch, dtype={"a": torch.float32, "b": torch.float32})
    assert {name: value.tolist() for name, value in predicted.items()} == {
        "sum": [1, 2, 3],
        "double": [0, 2, 4],
    }
    assert predicted["sum"].dtype == np.float32


def test_an_estimator_gets_the_feature_columns(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    linear_model = pytest.importorskip("sklearn.linear_model")
    frame = pd.DataFrame(inputs(), columns=["a", "b", "c"])
    estimator = linear_model.LinearRegression(n_jobs=1).fit(frame, frame["a"] * 2)
    joblib.dump(estimator, tmp_path / "model.joblib")
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path)
    predictor = SklearnPredictor.from_checkpoint(checkpoint)
    rows, features = frame.assign(id=range(5)), ["a", "b", "c"]
    predicted = predictor.predict(rows, feature_columns=features, num_estimator_cpus=2)
    assert np.array_equal(predicted["predictions"], estimator.predict(frame))
    assert predictor.estimator.n_jobs == 2
    with pytest.raises(ConfigError, match="feature_columns= names z"):
        predictor.predict(rows, feature_columns=["z"])


@pytest.mark.parametrize("is_frame", [True, False])
def test_several_outputs_of_an_estimator_are_columns_of_a_dataframe(is_frame: bool) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    estimator = linear_model.LinearRegression().fit(inputs(), inputs()[:, :2])
    batch = pd.DataFrame(inputs()) if is_frame else {"data": inputs()}
    predicted = SklearnPredictor(estimator)(batch)
    if is_frame:
        assert list(predicted) == ["predictions_0", "predictions_1"]
        assert np.array_equal(predicted.to_numpy(), estimator.predict(inputs()))
    else:
        assert np.array_equal(predicted["predictions"], estimator.predict(inputs()))


def test_columns_are_put_side_by_side() -> None:
    matrix = to_matrix({"a": np.arange(2), "b": np.array([[1, 2], [3, 4]])})
    assert matrix.tolist() == [[0, 1, 2], [1, 3, 4]]


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(NotFoundError, match=r"model\.txt"):
        find_model_file(str(tmp_path), ("model.txt",))
