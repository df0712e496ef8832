"""Checkpointer, the user's object: decides when to save, copies snapshots, restores the state.

A save copies this rank's share of the state into one of two shared-memory slots and submits it to
the node's agent, which uploads it while training continues. A slot goes through these states:

| state | event | next |
|---|---|---|
| free | `save` or a due `step` copies the state and submits it | submitted |
| submitted | the agent has uploaded the rank's files | uploaded |
| submitted, uploaded | the leader commits the checkpoint of all ranks | committed |
| submitted, uploaded | a rank's part is missing, or an upload fails | failed |
| uploaded, committed, failed | the next save uses the slot, as the oldest one | submitted |
| any | `restore` after a save of the same function | free |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from msgspec import Raw
from msgspec.structs import replace

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.restore_candidates import RestoreSelector
from spotfit.checkpoint.save_scheduler import SaveScheduler
from spotfit.checkpoint.snapshot_channel import (
    CHECKPOINTER_KIND,
    IN_MEMORY_NAME,
    SnapshotChannel,
)
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.core.input_checks import suggest_keywords
from spotfit.host import log
from spotfit.host.system import SystemClock
from spotfit.model.failure_model import (
    SaveCondition,
    SaveTrigger,
    parse_save_trigger,
)
from spotfit.model.reporting import MAX_SAVE_ERROR_CHARS, SaveAtEnd, metrics_to_json
from spotfit.torch.checkpoint.compatibility import all_gather, broadcast, check_process_group
from spotfit.torch.checkpoint.restore import DATASETS_KEY, RestoreOperation
from spotfit.worker.training_api import TrainContext, require_session

# torch and the modules that import it are loaded on first use: `import spotfit.torch` stays cheap.
if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from spotfit.checkpoint.reader import SavedState
    from spotfit.data.iteration.data_iterator import DataIterator
    from spotfit.torch.checkpoint.arguments import CheckpointerArguments
    from spotfit.torch.checkpoint.save_plan import RankSavePlan
    from spotfit.torch.checkpoint.shard_data_position import DataPosition
    from spotfit.torch.checkpoint.shm_arena import ShmArena
    from spotfit.torch.checkpoint.training_state import TrainingState

# Reserved in advance for values that are not tensors; they usually grow a little while training,
# and a segment that is too small has to be allocated again during a save.
_MIN_VALUES_BYTES = 2**17
SNAPSHOT_SLOTS = 2
"""Snapshots per rank in memory: one stays complete while the next is written. A save that finds
both in flight waits for the older upload."""
_PENDING_STATUSES = ("submitted", "uploaded")
# Short beside the seconds that an upload and its commit take.
_POLL_INTERVAL_S = 0.01
# A loop that saves after every step waits briefly each time; only longer waits are logged.
_LOGGED_WAIT_S = 0.1

P = ParamSpec("P")
R = TypeVar("R")


def _not_retryable(call: Callable[P, R]) -> Callable[P, R]:
    """Mark ConfigErrors as permanent: a restarted worker would raise the same error again."""

    @wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except ConfigError as error:
            error.details.setdefault("retryable", False)
            raise

    return wrapper


class RestoreResult(NamedTuple):
    """The state that training resumes from."""

    checkpoint: str
    """Name of the checkpoint; "" for a snapshot in memory, which is not a checkpoint yet."""
    step: int
    """Number of steps that were completed."""
    epoch: int
    """The epoch to resume; the loader continues within it."""
    source: str
    """Where the state was read from: 'memory' or 'bucket'."""


@suggest_keywords
class Checkpointer:
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

    steps: int = 0
    """Completed steps, including those before a restart."""
    _size_bytes: int = 0
    """Size of this rank's last snapshot, or an estimate for the first one."""
    _save_count: int = 0
    """Saves of this round. It is the same on all ranks, because they all save together."""
    _saved_step: int = 0
    """Step of the last snapshot of this round, or of the checkpoint that was restored."""
    _has_saved_manually: bool = False
    _has_epoch_ended: bool = False
    """Whether an epoch ended after the optimizer's last step, during gradient accumulation."""
    _has_pending_gradients: bool = False
    """Whether the last batch's gradients still wait for the optimizer's step."""
    _is_save_undecided: bool = False
    """Whether the last step was not asked yet if a save is due."""
    _restored_rng_state: dict[str, Any] | None = None
    """RNG states of the restored state, until the first step after it."""
    _allocation_thread: threading.Thread | None = None
    _is_restore_called: bool = False

    @_not_retryable
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
        session = require_session("spotfit.torch.Checkpointer")
        trigger = parse_save_trigger(every, max_overhead=max_overhead)
        self._total_steps = _check_total_steps(total_steps)
        from spotfit.torch.checkpoint.arguments import CheckpointerArguments
        from spotfit.torch.checkpoint.save_plan import SavePlanCache

        self._session = session
        self._channel = session.snapshot_channel
        _reject_second_checkpointer(self._channel)
        self._rank = session.context.get_world_rank()
        self._world_size = session.context.get_world_size()
        self._clock = SystemClock()
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
        self._per_rank = dict(per_rank or {})
        self._training_state = _training_state_of(arguments)
        # The agents' broadcast reports ranks that do not arrive; torch's collectives below would
        # only block until their timeout.
        self._channel.broadcast_bytes(CHECKPOINTER_KIND, b"")
        self._data_position = _open_data_position(loader, trigger, session.context)
        if self._channel.outlook().allows_resize:
            _reject_rank_bound_state(self._per_rank, self._data_position)
        self._restore_selector = self._make_restore_selector(session.context)
        self._save_planner = SavePlanCache(self._rank, all_gather)
        self._save_scheduler = self._make_save_scheduler(trigger)
        self._slots = [_SnapshotSlot(self._channel) for _ in range(SNAPSHOT_SLOTS)]
        self._last_metrics = b"{}"
        """Metrics of the last step, as JSON."""
        self._files_report_count = self._channel.files_report_count
        """Checkpoints with files that this rank had reported at the last step."""
        # Only now: a Checkpointer whose arguments were rejected does not prevent another one.
        _used_channels.add(self._channel)
        if save_at_end:
            self._channel.save_at_end = self._save_at_end

    def _make_restore_selector(self, context: TrainContext) -> RestoreSelector:
        return RestoreSelector(
            self._channel, context, all_gather=all_gather, broadcast=broadcast, clock=self._clock
        )

    def _make_save_scheduler(self, trigger: SaveTrigger) -> SaveScheduler:
        return SaveScheduler(
            trigger,
            broadcast_bytes=self._channel.broadcast_bytes,
            is_rank_zero=self._rank == 0,
            clock=self._clock,
            outlook=self._channel.outlook,
            max_in_flight=SNAPSHOT_SLOTS,
        )

    # --- saving ------------------------------------------------------------------------------

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
        self._warn_if_not_restored()
        self.steps += 1
        self._restored_rng_state = None
        self._files_report_count = self._channel.files_report_count
        if self._data_position is not None:
            self._has_epoch_ended |= self._data_position.advance()
        self._has_pending_gradients, self._is_save_undecided = accumulating, True
        # An epoch that ends with an accumulating batch is saved at the optimizer's next step.
        if accumulating:
            return
        if not hold:
            self.save_if_due(metrics)
            return
        self._last_metrics = metrics_to_json(metrics or {})

    def save_if_due(self, metrics: dict[str, Any] | None = None) -> None:
        """Save if a save is due since the last step, which had `hold=True`.

        All ranks call it once before their next step. `metrics`, errors and waiting are those of
        `step`. Does nothing if the last step has decided itself, or had `accumulating=True`.
        """
        if self._has_pending_gradients or not self._is_save_undecided:
            return
        self._is_save_undecided = False
        is_epoch_end, self._has_epoch_ended = self._has_epoch_ended, False
        self._record_upload_statuses()
        reason = self._save_scheduler.reason_to_save(self.steps, is_epoch_end=is_epoch_end)
        if reason is not None:
            self._save_snapshot(metrics or {}, reason)
            return
        if self._allocation_thread is None:
            self._preallocate()
        # Invalid metrics must fail now, not at the first save.
        self._last_metrics = metrics_to_json(metrics or {})

    @property
    def remaining_batches(self) -> int | None:
        """Batches of the epoch that this rank has not trained on yet; None if that is unknown.

        Equal on all ranks. At another world size than before a restart it is their new share.
        """
        return None if self._data_position is None else self._data_position.remaining_batches

    def end_epoch(self) -> None:
        """Record that the loop has ended the epoch of `loader`, which saves nothing.

        Needed only by loops that do not exhaust the loader's iterator, such as those of training
        frameworks, which stop after a number of batches. Without it the epoch ends when the next
        one begins, and a state that is saved between them resumes in the old one. Call it on every
        rank, after the last step of the epoch and before `save_if_due`. Idempotent.
        """
        if self._data_position is not None:
            self._data_position.end_epoch()
        # Also if the loop has ended the epoch before the loader's last batch.
        self._has_epoch_ended |= self._is_save_undecided

    def save(self, metrics: dict[str, Any] | None = None) -> None:
        """Save now, independently of `every`. All ranks must call it after the same step.

        Like `step` it returns once the state is copied to shared memory; `metrics` of rank 0 are
        stored with the checkpoint. Gradients of an accumulating step are not saved, which is logged
        as a warning. Raises `ConfigError` for metrics that are not JSON or state that cannot be
        saved, then nothing is saved, and `SessionMisuseError` if a model from `init_module()` was
        not restored.
        """
        # Detects loops in which only some ranks call save(). Once is enough: such a loop shows it
        # at its first call, and a broadcast per save would make ranks wait for each other.
        if not self._has_saved_manually:
            self._channel.broadcast_bytes("Checkpointer.save", b"")
            self._has_saved_manually = True
        self._reject_unrestored()
        if self._has_pending_gradients and self._rank == 0:
            log.warning(
                "checkpoint.pending_gradients_not_saved",
                step=self.steps,
                reason="the last step() had accumulating=True, and gradients are not saved",
                do="call save() after the optimizer's step and a step() without accumulating=True",
            )
        self._save_snapshot(metrics or {}, "requested")

    def _reject_unrestored(self) -> None:
        from spotfit.torch.checkpoint.deferred_init import reject_unrestored

        reject_unrestored(self._channel)

    def _warn_if_not_restored(self) -> None:
        if self._is_restore_called:
            return
        self._is_restore_called = True  # once
        name = self._channel.initial_checkpoint
        if self._rank == 0 and name is not None:
            log.warning(
                "checkpoint.not_restored",
                text=f"this run has the checkpoint {name}, but Checkpointer.restore() was not "
                "called before the first step(): training starts at step 0, and its saves replace "
                "the checkpoint",
            )

    def _preallocate(self) -> None:
        """Plan the save and allocate its memory in the background, before the first save is due.

        Raises `ConfigError` for state that cannot be saved, already at the first step.
        """
        from spotfit.torch.checkpoint.training_state import keep_current_gpu

        # The thread must not hold a reference to the Checkpointer, or it would never be collected.
        plan, slots = self._plan_save(), self._slots
        values_bytes = sum(map(len, self._encode_values(plan)))
        self._size_bytes = plan.size_bytes + values_bytes
        pieces, reserved_bytes = plan.pieces, max(_MIN_VALUES_BYTES, values_bytes)
        current_gpu = keep_current_gpu()

        def allocate() -> None:
            with current_gpu:  # the memory is pinned there
                for slot in slots:
                    with suppress(OSError):  # the save tries again and reports the error
                        slot.arena.reserve(pieces, values_bytes=reserved_bytes)

        self._allocation_thread = threading.Thread(
            target=allocate, name="spotfit-arena", daemon=True
        )
        self._allocation_thread.start()

    def _save_snapshot(self, metrics: dict[str, Any], reason: str) -> None:
        if self._allocation_thread is not None:
            self._allocation_thread.join()
        # Counted even if the save fails here: the other ranks count it, and the numbers must agree.
        self._save_count += 1
        self._save_scheduler.record_snapshot(self.steps)
        self._saved_step = self.steps
        if self._total_steps is not None:
            self._channel.record_progress(min(1.0, self.steps / self._total_steps))
        slot = self._free_slot()
        started_at = self._clock.now()
        # The other ranks' parts of the checkpoint wait for this rank: on errors it must skip.
        try:
            self._write_snapshot(slot.arena, self._plan_save())
            metrics_to_json(metrics)
        except ConfigError as error:
            self._channel.skip({}, error.message)
            raise
        except OSError as error:
            self._channel.skip(metrics, f"There is no space for a snapshot: {error}")
            return
        slot.report_index = self._channel.submit(metrics, slot.arena.path, reason, step=self.steps)
        stall_s = self._clock.now() - started_at
        # The slowest rank determines when a checkpoint is complete, so its size is the cost.
        largest_bytes = max(self._save_planner.largest_rank_bytes, self._size_bytes)
        self._save_scheduler.record_submitted(slot.report_index, stall_s, largest_bytes)
        if self._rank == 0:
            log.info(
                "checkpoint.snapshot", step=self.steps, stall_s=round(stall_s, 4), reason=reason
            )

    def _save_at_end(self) -> SaveAtEnd:
        """Take a snapshot of the steps since the last save, without any other rank.

        Called when the training function has returned. The other ranks may still train, so the
        leader decides whether the snapshots of all ranks are a checkpoint. Does not raise: the
        function has returned its result.
        """
        end = SaveAtEnd(
            step=self.steps,
            saved_step=self._saved_step,
            save_number=self._save_count + 1,
            has_newer_files=self._channel.files_report_count > self._files_report_count,
            metrics=Raw(self._last_metrics),
        )
        if end.has_newer_files or self.steps <= self._saved_step:
            return end
        try:
            return replace(end, has_snapshot=True, state_digest=self._submit_at_end())
        except Exception as error:  # noqa: BLE001 - user-defined state_dict methods raise anything
            reason = error.message if isinstance(error, SpotfitError) else repr(error)
            return replace(end, error=reason[:MAX_SAVE_ERROR_CHARS])

    def _submit_at_end(self) -> str:
        """Write and submit the snapshot; return the digest of the state that all ranks share."""
        from spotfit.torch.checkpoint.training_state import RejectCollectives

        if self._allocation_thread is not None:
            self._allocation_thread.join()
        self._save_count += 1
        slot = self._free_slot()
        with RejectCollectives():  # type: ignore[no-untyped-call]  # torch lacks types
            state = self._training_state.state_dict()
            plan, digest = self._save_planner.plan_alone(
                state, unsynchronized=self._training_state.unsynchronized_names(state)
            )
            self._write_snapshot(slot.arena, plan)
        self._channel.submit_at_end(self._last_metrics, slot.arena.path, step=self.steps)
        return digest

    def _plan_save(self) -> RankSavePlan:
        state = self._training_state.state_dict()
        return self._save_planner.plan(
            state,
            unsynchronized=self._training_state.unsynchronized_names(state),
            last_save_bytes=self._size_bytes,
        )

    def _write_snapshot(self, arena: ShmArena, plan: RankSavePlan) -> None:
        from spotfit.checkpoint.format import SnapshotIndex, split_into_chunks

        values, rank_state = self._encode_values(plan)
        values_bytes = len(values) + len(rank_state)
        index = SnapshotIndex(
            rank=self._rank,
            world_size=self._world_size,
            step=self.steps,
            pieces=plan.pieces,
            value_keys=plan.value_keys,
            encoded_values=values,
            encoded_rank_state=rank_state,
            epoch=self._data_position.epoch if self._data_position else 0,
            consumed=self._data_position.consumed if self._data_position else 0,
            chunks=split_into_chunks(plan.pieces),
            save_number=self._save_count,
        )
        # Set before memory is reserved: the other ranks gather it also if this rank has no space.
        self._size_bytes = plan.size_bytes + values_bytes
        arena.reserve(plan.pieces, values_bytes=values_bytes)
        arena.copy_tensors(plan.tensors)
        arena.publish(index)

    def _encode_values(self, plan: RankSavePlan) -> tuple[bytes, bytes]:
        """Encode the plan's non-tensor values and this rank's own state. Raises `ConfigError`."""
        from spotfit.torch.checkpoint.save_plan import encode_values
        from spotfit.torch.checkpoint.training_state import rng_state

        rank_state: dict[str, Any] = {"rng_state": rng_state()}
        if self._data_position is not None:
            rank_state |= self._data_position.rank_state()
        if positions := self._session.data_positions():
            rank_state[DATASETS_KEY] = positions
        if self._per_rank:
            rank_state["per_rank"] = {
                name: stateful.state_dict() for name, stateful in self._per_rank.items()
            }
        return encode_values(plan.values, keys=plan.value_keys), encode_values(rank_state)

    def _free_slot(self) -> _SnapshotSlot:
        """Return the slot with the oldest snapshot, after waiting for its upload if necessary.

        The newest snapshot stays complete while another one is written.
        """
        # -1: slots that were never used come first.
        oldest = min(
            self._slots, key=lambda slot: -1 if slot.report_index is None else slot.report_index
        )
        report_index = oldest.report_index
        if report_index is None or self._channel.status_of(report_index) != "submitted":
            return oldest
        started_at = self._clock.now()
        self._channel.wait_for_upload(report_index)
        waited_s = self._clock.now() - started_at
        if waited_s >= _LOGGED_WAIT_S:
            log.warning(
                "checkpoint.save_blocked",
                rank=self._rank,
                step=self.steps,
                waited_s=round(waited_s, 3),
                reason=f"{SNAPSHOT_SLOTS} snapshots were still being uploaded",
            )
        return oldest

    def _record_upload_statuses(self) -> None:
        if self._rank != 0:  # only rank 0 decides when to save
            return
        for slot in self._slots:
            if slot.report_index is not None:
                self._save_scheduler.cost_tracker.record_status(
                    slot.report_index, self._channel.status_of(slot.report_index)
                )

    # --- restoring ---------------------------------------------------------------------------

    @_not_retryable
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

        self._is_restore_called = True
        # As in __init__, this reports ranks that do not arrive.
        self._channel.broadcast_bytes("Checkpointer.restore", b"")
        if self._save_count:
            self._discard_pending_saves()
        operation = RestoreOperation(
            self._training_state,
            self._per_rank,
            self._data_position,
            rank=self._rank,
            world_size=self._world_size,
            has_checkpoint=self._channel.has_snapshots,
            resume_datasets=self._session.resume_data,
        )
        try:
            saved = self._restore_selector.read_newest(
                operation.plan, operation.check_compatibility, has_saved=self._save_count > 0
            )
        except BaseException:  # user-defined state_dict methods may raise anything
            operation.roll_back()
            raise
        if saved is None:
            # A corrupt snapshot in memory may have been planned, which replaced optimizer state.
            operation.roll_back()
            deferred_init.reject_missing_checkpoint(self._channel)
            return None
        epoch = operation.apply(saved)
        self._restored_rng_state = operation.rng_state
        deferred_init.check_initialized(self._channel, self._training_state.stateful_objects)
        return self._finish_restore(saved, epoch)

    def restore_rng_state(self) -> None:
        """Set the RNG states of this rank to those of the restored state once more.

        `restore` sets them, and so does the first pass over `loader`. Only a loop that draws random
        numbers after that and before its first batch, which the original run did not draw, calls
        this afterwards. Does nothing if no state was restored, if it was saved by another number of
        ranks, and after the next `step`.
        """
        from spotfit.torch.checkpoint.training_state import set_rng_state

        if self._restored_rng_state is not None:
            set_rng_state(self._restored_rng_state)

    def _discard_pending_saves(self) -> None:
        """Wait for saves in flight and drop the snapshots in memory.

        After a restart the newest snapshot in memory would be restored, which is newer than the
        checkpoint that training is being rolled back to.
        """
        if self._allocation_thread is not None:
            self._allocation_thread.join()
        # All of them must reach a final status: one that was committed after the roll-back would be
        # newer than the checkpoint that is restored.
        for slot in self._slots:
            while (
                slot.report_index is not None
                and self._channel.status_of(slot.report_index) in _PENDING_STATUSES
            ):
                self._clock.wait(_POLL_INTERVAL_S)
        self._record_upload_statuses()
        for slot in self._slots:
            slot.report_index = None
            slot.arena.close()
        self._channel.roll_back()
        self._allocation_thread = None

    def _finish_restore(self, saved: SavedState, epoch: int) -> RestoreResult:
        self.steps = saved.indices[0].step
        # The scheduler measures intervals from the restored step.
        self._has_epoch_ended = self._has_pending_gradients = self._is_save_undecided = False
        self._save_scheduler.reset(self.steps)
        name, source = ("", "memory") if saved.name == IN_MEMORY_NAME else (saved.name, "bucket")
        # A snapshot in memory may never have reached the bucket.
        self._saved_step = self.steps if source == "bucket" else self._channel.initial_step
        if self._rank == 0:
            log.info("checkpoint.restored", name=saved.name, step=self.steps, source=source)
        return RestoreResult(name, self.steps, epoch, source)


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


