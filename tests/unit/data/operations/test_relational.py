"""Sorting, grouping and joining, against pandas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import Count, Mean, Sum
from spotfit.data.operations.relational import (
    JOIN_TYPES,
    JoinKeys,
    aggregated_table,
    joined_table,
    mapped_groups,
    sorted_table,
)
from spotfit.data.plans.row_plan import RowPlan
from tests.unit.data.row_sources import UnitSource, number_plan

_RNG = np.random.default_rng(3)
LEFT = pd.DataFrame({"k": [1, 2, 2, 4], "j": ["a", "b", "c", "d"], "l": [0.1, 0.2, 0.3, 0.4]})
RIGHT = pd.DataFrame({"k": [2, 4, 2, 7], "j": ["b", "x", "b", "d"], "r": [10, 20, 30, 40]})


def plan_of(frame: pd.DataFrame, *unit_rows: int) -> RowPlan:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    return RowPlan.of_source(UnitSource(table, unit_rows or (len(frame),)))


def join(
    left: RowPlan,
    right: RowPlan,
    join_type: str,
    on: list[str],
    right_on: list[str] | None,
    suffixes: tuple[str | None, str | None],
) -> pa.Table:
    return joined_table(left, right, JoinKeys.of_arguments(join_type, on, right_on, suffixes))


def test_rows_are_sorted_stably_by_several_columns() -> None:
    frame = pd.DataFrame(
        {"a": _RNG.integers(0, 5, 200), "b": _RNG.integers(0, 5, 200), "n": range(200)}
    )
    result = sorted_table(plan_of(frame, 50, 150), ["a", "b"], [False, True]).to_pandas()
    expected = frame.sort_values(["a", "b"], ascending=[True, False], kind="stable")
    pd.testing.assert_frame_equal(result, expected.reset_index(drop=True))


def test_null_values_are_last() -> None:
    table = sorted_table(plan_of(pd.DataFrame({"a": [3.0, None, 1.0]})), "a", descending=True)
    assert table["a"].to_pylist()[:2] == [3.0, 1.0]


def test_tensors_are_sorted_with_their_rows() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6.0).reshape(3, 2))
    source = UnitSource(pa.table({"k": [3, 1, 2], "t": tensors}), (3,))
    table = sorted_table(RowPlan.of_source(source), "k", descending=False)
    assert table["t"].combine_chunks().to_numpy_ndarray().tolist() == [[2, 3], [4, 5], [0, 1]]


def test_a_direction_for_each_column_is_required() -> None:
    with pytest.raises(ConfigError, match="2 values of descending"):
        sorted_table(number_plan(3), ["id"], [True, False])


@pytest.mark.parametrize(
    ("join_type", "how"),
    [
        ("inner", "inner"),
        ("left_outer", "left"),
        ("right_outer", "right"),
        ("full_outer", "outer"),
    ],
)
def test_a_join_is_that_of_pandas(join_type: str, how: Any) -> None:
    result = join(plan_of(LEFT), plan_of(RIGHT), join_type, ["k"], None, ("_l", "_r")).to_pandas()
    expected = LEFT.merge(RIGHT, on="k", how=how, suffixes=("_l", "_r"))
    columns = ["k", "j_l", "l", "j_r", "r"]
    by = ["k", "l", "r"]
    pd.testing.assert_frame_equal(
        result[columns].sort_values(by).reset_index(drop=True),
        expected[columns].sort_values(by).reset_index(drop=True),
        check_dtype=False,
    )


@pytest.mark.parametrize(
    ("join_type", "expected"),
    [
        ("left_semi", {"k": [2, 2, 4], "j": ["b", "c", "d"], "l": [0.2, 0.3, 0.4]}),
        ("left_anti", {"k": [1], "j": ["a"], "l": [0.1]}),
        ("right_anti", {"k": [7], "j": ["d"], "r": [40]}),
    ],
)
def test_semi_and_anti_joins_have_the_columns_of_one_side(
    join_type: str, expected: dict[str, Any]
) -> None:
    table = join(plan_of(LEFT), plan_of(RIGHT), join_type, ["k"], None, (None, None))
    assert table.to_pydict() == expected


def test_a_join_by_several_columns_of_other_names() -> None:
    right = RIGHT.rename(columns={"k": "k2", "j": "j2"})
    table = join(plan_of(LEFT), plan_of(right), "inner", ["k", "j"], ["k2", "j2"], (None, None))
    assert table.to_pydict() == {"k": [2, 2], "j": ["b", "b"], "l": [0.2, 0.2], "r": [10, 30]}


def test_equal_names_need_suffixes() -> None:
    with pytest.raises(ConfigError, match="both datasets have a column 'j'"):
        join(plan_of(LEFT), plan_of(RIGHT), "inner", ["k"], None, (None, None))


def test_an_unknown_type_of_join_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        join(plan_of(LEFT), plan_of(RIGHT), "cross", ["k"], None, (None, None))
    assert all(name in caught.value.do for name in JOIN_TYPES)


def test_aggregates_of_groups_are_those_of_pandas() -> None:
    frame = pd.DataFrame({"k": _RNG.integers(0, 4, 100), "x": _RNG.normal(size=100)})
    table = aggregated_table(plan_of(frame, 30, 70), ["k"], [Count(), Sum("x"), Mean("x")])
    grouped = frame.groupby("k")["x"]
    assert table.column_names == ["k", "count()", "sum(x)", "mean(x)"]
    assert table["count()"].to_pylist() == grouped.count().tolist()
    assert table["sum(x)"].to_pylist() == pytest.approx(grouped.sum().tolist())
    assert table["mean(x)"].to_pylist() == pytest.approx(grouped.mean().tolist())


def test_a_function_gets_each_group() -> None:
    result = mapped_groups(number_plan(4, 5), ["group"], lambda group: group.slice(0, 1))
    assert result["id"].to_pylist() == [0, 1, 2]


def test_an_empty_dataset_has_no_groups() -> None:
    table = aggregated_table(number_plan(0), ["group"], [Sum("id")])
    assert table.to_pydict() == {"group": [], "sum(id)": []}
