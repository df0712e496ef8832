"""A program for tests: an operation on many rows, and the memory that the process needed for it.

Arguments: the operation, MiB of rows, MiB of the limit, a folder.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from spotfit.data.context import DataContext
from spotfit.data.dataset import Dataset
from spotfit.data.source import SourceUnits
from spotfit.data.sources.tables import even_units

ROW_BYTES = 1024 + 8 + 8
FACTOR = 7_368_787
"""A prime: multiples of it modulo the number of rows are a permutation of the rows."""


@dataclass(frozen=True)
class ComputedRows:
    """Rows with their number, a unique key, and 1 KiB that repeats the number."""

    count: int

    identity = "computed"

    def list_units(self) -> SourceUnits:
        return even_units(self.count, self.count * ROW_BYTES)

    def schema(self, _units: SourceUnits) -> pa.Schema:
        return self._block(0, 1).schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        table = self._block(int(units.unit_positions[unit]), int(units.unit_rows[unit]))
        return table if columns is None else table.select(list(columns))

    def _block(self, first: int, rows: int) -> pa.Table:
        numbers = np.arange(first, first + rows)
        payload = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 128)), 128)
        return pa.table({"n": numbers, "key": numbers * FACTOR % self.count, "payload": payload})


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(operation: str, rows: Dataset) -> Dataset:
    match operation:
        case "sort":
            return rows.sort("key")
        case "shuffle":
            return rows.random_shuffle(exact=True, seed=1)
        case "join":
            return rows.join(rows.select_columns(["n"]), "inner", on=["key"], right_on=["n"])
    raise ValueError(operation)


def check(operation: str, result: Dataset, count: int) -> None:
    """Compare the payload of every row with its number, and the order of the keys."""
    assert result.count() == count
    seen, last = 0, -1
    for block in result.blocks():
        numbers, keys = block["n"].to_numpy(), block["key"].to_numpy()
        assert (keys == numbers * FACTOR % count).all()
        values = block["payload"].combine_chunks().values.to_numpy()
        assert (values.reshape(-1, 128) == numbers[:, None]).all()
        seen += int(numbers.sum())
        if operation == "sort":
            assert keys[0] > last
            assert (np.diff(keys) > 0).all()
            last = int(keys[-1])
    assert seen == count * (count - 1) // 2


def main() -> None:
    operation, size_mib, limit_mib, folder = sys.argv[1:]
    context = DataContext.get_current()
    context.operation_memory_bytes = int(limit_mib) * 2**20
    context.spill_directory = folder
    before = peak_bytes()
    count = int(size_mib) * 2**20 // ROW_BYTES
    result = run(operation, Dataset.of_source(ComputedRows(count)))
    result = result.materialize(Path(folder) / "result")
    peak = peak_bytes()
    check(operation, result, count)
    print(json.dumps({"before": before, "peak": peak}))


if __name__ == "__main__":
    main()
