"""The ranks of Horovod's interface, on the process group of `torch.distributed`.

`init` adopts the group that exists, forms the one that torchrun's variables describe, or stays
alone. All other modules of this package find ranks and groups here.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.frameworks.torch.torchrun_group import ranks_from_environment, select_backend
from spotfit.host import env


class ProcessSet:
    """Ranks that run collectives among themselves. Pass it to `init` or `add_process_set`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks` are those among all processes; they are sorted.

        Raises `ConfigError` for what is no list of integers, such as an MPI communicator.
        """
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) for rank in ranks):
            raise ConfigError(
                f"ProcessSet({ranks!r}): process sets are lists of ranks; there is no MPI.",
                do="Pass the ranks as integers, such as ProcessSet([0, 1]).",
            )
        self.ranks = sorted(ranks)
        self.process_set_id: int | None = None
        """A number once the set can be used, else None. The set of all ranks has 0."""
        self.group: Any = None
        """The process group of torch.distributed; None without one."""

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before `init` or `add_process_set`."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's position in the set; None if it is not in it, or before `init`."""
        if self.process_set_id is None or not self.included():
            return None
        return self.ranks.index(rank())

    def included(self) -> bool:
        """Return whether this process belongs to the set."""
        return rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks, once `init` was called."""


@dataclass(slots=True)
class _World:
    """The ranks of this process, and what `shutdown` must undo."""

    rank: int
    local_ranks: tuple[int, ...]
    """The local rank of each rank."""
    local_size: int
    is_owner: bool
    """Whether `init` has formed the process group."""
    backend: str | None
    """Backends of groups with collectives for tensors on CPUs and GPUs; None for torch's choice."""
    process_sets: list[ProcessSet]

    @property
    def local_rank(self) -> int:
        return self.local_ranks[self.rank]


_world: _World | None = None


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str = ()) -> None:
    """Adopt torch's process group, or form it with torchrun's variables; all ranks call it.

    Without either this process is alone, with size 1. Blocks until all ranks have joined. Does
    nothing after a first call. `process_sets` are created on all ranks, in their order; the text
    "dynamic" has no effect. Raises `ConfigError` for `comm`, and if this is one of several workers
    without a process group.
    """
    global _world  # a process has one rank
    if _world is not None:
        return
    if comm is not None:
        raise ConfigError(
            "hvd.init(comm=...) is not supported: there is no MPI, and ranks are those of the "
            "process group.",
            do="Call hvd.init(), and pass hvd.ProcessSet([...]) for a part of the ranks.",
        )
    is_owner = not dist.is_initialized() and _form_group()
    _world = _describe_world(is_owner=is_owner)
    global_process_set.ranks = list(range(len(_world.local_ranks)))
    global_process_set.process_set_id = 0
    if dist.is_initialized():
        global_process_set.group = (
            dist.new_group(backend=_world.backend) if _world.backend else dist.group.WORLD
        )
    for process_set in () if isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def shutdown() -> None:
    """Forget the ranks; leave the process group if `init` has formed it. Idempotent.

    A group that a trainer or the script has formed remains.
    """
    global _world
    if _world is None:
        return
    is_owner, sets = _world.is_owner, (global_process_set, *_world.process_sets)
    _world = None
    for process_set in sets:
        process_set.group = process_set.process_set_id = None
    if is_owner:
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` not since."""
    return _world is not None


def rank() -> int:
    """Return the rank of this process. Raises `ConfigError` before `init`, as the others do."""
    return _require_world("rank").rank


def size() -> int:
    """Return the number of processes."""
    return len(_require_world("size").local_ranks)


def local_rank() -> int:
    """Return the rank among the processes of this node."""
    return _require_world("local_rank").local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return _require_world("local_size").local_size


def cross_rank() -> int:
    """Return the number of this node among those that have this local rank."""
    world = _require_world("cross_rank")
    return world.local_ranks[: world.rank].count(world.local_rank)


def cross_size() -> int:
    """Return the number of nodes that have this local rank."""
    world = _require_world("cross_size")
    return world.local_ranks.count(world.local_rank)


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    local_ranks = _require_world("is_homogeneous").local_ranks
    return len({local_ranks.count(local_rank) for local_rank in local_ranks}) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Create a process set and return it. All ranks call it, also those that are not in the set.

    Raises `ConfigError` if a rank does not exist, or a set of the same ranks exists.
    """
    world = _require_world("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    sets = (global_process_set, *world.process_sets)
    unknown = set(process_set.ranks) - set(global_process_set.ranks)
    if unknown or not process_set.ranks or any(process_set.ranks == one.ranks for one in sets):
        raise ConfigError(
            f"{process_set}: a process set needs existing ranks and must not repeat another set; "
            f"the ranks are 0 to {len(world.local_ranks) - 1}.",
            do="Pass other ranks, or use the existing set.",
        )
    if dist.is_initialized():
        process_set.group = dist.new_group(process_set.ranks, backend=world.backend)
    process_set.process_set_id = 1 + max(one.process_set_id or 0 for one in sets)
    world.process_sets.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and return whether it existed. All ranks call it.

    The set of all ranks cannot be removed.
    """
    sets = _require_world("remove_process_set").process_sets
    if process_set not in sets:
        return False
    sets.remove(process_set)
    if process_set.group is not None and process_set.included():
        # The threads of gloo release its last collectives; they must not do so while it is deleted.
        dist.barrier(group=process_set.group)
        dist.destroy_process_group(process_set.group)
    process_set.group = process_set.process_set_id = None
    return True


def require_member(process_set: ProcessSet) -> int:
    """Return the size of a process set in which this process runs a collective.

    Raises `ConfigError` before `init`, for a set that was not added, and for one without this rank.
    """
    world = _require_world("init")
    members = process_set.size()
    if members is None or world.rank not in process_set.ranks:
        raise ConfigError(
            f"Rank {world.rank} cannot run a collective of {process_set}: "
            + ("the set was not added." if members is None else "it is not in the set."),
            do="Call hvd.add_process_set() on all ranks, and the collective on those of the set.",
        )
    return members


# --- Forming the group ----------------------------------------------------------------------------


def _form_group() -> bool:
    """Join the group that torchrun's variables describe; return False without them."""
    variables = env.copy_environment()
    ranks = ranks_from_environment(variables)
    if ranks is None:
        if variables.get("WORLD_SIZE", "1") not in {"", "1"}:
            raise ConfigError(
                f"This is one of {variables['WORLD_SIZE']} workers, but they have no process "
                "group: each would train a model of its own.",
                do="Use spotfit.horovod.HorovodTrainer, or start the script with torchrun.",
            )
        return False
    dist.init_process_group(
        select_backend(None, has_gpus=torch.cuda.is_available()),
        timeout=datetime.timedelta(seconds=TorchConfig().timeout_s),
    )
    return True


def _describe_world(*, is_owner: bool) -> _World:
    if not dist.is_initialized():
        return _World(0, (0,), 1, is_owner=False, backend=None, process_sets=[])
    own_rank, variables = dist.get_rank(), env.copy_environment()
    # Hosts are compared only if no launcher has counted the processes of this node.
    own = variables.get("LOCAL_RANK") or "", socket.gethostname()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    hosts = [host for _, host in gathered]
    local_ranks = tuple(
        int(local) if local else hosts[:number].count(hosts[number])
        for number, (local, _) in enumerate(gathered)
    )
    local_size = int(variables.get("LOCAL_WORLD_SIZE") or hosts.count(own[1]))
    # Scripts reduce metrics on the CPU, which NCCL alone cannot.
    config = dist.get_backend_config()
    backend = None if "cpu:" in config else f"cpu:gloo,{config}"
    return _World(own_rank, local_ranks, local_size, is_owner, backend, [])


def _require_world(caller: str) -> _World:
    if _world is None:
        raise ConfigError(
            f"hvd.{caller}() needs hvd.init(), which was not called.",
            do="Call hvd.init() once, before all other functions of Horovod.",
        )
    return _world
