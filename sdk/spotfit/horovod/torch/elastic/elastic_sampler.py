"""ElasticSampler: rows of an epoch that are not trained on yet, divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Sampler

from spotfit.horovod.torch.process_sets import rank, size


class ElasticSampler(Sampler[int]):
    """Divides the rows of a dataset over the ranks, without those that were trained on.

    Call `record_batch` after each batch, and `set_epoch` at the end of each epoch. In the state of
    `hvd.elastic.run`, the rest of the epoch is divided over the ranks that continue, whatever their
    number. With the same number each rank continues with the rows that it would have had.
    """

    before_first_row: Callable[[], object] = staticmethod(lambda: None)
    """Called when a loader begins to read, before the first row."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """`seed` is the same on all ranks; with it and the epoch the rows are shuffled."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all rows. Call it when the previous one has ended."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has trained on a batch of this size. `batch_idx` has no effect."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Divide the remaining rows of the epoch over the ranks."""
        self.num_replicas, self.rank = size(), rank()
        # Not changed by `record_batch`: the length of a loader does not change while it is read.
        self._first_row = self.processed_num
        remaining = max(0, len(self.dataset) - self._first_row)
        self.num_samples = -(-remaining // self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of rows of it that all ranks have trained on."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the place that `state_dict` has returned, with the ranks of now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        self.before_first_row()
        rows = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            rows = torch.randperm(len(rows), generator=generator).tolist()
        # All ranks have equally many rows: the first ones of the epoch fill the last batch, also
        # after a restart.
        padded = islice(cycle(rows), self._first_row, None)
        own = islice(padded, self.rank, None, self.num_replicas)
        return islice(own, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples
