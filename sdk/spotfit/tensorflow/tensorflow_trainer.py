"""TensorflowTrainer: runs a training function on workers that form one TensorFlow cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.client.run_config import RunConfig, check_config_type
from spotfit.client.trainer import DataParallelTrainer
from spotfit.data.feeders import Feeders
from spotfit.frameworks.tensorflow.tensorflow_config import TensorflowConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation_config import ValidationConfig


class TensorflowTrainer(DataParallelTrainer):
    """Runs a training function on workers that form one TensorFlow cluster.

    TF_CONFIG has the addresses of all workers when the function is called; it creates a
    `tf.distribute.MultiWorkerMirroredStrategy` before anything else of TensorFlow. `tf.keras` is
    the legacy Keras of the package tf-keras, as `fit` of Keras 3 does not support the strategy,
    unless the variable TF_USE_LEGACY_KERAS is 0.

    Raises `ConfigError` or `ConfigErrors` for invalid arguments, and `DeprecationWarning`, as Ray
    Train does, for `metadata` and `resume_from_checkpoint`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        tensorflow_config: TensorflowConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: Any = None,
        data_feeders: Feeders | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        provisioner: Any = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=check_config_type(
                "tensorflow_config",
                tensorflow_config,
                TensorflowConfig,
                module="spotfit.tensorflow",
            ),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            data_feeders=data_feeders,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
            provisioner=provisioner,
        )
