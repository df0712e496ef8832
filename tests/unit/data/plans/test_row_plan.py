"""Rows and transforms of a dataset."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from spotfit.data.operations.row_filters import row_filter
from spotfit.data.operations.selections import FilteredSource
from spotfit.data.plans.row_functions import MapRows, map_batches_transform
from spotfit.data.plans.row_plan import UNSHUFFLED, RowPlan, ShuffleSettings, ordered_blocks
from spotfit.data.plans.transforms import DropColumns, SelectColumns
from spotfit.data.source import DataFile, SourceUnits
from spotfit.data.user_functions import user_function
from tests.unit.data.row_sources import UnitSource, column_of, number_plan, number_source


def map_rows(function: Any) -> MapRows:
    return MapRows(user_function("map", function, {}))


def test_nothing_is_read_before_rows_are_needed() -> None:
    source = number_source(3, 4)
    plan = RowPlan.of_source(source).with_transform(map_rows(lambda row: row))
    assert source.reads == []
    assert plan.manifest.row_count == 7
    assert source.reads == []


def test_blocks_are_the_units_that_have_rows() -> None:
    assert [block.num_rows for block in number_plan(3, 0, 4).blocks()] == [3, 4]


def test_only_needed_columns_are_read() -> None:
    source = number_source(3)
    plan = RowPlan.of_source(source).with_transform(DropColumns(("square",)))
    assert column_of(plan) == [0, 1, 2]
    list(plan.blocks())
    assert source.reads == [(0, ("id",)), (0, ("id", "group"))]


def test_the_schema_of_user_code_is_that_of_its_first_rows() -> None:
    source = number_source(0, 100)
    plan = RowPlan.of_source(source).with_transform(map_rows(lambda row: {"x": row["id"] / 2}))
    assert plan.schema == pa.schema([("x", pa.float64())])
    assert [unit for unit, _ in source.reads] == [1]


def test_the_schema_without_user_code_reads_nothing() -> None:
    source = number_source(3)
    plan = RowPlan.of_source(source).with_transform(SelectColumns(("group",)))
    assert plan.schema.names == ["group"]
    assert source.reads == []


def test_a_union_shares_equal_transforms() -> None:
    transform = map_rows(lambda row: {"id": row["id"] + 1})
    parts = [number_plan(2).with_transform(transform), number_plan(3).with_transform(transform)]
    union = RowPlan.concat(parts)
    assert len(union.transforms) == 1
    assert column_of(union) == [1, 2, 1, 2, 3]


def test_a_union_keeps_the_transforms_of_each_part() -> None:
    doubled = number_plan(3).with_transform(map_rows(lambda row: {"id": row["id"] * 2}))
    union = RowPlan.concat([number_plan(2), doubled])
    assert column_of(union) == [0, 1, 0, 2, 4]
    assert union.runs_user_code


def test_a_union_keeps_equal_functions_with_other_captured_values() -> None:
    def times(factors: np.ndarray[Any, Any]) -> MapRows:
        return map_rows(lambda row: {"id": row["id"] * factors[0]})

    parts = [number_plan(2).with_transform(times(np.array([factor]))) for factor in (2, 3)]
    assert column_of(RowPlan.concat(parts)) == [0, 2, 0, 3]


def test_columns_that_a_part_of_a_union_lacks_are_null() -> None:
    part = number_plan(2).with_transform(SelectColumns(("id",)))
    union = RowPlan.concat([part, number_plan(1)])
    blocks = list(union.blocks())
    assert [block.schema for block in blocks] == [union.schema] * 2
    assert column_of(union, "square") == [None, None, 0]


def test_a_pickle_reads_the_same_rows_and_creates_classes_again() -> None:
    class Counter:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            self.calls += 1
            return {"id": batch["id"], "call": np.full(len(batch["id"]), self.calls)}

    transform = map_batches_transform(user_function("map_batches", Counter, {}), "numpy", None)
    plan = number_plan(2, 2).with_transform(transform)
    assert column_of(plan, "call") == [1, 1, 2, 2]
    copy = pickle.loads(cloudpickle.dumps(plan))
    assert column_of(copy, "call") == [1, 1, 2, 2]
    assert copy.digest == plan.digest


def test_a_pickle_is_small() -> None:
    plan = number_plan(*[1] * 50)
    source = plan.manifest.sources[0]
    source.table = source.table.slice(0, 0)  # type: ignore[attr-defined]  # of the test
    assert len(cloudpickle.dumps(plan)) < 12_000


@pytest.mark.parametrize("kind", ["units", "rows"])
def test_a_shuffled_pass_has_every_row_once_in_another_order_each_epoch(kind: Any) -> None:
    plan = number_plan(5, 5, 5, 5, 5, 5)
    orders = [
        [
            row
            for block in ordered_blocks(plan, ShuffleSettings(kind, 3), epoch=epoch)
            for row in block["id"].to_pylist()
        ]
        for epoch in (0, 0, 1)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert [sorted(order) for order in orders] == [list(range(30))] * 3


def test_shuffled_units_keep_the_order_of_their_rows() -> None:
    blocks = list(ordered_blocks(number_plan(5, 5, 5, 5), ShuffleSettings("units", 1)))
    starts = [block["id"][0].as_py() for block in blocks]
    assert [block["id"].to_pylist() for block in blocks] == [
        list(range(start, start + 5)) for start in starts
    ]
    assert starts != sorted(starts)


def test_a_limit_transforms_only_the_rows_that_are_needed() -> None:
    rows: list[int] = []

    def record(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row["id"])
        return row

    plan = number_plan(10, 10).with_transform(map_rows(record))
    blocks = list(ordered_blocks(plan, UNSHUFFLED, limit=3))
    assert [block.num_rows for block in blocks] == [3]
    assert rows == [0, 1, 2]


def test_a_limit_may_end_in_a_later_block() -> None:
    blocks = ordered_blocks(number_plan(4, 4), UNSHUFFLED, limit=6)
    assert [block.num_rows for block in blocks] == [4, 2]


class FileUnitSource(UnitSource):
    """Units of a file. Records the threads that read."""

    threads: list[str]

    def list_units(self) -> SourceUnits:
        files = (DataFile("memory://bucket", "rows", 1, "1"),)
        return replace(super().list_units(), files=files)

    def read_unit(self, units: SourceUnits, unit: int, columns: Any = None) -> pa.Table:
        self.threads.append(threading.current_thread().name)
        return super().read_unit(units, unit, columns)


def file_source(*unit_rows: int) -> FileUnitSource:
    source = number_source(*unit_rows)
    files = FileUnitSource(source.table, source.unit_rows)
    files.threads = []
    return files


def test_files_are_read_in_threads_and_functions_called_in_the_own() -> None:
    source, callers = file_source(3, 3, 3), set[str]()

    def record(row: dict[str, Any]) -> dict[str, Any]:
        callers.add(threading.current_thread().name)
        return row

    plan = RowPlan.of_source(source).with_transform(map_rows(record))
    assert column_of(plan) == list(range(9))
    assert callers == {threading.current_thread().name}
    assert all(name.startswith("spotfit-read") for name in source.threads)


def test_functions_that_select_rows_are_called_in_the_own_thread() -> None:
    source = file_source(3, 3, 3)
    expression = FilteredSource(RowPlan.of_source(source), row_filter(None, "id != 4", {}))
    assert column_of(RowPlan.of_source(expression)) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert all(name.startswith("spotfit-read") for name in source.threads)
    function = FilteredSource(
        RowPlan.of_source(source), row_filter(lambda row: row["id"] != 4, None, {})
    )
    plan = RowPlan.of_source(function)
    assert plan.manifest.row_count == 8
    source.threads.clear()
    assert column_of(plan) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert set(source.threads) == {threading.current_thread().name}


def test_a_few_rows_are_read_without_threads() -> None:
    source = file_source(3, 3, 3)
    list(ordered_blocks(RowPlan.of_source(source), UNSHUFFLED, limit=4))
    assert source.threads == [threading.current_thread().name] * 2
