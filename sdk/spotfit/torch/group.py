"""The ranks of a training among themselves, by torch's process group."""

from __future__ import annotations

from typing import Any

from spotfit.core.errors import ConfigError


def gathered(mine: Any) -> list[Any]:
    """What all ranks gave."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    all_s: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_s, mine)
    return all_s


def broadcast(mine: Any) -> Any:
    """What rank 0 gave."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return mine
    box = [mine]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_group(world_size: int) -> None:
    """Ranks deal the state out among themselves: they have to know each other."""
    import torch.distributed as dist

    there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if there != world_size:
        raise ConfigError(
            f"Checkpointer needs torch's process group of all {world_size} workers; "
            f"here it has {there}.",
            do="Train with TorchTrainer, which forms it before your function is called.",
        )
