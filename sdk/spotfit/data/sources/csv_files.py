"""CSV files, parsed by pyarrow."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import pyarrow as pa
import pyarrow.csv

from spotfit.core.cached import cached_property
from spotfit.data.captured_values import digest_captured
from spotfit.data.sources.file_format import OpenFile
from spotfit.data.sources.line_files import (
    UNIT_BYTES,
    LineContent,
    is_ascii_compatible,
    option_values,
)

_HEAD_BYTES = 64 * 2**10
"""Most files have the names of the columns in these first bytes."""


@dataclass(frozen=True, eq=False)
class CsvParser:
    """Parses lines of CSV with the options of pyarrow."""

    read_options: pyarrow.csv.ReadOptions = field(default_factory=pyarrow.csv.ReadOptions)
    parse_options: pyarrow.csv.ParseOptions = field(default_factory=pyarrow.csv.ParseOptions)
    convert_options: pyarrow.csv.ConvertOptions = field(default_factory=pyarrow.csv.ConvertOptions)

    @cached_property
    def identity(self) -> str:
        """The options, with a hash of the function for invalid rows."""
        options = (self.read_options, self.parse_options, self.convert_options)
        text = f"csv {[option_values(one) for one in options]}"
        handler = self.parse_options.invalid_row_handler
        if handler is None:
            return text
        # Without a hash, another process must not take these rows for its own.
        return f"{text} {digest_captured([handler]) or uuid.uuid4().hex}"

    @property
    def is_divisible(self) -> bool:
        """Whether quotation marks and ends of lines can be found in the bytes."""
        is_escaped = self.parse_options.newlines_in_values and self.parse_options.escape_char
        return is_ascii_compatible(self.read_options.encoding) and not is_escaped

    @property
    def quote(self) -> bytes:
        """The quotation mark, if values may contain ends of lines."""
        if not self.parse_options.newlines_in_values or not self.parse_options.quote_char:
            return b""
        return str(self.parse_options.quote_char).encode()

    def parse(
        self, body: bytes, file: OpenFile, *, is_first: bool, schema: pa.Schema | None
    ) -> pa.Table:
        """Return the rows of lines; see `LineParser.parse`."""
        read = copy.copy(self.read_options)
        read.use_threads, read.block_size = False, len(body) + 1
        if not is_first:
            read.column_names = _column_names(self, OpenFile(file.files, file.file))
            read.skip_rows = read.skip_rows_after_names = 0
        convert = copy.copy(self.convert_options)
        if schema is not None:
            stated = dict(zip(schema.names, schema.types, strict=True))
            convert.column_types = {**convert.column_types, **stated}
            convert.include_columns = schema.names
            convert.include_missing_columns = True
        if is_first and not body.strip():
            return pa.table({})
        return pyarrow.csv.read_csv(
            pa.BufferReader(body),
            read_options=read,
            parse_options=self.parse_options,
            convert_options=convert,
        )

    def inspect(self, body: bytes, file: OpenFile, *, is_first: bool) -> LineContent:
        """Return columns and number of the rows, whose types are those of all values."""
        table = self.parse(body, file, is_first=is_first, schema=None)
        return LineContent(table.schema, table.num_rows)

    def unify(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return text for columns with values of different types, as pyarrow does for a file."""
        types = dict(zip(second.names, second.types, strict=True))
        return pa.schema(
            [one.with_type(_unify_types(one.type, types.get(one.name, one.type))) for one in first]
        )


def _unify_types(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return pa.string()


@lru_cache(maxsize=64)
def _column_names(parser: CsvParser, file: OpenFile) -> Sequence[str]:
    """Return the names of all columns, which are in the first line or in the options."""
    head = file.read(0, min(file.size_bytes, _HEAD_BYTES))
    if b"\n" in head and not parser.quote:
        try:
            return _read_names(parser, head)
        except pa.ArrowInvalid:  # too short, for example because lines are skipped
            pass
    return _read_names(parser, file.read(0, min(file.size_bytes, UNIT_BYTES)))


def _read_names(parser: CsvParser, head: bytes) -> list[str]:
    reader = pyarrow.csv.open_csv(
        pa.BufferReader(head[: head.rfind(b"\n") + 1] or head),
        read_options=parser.read_options,
        parse_options=parser.parse_options,
    )
    return list(reader.schema.names)
