"""A model for its device and its group, and dice that repeat themselves."""

from __future__ import annotations

import random  # noqa: TID251 - it is the user's dice that are seeded here
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel

from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.host import env


def devices(own: Sequence[str]) -> list[torch.device]:
    """The accelerators of this worker, or its CPU."""
    return [torch.device(name) for name in own] or [torch.device("cpu")]


def prepare_model(
    model: torch.nn.Module,
    *,
    world_size: int,
    device: torch.device | None,
    strategy: str | None,
    options: dict[str, Any],
) -> torch.nn.Module:
    """Move the model to `device` (None leaves it where it is), and wrap it for its group.

    One worker alone needs no wrapper. `strategy` is "ddp", "fsdp" or None; `options` go to the
    wrapper.
    """
    if strategy not in (None, "ddp", "fsdp"):
        raise ConfigError(
            f"parallel_strategy must be 'ddp', 'fsdp' or None, not {strategy!r}.",
            do="Leave it out for DistributedDataParallel.",
        )
    if device is not None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        model = model.to(device)
    if strategy is None or world_size <= 1:
        return model
    if strategy == "fsdp":
        return _fully_sharded(model, options)
    if device is not None and device.type == "cuda":
        options = {"device_ids": [device], "output_device": device, **options}
    return DistributedDataParallel(model, **options)


def enable_reproducibility(seed: int) -> None:
    """Seed all dice of this process, and have torch take the same way every time, or raise."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    env.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def _fully_sharded(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    if not torch.cuda.is_available():
        raise SessionMisuseError(
            "FSDP is only available with GPU-enabled training.",
            do="Set use_gpu=True in ScalingConfig, or take parallel_strategy='ddp'.",
        )
    from torch.distributed.fsdp import FullyShardedDataParallel  # a second of imports for few

    wrapped: torch.nn.Module = FullyShardedDataParallel(model, **options)
    return wrapped
