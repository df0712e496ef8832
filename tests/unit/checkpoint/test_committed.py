"""Committed checkpoints are restored as reported, or the corrupt file is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.committed import (
    check_all_present,
    check_present,
    open_all,
    open_committed,
    open_uncommitted,
)
from spotfit.checkpoint.gc import delete_checkpoint, delete_uncommitted
from spotfit.checkpoint.writer import save_directory, save_existing_files
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_KEY
from tests.unit.checkpoint.saved_checkpoints import (
    make_directory,
    make_manifest,
    ready_in_store,
    save_checkpoint,
)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else open_store(tmp_path / "store")


def contents(store: Store, name: str) -> dict[str, str]:
    with open_committed(store, name).as_directory() as directory:
        return {path.name: path.read_text() for path in Path(directory).iterdir()}


def test_files_of_all_ranks_are_restored(store: Store, tmp_path: Path) -> None:
    save_checkpoint(store, tmp_path / "0", make_manifest(rank=0, ranks=(0, 1)), a="of 0")
    save_checkpoint(store, tmp_path / "1", make_manifest(rank=1, ranks=(0, 1)), b="of 1")
    check_present(store, "ck")
    assert contents(store, "ck") == {"a": "of 0", "b": "of 1"}


def test_a_missing_file_is_reported_by_name(store: Store, tmp_path: Path) -> None:
    save_checkpoint(store, tmp_path / "0", make_manifest(), model="weights", other="x")
    store.delete("ck/model")
    with pytest.raises(IntegrityError, match="model"):
        check_present(store, "ck")
    with pytest.raises(IntegrityError, match="model"):
        contents(store, "ck")


def test_a_corrupt_file_is_reported_by_name(store: Store, tmp_path: Path) -> None:
    save_checkpoint(store, tmp_path / "0", make_manifest(), model="weights")
    store.put("ck/model", b"weightS")
    with pytest.raises(IntegrityError, match="model"):
        contents(store, "ck")


def test_check_present_detects_another_size_without_reading(store: Store, tmp_path: Path) -> None:
    save_checkpoint(store, tmp_path / "0", make_manifest(), model="weights")
    store.put("ck/model", b"w")
    with pytest.raises(IntegrityError, match=r"'model'.* has \d+ bytes, not \d+"):
        check_present(store, "ck")


def test_a_checkpoint_without_manifests_raises_integrity_error(store: Store) -> None:
    store.put("ck/model", b"weights")
    for check in (open_committed, check_present):
        with pytest.raises(IntegrityError, match=r"ck .*is missing"):
            check(store, "ck")


def test_metadata_may_change_after_the_report(store: Store, tmp_path: Path) -> None:
    save_checkpoint(
        store, tmp_path / "0", make_manifest(), model="w", **{".metadata.json": '{"a": 1}'}
    )
    open_committed(store, "ck").update_metadata({"b": 2})
    check_present(store, "ck")
    assert contents(store, "ck") == {"model": "w", ".metadata.json": '{"a":1,"b":2}'}


def test_of_equal_names_from_two_ranks_any_upload_is_accepted(store: Store, tmp_path: Path) -> None:
    for rank, text in enumerate(("first", "second")):
        save_checkpoint(store, tmp_path / text, make_manifest(rank=rank, ranks=(0, 1)), model=text)
    assert contents(store, "ck") == {"model": "second"}
    store.put("ck/model", b"first")
    assert contents(store, "ck") == {"model": "first"}


def test_files_without_hash_are_verified_by_size(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put("ck/sub/model", b"weights")
    save_existing_files(store, make_manifest())
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as directory:
        assert Path(directory, "sub/model").read_text() == "weights"
    store.put("ck/sub/model", b"w")
    with (
        pytest.raises(IntegrityError, match=r"sub/model.* is corrupt: its size has changed"),
        checkpoint.as_directory(),
    ):
        pytest.fail("it was given out")


def test_replaced_files_precede_inherited_files(store: Store, tmp_path: Path) -> None:
    ranks = (0, 1)
    for rank in ranks:
        old = {"same": f"old {rank}", f"moves-{1 - rank}": "old", f"own-{rank}": "old"}
        save_checkpoint(
            store, tmp_path / f"a{rank}", make_manifest("last", rank=rank, ranks=ranks), **old
        )
    for rank in ranks:
        there = make_directory(tmp_path / f"b{rank}", **{f"moves-{rank}": "new"})
        save_directory(
            store, there, make_manifest("last@1-1", report=1, rank=rank, ranks=ranks), parent="last"
        )
    merged = {"moves-0": "new", "moves-1": "new", "own-0": "old", "own-1": "old"}
    check_present(store, "last@1-1")
    assert contents(store, "last@1-1") == {**merged, "same": "old 1"}
    delete_checkpoint(store, "last")
    assert contents(store, "last@1-1") == {**merged, "same": "old 1"}


@pytest.mark.parametrize("again", [0, 1])
def test_of_inherited_equal_names_the_last_upload_wins(
    store: Store, tmp_path: Path, again: int
) -> None:
    """Each rank inherits its own upload, though another rank uploaded the name later."""
    ranks = (0, 1)
    for rank in ranks:
        save_checkpoint(
            store, tmp_path / f"a{rank}", make_manifest("last", rank=rank, ranks=ranks), same="old"
        )
    before = "last"
    for report, text in ((9, "new"), (10, "newest"), (11, "")):
        name = f"last@1-{report}"
        for rank in ranks:
            files = {"same": text} if rank == again and text else {"other": "x"}
            there = make_directory(tmp_path / f"{name}-{rank}", **files)
            save_directory(
                store,
                there,
                make_manifest(name, report=report, rank=rank, ranks=ranks),
                parent=before,
            )
        before = name
    assert contents(store, before) == {"same": "newest", "other": "x"}


def test_an_uncommitted_checkpoint_has_the_uploaded_parts(store: Store, tmp_path: Path) -> None:
    def so_far(folder: str) -> set[str]:
        with open_uncommitted(store, "ck", folder).as_directory() as there:
            return {path.name for path in Path(there).iterdir()}

    store.put("gone/x", b"1")
    assert so_far("gone") == {"x"}
    ranks = (0, 1, 2)
    save_checkpoint(store, tmp_path / "1", make_manifest(rank=1, ranks=ranks), a="1")
    assert so_far("ck") == {"a"}
    save_checkpoint(store, tmp_path / "0", make_manifest(rank=0, ranks=ranks), b="1")
    assert so_far("ck") == {"a", "b"}
    store.put("elsewhere/c", b"1")
    save_existing_files(
        store, replace(make_manifest(rank=2, ranks=ranks), custom_folder="elsewhere")
    )
    assert so_far("elsewhere") == {"c"}


def test_an_unfinished_reuse_of_a_name_leaves_the_first_intact(
    store: Store, tmp_path: Path
) -> None:
    for rank in (0, 1):
        save_checkpoint(
            store,
            tmp_path / f"a{rank}",
            make_manifest("last", rank=rank, ranks=(0, 1)),
            **{f"w{rank}": "1"},
        )
    again = make_manifest("last@1-1", report=1, rank=0, ranks=(0, 1))
    save_directory(store, make_directory(tmp_path / "b", w0="2"), again, parent="last")
    check_present(store, "last")
    assert contents(store, "last") == {"w0": "1", "w1": "1"}
    delete_uncommitted(store, "last@1-1")
    assert contents(store, "last") == {"w0": "1", "w1": "1"}


def test_files_without_hash_are_inherited(store: Store, tmp_path: Path) -> None:
    store.put("last/a", b"1")
    save_existing_files(store, replace(make_manifest("last"), custom_folder="last"))
    save_directory(
        store,
        make_directory(tmp_path / "b", b="2"),
        make_manifest("last@1-1", report=1),
        parent="last",
    )
    assert contents(store, "last@1-1") == {"a": "1", "b": "2"}


def test_files_of_an_uncommitted_round_are_not_included(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(
        store, tmp_path / "old", make_manifest(rank=1, ranks=(0, 1)), shard_1="of a wider group"
    )
    save_checkpoint(store, tmp_path / "new", make_manifest(round_number=2), shard_0="x")
    assert contents(store, "ck") == {"shard_0": "x"}


class FourListingsAtATime(MemoryStore):
    """Blocks the first listings of checkpoint folders until four run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.four: threading.Barrier | None = threading.Barrier(4, timeout=60)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        if self.four is not None and prefix.startswith("c"):
            self.four.wait()
        return super().list(prefix, after=after)


