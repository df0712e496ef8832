"""`initialize`: DeepSpeed's engine in the process group of a worker."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from spotfit.checkpoint.snapshot_channel import SnapshotChannel
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.deepspeed_ops import import_deepspeed
from spotfit.worker.training_api import require_session


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Return engine, optimizer, data loader and scheduler, as `deepspeed.initialize` does.

    It has the arguments of `deepspeed.initialize`. All ranks call it in the training function of a
    `TorchTrainer`, whose process group the engine uses. On the CPU, DeepSpeed compiles no
    extension for its collectives; its optimizers need `"torch_adam": true` in the configuration, or
    a compiler. Raises `ConfigError` if the process group has not all workers, or if ZeRO partitions
    the optimizer in an elastic group, and `MissingExtraError` without deepspeed.
    """
    session = require_session("spotfit.deepspeed.initialize")
    world_size = session.context.get_world_size()
    group_size = dist.get_world_size() if dist.is_initialized() else 0
    # Without a group DeepSpeed would wait for ranks whose addresses nothing has set.
    if group_size != world_size:
        raise ConfigError(
            f"DeepSpeed needs a process group of all {world_size} workers, but "
            + (f"the group has {group_size} members." if group_size else "there is no group."),
            do="Use TorchTrainer, which forms the group before it calls your function.",
            retryable=False,
        )
    engine, optimizer, loader, scheduler = import_deepspeed().initialize(*args, **kwargs)
    if stage := engine.zero_optimization_stage():
        reject_elastic_group(session.snapshot_channel, stage)
    return engine, optimizer, loader, scheduler


def reject_elastic_group(channel: SnapshotChannel, stage: int) -> None:
    """Raise `ConfigError` if the group may change its size, as ZeRO's partitions cannot."""
    if channel.outlook().allows_resize:
        raise ConfigError(
            f"ZeRO {stage} saves a part of the optimizer per rank, which only the same number of "
            "workers can restore, but num_workers=(min, max) lets the group change its size.",
            do="Set num_workers to one number.",
            retryable=False,
        )
