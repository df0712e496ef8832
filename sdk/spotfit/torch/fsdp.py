"""FSDP2 (`fully_shard`): every worker stores one shard of each weight and gathers them for use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spotfit.core.errors import ConfigError

WrapPolicy = Callable[..., bool]
"""torch's FSDP wrap policy, called with `module`, `recurse` and `nonwrapped_numel`."""


def shard_model(
    model: torch.nn.Module, device: torch.device, options: dict[str, Any]
) -> torch.nn.Module:
    """Shard the model in place over all workers, with its shards on `device`, and return it.

    `options` are passed to `fully_shard`, except `auto_wrap_policy`: the classes of modules whose
    weights are gathered together, or an FSDP wrap policy; by default all weights form one group.
    A model on the "meta" device stays there. Raises `ConfigError` for an invalid policy.
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
