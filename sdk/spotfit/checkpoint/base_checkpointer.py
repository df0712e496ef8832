"""BaseCheckpointer: what the Checkpointers of all frameworks have in common.

It decides when to save, owns the memory of the snapshots and follows their uploads. A subclass
knows its framework's arrays: it plans and encodes a save, and restores a state.

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

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from msgspec import Raw
from msgspec.structs import replace

from spotfit.checkpoint.format import SnapshotIndex, StateKey, TensorPiece, split_into_chunks
from spotfit.checkpoint.reader import SavedState
from spotfit.checkpoint.restore_candidates import (
    AllGatherFn,
    BroadcastFn,
    RankContext,
    RestorePlan,
    RestoreSelector,
)
from spotfit.checkpoint.save_scheduler import SaveScheduler
from spotfit.checkpoint.shm_arena import SegmentPathFactory, ShmArena
from spotfit.checkpoint.snapshot_channel import (
    CHECKPOINTER_KIND,
    IN_MEMORY_NAME,
    SnapshotChannel,
)
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.host import log
from spotfit.host.system import SystemClock
from spotfit.model.failure_model import SaveCondition, SaveTrigger, parse_save_trigger
from spotfit.model.reporting import MAX_SAVE_ERROR_CHARS, SaveAtEnd, metrics_to_json

# Reserved in advance for values that are not tensors; they usually grow a little while training,
# and a segment that is too small has to be allocated again during a save.
_MIN_VALUES_BYTES = 2**17
SNAPSHOT_SLOTS = 2
"""Snapshots per rank in memory: one stays complete while the next is written. A save that finds
both in flight waits for the older upload."""
DATASETS_KEY = "datasets"
"""Key of a rank's state with the positions in the trainer's datasets."""
PER_RANK_KEY = "per_rank"
"""Key of a rank's state with the states of its own objects."""
RNG_STATE_KEY = "rng_state"
_PENDING_STATUSES = ("submitted", "uploaded")
# Short beside the seconds that an upload and its commit take.
_POLL_INTERVAL_S = 0.01
# A loop that saves after every step waits briefly each time; only longer waits are logged.
_LOGGED_WAIT_S = 0.1

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")


def not_retryable(call: Callable[P, R]) -> Callable[P, R]:
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


class RankSavePlan(NamedTuple):
    """What this rank writes of a state."""

    pieces: tuple[TensorPiece, ...]
    tensors: list[Any]
    """Tensors or arrays, one per piece; they share memory with those in use."""
    value_keys: tuple[StateKey, ...]
    values: list[Any]
    """One per key."""

    @property
    def size_bytes(self) -> int:
        """Size of the pieces including their alignment; values are not counted."""
        return max((piece.end for piece in self.pieces), default=0)


class WorkerContext(RankContext, Protocol):
    """The ranks of this process and their number."""

    def get_world_size(self) -> int:
        """Return the number of workers in the round."""
        ...


