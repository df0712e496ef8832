"""Sequential reading of a file by large requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spotfit.data.files import FileSet, PathOptions, _Location
from spotfit.data.sources import range_reader
from spotfit.data.sources.file_format import OpenFile
from spotfit.data.sources.range_reader import RangeReader
from spotfit.store.local import MemoryStore
from tests.unit.data.sources.source_suite import open_file


def test_reads_are_those_of_a_local_file(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "_WINDOW_BYTES", 16)
    path = tmp_path / "a"
    path.write_bytes(rng.randbytes(300))
    reader = RangeReader(open_file(path))
    with path.open("rb") as expected:
        for _ in range(500):
            if rng.random() < 0.4:
                position, whence = rng.randrange(320), rng.choice([0, 0, 2])
                offset = -min(position, 300) if whence == 2 else position
                assert reader.seek(offset, whence) == expected.seek(offset, whence)
            size = rng.choice([-1, 0, 1, 12, 40])
            assert reader.read(size) == expected.read(size)
            assert reader.tell() == expected.tell()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return begin and length of all requests."""
    found = []
    read = OpenFile.read

    def counted(self: OpenFile, start: int = 0, length: int | None = None) -> bytes:
        body = read(self, start, length)
        found.append((start, len(body)))
        return body

    monkeypatch.setattr(OpenFile, "read", counted)
    return found


def test_small_reads_share_a_request(tmp_path: Path, requests: list[tuple[int, int]]) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    reader = RangeReader(open_file(tmp_path / "a"))
    while reader.read(10):
        pass
    assert requests == [(0, 1000)]


def test_requests_of_a_sequential_reader_grow(
    tmp_path: Path, requests: list[tuple[int, int]]
) -> None:
    (tmp_path / "a").write_bytes(bytes(2**20))
    reader = RangeReader(open_file(tmp_path / "a"))
    while reader.read(1000):
        pass
    lengths = [length for _, length in requests]
    assert lengths[:4] == [4096, 8192, 16384, 32768]
    assert sum(lengths) < 1.1 * 2**20


def test_large_gaps_are_skipped(tmp_path: Path, requests: list[tuple[int, int]]) -> None:
    (tmp_path / "a").write_bytes(bytes(2**20))
    reader = RangeReader(open_file(tmp_path / "a"))
    for position in range(0, 2**20, 100_000):
        reader.seek(position)
        reader.read(12)
    assert requests == [(position, 4096) for position in range(0, 2**20, 100_000)]


def test_gaps_of_a_bucket_are_read_unless_they_take_longer_than_a_request(
    requests: list[tuple[int, int]],
) -> None:
    store = MemoryStore()
    store.put("a", bytes(12 * 2**20))
    files = FileSet((_Location("a", store, "a"),), PathOptions())
    (file,) = files.list_files()
    for step, largest in ((2**19, 8 * 2**20), (2 * 2**20, 2**16)):
        requests.clear()
        reader = RangeReader(OpenFile(files, file))
        for position in range(0, file.size_bytes, step):
            reader.seek(position)
            reader.read(12)
        assert max(length for _, length in requests) <= largest
        assert (sum(length for _, length in requests) < 2**20) == (step > 2**20)
