"""Reduction of gradients in buckets, while the backward pass computes further ones.

All ranks start the buckets in the same order, whatever the order in which their gradients become
ready: a bucket waits for those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, zeros_like

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.gradient_compression import Compressor
from spotfit.horovod.torch.handles import CollectiveHandle
from spotfit.horovod.torch.process_sets import ProcessSet
from spotfit.horovod.torch.reductions import (
    by_type,
    flatten,
    sparse_allreduce_async,
    start_reduction,
    unflatten,
)

# As in DistributedDataParallel: large enough for the bandwidth of networks, and a small first one,
# so that the transfer begins early.
_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced: the arguments of `DistributedOptimizer`."""

    op: int
    scales: tuple[float, float]
    """Factors before and after the reduction."""
    compression: type[Compressor]
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are reduced together."""

    parameters: list[Tensor]
    missing: int = 0
    """Gradients that the backward pass has not computed yet."""
    works: list[Any] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)


class GradientBuckets:
    """The buckets of one optimizer; `step`s of the optimizer are separated by `finish`."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reduction: GradientReduction,
        *,
        passes: int,
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        """`passes` is the number of backward passes per step; see `plan_buckets` for `groups`."""
        self._reduction = reduction
        self._buckets = [_Bucket(part) for part in plan_buckets(parameters, groups)]
        self._bucket_of = {one: bucket for bucket in self._buckets for one in bucket.parameters}
        self.set_passes(passes)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All parameters, in the order in which they are reduced."""
        return tuple(self._bucket_of)

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step, and expect the first one."""
        self._passes = passes
        self.reset()

    def reset(self) -> None:
        """Expect the first backward pass of a step, and forget an unfinished one."""
        self._passes_left = dict.fromkeys(self._bucket_of, self._passes)
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.works, bucket.finish = [], []

    @property
    def is_started(self) -> bool:
        """Whether a backward pass has computed gradients that were not finished."""
        return any(left < self._passes for left in self._passes_left.values())

    def add(self, parameter: Tensor) -> None:
        """Record that a backward pass has computed the gradient of a parameter.

        With the last pass of a step, starts the reductions that became possible. Raises
        `ConfigError` after more passes than expected.
        """
        if self._passes_left[parameter] == 0:
            raise ConfigError(
                f"Gradients were computed more than backward_passes_per_step={self._passes} times "
                "before optimizer.step().",
                do="Increase backward_passes_per_step of DistributedOptimizer to accumulate "
                "gradients.",
                retryable=False,
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._bucket_of[parameter].missing -= 1
            while self._started < len(self._buckets) and not self._next.missing:
                self._start_next()

    def finish(self) -> None:
        """Reduce what has not been reduced, and set the gradients to the results.

        Parameters without a gradient take part with zeros, and have a gradient afterwards. Raises
        `HorovodInternalError` if another rank has ended.
        """
        while self._started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            CollectiveHandle(bucket.works, lambda: None).wait()
            for finish in bucket.finish:
                finish()
        self.reset()

    @property
    def _next(self) -> _Bucket:
        return self._buckets[self._started]

    def _start_next(self) -> None:
        bucket, reduction = self._next, self._reduction
        self._started += 1
        dense = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = zeros_like(parameter)
            if parameter.grad.is_sparse and not reduction.sparse_as_dense:
                bucket.finish.append(self._start_sparse(parameter))
            else:
                dense.append(parameter)
        if dense:
            self._start_dense(bucket, dense)

    def _start_dense(self, bucket: _Bucket, parameters: list[Tensor]) -> None:
        reduction = self._reduction
        gradients = [_dense_gradient(parameter) for parameter in parameters]
        compressed = [reduction.compression.compress(one) for one in gradients]
        tensors = [tensor for tensor, _ in compressed]
        # A large gradient of its own is reduced in place.
        flat = flatten(tensors) if len(tensors) > 1 else tensors[0].reshape(-1)
        works, finish = start_reduction(flat, reduction.op, reduction.scales, reduction.process_set)
        bucket.works += works

        def store() -> None:
            reduced = unflatten(finish(), tensors)
            for parameter, values, (_, context) in zip(
                parameters, reduced, compressed, strict=True
            ):
                _store_gradient(parameter, reduction.compression.decompress(values, context))

        bucket.finish.append(store)

    def _start_sparse(self, parameter: Tensor) -> Callable[[], None]:
        reduction = self._reduction
        assert parameter.grad is not None
        result = sparse_allreduce_async(parameter.grad, None, reduction.op, reduction.process_set)

        def store() -> None:
            parameter.grad = result()

        return store


def plan_buckets(
    parameters: Sequence[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
) -> list[list[Tensor]]:
    """Return the parameters in buckets of one type, in the order in which they are reduced.

    That is the reverse of the given order, as the backward pass computes the last ones first.
    `groups` is a number of buckets, or lists of parameters of which each is a bucket; with None
    buckets are limited in size.
    """
    reverse = list(reversed(parameters))
    if groups is None or groups == 0:
        return [part for same in by_type(reverse) for part in _split_by_size(same)]
    if isinstance(groups, int):
        per_group = max(1, -(-len(reverse) // groups))
        chosen = [reverse[at : at + per_group] for at in range(0, len(reverse), per_group)]
    else:
        position = {parameter: at for at, parameter in enumerate(reverse)}
        listed = [[one for one in group if one in position] for group in groups]
        grouped = {one for group in listed for one in group}
        chosen = [group for group in listed if group]
        chosen += [[one] for one in reverse if one not in grouped]
        chosen.sort(key=lambda group: max(position[one] for one in group))
    return [part for group in chosen for part in by_type(group)]


def _split_by_size(parameters: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size_bytes, limit_bytes = 0, 0
    for parameter in parameters:
        if size_bytes >= limit_bytes:
            limit_bytes = _BUCKET_BYTES if buckets else _FIRST_BUCKET_BYTES
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
    return buckets


def _dense_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _store_gradient(parameter: Tensor, reduced: Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = reduced.to_sparse(parameter.grad.sparse_dim())
    else:
        parameter.grad.detach().copy_(reduced)
