"""Collectives over the ranks of a run, by torch's default process group.

In a run of one rank they return at once and need no process group.
"""

from __future__ import annotations

from typing import Any

from spotfit.core.errors import ConfigError


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    import torch.distributed as dist

    world_size = _group_size()
    if world_size == 1:
        return [value]
    # Values are pickled and padded to the largest one: callers keep them small.
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    import torch.distributed as dist

    if _group_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_process_group(world_size: int) -> None:
    """Raise `ConfigError` unless torch's process group contains all workers.

    Ranks divide the state among themselves, which requires collectives over all of them.
    """
    group_size = _group_size()
    if group_size != world_size:
        raise ConfigError(
            f"Checkpointer needs a torch process group of all {world_size} workers, but the group "
            f"has {group_size}.",
            do="Use TorchTrainer, which forms the group before it calls your function.",
        )


def _group_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
