"""Placement and wrapping of a model for its process group, and seeding of all RNGs.

FSDP2 (`fully_shard`): every worker stores one shard of each weight and gathers them for use.
"""

from __future__ import annotations

import random  # noqa: TID251 - seeds the RNG of the user's code
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from spotfit.core.errors import ConfigError
from spotfit.host import env
from spotfit.torch.checkpoint import deferred_init

_HAS_INIT_SYNC = "init_sync" in signature(DistributedDataParallel).parameters  # torch 2.7
_USER_SYNC_OPTIONS = {"init_sync", "process_group", "device_mesh"}
"""DDP options with which the user decides which ranks receive which weights."""
STRATEGIES = ("ddp", "fsdp", "fsdp2")


def torch_devices(assigned: Sequence[str] | None) -> list[torch.device]:
    """Return this worker's accelerators, or its CPU if it has none.

    `assigned` are names such as "cuda:0", from `worker_devices`. With None, outside of a managed
    worker, that is torch's current CUDA device.
    """
    if assigned is None:
        has_gpu = torch.cuda.is_available()
        assigned = (f"cuda:{torch.cuda.current_device()}",) if has_gpu else ()
    return [torch.device(name) for name in assigned] or [torch.device("cpu")]


def prepare_model(
    model: torch.nn.Module,
    *,
    world_size: int,
    device: torch.device,
    move: bool,
    strategy: str | None,
    options: dict[str, Any],
) -> torch.nn.Module:
    """Move the model to `device` if `move` is set, and wrap it for its group.

    Every rank calls it: wrapping is a collective. `strategy` is "ddp", "fsdp", "fsdp2" or None;
    `options` are passed to the wrapper. With one worker only "fsdp2" wraps, because its parameters
    are DTensors at every world size; it needs a process group, without which the model is only
    moved, and places its shards on `device` also without `move`. A GPU `device` becomes the
    process's current one. Raises `ConfigError` for another strategy, an invalid wrap policy, and
    "fsdp" of several workers without GPUs.
    """
    if strategy is not None and strategy not in STRATEGIES:
        raise ConfigError(
            f"parallel_strategy must be 'ddp', 'fsdp', 'fsdp2' or None, not {strategy!r}.",
            do="Omit it to use DistributedDataParallel.",
        )
    # Collectives of Python objects, and tensors created without a number, use the current device.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if strategy == "fsdp2" and torch.distributed.is_initialized():
        # imports for a second, and few programs need it

        return shard_model(model, device, options)
    if move:
        model = model.to(device)
    if strategy == "fsdp" and world_size > 1:
        if not torch.cuda.is_available():
            raise ConfigError(
                "FSDP is only available with GPU-enabled training: parallel_strategy='fsdp', but "
                "this worker has no GPU.",
                do="Set use_gpu=True in ScalingConfig, or use parallel_strategy='fsdp2', which "
                "also shards on CPUs.",
            )
        from torch.distributed.fsdp import FullyShardedDataParallel  # as above

        wrapped: torch.nn.Module = FullyShardedDataParallel(model, **options)
        return wrapped
    if strategy == "ddp" and world_size > 1:
        return _wrap_ddp(model, {**ddp_options(model), **options})
    return model


def ddp_options(model: torch.nn.Module) -> dict[str, Any]:
    """Return DistributedDataParallel's device options if all parameters are on one GPU, else {}.

    The keys are "device_ids" and "output_device".
    """
    # For a model on the CPU or on several GPUs DDP requires that these options are not given.
    devices = {weight.device for weight in model.parameters()}
    if len(devices) != 1 or "cuda" not in {device.type for device in devices}:
        return {}
    device = devices.pop()
    return {"device_ids": [device], "output_device": device}


def _wrap_ddp(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    if (
        not deferred_init.is_deferring_init()
        or not _HAS_INIT_SYNC
        or _USER_SYNC_OPTIONS & options.keys()
    ):
        return DistributedDataParallel(model, **options)
    # restore() loads the weights on every rank, so broadcasting NaN would only cost time. Buffers
    # are initialized normally and must still be those of rank 0.
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer.detach(), src=0)
    return DistributedDataParallel(model, init_sync=False, **options)


def enable_reproducibility(seed: int) -> None:
    """Seed all RNGs of this process and make torch raise for nondeterministic operations.

    Sets CUBLAS_WORKSPACE_CONFIG too, unless it is set: it takes effect only before the first use of
    cuBLAS.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy accepts 32 bits only
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # cuBLAS is deterministic only with a fixed workspace (see torch.use_deterministic_algorithms).
    if not env.lookup("CUBLAS_WORKSPACE_CONFIG"):
        env.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


# --- FSDP2 (fully_shard) --------------------------------------------------------------------------


WrapPolicy = Callable[..., bool]
"""torch's FSDP wrap policy, called with `module`, `recurse` and `nonwrapped_numel`."""


def shard_model(
    model: torch.nn.Module, device: torch.device, options: dict[str, Any]
) -> torch.nn.Module:
    """Shard the model in place over all workers, with its shards on `device`, and return it.

    A collective of torch's default process group, which must exist. `options` are passed to
    `fully_shard`, except `auto_wrap_policy`: the classes of modules whose weights are gathered
    together, or an FSDP wrap policy; by default all weights form one group. A model on the "meta"
    device stays there. Raises `ConfigError` for an invalid policy.
    """
    options = dict(options)
    policy = _wrap_policy(options.pop("auto_wrap_policy", None))
    # fully_shard moves only this rank's shards to the mesh's device: the whole model need not fit.
    options.setdefault("mesh", init_device_mesh(device.type, (dist.get_world_size(),)))
    if policy is not None:
        for child in model.children():
            _shard_submodules(child, policy, options)
    fully_shard(model, **options)
    return model


def _shard_submodules(module: torch.nn.Module, policy: WrapPolicy, options: dict[str, Any]) -> int:
    """Shard the modules that the policy selects, innermost first.

    Returns the number of parameters that now belong to a group, as torch's `_recursive_wrap` does.
    """
    count = sum(weight.numel() for weight in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=count):
        return 0
    grouped = sum(_shard_submodules(child, policy, options) for child in module.children())
    if not policy(module=module, recurse=False, nonwrapped_numel=count - grouped):
        return grouped
    fully_shard(module, **options)
    return count


def _wrap_policy(requested: Any) -> WrapPolicy | None:
    if requested is None or (callable(requested) and not isinstance(requested, type)):
        return requested
    classes = tuple(requested) if isinstance(requested, Iterable) else (requested,)
    if not classes or not all(isinstance(module_class, type) for module_class in classes):
        raise ConfigError(
            f"auto_wrap_policy is {requested!r}, which is neither a collection of classes nor a "
            "wrap policy.",
            do="Pass the classes of the model's blocks, such as {Block}, or a policy from "
            "torch.distributed.fsdp.wrap.",
        )
    return lambda module, recurse, **_: recurse or isinstance(module, classes)
