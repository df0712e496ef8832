"""Parquet files: a unit is a row group, which is read by one request and decoded on its own.

PyArrow's Dataset scanner is not used: it has no address for a row group and keeps memory.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from spotfit.core.errors import ConfigError
from spotfit.data.formats.tensor_storage import decode_tensors, decoded_field, tensors_from_bytes
from spotfit.data.schema import fixed_width_bytes
from spotfit.data.source import DataFile, Decode
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile

_TAIL_BYTES = 64 * 2**10
"""First request of a file; most footers are shorter."""
_TRAILER_BYTES = 8
"""Length of the footer and magic number."""
_MAX_GAP_BYTES = 2**20
"""Chunks of columns that are closer are read by one request: 1 MiB takes as long as a request."""
_PADDING_BYTES = 100
"""Old versions of parquet-mr state chunks as too short by up to this length (PARQUET-816)."""
_FOOTER_CACHE_BYTES = 32 * 2**20
_DICTIONARY_BYTES = 2**20
"""Writers store values as they are once the dictionary of a column chunk exceeds this size."""
_INDEX_BYTES = 3
"""The most that an index into such a dictionary takes."""
_OFFSET_BYTES = 4
"""What a value of variable length takes in memory besides its bytes."""

TensorColumns = Mapping[str, tuple[Any, tuple[int, ...]]]


@dataclass(frozen=True)
class ParquetFormat:
    """Reads row groups."""

    tensor_columns: TensorColumns = field(default_factory=dict)
    """Element type and shape of binary columns whose bytes are tensors."""

    @property
    def identity(self) -> str:
        """The tensor columns, which change the rows of a file."""
        return f"parquet {sorted(self.tensor_columns.items())}"

    def inspect(self, file: OpenFile) -> FileContent:
        """Return columns and row groups from the footer."""
        footer = _footers.get(file)
        metadata = footer.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        return FileContent(
            self._decoded_schema(footer.schema),
            [
                FileUnit(index, group.num_rows, _decoded_bytes(group, footer.leaf_types))
                for index, group in enumerate(groups)
            ],
        )

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch the column chunks of a row group."""
        footer = _footers.get(file)
        names = [name for name in schema.names if name in footer.leaves]
        ranges = _merge(footer.chunk_ranges(unit.position, names), file.size_bytes)
        fetched = _FetchedRanges(
            file.size_bytes, [(start, file.read_view(start, end - start)) for start, end in ranges]
        )

        def decode() -> pa.Table:
            reader = pq.ParquetFile(pa.PythonFile(fetched, "r"), metadata=footer.metadata)
            table = reader.read_row_group(unit.position, columns=names, use_threads=False)
            return self._decode(table, file)

        return decode

    def _decoded_schema(self, schema: pa.Schema) -> pa.Schema:
        fields = [decoded_field(one) for one in schema]
        for index, one in enumerate(fields):
            if one.name in self.tensor_columns:
                dtype, shape = self.tensor_columns[one.name]
                empty = pa.chunked_array([], pa.binary())
                fields[index] = one.with_type(tensors_from_bytes(empty, dtype, shape).type)
        return pa.schema(fields)

    def _decode(self, table: pa.Table, file: OpenFile) -> pa.Table:
        for name, (dtype, shape) in self.tensor_columns.items():
            if name not in table.column_names:
                continue
            try:
                tensors = tensors_from_bytes(table[name], dtype, shape)
            except (ValueError, pa.ArrowNotImplementedError) as error:
                raise ConfigError(
                    f"The column {name!r} of {file.path} does not have tensors of {dtype} with "
                    f"shape {shape}: {error}",
                    do="Correct tensor_column_schema.",
                ) from error
            table = table.set_column(table.column_names.index(name), name, tensors)
        return decode_tensors(table)


# --- footers --------------------------------------------------------------------------------------


class _Range(NamedTuple):
    start: int
    end: int


