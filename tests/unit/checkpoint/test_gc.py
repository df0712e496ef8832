"""Deletion of dropped checkpoints, with files that others share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.gc import delete_checkpoint, write_references
from spotfit.checkpoint.writer import save_existing_files
from spotfit.core.codec import encode
from spotfit.ledger import keys
from spotfit.store.api import ObjectInfo
from spotfit.store.local import MemoryStore
from spotfit.store.transfer import FileRecord
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint


def remaining(store: MemoryStore) -> list[str]:
    return [found.key for found in store.list()]


def test_files_and_manifests_are_deleted_and_other_checkpoints_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path / "1", make_manifest("ck-1"), x="1")
    save_checkpoint(store, tmp_path / "10", make_manifest("ck-10"), x="1")
    delete_checkpoint(store, "ck-1")
    assert remaining(store) == [keys.manifest("ck-10", 1, 0), "ck-10/x"]


def test_deleting_again_changes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest(), x="1")
    delete_checkpoint(store, "ck")
    delete_checkpoint(store, "ck")
    assert remaining(store) == []


def test_files_in_a_custom_folder_are_deleted() -> None:
    store = MemoryStore()
    store.put("models/best/x", b"1")
    save_existing_files(store, replace(make_manifest("ck"), custom_folder="models/best"))
    delete_checkpoint(store, "ck")
    assert remaining(store) == []


def sharing(store: MemoryStore, name: str, *, of: str) -> None:
    """Save a checkpoint with a file of its own that also lists a file of another one."""
    own_files, shared_files = FileRecord("own", 1, "a"), FileRecord("frozen", 1, "b", of)
    store.put(f"{name}/own", b"1")
    listed = replace(make_manifest(name), files=(own_files, shared_files))
    write_references(store, listed, [of])
    store.put(listed.key, encode(listed))


class CountingStore(MemoryStore):
    reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return super().get(key)


def test_deleting_reads_few_objects_however_many_checkpoints_exist(tmp_path: Path) -> None:
    store = CountingStore()
    for n in range(50):
        save_checkpoint(store, tmp_path / str(n), make_manifest(f"ck-{n}"), x="1")
    store.reads = 0
    delete_checkpoint(store, "ck-1")
    assert store.reads == 1, "its own manifest"


def test_deleting_reads_one_manifest_of_those_that_share_the_files(tmp_path: Path) -> None:
    store = CountingStore()
    save_checkpoint(store, tmp_path, make_manifest("ck-00"), frozen="1")
    for n in range(1, 20):
        sharing(store, f"ck-{n:02}", of="ck-00")
    delete_checkpoint(store, "ck-00")
    store.reads = 0
    delete_checkpoint(store, "ck-01")
    assert store.reads == 2, "its own manifest, and the latest one"
    for n in range(2, 20):
        delete_checkpoint(store, f"ck-{n:02}")
    assert remaining(store) == []


def test_shared_files_stay_until_the_last_reference_is_deleted(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("a"), frozen="1", own="1")
    sharing(store, "b", of="a")
    sharing(store, "c", of="a")
    delete_checkpoint(store, "b")
    assert "a/frozen" in remaining(store), "its owner still exists"
    delete_checkpoint(store, "a")
    assert [key for key in remaining(store) if key.startswith("a/")] == ["a/frozen"]
    delete_checkpoint(store, "c")
    assert remaining(store) == []


def test_a_reference_without_manifest_keeps_no_files(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("a"), frozen="1")
    write_references(store, make_manifest("b"), ["a"])
    delete_checkpoint(store, "a")
    assert remaining(store) == []


class FailsAfterOneDelete(MemoryStore):
    left = 1

    def delete(self, key: str) -> None:
        if self.left == 0:
            raise ConnectionError("gone")
        self.left -= 1
        super().delete(key)


def test_a_new_leader_finishes_an_interrupted_deletion(tmp_path: Path) -> None:
    store = FailsAfterOneDelete()
    save_checkpoint(store, tmp_path, make_manifest(), x="1", y="2")
    try:
        delete_checkpoint(store, "ck")
    except ConnectionError:
        store.left = 10
    assert len(remaining(store)) == 2
    delete_checkpoint(store, "ck")
    assert remaining(store) == []


class ThreeAtATime(MemoryStore):
    """Blocks requests of one kind until three of them run at once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._three = threading.Barrier(3, timeout=60)

    def put(self, key: str, body: bytes | memoryview) -> None:
        if self._kind == "put" and key.startswith(keys.REFS):
            self._three.wait()
        super().put(key, body)

    def delete(self, key: str) -> None:
        if self._kind == "delete" and key.startswith("new/"):
            self._three.wait()
        super().delete(key)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        if self._kind == "list" and prefix.startswith(f"{keys.REFS}old-"):
            self._three.wait()
        return super().list(prefix, after=after)


