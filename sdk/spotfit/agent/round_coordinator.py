"""`RoundCoordinator`: routes the frames of a round's workers and answers them.

It is pure bookkeeping: frames in, frames out, no I/O. Reports and their checkpoints are matched by
`ReportMatcher`, other collective operations are tracked by `Collectives`. Nothing here must survive
the round.

Synchronization of a round's workers with the hooks of the user's backend.

All workers stop at a gate before each phase; the leader runs the hook of that phase and then opens
the gate:

| phase waited for | event                                  | next                              |
|------------------|----------------------------------------|-----------------------------------|
| setup            | all ranks at the gate                  | `on_start` is submitted           |
| setup            | `on_start` returned                    | gate opened; "train" is next      |
| train            | all ranks at the gate                  | `on_training_start` is submitted  |
| train            | `on_training_start` returned           | gate opened; "leave" is next      |
| leave            | all functions have returned            | `on_shutdown` is submitted        |
| leave            | `on_shutdown` returned                 | gate opened; done                 |
| train, leave     | round closed                           | `on_shutdown` is submitted, done  |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from spotfit.agent.collectives import REPORT_KIND, CollectiveKey, Collectives, OutgoingFrame
from spotfit.agent.ports import BackendHookRunner
from spotfit.agent.report_matching import RankSets, ReportMatcher
from spotfit.checkpoint.snapshot_channel import CHECKPOINTER_KIND
from spotfit.core.errors import IntegrityError
from spotfit.model.leader_state import RoundProgress
from spotfit.model.reporting import SaveAtEnd
from spotfit.policy.save_at_end import CommitSnapshots, StepsUnsaved, decide_save_at_end
from spotfit.protocol.agent_sidecar import BackendHook
from spotfit.protocol.worker_agent import (
    MAX_GATHERED_BYTES,
    AtGate,
    AwaitReports,
    CallFunction,
    CallResult,
    CheckpointCorrupt,
    DataWaited,
    DiscardSnapshotAtEnd,
    FilesReport,
    FromWorker,
    FunctionStarted,
    MetricsReport,
    OpenGate,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    SaveCompleted,
    SaveFailed,
    WorkerPhase,
    WorkerReturned,
    decode_worker_message,
)


class RoundCoordinator:
    """The leader's part of one round. The callbacks are described in `ReportMatcher`.

    Ranks are global. `now` is event-loop time in seconds. Returned frames are for
    `OpenRound.send_to_workers`: pairs of rank (None: all) and message.
    """

    def __init__(
        self,
        round_number: int,
        world_size: int,
        *,
        default_checkpoint_name: Callable[[int], str],
        parent_snapshot: Callable[[], str] = str,
        latest_checkpoint_named: Callable[[str], str | None] = lambda _: None,
        collective_timeout_s: float | None = None,
        collective_warn_s: float = 60.0,
        keep_all_metrics: bool = False,
        now: float = 0.0,
    ) -> None:
        self.round = round_number
        self.world_size = world_size
        self._ranks = RankSets(world_size)
        self._collectives = Collectives(
            world_size, timeout_s=collective_timeout_s, warn_s=collective_warn_s
        )
        self.reports = ReportMatcher(
            round_number,
            self._ranks,
            self._collectives,
            default_checkpoint_name=default_checkpoint_name,
            parent_snapshot=parent_snapshot,
            latest_checkpoint_named=latest_checkpoint_named,
            keep_all_metrics=keep_all_metrics,
        )
        self._partial_broadcasts: dict[CollectiveKey, RankZeroBroadcastResult] = {}
        """Results of broadcasts that completed without excluded ranks, should these still join."""
        self.running_ranks: set[int] = set()
        """Ranks whose training function has been called."""
        self._progress_counts = [0] * world_size
        self.opened_at = self._progressed_at = now
        self._is_validating = False
        self._ends: dict[int, SaveAtEnd] = {}
        """By rank, the state of the Checkpointer when the training function had returned."""
        self.has_lost_save_at_end = False
        """Whether the last steps are unsaved because the node of a rank has disconnected."""
        self._ranks_at_gate: dict[WorkerPhase, set[int]] = {}
        self.call_results: deque[tuple[int, CallResult]] = deque()
        """Results of the calls that a backend's hooks made, with the rank that answered."""
        self.data_waits: deque[tuple[int, DataWaited]] = deque()
        """How long ranks have waited for rows, with the rank."""
        self.has_checkpointer = False
        """Whether the training function has created a Checkpointer."""
        self.corrupt_checkpoints: set[str] = set()
        """Committed checkpoints that a rank could not read."""

    @property
    def returned_ranks(self) -> set[int]:
        """Ranks whose training function has returned; the live set, not a copy.

        A return that arrives after `mark_disconnected` does not count.
        """
        return self._ranks.returned

    @property
    def progress(self) -> RoundProgress:
        """The progress of the ranks, for hang detection. The sets of ranks in it are live."""
        return RoundProgress(
            progress_counts=tuple(self._progress_counts),
            progressed_at=self._progressed_at,
            running_ranks=self.running_ranks,
            returned_ranks=self.returned_ranks,
            is_uploading=self.reports.is_saving,
            is_validating=self._is_validating,
        )

    def set_validation_pending(self, *, is_pending: bool, now: float) -> None:
        """Set whether ranks may be waiting for a validation: then they do not count as hung.

        Called before each hang check. The end of a validation counts as progress at `now`.
        """
        # Ranks that waited for it need time until their next step.
        if self._is_validating and not is_pending:
            self._progressed_at = now
        self._is_validating = is_pending

    def are_all_at_gate(self, phase: WorkerPhase) -> bool:
        """Whether every rank waits to enter that phase (`"setup"`, `"train"` or `"leave"`).

        For "leave": whether every training function has returned.
        """
        # Workers do not announce the last gate: their return is the announcement.
        ranks = self.returned_ranks if phase == "leave" else self._ranks_at_gate.get(phase, ())
        return len(ranks) == self.world_size

    # --- changes of the group ------------------------------------------------------------------

    def exclude_ranks(self, ranks: frozenset[int]) -> list[OutgoingFrame]:
        """Complete reports and `preemption_info` without these ranks, from now on.

        For ranks on nodes with a preemption notice; replaces the ranks of an earlier call. A report
        with a snapshot still waits for each of them until it has returned or disconnected. Returns
        the frames that answer other ranks. Ignored if rank 0 is among them: names, metrics and
        broadcast values come from rank 0.
        """
        if 0 in ranks:
            return []
        self._ranks.excluded = ranks
        frames = self._settle_lost_ranks()
        # Reports were settled above: they have other rules for excluded ranks.
        broadcasts = [key for key in self._collectives.pending if key.kind != REPORT_KIND]
        return frames + [frame for key in broadcasts for frame in self._try_complete_broadcast(key)]

    def mark_disconnected(self, ranks: Iterable[int]) -> list[OutgoingFrame]:
        """Ignore later reports, broadcasts and returns of these ranks, until the round ends.

        Returns the frames that answer other ranks. Frames may have been lost with the connection: a
        report of the group must not be completed, or a checkpoint saved, by a later frame that
        hides the loss.
        """
        self._ranks.disconnected.update(ranks)
        was_saving_at_end = self.reports.is_saving_at_end
        frames = self._settle_lost_ranks()
        # Ranks on nodes with a notice are not waited for: then that save has just been abandoned.
        self.has_lost_save_at_end |= was_saving_at_end and not self.reports.is_saving_at_end
        return frames

    def _settle_lost_ranks(self) -> list[OutgoingFrame]:
        frames = self.reports.match_complete_reports(self._progressed_at)
        return frames + self.reports.abandon_checkpoints_of_lost_ranks()

    # --- frames of workers ---------------------------------------------------------------------

    def handle_frame(self, rank: int, frame: msgspec.Raw, now: float) -> list[OutgoingFrame]:
        """Process a frame (the JSON of a `FromWorker`) of that rank; return the frames for workers.

        Raises `IntegrityError` if the frame is invalid: malformed, or about a report or an upload
        that this rank cannot have made.
        """
        message = decode_worker_message(frame)
        # Calls of hooks, and what a thread measures, are not progress of the training function.
        if not isinstance(message, AtGate | CallResult | DataWaited):
            self._progress_counts[rank] += 1
            self._progressed_at = now
        frames = self._dispatch(rank, message, now)
        # After each frame: any return or join may make a pending collective impossible.
        return frames + self._collectives.abort_deadlocked(self.returned_ranks, self._missing_ranks)

    def _dispatch(self, rank: int, message: FromWorker, now: float) -> list[OutgoingFrame]:
        match message:
            # Earlier frames of the rank may be lost: see `mark_disconnected`. Results of uploads
            # still count: they do not depend on other frames.
            case MetricsReport() | FilesReport() | RankZeroBroadcast() | WorkerReturned() if (
                rank in self._ranks.disconnected
            ):
                return []
            case MetricsReport() | FilesReport():
                return self.reports.add_report(rank, message, now)
            case SaveCompleted(report_index=number):
                return self.reports.record_upload(rank, number, message)
            case AwaitReports(report_count=count):
                self.reports.await_reports(rank, count)
            case SaveFailed(report_index=number, reason=reason):
                return self.reports.record_failed_save(rank, number, reason)
            case CheckpointCorrupt(checkpoint_name=name):
                self.corrupt_checkpoints.add(name)
            case RankZeroBroadcast():
                return self._join_broadcast(rank, message, now)
            case AtGate(phase=phase):
                self._ranks_at_gate.setdefault(phase, set()).add(rank)
            case CallResult():
                self.call_results.append((rank, message))
            case DataWaited():
                self.data_waits.append((rank, message))
            case FunctionStarted():
                self.running_ranks.add(rank)
            case WorkerReturned():
                if rank in self.returned_ranks:
                    raise IntegrityError(
                        "'worker_returned' is invalid: this rank has returned before.",
                        do="Check whether the training function writes to file descriptors it has "
                        "not opened.",
                    )
                self.returned_ranks.add(rank)
                if message.save_at_end is not None:
                    self._ends[rank] = message.save_at_end
                # Excluded ranks that have returned are not waited for: see `find_missing_ranks`.
                frames = self.reports.match_complete_reports(now)
                has_ended = len(self.returned_ranks) == self.world_size
                return frames + (self._save_at_end(now) if has_ended else [])
            case _:
                pass  # the agent of the worker has processed the other messages
        return []

    def _save_at_end(self, now: float) -> list[OutgoingFrame]:
        """Answer all snapshots that ranks took after their return, once all have returned.

        Earlier nothing may wait for it: a rank that trains on must not wait for one that saves.
        """
        lost_ranks = self._ranks.disconnected
        decision = decide_save_at_end(self._ends, world_size=self.world_size, lost_ranks=lost_ranks)
        if isinstance(decision, CommitSnapshots):
            return self.reports.save_at_end(self._ends, now)
        if isinstance(decision, StepsUnsaved):
            self.has_lost_save_at_end = bool(lost_ranks)
            self.reports.record_unsaved(decision.reason)
        return [
            (rank, DiscardSnapshotAtEnd()) for rank, end in self._ends.items() if end.has_snapshot
        ]

    # --- collectives ---------------------------------------------------------------------------

    def check_timeouts(self, now: float) -> list[OutgoingFrame]:
        """Abort collectives after their timeout; return the aborts and warnings for workers."""
        return self._collectives.check_timeouts(now, self._missing_ranks)

    def next_timeout_check(self) -> float | None:
        """Event-loop time in seconds to call `check_timeouts`; None if no collective is pending."""
        return self._collectives.next_timeout_check()

    def _join_broadcast(
        self, rank: int, request: RankZeroBroadcast, now: float
    ) -> list[OutgoingFrame]:
        if request.kind == REPORT_KIND:  # joined by reports only, which have no value of rank 0
            raise IntegrityError(
                f"'rank_zero_broadcast' is invalid: the kind {REPORT_KIND!r} is reserved.",
                do="Use the functions of spotfit for collectives.",
            )
        if request.all_values and len(request.value) > MAX_GATHERED_BYTES:
            raise IntegrityError(
                f"'rank_zero_broadcast' is invalid: its value has {len(request.value)} bytes; the "
                f"limit of an all-gather is {MAX_GATHERED_BYTES}.",
                do="Use the functions of spotfit for collectives.",
            )
        self.has_checkpointer |= request.kind == CHECKPOINTER_KIND
        key = CollectiveKey(request.kind, request.seq)
        if (result := self._partial_broadcasts.get(key)) is not None:
            return [(rank, result)]
        self._collectives.join(
            rank, key, now, value=request.value, is_blocking=request.blocks_training
        )
        if request.all_values:
            return self._try_complete_gather(key)
        return self._try_complete_broadcast(key)

    def _try_complete_gather(self, key: CollectiveKey) -> list[OutgoingFrame]:
        """Return the values of all ranks, as one frame for all, if no rank is missing."""
        if self._missing_ranks(key):
            return []
        values = [value for _, value in sorted(self._collectives.close(key).items())]
        # One message per node: each has the values of all ranks.
        return [(None, RankZeroBroadcastResult(kind=key.kind, seq=key.seq, values=tuple(values)))]

    def _try_complete_broadcast(self, key: CollectiveKey) -> list[OutgoingFrame]:
        """Return rank 0's value for all joined ranks if no required rank is missing."""
        if self._missing_ranks(key):
            return []
        values = self._collectives.close(key)
        result = RankZeroBroadcastResult(kind=key.kind, seq=key.seq, value=values[0])
        # Excluded ranks that join later must get the same value as the others.
        if len(values) < self.world_size:
            self._partial_broadcasts[key] = result
        return [(rank, result) for rank in values]

    def _missing_ranks(self, key: CollectiveKey) -> set[int]:
        """Return the required ranks that have not joined."""
        if key.kind == REPORT_KIND:
            return set(self.reports.find_missing_ranks(key.seq))
        # Collectives of the user stay strict; ours may complete without excluded ranks.
        optional = self._ranks.excluded if key.kind == "preemption_info" else frozenset()
        return set(range(self.world_size)) - self._collectives.joined_ranks(key) - optional


