"""A committed checkpoint comes back as it was reported, or says which file does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.debris import discard
from spotfit.checkpoint.drop import drop
from spotfit.checkpoint.restore import (
    check_all_present,
    check_present,
    open_all,
    open_committed,
    open_so_far,
)
from spotfit.checkpoint.save import record, save
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from tests.unit.checkpoint.kept import directory, part, saved


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else open_store(tmp_path / "store")


def contents(store: Store, name: str) -> dict[str, str]:
    with open_committed(store, name).as_directory() as directory:
        return {path.name: path.read_text() for path in Path(directory).iterdir()}


def test_all_ranks_files_come_back(store: Store, tmp_path: Path) -> None:
    saved(store, tmp_path / "0", part(rank=0, ranks=(0, 1)), a="of 0")
    saved(store, tmp_path / "1", part(rank=1, ranks=(0, 1)), b="of 1")
    check_present(store, "ck")
    assert contents(store, "ck") == {"a": "of 0", "b": "of 1"}


def test_a_missing_file_is_named(store: Store, tmp_path: Path) -> None:
    saved(store, tmp_path / "0", part(), model="weights", other="x")
    store.delete("ck/model")
    with pytest.raises(IntegrityError, match="model"):
        check_present(store, "ck")
    with pytest.raises(IntegrityError, match="model"):
        contents(store, "ck")


def test_a_flipped_file_is_named(store: Store, tmp_path: Path) -> None:
    saved(store, tmp_path / "0", part(), model="weights")
    store.put("ck/model", b"weightS")
    with pytest.raises(IntegrityError, match="model"):
        contents(store, "ck")


def test_a_file_of_another_size_is_seen_without_reading(store: Store, tmp_path: Path) -> None:
    saved(store, tmp_path / "0", part(), model="weights")
    store.put("ck/model", b"w")
    with pytest.raises(IntegrityError, match=r"'model'.* has another size"):
        check_present(store, "ck")


def test_a_checkpoint_without_manifests_is_gone(store: Store) -> None:
    store.put("ck/model", b"weights")
    for ask in (open_committed, check_present):
        with pytest.raises(IntegrityError, match=r"ck .*gone or in pieces"):
            ask(store, "ck")


def test_notes_may_change_after_the_report(store: Store, tmp_path: Path) -> None:
    saved(store, tmp_path / "0", part(), model="w", **{".metadata.json": '{"a": 1}'})
    open_committed(store, "ck").update_metadata({"b": 2})
    check_present(store, "ck")
    assert contents(store, "ck") == {"model": "w", ".metadata.json": '{"a":1,"b":2}'}


def test_of_equal_names_from_two_ranks_whichever_came_last_is_taken(
    store: Store, tmp_path: Path
) -> None:
    for rank, text in enumerate(("first", "second")):
        saved(store, tmp_path / text, part(rank=rank, ranks=(0, 1)), model=text)
    assert contents(store, "ck") == {"model": "second"}
    store.put("ck/model", b"first")
    assert contents(store, "ck") == {"model": "first"}


def test_files_nobody_hashed_are_checked_by_size(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put("ck/sub/model", b"weights")
    record(store, part())
    checkpoint = open_committed(store, "ck")
    with checkpoint.as_directory() as directory:
        assert Path(directory, "sub/model").read_text() == "weights"
    store.put("ck/sub/model", b"w")
    with (
        pytest.raises(IntegrityError, match=r"sub/model.* is not what was reported"),
        checkpoint.as_directory(),
    ):
        pytest.fail("it was given out")


def test_what_was_taken_over_comes_along_and_what_was_brought_anew_comes_first(
    store: Store, tmp_path: Path
) -> None:
    ranks = (0, 1)
    for rank in ranks:
        old = {"same": f"old {rank}", f"moves-{1 - rank}": "old", f"own-{rank}": "old"}
        saved(store, tmp_path / f"a{rank}", part("last", rank=rank, ranks=ranks), **old)
    for rank in ranks:
        there = directory(tmp_path / f"b{rank}", **{f"moves-{rank}": "new"})
        save(store, there, part("last@1-1", report=1, rank=rank, ranks=ranks), base="last")
    merged = {"moves-0": "new", "moves-1": "new", "own-0": "old", "own-1": "old"}
    check_present(store, "last@1-1")
    assert contents(store, "last@1-1") == {**merged, "same": "old 1"}
    drop(store, "last")
    assert contents(store, "last@1-1") == {**merged, "same": "old 1"}


@pytest.mark.parametrize("again", [0, 1])
def test_of_equal_names_from_two_ranks_the_last_that_was_brought_is_taken_over(
    store: Store, tmp_path: Path, again: int
) -> None:
    """Each rank takes over what it has brought itself, though another has brought it since."""
    ranks = (0, 1)
    for rank in ranks:
        saved(store, tmp_path / f"a{rank}", part("last", rank=rank, ranks=ranks), same="old")
    before = "last"
    for report, text in ((9, "new"), (10, "newest"), (11, "")):
        name = f"last@1-{report}"
        for rank in ranks:
            files = {"same": text} if rank == again and text else {"other": "x"}
            there = directory(tmp_path / f"{name}-{rank}", **files)
            save(store, there, part(name, report=report, rank=rank, ranks=ranks), base=before)
        before = name
    assert contents(store, before) == {"same": "newest", "other": "x"}


def test_before_it_is_committed_it_is_the_parts_that_are_there(
    store: Store, tmp_path: Path
) -> None:
    def so_far(folder: str) -> set[str]:
        with open_so_far(store, "ck", folder).as_directory() as there:
            return {path.name for path in Path(there).iterdir()}

    store.put("gone/x", b"1")
    assert so_far("gone") == {"x"}
    ranks = (0, 1, 2)
    saved(store, tmp_path / "1", part(rank=1, ranks=ranks), a="1")
    assert so_far("ck") == {"a"}
    saved(store, tmp_path / "0", part(rank=0, ranks=ranks), b="1")
    assert so_far("ck") == {"a", "b"}
    store.put("elsewhere/c", b"1")
    record(store, replace(part(rank=2, ranks=ranks), at="elsewhere"))
    assert so_far("elsewhere") == {"c"}


def test_a_second_of_a_name_that_is_never_finished_leaves_the_first_whole(
    store: Store, tmp_path: Path
) -> None:
    for rank in (0, 1):
        saved(
            store, tmp_path / f"a{rank}", part("last", rank=rank, ranks=(0, 1)), **{f"w{rank}": "1"}
        )
    again = part("last@1-1", report=1, rank=0, ranks=(0, 1))
    save(store, directory(tmp_path / "b", w0="2"), again, base="last")
    check_present(store, "last")
    assert contents(store, "last") == {"w0": "1", "w1": "1"}
    discard(store, "last@1-1")
    assert contents(store, "last") == {"w0": "1", "w1": "1"}


def test_files_that_nobody_hashed_are_taken_over_too(store: Store, tmp_path: Path) -> None:
    store.put("last/a", b"1")
    record(store, replace(part("last"), at="last"))
    save(store, directory(tmp_path / "b", b="2"), part("last@1-1", report=1), base="last")
    assert contents(store, "last@1-1") == {"a": "1", "b": "2"}


def test_debris_of_an_earlier_round_does_not_come_along(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path / "old", part(rank=1, ranks=(0, 1)), shard_1="of a wider group")
    saved(store, tmp_path / "new", part(round_number=2), shard_0="x")
    assert contents(store, "ck") == {"shard_0": "x"}


class ListsFourTogether(MemoryStore):
    """Answers nobody who looks at a checkpoint's files before four do, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.four: threading.Barrier | None = threading.Barrier(4, timeout=60)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        if self.four is not None and prefix.startswith("c"):
            self.four.wait()
        return super().list(prefix, after=after)


