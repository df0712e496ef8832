"""A parcel: what a rank reported, brought by whoever holds it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import manifests_of
from spotfit.host import log
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from spotfit.worker.parcel import Parcel, bring, delete_local, told_while_slow, unpacked
from tests.unit.checkpoint.kept import directory, part


def test_it_means_the_same_in_another_process(tmp_path: Path) -> None:
    class Mine(Checkpoint):
        """Of a module that nobody else can import."""

    mine = Mine.from_directory(directory(tmp_path / "ck", model="w"))
    parcel = Parcel(mine, part("a"), again=True, delete=True)
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


def test_the_local_copy_goes_but_never_what_is_kept(tmp_path: Path) -> None:
    run = open_store(tmp_path / "run")
    copy, kept = directory(tmp_path / "copy", a="b"), directory(tmp_path / "run" / "kept", a="b")
    delete_local(Checkpoint.from_directory(copy), run, "kept")
    delete_local(Checkpoint.from_directory(kept), run, "kept")
    assert (copy.exists(), kept.exists()) == (False, True)


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
