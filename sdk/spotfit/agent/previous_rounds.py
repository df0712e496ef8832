"""`PreviousRounds`: what a leader knows about closed rounds when it opens the next one.

It holds complete but uncommitted checkpoints, names that may still be in use, and checkpoints that
are known to be incomplete or corrupt.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from spotfit.agent.report_matching import MatchedReport
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.checkpoint.committed import check_present
from spotfit.checkpoint.gc import checkpoint_names_in
from spotfit.checkpoint.manifest import ready_checkpoints
from spotfit.control.background_calls import BackgroundCalls, RetryingCalls
from spotfit.core.errors import IntegrityError
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.leader_state import ReadyCheckpoint
from spotfit.model.topology import SnapshotId
from spotfit.model.view import View
from spotfit.protocol.agent_leader import WorkerToLeader
from spotfit.store.api import Store


@dataclass(slots=True)
class _ClosedRound:
    """A closed round whose reports may still count."""

    coordinator: RoundCoordinator
    last_counted: int = -1
    """The number of the last report that was taken."""

    def take_reports(self, last: int, stored: Collection[str]) -> list[MatchedReport]:
        """Return the reports up to number `last` that were not taken; `stored` are checkpoints."""
        reports, first = self.coordinator.reports, self.last_counted
        self.last_counted = max(first, last)
        return [
            replace(report, checkpoint=report.checkpoint if report.checkpoint in stored else None)
            # All ranks have made the reports before a snapshot that is restored, although the
            # messages of some may be lost.
            for report in (*reports.undelivered_reports(), *reports.unmatched_reports(last))
            if first < report.report_index <= last
        ]


class PreviousRounds:
    """State of one term of leadership.

    It is not persisted: a new leader searches the bucket for complete checkpoints, and shares no
    files of snapshots from before its term.
    """

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls) -> None:
        self._ledger = ledger
        self._retrying_calls = RetryingCalls(background_calls)
        self._ready_checkpoints: tuple[ReadyCheckpoint, ...] = ()
        self.parent_checkpoints: set[str] = set()
        """Committed checkpoints whose files are shared by uploads of the last closed round."""
        self._used_names: Set[str] = frozenset()
        """Names to which earlier rounds have uploaded or may still upload files."""
        self._abandoned_checkpoints: set[str] = set()
        """Checkpoints that lack files and are never committed, even if a manifest appears later."""
        self._corrupt_checkpoints: set[str] = set()
        """Committed checkpoints that ranks of earlier rounds could not read."""
        self._closed_round = 0
        """The number of the last round that was closed."""
        self._closed: dict[int, _ClosedRound] = {}
        """Rounds from whose state training may continue, by number."""
        self._first_opened_round: int | None = None
        """The first round that this leader has opened."""

    def begin_round(self, round_number: int) -> None:
        """Discard uncommitted checkpoints of earlier rounds: the opened round has not used them.

        Also records the first round that this leader has opened, for `parent_snapshot`.
        """
        self._ready_checkpoints = ()
        # Snapshots of earlier terms are not shared: see `parent_snapshot`.
        if self._first_opened_round is None:
            self._first_opened_round = round_number

    def adopt_ready_checkpoints(self, coordinator: RoundCoordinator) -> None:
        """Keep the complete checkpoints of a round that was closed, to commit them afterwards."""
        self._ready_checkpoints = tuple(coordinator.reports.ready_checkpoints)

    def keep_undelivered_reports(self, coordinator: RoundCoordinator) -> None:
        """Keep the reports of a closed round that waited for a checkpoint, after its last delivery.

        Which of them count is known when the next round is opened: see `take_counted_reports`.
        """
        self._closed_round = coordinator.round
        self._closed[coordinator.round] = _ClosedRound(coordinator)

    def record_late_frames(self, message: WorkerToLeader, now: float) -> None:
        """Add the reports that a worker made before it was stopped, but after its round was closed.

        Training may continue from a snapshot that was taken then. Nothing is answered. Ignored if
        training has continued from a later state.
        """
        closed = self._closed.get(message.round)
        if closed is None:
            return
        for frame in message.frames:
            # The round has ended: an invalid frame fails no rank any more.
            with suppress(IntegrityError):
                closed.coordinator.handle_frame(message.rank, frame, now)

    @property
    def latest_snapshot(self) -> SnapshotId | None:
        """The latest snapshot that all ranks of the closed round have taken; None without one."""
        closed = self._closed.get(self._closed_round)
        if closed is None:
            return None
        step = closed.coordinator.reports.latest_matched_snapshot_step
        return None if step is None else SnapshotId(round=self._closed_round, step=step)

    def take_counted_reports(
        self, view: View, *, checkpoint_name: str | None, memory_snapshot: SnapshotId | None
    ) -> list[tuple[int, MatchedReport]]:
        """Return the kept reports that count, each once, with the numbers of their rounds.

        They are those up to the state that training continues from: the newer of that checkpoint
        and that snapshot. Training repeats the later reports. They count if a later round continues
        from a snapshot after them, which was not complete when the round before was opened. A
        checkpoint in the reports that is not stored is left out.
        """
        stored = {commit.name: commit for commit in view.checkpoints}
        commit, source = stored.get(checkpoint_name or ""), 0
        counted: list[tuple[int, MatchedReport]] = []
        for number, closed in self._closed.items():
            last, reports = -1, closed.coordinator.reports
            if commit is not None and commit.round == number:
                last = commit.report_index
            if memory_snapshot is not None and memory_snapshot.round == number:
                last = max(last, reports.snapshot_reports.get(memory_snapshot.step, -1))
            if last < 0:
                continue
            source = number
            counted += [(number, report) for report in closed.take_reports(last, stored)]
        self._closed = {
            number: closed
            for number, closed in self._closed.items()
            if number >= source and closed.coordinator.reports.snapshot_reports
        }
        return counted

    def absorb_round(self, coordinator: RoundCoordinator) -> None:
        """Keep the names and the checkpoint states of a round that has ended.

        Called once per round that this leader has opened, before its coordinator is discarded.
        """
        self.parent_checkpoints = coordinator.reports.parent_checkpoints
        self._used_names = coordinator.reports.used_names
        self._abandoned_checkpoints |= coordinator.reports.abandoned_checkpoints
        # Kept for the term: a checkpoint does not become readable again.
        self._corrupt_checkpoints |= coordinator.corrupt_checkpoints

    def mark_committed(self, name: str) -> None:
        """Take a checkpoint off the list of uncommitted ones, because the journal has committed it.

        Harmless if it is not listed.
        """
        self._ready_checkpoints = tuple(
            ready for ready in self._ready_checkpoints if ready.name != name
        )

    def find_complete_checkpoints(self, view: View, now: float) -> bool:
        """Search the bucket for complete but uncommitted checkpoints of the last round.

        Does not block: returns False while the search is in progress or is retried; call it again
        then. Returns True once the result is stored for `uncommitted_checkpoints`. `now` is
        event-loop time in seconds.
        """
        known = (
            {checkpoint.name for checkpoint in view.checkpoints}
            | set(view.dropped_checkpoints)
            | self._abandoned_checkpoints
        )
        last_round = view.last_round.number if view.last_round else 0
        # The epoch is part of the name: an answer to a search of an earlier term is outdated.
        call_name = f"survey {view.epoch}/{last_round}"
        scan = partial(_scan_bucket, self._ledger.store, known, view)
        result = self._retrying_calls.run(call_name, scan, now)
        if result is None:
            return False
        complete, used_names = result.value
        self._ready_checkpoints = tuple(
            sorted(complete, key=lambda ready: (ready.round, ready.report_index))
        )
        # Added, not replaced: names of the last round may have no manifest in the bucket yet.
        self._used_names |= used_names
        return True

    def is_of_lost_leader(self, round_number: int) -> bool:
        """Whether this leader has not opened that round, and thus knows none of its reports."""
        return self._first_opened_round is None or round_number < self._first_opened_round

    def latest_checkpoint_named(self, name: str) -> str | None:
        """Return the latest committed checkpoint that the user requested under `name`.

        The result may have a suffix: `"best@3-17"` for `"best"`. Returns '' if it was deleted or
        never completed: files of it may still be deleted or uploaded. Returns None if the name is
        new.
        """
        # The names of committed checkpoints are among the used ones, too.
        latest = self._ledger.journal_view.latest_checkpoint_named(name)
        return "" if latest is None and name in self._used_names else latest

    def uncommitted_checkpoints(
        self, view: View, coordinator: RoundCoordinator | None
    ) -> tuple[ReadyCheckpoint, ...]:
        """Return the complete checkpoints of the last round that are newer than all committed ones.

        Oldest first. `coordinator` is that of the open round; with None they are those of the round
        that was closed last. The leader commits them.
        """
        # Older rounds first: checkpoints are committed in the order in which they were saved.
        complete = (
            *self._ready_checkpoints,
            *(coordinator.reports.ready_checkpoints if coordinator else ()),
        )
        return tuple(ready for ready in complete if _is_newer_than_committed(view, ready))

    def parent_snapshot(self, view: View, coordinator: RoundCoordinator | None) -> str:
        """Return the name of the latest committed snapshot, whose files the next one may share.

        Returns '' if there is none, if it is known to be corrupt, or if it is from before the first
        round of this leader: what an earlier leader knew about corruption is lost. The next
        snapshot is then uploaded in full. `coordinator`: the open round, whose ranks may have found
        the snapshot corrupt; None without one.
        """
        corrupt = self._corrupt_checkpoints | (
            coordinator.corrupt_checkpoints if coordinator else set()
        )
        snapshots = [checkpoint for checkpoint in view.checkpoints if checkpoint.is_snapshot]
        if (
            not snapshots
            or self._first_opened_round is None
            or snapshots[-1].round < self._first_opened_round
        ):
            return ""
        return snapshots[-1].name if snapshots[-1].name not in corrupt else ""


def _scan_bucket(
    store: Store, known: Collection[str], view: View
) -> tuple[list[ReadyCheckpoint], frozenset[str]]:
    """Return the new complete checkpoints that are not in `known`, and all names with manifests."""
    # One listing for both results: name markers are stored beside the manifests.
    listed = [entry.key for entry in store.list(keys.MANIFESTS.rstrip("/"))]
    complete = []
    for ready in ready_checkpoints(store, listed, known):
        if not _is_newer_than_committed(view, ready):
            continue
        # Files shared with a parent may have been deleted: only the leader of the term in which
        # the checkpoint was saved protected the parent.
        try:
            check_present(store, ready.name, digest=ready.manifests_digest)
        except IntegrityError as error:
            log.warning("checkpoint.incomplete", name=ready.name, reason=error.message)
        else:
            complete.append(ready)
    return complete, checkpoint_names_in(listed)


def _is_newer_than_committed(view: View, ready: ReadyCheckpoint) -> bool:
    """Whether it was saved in the last round, and after the latest committed checkpoint.

    Later rounds did not start from an uncommitted checkpoint of an older round, so committing it
    would roll the run back.
    """
    latest, last = view.latest_checkpoint, view.last_round
    if last is None or ready.round != last.number:
        return False
    return latest is None or (ready.round, ready.report_index) > (latest.round, latest.report_index)
