"""Ranks that read together fetch each chunk once, have all of it, and all hear what is broken."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from spotfit.checkpoint.relay import Company, Lane, lane, needs_of, read_together
from spotfit.checkpoint.saved import (
    NONE,
    InBucket,
    InMemory,
    Order,
    Saved,
    Wanted,
    at_once,
    open_saved,
)
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Chunk
from spotfit.core.errors import IntegrityError
from spotfit.host.clocks import SystemClock
from spotfit.store.api import Store
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from tests.unit.checkpoint.snapshots import BIG, brought, bytes_of, filled

BODIES = [bytes_of(1, 30), *(bytes_of(n, BIG + n) for n in range(2, 12)), b"", bytes_of(12, 70)]
"""More chunks than a lane has places."""

Found = dict[int, bytes]


class Yielding(SystemClock):
    """Lets the others work instead of waiting."""

    def wait(self, seconds: float) -> None:
        os.sched_yield()


class Reader:
    """One of those who read: which pieces it wants, and what it has got."""

    def __init__(self, saved: Saved, wanted: Sequence[int]) -> None:
        self.found: Found = {}
        self.orders: list[Order] = saved.orders(self._wanted(saved, n) for n in wanted)

    def _wanted(self, saved: Saved, n: int) -> Wanted:
        piece = saved.indices[0].pieces[n]
        return Wanted(0, piece, at_once(piece, partial(self._put, n)))

    def _put(self, n: int, body: memoryview) -> None:
        self.found[n] = bytes(body)


def opened(store: Store) -> Saved:
    saved = open_saved(store, "a")
    assert saved is not None
    return saved


def read(readers: Sequence[Reader], folder: Path) -> list[str]:
    """What each was told is wrong; '' for nothing."""
    lanes = [folder / f"lane-{place}" for place in range(len(readers))]
    needs = [needs_of(reader.orders) for reader in readers]

    def work(place: int) -> str:
        try:
            read_together(readers[place].orders, Company(place, lanes, needs), Yielding())
        except IntegrityError as broken:
            return str(broken)
        return ""

    for path in lanes:
        Lane.create(path, fellows=len(readers), places=2, place_bytes=BIG + 20)
    with ThreadPoolExecutor(len(readers)) as threads:
        return list(threads.map(work, range(len(readers))))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each chunk was asked for."""
    times: Counter[str] = Counter()
    fetch = InBucket.fetch
    lock = threading.Lock()

    def counted(part: InBucket, chunk: Chunk, spare: memoryview = NONE) -> memoryview:
        with lock:
            times[chunk.file] += 1
        return fetch(part, chunk, spare)

    monkeypatch.setattr(InBucket, "fetch", counted)
    return times


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["bytes come by themselves", "bytes are read into a place"])
def test_each_has_all_and_each_chunk_is_fetched_once(
    tmp_path: Path, fetched: Counter[str], ranks: int, kind: str
) -> None:
    by_themselves = kind == "bytes come by themselves"
    store: Store = MemoryStore() if by_themselves else open_store(str(tmp_path / "store"))
    brought(store, tmp_path, "a", BODIES)
    readers = [Reader(opened(store), range(len(BODIES))) for _ in range(ranks)]
    assert read(readers, tmp_path) == [""] * ranks
    assert [reader.found for reader in readers] == [dict(enumerate(BODIES))] * ranks
    assert set(fetched.values()) == {1}


def test_what_only_one_needs_it_reads_for_itself(tmp_path: Path, fetched: Counter[str]) -> None:
    store = MemoryStore()
    brought(store, tmp_path, "a", BODIES)
    wanted: list[list[int]] = [[1, 2, 3, 4, 5, 6], [5, 6, 7, 8], [9, 11]]
    readers = [Reader(opened(store), some) for some in wanted]
    assert read(readers, tmp_path) == ["", "", ""]
    for reader, some in zip(readers, wanted, strict=True):
        assert reader.found == {n: BODIES[n] for n in some}
    assert set(fetched.values()) == {1}


@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_what_is_broken_for_one_is_told_to_all(tmp_path: Path, harm: str) -> None:
    store = MemoryStore()
    brought(store, tmp_path, "a", BODIES)
    chunk = [one for one in opened(store).indices[0].chunks if one.size_bytes >= BIG][6]
    body = store.get(f"a/{chunk.file}")
    store.delete(f"a/{chunk.file}")
    if harm != "delete":
        store.put(f"a/{chunk.file}", body[:-1] + (b"" if harm == "cut" else bytes([body[-1] ^ 1])))
    readers = [Reader(opened(store), range(len(BODIES))) for _ in range(3)]
    told = read(readers, tmp_path)
    assert len(set(told)) == 1
    assert chunk.file in told[0]


def test_memory_that_is_at_hand_is_fetched_by_nobody(tmp_path: Path) -> None:
    saved = Saved([InMemory(Segment.open(filled(tmp_path / "s", BODIES)))])
    readers = [Reader(saved, range(len(BODIES))) for _ in range(2)]
    assert [needs_of(reader.orders) for reader in readers] == [0, 0]
    assert read(readers, tmp_path) == ["", ""]
    assert [reader.found for reader in readers] == [dict(enumerate(BODIES))] * 2


def test_a_lane_is_gone_after_its_block_and_without_room_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rooms" / "lane"
    with lane(path, fellows=2, chunks=9, place_bytes=100) as there:
        assert there
        assert path.exists()
    assert not path.exists()
    with lane(path, fellows=2, chunks=9, place_bytes=2**60) as there:
        assert not there
    assert not path.exists()
