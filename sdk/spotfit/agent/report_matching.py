"""`ReportMatcher`: matches the reports of all ranks by number and follows their checkpoints.

The n-th report of every rank is one report of the group. A rank without files does not wait. A rank
with files waits until all ranks have made their n-th report, because rank 0 chooses the name and
the manifest lists the other ranks that upload files.

The reports that are not delivered yet are the entries of one dictionary by report number:

| state  | event                                             | next                               |
|--------|---------------------------------------------------|------------------------------------|
| (none) | first files report, or failure, of any rank       | Open                               |
| Open   | all required ranks have reported; files expected  | Saving (ranks receive the name)    |
| Open   | all required ranks have reported; a part is lost  | Matched without a checkpoint       |
| (none) | all required ranks have reported; no files        | Matched without a checkpoint       |
| Saving | all ranks have uploaded; no earlier one is Saving | Matched; checkpoint is ready       |
| Saving | a rank failed, disagrees or has left              | Matched without a checkpoint       |
| Matched| no earlier report is Saving                       | removed; in `matched_reports`      |
| (none) | `save_at_end`: all ranks have returned            | Saving                             |

Invariant: reports are delivered and become ready in the order of their numbers.

`ReportSink`: writes matched reports to the bucket as numbered chunks of JSON lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from spotfit.agent.collectives import REPORT_KIND, CollectiveKey, Collectives, OutgoingFrame
from spotfit.checkpoint.manifest import combine_digests
from spotfit.control.background_calls import BackgroundCalls, RetryingCalls
from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.core.units import format_ranks
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import ValidationRequest
from spotfit.model.leader_state import ReadyCheckpoint
from spotfit.model.reporting import SaveAtEnd
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    FilesReport,
    MetricsReport,
    ReportsSettled,
    SaveCompleted,
    UploadFailed,
)

# Bounds the leader's memory if one rank reports much faster than the others.
MAX_REPORT_BACKLOG = 10_000
"""Reports a rank may be ahead of the slowest before metrics of the oldest are discarded."""

_metrics_decoder: msgspec.json.Decoder[dict[str, Any]] = decoder(dict[str, Any])
_NO_METRICS = msgspec.Raw(b"{}")
_AT_END_REASON = "the training function has returned"


class MatchedReport(msgspec.Struct, frozen=True):
    """One report of the whole group, for callbacks and the metrics file."""

    report_index: int
    metrics_by_rank: tuple[msgspec.Raw, ...]
    checkpoint: str | None


class AssignedName(NamedTuple):
    """The name of a checkpoint, and whether it differs from what the user requested."""

    name: str
    is_generated: bool


@dataclass
class RankSets:
    """Ranks of a round by condition, shared by the coordinator and the matcher."""

    world_size: int
    returned: set[int] = field(default_factory=set)
    disconnected: set[int] = field(default_factory=set)
    """Ranks whose connection broke: frames of them may be lost, so later ones do not count."""
    excluded: frozenset[int] = frozenset()
    """Ranks on nodes with a preemption notice, which the others do not wait for."""

    @property
    def lost(self) -> frozenset[int]:
        """Excluded ranks (on nodes with a notice) that have disconnected: no frames follow."""
        return self.excluded & self.disconnected


@dataclass
class Open:
    """A report with files that not all required ranks have made."""

    is_user_uploaded: bool = False
    """Whether a rank uploads its files itself."""
    is_snapshot: bool = False
    """Whether a Checkpointer saves: then every rank has a part, and may share files."""
    reason: str = ""
    """Why the Checkpointer saves at this step."""
    progress: float | None = None
    """The share of the training that is done, of the rank that has done least."""
    failure_reason: str = ""
    """Why a part of the checkpoint is lost; '' otherwise."""
    validation_requests: dict[int, ValidationRequest | None] = field(default_factory=dict)

    def add_rank(self, rank: int, report: FilesReport) -> None:
        """Add the report with files that one global rank has made. Called once per rank."""
        self.is_user_uploaded |= not report.managed_upload
        self.is_snapshot |= report.incremental
        self.reason = report.reason or self.reason
        if report.progress is not None:
            known = report.progress if self.progress is None else self.progress
            self.progress = min(report.progress, known)
        self.validation_requests[rank] = report.validation

    def incomplete_reason(self, ranks: Sequence[int], world_size: int) -> str:
        """Return why the checkpoint cannot become complete; '' if it can.

        `ranks` are those that made the report and can still upload. Only a snapshot needs all ranks
        of the group.
        """
        missing = sorted(set(range(world_size)).difference(ranks)) if self.is_snapshot else []
        left = f"ranks {missing} left without their part of the snapshot" if missing else ""
        return self.failure_reason or left


@dataclass(eq=False)
class Saving:
    """A matched report whose files are being uploaded by `ranks`."""

    report_index: int
    name: str
    parent: str
    """Committed checkpoint whose files this one may share; '' for none."""
    ranks: tuple[int, ...]
    metrics: dict[str, Any]
    metrics_by_rank: tuple[msgspec.Raw, ...]
    reported: Open
    reported_at: float
    """When the last rank made its report."""
    done_ranks: set[int] = field(default_factory=set)
    size_bytes: int = 0
    step: int | None = None
    digest_by_rank: dict[int, str] = field(default_factory=dict)
    """The digest of each rank's manifest."""
    custom_folder: str = ""
    """Folder to which the first rank uploaded by itself; readers look for the files there."""

    @property
    def is_complete(self) -> bool:
        """Whether all of `ranks` have uploaded their files."""
        return self.done_ranks.issuperset(self.ranks)

    def add_rank(self, rank: int, upload: SaveCompleted) -> None:
        """Record that the files of that rank are stored in the bucket. Called once per rank."""
        self.done_ranks.add(rank)
        self.size_bytes += upload.size_bytes
        self.digest_by_rank[rank] = upload.manifest_digest
        self.step = upload.step
        if rank == self.ranks[0]:
            self.custom_folder = upload.custom_folder

    def to_ready_checkpoint(self, round_number: int) -> ReadyCheckpoint:
        """Return the checkpoint for the commit; call it once the upload is complete."""
        requests = self.reported.validation_requests
        return ReadyCheckpoint(
            name=self.name,
            round=round_number,
            report_index=self.report_index,
            metrics=self.metrics,
            ranks=self.ranks,
            size_bytes=self.size_bytes,
            validation=requests[min(requests)],  # the lowest rank with files decides
            is_snapshot=self.reported.is_snapshot,
            step=self.step,
            reason=self.reported.reason,
            progress=self.reported.progress,
            custom_folder=self.custom_folder,
            manifests_digest=combine_digests(self.digest_by_rank),
            snapshot_taken_at=self.reported_at if self.reported.is_snapshot else None,
        )


