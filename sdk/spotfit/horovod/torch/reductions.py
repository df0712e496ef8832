"""Reductions: allreduce and reducescatter, with their gradients.

torch.distributed matches collectives by their order: all ranks start them in the same order. The
names that Horovod takes for that have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.exchanges import allgather, allgather_async
from spotfit.horovod.torch.gradient_compression import Compression, Compressor
from spotfit.horovod.torch.handles import CollectiveHandle
from spotfit.horovod.torch.process_sets import ProcessSet, global_process_set, rank, require_member
from spotfit.horovod.torch.uneven_inputs import announce


class HorovodOp(IntEnum):
    """How a reduction combines the tensors of the ranks; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum = HorovodOp.AVERAGE, HorovodOp.SUM, HorovodOp.ADASUM
Min, Max, Product = HorovodOp.MIN, HorovodOp.MAX, HorovodOp.PRODUCT

_TORCH_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


def start_reduction(
    tensor: Tensor, op: int, scales: tuple[float, float], process_set: ProcessSet
) -> tuple[list[Any], Callable[[], Tensor]]:
    """Start to reduce a contiguous tensor in place; return torch's works and what finishes it.

    `scales` are factors before and after the reduction. Values of integers are truncated. Raises
    `ConfigError` for an operation that is not supported.
    """
    require_supported(op)
    torch_op = _TORCH_OPS[HorovodOp(op)]
    members = require_member(process_set)
    _scale(tensor, scales[0])
    works = []
    if members > 1:
        announce(process_set, summed=tensor if torch_op == dist.ReduceOp.SUM else None)
        works = [dist.all_reduce(tensor, torch_op, group=process_set.group, async_op=True)]

    def finish() -> Tensor:
        if op == Average and members > 1:
            is_integral = not (tensor.is_floating_point() or tensor.is_complex())
            tensor.div_(members, rounding_mode="trunc" if is_integral else None)
        return _scale(tensor, scales[1])

    return works, finish


def require_supported(op: int) -> None:
    """Raise `ConfigError` for Adasum and for what is no operation."""
    if op not in _TORCH_OPS:
        raise _unsupported_op(op, "")


