"""Predictors of frameworks: `TorchPredictor`, `XGBoostPredictor` and others, as in Ray AIR.

Each loads the model file of a checkpoint and imports its framework when it is created. Predictions
are the column "predictions".
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Self

import msgspec

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.core.input_checks import is_dataframe
from spotfit.frameworks.torch.torch_checkpoint import TorchCheckpoint
from spotfit.host.plugins import require_module
from spotfit.prediction.batches import (
    ARRAY_COLUMN,
    Batch,
    require_numpy,
    select_columns,
    to_batch_format,
)
from spotfit.prediction.predictor import Predictor, preprocessor_of
from spotfit.tensorflow.tensorflow_checkpoint import MODEL_FILENAME_KEY

if TYPE_CHECKING:
    import torch

PREDICTIONS_COLUMN = "predictions"


def find_model_file(directory: str, names: Sequence[str]) -> Path:
    """Return the first of these files that the directory has. Raises `NotFoundError`."""
    for name in names:
        if (path := Path(directory, name)).exists():
            return path
    raise NotFoundError(
        f"The checkpoint has no model file: none of {', '.join(names)}.",
        do="Save the model under one of these names, or derive a class from Predictor that loads "
        "your files in from_checkpoint().",
    )


# --- torch ----------------------------------------------------------------------------------------


class TorchPredictor(Predictor):
    """Calls a torch model with the columns of a batch as tensors.

    With one column the model gets its tensor, with several a dictionary of tensors. Its output is a
    tensor, or a dictionary of tensors, which become columns. Override `call_model` for others.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preprocessor: Any = None,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> None:
        super().__init__(preprocessor)
        self.device = _device(use_gpu=use_gpu)
        self.model = model.to(self.device).eval()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        model: torch.nn.Module | None = None,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> Self:
        """Load the weights of a `Checkpointer`'s checkpoint, or of the file `model.pt`.

        The weights are loaded into `model`, and nothing but tensors is unpickled. Without `model`
        the file must hold a whole pickled model: loading it runs its code, so use trusted
        checkpoints only. Raises `ConfigError` and `NotFoundError`.
        """
        loaded = _load_torch_model(checkpoint, model)
        return cls(loaded, preprocessor_of(checkpoint), use_gpu=use_gpu)

    @classmethod
    def identity_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments, with the architecture of `model` instead of its weights."""
        if (model := arguments.get("model")) is None:
            return arguments
        # Its weights may be random in each process, and those of the checkpoint replace them.
        shapes = {
            name: f"{value.dtype}{list(value.shape)}"
            for name, value in model.state_dict().items()
            if hasattr(value, "shape")
        }
        return {**arguments, "model": [type(model), str(model), shapes]}

    def call_model(self, inputs: Any) -> Any:
        """Return the output of the model for a tensor or a dictionary of tensors."""
        return self.model(inputs)

    def predict_batch(self, data: Batch, dtype: Any = None) -> Batch:
        """Return the predictions. `dtype` is that of the tensors, or a dictionary by column."""
        import torch

        columns = to_batch_format(data, "numpy")
        dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(columns, dtype)
        tensors = {
            name: torch.as_tensor(column, dtype=dtypes.get(name), device=self.device)
            for name, column in columns.items()
        }
        with torch.inference_mode():
            output = self.call_model(next(iter(tensors.values())) if len(tensors) == 1 else tensors)
        outputs = output if isinstance(output, Mapping) else {PREDICTIONS_COLUMN: output}
        predictions = {name: value.cpu().numpy() for name, value in outputs.items()}
        return to_batch_format(predictions, "pandas" if is_dataframe(data) else "numpy")


def _device(*, use_gpu: bool) -> torch.device:
    import torch

    from spotfit.torch import get_device
    from spotfit.worker.training_api import has_session

    if not use_gpu:
        return torch.device("cpu")
    return get_device() if has_session() else torch.device("cuda")


def _load_torch_model(checkpoint: Checkpoint, model: torch.nn.Module | None) -> torch.nn.Module:
    with checkpoint.as_directory() as directory:
        path = Path(directory, TorchCheckpoint.MODEL_FILENAME)
        if (has_file := path.exists()) and model is not None:
            model.load_state_dict(_load_state_dict(path))
            return model
    if has_file:
        return TorchCheckpoint.get_model(checkpoint)  # type: ignore[arg-type]
    if model is None:
        raise ConfigError(
            f"{checkpoint} has the weights of a Checkpointer, and no model to load them into.",
            do="Pass model= with the architecture that was trained.",
        )
    from spotfit.torch.checkpoint.torch_export import assemble_state

    model.load_state_dict(assemble_state(checkpoint.open_snapshot(), section="model")["model"])
    return model


def _load_state_dict(path: Path) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ConfigError(
            f"The file {path.name} of the checkpoint contains more than weights, so that loading "
            f"it may run code: {str(error).splitlines()[0]}",
            do="Save model.state_dict(). For a whole model in a trusted checkpoint, leave out "
            "model=.",
        ) from error
    if not isinstance(state, dict):
        raise ConfigError(
            f"The file {path.name} of the checkpoint contains a {type(state).__name__}, which is "
            "no state dict.",
            do="Save model.state_dict().",
        )
    return state


# --- tables ---------------------------------------------------------------------------------------


class _TablePredictor(Predictor):
    """Predictor of a model that takes a table of features."""

    def predict_batch(
        self,
        data: Batch,
        feature_columns: Sequence[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Batch:
        """Return the predictions for these columns, by default all.

        Further arguments are those of `predict_table`.
        """
        features = select_columns(data, feature_columns, argument="feature_columns=")
        values = require_numpy().asarray(self.predict_table(features, *args, **kwargs))
        if not is_dataframe(data):
            return {PREDICTIONS_COLUMN: values}
        names = [f"{PREDICTIONS_COLUMN}_{n}" for n in range(values.shape[-1])]
        pandas = require_module("pandas", extra="pandas")
        return pandas.DataFrame(
            {PREDICTIONS_COLUMN: values}
            if values.ndim == 1
            else dict(zip(names, values.reshape(-1, len(names)).T, strict=True))
        )

    def predict_table(self, features: Batch, *args: Any, **kwargs: Any) -> Any:
        """Return the model's predictions as an array."""
        raise TypeError(f"{type(self).__name__} does not define predict_table()")