class CheckpointerSession(Protocol):
    """What a Checkpointer needs of the training session of its process."""

    @property
    def context(self) -> WorkerContext:
        """Ranks and sizes of this worker."""
        ...

    @property
    def snapshot_channel(self) -> SnapshotChannel:
        """Submits and finds snapshots."""
        ...

    def data_positions(self) -> dict[str, dict[str, Any]]:
        """Return the positions in the trainer's datasets."""
        ...

    def resume_data(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the trainer's datasets at these positions."""
        ...


class DataPosition(Protocol):
    """The position of this rank in the data of `loader=`."""

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        ...

    @property
    def consumed(self) -> int:
        """What was trained on of this epoch, usually by all ranks together."""
        ...

    @property
    def remaining_batches(self) -> int | None:
        """Batches of the epoch that are left for this rank; None if that is unknown."""
        ...

    @property
    def is_bound_to_world_size(self) -> bool:
        """Whether only the same number of ranks can resume from here."""
        ...

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank saves besides `epoch` and `consumed`."""
        ...

    def advance(self) -> bool:
        """Count a batch that was trained on; return whether it ended the epoch."""
        ...

    def end_epoch(self) -> None:
        """End the epoch if a batch of it was trained on. Idempotent."""
        ...


class SavePlanner(Protocol):
    """Divides the state among the ranks."""

    @property
    def largest_rank_bytes(self) -> int:
        """The largest number of bytes that any rank writes, as far as it is known."""
        ...


class StateRestore(Protocol):
    """One rank's part in one restore, by its framework."""

    rng_state: dict[str, Any] | None
    """The RNG states that `apply` has set; None at another world size."""

    def plan(self, saved: SavedState) -> RestorePlan:
        """Return this rank's reads of a candidate. Raises `ConfigError` or `IntegrityError`."""
        ...

    def check_compatibility(self, compatibilities: Sequence[Any]) -> None:
        """Raise `ConfigError` on all ranks if the state does not fit them together."""
        ...

    def apply(self, saved: SavedState) -> int:
        """Load the state that was read, and return its epoch. Raises `ConfigError`."""
        ...

    def roll_back(self) -> None:
        """Undo what the last plan has changed."""
        ...


class BaseCheckpointer(ABC):
    """Saves and restores the state of a training, with the arrays of one framework."""

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
    _data_position: DataPosition | None = None
    _save_planner: SavePlanner
    """Set by the framework's constructor."""

    def __init__(
        self,
        session: CheckpointerSession,
        *,
        every: SaveCondition | Sequence[SaveCondition],
        max_overhead: float | None,
        total_steps: int | None,
        per_rank: Mapping[str, Any] | None,
    ) -> None:
        """Check the arguments that do not depend on a framework. Raises `ConfigError`."""
        self._trigger = parse_save_trigger(every, max_overhead=max_overhead)
        self._total_steps = _check_total_steps(total_steps)
        self._session = session
        self._channel = session.snapshot_channel
        _reject_second_checkpointer(self._channel)
        self._rank = session.context.get_world_rank()
        self._world_size = session.context.get_world_size()
        self._clock = SystemClock()
        self._per_rank = dict(per_rank or {})

    def _join_ranks(self, value: bytes = b"") -> bytes:
        """Return rank 0's value. The agents report ranks that do not create a Checkpointer.

        A framework's collectives would only block until their timeout.
        """
        return self._channel.broadcast_bytes(CHECKPOINTER_KIND, value)

    def _start(self, *, all_gather: AllGatherFn, broadcast: BroadcastFn, save_at_end: bool) -> None:
        """Complete the construction, when all of the user's objects are known."""
        if self._channel.outlook().allows_resize:
            _reject_rank_bound_state(self._per_rank, self._data_position)
        self._restore_selector = RestoreSelector(
            self._channel,
            self._session.context,
            all_gather=all_gather,
            broadcast=broadcast,
            clock=self._clock,
        )
        self._save_scheduler = self._make_save_scheduler(self._trigger)
        self._slots = [
            _SnapshotSlot(
                self._make_arena(self._channel.segment_dirs, self._channel.new_segment_path)
            )
            for _ in range(SNAPSHOT_SLOTS)
        ]
        self._last_metrics = b"{}"
        """Metrics of the last step, as JSON."""
        self._files_report_count = self._channel.files_report_count
        """Checkpoints with files that this rank had reported at the last step."""
        # Only now: a Checkpointer whose arguments were rejected does not prevent another one.
        _used_channels.add(self._channel)
        if save_at_end:
            self._channel.save_at_end = self._save_at_end

    def _make_save_scheduler(self, trigger: SaveTrigger) -> SaveScheduler:
        return SaveScheduler(
            trigger,
            broadcast_bytes=self._channel.broadcast_bytes,
            is_rank_zero=self._rank == 0,
            clock=self._clock,
            outlook=self._channel.outlook,
            max_in_flight=SNAPSHOT_SLOTS,
        )

    # --- what a framework provides -----------------------------------------------------------

    @abstractmethod
    def _make_arena(self, directories: Sequence[Path], make_path: SegmentPathFactory) -> ShmArena:
        """Return memory for one snapshot; see `ShmArena`."""

    @abstractmethod
    def _plan_save(self) -> RankSavePlan:
        """Return this rank's share of the current state. A collective of all ranks."""

    @abstractmethod
    def _plan_at_end(self) -> tuple[RankSavePlan, str]:
        """Return this rank's share and the digest of what all ranks hold, without other ranks."""

    @abstractmethod
    def _encode_values(self, values: Any, *, keys: Sequence[StateKey] = ()) -> bytes:
        """Encode a list with one key per value, or a dict without keys. Raises `ConfigError`."""

    @abstractmethod
    def _rng_state(self) -> dict[str, Any]:
        """Return the RNG states of this rank."""

    @abstractmethod
    def _set_rng_state(self, state: dict[str, Any]) -> None:
        """Set the RNG states of this rank."""

    def _wait_for_state(self) -> None:
        """Wait until the current state is computed; the time does not count as a save's cost."""
        return

    def _allocation_context(self) -> AbstractContextManager[object]:
        """Return the context in which another thread allocates the snapshots' memory."""
        return nullcontext()

    # --- saving ------------------------------------------------------------------------------

    def _record_step(
        self, metrics: dict[str, Any] | None, *, accumulating: bool = False, hold: bool = False
    ) -> None:
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

    def _save_now(self, metrics: dict[str, Any] | None) -> None:
        # Detects loops in which only some ranks call save(). Once is enough: such a loop shows it
        # at its first call, and a broadcast per save would make ranks wait for each other.
        if not self._has_saved_manually:
            self._channel.broadcast_bytes("Checkpointer.save", b"")
            self._has_saved_manually = True
        if self._has_pending_gradients and self._rank == 0:
            log.warning(
                "checkpoint.pending_gradients_not_saved",
                step=self.steps,
                reason="the last step() had accumulating=True, and gradients are not saved",
                do="call save() after the optimizer's step and a step() without accumulating=True",
            )
        self._save_snapshot(metrics or {}, "requested")

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
        # The thread must not hold a reference to the Checkpointer, or it would never be collected.
        plan, slots = self._plan_save(), self._slots
        values_bytes = sum(map(len, self._encode_plan(plan)))
        self._size_bytes = plan.size_bytes + values_bytes
        pieces, reserved_bytes = plan.pieces, max(_MIN_VALUES_BYTES, values_bytes)
        context = self._allocation_context()

        def allocate() -> None:
            with context:
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
        # The other ranks' parts of the checkpoint wait for this rank: on errors it must skip.
        try:
            self._wait_for_state()
            started_at = self._clock.now()
            self._write_snapshot(slot.arena, self._plan_save())
            metrics_to_json(metrics)
        except OSError as error:
            self._channel.skip(metrics, f"There is no space for a snapshot: {error}")
            return
        except Exception as error:
            self._channel.skip({}, _describe(error))
            raise
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
            return replace(end, error=_describe(error)[:MAX_SAVE_ERROR_CHARS])

    def _submit_at_end(self) -> str:
        """Write and submit the snapshot; return the digest of the state that all ranks share."""
        if self._allocation_thread is not None:
            self._allocation_thread.join()
        self._save_count += 1
        slot = self._free_slot()
        digest = self._write_at_end(slot.arena)
        self._channel.submit_at_end(self._last_metrics, slot.arena.path, step=self.steps)
        return digest

    def _write_at_end(self, arena: ShmArena) -> str:
        plan, digest = self._plan_at_end()
        self._write_snapshot(arena, plan)
        return digest

    def _write_snapshot(self, arena: ShmArena, plan: RankSavePlan) -> None:
        values, rank_state = self._encode_plan(plan)
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
        arena.copy(plan.tensors)
        arena.publish(index)

    def _encode_plan(self, plan: RankSavePlan) -> tuple[bytes, bytes]:
        """Encode the plan's values and this rank's own state. Raises `ConfigError`."""
        values = self._encode_values(plan.values, keys=plan.value_keys)
        return values, self._encode_values(self._rank_state())

    def _rank_state(self) -> dict[str, Any]:
        """Return this rank's own state: RNG, position in the data, objects of `per_rank`."""
        rank_state: dict[str, Any] = {RNG_STATE_KEY: self._rng_state()}
        if self._data_position is not None:
            rank_state |= self._data_position.rank_state()
        if positions := self._session.data_positions():
            rank_state[DATASETS_KEY] = positions
        if self._per_rank:
            rank_state[PER_RANK_KEY] = {
                name: stateful.state_dict() for name, stateful in self._per_rank.items()
            }
        return rank_state

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

    def _restore(self, restore: StateRestore) -> RestoreResult | None:
        self._is_restore_called = True
        # As at the construction, this reports ranks that do not arrive.
        self._channel.broadcast_bytes("Checkpointer.restore", b"")
        if self._save_count:
            self._discard_pending_saves()
        try:
            saved = self._restore_selector.read_newest(
                restore.plan, restore.check_compatibility, has_saved=self._save_count > 0
            )
        except BaseException:  # user-defined state_dict methods may raise anything
            restore.roll_back()
            raise
        if saved is None:
            # A corrupt snapshot in memory may have been planned, which replaced optimizer state.
            restore.roll_back()
            return None
        epoch = restore.apply(saved)
        self._restored_rng_state = restore.rng_state
        return self._finish_restore(saved, epoch)

    def restore_rng_state(self) -> None:
        """Set the RNG states of this rank to those of the restored state once more.

        `restore` sets them, and so does the first pass over `loader`. Only a loop that draws random
        numbers after that and before its first batch, which the original run did not draw, calls
        this afterwards. Does nothing if no state was restored, if it was saved by another number of
        ranks, and after the next `step`.
        """
        if self._restored_rng_state is not None:
            self._set_rng_state(self._restored_rng_state)

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


class _SnapshotSlot:
    """Memory for one snapshot and the report with which it was last submitted."""

    def __init__(self, arena: ShmArena) -> None:
        self.arena = arena
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
            "models in a torch.nn.ModuleDict and pass a list of optimizers, or combine pytrees in "
            "one dictionary. Trainings that follow each other, such as cross-validation folds, "
            "need separate runs.",
        )


