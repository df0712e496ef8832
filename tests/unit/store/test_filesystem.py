from pathlib import Path

import pytest

from spotfit.core.errors import AtomicCreateUnsupportedError, ConfigError
from spotfit.store.filesystem import FsspecStore, open_filesystem_store
from spotfit.store.local import LocalStore

fsspec = pytest.importorskip("fsspec")


class ChecksThenWrites(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """A file system with the generic `create` of fsspec."""

    pipe_file = fsspec.AbstractFileSystem.pipe_file


def test_a_wrapped_local_file_system_gives_a_local_store(tmp_path: Path) -> None:
    local = fsspec.filesystem("file")
    below = fsspec.filesystem("dir", path=str(tmp_path), fs=local)
    for store in (
        open_filesystem_store(local, str(tmp_path / "a")),
        open_filesystem_store(below, "a"),
    ):
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "a")


def test_pyarrow_wrappers_are_unwrapped(tmp_path: Path) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    (tmp_path / "b").mkdir()
    wrappings = (
        (fs.LocalFileSystem(), str(tmp_path / "b" / "a")),
        (fs.SubTreeFileSystem(str(tmp_path / "b"), fs.LocalFileSystem()), "a"),
        (fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("file"))), str(tmp_path / "b" / "a")),
    )
    for filesystem, path in wrappings:
        store = open_filesystem_store(filesystem, path)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "b" / "a")


def test_a_non_atomic_create_is_rejected() -> None:
    store = open_filesystem_store(ChecksThenWrites(), "/bucket")
    with pytest.raises(AtomicCreateUnsupportedError, match="ChecksThenWrites"):
        store.create("a", b"")
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_an_atomic_create_is_used() -> None:
    store = open_filesystem_store(fsspec.filesystem("memory"), "/offered")
    assert isinstance(store, FsspecStore)
    store.create("a", b"x")
    assert store.get("a") == b"x"
    store.delete("a")


def test_another_object_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Path, not a file system"):
        open_filesystem_store(tmp_path, "x")
