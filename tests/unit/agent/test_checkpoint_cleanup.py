"""Tests of the deletion of dropped and abandoned checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.checkpoint.committed import check_present
from spotfit.checkpoint.gc import write_name_marker
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit.ledger import keys
from spotfit.model.view import View
from spotfit.protocol.worker_agent import CheckpointNamed, FilesReport
from spotfit.store.local import MemoryStore
from spotfit.store.transfer import FileRecord
from spotfit.testing.builders import a_committed_checkpoint, a_view
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint
from tests.unit.control.fake_provisioner import DeferredCalls


class FailingStore(MemoryStore):
    """Raises an error for deletions on demand."""

    error: Exception | None = None

    def delete(self, key: str) -> None:
        if self.error is not None:
            raise self.error
        super().delete(key)


class Harness:
    """A bucket, and the garbage collector of a leader."""

    def __init__(self) -> None:
        self.store = FailingStore()
        self.background_calls = DeferredCalls()
        self.collector = CheckpointGarbageCollector(self.store, self.background_calls)
        self.now = 0.0

    def save(self, name: str, round_number: int = 1) -> None:
        self.store.put(f"{name}/model", b"weights")
        part = Manifest(
            name=name, round=round_number, report_index=0, rank=0, ranks=(0,), metrics={}, files=()
        )
        self.store.put(part.key, encode(part))

    def run_until_idle(self, view: View, *, saving: tuple[str, ...] = (), times: int = 6) -> None:
        """Complete background calls repeatedly, with pauses longer than any retry delay."""
        for _ in range(times):
            self.collector.advance(view, saving, self.now)
            self.background_calls.complete()
            self.now += 5.0
        self.collector.advance(view, saving, self.now)

    def busy(self) -> bool:
        return self.collector.is_busy

    def holds(self, name: str) -> bool:
        return any(key.startswith(f"{name}/") for key, *_ in self.store.list())


def test_a_dropped_checkpoint_is_deleted() -> None:
    harness = Harness()
    harness.save("c0")
    harness.collector.schedule_deletion("c0")
    assert harness.busy()
    harness.run_until_idle(a_view())
    assert not harness.busy()
    assert list(harness.store.list()) == []


def test_a_name_in_use_is_not_deleted() -> None:
    harness = Harness()
    for name in ("saved", "committed"):
        harness.save(name)
        harness.collector.schedule_deletion(name)
    harness.run_until_idle(
        a_view(checkpoints=(a_committed_checkpoint("committed"),)), saving=("saved",)
    )
    assert harness.holds("saved")
    assert harness.holds("committed")
    assert not harness.busy()


def test_a_parent_is_deleted_after_its_uploads() -> None:
    harness = Harness()
    for name in ("base", "other"):
        harness.save(name)
        harness.collector.schedule_deletion(name)
    for _ in range(4):
        harness.collector.advance(a_view(), (), harness.now, ("base",))
        harness.background_calls.complete()
    assert harness.holds("base")
    assert not harness.holds("other")
    harness.run_until_idle(a_view())
    assert not harness.holds("base")


def test_only_transient_errors_of_deletions_are_retried() -> None:
    harness = Harness()
    harness.save("c0")
    harness.store.error = TransientStoreError("away")
    harness.collector.schedule_deletion("c0")
    harness.run_until_idle(a_view())
    assert harness.busy()
    harness.store.error = StorePermissionError("no")
    harness.run_until_idle(a_view())
    assert not harness.busy()
    assert harness.holds("c0")


def test_remains_of_earlier_rounds_are_deleted() -> None:
    harness = Harness()
    for name, number in (("old", 1), ("kept", 1), ("new", 2)):
        write_name_marker(harness.store, name, number, generated=True)
        harness.save(name, number)
    view = a_view(checkpoints=(a_committed_checkpoint("kept"),))
    harness.collector.scan_for_debris(view, before_round=2)
    harness.run_until_idle(view)
    assert [harness.holds(name) for name in ("old", "kept", "new")] == [False, True, True]
    assert not harness.busy()


def test_undeleted_drops_of_an_earlier_leader_are_deleted() -> None:
    harness = Harness()
    harness.store.put("models/best/x", b"1")
    part = Manifest(
        name="c0",
        round=1,
        report_index=0,
        rank=0,
        ranks=(0,),
        metrics={},
        files=(FileRecord("x", 1, ""),),
        custom_folder="models/best",
    )
    harness.store.put(part.key, encode(part))
    view = a_view(dropped_checkpoints=("c0",))
    harness.collector.scan_for_debris(view, before_round=9)
    harness.run_until_idle(view)
    assert list(harness.store.list()) == []


def test_undeleted_drops_are_searched_once_after_training() -> None:
    harness = Harness()
    for name in ("c0", "kept", "later"):
        write_name_marker(harness.store, name, 1, generated=True)
        harness.save(name)
    harness.collector.scan_for_undeleted(a_view(dropped_checkpoints=("c0", "gone")))
    assert harness.busy()
    harness.run_until_idle(a_view(dropped_checkpoints=("c0", "gone")))
    assert [harness.holds(name) for name in ("c0", "kept")] == [False, True]
    harness.collector.scan_for_undeleted(a_view(dropped_checkpoints=("later",)))
    assert not harness.busy(), "the collector dropped it itself"


def test_a_scan_before_a_round_is_not_repeated_after_training() -> None:
    harness = Harness()
    harness.collector.scan_for_debris(a_view(), before_round=2)
    harness.run_until_idle(a_view())
    harness.collector.scan_for_undeleted(a_view(dropped_checkpoints=("c0",)))
    assert not harness.busy()


def test_a_marker_is_written_for_every_assigned_name() -> None:
    harness = Harness()
    harness.collector.record_name("c0", 3, is_generated=True)
    harness.collector.record_name("step-1", 3, is_generated=False)
    harness.run_until_idle(a_view())
    left = {key for key, *_ in harness.store.list()}
    assert left == {
        keys.name_marker("c0", 3, generated=True),
        keys.name_marker("step-1", 3, generated=False),
    }


def test_a_deposed_leader_stops_deleting() -> None:
    harness = Harness()
    leads = iter([True, False])
    deposed = CheckpointGarbageCollector(
        harness.store, harness.background_calls, lambda: next(leads)
    )
    harness.save("c0")
    harness.save("c0", 2)
    deposed.schedule_deletion("c0")
    deposed.advance(a_view(), (), 0.0)
    harness.background_calls.complete()
    assert not harness.holds("c0")
    assert harness.holds(".spotfit"), "the manifests remain"


class InterruptedStore(MemoryStore):
    """Calls a function just before the second object is deleted."""

    def __init__(self, before_second_delete: Callable[[], None]) -> None:
        super().__init__()
        self.deleted = 0
        self.before_second_delete = before_second_delete

    def delete(self, key: str) -> None:
        self.deleted += 1
        if self.deleted == 2:
            self.before_second_delete()
        super().delete(key)


def test_a_late_deletion_of_a_former_leader_spares_a_reused_name(
    tmp_path: Path,
) -> None:
    """A deposed leader may still delete; its successor has recorded that the name was dropped."""
    named: list[str] = []

    def use_it_again() -> None:
        coordinator = RoundCoordinator(
            2,
            1,
            default_checkpoint_name=str,
            latest_checkpoint_named=a_view(dropped_checkpoints=("best",)).latest_checkpoint_named,
        )
        ((_, frame),) = coordinator.handle_frame(
            0,
            msgspec.Raw(
                encode(
                    FilesReport(
                        report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="best"
                    )
                )
            ),
            0.0,
        )
        assert isinstance(frame, CheckpointNamed)
        named.append(frame.checkpoint_name)
        again = make_manifest(frame.checkpoint_name, round_number=2)
        save_checkpoint(store, tmp_path / "new", again, **{f"f{n}": "new" for n in range(5)})

    store = InterruptedStore(use_it_again)
    save_checkpoint(
        store, tmp_path / "old", make_manifest("best"), **{f"f{n}": "old" for n in range(5)}
    )
    background_calls = DeferredCalls()
    former = CheckpointGarbageCollector(store, background_calls)
    former.schedule_deletion("best")
    former.advance(a_view(dropped_checkpoints=("best",)), (), 0.0)
    background_calls.complete()
    assert named == ["best@2-0"]
    check_present(store, "best@2-0")
    assert {key.partition("/")[0] for key, *_ in store.list()} == {".spotfit", "best@2-0"}
