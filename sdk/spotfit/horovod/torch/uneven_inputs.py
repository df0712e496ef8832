"""Ranks with different numbers of batches: `join`, and the announcements that it reads.

Every collective of all ranks is preceded by an announcement: a sum of few integers, for which only
ranks in `join` wait. They thereby learn which tensors the others reduce, and contribute zeros.

| announcement | rank in `join` |
|---|---|
| a sum or average of n numbers | takes part with n zeros |
| another collective | raises `ConfigError` |
| all ranks are in `join` | returns |
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.process_sets import ProcessSet, global_process_set, size

_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
_OTHER, _SUM = 0, 1


class _Announcements:
    """The announcements of this process."""

    def __init__(self) -> None:
        self.count = 0
        """Equal on all ranks between two collectives."""
        # Without `wait` torch does not keep the tensor of a collective.
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()

    def start(self, values: list[int]) -> tuple[Any, torch.Tensor]:
        """Start the sum of `values` over all ranks; return torch's work and the tensor."""
        # On the CPU: the announcement must not wait for the GPU, nor the GPU for it.
        message = torch.tensor(values)
        work = dist.all_reduce(message, group=global_process_set.group, async_op=True)
        self.count += 1
        return work, message

    def send(self, values: list[int]) -> None:
        """Announce a collective of this rank, without waiting for others."""
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()
        self._pending.append(self.start(values))


_announcements = _Announcements()


def announce(process_set: ProcessSet, summed: torch.Tensor | None = None) -> None:
    """Announce this rank's next collective; `summed` is the tensor if it is a sum.

    Called once before each collective, on all ranks of the set. Only the set of all ranks has
    announcements. Does not wait.
    """
    if process_set is not global_process_set or size() == 1:
        return
    if summed is None:
        _announcements.send([1, _OTHER, 0, 0, 0])
    else:
        dtype = _DTYPES.index(summed.dtype)
        _announcements.send([1, _SUM, dtype, summed.numel(), int(summed.is_cuda)])


def join(device: int = -1) -> int:
    """Take part with zeros in the sums of ranks that still have batches, until all have joined.

    Returns the rank that joined last. Averages are over all ranks, also those that have joined.
    The others may only call `allreduce`, its variants with sums and averages, and step dense
    `DistributedOptimizer`s. `device` has no effect. Raises `ConfigError` for other collectives.
    """
    if size() == 1:
        return 0
    group = global_process_set.group
    joined_at = _announcements.count
    while True:
        work, message = _announcements.start([0, 0, 0, 0, 0])
        work.wait()
        active, *fields = message.tolist()
        if not active:
            break
        kind, dtype, numbers, is_cuda = (field // active for field in fields)
        if kind != _SUM:
            raise _not_while_joined()
        zeros = torch.zeros(numbers, dtype=_DTYPES[dtype], device="cuda" if is_cuda else "cpu")
        dist.all_reduce(zeros, group=group)
    joined: list[Any] = [None] * size()
    dist.all_gather_object(joined, joined_at, group=group)
    return max(range(size()), key=lambda rank: (joined[rank], rank))


def _not_while_joined() -> ConfigError:
    return ConfigError(
        "While a rank is in hvd.join(), the others can only reduce dense tensors to sums and "
        "averages: another rank has started another collective.",
        do="Call that collective on all ranks after hvd.join(), or give all ranks the same number "
        "of batches.",
        retryable=False,
    )