GroupReport = Open | Saving | MatchedReport
"""A `MatchedReport` is complete, and waits for earlier reports to be delivered."""


class ReportMatcher:
    """The reports of one round, on the leader.

    `default_checkpoint_name(n)` returns a name if rank 0 requested none. `parent_snapshot()`
    returns the committed snapshot to share files with, '' for none. `latest_checkpoint_named(name)`
    returns the checkpoint of earlier rounds under a requested name, '' if it is gone, None for a
    new name.

    Report numbers (`report_index`) count from 0 in each round and are equal on all ranks. Times are
    event-loop seconds.
    """

    def __init__(
        self,
        round_number: int,
        ranks: RankSets,
        collectives: Collectives,
        *,
        default_checkpoint_name: Callable[[int], str],
        parent_snapshot: Callable[[], str],
        latest_checkpoint_named: Callable[[str], str | None],
        keep_all_metrics: bool,
    ) -> None:
        self._round = round_number
        self._ranks = ranks
        self._collectives = collectives
        self._default_checkpoint_name = default_checkpoint_name
        self._parent_snapshot = parent_snapshot
        self._latest_checkpoint_named = latest_checkpoint_named
        self._keep_all_metrics = keep_all_metrics
        self._reports: dict[int, GroupReport] = {}
        self._saving: list[Saving] = []
        """The reports in state Saving, in order: a tick must not visit all that wait behind one."""
        self._report_counts = [0] * ranks.world_size
        self._matched_count = 0
        self._delivered_count = 0
        self._save_at_end_number: int | None = None
        """The number of the save after all ranks had returned; None without one."""
        self._unmatched_metrics: list[dict[int, tuple[msgspec.Raw, str | None]]] = [
            {} for _ in range(ranks.world_size)
        ]
        """By rank and report number: the metrics and the requested checkpoint name."""
        self._names_by_request: dict[str, str] = {}
        """The last name that was assigned in this round, by the requested name."""
        self._latest_metrics_json: msgspec.Raw | None = None
        self._awaited_reports: list[tuple[int, int]] = []
        """Rank and number of reports of each `AwaitReports` without an answer."""
        self.snapshot_reports: dict[int, int] = {}
        """The number of the latest report with a snapshot of each step."""
        self._last_save = (-1, "")
        """The last report with files that was saved or abandoned, and in this case the reason."""
        self.ready_checkpoints: list[ReadyCheckpoint] = []
        """Complete checkpoints without an entry in the journal."""
        self.matched_reports: deque[MatchedReport] = deque()
        """Reports to deliver, in order."""
        self.assigned_names: deque[AssignedName] = deque()
        """Names of uploads by spotfit, in order of assignment."""
        self.abandoned_checkpoints: set[str] = set()
        """Names of incomplete checkpoints, which are never committed."""

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint is being saved or uncommitted, and matched reports are delivered.

        Reports that not all required ranks have made do not count.
        """
        return not (self.is_saving or self.ready_checkpoints or self.matched_reports)

    @property
    def is_saving_at_end(self) -> bool:
        """Whether the snapshots that ranks took after their return are being uploaded."""
        return any(saving.report_index == self._save_at_end_number for saving in self._saving)

    @property
    def is_saving(self) -> bool:
        """Whether the files of any named checkpoint are being uploaded."""
        return bool(self._saving)

    @property
    def latest_metrics(self) -> dict[str, Any] | None:
        """Rank 0's metrics in the last matched report, decoded per access; None before the first.

        Automatic saves of a `Checkpointer` without metrics do not count.
        """
        if self._latest_metrics_json is None:
            return None
        return _metrics_decoder.decode(self._latest_metrics_json)

    @property
    def uploading_ranks(self) -> frozenset[int]:
        """Global ranks that have not uploaded their files of the oldest checkpoint being saved.

        Empty if no checkpoint is being saved.
        """
        if not self._saving:
            return frozenset()
        return frozenset(self._saving[0].ranks) - self._saving[0].done_ranks

    @property
    def uncommitted_names(self) -> set[str]:
        """Names of the checkpoints that are being uploaded or wait for their entry in the journal.

        The garbage collector must not delete them.
        """
        return {saving.name for saving in self._saving} | {
            ready.name for ready in self.ready_checkpoints
        }

    @property
    def parent_checkpoints(self) -> set[str]:
        """Names of committed checkpoints whose files are shared by uploads in progress."""
        return {saving.parent for saving in self._saving} - {""}

    @property
    def last_save_error(self) -> str:
        """Why the newest report with files was abandoned, or the last steps are not saved; or ''.

        Reports whose files are being uploaded do not count. '' also before the first report.
        """
        return self._last_save[1]

    @property
    def missing_reports(self) -> str:
        """Which ranks have made fewer reports than others, for users; '' if none.

        A report counts only once all required ranks have made it.
        """
        total, matched = max(self._report_counts), self._matched_count
        # The save at the end is none of the reports that the function has made.
        matched -= self._save_at_end_number is not None
        if matched >= total:
            return ""
        ranks = [rank for rank, count in enumerate(self._report_counts) if count < total]
        return (
            f"only {matched} of {total} reports were made by all ranks; "
            f"others are missing from {format_ranks(ranks)}"
        )

    @property
    def used_names(self) -> frozenset[str]:
        """All names that rank 0 requested in this round, or that were assigned for them.

        A requested name that is in use gets a suffix: `"best"` becomes `"best@3-17"`. Generated
        names are not included.
        """
        return frozenset(self._names_by_request)

    @property
    def settled_count(self) -> int:
        """How many reports, from the first on, wait for no commit of a checkpoint.

        Their checkpoints are committed or have failed, or they have none.
        """
        uncommitted = (ready.report_index for ready in self.ready_checkpoints)
        return min(uncommitted, default=self._delivered_count)

    # --- reports of ranks ----------------------------------------------------------------------

    def add_report(
        self, rank: int, report: MetricsReport | FilesReport, now: float
    ) -> list[OutgoingFrame]:
        """Add the next report of one rank; return the answers if it completes reports of the group.

        The answers are frames to send, by rank. `now`: event-loop time in seconds, from which
        timeouts of waiting ranks count. Raises `IntegrityError` if it is not the next report of
        this rank.
        """
        number = report.report_index
        has_files = isinstance(report, FilesReport)
        # Ranks number their reports without gaps.
        if number != self._report_counts[rank]:
            raise _invalid_report(f"report {number} follows {self._report_counts[rank]} others")
        self._report_counts[rank] += 1
        if number < self._matched_count:  # it was matched without this rank, which was excluded
            return [(rank, _answer_without_name(number))] if has_files else []
        if isinstance(report, FilesReport):
            self._open_report(number).add_rank(rank, report)
            if report.step is not None:
                self.snapshot_reports[report.step] = number
            self._collectives.join(
                rank, CollectiveKey(REPORT_KIND, number), now, is_blocking=report.blocks_training
            )
        if rank == 0 or self._keep_all_metrics:
            backlog = self._unmatched_metrics[rank]
            # Copied: the decoded value would keep the whole received frame in memory.
            metrics = msgspec.Raw(bytes(report.metrics))
            backlog[number] = (metrics, report.checkpoint_dir_name)
            # The first key is the oldest: a rank sends its reports in order.
            if len(backlog) > MAX_REPORT_BACKLOG:
                del backlog[next(iter(backlog))]
        return self.match_complete_reports(now)

    def await_reports(self, rank: int, report_count: int) -> None:
        """Record that a rank waits for the first reports; `answer_waiting` returns the answer."""
        self._awaited_reports.append((rank, report_count))

    def answer_waiting(self) -> list[OutgoingFrame]:
        """Return the frames for ranks whose awaited reports are settled, each once.

        Also for reports that can never be matched, because a rank has returned without them.
        """
        # The usual case: called at each tick.
        if not self._awaited_reports:
            return []
        settled = self.settled_count
        missing = set(self.find_missing_ranks(settled)) if settled == self._matched_count else set()
        is_last = not missing.isdisjoint(self._ranks.returned)
        answered = [one for one in self._awaited_reports if is_last or one[1] <= settled]
        self._awaited_reports = [one for one in self._awaited_reports if one not in answered]
        return [(rank, ReportsSettled(report_count=count)) for rank, count in answered]

    def match_complete_reports(self, reported_at: float) -> list[OutgoingFrame]:
        """Match all reports that every required rank has made; return the frames to send, by rank.

        Also called when fewer ranks are required. `reported_at`: event-loop time in seconds that
        counts as the time of the last rank's report.
        """
        frames: list[OutgoingFrame] = []
        while next(self.find_missing_ranks(self._matched_count), None) is None:
            frames += self._match_report(self._matched_count, reported_at)
            self._matched_count += 1
        return frames

    def find_missing_ranks(self, report_index: int) -> Iterator[int]:
        """Yield the required global ranks that have not made the report with that number.

        Excluded ranks (on nodes with a notice) are not required, except for a snapshot: then they
        are until they have returned or disconnected.
        """
        optional: AbstractSet[int] = self._ranks.excluded
        report = self._reports.get(report_index)
        # A snapshot is useless without the parts of all ranks, so excluded ranks are waited for
        # while they can still upload.
        if isinstance(report, Open) and report.is_snapshot:
            optional = self._ranks.lost | (optional & self._ranks.returned)
        return (
            rank
            for rank, count in enumerate(self._report_counts)
            if count <= report_index and rank not in optional
        )

    def _match_report(self, number: int, reported_at: float) -> list[OutgoingFrame]:
        metrics, requested = self._unmatched_metrics[0].get(number, (_NO_METRICS, None))
        joined = self._collectives.close(CollectiveKey(REPORT_KIND, number)).keys()
        # Lost ranks may have joined, but the end of their uploads is never reported.
        ranks = tuple(sorted(joined - self._ranks.lost))
        reported = self._open_report(number)
        # Only callbacks receive the metrics of the other ranks.
        by_rank = self._unmatched_metrics if self._keep_all_metrics else self._unmatched_metrics[:1]
        metrics_by_rank = tuple(backlog.pop(number, (_NO_METRICS, None))[0] for backlog in by_rank)
        # A snapshot without metrics must not hide those of the last user report.
        if not reported.is_snapshot or bytes(metrics) != b"{}":
            self._latest_metrics_json = metrics
        incomplete_reason = reported.incomplete_reason(ranks, self._ranks.world_size)
        # The maximum: reports may be matched, saved and abandoned in different orders.
        if incomplete_reason:
            self._last_save = max(self._last_save, (number, incomplete_reason))
        if incomplete_reason or not ranks:
            self._finish_report(number, MatchedReport(number, metrics_by_rank, None))
            # No rank uploads: the other parts are lost, or no rank has files.
            failed = UploadFailed(report_index=number, reason=incomplete_reason)
            unnamed = _answer_without_name(number)
            return [(rank, frame) for rank in ranks for frame in (failed, unnamed)]
        name, parent = self._assign_name(reported, requested, number)
        self._reports[number] = saving = Saving(
            report_index=number,
            name=name,
            parent=parent,
            ranks=ranks,
            metrics=_metrics_decoder.decode(metrics),
            metrics_by_rank=metrics_by_rank,
            reported=reported,
            reported_at=reported_at,
        )
        self._saving.append(saving)
        named = CheckpointNamed(
            report_index=number, checkpoint_name=name, ranks=ranks, metrics=metrics, parent=parent
        )
        return [(rank, named) for rank in ranks]

    def save_at_end(self, ends: Mapping[int, SaveAtEnd], reported_at: float) -> list[OutgoingFrame]:
        """Name the checkpoint of the snapshots that all ranks took after their return.

        Returns the frames to send, by rank. It becomes ready like that of a report, but its metrics
        do not become `latest_metrics`. `reported_at`: event-loop time in seconds.
        """
        number = self._save_at_end_number = self._matched_count
        # Reports from here on can never be matched: the ranks without them have returned.
        for unmatched in [one for one in self._reports if one >= number]:
            del self._reports[unmatched]
        self._matched_count += 1
        reported = Open(is_snapshot=True, reason=_AT_END_REASON, validation_requests={0: None})
        name, parent = self._assign_name(reported, None, number)
        metrics = tuple(msgspec.Raw(bytes(end.metrics)) for _, end in sorted(ends.items()))
        saving = Saving(
            report_index=number,
            name=name,
            parent=parent,
            ranks=tuple(sorted(ends)),
            metrics=_metrics_decoder.decode(metrics[0]),
            metrics_by_rank=metrics if self._keep_all_metrics else metrics[:1],
            reported=reported,
            reported_at=reported_at,
        )
        self._reports[number] = saving
        self._saving.append(saving)
        self.snapshot_reports[ends[0].step] = number
        named = CheckpointNamed(
            report_index=number,
            checkpoint_name=name,
            ranks=saving.ranks,
            metrics=metrics[0],
            parent=parent,
            at_end=True,
        )
        return [(rank, named) for rank in saving.ranks]

    def record_unsaved(self, reason: str) -> None:
        """Record that no save after the return of all ranks is possible; see `last_save_error`."""
        self._last_save = (self._matched_count, reason)

    def _open_report(self, number: int) -> Open:
        report = self._reports.setdefault(number, Open())
        assert isinstance(report, Open)
        return report

    # --- names ---------------------------------------------------------------------------------

    def _assign_name(self, reported: Open, requested: str | None, number: int) -> tuple[str, str]:
        """Return the name of a checkpoint and its parent."""
        name, parent = (
            self._assign_requested_name(requested, number)
            if requested
            else (self._default_checkpoint_name(number), "")
        )
        # A function of the user uploads to its own folder: nothing could be left under this name.
        if not reported.is_user_uploaded:
            self.assigned_names.append(AssignedName(name, is_generated=name != requested))
        return name, self._parent_snapshot() if reported.is_snapshot else parent

    def _assign_requested_name(self, requested: str, report_index: int) -> tuple[str, str]:
        """Return an unused name, and the previous checkpoint under the requested name or ''.

        Names are never reused (decision 0043): a committed checkpoint must stay intact until the
        next one is, files of a dropped one may still be deleted, and a worker of an earlier round
        may still upload an abandoned one.
        """
        before = self._names_by_request.get(requested, self._latest_checkpoint_named(requested))
        name = requested if before is None else f"{requested}@{self._round}-{report_index}"
        self._names_by_request[requested] = self._names_by_request[name] = name
        # '' from the journal: its files may be partly deleted, so that none can be shared.
        is_gone = before is not None and self._latest_checkpoint_named(before) == ""
        return name, "" if is_gone else before or ""

    # --- uploads -------------------------------------------------------------------------------

    def record_upload(
        self, rank: int, report_index: int, upload: SaveCompleted
    ) -> list[OutgoingFrame]:
        """Record that a rank has uploaded its files of a report; ignored for abandoned checkpoints.

        If the ranks have saved different steps, the checkpoint is abandoned: then returns the
        frames that report it. Otherwise returns an empty list. Raises `IntegrityError` if the
        upload is not one that this rank was asked for.
        """
        saving = self._reports.get(report_index)
        if not isinstance(saving, Saving):
            return []
        if rank not in saving.ranks or upload.checkpoint_name != saving.name:
            name = upload.checkpoint_name
            raise _invalid_report(f"no upload of {name!r} for report {report_index} was requested")
        # Parts of different steps are not one training state.
        if saving.done_ranks and saving.step != upload.step:
            return self.abandon_checkpoint(
                report_index, f"rank {rank} saved step {upload.step}, others {saving.step}"
            )
        if rank not in saving.done_ranks:  # one that is reported again counts once
            saving.add_rank(rank, upload)
        self._deliver_reports()
        return []

    def record_failed_save(self, rank: int, report_index: int, reason: str) -> list[OutgoingFrame]:
        """Abandon the checkpoint of a report of which this rank has lost its part.

        Returns the frames of `abandon_checkpoint`. Raises `IntegrityError` for a report that the
        rank has not made, unless it is the save at the end, or was lost with a connection.
        """
        is_known = (
            report_index < self._report_counts[rank]
            or report_index == self._save_at_end_number
            or rank in self._ranks.disconnected
        )
        if not is_known:
            raise _invalid_report(f"report {report_index} was not made, and cannot fail")
        return self.abandon_checkpoint(report_index, f"rank {rank}: {reason}")

    def abandon_checkpoint(self, report_index: int, reason: str) -> list[OutgoingFrame]:
        """Record that a part of a report's checkpoint is lost; `reason` is shown to users.

        Returns the `UploadFailed` frames, with the reason, for the ranks that upload it. Before all
        ranks have reported, the list is empty: the report is later matched without a checkpoint.
        Ignored for finished reports.
        """
        saving = self._reports.get(report_index)
        if not isinstance(saving, Saving):
            # A rank may fail before the others report: then the report must not be saved later.
            if report_index >= self._matched_count:
                self._open_report(report_index).failure_reason = reason
            return []
        self._last_save = max(self._last_save, (report_index, reason))
        self.abandoned_checkpoints.add(saving.name)
        self._saving.remove(saving)
        # The report itself is kept: its metrics count without the checkpoint.
        self._finish_report(report_index, MatchedReport(report_index, saving.metrics_by_rank, None))
        return [
            (rank, UploadFailed(report_index=report_index, reason=reason)) for rank in saving.ranks
        ]

    def remove_committed(self, report_index: int) -> None:
        """Remove the checkpoint of that report from `ready_checkpoints`: it is in the journal now.

        Harmless if it is not listed.
        """
        self.ready_checkpoints = [
            ready for ready in self.ready_checkpoints if ready.report_index != report_index
        ]

    def abandon_checkpoints_of_lost_ranks(self) -> list[OutgoingFrame]:
        """Abandon the checkpoints that wait for files of lost ranks, which block later ones.

        Returns the `UploadFailed` frames for the ranks that upload them.
        """
        frames: list[OutgoingFrame] = []
        # A copy: `abandon_checkpoint` removes the report from the list.
        for saving in list(self._saving):
            if missing := sorted(self._ranks.lost.intersection(saving.ranks) - saving.done_ranks):
                frames += self.abandon_checkpoint(
                    saving.report_index, f"ranks {missing} left before their part was saved"
                )
        return frames

    def undelivered_reports(self) -> list[MatchedReport]:
        """Return the matched reports that were not delivered, in order, when the round ends.

        A checkpoint in them may be incomplete or uncommitted.
        """
        waiting = [self._reports[n] for n in range(self._delivered_count, self._matched_count)]
        return [
            *self.matched_reports,
            *(
                MatchedReport(one.report_index, one.metrics_by_rank, one.name)
                if isinstance(one, Saving)
                else one
                for one in waiting
                if not isinstance(one, Open)
            ),
        ]

    def unmatched_reports(self, last: int) -> list[MatchedReport]:
        """Return the reports up to number `last` that are not matched, in order.

        Those of which rank 0's metrics are unknown are left out. For the end of a round, if
        training continues from a state after them.
        """
        by_rank = self._unmatched_metrics if self._keep_all_metrics else self._unmatched_metrics[:1]
        return [
            MatchedReport(n, tuple(one.get(n, (_NO_METRICS, None))[0] for one in by_rank), None)
            for n in range(self._matched_count, last + 1)
            if n in self._unmatched_metrics[0]
        ]

    @property
    def latest_matched_snapshot_step(self) -> int | None:
        """The step of the latest snapshot that all required ranks have reported; None if none."""
        matched = {n: step for step, n in self.snapshot_reports.items() if n < self._matched_count}
        return matched[max(matched)] if matched else None

    # --- delivery ------------------------------------------------------------------------------

    def _finish_report(self, number: int, report: MatchedReport) -> None:
        self._reports[number] = report
        self._deliver_reports()

    def _deliver_reports(self) -> None:
        """Deliver reports in order, up to the first one that is not complete."""
        while (report := self._reports.get(self._delivered_count)) is not None:
            number = self._delivered_count
            match report:
                case Saving(is_complete=True):
                    self._saving.remove(report)
                    self.ready_checkpoints.append(report.to_ready_checkpoint(self._round))
                    self._last_save = max(self._last_save, (number, ""))
                    self.matched_reports.append(
                        MatchedReport(number, report.metrics_by_rank, report.name)
                    )
                case MatchedReport():
                    self.matched_reports.append(report)
                case _:
                    return
            del self._reports[number]
            self._delivered_count += 1


def _invalid_report(reason: str) -> IntegrityError:
    return IntegrityError(
        f"A message about a report is invalid: {reason}.",
        do="Check whether the training function writes to file descriptors it has not opened.",
    )


def _answer_without_name(report_index: int) -> CheckpointNamed:
    return CheckpointNamed(
        report_index=report_index, checkpoint_name="", ranks=(), metrics=_NO_METRICS
    )


# --- ReportSink -----------------------------------------------------------------------------------


# One request a second per run, however often the training function reports.
_FLUSH_INTERVAL_S = 1.0
_CHUNK_BYTES = 1 << 20


class ReportSink:
    """Buffers and writes the reports that were matched while this agent led.

    One per agent. The chunk number grows over all its terms of leadership, so that no chunk is
    overwritten.
    """

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls) -> None:
        self._ledger = ledger
        self._retrying_calls = RetryingCalls(background_calls)
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._pending_chunk: tuple[int, bytes] | None = None
        self._next_chunk_number = 0
        self._next_flush_at = 0.0
        self._last_added = (-1, -1)
        """Round and number of the last report that was added."""
        self.added_count = 0
        """The number of reports that were added."""
        self.written_count = 0
        """The number of first reports that are in the bucket."""

    @property
    def has_unwritten(self) -> bool:
        """Whether any report is not in the bucket yet, which delays the end of the run."""
        return bool(self._lines) or self._pending_chunk is not None

    def add(self, round_number: int, report: MatchedReport) -> None:
        """Buffer the metrics and the checkpoint name of a matched report, without any I/O.

        Reports are added in the order of rounds and numbers; one that was added before is ignored.
        """
        if (round_number, report.report_index) <= self._last_added:
            return
        self._last_added = (round_number, report.report_index)
        # Formatted by hand: the metrics are JSON already, and need not be decoded to be encoded.
        first, *others = (bytes(metrics) for metrics in report.metrics_by_rank)
        line = b'{"round":%d,"report_index":%d,"t":%d,"checkpoint":%s,"metrics":%s%s}' % (
            round_number,
            report.report_index,
            self._ledger.wall_ms(),
            msgspec.json.encode(report.checkpoint),
            first,
            # Only for callbacks, whose calls the next leader may have to repeat.
            b',"other_ranks":[%s]' % b",".join(others) if others else b"",
        )
        self._lines.append(line)
        self._size_bytes += len(line)
        self.added_count += 1

    def flush(self, now: float, *, force: bool) -> None:
        """Write the buffered reports as one object to the bucket if that is due or `force` is set.

        Due: a second after the last chunk, or over 1 MiB. Does not block: the write is a background
        call that later calls poll and, after an error, retry. `now` is event-loop time in seconds.
        """
        is_due = force or self._size_bytes > _CHUNK_BYTES or now >= self._next_flush_at
        # One chunk at a time: a later chunk must not be stored without the earlier ones.
        if self._pending_chunk is None and self._lines and is_due:
            self._pending_chunk = (self._next_chunk_number, b"\n".join(self._lines) + b"\n")
            self._next_chunk_number += 1
            self._lines, self._size_bytes = [], 0
            self._next_flush_at = now + _FLUSH_INTERVAL_S
        if self._pending_chunk is not None:
            chunk_number, body = self._pending_chunk
            key = keys.reports(self._ledger.agent_id, chunk_number)
            # Idempotent: a retry after a lost answer writes the same bytes under the same key.
            write = partial(self._ledger.store.put, key, body)
            if self._retrying_calls.run(key, write, now) is not None:
                self._pending_chunk = None
                self.written_count = self.added_count - len(self._lines)
