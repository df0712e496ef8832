import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotfit.core.errors import (
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
    UntrustworthyStoreError,
)
from spotfit.store.local import LocalStore
from spotfit.store.opening import open_store
from spotfit.store.url import PART_NAME, RootUrl


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(RootUrl.parse(tmp_path / "root"))


def failing_with(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_nothing_is_made_before_something_is_written(store: LocalStore, tmp_path: Path) -> None:
    assert list(store.list()) == []
    store.delete("a/b")
    with pytest.raises(NotFoundError):
        store.get("a/b")
    assert list(tmp_path.iterdir()) == []


def test_folders_go_with_their_last_object(store: LocalStore, tmp_path: Path) -> None:
    store.put("a/b/one", b"")
    store.put("a/two", b"")
    store.delete("a/b/one")
    assert [path.name for path in (tmp_path / "root" / "a").iterdir()] == ["two"]
    store.delete("a/two")
    assert list((tmp_path / "root").iterdir()) == []


def test_writers_and_tidiers_do_not_hinder_each_other(store: LocalStore) -> None:
    def write_and_delete(n: int) -> None:
        for turn in range(150):
            store.create(f"deep/er/{n}", b"")
            store.put(f"deep/{n}-{turn}", b"")
            store.delete(f"deep/er/{n}")
            store.delete(f"deep/{n}-{turn}")

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(write_and_delete, range(4)):
            pass
    assert list(store.list()) == []


def test_half_written_files_and_linked_folders_are_no_objects(
    store: LocalStore, tmp_path: Path
) -> None:
    store.put("file", b"")
    (tmp_path / "root" / f"{PART_NAME}1").write_bytes(b"half")
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root")
    assert [found.key for found in store.list()] == ["file"]


def test_a_failed_write_leaves_no_part(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("file", b"old")

    def full(path: Path, body: bytes) -> int:
        path.touch()
        raise failing_with(errno.ENOSPC)

    monkeypatch.setattr(Path, "write_bytes", full)
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="no room left"):
            write("file", b"new")
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["file"]
    assert store.get("file") == b"old"


def test_an_object_where_a_folder_is_needed_is_told(store: LocalStore) -> None:
    store.put("a", b"")
    with pytest.raises(StoreError, match="refused a/b"):
        store.put("a/b", b"")
    with pytest.raises(NotFoundError):
        store.get("a/b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_a_directory_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorePermissionError, match="may not write"):
        open_store(tmp_path).put("a", b"")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, StorePermissionError),
        (errno.EROFS, StorePermissionError),
        (errno.ESTALE, TransientStoreError),
        (errno.EIO, TransientStoreError),
        (errno.EPERM, UntrustworthyStoreError),
        (errno.EOPNOTSUPP, UntrustworthyStoreError),
        (errno.ENAMETOOLONG, StoreError),
    ],
)
def test_what_the_file_system_says_of_a_create(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    def refuse(part: Path, file: Path) -> None:
        raise failing_with(code)

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError) as told:
        store.create("a", b"")
    assert type(told.value) is kind
    assert list(store.list()) == []
