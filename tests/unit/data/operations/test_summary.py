"""Descriptions of datasets."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spotfit.data.operations.summary import describe, summarize
from spotfit.data.plans.row_plan import RowPlan, ShuffleSettings
from spotfit.data.plans.transforms import SelectColumns
from tests.unit.data.row_sources import UnitSource, number_plan

TABLE = pa.table({"age": [25, 30, 0], "name": ["Ann", None, "Bob"]})
PLAN = RowPlan.of_source(UnitSource(TABLE, (1, 2)))


def test_numbers_have_their_statistics() -> None:
    values = summarize(PLAN, ["age"]).get_column_stats("age")
    assert values == {
        "count": 3,
        "missing_pct": 0.0,
        "mean": pytest.approx(55 / 3),
        "min": 0,
        "max": 30,
        "std": pytest.approx(16.0728, abs=1e-3),
        "zero_pct": pytest.approx(100 / 3),
    }


def test_text_is_counted() -> None:
    values = summarize(PLAN, ["name"]).get_column_stats("name")
    assert values == {"count": 3, "missing_pct": pytest.approx(100 / 3)}


def test_a_summary_is_a_dataframe_of_all_statistics() -> None:
    frame = summarize(PLAN, ["age", "name"]).to_pandas()
    assert list(frame.columns) == ["statistic", "age", "name"]
    assert frame.set_index("statistic").loc["max", "age"] == 30


def test_a_description_has_rows_units_columns_and_transforms() -> None:
    plan = number_plan(3, 4).with_transform(SelectColumns(("id",)))
    text = describe(plan, ShuffleSettings("rows", 5), "numbers")
    assert text.splitlines() == [
        "Dataset numbers",
        "  rows: 7 in 2 units, 700 B",
        "  files: 0",
        "  shuffle: rows, seed 5",
        "  columns read: id",
        "  select_columns(['id'])",
    ]
