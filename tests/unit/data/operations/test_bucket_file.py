"""Rows in buckets of a local file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.data.formats.python_objects import object_column
from spotfit.data.operations.bucket_file import BucketFile

BUFFER_BYTES = 1000


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BucketFile]:
    opened = BucketFile(tmp_path / "rows", BUFFER_BYTES)
    yield opened
    opened.close()


def append(file: BucketFile, buckets: list[int], rows: pa.Table) -> None:
    file.append(np.array(buckets, dtype=np.int64), rows)


def test_the_rows_of_a_bucket_keep_their_order(file: BucketFile) -> None:
    rng = np.random.default_rng(0)
    expected: dict[int, list[int]] = {}
    for first in range(0, 2000, 100):
        buckets = rng.integers(0, 7, 100)
        file.append(buckets, pa.table({"n": np.arange(first, first + 100)}))
        for number, bucket in enumerate(buckets.tolist()):
            expected.setdefault(bucket, []).append(first + number)
    assert file.numbers() == sorted(expected)
    for bucket, numbers in expected.items():
        assert [n for rows in file.read(bucket) for n in rows["n"].to_pylist()] == numbers


def test_appended_tables_are_read_as_tables_of_their_own(file: BucketFile) -> None:
    for first in (0, 4):
        append(file, [1, 2, 1, 1], pa.table({"n": np.arange(first, first + 4)}))
    assert [rows["n"].to_pylist() for rows in file.read(1)] == [[0, 2, 3], [4, 6, 7]]


def test_rows_are_written_beyond_the_buffer_only(file: BucketFile, tmp_path: Path) -> None:
    append(file, [0], pa.table({"n": [1]}))
    assert (tmp_path / "rows").stat().st_size == 0
    append(file, [0] * 200, pa.table({"n": range(200)}))
    assert (tmp_path / "rows").stat().st_size > BUFFER_BYTES


def test_the_rows_of_a_bucket_have_a_size_without_dictionaries(file: BucketFile) -> None:
    words = pa.array(["x" * 500, "y"]).dictionary_encode()
    for _ in range(3):
        append(file, [5, 7], pa.table({"n": [1, 2], "word": words}))
    assert [file.size_bytes(number) for number in (5, 6, 7)] == [36, 0, 36]


def test_flushed_rows_are_in_the_file(file: BucketFile, tmp_path: Path) -> None:
    append(file, [0], pa.table({"n": [1]}))
    file.flush()
    assert (tmp_path / "rows").stat().st_size > 0
    assert [rows["n"].to_pylist() for rows in file.read(0)] == [[1]]


def test_tables_of_a_bucket_may_have_other_types(file: BucketFile) -> None:
    append(file, [3], pa.table({"x": [1]}))
    append(file, [3], pa.table({"x": [0.5]}))
    assert [rows.schema.field("x").type for rows in file.read(3)] == [pa.int64(), pa.float64()]


class ShortReads(io.FileIO):
    """Returns at most 100 bytes at a time, as Linux at most 2 GiB."""

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer)[:100]) or 0

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(100 if size is None or size < 0 else min(size, 100)) or b""


def test_a_read_that_returns_less_than_an_extent_is_continued(
    file: BucketFile, tmp_path: Path
) -> None:
    rows = pa.table({"n": np.random.default_rng(0).integers(0, 2**60, 500)})
    append(file, [0] * 500, rows)
    file.close()
    file._file = ShortReads(tmp_path / "rows", "r+")
    assert [*file.read(0)] == [rows]


def test_a_truncated_file_is_an_error(file: BucketFile, tmp_path: Path) -> None:
    append(file, [0] * 500, pa.table({"n": range(500)}))
    os.truncate(tmp_path / "rows", 1000)
    with pytest.raises(IntegrityError, match="bytes shorter than what was written"):
        [*file.read(0)]


def test_every_type_keeps_its_values(file: BucketFile) -> None:
    tensors = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    rows = pa.table(
        {
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
            "time": pa.array([1, None, 3], pa.timestamp("ns", "UTC")),
            "word": pa.array(["a", "b", "a"]).dictionary_encode(),
            "nested": pa.array([{"a": [1]}, None, {"a": []}]),
        }
    )
    append(file, [0, 1, 0], rows)
    (found,) = file.read(0)
    assert found.schema.equals(rows.schema)
    assert found.to_pylist() == rows.take(pa.array([0, 2])).to_pylist()


def test_python_objects_are_refused(file: BucketFile) -> None:
    with pytest.raises(ConfigError, match="column 'o' has Python objects"):
        append(file, [0], pa.table({"o": object_column([{1}])}))


def test_a_bucket_without_rows_is_empty(file: BucketFile) -> None:
    append(file, [], pa.table({"n": pa.array([], pa.int64())}))
    assert file.numbers() == []
    assert list(file.read(0)) == []
