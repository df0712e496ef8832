"""The interface of what datasets are read from: files, tables in memory, other datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from typing import TypeAlias

IntArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Decode: TypeAlias = Callable[[], pa.Table]
"""Decodes bytes that were fetched; sends no request, or is all of the work."""


class DataFile(NamedTuple):
    """A file of a source, as it was when the source was listed."""

    url: str
    """Address of the directory or bucket that `open_store` opens; contains no secret."""
    key: str
    """Key below that address."""
    size_bytes: int
    version: str
    """ETag or version of the object; it changes with the content."""

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request, which takes time without taking a processor."""
        return "://" in self.url


@dataclass(frozen=True, eq=False)
class SourceUnits:
    """The units of a source: the parts that can be read on their own, with their numbers of rows.

    The arrays have one element per unit.
    """

    files: tuple[DataFile, ...]
    """() for a source without files."""
    unit_files: IntArray
    """Index into `files`; 0 for a source without files."""
    unit_positions: IntArray
    """Where a unit begins; the source defines the meaning: row group, first row, first member."""
    unit_rows: IntArray
    unit_bytes: IntArray
    """Size in memory, for limits: never far below, where the source can know it."""
    schema: pa.Schema | None = None
    """Columns of all units, if they are found by listing; otherwise `Source.schema` knows them."""

    def is_remote(self, unit: int) -> bool:
        """Return whether the file of a unit is remote; False for a source without files."""
        return bool(self.files) and self.files[int(self.unit_files[unit])].is_remote


class Source(Protocol):
    """Rows that can be read unit by unit, in any order and by any process.

    A source is immutable, small and can be pickled. One of files may also be a `UnitFetcher`.
    """

    @property
    def identity(self) -> str:
        """Text that, together with the files' versions, determines every row."""
        ...

    def list_units(self) -> SourceUnits:
        """Return the units, in the order of the rows; may read the headers of all files.

        Raises `ConfigError` if a file is missing or cannot be read as this source says.
        """
        ...

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return names and types of the columns of every unit."""
        ...

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit, always the same; with `columns`, only these, in this order.

        Raises `ConfigError` if the file has another version than `units` states.
        """
        ...


@runtime_checkable
class UnitFetcher(Protocol):
    """A source that can fetch the bytes of a unit without decoding them."""

    def is_fetched(self, units: SourceUnits, unit: int) -> bool:
        """Return whether fetching the unit sends requests; otherwise it takes no time."""
        ...

    def fetch_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> Decode:
        """Fetch the bytes, and return the function that decodes them; see `Source.read_unit`."""
        ...


def int_array(values: Sequence[int] | IntArray) -> IntArray:
    """Return an immutable array of 64-bit integers."""
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array
