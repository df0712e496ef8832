"""Groups of rows."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

import spotfit.data
from spotfit.data.aggregate import Max
from spotfit.data.expressions import col

ROWS = [{"k": n % 3, "x": float(n), "y": n * 2} for n in range(10)]
FRAME = pd.DataFrame(ROWS)
GROUPS = spotfit.data.from_items(ROWS).groupby("k")


@pytest.mark.parametrize("name", ["sum", "min", "max", "mean", "std"])
def test_a_statistic_of_one_column_is_that_of_pandas(name: str) -> None:
    rows = getattr(GROUPS, name)("x").take_all()
    expected = getattr(FRAME.groupby("k")["x"], name)()
    assert [row[f"{name}(x)"] for row in rows] == pytest.approx(expected.tolist())
    assert [row["k"] for row in rows] == [0, 1, 2]


def test_all_other_columns_are_aggregated_by_default() -> None:
    assert GROUPS.sum().columns() == ["k", "sum(x)", "sum(y)"]


def test_rows_are_counted() -> None:
    assert GROUPS.count().take_all() == [
        {"k": 0, "count()": 4},
        {"k": 1, "count()": 3},
        {"k": 2, "count()": 3},
    ]


def test_several_aggregates_are_columns() -> None:
    rows = GROUPS.aggregate(Max("y"), Max("x", alias_name="largest")).take_all()
    assert rows[0] == {"k": 0, "max(y)": 18, "largest": 9.0}


@pytest.mark.parametrize("batch_format", ["default", "pandas", "pyarrow"])
def test_a_function_maps_each_group(batch_format: Any) -> None:
    result = GROUPS.map_groups(lambda group: group, batch_format=batch_format)
    assert [row["y"] for row in result.take_all()] == [0, 6, 12, 18, 2, 8, 14, 4, 10, 16]


def test_a_class_maps_each_group() -> None:
    class Centered:
        def __init__(self, scale: int) -> None:
            self.scale = scale

        def __call__(self, group: dict[str, Any]) -> dict[str, Any]:
            return {"x": (group["x"] - group["x"].mean()) * self.scale}

    result = GROUPS.map_groups(Centered, fn_constructor_args=[2])
    assert sum(row["x"] for row in result.take_all()) == pytest.approx(0)


def test_a_column_is_computed_for_each_group() -> None:
    rows = GROUPS.with_column("z", col("x") + 1).take_all()
    assert [row["z"] for row in rows] == [1, 4, 7, 10, 2, 5, 8, 3, 6, 9]


def test_nothing_is_computed_before_rows_are_needed() -> None:
    calls: list[int] = []

    def record(group: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        return group

    result = GROUPS.map_groups(record)
    assert calls == []
    assert result.count() == 10
    assert calls == [1, 1, 1]
