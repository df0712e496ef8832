"""A snapshot is brought once: what an earlier one holds is shared, and survives that one's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.bring import Brought, SnapshotParcel, bring_snapshot, packed, unpacked
from spotfit.checkpoint.drop import drop
from spotfit.checkpoint.manifest import ready_in
from spotfit.checkpoint.restore import check_present, open_committed
from spotfit.checkpoint.saved import open_saved
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, chunks_of
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from tests.unit.checkpoint.kept import part, saved
from tests.unit.checkpoint.snapshots import BIG, brought, bytes_of, pieces_of

FROZEN = bytes_of(1, BIG)


def chunks_in(store: MemoryStore, name: str) -> int:
    return sum(found.key.startswith(f"{name}/chunks/") for found in store.list())


@pytest.mark.parametrize("remembers", [True, False])
def test_what_did_not_change_is_not_sent_again(tmp_path: Path, *, remembers: bool) -> None:
    store, known = MemoryStore(), Brought()
    brought(store, tmp_path, "a", [FROZEN, bytes_of(2, BIG)], known=known)
    again = brought(
        store,
        tmp_path,
        "b",
        [FROZEN, bytes_of(3, BIG)],
        base="a",
        known=known if remembers else None,
    )
    assert chunks_in(store, "b") == 1
    assert [file.at for file in again.files if file.at] == ["a"]


def test_what_is_shared_outlives_where_it_lay(tmp_path: Path) -> None:
    """a is dropped, then b: c still has the chunk that a brought. With c it goes."""
    store, known = MemoryStore(), Brought()
    for name, base, n in (("a", "", 2), ("b", "a", 3), ("c", "b", 4)):
        brought(store, tmp_path, name, [FROZEN, bytes_of(n, BIG)], base=base, known=known)
    drop(store, "a")
    assert chunks_in(store, "a") == 1
    drop(store, "b")
    saved = open_saved(store, "c")
    assert saved is not None
    part_of_c = saved.parts[0]
    found = [bytes(part_of_c.fetch(chunk)) for chunk in part_of_c.index.chunks]
    assert found == [FROZEN, bytes_of(4, BIG)]
    drop(store, "c")
    assert list(store.list()) == []


def test_a_successor_sees_that_it_is_a_snapshot(tmp_path: Path) -> None:
    store = MemoryStore()
    brought(store, tmp_path, "a", [FROZEN])
    saved(store, tmp_path / "files", part("own"), x="1")
    assert {one.name: one.snapshot for one in ready_in(store, ())} == {"a": True, "own": False}


def test_without_a_base_nothing_is_shared(tmp_path: Path) -> None:
    """It might be deleted meanwhile."""
    store, known = MemoryStore(), Brought()
    brought(store, tmp_path, "a", [FROZEN], known=known)
    brought(store, tmp_path, "b", [FROZEN], known=known)
    assert (chunks_in(store, "a"), chunks_in(store, "b")) == (1, 1)


def test_it_is_a_checkpoint_as_any_other(tmp_path: Path) -> None:
    """Its files come together in a directory, those of others too."""
    store = open_store(str(tmp_path / "bucket"))
    brought(store, tmp_path / "s", "a", [FROZEN])
    brought(store, tmp_path / "s", "b", [FROZEN, bytes_of(2, BIG)], base="a")
    check_present(store, "b")
    with open_committed(store, "b").as_directory() as directory:
        sizes = [path.stat().st_size for path in Path(directory, "chunks").iterdir()]
        assert Path(directory, "index-0.json").exists()
    assert sizes == [BIG, BIG]
    shared = f"a/{open_saved(store, 'a').parts[0].index.chunks[0].file}"  # type: ignore[union-attr]
    store.put(shared, bytes_of(9, BIG))
    with (
        pytest.raises(IntegrityError, match="chunks/"),
        open_committed(store, "b").as_directory(),
    ):
        pass
    store.delete(shared)
    with pytest.raises(IntegrityError, match="chunks/"):
        check_present(store, "b")


def test_a_segment_without_a_snapshot_leaves_no_manifest(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "s").write_bytes(bytes(5000))
    with pytest.raises(IntegrityError):
        bring_snapshot(store, SnapshotParcel(str(tmp_path / "s"), part("a")))
    assert list(store.list()) == []


def test_a_segment_that_is_written_over_on_its_way_leaves_no_manifest(tmp_path: Path) -> None:
    """Its rank has given it up and saves the next step there."""
    pieces = pieces_of([BIG])
    index = Index(0, 1, 5, pieces, chunks=chunks_of(pieces))
    segment = Segment.create(tmp_path / "s", index.size_bytes)
    segment.finish(index)

    class Slow(MemoryStore):
        def put(self, key: str, body: Any) -> None:
            super().put(key, body)
            segment.begin()
            segment.finish(replace(index, step=6))

    store = Slow()
    with pytest.raises(IntegrityError, match="written over"):
        bring_snapshot(store, SnapshotParcel(str(segment.path), part("a")))
    assert [found.key for found in store.list() if found.key.startswith(keys.MANIFESTS)] == []


def test_a_parcel_travels_as_text() -> None:
    parcel = SnapshotParcel("/memory/x", part("a"), "b")
    assert unpacked(packed(parcel)) == parcel
    assert unpacked(b"\x80pickle") is None
