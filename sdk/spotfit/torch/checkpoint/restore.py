"""RestoreOperation: one rank's part in a restore, from the plan to the resumed training.

`RestoreSelector` drives it; ranks synchronize between the steps, so that an incompatible state is
rejected by all ranks before any of them has overwritten a tensor.

| state | event | next |
|---|---|---|
| idle | `plan` allocates optimizer state and plans the reads | planned |
| planned | `check_compatibility` passes and the reads are done | read |
| planned, read | another candidate is planned instead | planned |
| read | `apply` loads the state into the objects | applied |
| planned, read | `roll_back` restores what was changed | idle |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spotfit.checkpoint.base_checkpointer import (
    DATASETS_KEY,
    PER_RANK_KEY,
    RNG_STATE_KEY,
    load_per_rank,
    reject_resized_per_rank,
    warn_restore_differences,
)
from spotfit.checkpoint.restore_candidates import RestorePlan

# torch and the modules that import it are loaded on first use.
if TYPE_CHECKING:
    from spotfit.checkpoint.format import SnapshotIndex
    from spotfit.checkpoint.reader import SavedState
    from spotfit.torch.checkpoint.compatibility import StateCompatibility, StateComponent
    from spotfit.torch.checkpoint.data_position import TorchDataPosition
    from spotfit.torch.checkpoint.load_plan import StateLoadPlan
    from spotfit.torch.checkpoint.optimizer_alloc import PreviousOptimizerStates
    from spotfit.torch.checkpoint.training_state import TrainingState

_UNUSED_REMEDY = (
    "to restore them, pass them to Checkpointer under these names (optimizer, scheduler, scaler, "
    "loader, extra, per_rank)"
)
_POSITION_KEYS = frozenset(("sampler_position", "loader_state"))
"""Keys of a rank's state that describe its position in the data of `loader=`."""


