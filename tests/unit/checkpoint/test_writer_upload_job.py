"""Upload jobs of user files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.manifest import manifests_of
from spotfit.checkpoint.writer import (
    UploadJob,
    delete_local_copy,
    load_upload_job,
    run_upload_job,
    upload_with_user_fn,
    warn_while_slow,
)
from spotfit.core.errors import TransientStoreError
from spotfit.host import log
from spotfit.host.system import SystemClock
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.saved_checkpoints import make_directory, make_manifest


def test_a_job_is_equal_after_unpickling(tmp_path: Path) -> None:
    class UserCheckpoint(Checkpoint):
        """A class that other processes cannot import."""

    user_checkpoint = UserCheckpoint.from_directory(make_directory(tmp_path / "ck", model="w"))
    job = UploadJob(user_checkpoint, make_manifest("a"), parent="b", delete_after_upload=True)
    there = load_upload_job(job.to_bytes())
    assert there == job
    assert type(there.checkpoint) is Checkpoint


def test_the_files_and_the_manifest_are_uploaded(tmp_path: Path) -> None:
    store = MemoryStore()
    here = Checkpoint.from_directory(make_directory(tmp_path / "ck", model="w"))
    manifest = run_upload_job(UploadJob(here, make_manifest("a")), store)
    assert store.get("a/model") == b"w"
    assert manifests_of(store, "a") == [manifest]


def test_files_in_another_bucket_are_uploaded() -> None:
    elsewhere, store = MemoryStore(), MemoryStore()
    elsewhere.put("ck/model", b"w")
    run_upload_job(UploadJob(Checkpoint.from_store(elsewhere, "ck"), make_manifest("a")), store)
    assert store.get("a/model") == b"w"


def test_the_local_copy_is_deleted_unless_it_is_in_the_run(tmp_path: Path) -> None:
    run = open_store(tmp_path / "run")
    copy, kept = (
        make_directory(tmp_path / "copy", a="b"),
        make_directory(tmp_path / "run" / "kept", a="b"),
    )
    for one in (copy, kept):
        delete_local_copy(Checkpoint.from_directory(one), run)
    assert (copy.exists(), kept.exists()) == (False, True)


class Failing:
    """An upload function that raises `error` in its first calls."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return checkpoint


SLOW_DOWN = OSError("When uploading part: AWS Error SLOW_DOWN during UploadPart operation")


@pytest.mark.parametrize("error", [SLOW_DOWN, TransientStoreError("the bucket stumbles")])
def test_a_transient_error_of_the_upload_function_is_retried(
    error: Exception, waits: list[float]
) -> None:
    fails_twice, checkpoint = Failing(error, 2), Checkpoint("/ck")
    assert upload_with_user_fn(fails_twice, checkpoint, "a") is checkpoint
    assert (fails_twice.calls, waits) == (3, [0.5, 2.0])


def test_the_upload_function_is_called_at_most_three_times(waits: list[float]) -> None:
    fails = Failing(SLOW_DOWN, 3)
    with pytest.raises(OSError, match="SLOW_DOWN"):
        upload_with_user_fn(fails, Checkpoint("/ck"), "a")
    assert fails.calls == 3


def test_a_permanent_error_of_the_upload_function_is_not_retried(waits: list[float]) -> None:
    fails = Failing(KeyError("weights"), 1)
    with pytest.raises(KeyError):
        upload_with_user_fn(fails, Checkpoint("/ck"), "a")
    assert (fails.calls, waits) == (1, [])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Durations of the waits, which are skipped."""
    waited: list[float] = []
    monkeypatch.setattr(SystemClock, "wait", lambda _, seconds: waited.append(seconds))
    return waited


def test_a_slow_upload_is_logged_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_CHECKPOINT_UPLOAD_WARN_INTERVAL_S", "0.001")
    events: list[dict[str, Any]] = []
    twice = threading.Event()

    def record(event: str, **facts: Any) -> None:
        events.append({"event": event, **facts})
        if len(events) == 2:
            twice.set()

    monkeypatch.setattr(log, "warning", record)
    with warn_while_slow("a"):
        assert twice.wait(60)
    assert events[1] == {"event": "checkpoint.upload_slow", "name": "a", "elapsed_s": 0.002}
