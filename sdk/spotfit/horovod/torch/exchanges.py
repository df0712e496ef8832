"""Collectives that move values between ranks: allgather, broadcast, alltoall, barrier, objects.

All ranks call them in the same order; names have no effect. Gradients are Horovod's: those of all
ranks are averaged.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.handles import CollectiveHandle
from spotfit.horovod.torch.process_sets import (
    ProcessSet,
    global_process_set,
    rank,
    require_member,
)
from spotfit.horovod.torch.uneven_inputs import announce


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CollectiveHandle:
    """Start to concatenate the tensors of all ranks along their first dimension.

    The first dimension may differ between ranks: it is exchanged at once, for which all ranks are
    waited for. Returns the handle for `synchronize`. Raises `ConfigError` for a tensor without
    dimensions.
    """
    members = require_member(process_set)
    if tensor.dim() == 0:
        raise ConfigError(
            "hvd.allgather() concatenates tensors, which need at least one dimension.",
            do="Pass tensor.reshape(1).",
        )
    own = tensor.detach().contiguous()
    if members == 1:
        return CollectiveHandle([], own.clone)
    announce(process_set)
    rows = _gather_numbers([len(own)], process_set)
    # Padded, because gloo gathers tensors of one shape only.
    most = max(count for (count,) in rows)
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in rows]
    work = dist.all_gather(parts, padded, group=process_set.group, async_op=True)
    return CollectiveHandle(
        [work], lambda: torch.cat([part[:n] for part, (n,) in zip(parts, rows, strict=True)])
    )


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, concatenated along their first dimension."""
    gathered: Tensor = _Allgather.apply(tensor, process_set)  # type: ignore[no-untyped-call]
    return gathered


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return `allgather` of each tensor."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to set a tensor to that of `root_rank`, in place; return the handle.

    `root_rank` is the rank among all processes, also with a process set. Raises `ConfigError` if it
    is not in the set.
    """
    members = require_member(process_set)
    if root_rank not in process_set.ranks:
        raise ConfigError(
            f"root_rank={root_rank} is not one of the ranks {process_set.ranks}.",
            do="Pass the rank whose values all others receive, such as root_rank=0.",
        )
    if members == 1:
        return CollectiveHandle([], lambda: tensor)
    announce(process_set)
    values = tensor.detach().contiguous()
    work = dist.broadcast(values, root_rank, group=process_set.group, async_op=True)

    def finish() -> Tensor:
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)
        return tensor

    return CollectiveHandle([work], finish)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to return the tensor of `root_rank`; see `broadcast_async_`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of `root_rank`, of the same shape and dtype on all ranks."""
    received: Tensor = _Broadcast.apply(tensor, root_rank, process_set)  # type: ignore[no-untyped-call]
    return received


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Set a tensor to that of `root_rank`, in place, and return it."""
    received: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return received


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to send each rank its rows of the tensor; `splits` has the number of rows per rank.

    Equal numbers without `splits`. All ranks are waited for at once. `synchronize` returns the rows
    received, ordered by rank, and the number of rows from each rank. Raises `ConfigError` if the
    splits do not match the tensor.
    """
    members = require_member(process_set)
    counts = _check_splits(tensor, splits, members)
    own = tensor.detach().contiguous()
    if members == 1:
        return CollectiveHandle([], lambda: (own.clone(), _like_splits(counts, splits)))
    announce(process_set)
    position = process_set.ranks.index(rank())
    received = [sent[position] for sent in _gather_numbers(counts, process_set)]
    output = own.new_empty(sum(received), *own.shape[1:])
    work = dist.all_to_all_single(
        output, own, received, counts, group=process_set.group, async_op=True
    )
    return CollectiveHandle([work], lambda: (output, _like_splits(received, splits)))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send each rank its rows of the tensor; return the rows received, ordered by rank.

    With `splits`, the number of rows for each rank, also returns the number of rows from each rank.
    """
    output, received = _Alltoall.apply(tensor, splits, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it."""
    if require_member(process_set) > 1:
        announce(process_set)
        dist.barrier(group=process_set.group)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of `root_rank`, which must be picklable, also by cloudpickle only."""
    if require_member(process_set) == 1:
        return obj
    announce(process_set)
    is_root = rank() == root_rank
    box = [cloudpickle.dumps(obj) if is_root else None]
    dist.broadcast_object_list(box, root_rank, group=process_set.group)
    # From a rank of the same group, which runs the same code.
    return obj if is_root else pickle.loads(box[0])  # type: ignore[arg-type]  # noqa: S301


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, ordered by rank; they must be picklable."""
    members = require_member(process_set)
    if members == 1:
        return [obj]
    announce(process_set)
    gathered: list[Any] = [None] * members
    dist.all_gather_object(gathered, cloudpickle.dumps(obj), group=process_set.group)
    return [pickle.loads(one) for one in gathered]  # noqa: S301 - as above


# --- Gradients ------------------------------------------------------------------------------------


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_set: ProcessSet) -> Tensor:
        ctx.rows, ctx.process_set = len(tensor) if tensor.dim() else 0, process_set
        gathered: Tensor = allgather_async(tensor, process_set=process_set).wait()
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = _mean_of_ranks(gradient, ctx.process_set)
        rows = [ctx.rows]
        if len(ctx.process_set.ranks) > 1:
            announce(ctx.process_set)
            rows = [count for (count,) in _gather_numbers(rows, ctx.process_set)]
        return torch.split(mean, rows)[ctx.process_set.ranks.index(rank())], None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        received: Tensor = broadcast_async(tensor, root_rank, process_set=process_set).wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = _mean_of_ranks(gradient, ctx.process_set)
        return mean if rank() == ctx.root_rank else torch.zeros_like(mean), None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        output, received = alltoall_async(tensor, splits, process_set=process_set).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        handle = alltoall_async(gradient, ctx.received, process_set=ctx.process_set)
        return handle.wait()[0], None, None


def _mean_of_ranks(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    mean = gradient.detach().clone(memory_format=torch.contiguous_format)
    if len(process_set.ranks) > 1:
        announce(process_set, summed=mean)
        dist.all_reduce(mean, group=process_set.group)
        mean.div_(len(process_set.ranks))
    return mean


def _gather_numbers(own: list[int], process_set: ProcessSet) -> list[list[int]]:
    """Return equally many integers of each rank; waits for all ranks."""
    numbers = torch.tensor(own)
    gathered = [torch.empty_like(numbers) for _ in process_set.ranks]
    dist.all_gather(gathered, numbers, group=process_set.group)
    return [one.tolist() for one in gathered]


def _check_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, members: int) -> list[int]:
    rows = len(tensor) if tensor.dim() else 0
    counts = [rows // members] * members if splits is None else [int(one) for one in splits]
    if tensor.dim() == 0 or len(counts) != members or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(
            f"hvd.alltoall(): splits of {counts} rows for {members} ranks do not match a tensor of "
            f"shape {tuple(tensor.shape)}.",
            do="Pass one number of rows per rank, which add up to the first dimension.",
        )
    return counts


def _like_splits(counts: list[int], splits: Tensor | Sequence[int] | None) -> Tensor:
    if isinstance(splits, Tensor):
        return splits.new_tensor(counts)
    return torch.tensor(counts, dtype=torch.int32)