def _reject_rank_bound_state(per_rank: Mapping[str, Any], position: DataPosition | None) -> None:
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


def reject_resized_per_rank(
    per_rank: Mapping[str, Any], rank_state: Mapping[str, Any], *, saved_size: int, world_size: int
) -> None:
    """Raise `ConfigError` if objects in `per_rank` were saved by another number of ranks."""
    if per_rank and PER_RANK_KEY in rank_state and saved_size != world_size:
        raise ConfigError(
            f"{', '.join(sorted(per_rank))} was saved under per_rank= at world size "
            f"{saved_size} and cannot be restored at world size {world_size}.",
            do=f"Set num_workers={saved_size}, or save in another way what all ranks share.",
        )


def warn_rank_differences(
    fingerprints: Sequence[Mapping[K, bytes]], *, do: str, name_of: Callable[[K], str] = str
) -> None:
    """Warn about state that differs between ranks: only one rank's value is saved.

    `fingerprints` are those of all ranks: by key, bytes that are equal on all ranks if the state
    is. The warning has the `name_of` a key.
    """
    values: dict[K, set[bytes]] = defaultdict(set)
    for rank_fingerprints in fingerprints:
        for key, fingerprint in rank_fingerprints.items():
            values[key].add(fingerprint)
    differing = [key for key, distinct in values.items() if len(distinct) > 1]
    if differing:
        log.warning(
            "checkpoint.ranks_diverge",
            parts=len(differing),
            example=name_of(differing[0]),
            reason="the ranks hold different values, and only one rank's value is saved",
            do=do,
        )


