"""HorovodTrainer: runs a training function that uses Horovod's interface for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfit.client.run_config import RunConfig, check_config_type
from spotfit.client.trainer import DataParallelTrainer
from spotfit.data.feeders import Feeders
from spotfit.frameworks.torch.horovod_config import HorovodConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation_config import ValidationConfig


class HorovodTrainer(DataParallelTrainer):
    """Runs a training function on workers that form one process group of torch.

    `hvd.init()` of `spotfit.horovod.torch` adopts that group: `hvd.rank()` is the world rank.
    Workers with whole GPUs have NCCL for tensors on GPUs and gloo for those on CPUs, other workers
    gloo. The machines need no Horovod.

    Raises `ConfigError` or `ConfigErrors` for invalid arguments, and `DeprecationWarning`, as Ray
    Train does, for `metadata` and `resume_from_checkpoint`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horovod_config: HorovodConfig | None = None,
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
                "horovod_config", horovod_config, HorovodConfig, module="spotfit.horovod"
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
