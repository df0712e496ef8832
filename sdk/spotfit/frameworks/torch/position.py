"""Where in its data a training stands, in samples that all replicas together have taken.

The order of an epoch depends on its number and the sampler's seed, never on how many workers there
are. So however many go on, what is left of the epoch is dealt out among them, and no sample comes
twice or is left out, but for those that fill the last batch up.

A DistributedSampler says how many replicas there are, and which of them this rank is: ranks that
share a model's parts read the same. Any other sampler deals nothing out: each rank reads what its
loader yields, and has a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
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

from spotfit.core.errors import ConfigError
from spotfit.host import log

Loader = DataLoader[Any]
_DO = (
    "use a loader with state_dict and load_state_dict, like torchdata's StatefulDataLoader, or "
    "keep the place in own={...}; else a restart begins the data of the epoch anew"
)
_NONE: Mapping[str, Any] = MappingProxyType({})
_SHARED = {"shared": True}
"""What earlier checkpoints, which do not say it, are taken for."""


def _nothing() -> None:
    return


class Position(Sampler[int]):
    """Takes a loader's sampler's place, and tells and finds its place in the data.

    A batch counts as taken when `advance` is called: what is fetched ahead is not trained on yet.
    Epochs are counted here; a sampler's `set_epoch` says the same, or is not heard.
    """

    def __init__(self, loader: Loader, *, world_size: int) -> None:
        batches: Any = loader.batch_sampler  # where a user gave it, the loader's own sizes are none
        self.given = _sampler_of(batches)
        self._batch = batches.batch_size
        self._drops = batches.drop_last
        self._replicas = getattr(self.given, "num_replicas", 1)
        self._replica = getattr(self.given, "rank", 0)
        self._shared = world_size == 1 or isinstance(self.given, DistributedSampler)
        """Whether all ranks read one epoch together, so that others can go on with its rest."""
        self._order = _order_of_one(self.given)
        self._resumes = False
        """Whether no batch was taken yet since `go_on`."""
        self._begun = False
        """Whether a batch of this epoch was taken."""
        self._open = False
        """Whether a pass over this epoch was begun, so that its loader has thrown its dice."""
        self._persists = bool(loader.persistent_workers)
        """Whether the loader throws dice for its first pass only."""
        self._pass = object()
        """The one that was begun last."""
        self._given = self._taken = 0
        """Batches of this pass that the loader gave, and that were trained on."""
        self._resumed: Callable[[], None] = _nothing
        self.watch = Watch()
        self.epoch = 0
        self.consumed = 0
        batches.sampler = self

    @property
    def batches(self) -> int | None:
        """How many a rank takes in an epoch."""
        count = len(self._mine(0))
        return int(count // self._batch if self._drops else -(-count // self._batch))

    @property
    def at_end(self) -> bool:
        """Whether the epoch has no batch left."""
        count = len(self._mine(self.consumed))
        return count < (self._batch if self._drops else 1)

    def state(self) -> dict[str, Any]:
        """What a rank keeps beside the epoch and what was consumed of it."""
        seed = getattr(self._order, "seed", None)
        is_open = self._open or self.consumed > 0
        return {"place": {"seed": seed, "shared": self._shared, "open": is_open}}

    def advance(self) -> bool:
        """Every rank has trained on one more batch. Whether it was the last of its epoch."""
        was_at_end = self.at_end
        self._begun, self._resumes = True, False
        self._taken += 1
        self.watch.taken(self._given, self._taken)
        self.consumed = min(len(self._order), self.consumed + self._batch * self._replicas)
        return self.at_end and not was_at_end

    def go_on(
        self,
        epoch: int,
        consumed: int,
        own: Mapping[str, Any] = _NONE,
        put_back: Callable[[], None] = _nothing,
    ) -> None:
        """The next pass over the loader takes what is left of that epoch, in the order it had.

        A loader throws dice when it begins, and those in the checkpoint were thrown after that if
        it had begun: they are put back once it has begun again.
        """
        self._resumes, self._begun = True, False
        self._given = self._taken = 0
        self.epoch, self.consumed = epoch, consumed
        place = own.get("place", _NONE)
        self._open = place.get("open", (epoch, consumed) != (0, 0))
        self._resumed = put_back if self._open else _nothing
        seed = place.get("seed", 0 if type(self.given) is RandomSampler else None)
        # Checkpoints of before the seed was kept shuffled by none.
        if seed is not None and isinstance(self._order, DistributedSampler):
            self._order.seed = seed

    @property
    def tied(self) -> bool:
        """Whether only as many ranks can go on from here."""
        return not self._shared

    def refuse_resized(self, owns: Sequence[Mapping[str, Any]]) -> None:
        """Raises `ConfigError` where another number of ranks cannot go on with the rest."""
        shared = ("loader" not in own and own.get("place", _SHARED)["shared"] for own in owns)
        if not self._shared or not all(shared):
            raise ConfigError(
                "Each rank reads what its own loader yields, so the place of each is its own: it "
                f"was kept by {len(owns)}, and now there is another number of them.",
                do="Share one dataset out with prepare_data_loader or a DistributedSampler, or "
                "keep the number of workers.",
            )

    def go_on_resized(self, epoch: int, consumed: int, owns: Sequence[Mapping[str, Any]]) -> None:
        """With another number of ranks, where that is not refused."""
        self.go_on(epoch, consumed, owns[0])

    def __getattr__(self, name: str) -> Any:
        """What the user's own can do: `set_epoch` of a DistributedSampler in a BatchSampler."""
        if name == "given":  # not there yet: while it is copied
            raise AttributeError(name)
        return getattr(self.given, name)

    def __len__(self) -> int:
        """Of this rank in a whole epoch: what is planned with it must not change."""
        return len(self.given)

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            self._over()
        elif self._resumes:
            self._resumed()
        self._open = True
        self._begun = self.at_end  # of an epoch that was over, one pass takes the nothing left
        order = self._order
        if isinstance(order, DistributedSampler):
            order.set_epoch(self.epoch)
        whole = list(order)
        return (whole[place % len(whole)] for place in self._mine(self.consumed))

    def begun(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the pass that `begin` begins.

        At its end the epoch is over: what is saved from then on goes on with the next one. What was
        saved after its last batch had the end still before it, so its next pass is empty.
        """
        if not self.at_end:
            self.watch.ended_early(self._given, self._taken, self.batches)
        self._given = self._taken = 0
        self._pass = object()
        return self._told(begin(), self._pass)

    def _told(self, batches: Iterator[Any], this: object) -> Iterator[Any]:
        try:
            for batch in _asked(batches):
                self._given += 1
                yield batch
        finally:
            if self._pass is this and not self.consumed:  # somebody only looked
                self._open = self._persists
        if self.at_end and self._given == self._taken:  # else some are on their way
            self._over()

    def _over(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0
        self._given = self._taken = 0
        self._begun = self._resumes = False
        self._open = self._persists

    def _mine(self, begin: int) -> range:
        """Places in the epoch's order from there on that are this rank's.

        Beyond the end they mean the beginning again: all ranks have the same number of samples.
        """
        end = len(self._order)
        over = (end - begin) % self._replicas
        if over and getattr(self.given, "drop_last", False):
            end -= over
        elif over:
            end += self._replicas - over
        return range(begin + self._replica, end, self._replicas)


class Watch:
    """Tells of loops that do not train on what the loader gives: each thing once, on one rank."""

    def __init__(self) -> None:
        self.tells = False
        """Whether this rank is the one."""
        self.counts = False
        """Whether the loader's batches are counted."""
        self.awaits_ends = False
        """Whether saves are due at ends of epochs."""

    def taken(self, given: int, taken: int) -> None:
        """So many batches were trained on, of so many that the loader gave in this pass."""
        if self.tells and self.counts and taken > given:
            self.counts = False
            log.warning(
                "checkpoint.other_loader",
                why=f"step() was told of {taken} batches, and loader= has given {given}",
                do="give Checkpointer the very loader that is iterated, made once for all epochs, "
                "and call step() once a batch; else its place and epoch are not known",
            )

    def ended_early(self, given: int, taken: int, batches: int | None) -> None:
        """A pass is begun, and steps were told of the one before, but not of its last batch.

        A loop that fetches ahead over the end has read that batch, and is to train on it yet.
        """
        if self.tells and self.awaits_ends and taken:
            self.awaits_ends = False
            log.warning(
                "checkpoint.no_epoch_end",
                why=f"of the {batches} batches of an epoch {given} were read and {taken} told to "
                'step() when the next epoch began, so every="epoch" has not saved',
                do="call step() once for each batch, leave none out (accumulating=True while "
                "gradients wait) and fetch none of the next epoch before the last one is told; or "
                "say a number of steps or a time, or call save()",
            )


class Passes:
    """Counts the passes over a loader whose place is its own secret, and keeps its state, if any.

    A pass counts if it was trained on, or gave nothing: that is what is left of one that was saved
    after its last batch. The state is the loader's own, so it is of use to as many ranks only.
    """

    batches: int | None = None
    """In an epoch: nobody knows."""

    def __init__(self, loader: Any) -> None:
        self._loader = _inner(loader)
        self._keeps = keeps_its_own(self._loader)
        self._resumes: Mapping[str, Any] = _NONE
        """What was kept by the life before, until a batch was taken."""
        self._resumed: Callable[[], None] = _nothing
        self._given = self._taken = 0
        """Batches of this pass that the loader gave, and that were trained on."""
        self.watch = Watch()
        self.epoch = 0
        self.consumed = 0
        """Batches of this pass that were trained on, those before a restart too."""
        self.watch.counts = _have_told(loader, self)

    def state(self) -> dict[str, Any]:
        """What a rank keeps beside the epoch and what was consumed of it."""
        if "loader" in self._resumes:
            return {"loader": self._resumes["loader"]}
        return {"loader": self._loader.state_dict()} if self._keeps else {}

    def advance(self) -> bool:
        """One more batch of this pass was trained on. Whether it was the last: nobody knows."""
        self.consumed += 1
        self._taken += 1
        self.watch.taken(self._given, self._taken)
        self._resumes = _NONE
        return False

    def go_on(
        self,
        epoch: int,
        consumed: int,
        own: Mapping[str, Any] = _NONE,
        put_back: Callable[[], None] = _nothing,
    ) -> None:
        """The next pass is that one's rest, if the loader knows where it was."""
        self._given, self._taken, self._resumes = 0, 0, own
        self._resumed = put_back if consumed else _nothing
        self.epoch, self.consumed = epoch, consumed
        self._load()

    @property
    def tied(self) -> bool:
        """Whether only as many ranks can go on from here."""
        return self._keeps

    def refuse_resized(self, owns: Sequence[Mapping[str, Any]]) -> None:
        """Raises `ConfigError` where the loader kept its place itself, for one rank."""
        if self._keeps and any("loader" in own for own in owns):
            raise ConfigError(
                f"The loader's place was kept by {len(owns)} ranks, each its own, and now there is "
                "another number of them.",
                do="Keep the number of workers, or use a DataLoader over a dataset with a length.",
            )

    def go_on_resized(self, epoch: int, consumed: int, owns: Sequence[Mapping[str, Any]]) -> None:
        """With another number of ranks, where that is not refused."""
        self.go_on(epoch, consumed)

    def begun(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the pass that `begin` begins."""
        if self._taken:
            self._over()
        self._load()
        self._given = 0
        batches = begin()
        if self._resumes:
            self._resumed()
        return self._told(batches)

    def _told(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in _asked(batches):
            self._given += 1
            yield batch
        if self._given == self._taken:  # else some are on their way, or somebody only looked
            self._over()

    def _over(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0
        self._taken, self._resumes = 0, _NONE

    def _load(self) -> None:
        """Once more where somebody has only looked: that has used the state up."""
        if self._keeps and "loader" in self._resumes:
            self._loader.load_state_dict(self._resumes["loader"])


def place_in(loader: Any, *, world_size: int) -> Position | Passes:
    """Where this rank stands in that loader's data, as far as it can be known."""
    inner = _inner(loader)
    if keeps_its_own(inner):
        return Passes(loader)
    why = _why_not(inner)
    if why is not None:
        log.warning("checkpoint.no_position", why=why, do=_DO)
        return Passes(loader)
    place = Position(inner, world_size=world_size)
    place.watch.counts = _have_told(loader, place)
    return place


def keeps_its_own(loader: Any) -> bool:
    """Whether the loader has a state, and goes on from one."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _inner(loader: Any) -> Any:
    """The user's own, where it was given to one that moves its batches to a GPU."""
    return getattr(loader, "_loader", loader)


def _have_told(loader: Any, place: Position | Passes) -> bool:
    """Python asks the class for an iterator, so the loader gets one that tells. Whether it does.

    Lists and others whose class cannot change are not counted: their epoch stays 0.
    """
    kind = getattr(type(loader), "untold", type(loader))

    def told(one: Any) -> Iterator[Any]:
        return place.begun(lambda: kind.__iter__(one))

    parts = {"__module__": kind.__module__, "__iter__": told, "untold": kind}
    try:
        loader.__class__ = type(kind.__name__, (kind,), parts)
    except TypeError:
        log.warning(
            "checkpoint.epochs_unknown", loader=kind.__name__, do="count them in extra={...}"
        )
        return False
    return True


def _asked(batches: Iterator[Any]) -> Iterator[Any]:
    """One after another. A loader that is its own iterator is not begun once more by that."""
    end = object()
    while (batch := next(batches, end)) is not end:
        yield batch


def _why_not(loader: Any) -> str | None:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no order we could know"
    if loader.num_workers and not getattr(
        loader, "in_order", True
    ):  # older ones of torch know none
        return "a loader with in_order=False gives its batches in no order we could know"
    batches: Any = loader.batch_sampler
    if batches is None:
        return "a loader with batch_size=None has no batches to count"
    if type(batches) is not BatchSampler:
        return f"only {type(batches).__name__} knows the loader's batches"
    sampler = _sampler_of(batches)
    if _order_of_one(sampler) is None:
        return f"only {type(sampler).__name__} knows the loader's order"
    return None


def _sampler_of(batches: BatchSampler) -> Any:
    """The user's, also where a `Position` has taken its place before."""
    sampler: Any = batches.sampler
    return sampler.given if isinstance(sampler, Position) else sampler


def _order_of_one(sampler: Any) -> Any:
    """The order in which one worker alone would read; None if it is the sampler's secret.

    One of a class of the user's may do anything, whatever it is made from.
    """
    if type(sampler) is DistributedSampler:
        dataset, shuffle, seed = sampler.dataset, sampler.shuffle, sampler.seed
    elif type(sampler) is RandomSampler and _takes_each_once(sampler):
        # Its order hangs on all dice thrown before. This one can be found again.
        dataset, shuffle, seed = cast("Dataset[Any]", sampler.data_source), True, _seed(sampler)
    elif type(sampler) is SequentialSampler:
        return sampler
    else:
        return None
    return DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _seed(sampler: RandomSampler) -> int:
    """What its dice were seeded with: another seed is another order."""
    dice = sampler.generator or torch.default_generator
    return dice.initial_seed() % 2**63  # epochs are added to it
