import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotfit.core.errors import (
    AtomicCreateUnsupportedError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store.factory import open_store
from spotfit.store.local import LocalStore
from spotfit.store.url import PARTIAL_FILE_PREFIX, RootUrl


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(RootUrl.parse(tmp_path / "root"))


def failing_with(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_no_directory_is_created_before_the_first_write(store: LocalStore, tmp_path: Path) -> None:
    assert list(store.list()) == []
    store.delete("a/b")
    with pytest.raises(NotFoundError):
        store.get("a/b")
    assert list(tmp_path.iterdir()) == []


def test_directories_are_removed_with_their_last_object(store: LocalStore, tmp_path: Path) -> None:
    store.put("a/b/one", b"")
    store.put("a/two", b"")
    store.delete("a/b/one")
    assert [path.name for path in (tmp_path / "root" / "a").iterdir()] == ["two"]
    store.delete("a/two")
    assert list((tmp_path / "root").iterdir()) == []


def test_concurrent_writes_and_deletes_succeed(store: LocalStore) -> None:
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


def test_partial_files_and_linked_directories_are_not_listed(
    store: LocalStore, tmp_path: Path
) -> None:
    store.put("file", b"")
    (tmp_path / "root" / f"{PARTIAL_FILE_PREFIX}1").write_bytes(b"half")
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root")
    assert [found.key for found in store.list()] == ["file"]


@pytest.mark.parametrize("key", ["ck/x", "ck/a/x"])
def test_nothing_is_deleted_through_a_linked_directory(
    store: LocalStore, tmp_path: Path, key: str
) -> None:
    target = tmp_path / "moved" / key.removeprefix("ck/")
    target.parent.mkdir(parents=True)
    target.write_bytes(b"1")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "ck").symlink_to(tmp_path / "moved")
    assert store.get(key) == b"1"
    store.delete(key)
    assert target.read_bytes() == b"1"


def test_objects_below_a_linked_root_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    store = open_store(tmp_path / "root")
    store.put("a/x", b"1")
    store.delete("a/x")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_failed_write_leaves_no_partial_file(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("file", b"old")

    def full(path: Path, body: bytes) -> int:
        path.touch()
        raise failing_with(errno.ENOSPC)

    monkeypatch.setattr(Path, "write_bytes", full)
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="The disk is full"):
            write("file", b"new")
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["file"]
    assert store.get("file") == b"old"


def test_an_object_in_place_of_a_directory_raises_store_error(store: LocalStore) -> None:
    store.put("a", b"")
    with pytest.raises(StoreError, match="Failed to write a/b"):
        store.put("a/b", b"")
    with pytest.raises(NotFoundError):
        store.get("a/b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_a_read_only_directory_raises_permission_error(tmp_path: Path) -> None:
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
        (errno.ENOTCONN, TransientStoreError),
        (errno.EPERM, AtomicCreateUnsupportedError),
        (errno.EOPNOTSUPP, AtomicCreateUnsupportedError),
        (errno.ENAMETOOLONG, StoreError),
    ],
)
def test_errors_of_link_are_translated(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    def refuse(part: Path, file: Path) -> None:
        raise failing_with(code)

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError) as raised:
        store.create("a", b"")
    assert type(raised.value) is kind
    assert list(store.list()) == []