class _Footer:
    """The footer of a file, with what is derived from it."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self.metadata = metadata
        self.schema: pa.Schema = metadata.schema.to_arrow_schema()
        self.leaves: dict[str, range] = {}
        """The indices of the column chunks of each column, which may be nested."""
        self.leaf_types: list[pa.DataType] = []
        """The type of the values of each column chunk."""
        for one in self.schema:
            first = len(self.leaf_types)
            self.leaf_types += _leaf_types(one.type)
            self.leaves[one.name] = range(first, len(self.leaf_types))

    def chunk_ranges(self, row_group: int, names: Sequence[str]) -> Iterator[_Range]:
        """Yield the bytes of the column chunks of these columns."""
        group = self.metadata.row_group(row_group)
        for name in names:
            for index in self.leaves[name]:
                chunk = group.column(index)
                start = chunk.data_page_offset
                # Some writers set the offset of a missing dictionary to 0.
                start = min(start, chunk.dictionary_page_offset or start)
                yield _Range(start, start + chunk.total_compressed_size)


def _load_metadata(file: OpenFile) -> pq.FileMetaData:
    """Read the footer by one request, or by two if it is longer than `_TAIL_BYTES`."""
    tail = file.read(max(0, file.size_bytes - _TAIL_BYTES))
    length = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
    if tail[-4:] != b"PAR1" or length > file.size_bytes:
        raise ConfigError(
            f"{file.path} is not a Parquet file, or is incomplete or encrypted.",
            do="Remove the file, write it again, or select files with file_extensions.",
        )
    if length > len(tail):
        tail = file.read(file.size_bytes - length)
    return pq.read_metadata(pa.BufferReader(memoryview(tail)[-length:]))


class _FooterCache:
    """Footers of the files that were read last. Threads may load one footer twice."""

    def __init__(self) -> None:
        self._footers: dict[DataFile, _Footer] = {}
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, file: OpenFile) -> _Footer:
        found = self._footers.get(file.file)
        if found is None:
            found = _Footer(_load_metadata(file))
            with self._lock:
                self._add(file.file, found)
        return found

    def _add(self, file: DataFile, footer: _Footer) -> None:
        if self._footers.setdefault(file, footer) is not footer:
            return
        self._size_bytes += footer.metadata.serialized_size
        while self._size_bytes > _FOOTER_CACHE_BYTES and len(self._footers) > 1:
            oldest = next(iter(self._footers))
            self._size_bytes -= self._footers.pop(oldest).metadata.serialized_size


_footers = _FooterCache()


# --- column chunks --------------------------------------------------------------------------------


def _decoded_bytes(group: pq.RowGroupMetaData, leaf_types: Sequence[pa.DataType]) -> int:
    """Return the size of a row group in memory; that of values of variable length is estimated."""
    return sum(
        _chunk_bytes(group.column(index), leaf_type) for index, leaf_type in enumerate(leaf_types)
    )


def _chunk_bytes(chunk: pq.ColumnChunkMetaData, leaf_type: pa.DataType) -> int:
    # Encodings make chunks smaller than their values; `total_uncompressed_size` does not show it.
    size_bytes: int = chunk.total_uncompressed_size
    if width_bytes := fixed_width_bytes(leaf_type):
        return max(size_bytes, int(chunk.num_values * width_bytes))
    is_indexed = size_bytes <= _DICTIONARY_BYTES + _INDEX_BYTES * chunk.num_values
    if not chunk.has_dictionary_page or not is_indexed or not chunk.is_stats_set:
        return size_bytes
    statistics = chunk.statistics
    if not statistics.has_min_max:
        return size_bytes
    # Nothing else in the footer shows how long the values of a dictionary are.
    length_bytes = (len(statistics.min_raw) + len(statistics.max_raw)) // 2
    return max(size_bytes, int(statistics.num_values) * (_OFFSET_BYTES + length_bytes))


def _leaf_types(kind: pa.DataType) -> list[pa.DataType]:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_types(kind.storage_type)
    inner = [leaf for n in range(kind.num_fields) for leaf in _leaf_types(kind.field(n).type)]
    return inner or [kind]


def _merge(ranges: Iterator[_Range], size_bytes: int) -> list[_Range]:
    """Return the ranges in order, with those that are close as one, within the file."""
    merged: list[_Range] = []
    for start, end in sorted(ranges):
        end = min(end + _PADDING_BYTES, size_bytes)
        if merged and start - merged[-1].end <= _MAX_GAP_BYTES:
            merged[-1] = _Range(merged[-1].start, max(merged[-1].end, end))
        else:
            merged.append(_Range(start, end))
    return merged


class _FetchedRanges(io.RawIOBase):
    """A file of which only some ranges are in memory; PyArrow asks once for each column chunk."""

    def __init__(self, size_bytes: int, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._parts = parts
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int = -1) -> Any:
        """Return a view of the bytes, without a copy."""
        begin = self._position
        end = self._size_bytes if size < 0 else min(begin + size, self._size_bytes)
        for start, body in self._parts:
            if start <= begin and end <= start + len(body):
                self._position = end
                return memoryview(body)[begin - start : end - start]
        raise OSError(f"bytes {begin} to {end} are not in a column chunk that was fetched")
