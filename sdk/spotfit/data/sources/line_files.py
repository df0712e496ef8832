"""Text files whose rows are lines: CSV, JSON lines and text.

A unit is a range of bytes between ends of lines. The rows are counted, and the types of the
columns found, by one pass over the file when it is listed. Compressed files, and those of encodings
in which the byte of a line's end has other meanings, are one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.plans.read_ahead import calls_in_order
from spotfit.data.source import Decode
from spotfit.data.sources.compression import compression_of, decompress
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile

UNIT_BYTES = 8 * 2**20
"""Length of a unit; a longer line makes a longer unit."""
_ASCII_ENCODINGS = frozenset({"ascii", "utf8", "latin1", "iso88591", "cp1252", "windows1252"})


class LineContent(NamedTuple):
    """What lines contain."""

    schema: pa.Schema
    rows: int


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

    def inspect(self, body: bytes, file: OpenFile, *, is_first: bool) -> LineContent:
        """Return columns and number of the rows that `parse` returns without a schema."""
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
        """Parse the whole file to count the rows and to find the types of the columns.

        Ranges of lines are parsed in the threads of the inspection while the next one is read.
        """
        schema: pa.Schema | None = None
        units = []
        tasks = (
            (len(body), partial(self._inspect_range, body, file, start))
            for start, body in self._ranges(file)
        )
        for unit, found in calls_in_order(tasks, threads=file.threads):
            file.advance(unit.size_bytes)
            schema = found if schema is None else self._unify(schema, found, file)
            units.append(unit)
        return FileContent(pa.schema([]) if schema is None else schema, units)

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch a range of lines, which is parsed with the types of `schema`."""
        is_divided = self._is_divided(file)
        body = file.read(unit.position, unit.size_bytes) if is_divided else self._whole(file)
        return partial(self._parse, body, file, unit.position, schema)

    def _inspect_range(self, body: bytes, file: OpenFile, start: int) -> tuple[FileUnit, pa.Schema]:
        with _parse_errors(file, start):
            schema, rows = self.parser.inspect(body, file, is_first=start == 0)
        return FileUnit(start, rows, len(body)), schema

    def _parse(self, body: bytes, file: OpenFile, start: int, schema: pa.Schema) -> pa.Table:
        with _parse_errors(file, start):
            return self.parser.parse(body, file, is_first=start == 0, schema=schema)

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

    def _ranges(self, file: OpenFile) -> Iterator[tuple[int, bytes]]:
        """Yield begin and text of each unit."""
        if self._is_divided(file):
            yield from split_lines(file, self.parser.quote)
        elif file.size_bytes:
            yield 0, self._whole(file)

    def _is_divided(self, file: OpenFile) -> bool:
        return self.parser.is_divisible and compression_of(file, self.compression) is None

    def _whole(self, file: OpenFile) -> bytes:
        body = decompress(file, self.compression)
        return file.read() if body is None else body


@contextmanager
def _parse_errors(file: OpenFile, start: int) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise ConfigError(
            f"{file.path} cannot be parsed from byte {start} on: {error}",
            do="Correct the file, or pass other options or types of columns.",
        ) from error


def is_ascii_compatible(encoding: str) -> bool:
    """Whether the byte of a line's end has no other meaning in the encoding."""
    return _plain_name(encoding) in _ASCII_ENCODINGS


def is_utf8(encoding: str) -> bool:
    """Whether this is a name of UTF-8 without a byte order mark."""
    return _plain_name(encoding) == "utf8"


def _plain_name(encoding: str) -> str:
    return encoding.lower().replace("-", "").replace("_", "")


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
