"""Checkpoint: here or in a bucket, the same to its reader."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import pytest
from pyarrow import fs

from spotfit.checkpoint.handle import METADATA, Address, Checkpoint
from spotfit.checkpoint.restore import open_committed
from spotfit.core.errors import IntegrityError, NotFoundError
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from tests.unit.checkpoint.kept import directory, part, saved


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_local_checkpoint_is_its_own_directory(tmp_path: Path) -> None:
    there = directory(tmp_path / "ck", model="w")
    checkpoint = Checkpoint.from_directory(there)
    assert checkpoint.path == str(there)
    with checkpoint.as_directory() as given:
        assert given == str(there)
    assert (there / "model").exists()
    assert isinstance(checkpoint.filesystem, fs.LocalFileSystem)
    assert repr(checkpoint) == f"Checkpoint(filesystem=local, path={there})"


def test_a_relative_directory_is_meant_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.from_directory("ck").path == str(tmp_path / "ck")


@pytest.mark.parametrize("path", ["ck", "./ck", "a/b"])
def test_a_relative_path_alone_is_refused(path: str) -> None:
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
def test_a_path_carries_no_scheme(address: str, path: str) -> None:
    assert Checkpoint(address).path == path


def test_a_whole_bucket_is_no_checkpoint() -> None:
    with pytest.raises(ValueError, match="whole bucket"):
        Checkpoint("s3://bucket")


def test_a_path_within_a_file_system_of_the_user(tmp_path: Path) -> None:
    there = directory(tmp_path / "base" / "ck", model="w")
    mine = fs.SubTreeFileSystem(str(tmp_path / "base"), fs.LocalFileSystem())
    checkpoint = Checkpoint("ck", mine)
    assert (checkpoint.path, checkpoint.filesystem) == ("ck", mine)
    with checkpoint.as_directory() as given:
        assert given == str(there)


def test_a_remote_one_is_downloaded_and_tidied_away(tmp_path: Path, temporary: Path) -> None:
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


def test_all_ranks_of_a_node_share_the_download_of_a_committed_one(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path / "0", part(), model="w")
    with open_committed(store, "ck").as_directory() as mine:
        with open_committed(store, "ck").as_directory() as theirs:
            assert theirs == mine
        store.put("ck/model", b"other")  # what was downloaded is not read again
        with open_committed(store, "ck").as_directory() as later:
            assert later == mine


def test_a_remote_one_that_is_not_there_says_so() -> None:
    with pytest.raises(NotFoundError, match="no checkpoint at ck"):
        Checkpoint("ck", MemoryStore()).to_directory()


def test_to_directory_copies_to_where_it_is_told(tmp_path: Path) -> None:
    there = directory(tmp_path / "ck", model="w")
    copied = Checkpoint.from_directory(there).to_directory(tmp_path / "copy")
    assert copied == str(tmp_path / "copy")
    assert (tmp_path / "copy" / "model").read_text() == "w"


def test_a_local_one_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        Checkpoint(tmp_path / "gone").to_directory(tmp_path / "copy")


def test_to_directory_without_a_place_stays_and_is_the_same_each_time(temporary: Path) -> None:
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
def test_notes_are_kept_with_it(where: str, tmp_path: Path) -> None:
    local = Checkpoint.from_directory(directory(tmp_path / "ck"))
    checkpoint = local if where == "local" else Checkpoint("ck", MemoryStore())
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1})
    checkpoint.update_metadata({"b": [2]})
    assert checkpoint.get_metadata() == {"a": 1, "b": [2]}
    checkpoint.set_metadata({"c": 3})
    assert checkpoint.get_metadata() == {"c": 3}


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_file_of_the_users_under_the_name_of_the_notes_is_a_file(
    where: str, tmp_path: Path
) -> None:
    store = MemoryStore() if where == "memory" else open_store(tmp_path / "run")
    saved(store, tmp_path / "ck", part(), **{METADATA: "v1, by hand", "model": "w"})
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as there:
        assert Path(there, METADATA).read_text() == "v1, by hand"
    with pytest.raises(IntegrityError, match=r"ck holds no notes: JSON is malformed"):
        checkpoint.get_metadata()
    with pytest.raises(IntegrityError):
        checkpoint.update_metadata({"a": 1})
    checkpoint.set_metadata({"a": 1})
    assert checkpoint.get_metadata() == {"a": 1}


@pytest.mark.parametrize("where", ["local", "memory"])
def test_one_that_was_reported_empty_is_empty(where: str, tmp_path: Path) -> None:
    store = MemoryStore() if where == "memory" else open_store(tmp_path / "run")
    saved(store, tmp_path / "ck", part())
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as there:
        assert list(Path(there).iterdir()) == []
    assert list(Path(checkpoint.to_directory(tmp_path / "to")).iterdir()) == []
    checkpoint.set_metadata({"a": 1})
    with checkpoint.as_directory() as there:
        assert [path.name for path in Path(there).iterdir()] == [METADATA]


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
def test_names_of_old_say_what_to_use_instead(name: str) -> None:
    for asked in (Checkpoint("/ck"), Checkpoint):
        with pytest.raises(AttributeError, match=f"Checkpoint.{name} is no more: .+"):
            getattr(asked, name)


def test_other_names_are_plainly_not_there() -> None:
    assert not hasattr(Checkpoint("/ck"), "sharpness")
    assert not hasattr(Checkpoint, "sharpness")


def test_it_is_no_path() -> None:
    with pytest.raises(TypeError, match="as_directory"):
        os.fspath(Checkpoint("/ck"))


def test_it_travels_and_is_the_same_there(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path / "0", part(), model="w")
    local, committed = Checkpoint(f"{tmp_path}/ck"), open_committed(store, "ck")
    for checkpoint in (local, committed):
        there = pickle.loads(pickle.dumps(checkpoint))
        assert there == checkpoint
        assert hash(there) == hash(checkpoint)
    with pickle.loads(pickle.dumps(committed)).as_directory() as given:
        assert Path(given, "model").read_text() == "w"
    assert local != committed


def test_it_lies_in_a_run_however_it_is_addressed(tmp_path: Path) -> None:
    run = open_store(tmp_path / "base" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    mine = fs.SubTreeFileSystem(str(tmp_path / "base"), fs.LocalFileSystem())
    for checkpoint in (
        Checkpoint("run/a", mine),
        Checkpoint(tmp_path / "link" / "run" / "a"),
        Checkpoint.in_store(run, "a", within=Address("run", mine)),
    ):
        assert checkpoint.folder_below(run) == "a"


def test_it_knows_whether_it_lies_in_a_run(tmp_path: Path) -> None:
    run = MemoryStore().under("run")
    assert Checkpoint.in_store(run, "a/b").folder_below(run) == "a/b"
    assert Checkpoint("/elsewhere/run/a").folder_below(run) is None