class RestoreOperation:
    """One rank's part in one `Checkpointer.restore()`."""

    def __init__(
        self,
        training_state: TrainingState,
        per_rank: Mapping[str, Any],
        position: TorchDataPosition | None,
        *,
        rank: int,
        world_size: int,
        has_checkpoint: bool,
        resume_datasets: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Prepare a restore of this rank; `rank` is its world rank.

        `per_rank` are the objects of this rank only, `position` its position in the data, None
        without a loader. With `has_checkpoint` no backup of overwritten tensors is made: if a
        snapshot in memory is corrupt, the checkpoint overwrites them, or the run ends with an
        error. `resume_datasets` is called with the saved positions in the trainer's datasets.
        """
        self._resume_datasets = resume_datasets
        self._training_state = training_state
        self._per_rank = per_rank
        self._position = position
        self._rank = rank
        self._world_size = world_size
        self._has_checkpoint = has_checkpoint
        self.rng_state: dict[str, Any] | None = None
        """The RNG states that `apply` has set; None at another world size."""
        self._incoming: dict[str, Any] = {}
        """The state that is being read; it is applied when all ranks have finished reading."""
        self._load_plan: StateLoadPlan | None = None
        self._previous_optimizer_states: PreviousOptimizerStates = {}
        """States of optimizers that were replaced by allocated tensors."""
        self._undo_overwrite: Callable[[], None] | None = None
        self._unused_components: list[str] = []
        """Components that were saved and do not exist now."""
        self._new_components: list[str] = []
        """Components that exist now and were not saved."""

    def plan(self, saved: SavedState) -> RestorePlan:
        """Return this rank's reads and its compatibility with `saved`.

        Called by `RestoreSelector` on all ranks for each candidate; a new call replaces the
        previous plan. Reads no chunks, but may allocate optimizer state: after an error or a plan
        that is not used, call `roll_back`. With FSDP1 a collective. Raises `ConfigError` if this
        rank's objects do not match `saved`, and `IntegrityError` if saved values are corrupt.
        """
        from spotfit.torch.checkpoint.compatibility import (
            StateCompatibility,
            reject_moved_components,
        )
        from spotfit.torch.checkpoint.load_plan import StateLoadPlan
        from spotfit.torch.checkpoint.optimizer_alloc import allocate_optimizer_states
        from spotfit.torch.checkpoint.training_state import backup_tensors, copy_containers

        # A previous candidate may have been planned and rejected.
        self._restore_optimizer_states()
        self._previous_optimizer_states = allocate_optimizer_states(self._training_state, saved)
        # Before any rank can reject the state: FSDP1's state_dict is a collective.
        self._incoming = copy_containers(self._training_state.state_dict())
        saved_names, current_names = self._components(saved)
        reject_moved_components(saved_names, current_names)
        if self._world_size != len(saved.indices):
            self._reject_resize(saved)
        if not self._has_checkpoint:
            # Allocated optimizer state holds no values; `_previous_optimizer_states` restores it.
            optimizer_states = [
                list(optimizer.state.values())
                for optimizer in self._training_state.optimizers
                if optimizer not in self._previous_optimizer_states
            ]
            backed_up = {**self._incoming, "optimizer": optimizer_states}
            self._undo_overwrite = backup_tensors(backed_up)
        self._load_plan = StateLoadPlan(self._incoming, saved)
        # What the training has queued, such as the initialization of weights, must not overwrite
        # what is read.
        self._training_state.wait_for_gpus()
        return RestorePlan(
            self._load_plan.reads,
            StateCompatibility(self._load_plan.unclaimed_names, saved_names, current_names),
        )

    def check_compatibility(self, compatibilities: Sequence[StateCompatibility]) -> None:
        """Raise `ConfigError` on all ranks, before any of them reads, if state would be lost.

        `compatibilities` are those of all ranks from `plan`, by rank. Saved components that no rank
        has any more, and new ones, are only logged, by `apply`.
        """
        from spotfit.torch.checkpoint.compatibility import (
            new_components,
            reject_unclaimed_state,
            unused_components,
        )

        reject_unclaimed_state(compatibilities)
        self._unused_components = unused_components(compatibilities)
        self._new_components = new_components(compatibilities)

    def roll_back(self) -> None:
        """Restore the state from before the restore, also of tensors that were read. Idempotent.

        After `apply` it does nothing. With `has_checkpoint`, tensors that were overwritten are not
        restored.
        """
        if self._undo_overwrite is not None:
            self._undo_overwrite()
        self._restore_optimizer_states()

    def apply(self, saved: SavedState) -> int:
        """Load the state that was read into all objects and return its epoch, counted from 0.

        Called on every rank once all ranks have read; `saved` is the state of the last `plan`. Sets
        the RNG states too, if the world size is the saved one. Cannot be rolled back. Raises
        `ConfigError` if an object rejects its state.
        """
        # Release the backups first: each may be as large as the state.
        self._previous_optimizer_states, self._undo_overwrite = {}, None
        self._training_state.wait_for_gpus()
        self._log_differences(self._training_state.load_state_dict(self._incoming))
        # A group of another size takes the positions of rank 0: they are the same on all ranks.
        saved_rank = self._rank if self._world_size == len(saved.indices) else 0
        rank_state = decode_rank_state(saved.indices[saved_rank])
        self._resume_datasets(rank_state.get(DATASETS_KEY, {}))
        if self._world_size == len(saved.indices):
            return self._resume(saved)
        # With another number of ranks the RNG states are not restored: they belong to the ranks of
        # the other group. The rest of the epoch is divided among the new ranks.
        first = saved.indices[0]
        if self._position is not None:
            rank_states = [decode_rank_state(index) for index in saved.indices]
            self._position.resume_resized(first.epoch, first.consumed, rank_states)
        return first.epoch

    # --- compatibility -------------------------------------------------------------------------

    def _components(
        self, saved: SavedState
    ) -> tuple[frozenset[StateComponent], frozenset[StateComponent]]:
        """Return the saved and the current components besides the model, as this rank has them."""
        from spotfit.torch.checkpoint.compatibility import LOADER_COMPONENT, OPTIMIZER_COMPONENT
        from spotfit.torch.checkpoint.load_plan import saved_components

        # Ranks beyond the saved ones compare with the last: all ranks have the same components.
        index = saved.indices[min(self._rank, len(saved.indices) - 1)]
        rank_state = decode_rank_state(index)
        # A loader whose order is unknown saves neither key, but its passes are counted.
        has_position = bool(_POSITION_KEYS & rank_state.keys())
        has_loader = has_position or (index.epoch, index.consumed) != (0, 0)
        saved_names = saved_components(saved).union(
            (LOADER_COMPONENT,) if has_loader else (),
            (("per_rank", name) for name in rank_state.get(PER_RANK_KEY, ())),
        )
        current_names = frozenset(
            (
                *(OPTIMIZER_COMPONENT for _ in self._training_state.optimizers),
                *(() if self._position is None else (LOADER_COMPONENT,)),
                *(("extra", name) for name in self._training_state.stateful_objects),
                *(("per_rank", name) for name in self._per_rank),
            )
        )
        return saved_names, current_names

    def _reject_resize(self, saved: SavedState) -> None:
        rank_states = [decode_rank_state(index) for index in saved.indices]
        reject_resized_per_rank(
            self._per_rank,
            rank_states[0],
            saved_size=len(rank_states),
            world_size=self._world_size,
        )
        if self._position is not None:
            self._position.reject_resize(rank_states)

    def _restore_optimizer_states(self) -> None:
        from spotfit.torch.checkpoint.optimizer_alloc import restore_optimizer_states

        restore_optimizer_states(self._previous_optimizer_states)
        self._previous_optimizer_states = {}

    # --- resuming ------------------------------------------------------------------------------

    def _log_differences(self, reset_names: Sequence[str]) -> None:
        """Log, on rank 0, state that was not restored and weights with another dtype."""
        assert self._load_plan is not None, "plan() was not called"
        if self._rank != 0:
            return
        warn_restore_differences(
            unused=self._unused_components,
            new=[*self._new_components, *self._load_plan.unsaved_options, *reset_names],
            dtype_changes=self._load_plan.dtype_changes,
            do=_UNUSED_REMEDY,
        )

    def _resume(self, saved: SavedState) -> int:
        from spotfit.torch.checkpoint.training_state import set_rng_state

        index = saved.indices[self._rank]
        rank_state = decode_rank_state(index)
        load_per_rank(self._per_rank, rank_state)
        # After all load_state_dict methods, which may draw random numbers.
        self.rng_state = rank_state[RNG_STATE_KEY]
        set_rng_state(self.rng_state)
        if self._position is not None:
            self._position.resume(
                index.epoch,
                index.consumed,
                rank_state=rank_state,
                restore_rng=partial(set_rng_state, self.rng_state),
            )
        return index.epoch


def decode_rank_state(index: SnapshotIndex) -> dict[str, Any]:
    """Return what the rank of this index has saved of its own. Raises `IntegrityError`."""
    from spotfit.torch.checkpoint.save_plan import decode_values

    rank_state: dict[str, Any] = decode_values(index.encoded_rank_state, f"rank {index.rank}")
    return rank_state
