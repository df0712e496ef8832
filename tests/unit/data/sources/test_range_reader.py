"""Sequential reading of a file by large requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spotfit.data.sources import range_reader
from spotfit.data.sources.file_source import OpenFile
from spotfit.data.sources.range_reader import RangeReader
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


def test_small_reads_share_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    requests = []
    read = OpenFile.read

    def counted(self: OpenFile, start: int = 0, length: int | None = None) -> bytes:
        requests.append(start)
        return read(self, start, length)

    monkeypatch.setattr(OpenFile, "read", counted)
    reader = RangeReader(open_file(tmp_path / "a"))
    while reader.read(10):
        pass
    assert requests == [0]
