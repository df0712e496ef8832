"""Predictors and exports with the real frameworks: each export is loaded again and compared."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ConfigError
from spotfit.prediction import (
    LightGBMPredictor,
    TensorflowPredictor,
    XGBoostPredictor,
    export_for_serving,
)
from spotfit.torch import Checkpointer, export_checkpoint, export_model

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")

# Of the frameworks about each other.
pytestmark = pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning")


@pytest.fixture(scope="module")
def table() -> tuple[Any, Any]:
    datasets = pytest.importorskip("sklearn.datasets")
    features, labels = datasets.load_breast_cancer(return_X_y=True, as_frame=True)
    return features.rename(columns=lambda name: name.replace(" ", "_")), labels


def predictions_of(predictor: Any, features: Any) -> list[Any]:
    """Return the predictions for a DataFrame and for numpy columns."""
    columns = {name: features[name].to_numpy() for name in features}
    return [np.asarray(predictor(batch)["predictions"]) for batch in (features, columns)]


# --- boosters -------------------------------------------------------------------------------------


@pytest.fixture
def xgboost_model(tmp_path: Path, table: tuple[Any, Any]) -> tuple[Path, Any]:
    xgboost = pytest.importorskip("xgboost")
    matrix = xgboost.DMatrix(*table)
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1}, matrix, 5)
    booster.save_model(tmp_path / "model.ubj")
    return tmp_path / "model.ubj", booster.predict(matrix)


@pytest.fixture
def lightgbm_model(tmp_path: Path, table: tuple[Any, Any]) -> tuple[Path, Any]:
    lightgbm = pytest.importorskip("lightgbm")
    options = {"objective": "binary", "verbose": -1, "num_threads": 1}
    booster = lightgbm.train(options, lightgbm.Dataset(*table), 5)
    booster.save_model(tmp_path / "model.txt")
    return tmp_path / "model.txt", booster.predict(table[0])


def test_xgboost_predicts_from_a_checkpoint(
    xgboost_model: tuple[Path, Any], table: tuple[Any, Any]
) -> None:
    path, expected = xgboost_model
    checkpoint = spotfit.Checkpoint.from_directory(path.parent)
    predictor = XGBoostPredictor.from_checkpoint(checkpoint)
    assert all(np.array_equal(one, expected) for one in predictions_of(predictor, table[0]))
    margins = predictor.predict(table[0], output_margin=True, dmatrix_kwargs={"nthread": 1})
    assert np.allclose(1 / (1 + np.exp(-margins["predictions"])), expected)


def test_lightgbm_predicts_from_a_checkpoint(
    lightgbm_model: tuple[Path, Any], table: tuple[Any, Any]
) -> None:
    path, expected = lightgbm_model
    checkpoint = spotfit.Checkpoint.from_directory(path.parent)
    predictor = LightGBMPredictor.from_checkpoint(checkpoint)
    assert all(np.array_equal(one, expected) for one in predictions_of(predictor, table[0]))


def test_kserve_gets_an_xgboost_model(
    xgboost_model: tuple[Path, Any], table: tuple[Any, Any], tmp_path: Path
) -> None:
    xgboost = pytest.importorskip("xgboost")
    path, expected = xgboost_model
    url = export_for_serving(path, tmp_path / "kserve", layout="kserve")
    assert [one.name for one in Path(url).iterdir()] == ["model.bst"]
    with pytest.warns(UserWarning, match="Using UBJSON"):
        loaded = xgboost.Booster(model_file=str(Path(url, "model.bst")))
    assert np.array_equal(loaded.predict(xgboost.DMatrix(table[0])), expected)


def test_kserve_gets_a_lightgbm_model(
    lightgbm_model: tuple[Path, Any], table: tuple[Any, Any], tmp_path: Path
) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    path, expected = lightgbm_model
    url = export_for_serving(path, tmp_path / "kserve", layout="kserve")
    loaded = lightgbm.Booster(model_file=str(Path(url, "model.bst")))
    assert np.array_equal(loaded.predict(table[0]), expected)


# --- Keras ----------------------------------------------------------------------------------------


def test_keras_predicts_from_a_whole_model_and_from_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the backend torch, which executes the same model classes as TensorFlow."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    keras = pytest.importorskip("keras")

    def define() -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    model = define()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path)
    batch = {"data": np.random.default_rng(7).random((5, 3))}
    expected = keras.ops.convert_to_numpy(model(batch["data"].astype("float32")))
    for definition in (None, define):
        predictor = TensorflowPredictor.from_checkpoint(checkpoint, model_definition=definition)
        predicted = predictor.predict(batch, dtype="float32")["predictions"]
        assert np.allclose(predicted, expected, atol=1e-6)


def custom_loss(labels: Any, outputs: Any) -> Any:
    """Return a loss whose name no Keras knows when it loads the model."""
    return outputs - labels


@pytest.mark.parametrize("filename", ["model.keras", "other.keras", "other.h5", "."])
def test_a_model_of_the_legacy_keras_is_loaded(tmp_path: Path, filename: str) -> None:
    keras = pytest.importorskip("tf_keras")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="adam", loss=custom_loss)
    folder = tmp_path / "model"
    folder.mkdir()
    with warnings.catch_warnings(action="ignore"):  # of Keras about HDF5
        model.save(folder / filename if filename != "." else folder)
    checkpoint = spotfit.Checkpoint.from_directory(folder)
    if filename != "model.keras":
        checkpoint.set_metadata({"_model_filename": filename})
    batch = {"data": np.random.default_rng(7).random((5, 3))}
    predicted = TensorflowPredictor.from_checkpoint(checkpoint).predict(batch)["predictions"]
    assert np.allclose(predicted, model(batch["data"]).numpy(), atol=1e-6)


def test_a_keras_model_with_an_unknown_loss_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="adam", loss=custom_loss)
    model.save(tmp_path / "other.keras")
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path)
    checkpoint.set_metadata({"_model_filename": "other.keras"})
    batch = {"data": np.random.default_rng(7).random((5, 3)).astype("float32")}
    predicted = TensorflowPredictor.from_checkpoint(checkpoint).predict(batch)["predictions"]
    expected = keras.ops.convert_to_numpy(model(batch["data"]))
    assert np.allclose(predicted, expected, atol=1e-6)


# --- programs of torch models ---------------------------------------------------------------------


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 3))


def rows(count: int) -> Any:
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def checkpoint() -> spotfit.Checkpoint:
    def train() -> None:
        checkpointer = Checkpointer(model=make_model(), every=1)
        checkpointer.restore()
        checkpointer.step({})

    scaling = spotfit.ScalingConfig(num_workers=0)
    stored = spotfit.DataParallelTrainer(train, scaling_config=scaling).fit().checkpoint
    assert stored is not None
    return stored


def expected_outputs() -> Any:
    with torch.no_grad():
        return make_model().eval()(rows(5)).numpy()


def run_onnx(path: Path, **inputs: Any) -> dict[str, Any]:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def test_a_checkpoint_is_exported_for_onnx_and_triton(
    checkpoint: spotfit.Checkpoint, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "digits.onnx"
    export_checkpoint(checkpoint, path, model=make_model(seed=1), example_inputs=(rows(2),))
    outputs = run_onnx(path, input=rows(5).numpy())
    assert np.allclose(outputs["output"], expected_outputs(), atol=1e-6)
    onnx.checker.check_model(onnx.load(path))

    first = export_for_serving(path, tmp_path / "models", layout="triton")
    second = export_for_serving(path, tmp_path / "models", layout="triton")
    assert (first, second) == (
        str(tmp_path / "models/digits/1"),
        str(tmp_path / "models/digits/2"),
    )
    served = run_onnx(Path(second, "model.onnx"), input=rows(5).numpy())
    assert np.array_equal(served["output"], outputs["output"])
    assert (tmp_path / "models/digits/config.pbtxt").read_text() == (
        'name: "digits"\nbackend: "onnxruntime"\nmax_batch_size: 0\n'
        'input [\n  { name: "input", data_type: TYPE_FP32, dims: [ -1, 4 ] }\n]\n'
        'output [\n  { name: "output", data_type: TYPE_FP32, dims: [ -1, 3 ] }\n]\n'
    )


def test_a_checkpoint_is_exported_as_a_program_of_torch(
    checkpoint: spotfit.Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "new/model.pt2"
    model = make_model(seed=1)
    export_checkpoint(checkpoint, path, model=model, example_inputs=(rows(2),))
    assert model.training
    program = torch.export.load(path).module()
    assert np.array_equal(program(rows(5)).detach().numpy(), expected_outputs())
    assert [one.name for one in path.parent.iterdir()] == ["model.pt2"]


def test_a_checkpoint_is_exported_as_safetensors(
    checkpoint: spotfit.Checkpoint, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    export_checkpoint(checkpoint, tmp_path / "model.safetensors")
    model = make_model(seed=1)
    model.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert np.array_equal(model.eval()(rows(5)).numpy(), expected_outputs())


def test_weights_in_a_second_file_are_served_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    monkeypatch.setattr("spotfit.torch.model_export._MAX_INLINE_BYTES", 0)
    export_model(make_model(), tmp_path / "model.onnx", (rows(2),))
    assert (tmp_path / "model.onnx.data").exists()
    url = export_for_serving(tmp_path / "model.onnx", tmp_path / "new", layout="kserve", name="a")
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).unlink()
    assert url == str(tmp_path / "new/a/1")
    outputs = run_onnx(Path(url, "model.onnx"), input=rows(5).numpy())
    assert np.allclose(outputs["output"], expected_outputs(), atol=1e-6)


class TwoInputs(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, features: Any, offset: Any) -> dict[str, Any]:
        sums = self.layer(features) + offset
        return {"sums": sums, "best": sums.argmax(dim=1)}


def test_inputs_and_outputs_have_the_names_of_the_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = TwoInputs()
    export_model(model, tmp_path / "two.onnx", (rows(2), torch.ones(2, 1)))
    graph = onnx.load(tmp_path / "two.onnx").graph
    assert [one.name for one in graph.input] == ["features", "offset"]
    outputs = run_onnx(tmp_path / "two.onnx", features=rows(5).numpy(), offset=np.ones((5, 1), "f"))
    with torch.no_grad():
        expected = model(rows(5), torch.ones(5, 1))
    assert np.allclose(outputs["sums"], expected["sums"], atol=1e-6)
    assert np.array_equal(outputs["best"], expected["best"])
    url = export_for_serving(tmp_path / "two.onnx", tmp_path / "models", layout="triton")
    config = Path(url).parent.joinpath("config.pbtxt").read_text()
    assert '{ name: "best", data_type: TYPE_INT64, dims: [ -1 ] }' in config


def test_a_model_that_depends_on_its_values_is_refused(tmp_path: Path) -> None:
    class Branch(torch.nn.Module):  # type: ignore[name-defined]
        def forward(self, features: Any) -> Any:
            return features if features.sum() > 0 else -features

    with pytest.raises(ConfigError, match=r"torch\.export cannot export the model"):
        export_model(Branch(), tmp_path / "model.pt2", (rows(2),))
    assert list(tmp_path.iterdir()) == []
