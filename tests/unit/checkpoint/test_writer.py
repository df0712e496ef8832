"""Uploads of user files: files first, manifest last."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.checkpoint_dir import DEFAULT_METADATA_FILE, METADATA_FILE, Checkpoint
from spotfit.checkpoint.committed import open_committed
from spotfit.checkpoint.manifest import latest_manifest_of, manifests_of
from spotfit.checkpoint.writer import save_directory, save_existing_files
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.saved_checkpoints import make_directory, make_manifest, save_checkpoint


def test_files_are_stored_below_the_name_and_listed_in_the_manifest(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = save_checkpoint(store, tmp_path, make_manifest("epoch-1"), model="weights")
    assert store.get("epoch-1/model") == b"weights"
    assert manifests_of(store, "epoch-1") == [manifest]
    assert [(file.name, file.size_bytes) for file in manifest.files] == [("model", 7)]


class FailsAtManifest(MemoryStore):
    def put(self, key: str, body: bytes | memoryview) -> None:
        if key.startswith(keys.MANIFESTS):
            raise ConnectionError("gone")
        super().put(key, body)


def test_the_manifest_is_written_last(tmp_path: Path) -> None:
    store = FailsAtManifest()
    with pytest.raises(ConnectionError):
        save_checkpoint(store, tmp_path, make_manifest("ck"), model="weights")
    assert [found.key for found in store.list()] == ["ck/model"]


def test_ranks_merge_into_one_folder(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank, name in enumerate(("a", "b")):
        save_checkpoint(
            store, tmp_path / name, make_manifest(rank=rank, ranks=(0, 1)), **{name: name}
        )
    assert [found.key for found in store.list("ck")] == ["ck/a", "ck/b"]
    assert len(manifests_of(store, "ck")) == 2


def test_files_of_a_reused_name_are_inherited_unless_replaced(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    old = {"a": "old", "b": "old", METADATA_FILE: "{}"}
    first = save_checkpoint(store, tmp_path / "1", make_manifest("last"), **old)
    save_checkpoint(store, tmp_path / "x", make_manifest("last", rank=1), x="of another rank")
    again = make_manifest("last@1-1", report=1)
    second = save_directory(store, make_directory(tmp_path / "2", b="newer"), again, parent="last")
    third = save_directory(
        store,
        make_directory(tmp_path / "3", c="c"),
        make_manifest("n", report=2),
        parent="last@1-1",
    )
    assert [(file.name, file.size_bytes, file.source_prefix) for file in second.files] == [
        ("b", 5, ""),
        ("a", 3, "last"),
    ]
    assert [(file.name, file.source_prefix) for file in third.files] == [
        ("c", ""),
        ("b", "last@1-1"),
        ("a", "last"),
    ]
    assert latest_manifest_of(store, "last", 0) == first
    assert store.get("last/b") == b"old"
    shares = [found.key for found in store.list(".spotfit/refs")]
    assert shares == [keys.checkpoint_ref("last", name, 1, 0) for name in ("last@1-1", "n")] + [
        keys.checkpoint_ref("last@1-1", "n", 1, 0)
    ], "refs keep the files when the checkpoint that owns them is deleted"


def test_a_folder_overwritten_by_the_user_inherits_no_files() -> None:
    store = MemoryStore()
    store.put("custom/1", b"1")
    save_existing_files(store, replace(make_manifest("custom"), custom_folder="custom"))
    store.delete("custom/1")
    store.put("custom/2", b"2")
    again = save_existing_files(
        store,
        replace(make_manifest("custom@1-1", report=1), custom_folder="custom"),
        parent="custom",
    )
    assert [(file.name, file.source_prefix) for file in again.files] == [("2", "")]


def test_a_missing_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        save_directory(MemoryStore(), tmp_path / "gone", make_manifest())


def test_a_file_in_place_of_the_directory_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"model\.pt is a file, not a directory"):
        save_directory(MemoryStore(), tmp_path / "model.pt", make_manifest())


def test_existing_files_are_listed_in_the_manifest(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put("ck/model", b"weights")
    store.put("ck-2/other", b"x")
    manifest = save_existing_files(store, make_manifest("ck"))
    assert [(file.name, file.size_bytes, file.sha256) for file in manifest.files] == [
        ("model", 7, "")
    ]
    assert manifests_of(store, "ck") == [manifest]


def test_an_empty_folder_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"folder ck .* has no files"):
        save_existing_files(MemoryStore(), make_manifest("ck"))


def test_an_empty_folder_is_accepted_on_request(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    manifest = save_existing_files(store, make_manifest("ck"), may_be_empty=True)
    assert manifest.files == ()
    assert manifests_of(store, "ck") == [manifest]
    assert caplog.messages == ["checkpoint.empty"]


def store_with_metadata(body: bytes = b'{"a": 1}') -> tuple[MemoryStore, str]:
    store, key = MemoryStore(), keys.default_metadata(hashlib.sha256(b'{"a": 1}').hexdigest())
    store.put(key, body)
    return store, key


def test_default_metadata_are_copied_by_one_rank(tmp_path: Path) -> None:
    store, key = store_with_metadata()
    for rank in (1, 2):
        part = replace(make_manifest(rank=rank, ranks=(1, 2)), default_metadata=key)
        save_checkpoint(store, tmp_path / str(rank), part, **{f"f{rank}": "x"})
    checkpoint = open_committed(store, "ck")
    assert checkpoint.get_metadata() == {"a": 1}
    listed = [[file.name for file in part.files] for part in manifests_of(store, "ck")]
    assert listed == [["f1", DEFAULT_METADATA_FILE], ["f2"]]
    copied = checkpoint.to_directory(tmp_path / "copy")
    assert Checkpoint(copied).get_metadata() == {"a": 1}


def test_default_metadata_replace_those_of_an_earlier_run(tmp_path: Path) -> None:
    store, key = store_with_metadata()
    part = replace(make_manifest(), default_metadata=key)
    manifest = save_checkpoint(store, tmp_path, part, **{DEFAULT_METADATA_FILE: "{}", "w": "x"})
    assert [file.name for file in manifest.files] == ["w", DEFAULT_METADATA_FILE]
    assert open_committed(store, "ck").get_metadata() == {"a": 1}


def test_default_metadata_are_added_to_files_in_the_folder_of_the_user() -> None:
    store, key = store_with_metadata()
    store.put("mine/w", b"x")
    part = replace(make_manifest(), default_metadata=key, custom_folder="mine")
    save_existing_files(store, part)
    assert open_committed(store, "ck").get_metadata() == {"a": 1}


def test_changed_default_metadata_are_refused(tmp_path: Path) -> None:
    store, key = store_with_metadata(b"{}")
    with pytest.raises(IntegrityError, match="was changed"):
        save_checkpoint(store, tmp_path, replace(make_manifest(), default_metadata=key), w="x")
