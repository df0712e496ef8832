"""Data loaders for distributed training: sharding, transfer to the device and prefetching."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from spotfit.core.errors import ConfigError
from spotfit.host import log
from spotfit.torch.checkpoint.data_position import Loader, is_stateful_loader

_COPIED_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
# By name: torchdata is an optional dependency, and its sampler may not be derived from torch's.
_TORCHDATA_RANDOM_SAMPLER = "torchdata.RandomSampler"


# --- sharding ------------------------------------------------------------------------------------


def shard_data_loader(
    loader: Loader, *, world_size: int, rank: int, is_elastic: bool = False
) -> Loader:
    """Return a new loader over this worker's shard of the data; its batch size is per worker.

    `rank` is the world rank. The new loader shuffles unless the given one reads in order, and
    copies all other options. The given loader is returned unchanged for one worker, an iterable
    dataset or the user's own DistributedSampler. A single worker's stateful loader is replaced if
    the group `is_elastic`, because its state cannot be resumed by several workers. Raises
    `ConfigError` for a custom batch sampler.
    """
    # Of the samples or, inside a batch sampler, of the batches.
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    is_distributed = any(isinstance(one, DistributedSampler) for one in samplers)
    if is_distributed or isinstance(loader.dataset, IterableDataset):
        return loader
    if world_size <= 1 and not (is_elastic and is_stateful_loader(loader)):
        return loader
    # Samplers that a loader creates itself are replaced silently, the user's own with a warning.
    sampling = _sampling_of(loader)
    kind = type(sampling.sampler)
    is_default = isinstance(sampling.sampler, SequentialSampler | RandomSampler) or (
        f"{kind.__module__.partition('.')[0]}.{kind.__name__}" == _TORCHDATA_RANDOM_SAMPLER
    )
    if not is_default and rank == 0:
        log.warning(
            "torch.sampler.replaced",
            sampler=kind.__name__,
            by="DistributedSampler",
            do="pass add_dist_sampler=False to keep it: every rank then reads what it yields",
        )
    # Older versions of torch lack some options.
    copied: dict[str, Any] = {
        name: getattr(loader, name) for name in _COPIED_OPTIONS if hasattr(loader, name)
    }
    return DataLoader(
        loader.dataset,
        batch_size=sampling.batch_size,
        sampler=_sampler_for(loader, sampling.sampler, world_size=world_size, rank=rank),
        drop_last=sampling.drop_last,
        **copied,
    )


def _sampler_for(loader: Loader, replaced: object, *, world_size: int, rank: int) -> Sampler[int]:
    dataset: Any = loader.dataset
    shuffles = not isinstance(replaced, SequentialSampler)
    if world_size > 1:
        return DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffles)
    # A single worker needs no division, but a sampler whose position can be saved.
    if not shuffles:
        return SequentialSampler(dataset)
    return RandomSampler(dataset, generator=loader.generator)


def _sampling_of(loader: Loader) -> Any:
    """Return the object that has the loader's `sampler`, `batch_size` and `drop_last`.

    That is the loader itself, or the BatchSampler that was passed to it.
    """
    batches = loader.batch_sampler
    if loader.batch_size is not None or batches is None:
        return loader
    if type(batches) is not BatchSampler:
        raise ConfigError(
            f"Cannot shard a custom batch_sampler ({type(batches).__name__}): its batch "
            "composition is unknown.",
            do="Let it yield only the batches of this rank (spotfit.get_context() returns the "
            "rank), and pass add_dist_sampler=False.",
        )
    return batches


# --- device transfer -----------------------------------------------------------------------------


def with_device_transfer(loader: Loader, device: torch.device, *, prefetch: bool) -> Loader:
    """Return a loader that moves each batch to `device`, with the methods of `loader`.

    On a GPU `prefetch` copies the next batch while the current one is used, except from stateful
    loaders. On the CPU the given loader is returned, because batches are created there.
    """
    return loader if device.type == "cpu" else DeviceDataLoader(loader, device, prefetch=prefetch)


class DeviceDataLoader(Loader):
    """Wraps a loader, including its additional methods, and moves every batch to `device`."""

    def __init__(self, loader: Loader, device: torch.device, *, prefetch: bool) -> None:
        # DataLoader.__init__ is not called: this object shares the wrapped loader's dataset,
        # sampler and sizes instead of creating its own.
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        self._device = device
        # The state of a stateful loader is that after the batch fetched last: prefetching would
        # make a saved state skip a batch.
        self._prefetches = prefetch and device.type == "cuda" and not is_stateful_loader(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader's iterator class is private
        if self._prefetches:
            return _prefetch_batches(iter(self._loader), self._device)
        return (move_batch(batch, self._device) for batch in self._loader)

    def __getattr__(self, name: str) -> Any:
        """Forward to the wrapped loader, for example `state_dict` of a stateful loader."""
        if name == "_loader":  # unset while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors, also those in dicts, lists and tuples, on `device`.

    Other objects with a method `to` are moved with it, all other values kept. The batch's own
    containers are not changed.
    """

    def move(value: Any) -> Any:
        return value.to(device)

    return _map_batch(batch, tensor=move, other=move)


def _prefetch_batches(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches, copying the following batch on a separate CUDA stream.

    Only tensors are prefetched, because their memory can be protected by `record_stream`. Other
    objects with a `to` method are moved when their batch is yielded.
    """
    side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    end = object()

    def fetch() -> Any:
        batch = next(batches, end)
        with torch.cuda.stream(side_stream):
            return _map_batch(
                batch,
                tensor=lambda value: value.to(device, non_blocking=True),
                other=lambda value: value,
            )

    def hand_over(batch: Any) -> Any:
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(side_stream)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            # Keeps the allocator from reusing the memory while the training's stream reads it.
            tensor.record_stream(stream)
            return tensor

        return _map_batch(batch, tensor=record, other=lambda value: value.to(device))

    pending = fetch()
    while pending is not end:
        batch = hand_over(pending)
        pending = fetch()
        yield batch


def _map_batch(
    batch: Any, *, tensor: Callable[[torch.Tensor], Any], other: Callable[[Any], Any]
) -> Any:
    """Return the batch with `tensor` applied to tensors and `other` to objects that have `to`."""

    def map_values(parts: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: _map_batch(part, tensor=tensor, other=other) for key, part in parts.items()}

    match batch:
        case torch.Tensor():
            return tensor(batch)
        case dict() | UserDict() if type(batch) is not dict:  # a subclass may have more attributes
            mapped = copy.copy(batch)
            mapped.update(map_values(batch))
            return mapped
        case _ if callable(getattr(batch, "to", None)):
            return other(batch)
        case Mapping():
            return map_values(batch)
        case list() | tuple():
            parts = [_map_batch(part, tensor=tensor, other=other) for part in batch]
            if hasattr(batch, "_fields"):
                return type(batch)(*parts)
            return parts if isinstance(batch, list) else tuple(parts)
    return batch
