"""Dropping deletes a checkpoint's files and manifests, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.drop import drop, note_sharing
from spotfit.checkpoint.save import record
from spotfit.core.codec import encode
from spotfit.ledger import keys
from spotfit.store.api import ObjectInfo
from spotfit.store.memory import MemoryStore
from spotfit.store.transfer import FileRecord
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


def sharing(store: MemoryStore, name: str, *, of: str) -> None:
    """A checkpoint of one file of its own, which lists a file of another one, too."""
    mine, theirs = FileRecord("own", 1, "a"), FileRecord("frozen", 1, "b", of)
    store.put(f"{name}/own", b"1")
    listed = replace(part(name), files=(mine, theirs))
    note_sharing(store, listed, [of])
    store.put(listed.key, encode(listed))


class CountsReads(MemoryStore):
    reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return super().get(key)


def test_however_many_checkpoints_a_run_has_little_is_read_to_drop_one(tmp_path: Path) -> None:
    store = CountsReads()
    for n in range(50):
        saved(store, tmp_path / str(n), part(f"ck-{n}"), x="1")
    store.reads = 0
    drop(store, "ck-1")
    assert store.reads == 1, "its own manifest"


def test_however_many_share_its_files_the_next_that_does_is_enough(tmp_path: Path) -> None:
    store = CountsReads()
    saved(store, tmp_path, part("ck-00"), frozen="1")
    for n in range(1, 20):
        sharing(store, f"ck-{n:02}", of="ck-00")
    drop(store, "ck-00")
    store.reads = 0
    drop(store, "ck-01")
    assert store.reads == 2, "its own manifest, and the latest one"
    for n in range(2, 20):
        drop(store, f"ck-{n:02}")
    assert remaining(store) == []


def test_what_others_list_stays_until_the_last_of_them_goes(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("a"), frozen="1", own="1")
    sharing(store, "b", of="a")
    sharing(store, "c", of="a")
    drop(store, "b")
    assert "a/frozen" in remaining(store), "its owner is there"
    drop(store, "a")
    assert [key for key in remaining(store) if key.startswith("a/")] == ["a/frozen"]
    drop(store, "c")
    assert remaining(store) == []


def test_word_of_a_part_that_never_came_keeps_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("a"), frozen="1")
    note_sharing(store, part("b"), ["a"])
    drop(store, "a")
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


class AnswersThree(MemoryStore):
    """Answers those that ask for some kind of thing when three of them wait."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._three = threading.Barrier(3, timeout=60)

    def put(self, key: str, body: bytes | memoryview) -> None:
        if self._kind == "put" and key.startswith(keys.SHARES):
            self._three.wait()
        super().put(key, body)

    def delete(self, key: str) -> None:
        if self._kind == "delete" and key.startswith("new/"):
            self._three.wait()
        super().delete(key)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        if self._kind == "list" and prefix.startswith(f"{keys.SHARES}old-"):
            self._three.wait()
        return super().list(prefix, after=after)


@pytest.mark.parametrize("kind", ["put", "delete", "list"])
def test_a_bucket_far_away_is_asked_for_several_things_at_a_time(tmp_path: Path, kind: str) -> None:
    store = AnswersThree(kind)
    olds = [f"old-{n}" for n in range(3)]
    for n, old in enumerate(olds):
        saved(store, tmp_path / str(n), part(old), frozen="1")
        store.put(f"new/{n}", b"1")
    theirs = tuple(FileRecord("frozen", 1, "b", old) for old in olds)
    mine = tuple(FileRecord(str(n), 1, "a") for n in range(3))
    listed = replace(part("new"), files=(*mine, *theirs))
    note_sharing(store, listed, olds)
    store.put(listed.key, encode(listed))
    drop(store, "new")
    assert [key for key in remaining(store) if "new" in key] == []
    assert [key for key in remaining(store) if key.endswith("frozen")] == [
        f"{old}/frozen" for old in olds
    ]


def test_a_folder_that_a_user_has_put_several_into_goes_with_the_last_of_them(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    saved(store, tmp_path, part("mine"), x="1")
    for n in (1, 2):
        record(store, replace(part(f"mine@1-{n}", report=n), at="mine"))
    store.put("mine/next", b"of a report that is not made yet")
    for name in ("mine@1-1", "mine"):
        drop(store, name)
        assert {"mine/x", "mine/next"} <= set(remaining(store))
    drop(store, "mine@1-2")
    assert remaining(store) == []


def test_all_that_goes_may_be_deleted_another_way(tmp_path: Path) -> None:
    store: MemoryStore = MemoryStore()
    gone: list[str] = []
    saved(store, tmp_path, part("old"), frozen="1")
    sharing(store, "ck", of="old")
    store.delete(keys.manifest("old", 1, 0))
    word = keys.sharer("old", "ck", 1, 0)
    drop(store, "ck", delete=gone.append)
    assert gone == ["ck/own", "old/frozen", word, keys.manifest("ck", 1, 0)]
    assert set(gone) <= set(remaining(store))
