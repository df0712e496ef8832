"""Rows in buckets, in one temporary local file from which each bucket is read on its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.data.formats.python_objects import PythonObjectType
from spotfit.data.operations.row_sizes import row_sizes
from spotfit.data.source import IntArray


class _Extent(NamedTuple):
    """A part of the file with rows of one bucket: a stream in Arrow's IPC format."""

    offset: int
    length: int


class BucketFile:
    """Rows that are appended in any order of buckets, and read bucket by bucket.

    About `buffer_bytes` of rows are collected before they are written, so that the rows of a bucket
    are in few places of the file. Not thread-safe. Errors of the disk are `OSError`s.
    """

    def __init__(self, path: Path, buffer_bytes: int) -> None:
        self._file = path.open("w+b", buffering=0)
        self.buffer_bytes = buffer_bytes
        self._pending: defaultdict[int, list[pa.Table]] = defaultdict(list)
        self._pending_bytes = 0
        self._extents: defaultdict[int, list[_Extent]] = defaultdict(list)
        self._sizes: Counter[int] = Counter()
        self._end = 0

    def append(self, buckets: IntArray, rows: pa.Table) -> None:
        """Append each row to its bucket. Raises `ConfigError` for columns of Python objects."""
        _check_types(rows.schema)
        if not rows.num_rows:
            return
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
        table = rows if len(starts) == 1 else rows.take(pa.array(order))
        for begin, end in pairwise([*starts.tolist(), rows.num_rows]):
            self._pending[int(ordered[begin])].append(table.slice(begin, end - begin))
        sizes = np.add.reduceat(row_sizes(rows)[order], starts)
        self._sizes.update(dict(zip(ordered[starts].tolist(), sizes.tolist(), strict=True)))
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= self.buffer_bytes:
            self.flush()

    def numbers(self) -> list[int]:
        """Return the buckets that have rows, in ascending order."""
        return sorted(self._extents.keys() | self._pending.keys())

    def size_bytes(self, bucket: int) -> int:
        """Return the decoded size of the rows of a bucket, without dictionaries."""
        return self._sizes[bucket]

    def read(self, bucket: int) -> Iterator[pa.Table]:
        """Yield the rows of a bucket: a table for each call of `append` that had some.

        Raises `IntegrityError` if another process has truncated the file.
        """
        self.flush()
        for extent in self._extents.get(bucket, ()):
            with pa.ipc.open_stream(pa.py_buffer(self._read_all(extent))) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])

    def close(self) -> None:
        """Close the file, which its owner deletes. Idempotent."""
        self._file.close()

    def flush(self) -> None:
        """Write the rows that are collected."""
        self._file.seek(self._end)
        for bucket in sorted(self._pending):
            self._write(bucket, self._pending[bucket])
        self._pending.clear()
        self._pending_bytes = 0

    def _write(self, bucket: int, tables: Iterable[pa.Table]) -> None:
        # Types may differ between blocks of a function of the user; a stream has one schema.
        groups: list[list[pa.Table]] = []
        for table in tables:
            if groups and groups[-1][0].schema.equals(table.schema):
                groups[-1].append(table)
            else:
                groups.append([table])
        for group in groups:
            body = _encode(group)
            self._extents[bucket].append(_Extent(self._end, len(body)))
            self._write_all(body)
            self._end += len(body)

    def _read_all(self, extent: _Extent) -> memoryview:
        self._file.seek(extent.offset)
        body = np.empty(extent.length, np.uint8).data
        rest = body
        while rest:  # Linux reads at most 2 GiB at a time
            count = self._file.readinto(rest)
            if not count:
                raise IntegrityError(
                    f"The temporary file {self._file.name} is {len(rest)} bytes shorter than "
                    "what was written.",
                    do="Let no other process change files below DataContext.spill_directory.",
                )
            rest = rest[count:]
        return body

    def _write_all(self, body: memoryview) -> None:
        while body:
            body = body[self._file.write(body) :]


def _check_types(schema: pa.Schema) -> None:
    for field in schema:
        if isinstance(field.type, PythonObjectType):
            raise ConfigError(
                f"The column {field.name!r} has Python objects, which cannot be written to files.",
                do="Convert it to arrays, numbers, text or bytes with map() or map_batches(), or "
                "drop the column.",
            )


def _encode(tables: list[pa.Table]) -> memoryview:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, tables[0].schema, options=options) as writer:
        for table in tables:
            # One batch for each table: callers distinguish the blocks that they have appended.
            writer.write_table(table.combine_chunks())
    return memoryview(sink.getvalue())
