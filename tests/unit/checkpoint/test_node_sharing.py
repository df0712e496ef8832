"""Ranks of a node fetch each chunk once and share it through memory."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from spotfit.checkpoint.format import Chunk
from spotfit.checkpoint.node_sharing import (
    NodeGroup,
    SharedRing,
    create_shared_ring,
    needed_chunk_mask,
    read_with_node_group,
)
from spotfit.checkpoint.reader import (
    EMPTY_BUFFER,
    ChunkRead,
    MemoryShardReader,
    ReadRequest,
    SavedState,
    StoreShardReader,
    open_committed_snapshot,
    whole_piece_sink,
)
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import IntegrityError
from spotfit.host.system import SystemClock
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.snapshots import (
    LARGE_PIECE_BYTES,
    random_bytes,
    upload_test_snapshot,
    write_segment,
)

BODIES = [
    random_bytes(1, 30),
    *(random_bytes(n, LARGE_PIECE_BYTES + n) for n in range(2, 12)),
    b"",
    random_bytes(12, 70),
]
"""More chunks than a ring has slots."""

Found = dict[int, bytes]


class Yielding(SystemClock):
    """Yields to the other threads instead of waiting."""

    def wait(self, seconds: float) -> None:
        os.sched_yield()


class Reader:
    """One rank: the pieces it requests, and the bytes it received."""

    def __init__(self, saved: SavedState, requested: Sequence[int]) -> None:
        self.found: Found = {}
        self.orders: list[ChunkRead] = saved.plan_reads(self._request(saved, n) for n in requested)

    def _request(self, saved: SavedState, n: int) -> ReadRequest:
        piece = saved.indices[0].pieces[n]
        return ReadRequest(0, piece, whole_piece_sink(piece, partial(self._put, n)))

    def _put(self, n: int, body: memoryview) -> None:
        self.found[n] = bytes(body)


def opened(store: Store) -> SavedState:
    saved = open_committed_snapshot(store, "a")
    assert saved is not None
    return saved


def read(readers: Sequence[Reader], folder: Path) -> list[str]:
    """Return the error of each rank; '' for none."""
    rings = [folder / f"ring-{place}" for place in range(len(readers))]
    needs = [needed_chunk_mask(reader.orders) for reader in readers]

    def work(place: int) -> str:
        try:
            read_with_node_group(readers[place].orders, NodeGroup(place, rings, needs), Yielding())
        except IntegrityError as broken:
            return str(broken)
        return ""

    for path in rings:
        SharedRing.create(
            path, local_world_size=len(readers), slots=2, slot_bytes=LARGE_PIECE_BYTES + 20
        )
    with ThreadPoolExecutor(len(readers)) as threads:
        return list(threads.map(work, range(len(readers))))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of fetches by key of the chunk."""
    times: Counter[str] = Counter()
    fetch = StoreShardReader.fetch
    lock = threading.Lock()

    def counted(
        part: StoreShardReader, chunk: Chunk, spare: memoryview = EMPTY_BUFFER
    ) -> memoryview:
        with lock:
            times[chunk.file] += 1
        return fetch(part, chunk, spare)

    monkeypatch.setattr(StoreShardReader, "fetch", counted)
    return times


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["bytes come by themselves", "bytes are read into a place"])
def test_each_rank_gets_all_chunks_and_each_is_fetched_once(
    tmp_path: Path, fetched: Counter[str], ranks: int, kind: str
) -> None:
    by_themselves = kind == "bytes come by themselves"
    store: Store = MemoryStore() if by_themselves else open_store(str(tmp_path / "store"))
    upload_test_snapshot(store, tmp_path, "a", BODIES)
    readers = [Reader(opened(store), range(len(BODIES))) for _ in range(ranks)]
    assert read(readers, tmp_path) == [""] * ranks
    assert [reader.found for reader in readers] == [dict(enumerate(BODIES))] * ranks
    assert set(fetched.values()) == {1}


def test_a_chunk_of_one_rank_is_not_shared(tmp_path: Path, fetched: Counter[str]) -> None:
    store = MemoryStore()
    upload_test_snapshot(store, tmp_path, "a", BODIES)
    requested: list[list[int]] = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 8], [9, 11]]
    readers = [Reader(opened(store), some) for some in requested]
    assert read(readers, tmp_path) == ["", "", ""]
    for reader, some in zip(readers, requested, strict=True):
        assert reader.found == {n: BODIES[n] for n in some}
    assert set(fetched.values()) == {1}


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_an_error_of_one_rank_is_raised_on_all_ranks(tmp_path: Path, damage: str) -> None:
    store = MemoryStore()
    upload_test_snapshot(store, tmp_path, "a", BODIES)
    chunk = [one for one in opened(store).indices[0].chunks if one.size_bytes >= LARGE_PIECE_BYTES][
        6
    ]
    body = store.get(f"a/{chunk.file}")
    store.delete(f"a/{chunk.file}")
    if damage != "delete":
        store.put(
            f"a/{chunk.file}", body[:-1] + (b"" if damage == "cut" else bytes([body[-1] ^ 1]))
        )
    readers = [Reader(opened(store), range(len(BODIES))) for _ in range(3)]
    errors = read(readers, tmp_path)
    assert len(set(errors)) == 1
    assert chunk.file in errors[0]


def test_shards_in_memory_are_not_fetched(tmp_path: Path) -> None:
    saved = SavedState([MemoryShardReader(ShmSegment.open(write_segment(tmp_path / "s", BODIES)))])
    readers = [Reader(saved, range(len(BODIES))) for _ in range(2)]
    assert [needed_chunk_mask(reader.orders) for reader in readers] == [0, 0]
    assert read(readers, tmp_path) == ["", ""]
    assert [reader.found for reader in readers] == [dict(enumerate(BODIES))] * 2


def test_a_ring_is_removed_after_its_block_and_absent_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ring"
    with create_shared_ring(path, local_world_size=2, chunk_count=9, slot_bytes=100) as there:
        assert there
        assert path.exists()
    assert not path.exists()
    with create_shared_ring(path, local_world_size=2, chunk_count=9, slot_bytes=2**60) as there:
        assert not there
    assert not path.exists()
