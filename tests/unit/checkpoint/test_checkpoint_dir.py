"""`Checkpoint` behaves alike for local directories and buckets."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
from pyarrow import fs

from spotfit.checkpoint.checkpoint_dir import (
    METADATA_FILE,
    Checkpoint,
    StorageLocation,
    write_default_metadata,
)
from spotfit.checkpoint.committed import open_committed
from spotfit.core.errors import CheckpointNotFoundError, IntegrityError
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.saved_checkpoints import make_directory, make_manifest, save_checkpoint


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_as_directory_of_a_local_checkpoint_is_its_own_directory(tmp_path: Path) -> None:
    there = make_directory(tmp_path / "ck", model="w")
    checkpoint = Checkpoint.from_directory(there)
    assert checkpoint.path == str(there)
    with checkpoint.as_directory() as given:
        assert given == str(there)
    assert (there / "model").exists()
    assert isinstance(checkpoint.filesystem, fs.LocalFileSystem)
    assert repr(checkpoint) == f"Checkpoint(filesystem=local, path={there})"


def test_from_directory_resolves_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.from_directory("ck").path == str(tmp_path / "ck")


@pytest.mark.parametrize("path", ["ck", "./ck", "a/b"])
def test_a_relative_path_is_rejected(path: str) -> None:
    with pytest.raises(ValueError, match="relative"):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("s3://bucket/runs/ck", "bucket/runs/ck"),
        ("s3://bucket/ck?endpoint_override=localhost:9000&scheme=http", "bucket/ck"),
        ("file:///data/ck", "/data/ck"),
        ("/data/ck/", "/data/ck"),
    ],
)
def test_path_has_no_scheme(address: str, path: str) -> None:
    assert Checkpoint(address).path == path


def test_a_bucket_without_a_folder_is_rejected() -> None:
    with pytest.raises(ValueError, match="is a bucket, not a folder"):
        Checkpoint("s3://bucket")


def test_a_path_in_a_user_file_system_is_kept(tmp_path: Path) -> None:
    there = make_directory(tmp_path / "base" / "ck", model="w")
    filesystem = fs.SubTreeFileSystem(str(tmp_path / "base"), fs.LocalFileSystem())
    checkpoint = Checkpoint("ck", filesystem)
    assert (checkpoint.path, checkpoint.filesystem) == ("ck", filesystem)
    with checkpoint.as_directory() as given:
        assert given == str(there)


def test_a_remote_checkpoint_is_downloaded_and_cleaned_up(tmp_path: Path, temporary: Path) -> None:
    store = MemoryStore()
    store.put("ck/sub/model", b"w")
    checkpoint = Checkpoint("ck", store)
    with checkpoint.as_directory() as given:
        assert Path(given).parent.parent == temporary
        assert Path(given).name.startswith("checkpoint_tmp_")
        assert Path(given, "sub/model").read_bytes() == b"w"
        with checkpoint.as_directory() as again:
            assert again == given
        assert Path(given).is_dir()
    assert list(temporary.glob("*/checkpoint_tmp_*")) == []


def test_ranks_of_a_node_share_the_download_of_a_committed_checkpoint(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path / "0", make_manifest(), model="w")
    with open_committed(store, "ck").as_directory() as first:
        with open_committed(store, "ck").as_directory() as second:
            assert second == first
        store.put("ck/model", b"other")  # what was downloaded is not read again
        with open_committed(store, "ck").as_directory() as later:
            assert later == first


def test_a_missing_remote_checkpoint_raises_not_found() -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at ck"):
        Checkpoint("ck", MemoryStore()).to_directory()


def test_to_directory_copies_to_the_given_path(tmp_path: Path) -> None:
    there = make_directory(tmp_path / "ck", model="w")
    copied = Checkpoint.from_directory(there).to_directory(tmp_path / "copy")
    assert copied == str(tmp_path / "copy")
    assert (tmp_path / "copy" / "model").read_text() == "w"


def test_a_missing_local_checkpoint_raises_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        Checkpoint(tmp_path / "gone").to_directory(tmp_path / "copy")


def test_to_directory_of_a_file_names_it_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"model\.pt is a file, not a directory"):
        Checkpoint(tmp_path / "model.pt").to_directory(tmp_path / "copy")


def test_to_directory_without_a_path_returns_the_same_directory(temporary: Path) -> None:
    store = MemoryStore()
    store.put("ck/model", b"w")
    checkpoint = Checkpoint("ck", store)
    first = checkpoint.to_directory()
    with checkpoint.as_directory():
        pass
    assert checkpoint.to_directory() == first
    assert Path(first, "model").exists()
    assert Path(first).parent.parent == temporary


@pytest.mark.parametrize("where", ["local", "memory"])
def test_metadata_is_stored_with_the_checkpoint(where: str, tmp_path: Path) -> None:
    local = Checkpoint.from_directory(make_directory(tmp_path / "ck"))
    checkpoint = local if where == "local" else Checkpoint("ck", MemoryStore())
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1})
    checkpoint.update_metadata({"b": [2]})
    assert checkpoint.get_metadata() == {"a": 1, "b": [2]}
    checkpoint.set_metadata({"c": 3})
    assert checkpoint.get_metadata() == {"c": 3}


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_user_file_with_the_metadata_name_is_kept_as_a_file(where: str, tmp_path: Path) -> None:
    store = MemoryStore() if where == "memory" else open_store(tmp_path / "run")
    save_checkpoint(
        store, tmp_path / "ck", make_manifest(), **{METADATA_FILE: "v1, by hand", "model": "w"}
    )
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as there:
        assert Path(there, METADATA_FILE).read_text() == "v1, by hand"
    with pytest.raises(
        IntegrityError, match=r"ck is corrupt: it is not a JSON object \(JSON is malformed"
    ):
        checkpoint.get_metadata()
    with pytest.raises(IntegrityError):
        checkpoint.update_metadata({"a": 1})
    checkpoint.set_metadata({"a": 1})
    assert checkpoint.get_metadata() == {"a": 1}


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_checkpoint_reported_without_files_is_empty(where: str, tmp_path: Path) -> None:
    store = MemoryStore() if where == "memory" else open_store(tmp_path / "run")
    save_checkpoint(store, tmp_path / "ck", make_manifest())
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as there:
        assert list(Path(there).iterdir()) == []
    assert list(Path(checkpoint.to_directory(tmp_path / "to")).iterdir()) == []
    checkpoint.set_metadata({"a": 1})
    with checkpoint.as_directory() as there:
        assert [path.name for path in Path(there).iterdir()] == [METADATA_FILE]


@pytest.mark.parametrize(
    "name",
    [
        "from_dict",
        "to_dict",
        "from_bytes",
        "to_bytes",
        "from_uri",
        "to_uri",
        "uri",
        "get_internal_representation",
        "get_preprocessor",
        "set_preprocessor",
    ],
)
def test_removed_methods_name_their_replacement(name: str) -> None:
    for obj in (Checkpoint("/ck"), Checkpoint):
        with pytest.raises(
            AttributeError, match=f"Checkpoint.{name} is no longer supported. Instead, .+"
        ):
            getattr(obj, name)


def test_unknown_attributes_raise_attribute_error() -> None:
    assert not hasattr(Checkpoint("/ck"), "sharpness")
    assert not hasattr(Checkpoint, "sharpness")


def test_a_checkpoint_is_not_a_path() -> None:
    with pytest.raises(TypeError, match="as_directory"):
        os.fspath(Checkpoint("/ck"))


def test_a_pickled_checkpoint_is_equal(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path / "0", make_manifest(), model="w")
    local, committed = Checkpoint(f"{tmp_path}/ck"), open_committed(store, "ck")
    for checkpoint in (local, committed):
        there = pickle.loads(pickle.dumps(checkpoint))
        assert there == checkpoint
        assert hash(there) == hash(checkpoint)
    with pickle.loads(pickle.dumps(committed)).as_directory() as given:
        assert Path(given, "model").read_text() == "w"
    assert local != committed


def test_folder_relative_to_resolves_links(tmp_path: Path) -> None:
    run = open_store(tmp_path / "base" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    filesystem = fs.SubTreeFileSystem(str(tmp_path / "base"), fs.LocalFileSystem())
    for checkpoint in (
        Checkpoint("run/a", filesystem),
        Checkpoint(tmp_path / "link" / "run" / "a"),
        Checkpoint.from_store(run, "a", location=StorageLocation("run", filesystem)),
    ):
        assert checkpoint.folder_relative_to(run) == "a"


def test_folder_relative_to_is_none_outside_of_the_run(tmp_path: Path) -> None:
    run = MemoryStore().subtree("run")
    assert Checkpoint.from_store(run, "a/b").folder_relative_to(run) == "a/b"
    assert Checkpoint("/elsewhere/run/a").folder_relative_to(run) is None


def test_readers_on_windows_have_directories_of_their_own(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path / "a", make_manifest("ck"), model="w")
    monkeypatch.setattr(sys, "platform", "win32")
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as one, checkpoint.as_directory() as other:
        assert one != other
        assert Path(one, "model").read_bytes() == Path(other, "model").read_bytes() == b"w"
    assert not list(temporary.rglob("model"))
    assert Path(checkpoint.to_directory(tmp_path / "copy"), "model").read_bytes() == b"w"


def test_only_a_checkpoint_with_files_exists(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    Checkpoint.from_directory(tmp_path).check_exists()
    for name in ("empty", "missing"):
        with pytest.raises(CheckpointNotFoundError, match=name):
            Checkpoint.from_directory(tmp_path / name).check_exists()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"a": 1, "b": 2}),
        ({"c": 3}, {"a": 1, "b": 2, "c": 3}),
        ({"b": None}, {"b": None}),
    ],
)
def test_default_metadata_apply_without_those_of_the_user(
    metadata: dict[str, int], expected: dict[str, int], tmp_path: Path
) -> None:
    directory = make_directory(tmp_path / "ck")
    write_default_metadata(directory, {"a": 1, "b": 2})
    checkpoint = Checkpoint.from_directory(directory)
    checkpoint.update_metadata(metadata)
    assert checkpoint.get_metadata() == expected
