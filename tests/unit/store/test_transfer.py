import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier

import pytest

from spotfit.core.errors import (
    ConfigError,
    IntegrityError,
    StoreError,
    TransientStoreError,
)
from spotfit.store.api import ObjectInfo
from spotfit.store.local import MemoryStore, temporary_path
from spotfit.store.transfer import (
    LARGE_FILE_BYTES,
    MAX_FILE_CONCURRENCY,
    SMALL_FILE_BYTES,
    FileRecord,
    download_bytes,
    download_tree,
    list_files,
    upload_tree,
)
from spotfit.store.url import PARTIAL_FILE_PREFIX
from tests.unit.store.faulty_stores import DamagedResponses

BIG = bytes(LARGE_FILE_BYTES + 1)


class Watched(MemoryStore):
    """Records uploaded and downloaded keys, and fails for the given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.fetched: list[str] = []
        self.fails_at: str | None = None
        self.after_put_file: Callable[[], object] = lambda: None

    def put(self, key: str, body: bytes | memoryview) -> None:
        if key == self.fails_at:
            raise TransientStoreError(key)
        self.sent.append(key)
        super().put(key, body)

    def put_file(self, key: str, path: Path) -> None:
        super().put_file(key, path)
        self.after_put_file()

    def get_file(self, key: str, path: Path) -> None:
        self.fetched.append(key)
        super().get_file(key, path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, body in {"b/big": BIG, "b/c/empty": b"", "a": b"aaa"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    return root


def record(name: str, body: bytes) -> FileRecord:
    return FileRecord(name, len(body), hashlib.sha256(body).hexdigest())


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


# ── up ───────────────────────────────────────────────────────────────────────────────────────────


def test_every_file_is_uploaded_and_recorded(tree: Path) -> None:
    store = Watched()
    assert upload_tree(store, "p", tree) == (
        record("a", b"aaa"),
        record("b/big", BIG),
        record("b/c/empty", b""),
    )
    assert [found.key for found in store.list()] == ["p/a", "p/b/big", "p/b/c/empty"]


def test_partial_files_are_skipped_and_similar_names_rejected(
    tree: Path,
) -> None:
    temporary_path(tree / "a").write_bytes(b"half")
    assert [one.name for one in upload_tree(MemoryStore(), "p", tree)] == [
        "a",
        "b/big",
        "b/c/empty",
    ]
    (tree / "b" / f"{PARTIAL_FILE_PREFIX}1").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"'b/\.spotfit-part-1'.* starts with"):
        upload_tree(MemoryStore(), "p", tree)


class ConcurrentStore(MemoryStore):
    """Blocks requests until that many run at once."""

    def __init__(self, concurrency: int) -> None:
        super().__init__()
        self.barrier = Barrier(concurrency, timeout=10.0)

    def put(self, key: str, body: bytes | memoryview) -> None:
        self.barrier.wait()
        super().put(key, body)


@pytest.mark.parametrize(
    ("size_bytes", "at_once"), [(SMALL_FILE_BYTES, MAX_FILE_CONCURRENCY), (SMALL_FILE_BYTES + 1, 8)]
)
def test_smaller_files_are_uploaded_with_more_concurrency(
    tmp_path: Path, size_bytes: int, at_once: int
) -> None:
    for n in range(at_once):
        (tmp_path / f"{n}").write_bytes(bytes(size_bytes))
    assert len(upload_tree(ConcurrentStore(at_once), "p", tmp_path)) == at_once


def test_a_failed_upload_is_resumed(tree: Path) -> None:
    store = Watched()
    store.fails_at = "p/b/c/empty"
    with pytest.raises(TransientStoreError) as raised:
        upload_tree(store, "p", tree, concurrency=1)
    assert record("a", b"aaa") in raised.value.details["uploaded"]
    store.sent.clear()
    store.fails_at = None
    records = upload_tree(store, "p", tree, previous_records=raised.value.details["uploaded"])
    assert "p/a" not in store.sent
    assert "p/b/c/empty" in store.sent
    assert records == upload_tree(Watched(), "p", tree)


def test_a_changed_file_is_uploaded_again(tree: Path) -> None:
    store = Watched()
    known = upload_tree(store, "p", tree)
    (tree / "a").write_bytes(b"bbb")
    store.sent.clear()
    assert record("a", b"bbb") in upload_tree(store, "p", tree, previous_records=known)
    assert store.sent == ["p/a"]


def test_a_file_that_changes_during_the_upload_raises_integrity_error(tree: Path) -> None:
    store = Watched()
    store.after_put_file = lambda: os.utime(tree / "b" / "big", (1, 1))
    with pytest.raises(IntegrityError, match="big changed"):
        upload_tree(store, "p", tree)


def test_a_file_deleted_during_the_upload_raises_integrity_error(tree: Path) -> None:
    store = Watched()
    store.after_put_file = (tree / "b" / "big").unlink
    with pytest.raises(IntegrityError, match="big was deleted"):
        upload_tree(store, "p", tree)


def test_links_within_the_directory_are_followed(tree: Path) -> None:
    (tree / "link").symlink_to("b/c/empty")
    (tree / "folder").symlink_to(tree / "b" / "c")
    names = [record.name for record in upload_tree(Watched(), "p", tree)]
    assert names == ["a", "b/big", "b/c/empty", "folder/empty", "link"]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/etc/passwd", "outside of the directory"),
        ("..", "outside of the directory"),
        (".", "parent directories"),
        ("nothing", "neither a file nor a directory"),
        ("link", "neither a file nor a directory"),
    ],
)
def test_other_links_are_rejected_before_any_upload(tree: Path, target: str, why: str) -> None:
    (tree / "link").symlink_to(target)
    store = Watched()
    with pytest.raises(ConfigError, match=why):
        upload_tree(store, "p", tree)
    assert store.sent == []


def test_a_special_file_is_rejected(tree: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree / "socket"))
        with pytest.raises(ConfigError, match="neither"):
            upload_tree(Watched(), "p", tree)


def test_a_path_that_is_not_a_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        upload_tree(Watched(), "p", tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        upload_tree(Watched(), "p", tmp_path / "file")


# ── down ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_uploaded_tree_is_downloaded_unchanged(tree: Path, tmp_path: Path) -> None:
    store = Watched()
    records = upload_tree(store, "p", tree)
    download_tree(store, "p", tmp_path / "checked", records)
    download_tree(store, "p", tmp_path / "all")
    assert contents(tmp_path / "checked") == contents(tmp_path / "all") == contents(tree)


def test_only_missing_or_different_files_are_downloaded(tree: Path, tmp_path: Path) -> None:
    store = Watched()
    records = upload_tree(store, "p", tree)
    (tmp_path / "down").mkdir()
    (tmp_path / "down" / "a").write_bytes(b"aaX")
    (tmp_path / "down" / "other").write_bytes(b"mine")
    download_tree(store, "p", tmp_path / "down", records)
    store.fetched.clear()
    (tmp_path / "down" / "b" / "big").write_bytes(b"half")
    download_tree(store, "p", tmp_path / "down", records)
    assert store.fetched == ["p/b/big"]
    assert contents(tmp_path / "down") == contents(tree) | {"other": b"mine"}


def test_a_corrupt_file_is_reported_and_not_written(tree: Path, tmp_path: Path) -> None:
    store = Watched()
    records = upload_tree(store, "p", tree)
    store.put("p/a", b"aaX")
    with pytest.raises(IntegrityError, match=r"p/a .*is corrupt"):
        download_tree(store, "p", tmp_path / "down", records)
    assert "a" not in contents(tmp_path / "down")


def test_a_file_is_downloaded_again_if_its_first_read_is_damaged(
    tree: Path, tmp_path: Path
) -> None:
    store = DamagedResponses()
    records = upload_tree(store, "p", tree)
    download_tree(store, "p", tmp_path / "there", records)
    assert contents(tmp_path / "there") == contents(tree)


def test_a_missing_file_is_reported(tree: Path, tmp_path: Path) -> None:
    store = Watched()
    records = upload_tree(store, "p", tree)
    store.delete("p/a")
    with pytest.raises(IntegrityError, match="p/a is missing"):
        download_tree(store, "p", tmp_path / "down", records)


@pytest.mark.parametrize(
    "name", ["../up", "/etc/x", "a/../../up", "a//b", ".", "..", "", "a\x00b", "line\nbreak"]
)
def test_an_unsafe_name_prevents_the_download(tree: Path, tmp_path: Path, name: str) -> None:
    store = Watched()
    records = [*upload_tree(store, "p", tree), FileRecord(name, 1, "0")]
    with pytest.raises(IntegrityError, match="not a valid file name"):
        download_tree(store, "p", tmp_path / "down", records)
    assert store.fetched == []


def test_a_link_out_of_the_directory_is_not_followed(tree: Path, tmp_path: Path) -> None:
    store = Watched()
    records = upload_tree(store, "p", tree)
    (tmp_path / "down").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "down" / "b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match="outside"):
        download_tree(store, "p", tmp_path / "down", records)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_name_that_is_file_and_folder_prevents_the_download(tmp_path: Path) -> None:
    store = Watched()
    store.put("p/a", b"x")
    store.put("p/a/b", b"y")
    with pytest.raises(IntegrityError, match="a file and a folder"):
        download_tree(store, "p", tmp_path / "down")
    assert store.fetched == []


def test_an_empty_placeholder_of_a_folder_is_skipped(tmp_path: Path) -> None:
    store = Watched()
    store.put("p/a", b"")
    store.put("p/a/b", b"y")
    download_tree(store, "p", tmp_path / "down")
    assert contents(tmp_path / "down") == {"a/b": b"y"}


def test_the_marker_of_an_empty_folder_is_not_a_file() -> None:
    class Marked(MemoryStore):
        """Lists "p/sub/" as buckets do: by a key that cannot be read."""

        def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
            yield ObjectInfo("p", 0, "")
            yield ObjectInfo("p/sub", 0, "")
            yield from super().list(prefix, after=after)

    store = Marked()
    store.put("p/zero", b"")
    store.put("p/zz", b"yy")
    assert list_files(store, "p") == {"zero": 0, "zz": 2}


def test_the_first_error_cancels_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "many"
    root.mkdir()
    for n in range(200):
        (root / f"{n:03}").write_bytes(b"x")
    store = Watched()
    store.fails_at = "p/000"
    with pytest.raises(StoreError):
        upload_tree(store, "p", root, concurrency=1)
    assert len(store.sent) < 200


def test_download_bytes_uses_get_file() -> None:
    store = Watched()
    store.put("big", BIG)
    assert download_bytes(store, "big") == BIG
    assert store.fetched == ["big"]


def test_a_name_that_windows_refuses_is_not_downloaded_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.put("ck/a:b", b"x")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(IntegrityError, match="not a valid file name on Windows"):
        download_tree(store, "ck", tmp_path / "there")