class _SnapshotSlot:
    """Memory for one snapshot and the report with which it was last submitted."""

    def __init__(self, channel: SnapshotChannel) -> None:
        from spotfit.torch.checkpoint.shm_arena import ShmArena

        self.arena = ShmArena(channel.segment_dirs, channel.new_segment_path)
        self.report_index: int | None = None


_used_channels: WeakSet[SnapshotChannel] = WeakSet()
"""Channels for which a Checkpointer was created, also if it no longer exists."""


def _reject_second_checkpointer(channel: SnapshotChannel) -> None:
    # A run has one sequence of checkpoints: a second Checkpointer would restore the first one's.
    if channel in _used_channels:
        raise ConfigError(
            "The run already has a Checkpointer; a second Checkpointer(...) would restore "
            "checkpoints of the first.",
            do="Create one Checkpointer before the loop for everything that is trained: combine "
            "models in a torch.nn.ModuleDict and pass a list of optimizers. Trainings that follow "
            "each other, such as cross-validation folds, need separate runs.",
        )


def _reject_rank_bound_state(
    per_rank: Mapping[str, Any],
    position: DataPosition | None,
) -> None:
    """Raise `ConfigError` for state that a group of another size could not restore."""
    bound = [f"per_rank={{…}} ({', '.join(sorted(per_rank))})"] if per_rank else []
    if position is not None and position.is_bound_to_world_size:
        bound.append("the position of loader=")
    if bound:
        raise ConfigError(
            f"{' and '.join(bound)} can only be restored by the same number of workers, but "
            "num_workers=(min, max) lets the group change its size.",
            do="Set num_workers to one number, or use extra={…} for state that all ranks share "
            "and shard one dataset with prepare_data_loader or a DistributedSampler.",
        )


def _check_total_steps(total_steps: Any) -> int | None:
    is_number = isinstance(total_steps, int) and not isinstance(total_steps, bool)
    if total_steps is not None and (not is_number or total_steps < 1):
        raise ConfigError(
            f"Checkpointer(total_steps={total_steps!r}): total_steps must be an integer of at "
            "least 1.",
            do="Pass the number of steps of the complete training, or omit total_steps.",
        )
    return None if total_steps is None else int(total_steps)


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
    loader: DataLoader[Any] | DataIterator | None, trigger: SaveTrigger, context: TrainContext
) -> DataPosition | None:
    """Start tracking the loader's position; None without a loader.

    Raises `ConfigError` on all ranks if saves at the end of epochs are requested but the ends are
    unknown, or differ between ranks.
    """
    from spotfit.torch.checkpoint.data_position import SamplerPosition, track_data_position
    from spotfit.torch.checkpoint.shard_data_position import ShardDataPosition, is_dataset_shard

    position: DataPosition | None = None
    if loader is not None:
        position = (
            ShardDataPosition(loader.position)
            if is_dataset_shard(loader)
            else track_data_position(loader, world_size=context.get_world_size())
        )
        position.monitor.is_reporting_rank = context.get_world_rank() == 0
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
