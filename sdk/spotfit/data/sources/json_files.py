"""JSON lines, and files that are one JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.json

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.source import Decode
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile
from spotfit.data.sources.line_files import LineContent, LineFormat, option_values

_MAX_DOCUMENT_BYTES = 256 * 2**20
_DOCUMENT_POSITION = -1


@dataclass(frozen=True, eq=False)
class JsonParser:
    """Parses lines of JSON objects with pyarrow."""

    parse_options: pyarrow.json.ParseOptions = field(default_factory=pyarrow.json.ParseOptions)
    is_divisible: bool = True
    quote: bytes = b""

    @cached_property
    def identity(self) -> str:
        """The options."""
        return f"json {option_values(self.parse_options)}"

    def parse(
        self, body: bytes, file: OpenFile, *, is_first: bool, schema: pa.Schema | None
    ) -> pa.Table:
        """Return the rows of lines; see `LineParser.parse`."""
        if not body.strip():
            return pa.table({})
        return pyarrow.json.read_json(
            pa.BufferReader(body),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(body) + 1),
            parse_options=self._options(schema),
        )

    def inspect(self, body: bytes, file: OpenFile, *, is_first: bool) -> LineContent:
        """Return columns and number of the rows, whose types are those of all values."""
        table = self.parse(body, file, is_first=is_first, schema=None)
        return LineContent(table.schema, table.num_rows)

    def unify(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return all columns of both, with types that hold the values of both."""
        return pa.unify_schemas(
            [_with_text(first, second), _with_text(second, first)], promote_options="permissive"
        )

    def _options(self, schema: pa.Schema | None) -> pyarrow.json.ParseOptions:
        if schema is None:
            return self.parse_options
        return pyarrow.json.ParseOptions(
            explicit_schema=schema,
            newlines_in_values=self.parse_options.newlines_in_values,
            unexpected_field_behavior="ignore",
        )


@dataclass(frozen=True, eq=False)
class JsonDocumentParser:
    """Parses a file that is a list of objects, or one object, of which a row is made."""

    is_divisible: bool = False
    quote: bytes = b""
    identity: str = "json document"

    def parse(
        self, body: bytes, file: OpenFile, *, is_first: bool, schema: pa.Schema | None
    ) -> pa.Table:
        """Return the rows of the document; see `LineParser.parse`."""
        found: Any = json.loads(body)
        rows = found if isinstance(found, list) else [found]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is neither a list of objects nor an object")
        if schema is not None:
            return pa.Table.from_pylist(rows, schema=schema)
        # Columns that the first row lacks are columns, too.
        names = list(dict.fromkeys(name for row in rows for name in row))
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def inspect(self, body: bytes, file: OpenFile, *, is_first: bool) -> LineContent:
        """Return columns and number of the rows, whose types are those of all values."""
        table = self.parse(body, file, is_first=is_first, schema=None)
        return LineContent(table.schema, table.num_rows)

    def unify(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return both columns; a document is one unit."""
        return pa.unify_schemas([first, second], promote_options="permissive")


@dataclass(frozen=True, eq=False)
class JsonFormat:
    """Reads files of JSON lines, and files that are one document unless `is_lines`."""

    is_lines: bool
    parse_options: pyarrow.json.ParseOptions
    compression: str | None = None

    @cached_property
    def _lines(self) -> LineFormat:
        return LineFormat(JsonParser(self.parse_options), self.compression)

    @cached_property
    def _document(self) -> LineFormat:
        return LineFormat(JsonDocumentParser(), self.compression)

    @property
    def identity(self) -> str:
        """The options."""
        return f"{self._lines.identity} {self.is_lines}"

    def inspect(self, file: OpenFile) -> FileContent:
        """Parse the file as lines, or else as a document."""
        try:
            return self._lines.inspect(file)
        except ConfigError:
            if self.is_lines or file.size_bytes > _MAX_DOCUMENT_BYTES:
                raise
        schema, (unit,) = self._document.inspect(file)
        return FileContent(schema, [unit._replace(position=_DOCUMENT_POSITION)])

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch lines or the document."""
        if unit.position == _DOCUMENT_POSITION:
            return self._document.fetch(file, unit._replace(position=0), schema)
        return self._lines.fetch(file, unit, schema)


def _with_text(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the schema with text for columns of times that are text in the other one."""
    # pyarrow reads text as a time if all values of a column are times.
    types = dict(zip(other.names, other.types, strict=True))
    return pa.schema(
        [
            one.with_type(pa.string())
            if pa.types.is_timestamp(one.type) and types.get(one.name) == pa.string()
            else one
            for one in schema
        ]
    )
