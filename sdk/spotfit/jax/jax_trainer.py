"""JaxTrainer: runs a training function on workers that form one JAX runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.client.run_config import RunConfig, check_config_type
from spotfit.client.trainer import DataParallelTrainer
from spotfit.data.feeders import Feeders
from spotfit.frameworks.jax.jax_config import JaxConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation_config import ValidationConfig


class JaxTrainer(DataParallelTrainer):
    """Runs a training function on workers whose JAX processes form one distributed runtime.

    `jax.distributed` is initialized when the function is called: `jax.devices()` are those of all
    workers, and `jax.process_index()` is the world rank. Workers with GPUs use NCCL between them,
    workers without GPUs gloo. Raises `ConfigError` or `ConfigErrors` for invalid arguments.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: Any = None,
        data_feeders: Feeders | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        provisioner: Any = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=check_config_type(
                "jax_config", jax_config, JaxConfig, module="spotfit.jax"
            ),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            data_feeders=data_feeders,
            validation_config=validation_config,
            provisioner=provisioner,
        )
