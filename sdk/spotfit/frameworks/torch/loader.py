"""Data loaders: each worker its share, batches on its device, the next one on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

Loader = DataLoader[Any]


def with_share(loader: Loader, *, world_size: int, rank: int) -> Loader:
    """A new loader over this worker's share of the data; its batch size is per worker.

    It shuffles if the given one did not read in order. The given one is kept where there is
    nothing to share: one worker, an iterable dataset, or the user's own DistributedSampler.
    """
    if (
        world_size <= 1
        or isinstance(loader.dataset, IterableDataset)
        or isinstance(loader.sampler, DistributedSampler)
    ):
        return loader
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=DistributedSampler(
            loader.dataset,
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle,
        ),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )


class MovingLoader(Loader):
    """The given loader, with every batch on `device`; on a GPU the next one moves meanwhile."""

    def __init__(self, loader: Loader, device: torch.device, *, ahead: bool) -> None:
        # Not DataLoader's own: this one has the given one's dataset, sampler and sizes.
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        self._device = device
        self._ahead = ahead and device.type == "cuda"

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # theirs is private
        if self._ahead:
            return _moved_ahead(iter(self._loader), self._device)
        return (moved(batch, self._device) for batch in self._loader)


def moved(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The same batch with all its tensors on `device`, within dicts, lists and tuples, too."""
    return _each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """One batch ahead, on a stream of its own."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    done = object()

    def fetch() -> Any:
        batch = next(batches, done)
        with torch.cuda.stream(side):
            return batch if batch is done else moved(batch, device, non_blocking=True)

    waiting = fetch()
    while waiting is not done:
        here = torch.cuda.current_stream(device)
        here.wait_stream(side)
        # Its memory belongs to the side stream, which must not use it again before we are done.
        batch = _each_tensor(waiting, partial(_used_on, stream=here))
        waiting = fetch()
        yield batch


def _used_on(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor


def _each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    match batch:
        case torch.Tensor():
            return change(batch)
        case dict():
            return {key: _each_tensor(value, change) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(_each_tensor(value, change) for value in batch))
        case list() | tuple():
            return type(batch)(_each_tensor(value, change) for value in batch)
        case _ if callable(getattr(batch, "to", None)):
            return change(batch)
    return batch
