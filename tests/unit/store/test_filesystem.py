from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError, UntrustworthyStoreError
from spotfit.store.filesystem import FsspecStore, store_on
from spotfit.store.local import LocalStore

fsspec = pytest.importorskip("fsspec")


class ChecksThenWrites(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """A file system whose `create` is the one fsspec gives to all."""

    pipe_file = fsspec.AbstractFileSystem.pipe_file


def test_a_local_directory_in_any_wrapping_is_one(tmp_path: Path) -> None:
    local = fsspec.filesystem("file")
    below = fsspec.filesystem("dir", path=str(tmp_path), fs=local)
    for store in (store_on(local, str(tmp_path / "a")), store_on(below, "a")):
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "a")


def test_arrow_wrappings_are_seen_through(tmp_path: Path) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    (tmp_path / "b").mkdir()
    wrappings = (
        (fs.LocalFileSystem(), str(tmp_path / "b" / "a")),
        (fs.SubTreeFileSystem(str(tmp_path / "b"), fs.LocalFileSystem()), "a"),
        (fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("file"))), str(tmp_path / "b" / "a")),
    )
    for filesystem, path in wrappings:
        store = store_on(filesystem, path)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "b" / "a")


def test_a_create_that_checks_and_then_writes_is_not_offered() -> None:
    store = store_on(ChecksThenWrites(), "/bucket")
    with pytest.raises(UntrustworthyStoreError, match="ChecksThenWrites"):
        store.create("a", b"")
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_a_create_of_its_own_is_offered() -> None:
    store = store_on(fsspec.filesystem("memory"), "/offered")
    assert isinstance(store, FsspecStore)
    store.create("a", b"x")
    assert store.get("a") == b"x"
    store.delete("a")


def test_anything_else_is_no_file_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Path is no file system"):
        store_on(tmp_path, "x")
