"""FSDP2: every worker keeps a share of each weight, and gathers them group by group for use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spotfit.core.errors import ConfigError

Policy = Callable[..., bool]
"""As torch's for FSDP: called with `module`, `recurse` and `nonwrapped_numel`."""


def sharded(
    model: torch.nn.Module, device: torch.device, options: dict[str, Any]
) -> torch.nn.Module:
    """The same model, sharded over all workers, its shares on `device`.

    `options` go to `fully_shard`. Of ours is `auto_wrap_policy`: classes of modules whose weights
    are gathered together, or a policy as FSDP takes it; without it all weights are one group. The
    whole model never lies on the device; one on "meta" stays there to be filled by the caller.
    """
    options = dict(options)
    policy = _policy(options.pop("auto_wrap_policy", None))
    options.setdefault("mesh", init_device_mesh(device.type, (dist.get_world_size(),)))
    if policy is not None:
        for child in model.children():
            _shard_below(child, policy, options)
    fully_shard(model, **options)
    return model


def _shard_below(module: torch.nn.Module, policy: Policy, options: dict[str, Any]) -> int:
    """Shard what the policy picks, innermost first; how many weights have found a group."""
    count = sum(weight.numel() for weight in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=count):
        return 0
    grouped = sum(_shard_below(child, policy, options) for child in module.children())
    if not policy(module=module, recurse=False, nonwrapped_numel=count - grouped):
        return grouped
    fully_shard(module, **options)
    return count


def _policy(told: Any) -> Policy | None:
    if told is None or (callable(told) and not isinstance(told, type)):
        return told
    classes = _classes(told)
    if not classes or not all(isinstance(one, type) for one in classes):
        raise ConfigError(
            f"auto_wrap_policy cannot be {told!r}.",
            do="Give the classes of your model's blocks, as {Block}, or a policy of "
            "torch.distributed.fsdp.wrap.",
        )
    return lambda module, recurse, **_: recurse or isinstance(module, classes)


def _classes(told: Any) -> tuple[Any, ...]:
    if isinstance(told, Iterable):
        return tuple(told)
    return (told,)