def warn_restore_differences(
    *, unused: Sequence[str], new: Sequence[str], dtype_changes: Sequence[str], do: str
) -> None:
    """Warn about state that was saved and does not exist now, and about the reverse.

    `do` says how the unused state can be restored. `dtype_changes` describes arrays with another
    dtype than the saved one.
    """
    if unused:
        log.warning("checkpoint.unused_state", names=list(unused), do=do)
    if dtype_changes:
        log.warning(
            "checkpoint.dtype_changed", weights=len(dtype_changes), example=dtype_changes[0]
        )
    if new:
        log.warning(
            "checkpoint.state_not_restored",
            names=list(new),
            reason="the checkpoint contains no state of them",
        )


def load_per_rank(per_rank: Mapping[str, Any], rank_state: Mapping[str, Any]) -> None:
    """Load the saved states of a rank's own objects. Raises `ConfigError` if one is rejected."""
    for name, state in rank_state.get(PER_RANK_KEY, {}).items():
        if name in per_rank:
            load_object_state(state, name, per_rank[name])


def load_object_state(saved: Any, name: str, stateful: Any) -> None:
    """Call `load_state_dict(saved)` of one object of the user. Raises `ConfigError` if it fails.

    `name` is the object's name for the message, such as "scheduler". The error has the detail
    `retryable=True`, because the cause may be temporary.
    """
    try:
        stateful.load_state_dict(saved)
    except Exception as error:  # user-defined code may raise anything
        raise ConfigError(
            f"load_state_dict of {name} ({type(stateful).__name__}) rejected the saved state: "
            f"{type(error).__name__}: {error}",
            do="Make load_state_dict accept what state_dict returned, at any number of workers. "
            "DDP adds the prefix 'module.' to the names of weights: save those of the unwrapped "
            "model.",
            # Unlike our own checks this may be temporary, for example a full disk.
            retryable=True,
        ) from error


def _describe(error: Exception) -> str:
    return error.message if isinstance(error, SpotfitError) else repr(error)


def _check_total_steps(total_steps: Any) -> int | None:
    is_number = isinstance(total_steps, int) and not isinstance(total_steps, bool)
    if total_steps is not None and (not is_number or total_steps < 1):
        raise ConfigError(
            f"Checkpointer(total_steps={total_steps!r}): total_steps must be an integer of at "
            "least 1.",
            do="Pass the number of steps of the complete training, or omit total_steps.",
        )
    return None if total_steps is None else int(total_steps)
