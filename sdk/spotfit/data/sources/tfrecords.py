"""TFRecord files of `tf.train.Example` messages. A unit is a range of records."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.crc32c import Words, crc32c
from spotfit.data.formats.tf_examples import Features, FeatureShape, decode_example, read_shapes
from spotfit.data.source import Decode
from spotfit.data.sources.compression import decompress
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile
from spotfit.data.sources.range_reader import RangeReader

_HEADER = struct.Struct("<QI")
"""Length of a record, and the CRC of the length."""
_FOOTER_BYTES = 4
"""The CRC of the record."""
UNIT_BYTES = 8 * 2**20
SAMPLE_RECORDS = 1000
"""Records of each file from which the columns and their types are taken."""


class _Record(NamedTuple):
    start: int
    """Where its header begins."""
    length: int


@dataclass(frozen=True)
class TfRecordFormat:
    """Reads Examples: a feature with one value in each record is a value, others are lists."""

    compression: str | None = None

    @property
    def identity(self) -> str:
        """The compression."""
        return f"tfrecords {self.compression}"

    def inspect(self, file: OpenFile) -> FileContent:
        """Read all headers, and those of the features of the first records."""
        body = decompress(file, self.compression)
        reader = RangeReader(file) if body is None else io.BytesIO(body)
        size_bytes = file.size_bytes if body is None else len(body)
        records: list[_Record] = []
        shapes: list[dict[str, FeatureShape | None]] = []
        for record in _walk(file, reader, size_bytes):
            records.append(record)
            if len(shapes) < SAMPLE_RECORDS:
                shapes.append(_read_shapes(file, reader, record))
        units = _group(records)
        if body is not None:
            units = [FileUnit(0, len(records), len(body))] if records else []
        return FileContent(_find_schema(shapes, file), units)

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch a range of records, whose CRCs are verified when they are decoded."""
        body = decompress(file, self.compression)
        if body is None:
            body = file.read(unit.position, unit.size_bytes)
        return partial(self._decode_records, body, file, schema)

    def _decode_records(self, body: bytes, file: OpenFile, schema: pa.Schema) -> pa.Table:
        records = [*_walk(file, io.BytesIO(body), len(body))]
        examples = self._decode(body, records, file)
        columns = [_to_column([one.get(f.name) for one in examples], f, file) for f in schema]
        return pa.Table.from_arrays(columns, schema=schema)

    def _decode(self, body: bytes, records: Sequence[_Record], file: OpenFile) -> list[Features]:
        view = memoryview(body)
        begins = [record.start + _HEADER.size for record in records]
        ends = [begin + one.length for begin, one in zip(begins, records, strict=True)]
        contents = [view[begin:end] for begin, end in zip(begins, ends, strict=True)]
        stored = [int.from_bytes(view[end : end + _FOOTER_BYTES], "little") for end in ends]
        _check(contents, stored, file)
        with _example_errors(file):
            return [decode_example(content) for content in contents]


def _read_shapes(
    file: OpenFile, reader: io.RawIOBase | io.BytesIO, record: _Record
) -> dict[str, FeatureShape | None]:
    begin = record.start + _HEADER.size
    try:
        return read_shapes(reader, begin, begin + record.length)
    except ValueError:
        reader.seek(begin)
        content = reader.read(record.length) or b""
        stored = int.from_bytes(reader.read(_FOOTER_BYTES) or b"", "little")
        _check([content], [stored], file)  # the record may be damaged
        with _example_errors(file):
            raise


@contextmanager
def _example_errors(file: OpenFile) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"{file.path} has records that are not tf.train.Example messages: {error}.",
            do="Read it with read_binary_files() and decode the records in map_batches().",
        ) from error


def _walk(file: OpenFile, reader: io.RawIOBase | io.BytesIO, size_bytes: int) -> Iterator[_Record]:
    """Yield all records of a stream of this size. Raises `ConfigError` if a header is invalid."""
    position = 0
    headers: list[bytes] = []
    while position < size_bytes:
        reader.seek(position)
        header = reader.read(_HEADER.size) or b""
        length = int.from_bytes(header[:8], "little")
        end = position + _HEADER.size + length + _FOOTER_BYTES
        if end > size_bytes:
            raise _invalid_error(file)
        headers.append(header)
        yield _Record(position, length)
        position = end
    stored = [_HEADER.unpack(header)[1] for header in headers]
    _check([header[:8] for header in headers], stored, file)


def _group(records: Sequence[_Record]) -> list[FileUnit]:
    units: list[FileUnit] = []
    for record in records:
        size = _HEADER.size + record.length + _FOOTER_BYTES
        if units and units[-1].size_bytes + size <= UNIT_BYTES:
            last = units[-1]
            units[-1] = FileUnit(last.position, last.rows + 1, last.size_bytes + size)
        else:
            units.append(FileUnit(record.start, 1, size))
    return units


def _check(contents: Sequence[bytes | memoryview], stored: Sequence[int], file: OpenFile) -> None:
    if not np.array_equal(_mask(crc32c(contents)), np.array(stored, np.uint32)):
        raise _invalid_error(file)


def _mask(crc: Words) -> Words:
    """Return the form in which CRCs are stored, which have CRCs themselves."""
    rotated = np.bitwise_or(crc >> np.uint32(15), crc << np.uint32(17))
    masked: Words = np.add(rotated, np.uint32(0xA282EAD8), dtype=np.uint32)
    return masked


def _find_schema(records: Sequence[Mapping[str, FeatureShape | None]], file: OpenFile) -> pa.Schema:
    names = sorted({name for one in records for name in one})
    fields = []
    for name in names:
        shapes = [shape for one in records if (shape := one.get(name)) is not None]
        kinds = {shape.kind for shape in shapes} or {pa.null()}
        if len(kinds) > 1:
            raise ConfigError(
                f"The feature {name!r} of {file.path} has values of several types: {kinds}.",
                do="Write the files with one type for each feature.",
            )
        kind = kinds.pop()
        is_single = bool(shapes) and all(shape.value_count == 1 for shape in shapes)
        fields.append(pa.field(name, kind if is_single else pa.list_(kind)))
    return pa.schema(fields)


def _to_column(values: list[Any], field: pa.Field, file: OpenFile) -> pa.Array:
    if not pa.types.is_list(field.type):
        if any(value is not None and len(value) != 1 for value in values):
            raise ConfigError(
                f"The feature {field.name!r} of {file.path} has another number of values than 1, "
                "unlike in the first records.",
                do="Pass schema= with a list as the type of this column, such as "
                f"pa.list_({field.type}).",
            )
        values = [None if value is None else value[0] for value in values]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"The feature {field.name!r} of {file.path} has another type than {field.type}: "
            f"{error}",
            do="Write the files with one type for each feature, or pass schema=.",
        ) from error


def _invalid_error(file: OpenFile) -> ConfigError:
    return ConfigError(
        f"{file.path} is not a TFRecord file, or is damaged: a length or CRC is wrong.",
        do="Write the file again, or pass arrow_open_stream_args={'compression': …} if it is "
        "compressed.",
    )
