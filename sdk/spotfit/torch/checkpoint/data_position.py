"""Position in the training data, counted in samples that all replicas together have trained on.

`SamplerPosition` replaces the sampler of a standard DataLoader. The order of an epoch depends only
on its number and the sampler's seed, not on the number of workers: after a resize the rest of the
epoch is divided among the new workers, and no sample is repeated or skipped, except for the
padding of the last batch. A DistributedSampler defines the replicas; ranks of one replica (tensor
or pipeline parallelism) read the same samples. Any other sampler reads separately on each rank.
`LoaderPosition` counts the passes of all other loaders and stores the state of stateful ones.

An epoch of a `SamplerPosition` goes through these states (a pass is one iteration of the loader):

| state | event | next |
|---|---|---|
| new | a pass begins | open |
| open | `advance`: a batch was trained on | started |
| open | the pass ends without any trained batch | new |
| started | the last batch was trained on and the pass ends | new, epoch + 1 |
| started | another pass begins | open, epoch + 1 |
| started | `end_epoch`: the loop does not exhaust the iterator | new, epoch + 1 |
| any | `resume` | resuming |
| resuming | a pass begins; the saved RNG state is restored | open |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias, cast

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
from spotfit.data.iteration.loop_monitor import TrainingLoopMonitor
from spotfit.data.iteration.shard_data_position import ShardDataPosition
from spotfit.host import log
from spotfit.torch.checkpoint.accelerate_types import isinstance_of_accelerate
from spotfit.torch.checkpoint.replica_shards import BatchShards, ReplicaShards, StridedShards

Loader = DataLoader[Any]
_REMEDY = (
    "use a loader with state_dict and load_state_dict, such as torchdata's StatefulDataLoader, or "
    "save the position in per_rank={...}; otherwise a restart begins the epoch's data again"
)
_EMPTY_STATE: Mapping[str, Any] = MappingProxyType({})
_CLASS_OF_OBJECT: Any = vars(object)["__class__"]
"""The descriptor that sets an object's class, also if its class has another `__class__`."""


def _noop() -> None:
    return


