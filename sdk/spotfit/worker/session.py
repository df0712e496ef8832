"""The session of one worker in one round: reports, checkpoints, collectives, preemption notices.

The states of a report with files:

| state       | event                                           | next                       |
|-------------|-------------------------------------------------|----------------------------|
| sent        | `CheckpointNamed` with a name                   | uploading                  |
| sent        | `CheckpointNamed` without a name                | dropped (logged)           |
| sent        | failed collective "report"                      | error raised to the user   |
| uploading   | uploaded by this process (SYNC, upload_fn)      | uploaded                   |
| uploading   | `Uploaded` by the agent (ASYNC)                 | uploaded                   |
| uploading   | an error of the upload in this process          | failed; raised to the user |
| any         | `UploadFailed`: another rank's files are lost   | failed                     |
| uploaded    | `ReportsSettled`                                | committed                  |
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from spotfit.checkpoint.checkpoint_dir import Checkpoint, store_path
from spotfit.checkpoint.committed import (
    CheckpointReport,
    ReportedCheckpoint,
    open_all,
    open_committed,
    open_uncommitted,
    read_data_positions,
)
from spotfit.checkpoint.manifest import Manifest, manifest_digest
from spotfit.checkpoint.snapshot_channel import GroupOutlook
from spotfit.checkpoint.writer import (
    UploadJob,
    UploadQueue,
    delete_local_copy,
    run_upload_job,
    save_existing_files,
    upload_with_user_fn,
)
from spotfit.code import function_pickle
from spotfit.code.code_bundle import DATASETS
from spotfit.code.function_pickle import pickle_object, unpickle
from spotfit.core.cached import cached_property
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import CollectiveTimeoutError, ConfigError, SessionMisuseError
from spotfit.core.ids import RunId
from spotfit.core.units import format_bytes
from spotfit.host import log
from spotfit.host.system import SystemClock, wall_ms
from spotfit.ledger.journal import Journal
from spotfit.model.config import unknown_dataset_error
from spotfit.model.events import CheckpointCommitted
from spotfit.model.reporting import (
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    metrics_from_json,
    metrics_to_json,
)
from spotfit.model.spec import RetentionConfig, RunSpec
from spotfit.model.topology import FeederAddress, PreemptionInfo
from spotfit.model.view import JournalView
from spotfit.policy.preemption import DEFAULT_NOTICE_S
from spotfit.policy.retention import checkpoints_to_drop, worst_to_best
from spotfit.protocol.agent_peer import REPLICATION_BYTES_PER_S
from spotfit.protocol.worker_agent import (
    MAX_GATHERED_BYTES,
    AwaitReports,
    CallFunction,
    CheckpointNamed,
    CollectiveWaiting,
    CommitConfirmed,
    DataWaited,
    DiscardSnapshotAtEnd,
    FeedersChanged,
    FilesReport,
    OpenGate,
    PreemptionUpdate,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    ReportsSettled,
    RequestFinalSave,
    RequestUpload,
    SaveCompleted,
    SaveFailed,
    StartWorker,
    SuggestSave,
    ToWorker,
    Uploaded,
    UploadFailed,
    ValidationFinished,
)
from spotfit.security.run_key import make_tls_contexts
from spotfit.store.api import Store
from spotfit.worker.agent_connection import AgentConnection, HookCallExecutor, Inbox
from spotfit.worker.agent_snapshots import AgentSnapshotChannel
from spotfit.worker.training_api import TrainContext

if TYPE_CHECKING:
    from spotfit.data.feeding.worker_feeders import WorkerFeeders
    from spotfit.data.rank_shards import DatasetShards, TrainerDatasets

WAIT_WARNING_S = 60.0
_SAME_CALLS_REMEDY = "All ranks must make the same calls in the same order; compare their logs."
# Broadcasts pass through the leader: small values such as file names are what they are made for.
LARGE_BROADCAST_BYTES = 1024
_MAX_BROADCAST_BYTES = 4 * 2**20
# A function that only reports never waits, so it must empty its socket now and then; doing so at
# every report would double the cost of the call.
_REPORTS_PER_DRAIN = 256

_MAX_REASON_CHARS = 1000

ResultT = TypeVar("ResultT")
_metrics_decoder = decoder(dict[str, Any])
_preempted_decoder: msgspec.json.Decoder[PreemptionUpdate | None] = msgspec.json.Decoder(
    PreemptionUpdate | None
)
_spec_decoder = decoder(RunSpec)


class Session:
    """The `TrainSession` of one worker in one round. Its process ends with the round.

    Args:
        store: Rooted at the run's directory.
        devices: The accelerators of this worker, such as ("cuda:0",).
        pickled_datasets: The trainer's datasets; b"" if it has none.
        on_upload_error: Called in the upload thread if a background upload fails. By default it
            reports the error and exits the process, because the training function cannot be
            interrupted.
    """

    def __init__(
        self,
        start: StartWorker,
        connection: AgentConnection,
        store: Store,
        *,
        devices: tuple[str, ...] = (),
        pickled_datasets: bytes = b"",
        on_upload_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.context = TrainContext(start, store)
        self.devices = devices
        self._pickled_datasets = pickled_datasets
        self._start = start
        self._connection = connection
        self._store = store
        self._journal = Journal(store)
        self._clock = SystemClock()
        self._uploads = UploadQueue(on_upload_error or self._exit_with_error)
        self.report_count = 0
        """The number of reports made in this round."""
        self.files_report_count = 0
        self.progress: float | None = None
        """How many of them brought files; snapshots of a Checkpointer do not count."""
        self._collective_counts: Counter[str] = Counter()
        self._inbox = Inbox(connection, self._on_message, self._clock)
        self.hook_calls = HookCallExecutor(
            connection, self._inbox, has_hooks=start.has_backend_hooks
        )
        self.snapshot_channel = AgentSnapshotChannel(self, start, connection, store=store)
        self._assigned_names: dict[int, CheckpointNamed] = {}
        self._collective_results: dict[tuple[str, int], RankZeroBroadcastResult] = {}
        self._settled_reports = 0
        """The number of first reports whose checkpoints are known to be committed or failed."""
        self._finished_validations = 0
        """The number of validations that have ended since the start of the round."""
        self._delegated_reports: set[int] = set()
        """Reports whose upload by the agent is not confirmed yet."""
        self._has_read_checkpoints = False
        """Whether the function has asked for a checkpoint to resume from."""
        self._latest_upload: tuple[int, str, str] | None = None
        """Report index, checkpoint name and folder of the latest report that is uploaded."""
        self._preemption: PreemptionUpdate | None = None
        self._feeders: tuple[FeederAddress, ...] = ()
        self._rebalance_recommendation: tuple[float, str] | None = None
        self._final_save_request: tuple[float, str] | None = None

    @property
    def host(self) -> str:
        """The address at which other nodes reach this node; read by simulated clouds."""
        return self._start.host

    # --- reports -----------------------------------------------------------------------------

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Send this worker's next report, without files, to the agent.

        Does not wait for other ranks. `dir_name` is the `checkpoint_dir_name` of `report()`. Raises
        `ConfigError` (a ValueError) if the metrics are not JSON-serializable; then no report is
        made.
        """
        # Serialized first: metrics that are not JSON raise without taking a report index.
        body = metrics_to_json(metrics)
        n = self.allocate_report_index()
        self._connection.send_report(n, body, dir_name)
        if n % _REPORTS_PER_DRAIN == 0:
            self.drain()

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        """Wait for the checkpoint name that all ranks share, then upload or start the upload.

        SYNC and NO_UPLOAD return when the files are in the store; a failed upload raises. ASYNC
        returns after handing the upload to the agent, or to a thread if there is an `upload_fn`.
        Returns without an upload, with a warning, if the leader completed the report without this
        rank. Raises `ConfigError` before the report is sent if it is invalid, and
        `CollectiveTimeoutError` or `SessionMisuseError` if another rank does not report.
        """
        # All checks come first: an error after the report was sent would leave other ranks waiting.
        self._check_report(report)
        self._warn_if_not_resumed()
        n = self._send_checkpoint_report(metrics, report)
        named = self._wait_for_name(n)
        if not named.checkpoint_name:
            # The leader has completed the report without this rank: its files are not uploaded.
            log.warning("report.excluded", rank=self._start.rank, n=n)
            return
        job = self._make_upload_job(named, report)
        in_background = report.upload_mode is CheckpointUploadMode.ASYNC
        # A job with a parent shares files of this rank's earlier upload, which must be complete. A
        # synchronous report promises that everything reported before is uploaded, too.
        if job.parent or not in_background:
            self.wait_for_uploads()
        # In this thread, so that an error of the upload is raised by `report()`.
        if not in_background:
            self._upload(job, report)
        elif report.upload_fn is None:
            self._delegated_reports.add(n)
            # The agent completes the upload even if this process dies.
            self._connection.send(
                RequestUpload(
                    report_index=n, checkpoint_name=job.manifest.name, upload_job=job.to_bytes()
                )
            )
        else:
            # The user's function may depend on objects of this process, so it must run here.
            self._uploads.put(partial(self._upload, job, report))

    def _warn_if_not_resumed(self) -> None:
        """Warn at the first checkpoint of a function that ignored the one it should resume from."""
        name = self._start.checkpoint
        # A Checkpointer reads its own checkpoints and gives its own warning.
        if self._has_read_checkpoints or name is None or self._start.has_snapshots:
            return
        self._has_read_checkpoints = True  # once
        if self._start.rank == 0:
            log.warning(
                "checkpoint.not_restored",
                text=f"this run has the checkpoint {name}, but the training function has not "
                "called get_checkpoint(): it trains from the beginning",
            )

    def _wait_for_name(self, n: int) -> CheckpointNamed:
        # A report is a collective: the leader either names the checkpoint once all ranks have
        # reported, or lets the collective "report" fail.
        def received() -> CheckpointNamed | RankZeroBroadcastResult | None:
            named = self._assigned_names.pop(n, None)
            return named or self._collective_results.pop(("report", n), None)

        reply = self.wait_for(received)
        if isinstance(reply, RankZeroBroadcastResult):
            raise self._make_collective_error(reply)
        assert isinstance(reply, CheckpointNamed)  # `wait_for` without a timeout
        return reply

    def allocate_report_index(self) -> int:
        """Return the index of this worker's next report in the round and count it as made.

        The first one is 0.
        """
        n, self.report_count = self.report_count, self.report_count + 1
        return n

    def wait_for_uploads(self) -> None:
        """Wait for all pending uploads of this worker, in this process and in the agent.

        Includes snapshots of a Checkpointer, whose failed uploads are only logged; a failed upload
        of reported files ends this process. Called after the training function returns, and before
        a synchronous report uploads.
        """
        self._uploads.wait()
        self.wait_for(lambda: None if self._delegated_reports else True, description="its uploads")
        self.snapshot_channel.wait_for_uploads()

    # --- checkpoints -------------------------------------------------------------------------

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from, for `get_checkpoint()`; None if there is none.

        The latest checkpoint of this round that this worker has uploaded, with the files that other
        ranks have uploaded so far; else the committed checkpoint from which the round has started.
        Raises `IntegrityError` if that is missing in the store.
        """
        self.drain()
        self._has_read_checkpoints = True
        if self._latest_upload is None:
            return self._initial_checkpoint
        _, name, folder = self._latest_upload
        return open_uncommitted(self._store, name, folder)

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of the trainer's dataset `name`, a `DataIterator`.

        The same object on every call. Raises `UnknownDatasetError` (a KeyError).
        """
        if not self._pickled_datasets:
            raise unknown_dataset_error(name, ())
        return self._dataset_shards.get(name)

    def data_positions(self) -> dict[str, dict[str, Any]]:
        """Return the positions in the datasets that were iterated, for a checkpoint.

        The batches that the training function has now count as trained on.
        """
        return self._dataset_shards.positions() if "_dataset_shards" in vars(self) else {}

    def resume_data(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the datasets at the positions of a snapshot that was restored.

        Raises `ConfigError` if a position belongs to other rows.
        """
        if self._pickled_datasets:
            self._dataset_shards.resume(positions)

    def data_end_error(self) -> ConfigError | None:
        """Return why a StopIteration of the training function would be raised in each retry.

        None if it has another cause than a pass that a restart had resumed.
        """
        return self._dataset_shards.end_error() if "_dataset_shards" in vars(self) else None

    def _initial_data_positions(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the positions of the checkpoint from which the round has started.

        Also if this rank has not asked for the checkpoint: where only rank 0 loads it, all ranks
        must continue at the same row.
        """
        name = self._start.checkpoint
        if name is None:
            return {}
        return read_data_positions(
            self._store, name, self._start.rank, digest=self._start.checkpoint_digest
        )

    def reported_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return the checkpoints of the run that retention keeps, worst to best, from the journal.

        Waits until the reports that this worker has made are settled: all ranks have made them, and
        their checkpoints, also those without files of this worker, are committed or have failed.
        With `VALIDATED`, waits until no validation of the run is pending. After `timeout_s` seconds
        (None: no limit) it returns the current state.
        """
        self._has_read_checkpoints = True
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        count = self.report_count
        # This worker knows nothing of checkpoints without files of its own: the leader answers.
        if self._settled_reports < count:
            self._connection.send(AwaitReports(report_count=count))
        self.wait_for(
            lambda: self._settled_reports >= count or None,
            description="its reports to be complete on all ranks, and committed",
            timeout_s=timeout_s,
        )
        # The journal is read after the wait, so that it contains these commits.
        if mode is CheckpointConsistencyMode.VALIDATED:
            view = self._wait_for_validations(deadline)
        else:
            view = self._journal.catch_up()
        retained = _retained_checkpoints(view, self._spec.retention)
        checkpoints = open_all(
            self._store, {commit.name: commit.manifests_digest for commit in retained}
        )
        return [
            ReportedCheckpoint(
                checkpoints[commit.name], metrics_from_json(commit.metrics), view.status_of(commit)
            )
            for commit in retained
        ]

    def _wait_for_validations(self, deadline: float | None) -> JournalView:
        """Return the view once no validation is pending, or the current view at the deadline."""
        has_timed_out = False
        while True:
            # Counted before the view is read: a validation that ends in between ends the wait.
            previous = self._finished_validations
            # The leader may start another validation meanwhile, so the view is read after each.
            view = self._journal.catch_up()
            pending = len(view.unvalidated_checkpoints)
            if has_timed_out or not pending or self._spec.validation is None:
                return view
            finished = self.wait_for(
                lambda: self._finished_validations > previous or None,  # noqa: B023 - awaited here
                description=f"{pending} checkpoints to be validated",
                timeout_s=None if deadline is None else deadline - self._clock.now(),
            )
            has_timed_out = finished is None

    # --- collectives -------------------------------------------------------------------------

    def broadcast_bytes(
        self, kind: str, value: bytes = b"", timeout_s: float | None = None
    ) -> bytes:
        """Return rank 0's `value` once all ranks have joined; the values of others are ignored.

        The n-th calls with the same `kind`, such as "barrier", on all ranks form one collective.
        Raises `CollectiveTimeoutError` after `timeout_s` seconds on this worker (None: only the
        run's limit, SPOTFIT_COLLECTIVE_TIMEOUT_S, applies) and `SessionMisuseError` if a rank
        cannot join any more, for instance because its training function has returned.
        """
        return self._join_collective(kind, value, timeout_s=timeout_s).value

    def all_gather_bytes(
        self, kind: str, value: bytes, timeout_s: float | None = None
    ) -> tuple[bytes, ...]:
        """Return the values of all ranks, ordered by rank, once all ranks have joined.

        `value` may have at most `MAX_GATHERED_BYTES`; a larger one raises `ConfigError`. Numbers
        and raises as `broadcast_bytes`; a kind must not be used for both.
        """
        if len(value) > MAX_GATHERED_BYTES:
            raise ConfigError(
                f"The value of rank {self._start.rank} in the all-gather {kind!r} has "
                f"{format_bytes(len(value))}; the limit is {format_bytes(MAX_GATHERED_BYTES)}.",
                do="Gather addresses and small numbers only; exchange arrays through the process "
                "group of the training library.",
            )
        return self._join_collective(kind, value, all_values=True, timeout_s=timeout_s).values

    def _join_collective(
        self, kind: str, value: bytes, *, all_values: bool = False, timeout_s: float | None
    ) -> RankZeroBroadcastResult:
        # Numbered per kind: the n-th calls of a kind on all ranks belong together.
        # Counted before the wait, so that a call that times out does not shift the later ones.
        seq = self._collective_counts[kind]
        self._collective_counts[kind] += 1
        self._connection.send(
            RankZeroBroadcast(
                kind=kind,
                seq=seq,
                value=value,
                all_values=all_values,
                blocks_training=_is_main_thread(),
            )
        )
        result = self.wait_for(
            partial(self._collective_results.pop, (kind, seq), None), timeout_s=timeout_s
        )
        if result is None:
            raise CollectiveTimeoutError(
                f"The collective {kind} timed out after {timeout_s} s on rank {self._start.rank}: "
                "not all ranks have joined.",
                do=_SAME_CALLS_REMEDY,
            )
        if result.missing_ranks or result.reason:
            raise self._make_collective_error(result)
        return result

    def _make_collective_error(
        self, result: RankZeroBroadcastResult
    ) -> CollectiveTimeoutError | SessionMisuseError:
        missing = ", ".join(str(rank) for rank in result.missing_ranks)
        if result.reason:
            return SessionMisuseError(
                f"{result.kind} on rank {self._start.rank} cannot complete: {result.reason}.",
                do=_SAME_CALLS_REMEDY,
            )
        limit_s = self._start.collective_timeout_s
        return CollectiveTimeoutError(
            f"The collective {result.kind} timed out after {limit_s} s: these ranks have not "
            f"joined: [{missing}].",
            do=f"{_SAME_CALLS_REMEDY} The environment variable SPOTFIT_COLLECTIVE_TIMEOUT_S sets "
            "the timeout.",
            missing=result.missing_ranks,
        )

    def barrier(self) -> None:
        """Wait until all ranks of the round have called this.

        Raises what `broadcast_bytes` raises.
        """
        self.broadcast_bytes("barrier")

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank, for `broadcast_from_rank_zero()`.

        The value is pickled. Blocks until all ranks have called it. On rank 0, raises
        `ShippingError` if the value cannot be pickled and `ConfigError` if it exceeds 4 MiB
        pickled; a warning is logged above 1 KiB. Raises what `broadcast_bytes` raises.
        """
        pickled = b""  # values of other ranks are ignored, so they need not be picklable
        if self._start.rank == 0:
            parts = {"broadcast": value}
            pickled = pickle_object(value, labeled_parts=parts, by_value_modules=()).body
        if len(pickled) > LARGE_BROADCAST_BYTES:
            log.warning(
                "worker.large_broadcast",
                size=format_bytes(len(pickled)),
                reason="every broadcast passes through the leader; use it for small values",
            )
        if len(pickled) > _MAX_BROADCAST_BYTES:
            raise ConfigError(
                f"The value of broadcast_from_rank_zero has {format_bytes(len(pickled))}; the "
                f"limit is {format_bytes(_MAX_BROADCAST_BYTES)}.",
                do="Broadcast tensors with torch.distributed, and files through a checkpoint.",
            )
        received = self.broadcast_bytes("broadcast_from_rank_zero", pickled)
        return unpickle(received, description="broadcast")

    def drain(self) -> None:
        """Process the agent's messages that have arrived, in this thread, without waiting."""
        self._inbox.drain()

    def outlook(self) -> GroupOutlook:
        """Return notices and estimates about the worker group, as this rank knows them now.

        Used by a Checkpointer to schedule saves. Does not block. `time_to_preemption_s` is in
        seconds from now: 120 after a notice without a deadline, negative after the deadline, None
        without a notice.
        """
        self.drain()
        notice = self._preemption
        preempted_ranks = sum(map(len, notice.node_to_ranks.values())) if notice else 0
        # A notice without a deadline counts as one of the usual length that arrives now.
        time_left_s = None if notice is None else DEFAULT_NOTICE_S
        if notice is not None and notice.deadline_ms:
            time_left_s = (notice.deadline_ms - wall_ms()) / 1000
        # A replica on a node that is preempted as well does not help.
        peer_stays = self._start.replica_target and preempted_ranks < self._start.world_size
        return GroupOutlook(
            allows_resize=self._spec.min_workers < self._spec.max_workers,
            failure_model=self._start.failure_model,
            time_to_preemption_s=time_left_s,
            replacement_ready=notice is not None and notice.replacement_ready,
            rebalance_recommendation=self._rebalance_recommendation,
            final_save_request=self._final_save_request,
            # The ranks of a node share its replication bandwidth.
            peer_bytes_per_s=(
                REPLICATION_BYTES_PER_S / self._start.local_world_size if peer_stays else 0.0
            ),
        )

    def wait_for_preemption(self, timeout_s: float) -> bool:
        """Wait for a preemption notice of the group; return False after `timeout_s` seconds.

        Returns True at once if a notice has arrived in this round before. For simulated clouds.
        """
        return self._inbox.wait(lambda: self._preemption, timeout_s) is not None

    def preemption_info(self) -> PreemptionInfo | None:
        """Return the preemption notices that rank 0 knows; None if it knows none.

        A collective of all ranks, so that all take the same decision; raises what `broadcast_bytes`
        raises.
        """
        self.drain()
        update = _preempted_decoder.decode(
            self.broadcast_bytes("preemption_info", encode(self._preemption))
        )
        if update is None:
            return None
        nodes = {node: list(ranks) for node, ranks in update.node_to_ranks.items()}
        return PreemptionInfo(update.deadline_ms or None, nodes)

    # --- saving ------------------------------------------------------------------------------

    def _send_checkpoint_report(self, metrics: dict[str, Any], report: CheckpointReport) -> int:
        name = report.dir_name
        if name is None and report.upload_mode is CheckpointUploadMode.NO_UPLOAD:
            # The files are in the run's directory already: their folder names the checkpoint.
            folder = self._folder_in_run(report.checkpoint)
            name = folder if "/" not in folder else None
        body = msgspec.Raw(metrics_to_json(metrics))  # may raise, so before the index is taken
        n = self.allocate_report_index()
        self.files_report_count += 1
        self._connection.send(
            FilesReport(
                report_index=n,
                metrics=body,
                checkpoint_dir_name=name,
                blocks_training=_is_main_thread(),
                validation=report.validation,
                progress=self.progress,
                managed_upload=report.upload_fn is None
                and report.upload_mode is not CheckpointUploadMode.NO_UPLOAD,
            )
        )
        return n

    def _make_upload_job(self, named: CheckpointNamed, report: CheckpointReport) -> UploadJob:
        manifest = Manifest(
            name=named.checkpoint_name,
            round=self._start.round,
            report_index=named.report_index,
            rank=self._start.rank,
            ranks=named.ranks,
            metrics=_metrics_decoder.decode(named.metrics),
            files=(),
            validation=report.validation,
            data_positions=self.data_positions(),
            default_metadata=self._start.default_metadata,
        )
        return UploadJob(
            report.checkpoint,
            manifest,
            parent=named.parent,
            delete_after_upload=report.delete_after_upload,
        )

    def _upload(self, job: UploadJob, report: CheckpointReport) -> None:
        try:
            manifest = self._upload_files(job, report)
        except Exception as error:
            # The training function may catch it and continue: nothing may wait for these files.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_REASON_CHARS]
            failed = SaveFailed(report_index=job.manifest.report_index, reason=reason)
            self._connection.send(failed)
            raise
        self._record_upload(manifest.report_index, manifest.name, manifest.folder)
        self._connection.send(
            SaveCompleted(
                report_index=manifest.report_index,
                checkpoint_name=manifest.name,
                size_bytes=manifest.size_bytes,
                custom_folder=manifest.custom_folder,
                manifest_digest=manifest_digest(manifest),
            )
        )
        # After the message: the commit need not wait for the deletion.
        if job.delete_after_upload:
            delete_local_copy(job.checkpoint, self._store)

    def _upload_files(self, job: UploadJob, report: CheckpointReport) -> Manifest:
        if report.upload_mode is CheckpointUploadMode.NO_UPLOAD:
            # A script that needs metrics only may report a folder that was never written.
            return self._record_manifest(job, job.checkpoint, may_be_empty=True)
        if report.upload_fn is None:
            return run_upload_job(job, self._store)
        uploaded = upload_with_user_fn(report.upload_fn, job.checkpoint, job.manifest.name)
        return self._record_manifest(job, uploaded)

    def _record_manifest(
        self, job: UploadJob, checkpoint: Any, *, may_be_empty: bool = False
    ) -> Manifest:
        folder = self._folder_in_run(checkpoint)
        manifest = msgspec.structs.replace(job.manifest, custom_folder=folder)
        return save_existing_files(
            self._store, manifest, parent=job.parent, may_be_empty=may_be_empty
        )

    def _record_upload(self, report_index: int, name: str, folder: str) -> None:
        # Uploads by the agent and by this process may end in another order than their reports.
        if self._latest_upload is None or report_index > self._latest_upload[0]:
            self._latest_upload = report_index, name, folder

    def _folder_in_run(self, checkpoint: Any) -> str:
        """Return the folder, relative to the run's root, of a checkpoint uploaded by the user."""
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigError(
                "report(checkpoint_upload_fn=...) must return a Checkpoint, not a "
                f"{type(checkpoint).__name__}.",
                do="Return Checkpoint(path) with the path to which the files were uploaded.",
            )
        folder = checkpoint.folder_relative_to(self._store)
        # Folders that start with a dot are reserved for the journal and other internal objects.
        if folder is None or folder.startswith("."):
            raise ConfigError(
                f"The checkpoint at {checkpoint.path} is outside the experiment directory "
                f"{store_path(self._store)}.",
                do="Write the checkpoint below get_context().get_storage().experiment_fs_path.",
            )
        return folder

    def _check_report(self, report: CheckpointReport) -> None:
        if report.validation is not None and self._spec.validation is None:
            raise ConfigError(
                "report(validation=…) was called, but the trainer has no validation_config.",
                do="Pass validation_config to the trainer, or omit validation.",
            )
        if report.upload_mode is CheckpointUploadMode.NO_UPLOAD:
            self._folder_in_run(
                report.checkpoint
            )  # raises before the other ranks wait for this one
        local = report.checkpoint.local_directory
        if (
            report.delete_after_upload
            and local
            and Path(store_path(self._store)).is_relative_to(local)
        ):
            raise ConfigError(
                f"The checkpoint directory {local} contains the experiment directory, which would "
                "be deleted with it after the upload.",
                do="Save checkpoints in a separate directory.",
            )

    # --- messages of the agent ---------------------------------------------------------------

    def wait_for(
        self,
        ready: Callable[[], ResultT | None],
        *,
        description: str | None = None,
        timeout_s: float | None = None,
    ) -> ResultT | None:
        """Wait until `ready()` is not None and return its value; None after `timeout_s` seconds.

        `ready` is called first and after each message of the agent, under the inbox's lock. Without
        `timeout_s` it waits indefinitely. With a `description`, such as "its uploads", a warning
        with it is logged every `WAIT_WARNING_S` (60 s).
        """
        started_at = self._clock.now()
        while True:
            waited_s = self._clock.now() - started_at
            left_s = math.inf if timeout_s is None else timeout_s - waited_s
            found = self._inbox.wait(ready, min(WAIT_WARNING_S, left_s))
            if found is not None or left_s <= 0:
                return found
            if description is not None and left_s >= WAIT_WARNING_S:
                log.warning(
                    "worker.waiting", rank=self._start.rank, what=description, elapsed_s=waited_s
                )

    def _on_message(self, message: ToWorker) -> None:
        if self.snapshot_channel.on_message(message):
            return
        match message:
            case CheckpointNamed():
                self._assigned_names[message.report_index] = message
            case RankZeroBroadcastResult():
                self._collective_results[message.kind, message.seq] = message
            case ReportsSettled():
                self._settled_reports = max(self._settled_reports, message.report_count)
            case Uploaded():
                self._delegated_reports.discard(message.report_index)
                self._record_upload(
                    message.report_index, message.checkpoint_name, message.checkpoint_name
                )
            case UploadFailed(report_index=n, reason=reason):
                log.warning("checkpoint.failed", rank=self._start.rank, n=n, reason=reason)
            # Only counted: the result is read from the journal.
            case ValidationFinished():
                self._finished_validations += 1
            case CommitConfirmed() | DiscardSnapshotAtEnd():
                pass  # for the snapshot channel and for the agent
            case PreemptionUpdate():
                self._preemption = message
            case FeedersChanged(feeders=feeders):
                self._feeders = feeders
            case SuggestSave(reason=reason):
                self._rebalance_recommendation = (self._clock.now(), reason)
            case RequestFinalSave(reason=reason):
                self._final_save_request = (self._clock.now(), reason)
            case CollectiveWaiting():
                self._log_waiting(message)
            case CallFunction() | OpenGate():
                self.hook_calls.on_message(message)
            case StartWorker():
                raise AssertionError("a worker process runs one round")

    def _log_waiting(self, waiting: CollectiveWaiting) -> None:
        log.warning(
            "collective.waiting",
            operation=waiting.kind,
            missing_ranks=", ".join(map(str, waiting.missing_ranks)),
            elapsed_s=round(waiting.waited_s),
        )

    def _exit_with_error(self, error: BaseException) -> None:
        self._connection.send(function_pickle.to_failure_message(error))
        # The training function may be inside a collective or C code, which nothing else interrupts.
        os._exit(1)

    @cached_property
    def _initial_checkpoint(self) -> Checkpoint | None:
        name = self._start.checkpoint
        if name is None:
            return None
        return open_committed(self._store, name, digest=self._start.checkpoint_digest)

    @cached_property
    def _dataset_shards(self) -> DatasetShards:
        from spotfit.data.caching.cache_directories import set_scratch_directory
        from spotfit.data.iteration.shard import ShardGroup
        from spotfit.data.rank_shards import DatasetShards

        if self._start.scratch_dir:
            set_scratch_directory(self._start.scratch_dir)
        group = ShardGroup(
            rank=self._start.rank,
            world_size=self._start.world_size,
            world_sizes=tuple(range(self._spec.min_workers, self._spec.max_workers + 1)),
            # Continued runs keep their id, and with it the order of their data.
            seed=int(hashlib.sha256(self._start.run_id.encode()).hexdigest()[:8], 16),
        )
        datasets: TrainerDatasets = unpickle(self._pickled_datasets, description=DATASETS)
        feeders = self._open_feeders(datasets) if self._spec.feeders is not None else None
        return DatasetShards(
            datasets,
            group,
            self._initial_data_positions,
            device=next(iter(self.devices), "cpu"),
            feeders=feeders,
        )

    def _open_feeders(self, datasets: TrainerDatasets) -> WorkerFeeders:
        from spotfit.data.feeding.worker_feeders import FeederSources, WorkerFeeders

        assert self._spec.feeders is not None
        run_id = RunId(self._start.run_id)
        sources = FeederSources(
            read_addresses=self._read_feeders,
            report_wait=lambda waited_s, elapsed_s: self._connection.send(
                DataWaited(waited_s=waited_s, elapsed_s=elapsed_s)
            ),
            make_tls=lambda: make_tls_contexts(self._start.secret, run_id).client,
        )
        return WorkerFeeders(
            datasets.datasets,
            self._pickled_datasets,
            sources,
            processes=self._spec.feeders.processes_per_worker,
            workers_of_machine=self._start.local_world_size,
            max_nodes=self._spec.feeders.max_nodes,
            log_level=self._spec.log_level,
            scratch_dir=self._start.scratch_dir,
        )

    def _read_feeders(self) -> tuple[FeederAddress, ...]:
        """Return the machines with feeders, as the leader knows them; from any thread."""
        self.drain()
        return self._feeders

    # Decoded on first use: most training functions need nothing of it.
    @cached_property
    def _spec(self) -> RunSpec:
        return _spec_decoder.decode(self._start.spec)


def _retained_checkpoints(
    view: JournalView, retention: RetentionConfig
) -> list[CheckpointCommitted]:
    """Return the checkpoints worst to best, without those that the leader will delete next."""
    pending = {commit.name for commit in view.unvalidated_checkpoints}
    dropped = {
        commit.name
        for commit in checkpoints_to_drop(view.checkpoints, retention, protected=pending)
    }
    ordered = worst_to_best(view.checkpoints, retention)
    return [commit for commit in ordered if commit.name not in dropped]


def _is_main_thread() -> bool:
    """Return whether this is the thread of the training function."""
    return threading.current_thread() is threading.main_thread()
