"""`BatchPredictor`: predictions of a checkpoint over many inputs, with the names of Ray AIR."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import is_dataframe
from spotfit.model.config import ScalingConfig
from spotfit.prediction.batches import (
    Batch,
    check_batch,
    select_columns,
    to_batch_format,
)
from spotfit.prediction.predict_job import PredictionResult, predict
from spotfit.prediction.predictor import Predictor, preprocessor_of

if TYPE_CHECKING:
    from spotfit.client.run_config import RunConfig
    from spotfit.provision.profile import ProvisionerOptions


class BatchPredictor:
    """Predicts many inputs with a `Predictor` class and a checkpoint, on spot machines."""

    def __init__(
        self, checkpoint: Checkpoint, predictor_cls: type[Predictor], **predictor_kwargs: Any
    ) -> None:
        if not (isinstance(predictor_cls, type) and issubclass(predictor_cls, Predictor)):
            raise ConfigError(
                f"predictor_cls={predictor_cls!r} is not a subclass of spotfit.prediction."
                "Predictor.",
                do="Pass a class such as TorchPredictor, or call spotfit.predict with other "
                "classes.",
            )
        self._checkpoint = checkpoint
        self._predictor_cls = predictor_cls
        self._predictor_kwargs = predictor_kwargs
        self._preprocessor: Any = None

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, predictor_cls: type[Predictor], **kwargs: Any
    ) -> Self:
        """Return the predictor of a checkpoint; `kwargs` are those of the class's own method."""
        return cls(checkpoint, predictor_cls, **kwargs)

    def get_preprocessor(self) -> Any:
        """Return the preprocessor of `set_preprocessor`, else that of the checkpoint, or None."""
        return self._preprocessor or preprocessor_of(self._checkpoint)

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Set the preprocessor that replaces the checkpoint's; it is pickled to the workers."""
        self._preprocessor = preprocessor

    def predict(
        self,
        data: Any,
        *,
        feature_columns: Sequence[str] | None = None,
        keep_columns: Sequence[str] | None = None,
        batch_size: int = 4096,
        min_scoring_workers: int = 1,
        max_scoring_workers: int | None = None,
        num_cpus_per_worker: float | None = None,
        num_gpus_per_worker: float | None = None,
        separate_gpu_stage: bool = True,
        ray_remote_args: Mapping[str, Any] | None = None,
        output: str | PathLike[str] | None = None,
        run_config: RunConfig | None = None,
        provisioner: str | ProvisionerOptions | list[str | ProvisionerOptions] | None = None,
        predict_options: Mapping[str, Any] | None = None,
        **predict_kwargs: Any,
    ) -> PredictionResult:
        """Predict `data` and return the predictions. Blocks.

        `data` are `inputs` of `spotfit.predict`. The predictor gets `feature_columns`, by default
        all; `keep_columns` of the inputs are kept beside the predictions. The number of workers is
        between `min_scoring_workers` and `max_scoring_workers`, by default 4 times the minimum.
        `predict_options` are further arguments of `spotfit.predict`, and `predict_kwargs` those of
        the predictor's `predict`. `separate_gpu_stage` has no effect: preprocessors run in the
        worker, while it reads the next shard. Raises what `spotfit.predict` raises, and
        `ConfigError` for `ray_remote_args`.
        """
        del separate_gpu_stage
        if ray_remote_args:
            raise ConfigError(
                "BatchPredictor.predict(ray_remote_args=...) is not supported: there are no tasks.",
                do="State resources with num_cpus_per_worker= and num_gpus_per_worker=, or call "
                "spotfit.predict with a scaling_config=.",
            )
        most = max_scoring_workers or 4 * min_scoring_workers
        scaling = ScalingConfig(
            num_workers=(min_scoring_workers, most) if most > min_scoring_workers else most,
            use_gpu=bool(num_gpus_per_worker),
            resources_per_worker=_resources(num_cpus_per_worker, num_gpus_per_worker),
        )
        arguments = dict(self._predictor_kwargs)
        parameters = inspect.signature(self._predictor_cls.from_checkpoint).parameters
        if num_gpus_per_worker and "use_gpu" in parameters:
            arguments.setdefault("use_gpu", True)
        return predict(
            ColumnPredictor,
            data,
            output=output,
            checkpoint=self._checkpoint,
            fn_constructor_kwargs={
                "predictor_cls": self._predictor_cls,
                "arguments": arguments,
                "feature_columns": feature_columns,
                "keep_columns": keep_columns,
                "predict_kwargs": predict_kwargs,
                **self._preprocessor_argument(),
            },
            batch_size=batch_size,
            scaling_config=scaling,
            run_config=run_config,
            provisioner=provisioner,
            **dict(predict_options or {}),
        )

    def _preprocessor_argument(self) -> dict[str, Any]:
        # Without the key, jobs of calls without a preprocessor keep their identity.
        return {} if self._preprocessor is None else {"preprocessor": self._preprocessor}

    def predict_pipelined(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not supported: `predict` reads shard by shard. Raises `ConfigError`."""
        raise ConfigError(
            "BatchPredictor.predict_pipelined() is not supported.",
            do="Call predict(): workers read one shard at a time, so that the inputs need not fit "
            "into memory.",
        )

    @classmethod
    def from_pandas_udf(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not supported: `spotfit.predict` takes functions. Raises `ConfigError`."""
        raise ConfigError(
            "BatchPredictor.from_pandas_udf() is not supported.",
            do='Call spotfit.predict(function, inputs, batch_format="pandas").',
        )


def _resources(cpus: float | None, gpus: float | None) -> dict[str, float] | None:
    amounts = {"CPU": cpus, "GPU": gpus}
    return {name: amount for name, amount in amounts.items() if amount} or None


class ColumnPredictor(Predictor):
    """Selects the columns of another predictor, and adds columns of the inputs to its output."""

    def __init__(
        self,
        predictor: Predictor,
        *,
        feature_columns: Sequence[str] | None,
        keep_columns: Sequence[str] | None,
        predict_kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._predictor = predictor
        self._feature_columns = feature_columns
        self._keep_columns = keep_columns or ()
        self._predict_kwargs = predict_kwargs

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        predictor_cls: type[Predictor],
        arguments: Mapping[str, Any],
        preprocessor: Any = None,
        **columns: Any,
    ) -> Self:
        """Create the other predictor from the checkpoint with these arguments."""
        predictor = predictor_cls.from_checkpoint(checkpoint, **arguments)
        if preprocessor is not None:
            predictor.set_preprocessor(preprocessor)
        return cls(predictor, **columns)

    @classmethod
    def identity_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments, with those of the other predictor as its class returns them."""
        of_predictor = arguments["predictor_cls"].identity_arguments(arguments["arguments"])
        return {**arguments, "arguments": of_predictor}

    def predict_batch(self, data: Batch, **_kwargs: Any) -> Batch:
        """Return the predictions with the columns to keep."""
        features = select_columns(data, self._feature_columns, argument="feature_columns=")
        kept = select_columns(data, self._keep_columns, argument="keep_columns=")
        predicted = check_batch(
            self._predictor.predict(features, **self._predict_kwargs), source="The predictor"
        )
        if not is_dataframe(data):
            return {**kept, **to_batch_format(predicted, "numpy")}
        frame = to_batch_format(predicted, "pandas")
        return kept.reset_index(drop=True).join(frame.reset_index(drop=True))
