"""Dropping deletes a checkpoint's files and manifests, and nothing else."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.drop import drop
from spotfit.checkpoint.save import record
from spotfit.ledger import keys
from spotfit.store.memory import MemoryStore
from tests.unit.checkpoint.kept import part, saved


def remaining(store: MemoryStore) -> list[str]:
    return [found.key for found in store.list()]


def test_files_and_manifests_go_and_neighbours_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path / "1", part("ck-1"), x="1")
    saved(store, tmp_path / "10", part("ck-10"), x="1")
    drop(store, "ck-1")
    assert remaining(store) == [keys.manifest("ck-10", 1, 0), "ck-10/x"]


def test_dropping_again_changes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part(), x="1")
    drop(store, "ck")
    drop(store, "ck")
    assert remaining(store) == []


def test_files_that_were_put_elsewhere_go_too() -> None:
    store = MemoryStore()
    store.put("models/best/x", b"1")
    record(store, replace(part("ck"), at="models/best"))
    drop(store, "ck")
    assert remaining(store) == []


class DiesAfterOne(MemoryStore):
    left = 1

    def delete(self, key: str) -> None:
        if self.left == 0:
            raise ConnectionError("gone")
        self.left -= 1
        super().delete(key)


def test_who_takes_over_finishes_it(tmp_path: Path) -> None:
    store = DiesAfterOne()
    saved(store, tmp_path, part(), x="1", y="2")
    try:
        drop(store, "ck")
    except ConnectionError:
        store.left = 10
    assert len(remaining(store)) == 2
    drop(store, "ck")
    assert remaining(store) == []
