"""The process group of an external launcher such as torchrun, used with `num_workers=0`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.process_group import TorchFramework
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.host import env
from spotfit.host.plugins import require_module
from spotfit.model.topology import Ranks

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_DEFAULT_BACKENDS = ("gloo", "nccl")


class LauncherGroup:
    """The processes that a launcher started, connected by torch's default process group."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def barrier(self) -> None:
        """Block until all processes of the launcher have called it.

        Raises torch's exceptions, such as after the timeout of the process group.
        """
        import torch.distributed as dist

        dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; those of other ranks are ignored.

        Blocks until all processes of the launcher have called it. Values are pickled.
        """
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def join_launcher_group(config: TorchConfig) -> Iterator[LauncherGroup | None]:
    """Yield the launcher's group, or None if the environment does not describe one.

    For a trainer with `num_workers=0`. Blocks until all processes have joined; `config.timeout_s`
    is torch's timeout for that and for collectives. An existing process group is used and not
    destroyed; a new one is destroyed after the block, unless the block raises. Raises `ConfigError`
    if the rank variables are invalid, and `MissingExtraError` without torch.
    """
    ranks = ranks_from_environment(env.copy_environment())
    if ranks is None:
        yield None
        return
    require_module("torch", extra="torch")
    import torch
    import torch.distributed as dist

    is_owner = not dist.is_initialized()
    if is_owner:
        # torchrun starts one process per GPU and expects each to select the GPU of its local rank.
        has_gpus = torch.cuda.is_available()
        if has_gpus:
            torch.cuda.set_device(gpu_of_local_rank(ranks.local_rank, torch.cuda.device_count()))
        timeout = datetime.timedelta(seconds=config.timeout_s)
        dist.init_process_group(select_backend(config.backend, has_gpus=has_gpus), timeout=timeout)
    yield LauncherGroup(ranks)
    # Not in a finally block: after a failure the peers may hang in a collective, and the launcher
    # terminates all processes anyway.
    if is_owner:
        TorchFramework().leave_group()


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks | None:
    """Return this process's ranks from torchrun's variables, or None without a launcher.

    None if one of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT is
    missing or empty. Raises `ConfigError` if a number is invalid or they are inconsistent.
    """
    if not all(environment.get(name) for name in (*_RANK_VARIABLES, *_ADDRESS_VARIABLES)):
        return None
    for name in _RANK_VARIABLES:
        if not environment[name].isdecimal():
            raise ConfigError(
                f"The environment variable {name}={environment[name]!r} is not a number.",
                do="Start the script with torchrun, which sets the variable, or unset it to train "
                "in one process.",
            )
    rank, world_size, local_rank, local_world_size = (
        int(environment[name]) for name in _RANK_VARIABLES
    )
    # These come from outside: an error would otherwise appear as a hang in the rendezvous.
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        values = ", ".join(f"{name}={environment[name]}" for name in _RANK_VARIABLES)
        raise ConfigError(
            f"The launcher's environment variables are inconsistent: {values}.",
            do="Start the script with torchrun, which sets these variables, or unset all of them.",
        )
    return Ranks(
        world_rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
    )


def gpu_of_local_rank(local_rank: int, visible_gpus: int) -> int:
    """Return the number of the GPU for a process that sees this many, at least one.

    The local rank with torchrun. Other launchers, such as `srun --gpus-per-task=1`, show each
    process its own GPU only, which is number 0 there.
    """
    return local_rank % visible_gpus


def select_backend(requested: str | None, *, has_gpus: bool) -> str:
    """Return the torch.distributed backend for the group of a launcher such as torchrun.

    "cpu:gloo,cuda:nccl" if this machine `has_gpus`, else "gloo". A `requested` backend other than
    "gloo" and "nccl" is returned unchanged. Those two count as not requested: a trainer with
    `num_workers=0` may have filled them in without knowing the devices.
    """
    if requested is not None and requested not in _DEFAULT_BACKENDS:
        return requested
    return "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