@pytest.mark.parametrize("kind", ["put", "delete", "list"])
def test_deletion_sends_concurrent_requests(tmp_path: Path, kind: str) -> None:
    store = ThreeAtATime(kind)
    olds = [f"old-{n}" for n in range(3)]
    for n, old in enumerate(olds):
        save_checkpoint(store, tmp_path / str(n), make_manifest(old), frozen="1")
        store.put(f"new/{n}", b"1")
    shared_files = tuple(FileRecord("frozen", 1, "b", old) for old in olds)
    own_files = tuple(FileRecord(str(n), 1, "a") for n in range(3))
    listed = replace(make_manifest("new"), files=(*own_files, *shared_files))
    write_references(store, listed, olds)
    store.put(listed.key, encode(listed))
    delete_checkpoint(store, "new")
    assert [key for key in remaining(store) if "new" in key] == []
    assert [key for key in remaining(store) if key.endswith("frozen")] == [
        f"{old}/frozen" for old in olds
    ]


def save_in_folder(store: MemoryStore, folder: str, name: str = "", report: int = 0) -> None:
    """Save a checkpoint of the files that the user has written to that folder."""
    part = make_manifest(name or folder, report=report)
    save_existing_files(store, replace(part, custom_folder=folder))


def user_files(store: MemoryStore) -> list[str]:
    return [key for key in remaining(store) if not key.startswith(keys.RESERVED_PREFIX)]


def test_files_of_a_folder_of_several_checkpoints_are_deleted_with_the_last(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("custom"), x="1")
    for n in (1, 2):
        save_in_folder(store, "custom", f"custom@1-{n}", report=n)
    store.put("custom/next", b"of a report that is not made yet")
    for name in ("custom@1-1", "custom"):
        delete_checkpoint(store, name)
        assert user_files(store) == ["custom/next", "custom/x"]
    delete_checkpoint(store, "custom@1-2")
    assert remaining(store) == ["custom/next"]


@pytest.mark.parametrize(
    ("dropped", "kept"), [("out", "out/step-2"), ("latest", "latest/best"), ("ck/a", "ck")]
)
@pytest.mark.parametrize("is_outer_first", [True, False])
def test_checkpoints_in_nested_folders_are_deleted_independently(
    dropped: str, kept: str, *, is_outer_first: bool
) -> None:
    """The outer one lists the files of the inner one if it was reported later."""
    store = MemoryStore()
    for folder in sorted((dropped, kept), reverse=not is_outer_first):
        store.put(f"{folder}/x", b"1")
        save_in_folder(store, folder, folder if "/" not in folder else "checkpoint_1")
    delete_checkpoint(store, dropped if "/" not in dropped else "checkpoint_1")
    lists_both = kept == "ck" and not is_outer_first
    assert user_files(store) == (["ck/a/x", "ck/x"] if lists_both else [f"{kept}/x"])
    delete_checkpoint(store, kept if "/" not in kept else "checkpoint_1")
    assert remaining(store) == []


def test_a_checkpoint_below_the_folder_of_an_uploaded_one_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path, make_manifest("ck"), x="1")
    store.put("ck/y", b"of a rank that died")
    store.put("ck/a/x", b"1")
    save_in_folder(store, "ck/a", "checkpoint_1")
    store.put("ck/a/next", b"of a report that is not made yet")
    delete_checkpoint(store, "ck")
    assert user_files(store) == ["ck/a/next", "ck/a/x"]
    save_in_folder(store, "ck/a", "checkpoint_2", report=1)
    delete_checkpoint(store, "checkpoint_1")
    assert user_files(store) == ["ck/a/next", "ck/a/x"], "the second one lists them"


@pytest.mark.parametrize(
    "changes",
    [
        {"custom_folder": ".spotfit", "files": (FileRecord("journal/0.json", 1, ""),)},
        {"custom_folder": "ck/../.spotfit", "files": (FileRecord("journal/0.json", 1, ""),)},
        {"files": (FileRecord("journal/0.json", 1, "", ".spotfit"),)},
        {"files": (FileRecord("../.spotfit/journal/0.json", 1, ""),)},
    ],
    ids=["folder", "path to it", "shared file", "file name"],
)
def test_a_manifest_that_names_internal_objects_deletes_none(changes: dict[str, Any]) -> None:
    store = MemoryStore()
    store.put(".spotfit/journal/0.json", b"1")
    part = replace(make_manifest("ck"), **changes)
    store.put(part.key, encode(part))
    delete_checkpoint(store, "ck")
    assert remaining(store) == [".spotfit/journal/0.json"]


def test_the_given_deleter_is_used_for_all_objects(tmp_path: Path) -> None:
    store: MemoryStore = MemoryStore()
    gone: list[str] = []
    save_checkpoint(store, tmp_path, make_manifest("old"), frozen="1")
    sharing(store, "ck", of="old")
    store.delete(keys.manifest("old", 1, 0))
    reference = keys.checkpoint_ref("old", "ck", 1, 0)
    delete_checkpoint(store, "ck", delete=gone.append)
    assert gone == ["ck/own", "old/frozen", reference, keys.manifest("ck", 1, 0)]
    assert set(gone) <= set(remaining(store))