def test_many_are_looked_at_together_and_one_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    store = ListsFourTogether()
    for n in range(20):
        saved(store, tmp_path / str(n), part(f"c{n}"), x="1")
    names = [f"c{n}" for n in range(20)]
    check_all_present(store, names)
    store.four = None
    store.delete("c7/x")
    with pytest.raises(IntegrityError, match=r"'x' of checkpoint c7 .* is missing"):
        check_all_present(store, names)
    with pytest.raises(IntegrityError, match=r"c20 .* is gone"):
        check_all_present(store, ["c1", "c20"])


def test_only_manifests_of_those_that_are_asked_for_are_read(tmp_path: Path) -> None:
    read: list[str] = []

    class Told(MemoryStore):
        def get(self, key: str) -> bytes:
            read.append(key)
            return super().get(key)

    store = Told()
    for n in range(5):
        saved(store, tmp_path / str(n), part(f"c{n}"), x="1")
    assert set(open_all(store, {"c3", "c1"})) == {"c1", "c3"}
    assert sorted(read) == [keys.manifest("c1", 1, 0), keys.manifest("c3", 1, 0)]


def test_one_look_opens_all_and_misses_none(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, tmp_path / "a", part("a"), x="a")
    store.put("b/x", b"b")
    opened = open_all(store, {"a", "b"})
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
