"""Data loaders: each worker its share, batches on its device, the next one on its way."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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
from spotfit.frameworks.torch.position import keeps_its_own
from spotfit.host import log

Loader = DataLoader[Any]

_KEPT = (
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


_TORCHDATAS = "torchdata.RandomSampler"


class Order(NamedTuple):
    """In which order a loader reads, and how much at once (None: one by one)."""

    sampler: Any
    batch_size: int | None
    drop_last: bool


# --- shares --------------------------------------------------------------------------------------


def with_share(loader: Loader, *, world_size: int, rank: int, resizes: bool = False) -> Loader:
    """A new loader over this worker's share of the data; its batch size is per worker.

    It shuffles if the given one did not read in order, and is otherwise as that one was. The given
    one is kept where there is nothing to share: one worker, an iterable dataset, or the user's own
    DistributedSampler. One worker's that keeps its own place is replaced, too, in a group that
    `resizes`: several could not go on from there. Raises `ConfigError` for batches that only a
    sampler of the user's knows.
    """
    if isinstance(loader.dataset, IterableDataset) or _is_shared(loader):
        return loader
    if world_size <= 1 and not (resizes and keeps_its_own(loader)):
        return loader
    order = _order(loader)
    if not _is_plain(order.sampler) and rank == 0:
        log.warning(
            "torch.sampler.replaced",
            sampler=type(order.sampler).__name__,
            by="DistributedSampler",
            do="pass add_dist_sampler=False to keep it: then every rank reads what it yields",
        )
    kept: dict[str, Any] = {
        name: getattr(loader, name)
        for name in _KEPT
        if hasattr(loader, name)  # older versions of torch know fewer
    }
    return DataLoader(
        loader.dataset,
        batch_size=order.batch_size,
        sampler=_sampler_for(loader, order, world_size=world_size, rank=rank),
        drop_last=order.drop_last,
        **kept,
    )


def _sampler_for(loader: Loader, order: Order, *, world_size: int, rank: int) -> Sampler[int]:
    """One that deals out; alone, one that shuffles by its own dice if the loader shuffled."""
    data: Any = loader.dataset
    shuffles = not isinstance(order.sampler, SequentialSampler)
    if world_size > 1:
        return DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=shuffles)
    return RandomSampler(data, generator=loader.generator) if shuffles else SequentialSampler(data)


def _is_plain(sampler: Any) -> bool:
    """Whether it is what a loader makes by itself; torchdata's has a class of that name."""
    kind = type(sampler)
    named = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return isinstance(sampler, SequentialSampler | RandomSampler) or named == _TORCHDATAS


def _is_shared(loader: Loader) -> bool:
    """Whether the user's own DistributedSampler deals out samples, or batches."""
    batches = loader.batch_sampler
    return any(
        isinstance(one, DistributedSampler)
        for one in (loader.sampler, batches, getattr(batches, "sampler", None))
    )


def _order(loader: Loader) -> Order:
    batches = loader.batch_sampler
    if loader.batch_size is not None or batches is None:
        return Order(loader.sampler, loader.batch_size, loader.drop_last)
    if type(batches) is not BatchSampler:
        raise ConfigError(
            f"The batches of {type(batches).__name__} cannot be shared: which samples go together "
            "is its secret.",
            do="Have it yield the batches of this rank only, spotfit.get_context() tells which it "
            "is, and pass add_dist_sampler=False.",
        )
    return Order(batches.sampler, batches.batch_size, batches.drop_last)


# --- on their device -----------------------------------------------------------------------------


def on_device(loader: Loader, device: torch.device, *, ahead: bool) -> Loader:
    """A loader with every batch on `device`; on a GPU, with `ahead`, the next one moves meanwhile.

    Batches are made on the CPU: for that the given loader is the one.
    """
    return loader if device.type == "cpu" else MovingLoader(loader, device, ahead=ahead)


class MovingLoader(Loader):
    """The given loader, and whatever it can do, but every batch on `device`."""

    def __init__(self, loader: Loader, device: torch.device, *, ahead: bool) -> None:
        # Not DataLoader's own: this one has the given one's dataset, sampler and sizes.
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        self._device = device
        # The state of a loader that keeps its own place is that of the batch fetched last.
        self._ahead = ahead and device.type == "cuda" and not keeps_its_own(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # theirs is private
        if self._ahead:
            return _moved_ahead(iter(self._loader), self._device)
        return (moved(batch, self._device) for batch in self._loader)

    def __getattr__(self, name: str) -> Any:
        """What a loader of another kind has: `state_dict` of one that can be restored."""
        if name == "_loader":  # not there yet: while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)


def moved(batch: Any, device: torch.device) -> Any:
    """The same batch with all that can move on `device`, also what dicts, lists and tuples hold."""

    def there(thing: Any) -> Any:
        return thing.to(device)

    return _each(batch, tensor=there, other=there)


def _moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """One batch ahead, on a stream of its own.

    Only tensors go ahead: their memory must not be used again while others read it, and what an
    object of another kind holds cannot be told. It moves when its batch is handed over.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    done = object()

    def fetch() -> Any:
        batch = next(batches, done)
        with torch.cuda.stream(side):
            return _each(batch, tensor=lambda one: one.to(device, non_blocking=True), other=_kept)

    def hand_over(batch: Any) -> Any:
        here = torch.cuda.current_stream(device)
        here.wait_stream(side)

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(here)
            return tensor

        return _each(batch, tensor=used_here, other=lambda one: one.to(device))

    waiting = fetch()
    while waiting is not done:
        batch = hand_over(waiting)
        waiting = fetch()
        yield batch


def _each(batch: Any, *, tensor: Callable[[torch.Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """The same batch with its tensors changed, and others of its parts that know how to move."""

    def inside(parts: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: _each(part, tensor=tensor, other=other) for key, part in parts.items()}

    match batch:
        case torch.Tensor():
            return tensor(batch)
        case dict() | UserDict() if type(batch) is not dict:  # its kind may have more to offer
            like = copy.copy(batch)
            like.update(inside(batch))
            return like
        case _ if callable(getattr(batch, "to", None)):
            return other(batch)
        case Mapping():
            return inside(batch)
        case list() | tuple():
            parts = [_each(part, tensor=tensor, other=other) for part in batch]
            if hasattr(batch, "_fields"):
                return type(batch)(*parts)
            return parts if isinstance(batch, list) else tuple(parts)
    return batch


def _kept(thing: Any) -> Any:
    return thing