class SamplerPosition(Sampler[int]):
    """Replaces a loader's sampler in order to track and restore one rank's position in the data.

    The Checkpointer creates one per rank. A batch counts when `advance` is called, because
    prefetched batches are not trained on yet. The epoch number is counted here from 0: `set_epoch`
    of the user's sampler has no effect on the order.
    """

    def __init__(self, loader: Loader, *, world_size: int) -> None:
        # Where the user passed a batch_sampler, the loader's own batch_size and drop_last are None.
        batches: Any = loader.batch_sampler
        accelerate_shard = _accelerate_shard(batches)
        inner_batches = batches if accelerate_shard is None else accelerate_shard.batch_sampler
        self.user_sampler = _user_sampler_of(inner_batches)
        self._shards = _shards_of(accelerate_shard, self.user_sampler)
        self._batch_size = getattr(self._shards, "batch_size", inner_batches.batch_size)
        self._drop_last = inner_batches.drop_last
        self._is_shared = (
            world_size == 1
            or accelerate_shard is not None
            or isinstance(self.user_sampler, DistributedSampler)
        )
        """Whether all ranks read one epoch together, so that another number can resume it."""
        self.requires_common_seed = accelerate_shard is not None
        """Whether the ranks must set one `seed`; a DistributedSampler's is the same already."""
        self._loader: Any = loader
        self._epoch_sampler = _single_replica_sampler(self.user_sampler)
        self._is_resuming = False
        """Whether no batch was trained on since `resume`."""
        self._has_started = False
        """Whether a batch of this epoch was trained on."""
        self._is_pass_open = False
        """Whether a pass over this epoch has begun, so that its loader has drawn its base seed."""
        self._has_persistent_workers = bool(loader.persistent_workers)
        """Whether the loader draws its base seed only in its first pass."""
        self._current_pass = object()
        """Identity of the latest pass."""
        self._yielded_batches = self._trained_batches = 0
        """Batches of this pass that the loader yielded, and that were trained on."""
        self._restore_rng: Callable[[], None] = _noop
        self.monitor = TrainingLoopMonitor()
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch that all replicas together have trained on."""
        if accelerate_shard is not None:
            _replace_iter(accelerate_shard, lambda _: self._iterate_batches())
        else:
            # A BatchSampler reads its `sampler` attribute again in every pass.
            batches.sampler = self

    @property
    def seed(self) -> int | None:
        """Seed of the order of all epochs; None for a sequential one."""
        return getattr(self._epoch_sampler, "seed", None)

    @seed.setter
    def seed(self, seed: int | None) -> None:
        if seed is not None and isinstance(self._epoch_sampler, DistributedSampler):
            self._epoch_sampler.seed = seed

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches that one rank reads in a whole epoch; never None for this class."""
        return self._batch_count(0)

    @property
    def remaining_batches(self) -> int | None:
        """Batches of the epoch that this rank has not trained on yet; never None for this class."""
        return self._batch_count(self.consumed)

    @property
    def is_at_end(self) -> bool:
        """Whether no batch of the epoch is left to train on for this rank.

        From `consumed`, so prefetched batches are still left. With `drop_last` an incomplete batch
        does not count.
        """
        count = self._samples_left(self.consumed)
        return count < (self._batch_size if self._drop_last else 1)

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank saves besides `epoch` and `consumed`, as values for `torch.save`.

        Called by the Checkpointer at each save. The dictionary has the one key "sampler_position";
        the snapshot's index stores it, and a restore passes it to `resume`.
        """
        is_open = self._is_pass_open or self.consumed > 0
        return {
            "sampler_position": {
                "seed": self.seed,
                "is_shared": self._is_shared,
                "is_pass_open": is_open,
            }
        }

    def advance(self) -> bool:
        """Record one more trained batch on every rank; return whether it ended the epoch.

        Called on each rank by `Checkpointer.step`, also for batches whose gradients are
        accumulated. Logs a warning if more batches were trained on than the loader has yielded.
        """
        was_at_end = self.is_at_end
        self._has_started, self._is_resuming = True, False
        self._trained_batches += 1
        self.monitor.check_batch_counts(self._yielded_batches, self._trained_batches)
        # The last batch may contain padding, which is not part of the epoch.
        self.consumed = min(
            len(self._epoch_sampler), self.consumed + self._batch_size * self._shards.num_replicas
        )
        return self.is_at_end and not was_at_end

    def end_epoch(self) -> None:
        """End this epoch if a batch of it was trained on, also if its pass is not exhausted.

        Called on each rank by `Checkpointer.end_epoch`. The next pass is that of the next epoch.
        Idempotent.
        """
        if self.consumed:
            self._finish_epoch()

    def resume(
        self,
        epoch: int,
        consumed: int,
        rank_state: Mapping[str, Any] = _EMPTY_STATE,
        restore_rng: Callable[[], None] = _noop,
    ) -> None:
        """Let the next pass read the rest of that epoch, in its original order.

        For a restore at the same world size: `consumed` samples of epoch number `epoch` were
        trained on by all replicas together, and `rank_state` is what this rank has saved. A loader
        draws random numbers when a pass begins. If the saved pass was open, the saved RNG state is
        from after these draws: `restore_rng`, which sets that state, is called at its begin.
        """
        self._is_resuming, self._has_started = True, False
        self._yielded_batches = self._trained_batches = 0
        self.epoch, self.consumed = epoch, consumed
        if isinstance_of_accelerate(self._loader, "DataLoaderShard"):
            self._loader.iteration = epoch  # for dataset.set_epoch
        # Empty if the checkpoint was saved without a loader, or with one of another kind.
        position = rank_state.get("sampler_position", _EMPTY_STATE)
        self._is_pass_open = position.get("is_pass_open", (epoch, consumed) != (0, 0))
        self._restore_rng = restore_rng if self._is_pass_open else _noop
        # The seed of the saved run: this run may have been started with another one.
        self.seed = position.get("seed")

    @property
    def is_bound_to_world_size(self) -> bool:
        """Whether only the same number of ranks can resume from here, as with a custom sampler.

        The Checkpointer rejects such a loader for an elastic group.
        """
        return not self._is_shared

    def reject_resize(self, rank_states: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError` if another number of ranks cannot read the rest of the epoch.

        `rank_states` are the `rank_state` of all ranks that have saved, by rank. Called before a
        restore at another world size changes anything.
        """
        can_resize = self._is_shared and all(
            "loader_state" not in state
            and state.get("sampler_position", _EMPTY_STATE).get("is_shared", True)
            for state in rank_states
        )
        if not can_resize:
            raise ConfigError(
                "Checkpointer(loader=...): each rank reads separate samples, so the data position "
                "can be restored only at the world size at which it was saved, which is "
                f"{len(rank_states)}.",
                do=f"Set num_workers={len(rank_states)}, or shard one dataset with "
                "prepare_data_loader or a DistributedSampler.",
            )

    def resume_resized(
        self, epoch: int, consumed: int, rank_states: Sequence[Mapping[str, Any]]
    ) -> None:
        """Resume with another number of ranks, after `reject_resize` has passed.

        The next pass reads this rank's share of what is left of epoch number `epoch` after
        `consumed` samples. `rank_states` are those of all ranks that have saved; RNG states are not
        restored.
        """
        self.resume(epoch, consumed, rank_states[0])

    def __getattr__(self, name: str) -> Any:
        """Forward to the user's sampler, for example `set_epoch` of a DistributedSampler."""
        if name == "user_sampler":  # unset while the object is copied
            raise AttributeError(name)
        return getattr(self.user_sampler, name)

    def __len__(self) -> int:
        # Of a whole epoch also while one is resumed: users compute schedules from len(loader).
        return len(self.user_sampler)

    def __iter__(self) -> Iterator[int]:
        if self._has_started:
            self._finish_epoch()
        elif self._is_resuming:
            # The loader has drawn its base seed just before it asked for this iterator.
            self._restore_rng()
        self._is_pass_open = True
        # A state saved after an epoch's last batch resumes with one empty pass: the loop then runs
        # the code at its end of the epoch, as it did not before the restart.
        self._has_started = self.is_at_end
        sampler = self._epoch_sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self.epoch)
        # The whole order, because the rest of an epoch begins at an arbitrary index.
        order = list(sampler)
        indices = self._shards.indices(self.consumed, len(order))
        return (order[index % len(order)] for index in indices)

    def _iterate_batches(self) -> Iterator[list[int]]:
        """Yield this rank's batches of indices, in place of Accelerate's BatchSamplerShard."""
        # A generator, like the original: the loader has drawn its base seed when it begins.
        samples = iter(self)
        while batch := list(islice(samples, self._batch_size)):
            yield batch

    def iterate_pass(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass with the iterator that `make_iterator` returns, and yield its batches.

        Called when the user iterates over the loader. With `every="epoch"` a warning is logged if
        the previous pass was not trained on to its end. When all batches of the epoch were yielded
        and trained on, the end of the pass ends the epoch: later saves resume with the next one.
        """
        # At the end of the epoch the pass was complete and the loop is correct.
        if not self.is_at_end:
            self.monitor.check_epoch_end(
                self._yielded_batches, self._trained_batches, self.batches_per_epoch
            )
        self._yielded_batches = self._trained_batches = 0
        self._current_pass = object()
        return self._count_batches(make_iterator(), self._current_pass)

    def _count_batches(self, batches: Iterator[Any], this_pass: object) -> Iterator[Any]:
        try:
            for batch in _iterate(batches):
                self._yielded_batches += 1
                yield batch
        finally:
            # A pass without training, for example to inspect a batch, leaves the epoch new.
            if self._current_pass is this_pass and not self.consumed:
                self._is_pass_open = self._has_persistent_workers
        # A loop that prefetches exhausts the pass before it has trained on the last batches.
        if self.is_at_end and self._yielded_batches == self._trained_batches:
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0
        self._yielded_batches = self._trained_batches = 0
        self._has_started = self._is_resuming = False
        self._is_pass_open = self._has_persistent_workers

    def _batch_count(self, start: int) -> int:
        count = self._samples_left(start)
        return int(count // self._batch_size if self._drop_last else -(-count // self._batch_size))

    def _samples_left(self, start: int) -> int:
        """Return how many samples this rank reads of an epoch from index `start` on."""
        return self._shards.count(start, len(self._epoch_sampler))


class LoaderPosition:
    """Counts the passes over a loader with an unknown order, and saves its state if it has one.

    A pass counts as an epoch if a batch was trained on, or if it was empty: that is the rest of an
    epoch that was saved after its last batch. A loader's state can be restored only by the same
    number of ranks.
    """

    batches_per_epoch: int | None = None
    """Unknown for these loaders."""
    remaining_batches: int | None = None
    """Unknown for these loaders."""

    def __init__(self, loader: Any) -> None:
        self._loader = _unwrap_loader(loader)
        self._is_stateful = is_stateful_loader(self._loader)
        self._resume_state: Mapping[str, Any] = _EMPTY_STATE
        """The restored rank state, until a batch was trained on."""
        self._restore_rng: Callable[[], None] = _noop
        self._batches: Iterator[Any] = iter(())
        """The latest pass."""
        self._yielded_batches = self._trained_batches = 0
        """Batches of this pass that the loader yielded, and that were trained on."""
        self.monitor = TrainingLoopMonitor()
        self.epoch = 0
        self.consumed = 0
        """Batches of this pass that were trained on, including those before a restart."""
        self.monitor.counts_batches = _hook_iteration(loader, self)

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank saves besides `epoch` and `consumed`, as values for `torch.save`.

        Called by the Checkpointer at each save. The state of a stateful loader under the key
        "loader_state"; {} for other loaders.
        """
        # Until a batch was trained on, prefetching must not advance the saved position.
        if "loader_state" in self._resume_state:
            return {"loader_state": self._resume_state["loader_state"]}
        return {"loader_state": self._loader.state_dict()} if self._is_stateful else {}

    def advance(self) -> bool:
        """Record one more trained batch on this rank.

        Called by `Checkpointer.step`. Returns False: the end of the epoch is unknown.
        """
        self.consumed += 1
        self._trained_batches += 1
        self.monitor.check_batch_counts(self._yielded_batches, self._trained_batches)
        self._resume_state = _EMPTY_STATE
        return False

    def end_epoch(self) -> None:
        """End this epoch if a batch of it was trained on, also if its pass is not exhausted.

        Called on each rank by `Checkpointer.end_epoch`. Idempotent.
        """
        # A stateful loader that has yielded its last batch knows its end only if asked for another
        # one: before, its state is that of an epoch with no batch left.
        if self._is_stateful:
            next(self._batches, None)
        if self.consumed:
            self._finish_epoch()

    def resume(
        self,
        epoch: int,
        consumed: int,
        rank_state: Mapping[str, Any] = _EMPTY_STATE,
        restore_rng: Callable[[], None] = _noop,
    ) -> None:
        """Let the next pass be the rest of that epoch, if the loader is stateful.

        For a restore at the same world size: `rank_state` is what this rank has saved after
        `consumed` batches of epoch number `epoch`. Loads the loader's state at once, and again when
        the pass begins; then `restore_rng` is called unless `consumed` is 0. Other loaders begin
        their data again.
        """
        self._yielded_batches, self._trained_batches, self._resume_state = 0, 0, rank_state
        self._restore_rng = restore_rng if consumed else _noop
        self.epoch, self.consumed = epoch, consumed
        self._load_resume_state()

    @property
    def is_bound_to_world_size(self) -> bool:
        """Whether only the same number of ranks can resume from here: with a stateful loader.

        The Checkpointer rejects such a loader for an elastic group.
        """
        return self._is_stateful

    def reject_resize(self, rank_states: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError` if this loader is stateful and the ranks have saved loader states.

        `rank_states` are the `rank_state` of all ranks that have saved, by rank. Called before a
        restore at another world size changes anything.
        """
        if self._is_stateful and any("loader_state" in state for state in rank_states):
            raise ConfigError(
                "Checkpointer(loader=...): the state of a stateful loader can be restored only at "
                f"the world size at which it was saved, which is {len(rank_states)}.",
                do=f"Set num_workers={len(rank_states)}, or use a DataLoader over a dataset with "
                "a length.",
            )

    def resume_resized(
        self, epoch: int, consumed: int, rank_states: Sequence[Mapping[str, Any]]
    ) -> None:
        """Resume with another number of ranks, after `reject_resize` has passed.

        Only the counts are restored: the loader begins its data again.
        """
        self.resume(epoch, consumed)

    def iterate_pass(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass with the iterator that `make_iterator` returns, and yield its batches.

        Called when the user iterates over the loader. The previous pass counts as an epoch if a
        batch of it was trained on; this one is counted when it ends with all its batches trained
        on.
        """
        if self._trained_batches:
            self._finish_epoch()
        # Loaded again in each pass: one that was only inspected has consumed the loader's state.
        self._load_resume_state()
        self._yielded_batches = 0
        batches = make_iterator()
        if self._resume_state:
            self._restore_rng()
        self._batches = self._count_batches(batches)
        return self._batches

    def _count_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in _iterate(batches):
            self._yielded_batches += 1
            yield batch
        # They differ while a loop prefetches, and after a pass that was only inspected.
        if self._yielded_batches == self._trained_batches:
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0
        self._trained_batches, self._resume_state = 0, _EMPTY_STATE

    def _load_resume_state(self) -> None:
        if self._is_stateful and "loader_state" in self._resume_state:
            self._loader.load_state_dict(self._resume_state["loader_state"])


TorchDataPosition: TypeAlias = SamplerPosition | LoaderPosition | ShardDataPosition
"""Position in the data of any `loader=` of torch's Checkpointer."""


def track_data_position(loader: Any, *, world_size: int) -> SamplerPosition | LoaderPosition:
    """Start tracking this rank's position in the loader's data, as precisely as possible.

    Called by the Checkpointer on every rank; `world_size` is the number of ranks. The loader is
    modified: its class, and the sampler of a standard DataLoader, are replaced. Returns a
    `LoaderPosition` for a stateful loader and, with a logged warning, for one whose order is
    unknown.
    """
    inner = _unwrap_loader(loader)
    if is_stateful_loader(inner):
        return LoaderPosition(loader)
    reason = _unsupported_reason(inner)
    if reason is not None:
        log.warning("checkpoint.data_position_unknown", reason=reason, do=_REMEDY)
        return LoaderPosition(loader)
    position = SamplerPosition(inner, world_size=world_size)
    position.monitor.counts_batches = _hook_iteration(loader, position)
    return position


def is_stateful_loader(loader: Any) -> bool:
    """Return whether the loader has the methods `state_dict` and `load_state_dict`.

    For example torchdata's StatefulDataLoader.
    """
    # Accelerate's loaders always have them, but they fail if the loader they wrap has none.
    loaders = loader, getattr(loader, "base_dataloader", loader)
    names = "state_dict", "load_state_dict"
    return all(callable(getattr(part, name, None)) for part in loaders for name in names)


def _unwrap_loader(loader: Any) -> Any:
    """Return the user's loader, also from the wrapper that moves batches to a GPU."""
    return getattr(loader, "_loader", loader)


def _hook_iteration(loader: Any, position: SamplerPosition | LoaderPosition) -> bool:
    """Make the loader's `__iter__` report its passes to `position`.

    Returns False for objects whose class cannot be replaced; their epoch remains 0.
    """
    try:
        _replace_iter(loader, position.iterate_pass)
    except TypeError:
        log.warning(
            "checkpoint.epochs_unknown",
            loader=type(loader).__name__,
            do="count the epochs in extra={...}",
        )
        return False
    return True


def _replace_iter(
    iterable: Any, iterate: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
) -> None:
    """Let `iter(iterable)` return `iterate(original)`, with a function for the original iterator.

    Python looks `__iter__` up on the class, so the object's class is replaced by a subclass. Raises
    TypeError if it cannot be replaced.
    """
    # An object that was changed before gets a subclass of its original class, not a second hook.
    original = getattr(type(iterable), "_original_class", type(iterable))

    def replaced_iter(self: Any) -> Iterator[Any]:
        return iterate(lambda: original.__iter__(self))

    attributes = {
        "__module__": original.__module__,
        "__iter__": replaced_iter,
        "_original_class": original,
    }
    # Accelerate's loaders have a property `__class__`, which cannot be set.
    _CLASS_OF_OBJECT.__set__(iterable, type(original.__name__, (original,), attributes))


def _iterate(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield from an iterator without calling `iter`, which would restart a hooked loader."""
    end = object()
    while (batch := next(batches, end)) is not end:
        yield batch


def _unsupported_reason(loader: Any) -> str | None:
    """Return why the loader's order is unknown, or None if `SamplerPosition` supports it."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is not a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the order of an IterableDataset is unknown"
    # Older versions of torch have no in_order and always keep the order.
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "a loader with in_order=False yields batches in an unknown order"
    if isinstance_of_accelerate(loader, "DataLoaderDispatcher"):
        return "rank 0 reads the batches of all ranks (dispatch_batches=True)"
    batches: Any = loader.batch_sampler
    if batches is None:
        return "a loader with batch_size=None has no batches to count"
    shard = _accelerate_shard(batches)
    batches = batches if shard is None else shard.batch_sampler
    if type(batches) is not BatchSampler:
        return f"the batches of a custom {type(batches).__name__} are unknown"
    sampler = _user_sampler_of(batches)
    if _single_replica_sampler(sampler) is None:
        return f"the order of a {type(sampler).__name__} is unknown"
    if shard is not None and isinstance(sampler, DistributedSampler):
        return "Accelerate shards a DistributedSampler, which has sharded the samples already"
    return None


def _accelerate_shard(batches: Any) -> Any:
    """Return `batches` if it is a BatchSamplerShard, Accelerate's part of a rank; else None."""
    return batches if isinstance_of_accelerate(batches, "BatchSamplerShard") else None


def _shards_of(accelerate_shard: Any, sampler: Any) -> ReplicaShards:
    if accelerate_shard is None:
        return StridedShards(
            num_replicas=getattr(sampler, "num_replicas", 1),
            replica=getattr(sampler, "rank", 0),
            drop_last=getattr(sampler, "drop_last", False),
        )
    divisor = accelerate_shard.num_processes if accelerate_shard.split_batches else 1
    return BatchShards(
        batch_size=accelerate_shard.batch_sampler.batch_size // divisor,
        num_replicas=accelerate_shard.num_processes,
        replica=accelerate_shard.process_index,
        drop_last=accelerate_shard.drop_last,
        even_batches=accelerate_shard.even_batches,
    )


def _user_sampler_of(batches: BatchSampler) -> Any:
    """Return the user's sampler, also where a `SamplerPosition` has replaced it before."""
    sampler: Any = batches.sampler
    return sampler.user_sampler if isinstance(sampler, SamplerPosition) else sampler


def _single_replica_sampler(sampler: Any) -> Any:
    """Return a sampler with the order of a whole epoch for one replica; None if it is unknown.

    Exact types are compared, because a user-defined subclass may read in any order.
    """
    # Accelerate's has the order of a DistributedSampler with its seed.
    is_seedable = isinstance_of_accelerate(sampler, "SeedableRandomSampler")
    is_permutation = (
        (type(sampler) is RandomSampler or is_seedable)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if type(sampler) is DistributedSampler:
        dataset, shuffle, seed = sampler.dataset, sampler.shuffle, sampler.seed
    elif is_permutation:
        # RandomSampler's order depends on all random numbers drawn before. It is replaced by the
        # order of a DistributedSampler, which can be reproduced from seed and epoch. The seed is
        # the generator's initial one: runs with other seeds get other orders.
        generator = sampler.generator or torch.default_generator
        dataset, shuffle = cast("Dataset[Any]", sampler.data_source), True
        seed = sampler.initial_seed if is_seedable else generator.initial_seed()
        seed %= 2**63  # torch adds the epoch, which must not overflow
    elif type(sampler) is SequentialSampler:
        return sampler
    else:
        return None
    return DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)
