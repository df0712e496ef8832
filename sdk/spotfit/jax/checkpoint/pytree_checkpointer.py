"""Checkpointer, the user's object: saves and restores a pytree of a JAX training.

`BaseCheckpointer` decides when to save and owns the snapshots; the other modules of this package
plan, copy and restore the arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotfit.checkpoint.base_checkpointer import (
    BaseCheckpointer,
    RankSavePlan,
    RestoreResult,
    not_retryable,
    warn_rank_differences,
)
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.format import StateKey, dotted_name
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.data.iteration.shard_data_position import ShardDataPosition, is_dataset_shard
from spotfit.frameworks.host_rng import host_rng_state, set_host_rng_state
from spotfit.model.failure_model import SaveCondition, SaveTrigger
from spotfit.worker.training_api import require_session

# jax and the modules that import it are loaded on first use: `import spotfit.jax` stays cheap.
if TYPE_CHECKING:
    from spotfit.checkpoint.shm_arena import ShmArena
    from spotfit.jax.checkpoint.array_save_plan import ArraySavePlanner
    from spotfit.jax.checkpoint.array_tree import ArrayTree
    from spotfit.jax.checkpoint.state_template import StateTemplate


@suggest_keywords
class Checkpointer(BaseCheckpointer):
    """Saves and restores the state of a JAX training without stopping training.

    Every rank creates one with the initial state, calls `restore` before its loop, continues with
    `state`, and passes each new state to `step`. A snapshot is copied to shared memory, and the
    node's agent uploads it, even if this process exits. Each rank saves the shards that it holds;
    what several ranks hold is saved once. Another number of ranks can restore it, if the new
    shardings allow it.

    When the training function has returned on all ranks, the steps since the last save are saved,
    too, unless files were reported after the last step. Until then the Checkpointer keeps the last
    state in memory. `save_at_end=False` declines both.

    A committed snapshot is an ordinary checkpoint: `Result.checkpoint`, `get_checkpoint()` and
    `CheckpointConfig` apply to it.
    """

    _data_position: ShardDataPosition | None
    """None without a loader."""
    _save_planner: ArraySavePlanner
    _are_ranks_compared = False

    @not_retryable
    def __init__(
        self,
        state: Any,
        *,
        loader: Any = None,
        every: SaveCondition | Sequence[SaveCondition] = "auto",
        max_overhead: float | None = None,
        per_rank: Mapping[str, Any] | None = None,
        save_at_end: bool = True,
        total_steps: int | None = None,
    ) -> None:
        """Collective: all ranks must create their Checkpointer.

        `state` is a pytree of arrays of JAX and numpy, random keys, numbers and strings. It defines
        the names, shapes, dtypes and shardings into which a state is restored; a
        `jax.ShapeDtypeStruct` with a sharding can take the place of an array. An array that is not
        sharded over all processes is the same on all ranks. The values of `per_rank` have
        `state_dict` and `load_state_dict`; their state belongs to one rank and ties the run to its
        number of workers.

        `loader` is what `spotfit.get_dataset_shard` or its `iter_*` return; its steps count the
        epochs, for `every="epoch"` and the result of `restore`. The positions of the trainer's
        datasets are always saved. `every` says when to save: "auto", a duration like "10m" or a
        timedelta, a number of steps, "epoch", "at_notice", or a list of these. "auto" balances the
        cost of saving against the expected loss. `max_overhead` limits the fraction of the time
        that "auto" uses; without it that is limited to 3.5 % until the first loss. `save_at_end`
        says whether the last steps are saved when the training function has returned. `total_steps`
        is the number of steps of the complete training: a run with a deadline computes from it how
        long the training still takes. Raises `ConfigError`.
        """
        super().__init__(
            require_session("spotfit.jax.Checkpointer"),
            every=every,
            max_overhead=max_overhead,
            total_steps=total_steps,
            per_rank=per_rank,
        )
        from spotfit.jax.checkpoint.array_save_plan import ArraySavePlanner
        from spotfit.jax.checkpoint.signed_collectives import (
            KEY_BYTES,
            SignedCollectives,
            check_runtime,
        )
        from spotfit.jax.checkpoint.state_template import StateTemplate

        check_runtime(self._rank, self._world_size)
        _check_per_rank(self._per_rank)
        self._template: StateTemplate = StateTemplate(state)
        self.state = state
        """The pytree of the last `step` or `restore`, or the initial one."""
        self._data_position = _open_data_position(loader, self._trigger)
        key = self._join_ranks(os.urandom(KEY_BYTES))
        self._collectives = SignedCollectives(key, self._world_size)
        self._save_planner = ArraySavePlanner(self._rank, self._world_size)
        self._start(
            all_gather=self._collectives.all_gather,
            broadcast=self._collectives.broadcast,
            save_at_end=save_at_end,
        )

    def step(
        self, state: Any, metrics: dict[str, Any] | None = None, *, hold: bool = False
    ) -> None:
        """Record that all ranks have trained one more step, to `state`; save if a save is due.

        All ranks call it after each step; some calls wait for all ranks. A call that saves waits
        until `state` is computed, and returns once it is copied to shared memory; the upload
        continues in the background, and its failure is logged. A save waits while two earlier ones
        are still being uploaded, and is skipped, with a warning, if there is no space. The arrays
        may be donated to the next update when the call has returned; then the last steps cannot be
        saved at the end, unless the function passes its last state. `metrics` of rank 0 are stored
        with the checkpoint; they are not a report.

        With `hold=True` on every rank a due save waits for `save_if_due`. Raises `ConfigError` for
        metrics that are not JSON, and for a state that cannot be saved, or not be restored into the
        initial one: with other leaves, shapes or dtypes.
        """
        self._template.check(state)
        self.state = state
        self._record_step(metrics, hold=hold)

    def save(self, state: Any, metrics: dict[str, Any] | None = None) -> None:
        """Save `state` now, independently of `every`. All ranks call it after the same step.

        Like `step` it returns once the state is copied to shared memory. Raises `ConfigError` for
        metrics that are not JSON or a state that `step` rejects; then nothing is saved.
        """
        self._template.check(state)
        self.state = state
        self._save_now(metrics)

    @not_retryable
    def restore(self) -> RestoreResult | None:
        """Restore the newest complete state into `state`; return None if the run has none.

        Collective: all ranks call it before their loops, or between two steps. The newest state is
        the last snapshot if it is still in the machines' memory, else the latest checkpoint. After
        saves of the same training function it is the latest committed checkpoint. A corrupt state
        is logged, and an earlier one is restored. Arrays have the values that were saved, and the
        shardings of the initial state. The RNG states of Python and numpy are restored, too, if the
        number of ranks is the same.

        Raises `IntegrityError` if no readable checkpoint is left, and `ConfigError` if the initial
        state does not match the checkpoint or an object of `per_rank` rejects its state.
        """
        from spotfit.jax.checkpoint.array_restore import ArrayRestore

        operation = ArrayRestore(
            self._template.tree,
            self._per_rank,
            rank=self._rank,
            world_size=self._world_size,
            resume_datasets=self._session.resume_data,
        )
        result = self._restore(operation)
        if result is not None:
            self.state = operation.state
            # All ranks have read the same values. To hash them takes seconds for gigabytes.
            self._are_ranks_compared = True
        return result

    # --- what BaseCheckpointer needs of JAX ----------------------------------------------------

    def _make_arena(self, directories: Any, make_path: Any) -> ShmArena:
        from spotfit.jax.checkpoint.array_arena import ArrayArena

        return ArrayArena(directories, make_path)

    def _wait_for_state(self) -> None:
        import jax

        # Before waiting, which fails without a name for arrays that were donated.
        self._current_tree()
        jax.block_until_ready(self.state)

    def _plan_save(self) -> RankSavePlan:
        tree = self._current_tree()
        if not self._are_ranks_compared:
            self._are_ranks_compared = True
            self._compare_ranks(tree)
        return self._save_planner.plan(tree)

    def _compare_ranks(self, tree: ArrayTree) -> None:
        """Warn about leaves of single processes that differ, at a new run's first step or save."""
        if self._world_size == 1:
            return
        ranks = self._collectives.all_gather(self._save_planner.fingerprints(tree))
        if self._rank == 0:
            warn_rank_differences(
                ranks,
                do="pass state that belongs to one rank in per_rank={...}, or shard the array over "
                "all processes",
                name_of=dotted_name,
            )

    def _plan_at_end(self) -> tuple[RankSavePlan, str]:
        tree = self._current_tree()
        return self._save_planner.plan(tree), self._save_planner.digest(tree)

    def _encode_values(self, values: Any, *, keys: Sequence[StateKey] = ()) -> bytes:
        from spotfit.jax.checkpoint.array_values import encode_values

        return encode_values(values, keys=keys)

    def _rank_state(self) -> dict[str, Any]:
        from spotfit.jax.checkpoint.array_restore import WEAKLY_TYPED_KEY

        return {**super()._rank_state(), WEAKLY_TYPED_KEY: self._save_planner.weakly_typed}

    def _rng_state(self) -> dict[str, Any]:
        return host_rng_state()

    def _set_rng_state(self, state: dict[str, Any]) -> None:
        set_host_rng_state(state)

    def _current_tree(self) -> ArrayTree:
        """Return the current state. Raises `ConfigError` if a restart could not restore it."""
        from spotfit.jax.checkpoint.array_tree import ArrayTree

        self._template.check(self.state)
        return ArrayTree(self.state)


