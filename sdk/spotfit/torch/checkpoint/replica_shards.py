"""Which samples of an epoch's order a replica reads: the layouts of torch and of Accelerate.

Pure functions of the number of samples; `start` and `end` delimit the rest of an epoch in its
order. Indices past `end` wrap around to the beginning of the epoch: they are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StridedShards:
    """Replica r of n reads every n-th sample, as with torch's DistributedSampler."""

    num_replicas: int = 1
    replica: int = 0
    drop_last: bool = False
    """Whether samples that do not suffice for all replicas are dropped instead of padded."""

    def count(self, start: int, end: int) -> int:
        """Return the number of samples that this replica reads from `start` on."""
        return len(self.indices(start, end))

    def indices(self, start: int, end: int) -> Sequence[int]:
        """Return this replica's indices; all replicas have equally many."""
        remainder = (end - start) % self.num_replicas
        if remainder and self.drop_last:
            end -= remainder
        elif remainder:
            end += self.num_replicas - remainder
        return range(start + self.replica, end, self.num_replicas)


@dataclass(frozen=True, slots=True)
class BatchShards:
    """Replica r of n reads the batches r, r + n, …, as with Accelerate's BatchSamplerShard.

    Its `split_batches` divides larger batches, which is the same with smaller ones.
    """

    batch_size: int
    """Samples of one batch of one replica."""
    num_replicas: int
    replica: int
    drop_last: bool
    """Whether samples that do not suffice for a batch of all replicas are dropped."""
    even_batches: bool
    """Whether the last batches are padded instead, so that replicas have equally many."""

    def count(self, start: int, end: int) -> int:
        """Return the number of samples that this replica reads from `start` on."""
        rounds, remainder = divmod(max(0, end - start), self.batch_size * self.num_replicas)
        if self.drop_last or not remainder:
            last = 0
        elif self.even_batches:
            last = self.batch_size
        else:
            last = min(self.batch_size, max(0, remainder - self.replica * self.batch_size))
        return rounds * self.batch_size + last

    def indices(self, start: int, end: int) -> Sequence[int]:
        """Return this replica's indices, batch by batch."""
        count = self.count(start, end)
        stride = self.batch_size * self.num_replicas
        first = start + self.replica * self.batch_size
        batches = range(first, first + -(-count // self.batch_size) * stride, stride)
        return [index for at in batches for index in range(at, at + self.batch_size)][:count]


ReplicaShards = StridedShards | BatchShards
