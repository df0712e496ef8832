"""Checkpointer, the user's object: saves and restores the complete state of a torch training.

`BaseCheckpointer` decides when to save and owns the snapshots; this module plans and encodes the
state of torch's objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotfit.checkpoint.base_checkpointer import (
    BaseCheckpointer,
    RankSavePlan,
    RestoreResult,
    not_retryable,
)
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.model.failure_model import SaveCondition, SaveTrigger
from spotfit.torch.checkpoint.compatibility import all_gather, broadcast, check_process_group
from spotfit.torch.checkpoint.restore import RestoreOperation
from spotfit.worker.training_api import require_session

# torch and the modules that import it are loaded on first use: `import spotfit.torch` stays cheap.
if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from spotfit.checkpoint.format import StateKey
    from spotfit.checkpoint.shm_arena import SegmentPathFactory, ShmArena
    from spotfit.data.iteration.data_iterator import DataIterator
    from spotfit.torch.checkpoint.arguments import CheckpointerArguments
    from spotfit.torch.checkpoint.data_position import TorchDataPosition
    from spotfit.torch.checkpoint.save_plan import SavePlanCache
    from spotfit.torch.checkpoint.training_state import TrainingState


class TrainingStateCheckpointer(BaseCheckpointer):
    """Saves and restores a `TrainingState`, in the process group of torch.

    The common part of the Checkpointers for torch and for libraries that keep the state themselves.
    """

    _training_state: TrainingState
    _data_position: TorchDataPosition | None
    """None without a loader."""
    _save_planner: SavePlanCache
    _restore_type: type[RestoreOperation] = RestoreOperation

    def _open(
        self,
        state: TrainingState,
        loader: DataLoader[Any] | DataIterator | None,
        *,
        save_at_end: bool,
    ) -> None:
        """Complete the construction. Collective. Raises `ConfigError`."""
        from spotfit.torch.checkpoint.save_plan import SavePlanCache

        self._training_state = state
        self._join_ranks()
        context = self._session.context
        self._data_position = _open_data_position(
            loader,
            self._trigger,
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
        )
        self._save_planner = SavePlanCache(self._rank, all_gather)
        self._start(all_gather=all_gather, broadcast=broadcast, save_at_end=save_at_end)

    def step(
        self,
        metrics: dict[str, Any] | None = None,
        *,
        accumulating: bool = False,
        hold: bool = False,
    ) -> None:
        """Record that every rank has trained on one more batch, and save if a save is due.

        All ranks call it after each batch; some calls wait for all ranks. A call that saves returns
        once the state is copied to shared memory; the upload continues in the background, and its
        failure is logged. A save waits while two earlier ones are still being uploaded, and is
        skipped, with a warning, if there is no space. `metrics` of rank 0 are stored with the
        checkpoint, and `CheckpointConfig` reads its score from them; they are not a report.

        With gradient accumulation pass `accumulating=True` on every rank after each batch whose
        gradients the optimizer has not used yet: gradients are not saved, so such a step never
        saves. With `hold=True` on every rank a due save waits for `save_if_due`: for the last batch
        of an epoch, if the loop still has work to do at the epoch's end that a resume would skip.
        Raises `ConfigError` for metrics that are not JSON or state that cannot be saved, and
        `SessionMisuseError` if a model from `init_module()` was not restored.
        """
        self._reject_unrestored()
        has_engine_gradients = self._is_accumulating()  # called in every step: it compares counts
        self._record_step(metrics, accumulating=accumulating or has_engine_gradients, hold=hold)

    def save(self, metrics: dict[str, Any] | None = None) -> None:
        """Save now, independently of `every`. All ranks must call it after the same step.

        Like `step` it returns once the state is copied to shared memory; `metrics` of rank 0 are
        stored with the checkpoint. Gradients of an accumulating step are not saved, which is logged
        as a warning. Raises `ConfigError` for metrics that are not JSON or state that cannot be
        saved, then nothing is saved, and `SessionMisuseError` if a model from `init_module()` was
        not restored.
        """
        self._reject_unrestored()
        self._save_now(metrics)

    @not_retryable
    def restore(self) -> RestoreResult | None:
        """Restore the newest complete state; return None if the run has none.

        Collective: all ranks call it before their loops, or between two steps; it blocks until the
        state is loaded into all objects. The newest state is the last snapshot if it is still in
        the machines' memory, else the latest checkpoint. After saves of the same training function
        it is the latest committed checkpoint, which rolls back the steps since then. A corrupt
        state is logged, and an earlier one is restored.

        Raises `IntegrityError` if no readable checkpoint is left, and `ConfigError` if the model or
        optimizer does not match the checkpoint or an object rejects its state. A mismatch changes
        nothing, unless a snapshot in memory became unreadable while it was read and the checkpoint
        that should replace it does not match.
        """
        from spotfit.torch.checkpoint import deferred_init

        operation = self._restore_type(
            self._training_state,
            self._per_rank,
            self._data_position,
            rank=self._rank,
            world_size=self._world_size,
            has_checkpoint=self._channel.has_snapshots,
            resume_datasets=self._session.resume_data,
        )
        result = self._restore(operation)
        if result is None:
            deferred_init.reject_missing_checkpoint(self._channel)
        else:
            deferred_init.check_initialized(self._channel, self._training_state.stateful_objects)
        return result

    # --- what BaseCheckpointer needs of torch --------------------------------------------------

    def _make_arena(self, directories: Sequence[Path], make_path: SegmentPathFactory) -> ShmArena:
        from spotfit.torch.checkpoint.tensor_arena import TensorArena

        return TensorArena(directories, make_path)

    def _plan_save(self) -> RankSavePlan:
        state = self._training_state.state_dict()
        return self._save_planner.plan(
            state,
            unsynchronized=self._training_state.unsynchronized_names(state),
            last_save_bytes=self._size_bytes,
        )

    def _plan_at_end(self) -> tuple[RankSavePlan, str]:
        state = self._training_state.state_dict()
        return self._save_planner.plan_alone(
            state, unsynchronized=self._training_state.unsynchronized_names(state)
        )

    def _write_at_end(self, arena: ShmArena) -> str:
        from spotfit.torch.checkpoint.training_state import RejectCollectives

        with RejectCollectives():  # type: ignore[no-untyped-call]  # torch lacks types
            return super()._write_at_end(arena)

    def _encode_values(self, values: Any, *, keys: Sequence[StateKey] = ()) -> bytes:
        from spotfit.torch.checkpoint.save_plan import encode_values

        return encode_values(values, keys=keys)

    def _rng_state(self) -> dict[str, Any]:
        from spotfit.torch.checkpoint.training_state import rng_state

        return rng_state()

    def _set_rng_state(self, state: dict[str, Any]) -> None:
        from spotfit.torch.checkpoint.training_state import set_rng_state

        set_rng_state(state)

    def _allocation_context(self) -> AbstractContextManager[object]:
        from spotfit.torch.checkpoint.training_state import keep_current_gpu

        return keep_current_gpu()  # the memory is pinned there

    def _is_accumulating(self) -> bool:
        """Return whether gradients of the last batch are known to be accumulated; once per step."""
        return False

    def _reject_unrestored(self) -> None:
        from spotfit.torch.checkpoint import deferred_init

        deferred_init.reject_unrestored(self._channel)


@suggest_keywords
class Checkpointer(TrainingStateCheckpointer):
    """Saves and restores the complete training state without stopping training.

    Every rank creates one, calls `restore` before its loop and `step` after each batch. A snapshot
    is copied to shared memory, and the node's agent uploads it, even if this process exits. Each
    rank saves its own shards and a share of the replicated state; a different number of ranks can
    restore it.

    When the training function has returned on all ranks, the steps since the last save are saved,
    too: the state as the function leaves it, unless files were reported after the last step. Until
    then the Checkpointer keeps the model in memory. `save_at_end=False` declines both.

    A committed snapshot is an ordinary checkpoint: `Result.checkpoint`, `get_checkpoint()` and
    `CheckpointConfig` apply to it.
    """

    @not_retryable
    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: DataLoader[Any] | DataIterator | None = None,
        every: SaveCondition | Sequence[SaveCondition] = "auto",
        max_overhead: float | None = None,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        save_at_end: bool = True,
        total_steps: int | None = None,
    ) -> None:
        """Collective: all ranks must create their Checkpointer.

        `scheduler`, `scaler` and the values of `extra` and `per_rank` have `state_dict` and
        `load_state_dict`. State in `extra` is the same on all ranks. State in `per_rank` belongs to
        one rank, such as a position in a stream, and ties the run to its number of workers: it is
        rejected for an elastic group.

        `loader` is this rank's data loader, or what `spotfit.get_dataset_shard` returns; its
        position in the epoch is saved. The positions of the trainer's datasets are always saved;
        `loader` makes one of them count the epochs, for `every="epoch"` and the result of
        `restore`. `every` says when to save: "auto", a duration like "10m" or a timedelta, a number
        of steps, "epoch", "at_notice", or a list of these. "auto" balances the cost of saving
        against the expected loss. `max_overhead` limits the fraction of the time that "auto" uses;
        without it that is limited to 3.5 % until the first loss. `save_at_end` says whether the
        last steps are saved when the training function has returned; a rank does not wait for
        others then. `total_steps` is the number of steps of the complete training: a run with a
        deadline computes from it how long the training still takes. Raises `ConfigError`.
        """
        super().__init__(
            require_session("spotfit.torch.Checkpointer"),
            every=every,
            max_overhead=max_overhead,
            total_steps=total_steps,
            per_rank=per_rank,
        )
        from spotfit.torch.checkpoint.arguments import CheckpointerArguments

        check_process_group(self._world_size)
        arguments = CheckpointerArguments(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            loader=loader,
            extra=extra,
            per_rank=per_rank,
        )
        arguments.validate()
        self._open(_training_state_of(arguments), loader, save_at_end=save_at_end)


def export_checkpoint(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    everything: bool = False,
    model: torch.nn.Module | None = None,
    example_inputs: tuple[Any, ...] | None = None,
) -> None:
    """Merge the shards of a Checkpointer's checkpoint into one file that does not need spotfit.

    Runs anywhere with access to the checkpoint's storage; `path` is a local file, which is
    replaced. The suffix selects the format: `.safetensors`, or `.pt`, `.pth` and `.bin` for
    torch.save. Only the latter support `everything`, which adds the optimizer and all other state
    to the model's weights. `.pt2` and `.onnx` are programs for serving: the weights are loaded into
    `model`, which is exported as `export_model` does, with `example_inputs` as its arguments.
    Raises `ConfigError` for another suffix, an unwritable path or a checkpoint of other files, and
    `IntegrityError` for a corrupt checkpoint.
    """
    # Imported here: a worker does not need these for training.
    from spotfit.client.stored_checkpoints import write_checkpoint_file
    from spotfit.torch.checkpoint.torch_export import export_program
    from spotfit.torch.model_export import PROGRAM_SUFFIXES

    saved = checkpoint.open_snapshot()
    if Path(path).suffix in PROGRAM_SUFFIXES:
        export_program(saved, path, model, example_inputs)
    else:
        write_checkpoint_file(saved, Path(path), full_state=everything)


def _training_state_of(arguments: CheckpointerArguments) -> TrainingState:
    from spotfit.torch.checkpoint.training_state import TrainingState

    stateful_objects = {
        "scheduler": arguments.scheduler,
        "scaler": arguments.scaler,
        **(arguments.extra or {}),
    }
    return TrainingState(
        arguments.model,
        arguments.optimizers,
        {name: value for name, value in stateful_objects.items() if value is not None},
    )


def _open_data_position(
    loader: DataLoader[Any] | DataIterator | None,
    trigger: SaveTrigger,
    *,
    rank: int,
    world_size: int,
) -> TorchDataPosition | None:
    """Start tracking the loader's position; None without a loader.

    Raises `ConfigError` on all ranks if saves at the end of epochs are requested but the ends are
    unknown, or differ between ranks.
    """
    from spotfit.data.iteration.shard_data_position import ShardDataPosition, is_dataset_shard
    from spotfit.torch.checkpoint.data_position import SamplerPosition, track_data_position

    position: TorchDataPosition | None = None
    if loader is not None:
        position = (
            ShardDataPosition(loader.position)
            if is_dataset_shard(loader)
            else track_data_position(loader, world_size=world_size)
        )
        position.monitor.is_reporting_rank = rank == 0
        position.monitor.expects_epoch_saves = trigger.epochs
        if isinstance(position, SamplerPosition) and position.requires_common_seed:
            # Accelerate seeds the sampler of each rank by the rank's own RNG.
            position.seed = broadcast(position.seed)
    if not trigger.epochs:
        return position
    # Gathered before any check, so that all ranks raise; the others would wait for one that did.
    lengths = all_gather(position.batches_per_epoch if position is not None else None)
    if None in lengths:
        raise ConfigError(
            'Checkpointer(every="epoch") needs to know where an epoch ends, but '
            + ("loader= is missing." if loader is None else "the length of loader= is unknown."),
            do="Pass a DataLoader over a dataset with a length, with the default samplers or a "
            "DistributedSampler. Otherwise set every= to a number of steps or a duration, or call "
            "save() after each epoch.",
        )
    if len(set(lengths)) > 1:
        raise ConfigError(
            'Checkpointer(every="epoch") requires equally long epochs on all ranks, but the '
            f"ranks have {lengths} batches.",
            do="Give every rank the same number of batches, or set every= to a number of steps or "
            "a duration.",
        )
    return position
