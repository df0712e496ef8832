"""Reading snapshots piece by piece, and detection of missing and corrupt objects."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.committed import open_committed
from spotfit.checkpoint.format import MAX_CHUNK_BYTES, decode_index, encode_index
from spotfit.checkpoint.reader import (
    MemoryShardReader,
    ReadRequest,
    SavedState,
    ShardReader,
    open_committed_snapshot,
    open_snapshot_folder,
    whole_piece_sink,
)
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.saved_checkpoints import make_manifest
from tests.unit.checkpoint.saved_checkpoints import save_checkpoint as reported
from tests.unit.checkpoint.snapshots import (
    LARGE_PIECE_BYTES,
    random_bytes,
    upload_test_snapshot,
    write_segment,
)
from tests.unit.store.faulty_stores import DamagedResponses

BODIES = [
    random_bytes(1, 30),
    random_bytes(2, LARGE_PIECE_BYTES),
    random_bytes(3, MAX_CHUNK_BYTES + LARGE_PIECE_BYTES),
    b"",
    random_bytes(4, 70),
]


def everything_in(saved: SavedState) -> list[list[bytes]]:
    """Return the bytes of all pieces by rank."""
    found: dict[tuple[int, int], bytes] = {}

    def keep(rank: int, n: int) -> ReadRequest:
        piece = saved.readers[rank].index.pieces[n]
        return ReadRequest(rank, piece, whole_piece_sink(piece, partial(put, (rank, n))))

    def put(at: tuple[int, int], body: memoryview) -> None:
        found[at] = bytes(body)

    saved.read([keep(index.rank, n) for index in saved.indices for n in range(len(index.pieces))])
    return [[found[index.rank, n] for n in range(len(index.pieces))] for index in saved.indices]


def opened(store: MemoryStore, name: str = "a") -> SavedState:
    saved = open_committed_snapshot(store, name)
    assert saved is not None
    return saved


def test_all_pieces_of_all_ranks_are_read(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in (0, 1):
        upload_test_snapshot(store, tmp_path, "a", BODIES[rank:], rank=rank, world_size=2)
    assert everything_in(opened(store)) == [BODIES, BODIES[1:]]
    assert everything_in(open_snapshot_folder(store, "a")) == [BODIES, BODIES[1:]]
    copy = MemoryStore()
    for found in store.list("a"):
        copy.put(found.key, store.get(found.key))
    assert everything_in(open_snapshot_folder(copy, "a")) == [BODIES, BODIES[1:]], (
        "without its manifests"
    )


def test_pieces_are_read_from_memory(tmp_path: Path) -> None:
    segment = ShmSegment.open(write_segment(tmp_path / "s", BODIES))
    assert everything_in(SavedState([MemoryShardReader(segment)])) == [BODIES]


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_corrupt_or_missing_object_is_detected(tmp_path: Path, damage: str) -> None:
    store = MemoryStore()
    upload_test_snapshot(store, tmp_path, "a", BODIES)
    for found in list(store.list("a")):
        whole = store.get(found.key)
        if damage == "delete":
            store.delete(found.key)
        else:
            store.put(
                found.key, whole[:-1] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1])
            )
        for opens in (opened, partial(open_snapshot_folder, folder="a")):
            with pytest.raises(IntegrityError):
                everything_in(opens(store))
        store.put(found.key, whole)
    assert everything_in(opened(store)) == [BODIES]


def test_chunks_and_indices_are_read_again_if_their_first_read_is_damaged(tmp_path: Path) -> None:
    store = DamagedResponses()
    upload_test_snapshot(store, tmp_path, "a", BODIES)
    assert everything_in(opened(store)) == [BODIES]
    store.reads.clear()
    assert everything_in(open_snapshot_folder(store, "a")) == [BODIES]


def test_a_replaced_index_is_detected_by_its_reported_hash(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    upload_test_snapshot(store, tmp_path, "a", BODIES)
    checkpoint = open_committed(store, "a")
    index = decode_index(store.get("a/index-0.json"), source="a")
    store.put("a/index-0.json", encode_index(replace(index, step=index.step + 1)))
    with pytest.raises(IntegrityError, match=r"index-0\.json .* is corrupt"):
        Checkpoint.from_store(store, "a").open_snapshot()
    store.delete(make_manifest("a").key)
    with pytest.raises(IntegrityError, match=r"index-0\.json .* is corrupt"):
        checkpoint.open_snapshot()
    assert Checkpoint.from_store(store, "a").open_snapshot().indices[0].step == 6, (
        "no manifest has its hash"
    )
    store.delete("a/index-0.json")
    with pytest.raises(IntegrityError, match="is missing"):
        checkpoint.open_snapshot()


def test_a_checkpoint_of_user_files_holds_no_snapshot(tmp_path: Path) -> None:
    store = MemoryStore()
    reported(store, tmp_path, make_manifest("c"), x="1")
    assert open_committed_snapshot(store, "c") is None
    with pytest.raises(ConfigError, match="holds no snapshot"):
        open_snapshot_folder(store, "c")
    with pytest.raises(ConfigError, match="holds no snapshot"):
        open_committed(store, "c").open_snapshot()
    with pytest.raises(ConfigError, match=r"Checkpoint c does not exist in"):
        open_snapshot_folder(MemoryStore(), "c")


def test_a_snapshot_without_manifests_raises_integrity_error() -> None:
    with pytest.raises(IntegrityError, match="is missing"):
        open_committed_snapshot(MemoryStore(), "a")


def test_a_missing_shard_is_detected(tmp_path: Path) -> None:
    parts: list[ShardReader] = [
        MemoryShardReader(
            ShmSegment.open(
                write_segment(tmp_path / f"s{rank}", BODIES[:1], rank=rank, world_size=3)
            )
        )
        for rank in (0, 2)
    ]
    with pytest.raises(IntegrityError, match=r"shards of ranks \[0, 2\]"):
        SavedState(parts, "a")


def test_shards_of_different_steps_are_rejected(tmp_path: Path) -> None:
    parts: list[ShardReader] = [
        MemoryShardReader(
            ShmSegment.open(
                write_segment(tmp_path / f"s{rank}", [b"x"], rank=rank, world_size=2, step=rank)
            )
        )
        for rank in (0, 1)
    ]
    with pytest.raises(IntegrityError, match=r"steps \[0, 1\]"):
        SavedState(parts, "a")