def resolve_op(op: int | None, average: bool | None) -> int:
    """Return the operation for the arguments `op` and `average`, of which `average` is older.

    Raises `ConfigError` if both are given.
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ConfigError(
            f"op={op!r} and average={average!r} contradict each other.",
            do="Pass op=hvd.Average or op=hvd.Sum, and omit average.",
        )
    return Average if average else Sum


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to reduce a tensor to a new one; return the handle for `synchronize`."""
    return allreduce_async_(
        _copy(tensor), average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to reduce a tensor in place; return the handle for `synchronize`.

    Raises `ConfigError` for a tensor that is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ConfigError(
            f"A tensor of shape {tuple(tensor.shape)} is not contiguous, and cannot be reduced in "
            "place.",
            do="Call hvd.allreduce(), or pass tensor.contiguous().",
        )
    scales = prescale_factor, postscale_factor
    works, finish = start_reduction(tensor.detach(), resolve_op(op, average), scales, process_set)

    def result() -> Tensor:
        finish()
        return tensor

    return CollectiveHandle(works, result)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensors of all ranks, reduced to their average, or by `op`.

    `name` has no effect: all ranks reduce in the same order. The gradient of a sum or average is
    reduced like the tensor.
    """
    compressed, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    reduced = _Allreduce.apply(compressed, resolve_op(op, average), scales, process_set)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place and return it."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced: Tensor = handle.wait()
    return reduced


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to reduce tensors in place, those of a type together; return one handle for all."""
    resolved, scales = resolve_op(op, average), (prescale_factor, postscale_factor)
    started = []
    for part in by_type(tensors):
        flat = flatten(part)
        started.append((part, *start_reduction(flat, resolved, scales, process_set)))

    def finish() -> list[Tensor]:
        for part, _, finish_part in started:
            for tensor, values in zip(part, unflatten(finish_part(), part), strict=True):
                tensor.detach().copy_(values)
        return list(tensors)

    return CollectiveHandle([work for _, works, _ in started for work in works], finish)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle:
    """Start to reduce tensors to new ones; return one handle for all."""
    copies = [_copy(tensor) for tensor in tensors]
    return grouped_allreduce_async_(
        copies, average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return each tensor reduced over the ranks, as `allreduce` does, in fewer transfers."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _GroupedAllreduce.apply(  # type: ignore[no-untyped-call]
        resolve_op(op, average),
        (prescale_factor, postscale_factor),
        process_set,
        *(tensor for tensor, _ in compressed),
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce tensors in place and return them."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced: list[Tensor] = handle.wait()
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to add up sparse tensors; return a function that waits and returns the result.

    `op` is a sum or an average. The result is coalesced: each place has one value. Waits for all
    ranks, as `allgather_async` does. Raises `ConfigError` for another operation.
    """
    if op not in (Average, Sum):
        raise _unsupported_op(op, "of sparse tensors")
    own, members = tensor.detach().coalesce(), require_member(process_set)
    places = allgather_async(own.indices().T.contiguous(), process_set=process_set)
    values = allgather_async(own.values(), process_set=process_set)

    def result() -> Tensor:
        total = torch.sparse_coo_tensor(
            places.wait().T, values.wait(), own.shape, check_invariants=False
        ).coalesce()
        return total / members if op == Average else total

    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CollectiveHandle:
    """Start to reduce a tensor of which each rank receives a part of the first dimension.

    The first ranks receive one row more if the rows cannot be divided. Returns the handle for
    `synchronize`. Raises `ConfigError` for a tensor without dimensions.
    """
    members, position = require_member(process_set), process_set.ranks.index(rank())
    if tensor.dim() == 0:
        raise ConfigError(
            "hvd.reducescatter() needs a tensor with at least one dimension.",
            do="Use hvd.allreduce() for single numbers.",
        )
    rows = [len(part) for part in torch.arange(len(tensor)).tensor_split(members)]
    # Whole, because few backends scatter unequal parts.
    works, finish = start_reduction(
        _copy(tensor), op, (prescale_factor, postscale_factor), process_set
    )
    return CollectiveHandle(works, lambda: torch.split(finish(), rows)[position].clone())


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's part of the reduced tensor; see `reducescatter_async`."""
    compressed, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    reduced = _Reducescatter.apply(compressed, op, scales, process_set)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, context)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's part of each reduced tensor; see `reducescatter_async`."""
    options = compression, op, process_set, prescale_factor, postscale_factor
    return [reducescatter(tensor, name, *options) for tensor in tensors]


# --- Several tensors in one -----------------------------------------------------------------------


def by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of the same dtype and device, each in the given order."""

    def kind(tensor: Tensor) -> str:
        return f"{tensor.dtype} {tensor.device}"

    return [list(part) for _, part in groupby(sorted(tensors, key=kind), key=kind)]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of dense tensors of one type in a new tensor of one dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` with the shapes of the tensors that were flattened."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


# --- Gradients ------------------------------------------------------------------------------------


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, op: int, scales: tuple[float, float], process_set: ProcessSet
    ) -> Tensor:
        ctx.arguments = op, scales, process_set
        works, finish = start_reduction(_copy(tensor), op, scales, process_set)
        reduced: Tensor = CollectiveHandle(works, finish).wait()
        return reduced

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _require_linear(ctx.arguments[0])
        return _Allreduce.apply(gradient, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: int, scales: tuple[float, float], process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = op, scales, process_set
        copies = [_copy(tensor) for tensor in tensors]
        return tuple(grouped_allreduce_async_(copies, None, None, op, *scales, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _require_linear(ctx.arguments[0])
        return None, None, None, *_GroupedAllreduce.apply(*ctx.arguments, *gradients)  # type: ignore[no-untyped-call]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, op: int, scales: tuple[float, float], process_set: ProcessSet
    ) -> Tensor:
        ctx.op, ctx.process_set = op, process_set
        # As in Horovod: a sum is scaled as if the losses of all ranks were averaged.
        ctx.factor = scales[0] * scales[1] * (process_set.size() or 1 if op == Sum else 1)
        part: Tensor = reducescatter_async(tensor, None, op, process_set, *scales).wait()
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _require_linear(ctx.op)
        whole = allgather(gradient * ctx.factor, process_set=ctx.process_set)
        return whole, None, None, None


def _require_linear(op: int) -> None:
    if op not in (Average, Sum):
        raise _unsupported_op(op, "in a backward pass")


def _unsupported_op(op: int, where: str) -> ConfigError:
    name = HorovodOp(op).name.capitalize() if op in tuple(HorovodOp) else repr(op)
    reason = (
        ": Adasum is an algorithm of Horovod's library, which torch.distributed does not have"
        if op == Adasum
        else ""
    )
    return ConfigError(
        f"op={name} is not supported{where and f' {where}'}{reason}.",
        do="Use op=hvd.Average, with a learning rate for the batch of all ranks.",
        retryable=False,
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _scale(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double() * factor)
