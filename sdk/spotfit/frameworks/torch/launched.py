"""The process group that a launcher such as torchrun has prepared, for `num_workers=0`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.backend import Torch
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.host import env
from spotfit.host.extras import need
from spotfit.model.ranks import Ranks

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_USUAL = ("gloo", "nccl")


class LaunchedGroup:
    """Processes that somebody else has started; they meet through torch."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def barrier(self) -> None:
        """Wait for all of them."""
        import torch.distributed as dist

        dist.barrier()

    def broadcast(self, thing: Any) -> Any:
        """What rank 0 gave."""
        import torch.distributed as dist

        box = [thing]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def launched_group(config: TorchConfig) -> Iterator[LaunchedGroup | None]:
    """Join the group that the environment tells of; None where it tells of none.

    One that exists already is used and left as it is. Raises `ConfigError` where the environment
    makes no sense.
    """
    ranks = ranks_in(env.everything())
    if ranks is None:
        yield None
        return
    need("torch", extra="torch")
    import torch.distributed as dist

    ours = not dist.is_initialized()
    if ours:
        _join(config, ranks)
    yield LaunchedGroup(ranks)
    if ours:  # after a failure the others may hang: then the launcher ends them
        Torch().leave()


def ranks_in(environment: Mapping[str, str]) -> Ranks | None:
    """Who the launcher says this process is; None where there was none. Raises `ConfigError`."""
    if not all(environment.get(name) for name in (*_NUMBERS, *_ADDRESS)):
        return None
    rank, size, local_rank, local_size = (_number(name, environment) for name in _NUMBERS)
    if not (rank < size and local_rank < local_size <= size):
        told = ", ".join(f"{name}={environment[name]}" for name in _NUMBERS)
        raise ConfigError(
            f"The environment contradicts itself: {told}.",
            do="Let torchrun set these variables, or unset them all.",
        )
    return Ranks(rank, size, local_rank, local_size, rank // local_size)


def _number(name: str, environment: Mapping[str, str]) -> int:
    if not environment[name].isdecimal():
        raise ConfigError(
            f"{name}={environment[name]!r} is no number.",
            do="Let torchrun set it, or unset it: then this process is alone.",
        )
    return int(environment[name])


def _join(config: TorchConfig, ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    cards = torch.cuda.is_available()
    if cards:
        torch.cuda.set_device(ranks.local_rank)
    timeout = datetime.timedelta(seconds=config.timeout_s)
    dist.init_process_group(backend_for(config.backend, cards=cards), timeout=timeout)


def backend_for(named: str | None, *, cards: bool) -> str:
    """What this machine's devices speak; another backend only where somebody named it.

    A trainer without workers was told nothing of devices: its choice between the usual two is void.
    """
    if named is not None and named not in _USUAL:
        return named
    return "cpu:gloo,cuda:nccl" if cards else "gloo"