def export_checkpoint(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Merge the shards of a Checkpointer's checkpoint into one safetensors file.

    Runs anywhere with access to the checkpoint's storage, also without jax; `path` is a local file
    that ends with `.safetensors`, which is replaced. The names are the paths of the leaves, such as
    "params.dense.kernel"; leaves that are not arrays are left out. Raises `ConfigError` for another
    suffix, an unwritable path or a checkpoint of other files, and `IntegrityError` for a corrupt
    checkpoint.
    """
    # Imported here: a worker does not need it for training.
    from spotfit.client.stored_checkpoints import write_checkpoint_file

    write_checkpoint_file(checkpoint.open_snapshot(), Path(path), full_state=False)


def _check_per_rank(per_rank: Mapping[str, Any]) -> None:
    for name, stateful in per_rank.items():
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise ConfigError(
                f"per_rank[{name!r}] is a {type(stateful).__name__}, which has no state_dict and "
                "load_state_dict.",
                do="Pass an object with both methods, and what all ranks share in the pytree.",
            )


def _open_data_position(loader: Any, trigger: SaveTrigger) -> ShardDataPosition | None:
    if loader is None and not trigger.epochs:
        return None
    if loader is None or not is_dataset_shard(loader):
        problem = (
            'Checkpointer(every="epoch") needs to know where an epoch ends, but loader= is missing.'
            if loader is None
            else f"Checkpointer(loader=...): a {type(loader).__name__} is no dataset shard."
        )
        raise ConfigError(
            problem,
            do="Pass what spotfit.get_dataset_shard returns. The position of another loader is "
            "saved in per_rank={...}, or follows from the number of steps.",
        )
    return ShardDataPosition(loader.position)
