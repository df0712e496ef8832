"""The interface of formats: what a file contains, and the rows of one of its units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from spotfit.data.files import FileSet, path_of
from spotfit.data.source import DataFile, Decode


def _ignore(_size_bytes: int) -> None:
    return None


class OpenFile(NamedTuple):
    """A file that a format reads from."""

    files: FileSet
    file: DataFile
    threads: int = 0
    """Threads that may decode parts of the file while the next ones are read; 0: the caller's."""
    advance: Callable[[int], None] = _ignore
    """Report how many bytes were inspected."""

    @property
    def path(self) -> str:
        """The path for messages."""
        return path_of(self.file)

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was listed."""
        return self.file.size_bytes

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of the file. Raises `ConfigError` if it was changed or deleted."""
        return self.files.read(self.file, start, length)

    def read_view(self, start: int, length: int) -> bytes | memoryview:
        """Return a part of the file, if possible without a copy; see `read`."""
        return self.files.read_view(self.file, start, length)


class FileUnit(NamedTuple):
    """A unit of a file; the format defines the meaning of the position."""

    position: int
    rows: int
    size_bytes: int
    """Size in memory as far as it is known, else of the stored bytes without their compression."""


class FileContent(NamedTuple):
    """What a file contains."""

    schema: pa.Schema
    units: Sequence[FileUnit]


class FileFormat(Protocol):
    """How files are read. Immutable, small, can be pickled."""

    @property
    def identity(self) -> str:
        """Text that determines the rows of a given file."""
        ...

    def inspect(self, file: OpenFile) -> FileContent:
        """Return columns and units of a file. Raises `ConfigError` if it has another format."""
        ...

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch the bytes of a unit, if it is possible without decoding them.

        The function returns the rows with at least those columns of `schema` that the file has.
        Types may differ from those of `schema` if they can be cast.
        """
        ...
