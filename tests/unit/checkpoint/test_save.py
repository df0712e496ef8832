"""One rank's part: files first, manifest last, equal names merge."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.handle import METADATA
from spotfit.checkpoint.manifest import manifest_of, manifests_of
from spotfit.checkpoint.save import record, save
from spotfit.ledger import keys
from spotfit.store.memory import MemoryStore
from tests.unit.checkpoint.kept import directory, part, saved


def test_files_lie_under_the_name_and_the_manifest_tells_them(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = saved(store, tmp_path, part("epoch-1"), model="weights")
    assert store.get("epoch-1/model") == b"weights"
    assert manifests_of(store, "epoch-1") == [manifest]
    assert [(file.name, file.size_bytes) for file in manifest.files] == [("model", 7)]


class DiesAtTheManifest(MemoryStore):
    def put(self, key: str, body: bytes | memoryview) -> None:
        if key.startswith(keys.MANIFESTS):
            raise ConnectionError("gone")
        super().put(key, body)


def test_the_manifest_comes_last(tmp_path: Path) -> None:
    store = DiesAtTheManifest()
    with pytest.raises(ConnectionError):
        saved(store, tmp_path, part("ck"), model="weights")
    assert [found.key for found in store.list()] == ["ck/model"]


def test_ranks_merge_into_one_folder(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank, name in enumerate(("a", "b")):
        saved(store, tmp_path / name, part(rank=rank, ranks=(0, 1)), **{name: name})
    assert [found.key for found in store.list("ck")] == ["ck/a", "ck/b"]
    assert len(manifests_of(store, "ck")) == 2


def test_what_had_the_name_before_stays_and_what_is_not_replaced_belongs_to_both(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    old = {"a": "old", "b": "old", METADATA: "{}"}
    first = saved(store, tmp_path / "1", part("last"), **old)
    saved(store, tmp_path / "x", part("last", rank=1), x="of another rank")
    again = part("last@1-1", report=1)
    second = save(store, directory(tmp_path / "2", b="newer"), again, base="last")
    third = save(store, directory(tmp_path / "3", c="c"), part("n", report=2), base="last@1-1")
    assert [(file.name, file.size_bytes, file.at) for file in second.files] == [
        ("b", 5, ""),
        ("a", 3, "last"),
    ]
    assert [(file.name, file.at) for file in third.files] == [
        ("c", ""),
        ("b", "last@1-1"),
        ("a", "last"),
    ]
    assert manifest_of(store, "last", 0) == first
    assert store.get("last/b") == b"old"
    shares = [found.key for found in store.list(".spotfit/shares")]
    assert shares == [keys.sharer("last", name, 1, 0) for name in ("last@1-1", "n")] + [
        keys.sharer("last@1-1", "n", 1, 0)
    ], "or they were deleted with those whose they are"


def test_what_a_user_overwrites_in_its_place_is_taken_as_it_is() -> None:
    store = MemoryStore()
    store.put("mine/1", b"1")
    record(store, replace(part("mine"), at="mine"))
    store.delete("mine/1")
    store.put("mine/2", b"2")
    again = record(store, replace(part("mine@1-1", report=1), at="mine"), base="mine")
    assert [(file.name, file.at) for file in again.files] == [("2", "")]


def test_a_directory_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not there"):
        save(MemoryStore(), tmp_path / "gone", part())


def test_files_that_are_there_already_are_written_down(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put("ck/model", b"weights")
    store.put("ck-2/other", b"x")
    manifest = record(store, part("ck"))
    assert [(file.name, file.size_bytes, file.sha256) for file in manifest.files] == [
        ("model", 7, "")
    ]
    assert manifests_of(store, "ck") == [manifest]


def test_nothing_there_is_no_checkpoint() -> None:
    with pytest.raises(ValueError, match="There is nothing in ck"):
        record(MemoryStore(), part("ck"))
