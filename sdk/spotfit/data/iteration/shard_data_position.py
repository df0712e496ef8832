"""The position of a Checkpointer whose `loader=` is a shard of the trainer's datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from spotfit.core.lazy_names import is_loaded_instance
from spotfit.data.iteration.loop_monitor import TrainingLoopMonitor

if TYPE_CHECKING:
    from spotfit.data.iteration.batch_passes import BatchPasses
    from spotfit.data.iteration.data_iterator import DataIterator
    from spotfit.data.iteration.shard import ShardPosition


def is_dataset_shard(loader: Any) -> TypeGuard[DataIterator | BatchPasses]:
    """Return whether `loader` is what `spotfit.get_dataset_shard` or its `iter_*` return."""
    module = "spotfit.data.iteration.data_iterator"
    return is_loaded_instance(loader, module, "DataIterator", "BatchPasses")


class ShardDataPosition:
    """Counts the epochs of a shard. The session saves and restores the positions of all shards."""

    remaining_batches: int | None = None
    """Unknown until the loop has chosen a batch size."""
    is_bound_to_world_size = False
    """Any number of ranks can resume from the position."""

    def __init__(self, position: ShardPosition) -> None:
        self._position = position
        position.counts_steps = True
        self.monitor = TrainingLoopMonitor()

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0, in which a restart from the current state continues."""
        return self._position.place_to_resume[0]

    @property
    def consumed(self) -> int:
        """Rows of this epoch that all ranks together have trained on."""
        return self._position.place_to_resume[1]

    @property
    def batches_per_epoch(self) -> int:
        """Rows of an epoch: the number of batches depends on the batch size, which is not known.

        It is compared between ranks only.
        """
        return self._position.dataset.manifest.row_count

    def rank_state(self) -> dict[str, Any]:
        """Return {}: the session adds the positions of all shards."""
        return {}

    def advance(self) -> bool:
        """Count the batch that was trained on; return whether it was the epoch's last one."""
        was_at_end = self._position.is_at_end
        self._position.count_step()
        return self._position.is_at_end and not was_at_end

    def end_epoch(self) -> None:
        """End this epoch if a batch of it was trained on. Idempotent."""
        self._position.end_epoch()

    def reject_resize(self, rank_states: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: any number of ranks can resume from the position."""

    def resume(
        self,
        epoch: int,
        consumed: int,
        rank_state: Mapping[str, Any] = {},
        restore_rng: Callable[[], None] | None = None,
    ) -> None:
        """Do nothing: the session resumes all shards."""

    def resume_resized(
        self, epoch: int, consumed: int, rank_states: Sequence[Mapping[str, Any]]
    ) -> None:
        """Do nothing: the session resumes all shards."""
