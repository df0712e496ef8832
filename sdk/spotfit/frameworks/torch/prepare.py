"""A model for its device and its group, and dice that repeat themselves."""

from __future__ import annotations

import random  # noqa: TID251 - it is the user's dice that are seeded here
from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel

from spotfit.core.errors import ConfigError, SessionMisuseError
from spotfit.frameworks.torch import undrawn
from spotfit.host import env

_CAN_LEAVE_OUT = "init_sync" in signature(DistributedDataParallel).parameters  # torch 2.7
_OF_ITS_OWN = {"init_sync", "process_group", "device_mesh"}
"""With one of these the user says who is sent what."""
STRATEGIES = ("ddp", "fsdp", "fsdp2")


def devices(own: Sequence[str] | None) -> list[torch.device]:
    """The accelerators of this worker, or its CPU; where nobody deals them out, torch's own."""
    names = _current() if own is None else own
    return [torch.device(name) for name in names] or [torch.device("cpu")]


def prepare_model(
    model: torch.nn.Module,
    *,
    world_size: int,
    device: torch.device,
    move: bool,
    strategy: str | None,
    options: dict[str, Any],
) -> torch.nn.Module:
    """Move the model to `device` if it is to `move`, and wrap it for its group.

    `strategy` is "ddp", "fsdp", "fsdp2" or None; `options` go to the wrapper. One worker alone
    needs none but "fsdp2", which means the same at every size of a group.
    """
    if strategy is not None and strategy not in STRATEGIES:
        raise ConfigError(
            f"parallel_strategy must be 'ddp', 'fsdp', 'fsdp2' or None, not {strategy!r}.",
            do="Leave it out for DistributedDataParallel.",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if strategy == "fsdp2" and torch.distributed.is_initialized():
        from spotfit.frameworks.torch import sharding  # its imports cost a second, for few

        return sharding.sharded(model, device, options)
    if move:
        model = model.to(device)
    if strategy == "fsdp" and world_size > 1:
        return _fully_sharded(model, options)
    if strategy == "ddp" and world_size > 1:
        options = {**ddp_options(model), **options}
        if undrawn.leaves_out() and _CAN_LEAVE_OUT and not _OF_ITS_OWN & options.keys():
            return _unsent(model, options)
        return DistributedDataParallel(model, **options)
    return model


def ddp_options(model: torch.nn.Module) -> dict[str, Any]:
    """What DistributedDataParallel wants to be told of a model that lies on one GPU."""
    homes = {weight.device for weight in model.parameters()}
    if len(homes) != 1 or "cuda" not in {home.type for home in homes}:
        return {}
    home = homes.pop()
    return {"device_ids": [home], "output_device": home}


def _unsent(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    """Its weights come to each rank by a restore: rank 0 sends its buffers only."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer.detach(), src=0)
    return DistributedDataParallel(model, init_sync=False, **options)


def enable_reproducibility(seed: int) -> None:
    """Seed all dice of this process, and have torch take the same way every time, or raise."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    env.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def _current() -> tuple[str, ...]:
    return (f"cuda:{torch.cuda.current_device()}",) if torch.cuda.is_available() else ()


def _fully_sharded(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    if not torch.cuda.is_available():
        raise SessionMisuseError(
            "FSDP is only available with GPU-enabled training.",
            do="Set use_gpu=True in ScalingConfig, or take parallel_strategy='fsdp2', which shards "
            "on CPUs, too.",
        )
    from torch.distributed.fsdp import FullyShardedDataParallel  # a second of imports for few

    wrapped: torch.nn.Module = FullyShardedDataParallel(model, **options)
    return wrapped
