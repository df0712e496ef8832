"""Tests of uncommitted checkpoints and parents of earlier rounds."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import msgspec

from spotfit.agent.previous_rounds import PreviousRounds
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.checkpoint.gc import write_name_marker
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.errors import TransientStoreError
from spotfit.ledger.journal import Ledger
from spotfit.model.topology import SnapshotId
from spotfit.model.view import View
from spotfit.protocol.agent_leader import WorkerToLeader
from spotfit.protocol.worker_agent import (
    CheckpointCorrupt,
    FilesReport,
    FromWorker,
    MetricsReport,
    SaveCompleted,
    SaveFailed,
)
from spotfit.store.local import MemoryStore
from spotfit.store.retry import AGENT_RETRY_POLICY, call_with_retries
from spotfit.store.transfer import FileRecord
from spotfit.testing.builders import RUN_ID, a_committed_checkpoint, a_round, a_view, an_agent_id
from tests.unit.control.fake_provisioner import DeferredCalls


class Harness:
    """A bucket, the previous rounds of a leader, and the coordinator of round 3."""

    def __init__(self, store: MemoryStore | None = None, *, world_size: int = 1) -> None:
        self.store, self.background_calls = store or MemoryStore(), DeferredCalls()
        self.ledger = Ledger(self.store, RUN_ID, an_agent_id(0))
        self.previous_rounds = PreviousRounds(self.ledger, self.background_calls)
        self.coordinator = RoundCoordinator(
            3,
            world_size,
            default_checkpoint_name=lambda n: f"made-{n}",
            parent_snapshot=lambda: "before",
        )

    def write_checkpoint(
        self, name: str, *, round_number: int = 3, report: int = 0, world_size: int = 1
    ) -> None:
        """Write a complete checkpoint."""
        for rank in range(world_size):
            part = Manifest(
                name=name,
                round=round_number,
                report_index=report,
                rank=rank,
                ranks=tuple(range(world_size)),
                metrics={},
                files=(),
            )
            self.store.put(part.key, encode(part))

    def send_frames(self, *frames: FromWorker) -> None:
        for frame in frames:
            self.coordinator.handle_frame(0, msgspec.Raw(encode(frame)), 0.0)

    def searched(self, view: View) -> bool:
        assert not self.previous_rounds.find_complete_checkpoints(view, 0.0), (
            "the search is asynchronous"
        )
        self.background_calls.complete()
        return self.previous_rounds.find_complete_checkpoints(view, 0.0)

    def uncommitted(self, view: View, coordinator: RoundCoordinator | None = None) -> list[str]:
        return [one.name for one in self.previous_rounds.uncommitted_checkpoints(view, coordinator)]


AFTER_3 = a_view(last_round=a_round(3))
SAVE = FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), incremental=True)


def test_ready_checkpoints_survive_the_close_of_their_round() -> None:
    harness = Harness()
    harness.send_frames(
        SAVE, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=10)
    )
    assert harness.uncommitted(AFTER_3, harness.coordinator) == ["made-0"]
    harness.previous_rounds.adopt_ready_checkpoints(harness.coordinator)
    assert harness.uncommitted(AFTER_3) == ["made-0"]
    harness.previous_rounds.mark_committed("made-0")
    assert harness.uncommitted(AFTER_3) == []


class FlakyBucket(MemoryStore):
    """Every tenth read fails; the reads of an agent are retried."""

    def __init__(self) -> None:
        super().__init__()
        self._read_count = itertools.count(1)

    def get(self, key: str) -> bytes:
        policy = dataclasses.replace(AGENT_RETRY_POLICY, max_backoff_s=0.0)
        return call_with_retries(lambda: self._read(key), policy)

    def _read(self, key: str) -> bytes:
        if next(self._read_count) % 10 == 0:
            raise TransientStoreError("503 Slow Down")
        return super().get(key)


def test_a_search_with_many_requests_succeeds_although_some_of_them_fail() -> None:
    harness = Harness(FlakyBucket())
    harness.write_checkpoint("made-0", world_size=512)
    assert harness.searched(AFTER_3)
    assert harness.uncommitted(AFTER_3) == ["made-0"]


def test_uncommitted_checkpoints_are_found_oldest_first() -> None:
    harness = Harness()
    harness.write_checkpoint("later", report=2)
    harness.write_checkpoint("sooner", report=1)
    harness.write_checkpoint("known", report=0)
    view = a_view(
        last_round=a_round(3),
        checkpoints=(a_committed_checkpoint("known", round=3),),
        dropped_checkpoints=("dropped",),
    )
    harness.write_checkpoint("dropped", report=3)
    assert harness.searched(view)
    assert harness.uncommitted(view) == ["sooner", "later"]


def test_a_checkpoint_with_deleted_parent_files_is_not_committed() -> None:
    """Only the leader of the term in which it was saved protects its parent."""
    harness = Harness()
    for report, shares in enumerate(("kept", "deleted")):
        file = FileRecord("chunk", 1, "", shares, "m")
        part = Manifest(
            name=f"c{report}",
            round=3,
            report_index=report,
            rank=0,
            ranks=(0,),
            metrics={},
            files=(file,),
        )
        harness.store.put(part.key, encode(part))
    harness.store.put("kept/chunk", b"x")
    assert harness.searched(AFTER_3)
    assert harness.uncommitted(AFTER_3) == ["c0"]


def test_names_with_manifests_count_as_used() -> None:
    harness = Harness()
    write_name_marker(harness.store, "half", 2, generated=False)
    harness.write_checkpoint("done", round_number=2)
    harness.send_frames(
        FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="just now"),
        FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="just now"),
    )
    harness.previous_rounds.absorb_round(harness.coordinator)
    assert harness.searched(AFTER_3)
    names = ("half", "done", "just now", "just now@3-1")
    assert [harness.previous_rounds.latest_checkpoint_named(name) for name in (*names, "new")] == [
        "",
        "",
        "",
        "",
        None,
    ]
    for name in ("done", "half@1-0"):
        harness.ledger.append(a_committed_checkpoint(name), after=harness.ledger.catch_up())
    assert [harness.previous_rounds.latest_checkpoint_named(name) for name in ("done", "half")] == [
        "done",
        "half@1-0",
    ]


def test_a_new_round_forgets_uncommitted_checkpoints() -> None:
    harness = Harness()
    harness.write_checkpoint("late")
    harness.searched(AFTER_3)
    harness.previous_rounds.begin_round(4)
    assert harness.uncommitted(AFTER_3) == []


def test_checkpoints_older_than_the_committed_one_are_ignored() -> None:
    harness = Harness()
    harness.write_checkpoint("of round 2", round_number=2)
    harness.write_checkpoint("first", report=0)
    harness.searched(AFTER_3)
    assert harness.uncommitted(AFTER_3) == ["first"]
    committed = a_committed_checkpoint("second", round=3, report_index=1)
    assert harness.uncommitted(a_view(last_round=a_round(3), checkpoints=(committed,))) == []
    assert harness.uncommitted(a_view()) == [], "no round was recorded"


def with_snapshot(name: str, round_number: int) -> View:
    return a_view(checkpoints=(a_committed_checkpoint(name, round=round_number, is_snapshot=True),))


def test_the_parent_is_the_latest_snapshot_of_this_term() -> None:
    harness = Harness()
    view = with_snapshot("custom", 3)
    assert harness.previous_rounds.parent_snapshot(view, None) == "", (
        "an earlier leader may have recorded that it is corrupt"
    )
    harness.previous_rounds.begin_round(3)
    harness.previous_rounds.begin_round(4)
    assert harness.previous_rounds.parent_snapshot(view, harness.coordinator) == "custom"
    assert (
        harness.previous_rounds.parent_snapshot(with_snapshot("of another", 2), harness.coordinator)
        == ""
    )
    plain = a_view(checkpoints=(a_committed_checkpoint("no snapshot", round=3),))
    assert harness.previous_rounds.parent_snapshot(plain, harness.coordinator) == ""


def test_a_corrupt_snapshot_is_never_a_parent() -> None:
    harness = Harness()
    harness.previous_rounds.begin_round(3)
    view = with_snapshot("corrupt", 3)
    harness.send_frames(CheckpointCorrupt(checkpoint_name="corrupt"))
    assert harness.previous_rounds.parent_snapshot(view, harness.coordinator) == ""
    harness.previous_rounds.absorb_round(harness.coordinator)
    assert harness.previous_rounds.parent_snapshot(view, None) == "", "also in the next round"


def test_parents_of_uploads_outlive_the_round() -> None:
    harness = Harness()
    harness.send_frames(SAVE)
    harness.previous_rounds.absorb_round(harness.coordinator)
    assert harness.previous_rounds.parent_checkpoints == {"before"}


def test_an_abandoned_checkpoint_is_never_committed() -> None:
    """The answer to its last manifest was lost, so its rank reported a failure."""
    harness = Harness()
    harness.write_checkpoint("made-0")
    harness.send_frames(SAVE, SaveFailed(report_index=0, reason="the bucket did not answer"))
    harness.previous_rounds.absorb_round(harness.coordinator)
    assert harness.searched(AFTER_3)
    assert harness.uncommitted(AFTER_3) == []


def test_reports_up_to_the_resumed_state_count_once() -> None:
    latest, unknown, older = [
        SnapshotId(round=n, step=step) for n, step in ((3, 7), (3, 6), (2, 7))
    ]
    early = a_committed_checkpoint("made-0", round=3, report_index=0)
    late = a_committed_checkpoint("made-2", round=3, report_index=2)
    before = a_committed_checkpoint("before", round=2, report_index=9)
    for checkpoints, name, memory, counted in (
        ((before,), "before", latest, [(0, None), (1, None), (2, None)]),
        ((early,), "made-0", latest, [(0, "made-0"), (1, None), (2, None)]),
        ((early,), "made-0", unknown, [(0, "made-0")]),
        ((early,), "made-0", None, [(0, "made-0")]),
        ((early, late), "made-2", None, [(0, "made-0"), (1, None), (2, "made-2")]),
        ((before, early), "before", older, []),
        ((), None, None, []),
    ):
        harness = Harness()
        for n, step in ((0, 5), (2, 7)):
            snapshot = FilesReport(
                report_index=n, metrics=msgspec.Raw(b"{}"), incremental=True, step=step
            )
            if n:
                harness.send_frames(MetricsReport(report_index=n - 1, metrics=msgspec.Raw(b"{}")))
            harness.send_frames(snapshot)
        harness.send_frames(MetricsReport(report_index=3, metrics=msgspec.Raw(b"{}")))
        harness.previous_rounds.keep_undelivered_reports(harness.coordinator)
        view = a_view(checkpoints=checkpoints)
        assert harness.previous_rounds.latest_snapshot == SnapshotId(round=3, step=7)
        take = partial(
            harness.previous_rounds.take_counted_reports,
            view,
            checkpoint_name=name,
            memory_snapshot=memory,
        )
        assert [(one.report_index, one.checkpoint) for _, one in take()] == counted
        assert take() == [], "once"


def take_resumed(harness: Harness) -> list[tuple[int, str]]:
    """The reports that count if training continues from the snapshot of step 7."""
    reports = harness.previous_rounds.take_counted_reports(
        a_view(), checkpoint_name=None, memory_snapshot=SnapshotId(round=3, step=7)
    )
    assert {number for number, _ in reports} <= {3}
    return [(one.report_index, bytes(one.metrics_by_rank[0]).decode()) for _, one in reports]


def a_snapshot(report_index: int, step: int) -> FilesReport:
    metrics = msgspec.Raw(b'{"step":%d}' % step)
    return FilesReport(report_index=report_index, metrics=metrics, incremental=True, step=step)


def test_a_report_made_while_the_round_was_closed_counts() -> None:
    harness = Harness()
    harness.send_frames(a_snapshot(0, 5))
    harness.previous_rounds.keep_undelivered_reports(harness.coordinator)
    frames = [msgspec.Raw(b"not a frame"), msgspec.Raw(encode(a_snapshot(1, 7)))]
    message = WorkerToLeader(round=3, rank=0, frames=frames)
    harness.previous_rounds.record_late_frames(message, 1.0)
    assert take_resumed(harness) == [(0, '{"step":5}'), (1, '{"step":7}')]
    harness.previous_rounds.record_late_frames(message, 1.0)
    assert take_resumed(harness) == [], "once"


def test_a_report_of_the_restored_snapshot_counts_although_a_rank_did_not_send_it() -> None:
    harness = Harness(world_size=2)
    harness.send_frames(a_snapshot(0, 7))
    harness.previous_rounds.keep_undelivered_reports(harness.coordinator)
    assert harness.previous_rounds.latest_snapshot is None, "not of all ranks"
    assert take_resumed(harness) == [(0, '{"step":7}')]


def test_reports_count_when_a_later_round_restores_a_snapshot_after_them() -> None:
    """The snapshot was not complete when the round between was opened."""
    harness = Harness()
    harness.send_frames(a_snapshot(0, 5), a_snapshot(1, 7))
    harness.previous_rounds.keep_undelivered_reports(harness.coordinator)
    take = harness.previous_rounds.take_counted_reports
    older = SnapshotId(round=3, step=5)
    first = take(a_view(), checkpoint_name=None, memory_snapshot=older)
    assert [(number, one.report_index) for number, one in first] == [(3, 0)]
    between = RoundCoordinator(4, 1, default_checkpoint_name=str)
    harness.previous_rounds.keep_undelivered_reports(between)
    assert take_resumed(harness) == [(1, '{"step":7}')]


def test_late_frames_after_a_lost_one_are_ignored() -> None:
    """A frame is lost with the connection of an agent, whose workers have not been stopped yet."""
    harness = Harness()
    harness.previous_rounds.keep_undelivered_reports(harness.coordinator)
    frames = [msgspec.Raw(encode(a_snapshot(1, 7)))]
    harness.previous_rounds.record_late_frames(
        WorkerToLeader(round=3, rank=0, frames=frames), now=1.0
    )
    assert take_resumed(harness) == []
