"""Checkpointer for DeepSpeed's engine: saves and restores ZeRO's partitions of each rank.

Storing and uploading snapshots is the responsibility of `spotfit.checkpoint`; tensors are copied
and read as those of `spotfit.torch.Checkpointer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spotfit.checkpoint.base_checkpointer import RestoreResult, not_retryable
from spotfit.checkpoint.reader import SavedState
from spotfit.checkpoint.restore_candidates import RestorePlan
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.deepspeed.engine import reject_elastic_group
from spotfit.deepspeed.engine_state import EngineState, EngineTrainingState
from spotfit.model.failure_model import SaveCondition
from spotfit.torch.checkpoint.arguments import CheckpointerArguments
from spotfit.torch.checkpoint.checkpointer import TrainingStateCheckpointer
from spotfit.torch.checkpoint.compatibility import check_process_group
from spotfit.torch.checkpoint.restore import RestoreOperation, decode_rank_state
from spotfit.worker.training_api import require_session

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from spotfit.data.iteration.data_iterator import DataIterator

_ENGINE_KEY = "deepspeed"
"""Key of a rank's state with the layout of its engine."""


class EngineRestore(RestoreOperation):
    """A restore that compares the engine's layout before the parameters."""

    _training_state: EngineTrainingState

    def plan(self, saved: SavedState) -> RestorePlan:
        """As `RestoreOperation.plan`. Raises `ConfigError` for another layout as well."""
        saved_size = len(saved.indices)
        first = decode_rank_state(saved.indices[0]).get(_ENGINE_KEY)
        if first is None:
            raise ConfigError(
                f"The checkpoint {saved.name} was not saved by spotfit.deepspeed.Checkpointer.",
                do="Use the Checkpointer that has saved it, or a new RunConfig(name=...).",
            )
        if saved_size != self._world_size:
            raise ConfigError(
                f"The checkpoint was saved by {saved_size} workers; ZeRO's partitions cannot be "
                f"restored by {self._world_size}.",
                do=f"Set num_workers={saved_size}. To change the number, save with "
                "report_checkpoint and convert its files (deepspeed.checkpoint.ds_to_universal).",
            )
        own = decode_rank_state(saved.indices[self._rank])[_ENGINE_KEY]
        self._training_state.engine_state.reject_other_layout(first, own)
        return super().plan(saved)


@suggest_keywords
class Checkpointer(TrainingStateCheckpointer):
    """Saves and restores a training with ZeRO 1, 2 or 3 without stopping it.

    Every rank creates one with its engine, calls `restore` before its loop and `step` after each
    `engine.step()`; while the engine accumulates gradients, no save is taken. A snapshot is copied
    to shared memory, and the node's agent uploads it, even if this process exits. Each rank saves
    its partitions of optimizer and weights, and its buffers; the same number of ranks can restore
    them. With ZeRO 1 and 2 the ranks divide the weights among themselves, which
    `spotfit.torch.export_checkpoint` exports.

    When the training function has returned on all ranks, the steps since the last save are saved,
    too, unless files were reported after the last step. Until then the Checkpointer keeps the
    engine in memory. `save_at_end=False` declines both.

    A committed snapshot is an ordinary checkpoint: `Result.checkpoint`, `get_checkpoint()` and
    `CheckpointConfig` apply to it. `report_checkpoint` may be called as well, for files in
    DeepSpeed's layout.
    """

    _training_state: EngineTrainingState
    _restore_type = EngineRestore

    @not_retryable
    def __init__(
        self,
        engine: Any,
        *,
        loader: DataLoader[Any] | DataIterator | None = None,
        every: SaveCondition | Sequence[SaveCondition] = "auto",
        max_overhead: float | None = None,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        save_at_end: bool = True,
        total_steps: int | None = None,
    ) -> None:
        """Collective: all ranks must create their Checkpointer.

        `engine` is that of `initialize`. Its scheduler, counters and loss scaler are saved with it.
        The other arguments are those of `spotfit.torch.Checkpointer`. Raises `ConfigError` for an
        engine without ZeRO or without an optimizer, for features of DeepSpeed whose state would not
        be saved, which the guide lists, and in an elastic group.
        """
        super().__init__(
            require_session("spotfit.deepspeed.Checkpointer"),
            every=every,
            max_overhead=max_overhead,
            total_steps=total_steps,
            per_rank=per_rank,
        )
        check_process_group(self._world_size)
        arguments = CheckpointerArguments(
            model=engine.module,
            scheduler=engine.lr_scheduler,
            loader=loader,
            extra=extra,
            per_rank=per_rank,
        )
        arguments.validate()
        engine_state = EngineState(engine)
        reject_elastic_group(self._channel, engine_state.stage)
        self._engine = engine
        self._engine_steps: int = engine.global_steps
        """The engine's steps at the last `step`."""
        state = EngineTrainingState(
            engine.module,
            (),
            {
                f"deepspeed-rank-{self._rank}": engine_state,
                **({} if engine.lr_scheduler is None else {"scheduler": engine.lr_scheduler}),
                **(extra or {}),
            },
        )
        self._open(state, loader, save_at_end=save_at_end)

    @not_retryable
    def restore(self) -> RestoreResult | None:
        """Restore the newest complete state; return None if the run has none.

        As `spotfit.torch.Checkpointer.restore`, by the same number of ranks. Raises `ConfigError`
        before anything is read if the number of ranks, the stage of ZeRO, the optimizer or the
        parameters are not those of the checkpoint.
        """
        result = super().restore()
        self._engine_steps = self._engine.global_steps
        return result

    # --- what TrainingStateCheckpointer needs of DeepSpeed ------------------------------------

    def _is_accumulating(self) -> bool:
        # The engine counts a step also if it has skipped the update because of an overflow.
        previous, self._engine_steps = self._engine_steps, self._engine.global_steps
        return previous == self._engine_steps

    def _rank_state(self) -> dict[str, Any]:
        layout = self._training_state.engine_state.describe(with_parameters=self._rank == 0)
        return {**super()._rank_state(), _ENGINE_KEY: layout}