def to_matrix(features: Batch) -> Any:
    """Return the columns of a batch side by side; DataFrames are returned unchanged."""
    if is_dataframe(features):
        return features
    columns = [one if one.ndim > 1 else one.reshape(-1, 1) for one in features.values()]
    return require_numpy().concatenate(columns, axis=1)


class XGBoostPredictor(_TablePredictor):
    """Predicts with the booster of a checkpoint: `model.ubj`, `model.json` or `model.bst`."""

    preload_modules = ("xgboost",)

    def __init__(self, model: Any, preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self.model = model

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Load the booster. Raises `NotFoundError` and `MissingExtraError`."""
        booster = require_module("xgboost", extra="xgboost").Booster()
        with checkpoint.as_directory() as directory:
            booster.load_model(find_model_file(directory, ("model.ubj", "model.json", "model.bst")))
        return cls(booster, preprocessor_of(checkpoint))

    def predict_table(
        self, features: Batch, dmatrix_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Return the predictions; `dmatrix_kwargs` are arguments of `xgboost.DMatrix`."""
        options = dict(dmatrix_kwargs or {})
        # Columns that are not vectors are split into several features, without names.
        if not is_dataframe(features) and all(one.ndim == 1 for one in features.values()):
            names = None if list(features) == [ARRAY_COLUMN] else list(features)
            options.setdefault("feature_names", names)
        xgboost = require_module("xgboost", extra="xgboost")
        return self.model.predict(xgboost.DMatrix(to_matrix(features), **options), **kwargs)


class LightGBMPredictor(_TablePredictor):
    """Predicts with the booster of a checkpoint: `model.txt`."""

    preload_modules = ("lightgbm",)

    def __init__(self, model: Any, preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self.model = model

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Load the booster. Raises `NotFoundError` and `MissingExtraError`."""
        lightgbm = require_module("lightgbm", extra="lightgbm")
        with checkpoint.as_directory() as directory:
            path = find_model_file(directory, ("model.txt",))
            booster = lightgbm.Booster(model_file=str(path))
        return cls(booster, preprocessor_of(checkpoint))

    def predict_table(self, features: Batch, **kwargs: Any) -> Any:
        """Return the predictions; `kwargs` are those of `lightgbm.Booster.predict`."""
        return self.model.predict(to_matrix(features), **kwargs)


class SklearnPredictor(_TablePredictor):
    """Predicts with the estimator of a checkpoint: `model.joblib` or `model.pkl`."""

    preload_modules = ("joblib", "sklearn")

    def __init__(self, estimator: Any, preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self.estimator = estimator

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Load the estimator. It is unpickled, which runs code: use trusted checkpoints only.

        Raises `NotFoundError` and `MissingExtraError`.
        """
        with checkpoint.as_directory() as directory:
            path = find_model_file(directory, ("model.joblib", "model.pkl"))
            estimator = require_module("joblib", extra="sklearn").load(path)
        return cls(estimator, preprocessor_of(checkpoint))

    def predict_table(
        self, features: Batch, num_estimator_cpus: int | None = None, **kwargs: Any
    ) -> Any:
        """Return the predictions; `num_estimator_cpus` sets `n_jobs` of the estimator."""
        if num_estimator_cpus is not None:
            jobs = {
                name: num_estimator_cpus
                for name in self.estimator.get_params()
                if name.rpartition("__")[2] == "n_jobs"
            }
            self.estimator.set_params(**jobs)
        return self.estimator.predict(to_matrix(features), **kwargs)


# --- TensorFlow -----------------------------------------------------------------------------------

_LEGACY_KERAS = "tf_keras"


class TensorflowPredictor(Predictor):
    """Calls a Keras model with the columns of a batch as tensors.

    With one column the model gets its tensor, with several a dictionary of tensors.
    """

    def __init__(
        self,
        model: Any,
        preprocessor: Any = None,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> None:
        """`use_gpu` has no effect: TensorFlow uses the GPUs of the worker."""
        super().__init__(preprocessor)
        self.model = model

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        model_definition: Any = None,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> Self:
        """Load the model, or with `model_definition` the weights in `model.weights.h5`.

        The file is the one that the metadata of a `TensorflowCheckpoint` or of a
        `ReportCheckpointCallback` names, else `model.keras` or `model.h5`. `model_definition` is a
        function that returns the model without weights. Raises `NotFoundError` and
        `MissingExtraError`.
        """
        with checkpoint.as_directory() as directory:
            if model_definition is None:
                name = checkpoint.get_metadata().get(MODEL_FILENAME_KEY)
                names = ("model.keras", "model.h5") if name is None else (name,)
                model = _load_keras_model(find_model_file(directory, names))
            else:
                model = model_definition()
                model.load_weights(find_model_file(directory, ("model.weights.h5",)))
        return cls(model, preprocessor_of(checkpoint), use_gpu)

    def predict_batch(self, data: Batch, dtype: Any = None) -> Batch:
        """Return the predictions. `dtype` is that of the tensors."""
        columns = to_batch_format(data, "numpy")
        inputs = {
            name: column if dtype is None else column.astype(dtype)
            for name, column in columns.items()
        }
        output = self.model(next(iter(inputs.values())) if len(inputs) == 1 else inputs)
        outputs = output if isinstance(output, Mapping) else {PREDICTIONS_COLUMN: output}
        to_numpy = _array_function(self.model)
        predictions = {name: to_numpy(value) for name, value in outputs.items()}
        return to_batch_format(predictions, "pandas" if is_dataframe(data) else "numpy")


def _load_keras_model(path: Path) -> Any:
    """Load the model with the Keras that has saved it: each fails for models of the other."""
    is_legacy = path.is_dir() or int(_keras_version(path).partition(".")[0]) < 3
    keras = require_module(_LEGACY_KERAS if is_legacy else "keras", extra="tensorflow")
    # compile=False: predictions need neither the optimizer nor the classes of custom losses.
    return keras.models.load_model(path, compile=False)


def _keras_version(path: Path) -> str:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return str(msgspec.json.decode(archive.read("metadata.json"))["keras_version"])
    with require_module("h5py", extra="tensorflow").File(path) as file:
        return str(file.attrs["keras_version"])


def _array_function(model: Any) -> Any:
    """Return the function that converts outputs of the model to numpy arrays."""
    if any(kind.__module__.partition(".")[0] == _LEGACY_KERAS for kind in type(model).__mro__):
        return require_numpy().asarray
    return require_module("keras", extra="tensorflow").ops.convert_to_numpy