def test_check_all_present_lists_concurrently_and_names_the_incomplete_checkpoint(
    tmp_path: Path,
) -> None:
    store = FourListingsAtATime()
    for n in range(20):
        save_checkpoint(store, tmp_path / str(n), make_manifest(f"c{n}"), x="1")
    names = {f"c{n}": "" for n in range(20)}
    check_all_present(store, names)
    store.four = None
    store.delete("c7/x")
    with pytest.raises(IntegrityError, match=r"'x' of checkpoint c7 .* is missing"):
        check_all_present(store, names)
    with pytest.raises(IntegrityError, match=r"c20 .* is missing"):
        check_all_present(store, {"c1": "", "c20": ""})


def test_only_manifests_of_requested_names_are_read(tmp_path: Path) -> None:
    read: list[str] = []

    class RecordingStore(MemoryStore):
        def get(self, key: str) -> bytes:
            read.append(key)
            return super().get(key)

    store = RecordingStore()
    for n in range(5):
        save_checkpoint(store, tmp_path / str(n), make_manifest(f"c{n}"), x="1")
    assert set(open_all(store, {"c3": "", "c1": ""})) == {"c1", "c3"}
    assert sorted(read) == [keys.manifest("c1", 1, 0), keys.manifest("c3", 1, 0)]