# --- Synchronization of a round's workers with the hooks of the user's backend  -------------------


_HOOK_PHASES: tuple[tuple[BackendHook, WorkerPhase], ...] = (
    ("on_start", "setup"),
    ("on_training_start", "train"),
    ("on_shutdown", "leave"),
)
"""Each hook, and the phase that workers enter after it has returned."""


class BackendHookGates:
    """Runs the hooks of one round on the leader, and forwards the worker calls that hooks make."""

    def __init__(
        self,
        coordinator: RoundCoordinator,
        backend_hook_runner: BackendHookRunner,
        resources: Mapping[str, float],
    ) -> None:
        self._coordinator = coordinator
        self._backend_hook_runner = backend_hook_runner
        self._resources = resources
        self._phase_index = 0
        """Number of gates that were opened."""
        self._is_hook_submitted = False

    @property
    def is_done(self) -> bool:
        """Whether the last hook, `on_shutdown`, has returned and its gate was opened."""
        return self._phase_index == len(_HOOK_PHASES)

    def advance(self) -> list[OutgoingFrame]:
        """Submit the next hook if all ranks wait for it; open the gate of a hook that has returned.

        Called at each tick; does not block. Also passes worker calls of hooks and their results on.
        Returns the frames for workers, as pairs of rank (None: all) and message.
        """
        # Answers of workers first: the hook that runs may return because of them.
        while self._coordinator.call_results:
            rank, result = self._coordinator.call_results.popleft()
            self._backend_hook_runner.deliver_call_result(self._coordinator.round, rank, result)
        all_ranks = tuple(range(self._coordinator.world_size))
        frames: list[OutgoingFrame] = []
        for call in self._backend_hook_runner.drain_worker_calls():
            # One frame per node instead of one per rank if all ranks are called.
            ranks: tuple[int | None, ...] = (None,) if call.ranks == all_ranks else call.ranks
            # Calls for an earlier round were failed by `abandon_round`.
            if call.round == self._coordinator.round:
                frames += [
                    (rank, CallFunction(call_id=call.call_id, pickled_call=call.pickled_call))
                    for rank in ranks
                ]
        # The calls first: their hook made them before it returned, which opens the gate.
        if self.is_done:
            return frames
        hook, phase = _HOOK_PHASES[self._phase_index]
        if not self._is_hook_submitted and self._coordinator.are_all_at_gate(phase):
            self._is_hook_submitted = True
            self._submit_hook(hook)
        if self._is_hook_submitted and self._backend_hook_runner.is_done(
            hook, self._coordinator.round
        ):
            # At most one gate per call: no rank is at the next gate before it passes this one.
            self._phase_index, self._is_hook_submitted = self._phase_index + 1, False
            frames.append((None, OpenGate(phase=phase)))
        return frames

    def abandon_workers(self) -> None:
        """Fail present and later worker calls of the round's hooks, because the round has failed.

        A repeated call is harmless.
        """
        self._backend_hook_runner.abandon_round(self._coordinator.round)

    def close(self) -> None:
        """End the round: fail worker calls, and queue `on_shutdown` if it is due, without waiting.

        It is due if `on_start` has returned and `on_shutdown` was not submitted, also without
        workers.
        """
        # First: the hook that is running would wait forever for workers that were killed.
        self.abandon_workers()
        is_shutting_down = (
            self._is_hook_submitted and _HOOK_PHASES[self._phase_index][0] == "on_shutdown"
        )
        # `_phase_index` > 0: on_start has returned, so there is something to shut down.
        if self._phase_index and not self.is_done and not is_shutting_down:
            self._submit_hook("on_shutdown")

    def _submit_hook(self, hook: BackendHook) -> None:
        self._backend_hook_runner.submit(
            hook, self._coordinator.round, self._coordinator.world_size, self._resources
        )
