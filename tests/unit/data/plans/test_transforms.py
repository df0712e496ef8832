"""Transforms of columns, and which columns are read for them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.expressions import col
from spotfit.data.plans.row_functions import MapRows
from spotfit.data.plans.transforms import (
    DropColumns,
    RenameAllColumns,
    RenameColumns,
    RowCountChangedError,
    SelectColumns,
    WithColumns,
    bind_all,
    columns_to_read,
    set_column,
)
from spotfit.data.user_functions import user_function

BLOCK = pa.table({"a": [1, 2], "b": [3, 4], "c": ["x", "y"]})
IDENTITY = MapRows(user_function("map", lambda row: row, {}))


def test_select_keeps_the_columns_in_the_stated_order() -> None:
    assert SelectColumns(("c", "a")).bind()(BLOCK).column_names == ["c", "a"]


def test_drop_removes_a_column() -> None:
    assert DropColumns(("b",)).bind()(BLOCK).column_names == ["a", "c"]


def test_rename_replaces_the_name_where_the_column_is() -> None:
    assert RenameColumns({"b": "z"}).bind()(BLOCK).column_names == ["a", "z", "c"]


def test_rename_all_replaces_every_name() -> None:
    assert RenameAllColumns(("x", "y", "z")).bind()(BLOCK).column_names == ["x", "y", "z"]


def test_rename_all_requires_a_name_for_each_column() -> None:
    with pytest.raises(ConfigError, match="2 names for 3 columns"):
        RenameAllColumns(("x", "y")).bind()(BLOCK)


def test_expressions_see_the_columns_before_the_transform() -> None:
    transform = WithColumns({"a": col("a") + 1, "d": col("a") * 10})
    assert transform.bind()(BLOCK).select(["a", "d"]).to_pydict() == {"a": [2, 3], "d": [10, 20]}


def test_a_replaced_column_stays_where_it_is() -> None:
    assert set_column(BLOCK, "a", pa.array([7, 8])).column_names == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("transforms", "columns", "expected"),
    [
        ([], None, None),
        ([], ["b"], ["b"]),
        ([SelectColumns(("c", "a"))], None, ["a", "c"]),
        ([DropColumns(("b",))], None, ["a", "c"]),
        ([RenameColumns({"a": "z"}), DropColumns(("b",))], ["z"], ["a"]),
        ([RenameColumns({"a": "z"}), SelectColumns(("z",))], None, ["a"]),
        ([WithColumns({"d": col("b") + 1}), SelectColumns(("d",))], None, ["b"]),
        ([WithColumns({"d": col("b") + 1})], ["d"], ["b"]),
        ([WithColumns({"d": col("b") + 1}), DropColumns(("d",))], None, None),
        ([SelectColumns(("a",)), IDENTITY], ["x"], ["a"]),
        ([IDENTITY, SelectColumns(("a",))], ["a"], None),
    ],
)
def test_only_needed_columns_are_read(
    transforms: list[Any], columns: list[str] | None, expected: list[str] | None
) -> None:
    assert columns_to_read(transforms, ["a", "b", "c"], columns) == expected


def test_a_block_is_read_with_one_column_if_no_column_is_needed() -> None:
    assert columns_to_read([DropColumns(("a", "b"))], ["a", "b"]) == ["a"]


@pytest.mark.parametrize(
    "transform",
    [
        SelectColumns(("aa",)),
        DropColumns(("aa",)),
        RenameColumns({"aa": "b"}),
        WithColumns({"d": col("aa")}),
    ],
)
def test_an_unknown_column_is_reported_with_the_nearest_name(transform: Any) -> None:
    with pytest.raises(ConfigError, match="no column 'aa'") as caught:
        columns_to_read([transform], ["a", "b"])
    assert "Did you mean 'a'" in caught.value.do


def test_two_columns_cannot_get_one_name() -> None:
    with pytest.raises(ConfigError, match="one name"):
        columns_to_read([RenameColumns({"a": "b"})], ["a", "b"])


def test_a_changed_number_of_rows_names_the_function_and_the_ways_out() -> None:
    class Shortening:
        name = "map_batches(shorten)"

        def bind(self) -> Any:
            return lambda block: block.slice(1)

    with pytest.raises(RowCountChangedError, match=r"map_batches\(shorten\) returned 1") as caught:
        bind_all([Shortening()])(BLOCK)  # type: ignore[list-item]
    assert "filter()" in caught.value.do
