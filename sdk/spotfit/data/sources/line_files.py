"""Text files whose rows are lines: CSV, JSON lines and text.

A unit is a range of bytes between ends of lines. The rows are counted, and the types of the
columns found, by one pass over the file when it is listed. Compressed files, and those of encodings
in which the byte of a line's end has other meanings, are one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.sources.compression import compression_of, decompress
from spotfit.data.sources.file_source import FileContent, FileUnit, OpenFile

UNIT_BYTES = 8 * 2**20
"""Length of a unit; a longer line makes a longer unit."""
_ASCII_ENCODINGS = frozenset({"ascii", "utf8", "latin1", "iso88591", "cp1252", "windows1252"})


class LineParser(Protocol):
    """How the bytes of lines become rows. Immutable, small, can be pickled."""

    @property
    def identity(self) -> str:
        """Text that determines the rows of given bytes."""
        ...

    @property
    def is_divisible(self) -> bool:
        """Whether each byte of "\\n" is the end of a line, at least outside quotation marks."""
        ...

    @property
    def quote(self) -> bytes:
        """The quotation mark between which ends of lines belong to values; b"" if there is none."""
        ...

    def parse(
        self, body: bytes, file: OpenFile, *, is_first: bool, schema: pa.Schema | None
    ) -> pa.Table:
        """Return the rows of lines; `is_first` at the beginning of the file.

        With `schema`, only its columns with its types; None: all columns, with the types of the
        values. Raises `pa.ArrowInvalid` or `ValueError` for invalid lines.
        """
        ...

    def unify(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return the columns of lines of one file, with types that hold the values of both."""
        ...


@dataclass(frozen=True, eq=False)
class LineFormat:
    """Reads ranges of lines."""

    parser: LineParser
    compression: str | None = None
    """None: from the name of each file."""

    @property
    def identity(self) -> str:
        """The parser's, and the compression."""
        return f"{self.parser.identity} {self.compression}"

    def inspect(self, file: OpenFile) -> FileContent:
        """Parse the whole file to count the rows and to find the types of the columns."""
        schema: pa.Schema | None = None
        units = []
        for start, body, size_bytes in self._ranges(file):
            table = self._parse(body, file, start, None)
            schema = table.schema if schema is None else self._unify(schema, table.schema, file)
            units.append(FileUnit(start, table.num_rows, size_bytes))
        return FileContent(pa.schema([]) if schema is None else schema, units)

    def read(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> pa.Table:
        """Fetch a range of lines and parse it with the types of `schema`."""
        is_divided = self._is_divided(file)
        body = file.read(unit.position, unit.size_bytes) if is_divided else self._whole(file)
        return self._parse(body, file, unit.position, schema)

    def _parse(self, body: bytes, file: OpenFile, start: int, schema: pa.Schema | None) -> pa.Table:
        try:
            return self.parser.parse(body, file, is_first=start == 0, schema=schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise ConfigError(
                f"{file.path} cannot be parsed from byte {start} on: {error}",
                do="Correct the file, or pass other options or types of columns.",
            ) from error

    def _unify(self, first: pa.Schema, second: pa.Schema, file: OpenFile) -> pa.Schema:
        if first.equals(second):
            return first
        try:
            return self.parser.unify(first, second)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(
                f"The rows of {file.path} have values of different types: {error}",
                do="Correct the file, or state the types of the columns.",
            ) from error

    def _ranges(self, file: OpenFile) -> Iterator[tuple[int, bytes, int]]:
        """Yield begin, text and stored size of each unit."""
        if self._is_divided(file):
            for start, body in split_lines(file, self.parser.quote):
                yield start, body, len(body)
        elif file.size_bytes:
            yield 0, self._whole(file), file.size_bytes

    def _is_divided(self, file: OpenFile) -> bool:
        return self.parser.is_divisible and compression_of(file, self.compression) is None

    def _whole(self, file: OpenFile) -> bytes:
        body = decompress(file, self.compression)
        return file.read() if body is None else body


def is_ascii_compatible(encoding: str) -> bool:
    """Whether the byte of a line's end has no other meaning in the encoding."""
    return encoding.lower().replace("-", "").replace("_", "") in _ASCII_ENCODINGS


def split_lines(file: OpenFile, quote: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield begin and bytes of ranges of about `UNIT_BYTES` that end at ends of lines."""
    start = position = 0
    pending = b""
    while position < file.size_bytes:
        length = min(UNIT_BYTES, file.size_bytes - position)
        pending += file.read(position, length)
        position += length
        end = len(pending) if position == file.size_bytes else _end_of_lines(pending, quote)
        if end:
            yield start, pending[:end]
            start, pending = start + end, pending[end:]


def _end_of_lines(body: bytes, quote: bytes) -> int:
    """Return the length of the complete lines of `body`, which begins with a line."""
    if not quote:
        return body.rfind(b"\n") + 1
    values = np.frombuffer(body, np.uint8)
    # Also correct for doubled quotation marks, between which there is nothing.
    is_quoted = np.cumsum(values == quote[0]) % 2 == 1
    (ends,) = np.nonzero((values == ord("\n")) & ~is_quoted)
    return int(ends[-1]) + 1 if len(ends) else 0


def option_values(options: object) -> str:
    """Return the values of an options object of pyarrow as text, the same in every process."""
    names = [name for name in dir(options) if not name.startswith("_")]
    values = {name: getattr(options, name) for name in names}
    return repr({name: value for name, value in values.items() if not callable(value)})