def test_open_all_includes_checkpoints_without_manifests(tmp_path: Path) -> None:
    store = MemoryStore()
    save_checkpoint(store, tmp_path / "a", make_manifest("a"), x="a")
    store.put("b/x", b"b")
    opened = open_all(store, {"a": "", "b": ""})
    assert {name: one.path for name, one in opened.items()} == {
        "a": "private/a",
        "b": "private/b",
    }
    with opened["b"].as_directory() as directory:
        assert Path(directory, "x").read_text() == "b"
    store.put("a/x", b"!")
    with pytest.raises(IntegrityError, match="a/x"):
        opened["a"].to_directory(tmp_path / "to")
    assert keys.manifest("a", 1, 0) in [found.key for found in store.list()]


def test_with_the_key_files_without_an_authentic_manifest_are_not_read(tmp_path: Path) -> None:
    plain = MemoryStore()
    store = AuthenticatedStore(plain, RUN_KEY)
    save_checkpoint(store, tmp_path / "a", make_manifest("a"), x="a")
    plain.put("a/x", b"replaced")
    key = keys.manifest("a", 1, 0)
    plain.put(key, strip_mac(plain.get(key)))
    opened = open_all(store, {"a": ""})["a"]
    with (
        pytest.raises(IntegrityError, match=r"'authentic manifest' of .* is missing"),
        opened.as_directory(),
    ):
        pass
    with pytest.raises(IntegrityError, match=r"a in .* is missing: the storage has no manifest"):
        open_committed(store, "a")


def test_an_earlier_authentic_manifest_is_not_taken_for_the_committed_one(tmp_path: Path) -> None:
    """Another writer of the bucket restores an earlier save of the run under the same key."""
    plain = MemoryStore()
    store = AuthenticatedStore(plain, RUN_KEY)
    save_checkpoint(store, tmp_path / "0", make_manifest(report=0), x="earlier")
    key = keys.manifest("ck", 1, 0)
    earlier = {name: plain.get(name) for name in (key, "ck/x")}
    save_checkpoint(store, tmp_path / "1", make_manifest(report=1), x="committed")
    [ready] = ready_in_store(store)
    digest = ready.manifests_digest
    open_committed(store, "ck", digest=digest)
    for name, body in earlier.items():
        plain.put(name, body)
    open_committed(store, "ck")  # authentic, and complete
    replaced = "ck in .* was replaced: its manifests are not those that the run has committed"
    with pytest.raises(IntegrityError, match=replaced):
        open_committed(store, "ck", digest=digest)
    with pytest.raises(IntegrityError, match=replaced):
        check_present(store, "ck", digest=digest)
    with pytest.raises(IntegrityError, match=replaced):
        check_all_present(store, {"ck": digest})
    with pytest.raises(IntegrityError), open_all(store, {"ck": digest})["ck"].as_directory():
        pass
