"""Where in its data a training stands, in samples that all ranks together have taken.

The order of an epoch depends on its number and the sampler's seed, never on how many workers there
are. So however many go on, what is left of the epoch is dealt out among them, and no sample comes
twice or is left out, but for those that fill the last batch up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from spotfit.host import log

Loader = DataLoader[Any]
_DO = (
    "use a loader with state_dict and load_state_dict, like torchdata's StatefulDataLoader, or "
    "keep the place in extra={...}; else a restart begins the data anew"
)


class Position(Sampler[int]):
    """Takes a loader's sampler's place, and tells and finds its place in the data.

    A batch counts as taken when `advance` is called: what is fetched ahead is not trained on yet.
    Epochs are counted here; a sampler's `set_epoch` says the same, or is not heard.
    """

    def __init__(self, loader: Loader, *, rank: int, world_size: int) -> None:
        self._sampler = loader.sampler
        self._batch = loader.batch_size or 1
        self._drops = loader.drop_last
        self._rank = rank
        self._world_size = world_size
        self._order = _order_of_one(loader.sampler)
        self._resumes = False
        self._begun = False
        """Whether a batch of this epoch was taken, or the epoch went on from a checkpoint."""
        self.resumed: Callable[[], None] = _nothing
        """Called when the first pass after `go_on` begins."""
        self.epoch = 0
        self.consumed = 0
        batches: Any = loader.batch_sampler
        batches.sampler = self

    @property
    def at_end(self) -> bool:
        """Whether the epoch has no batch left."""
        count = len(self._mine(self.consumed))
        return count < (self._batch if self._drops else 1)

    def advance(self) -> None:
        """Every rank has trained on one more batch."""
        self._begun = True
        self.consumed = min(len(self._order), self.consumed + self._batch * self._world_size)

    def go_on(self, epoch: int, consumed: int) -> None:
        """The next pass over the loader takes what is left of that epoch."""
        self._resumes = self._begun = True
        self.epoch, self.consumed = epoch, consumed

    def __len__(self) -> int:
        """Of this rank in a whole epoch: what is planned with it must not change."""
        return len(self._sampler)  # type: ignore[arg-type]  # those we take the place of have one

    def __iter__(self) -> Iterator[int]:
        if self._resumes:
            self._resumes = False
            self.resumed()
        elif self._begun:
            self.epoch, self.consumed = self.epoch + 1, 0
            self._begun = False
        order = self._order
        if isinstance(order, DistributedSampler):
            order.set_epoch(self.epoch)
        whole = list(order)
        return (whole[place % len(whole)] for place in self._mine(self.consumed))

    def _mine(self, begin: int) -> range:
        """Places in the epoch's order from there on that are this rank's.

        Beyond the end they mean the beginning again: all ranks have the same number of samples.
        """
        end = len(self._order)
        over = (end - begin) % self._world_size
        if over and getattr(self._sampler, "drop_last", False):
            end -= over
        elif over:
            end += self._world_size - over
        return range(begin + self._rank, end, self._world_size)


def position_in(loader: Loader, *, rank: int, world_size: int) -> Position | None:
    """A place in that loader's data; None where there is none that we could know."""
    inner = getattr(loader, "_loader", loader)
    why = _why_not(inner)
    if why is not None:
        log.warning("checkpoint.no_position", why=why, do=_DO)
        return None
    return Position(inner, rank=rank, world_size=world_size)


def keeps_its_own(loader: Any) -> bool:
    """Whether the loader has a state, and goes on from one."""
    inner = getattr(loader, "_loader", loader)
    return all(callable(getattr(inner, name, None)) for name in ("state_dict", "load_state_dict"))


def _why_not(loader: Loader) -> str | None:
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no order we could know"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"only {type(loader.batch_sampler).__name__} knows the loader's batches"
    if _order_of_one(loader.sampler) is None:
        return f"only {type(loader.sampler).__name__} knows the loader's order"
    return None


def _order_of_one(sampler: Any) -> Any:
    """The order in which one worker alone would read; None if it is the sampler's secret."""
    if isinstance(sampler, DistributedSampler):
        dataset, shuffle, seed = sampler.dataset, sampler.shuffle, sampler.seed
    elif isinstance(sampler, RandomSampler) and not sampler.replacement:
        # Its order hangs on all dice thrown before. This one can be found again.
        dataset, shuffle, seed = cast("Dataset[Any]", sampler.data_source), True, 0
    elif isinstance(sampler, SequentialSampler):
        return sampler
    else:
        return None
    return DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)


def _nothing() -> None:
    return
