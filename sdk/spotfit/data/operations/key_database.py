"""DuckDB over the keys and numbers of rows, within a limit on memory and with files beyond it.

Only keys enter the database. The rows themselves are moved by `BucketFile`, so that every type of
Arrow keeps its values, and results are those of the operations in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from spotfit.core.errors import InfrastructureError
from spotfit.data.source import IntArray
from spotfit.host.plugins import require_module

_BATCH_ROWS = 2**16
_THREAD_BYTES = 128 * 2**20
"""DuckDB fails with much less memory for each thread."""


def is_available() -> bool:
    """Return whether DuckDB is installed, without its import."""
    return find_spec("duckdb") is not None


class Placement(NamedTuple):
    """Where rows go. A row may be in several places; `rows` ascend."""

    rows: IntArray
    places: IntArray


PLACEMENT_COLUMNS = pa.schema([("row", pa.int64()), ("place", pa.int64())])


class KeyDatabase:
    """A database in memory whose tables and sorts beyond the limit are in `folder`.

    Raises `InfrastructureError` if DuckDB fails, for example without space on the disk.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        duckdb: Any = require_module("duckdb", extra="duckdb")
        self._error: type[Exception] = duckdb.Error
        self._connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": f"{memory_bytes // 2**20}MiB",
                "temp_directory": str(folder / "duckdb"),
                "threads": max(1, min(os.cpu_count() or 1, memory_bytes // _THREAD_BYTES)),
                # Every query that needs an order states it.
                "preserve_insertion_order": False,
                # No function of the network is needed: extensions would be downloaded.
                "autoinstall_known_extensions": False,
            },
        )

    def load(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Create a table of these rows. Raises what the iteration over `batches` raises."""
        failures: list[BaseException] = []

        def guarded() -> Iterator[pa.RecordBatch]:
            try:
                yield from batches
            except BaseException as error:
                failures.append(error)  # DuckDB raises another error without the cause
                raise

        reader = pa.RecordBatchReader.from_batches(schema, guarded())
        # Another cursor: `batches` may come from a query of this database.
        cursor = self._connection.cursor()
        try:
            with self._translated():
                cursor.register("incoming", reader)
                cursor.execute(f"CREATE TABLE {table} AS SELECT * FROM incoming")  # noqa: S608 - a constant of this package
        except InfrastructureError:
            if failures:
                raise failures[0] from None
            raise
        finally:
            cursor.close()

    def create(self, table: str, query: str) -> None:
        """Create a table of the result of a query, in any order."""
        with self._translated():
            self._connection.execute(f"CREATE TABLE {table} AS {query}")

    def stream(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield the result of a query, which is not held in memory."""
        cursor = self._connection.cursor()
        try:
            with self._translated():
                reader = cursor.sql(query).to_arrow_reader(_BATCH_ROWS)
                yield from reader
        finally:
            cursor.close()

    def placements(self, query: str) -> Iterator[Placement]:
        """Yield the result of a query with the columns row and place, ordered by the row."""
        for batch in self.stream(query):
            yield Placement(*(int64_values(column) for column in batch.columns))

    def drop(self, table: str) -> None:
        """Delete a table and its files."""
        with self._translated():
            self._connection.execute(f"DROP TABLE {table}")

    def close(self) -> None:
        """Release memory and files."""
        self._connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._error, pa.ArrowException) as error:
            raise InfrastructureError(
                f"DuckDB failed: {error}.",
                do="If memory or disk space was missing, set operation_memory_bytes or "
                "spill_directory of spotfit.data.DataContext.get_current().",
            ) from error


def key_batches(
    names: Sequence[str], keys: Iterable[Sequence[pa.ChunkedArray]]
) -> Iterator[pa.RecordBatch]:
    """Yield the keys of blocks with the numbers of their rows in the column `row`."""
    first = 0
    for columns in keys:
        count = len(columns[0])
        rows = pa.chunked_array([np.arange(first, first + count)])
        yield from pa.table([rows, *columns], names=["row", *names]).to_batches()
        first += count


def int64_values(column: pa.Array) -> IntArray:
    """Return the values of a column without null values."""
    values: IntArray = column.to_numpy(zero_copy_only=False)
    return values


def placement_batch(rows: IntArray, places: IntArray) -> pa.RecordBatch:
    """Return rows of `PLACEMENT_COLUMNS`."""
    return pa.record_batch([pa.array(rows), pa.array(places)], schema=PLACEMENT_COLUMNS)
