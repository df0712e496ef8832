"""What was saved is read piece by piece, and whatever is missing or changed is found."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.restore import open_committed
from spotfit.checkpoint.saved import (
    InMemory,
    Part,
    Saved,
    Wanted,
    at_once,
    open_folder,
    open_saved,
)
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import CHUNK_BYTES, read_index, write_index
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.store.memory import MemoryStore
from tests.unit.checkpoint.kept import part
from tests.unit.checkpoint.kept import saved as reported
from tests.unit.checkpoint.snapshots import BIG, brought, bytes_of, filled

BODIES = [bytes_of(1, 30), bytes_of(2, BIG), bytes_of(3, CHUNK_BYTES + BIG), b"", bytes_of(4, 70)]


def everything_in(saved: Saved) -> list[list[bytes]]:
    """By rank, the pieces."""
    found: dict[tuple[int, int], bytes] = {}

    def keep(rank: int, n: int) -> Wanted:
        piece = saved.parts[rank].index.pieces[n]
        return Wanted(rank, piece, at_once(piece, partial(put, (rank, n))))

    def put(at: tuple[int, int], body: memoryview) -> None:
        found[at] = bytes(body)

    saved.read([keep(index.rank, n) for index in saved.indices for n in range(len(index.pieces))])
    return [[found[index.rank, n] for n in range(len(index.pieces))] for index in saved.indices]


def opened(store: MemoryStore, name: str = "a") -> Saved:
    saved = open_saved(store, name)
    assert saved is not None
    return saved


def test_every_piece_of_every_rank_comes_back(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in (0, 1):
        brought(store, tmp_path, "a", BODIES[rank:], rank=rank, world_size=2)
    assert everything_in(opened(store)) == [BODIES, BODIES[1:]]
    assert everything_in(open_folder(store, "a")) == [BODIES, BODIES[1:]]
    copy = MemoryStore()
    for found in store.list("a"):
        copy.put(found.key, store.get(found.key))
    assert everything_in(open_folder(copy, "a")) == [BODIES, BODIES[1:]], "without its manifests"


def test_memory_serves_as_well(tmp_path: Path) -> None:
    segment = Segment.open(filled(tmp_path / "s", BODIES))
    assert everything_in(Saved([InMemory(segment)])) == [BODIES]


@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_harm_to_any_object_is_found(tmp_path: Path, harm: str) -> None:
    store = MemoryStore()
    brought(store, tmp_path, "a", BODIES)
    for found in list(store.list("a")):
        whole = store.get(found.key)
        if harm == "delete":
            store.delete(found.key)
        else:
            store.put(
                found.key, whole[:-1] if harm == "cut" else whole[:-1] + bytes([whole[-1] ^ 1])
            )
        for opens in (opened, partial(open_folder, folder="a")):
            with pytest.raises(IntegrityError):
                everything_in(opens(store))
        store.put(found.key, whole)
    assert everything_in(opened(store)) == [BODIES]


def test_an_index_that_reads_well_and_is_another_is_found_by_what_was_reported(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    brought(store, tmp_path, "a", BODIES)
    checkpoint = open_committed(store, "a")
    index = read_index(store.get("a/index-0.json"))
    store.put("a/index-0.json", write_index(replace(index, step=index.step + 1)))
    with pytest.raises(IntegrityError, match=r"index-0\.json .* is not what was saved"):
        Checkpoint.in_store(store, "a").snapshot()
    store.delete(part("a").key)
    with pytest.raises(IntegrityError, match=r"index-0\.json .* is not what was saved"):
        checkpoint.snapshot()
    assert Checkpoint.in_store(store, "a").snapshot().indices[0].step == 6, "nobody knows better"
    store.delete("a/index-0.json")
    with pytest.raises(IntegrityError, match="is missing"):
        checkpoint.snapshot()


def test_what_was_saved_before_there_were_marks_is_read(tmp_path: Path) -> None:
    """Format 1 had chunks with the SHA-256 of each."""
    index = Segment.open(filled(tmp_path / "s", [BODIES[1]])).index()
    store = MemoryStore()
    chunks = [
        replace(chunk, sha256=hashlib.sha256(BODIES[1]).hexdigest()) for chunk in index.chunks
    ]
    for chunk in chunks:
        store.put(f"a/chunks/{chunk.sha256}", BODIES[1])
    store.put("a/index-0.json", write_index(replace(index, chunks=tuple(chunks), format=1)))
    assert everything_in(open_folder(store, "a")) == [[BODIES[1]]]
    store.put(f"a/{chunks[0].file}", bytes_of(9, BIG))
    with pytest.raises(IntegrityError, match="is not what was saved"):
        everything_in(open_folder(store, "a"))


def test_a_checkpoint_of_the_users_own_is_none(tmp_path: Path) -> None:
    store = MemoryStore()
    reported(store, tmp_path, part("c"), x="1")
    assert open_saved(store, "c") is None
    with pytest.raises(ConfigError, match="holds no snapshot"):
        open_folder(store, "c")
    with pytest.raises(ConfigError, match="holds no snapshot"):
        open_committed(store, "c").snapshot()
    with pytest.raises(ConfigError, match=r"The checkpoint c in .* is gone"):
        open_folder(MemoryStore(), "c")


def test_without_manifests_it_is_gone() -> None:
    with pytest.raises(IntegrityError, match="no complete manifests"):
        open_saved(MemoryStore(), "a")


def test_a_part_that_is_missing_is_told(tmp_path: Path) -> None:
    parts: list[Part] = [
        InMemory(Segment.open(filled(tmp_path / f"s{rank}", BODIES[:1], rank=rank, world_size=3)))
        for rank in (0, 2)
    ]
    with pytest.raises(IntegrityError, match=r"parts of ranks \[0, 2\]"):
        Saved(parts, "a")


def test_parts_of_different_steps_are_no_snapshot(tmp_path: Path) -> None:
    parts: list[Part] = [
        InMemory(
            Segment.open(filled(tmp_path / f"s{rank}", [b"x"], rank=rank, world_size=2, step=rank))
        )
        for rank in (0, 1)
    ]
    with pytest.raises(IntegrityError, match=r"steps \[0, 1\]"):
        Saved(parts, "a")
