"""A source with units of any size that counts how its units are read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.source import DataFile, SourceUnits, int_array


@dataclass(eq=False)
class CountingSource:
    """Rows with consecutive numbers in `id`, and twice the number in `double`."""

    unit_rows: Sequence[int]
    before_read: Callable[[int], None] = lambda _unit: None
    """Called with the unit in the thread that reads."""
    reads: Counter[int] = field(default_factory=Counter)
    columns: list[Sequence[str] | None] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    identity = "counting"

    def list_units(self) -> SourceUnits:
        """Return units of a file each."""
        count = len(self.unit_rows)
        rows = int_array(list(self.unit_rows))
        return SourceUnits(
            files=tuple(
                DataFile("memory://rows", f"{unit}.table", 1, "1") for unit in range(count)
            ),
            unit_files=int_array(np.arange(count)),
            unit_positions=int_array(np.cumsum(rows) - rows),
            unit_rows=rows,
            unit_bytes=int_array(16 * rows),
        )

    def schema(self, _units: SourceUnits) -> pa.Schema:
        """Return the schema of two integer columns."""
        return pa.schema([("id", pa.int64()), ("double", pa.int64())])

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit."""
        self.before_read(unit)
        with self._lock:
            self.reads[unit] += 1
            self.columns.append(columns)
        first, rows = int(units.unit_positions[unit]), int(units.unit_rows[unit])
        ids = np.arange(first, first + rows)
        table = pa.Table.from_arrays([int64_array(ids), int64_array(2 * ids)], ["id", "double"])
        return table if columns is None else table.select(list(columns))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def dataset(self) -> Dataset:
        """Return the dataset of all rows."""
        return Dataset.of_source(self)


def int64_array(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    """Return an Arrow array, without the import of pandas in `pa.array`."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def ids_of(block: pa.Table) -> list[int]:
    """Return the numbers of the rows."""
    return block["id"].to_pylist()  # type: ignore[no-any-return]
