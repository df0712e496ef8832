"""A parcel: what a rank reported, brought by whoever holds it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import manifests_of
from spotfit.core.errors import TransientStoreError
from spotfit.host import log
from spotfit.host.clocks import SystemClock
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from spotfit.worker.parcel import (
    Parcel,
    bring,
    delete_local,
    told_while_slow,
    unpacked,
    uploaded_by,
)
from tests.unit.checkpoint.kept import directory, part


def test_it_means_the_same_in_another_process(tmp_path: Path) -> None:
    class Mine(Checkpoint):
        """Of a module that nobody else can import."""

    mine = Mine.from_directory(directory(tmp_path / "ck", model="w"))
    parcel = Parcel(mine, part("a"), base="b", delete=True)
    there = unpacked(parcel.packed())
    assert there == parcel
    assert type(there.checkpoint) is Checkpoint


def test_it_is_brought_with_its_manifest(tmp_path: Path) -> None:
    store = MemoryStore()
    here = Checkpoint.from_directory(directory(tmp_path / "ck", model="w"))
    manifest = bring(Parcel(here, part("a")), store)
    assert store.get("a/model") == b"w"
    assert manifests_of(store, "a") == [manifest]


def test_what_lies_in_a_bucket_is_brought_too() -> None:
    elsewhere, store = MemoryStore(), MemoryStore()
    elsewhere.put("ck/model", b"w")
    bring(Parcel(Checkpoint.in_store(elsewhere, "ck"), part("a")), store)
    assert store.get("a/model") == b"w"


def test_the_local_copy_goes_but_never_what_lies_in_the_run(tmp_path: Path) -> None:
    run = open_store(tmp_path / "run")
    copy, kept = directory(tmp_path / "copy", a="b"), directory(tmp_path / "run" / "kept", a="b")
    for one in (copy, kept):
        delete_local(Checkpoint.from_directory(one), run)
    assert (copy.exists(), kept.exists()) == (False, True)


class Failing:
    """An upload function that fails so often before it does its work."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return checkpoint


SLOW_DOWN = OSError("When uploading part: AWS Error SLOW_DOWN during UploadPart operation")


@pytest.mark.parametrize("error", [SLOW_DOWN, TransientStoreError("the bucket stumbles")])
def test_what_fails_in_passing_is_uploaded_again(error: Exception, waits: list[float]) -> None:
    fails_twice, checkpoint = Failing(error, 2), Checkpoint("/ck")
    assert uploaded_by(fails_twice, checkpoint, "a") is checkpoint
    assert (fails_twice.calls, waits) == (3, [0.5, 2.0])


def test_three_tries_are_enough(waits: list[float]) -> None:
    fails = Failing(SLOW_DOWN, 3)
    with pytest.raises(OSError, match="SLOW_DOWN"):
        uploaded_by(fails, Checkpoint("/ck"), "a")
    assert fails.calls == 3


def test_what_fails_for_good_is_tried_once(waits: list[float]) -> None:
    fails = Failing(KeyError("weights"), 1)
    with pytest.raises(KeyError):
        uploaded_by(fails, Checkpoint("/ck"), "a")
    assert (fails.calls, waits) == (1, [])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, if it had been."""
    waited: list[float] = []
    monkeypatch.setattr(SystemClock, "wait", lambda _, seconds: waited.append(seconds))
    return waited


def test_a_slow_upload_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_CHECKPOINT_UPLOAD_WARN_INTERVAL_S", "0.001")
    told: list[dict[str, Any]] = []
    twice = threading.Event()

    def tell(event: str, **facts: Any) -> None:
        told.append({"event": event, **facts})
        if len(told) == 2:
            twice.set()

    monkeypatch.setattr(log, "warning", tell)
    with told_while_slow("a"):
        assert twice.wait(60)
    assert told[1] == {"event": "checkpoint.upload_slow", "name": "a", "so_far_s": 0.002}
