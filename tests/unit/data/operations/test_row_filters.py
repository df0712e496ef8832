"""Decisions which rows stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.expressions import col
from spotfit.data.operations.row_filters import (
    HashFilter,
    KeyFilter,
    count_end,
    row_filter,
    row_hashes,
    rows_by_class,
    share_end,
)

BLOCK = pa.table({"x": [1, 2, 3, None], "s": ["a", "b", "a", "c"]})


def mask_of(function: Any = None, expr: Any = None) -> list[bool]:
    mask: list[bool] = row_filter(function, expr, {}).bind()(BLOCK, 0).tolist()
    return mask


@pytest.mark.parametrize(
    ("function", "expr"),
    [
        (None, "x > 1"),
        (None, col("x") > 1),
        (col("x") > 1, None),
        (None, pc.field("x") > 1),
        (lambda row: row["x"] is not None and row["x"] > 1, None),
    ],
)
def test_rows_stay_for_which_the_condition_is_true(function: Any, expr: Any) -> None:
    assert mask_of(function, expr) == [False, True, True, False]


def test_an_expression_reads_its_columns_only() -> None:
    assert row_filter(None, "x > 1 and s == 'a'", {}).columns == ["s", "x"]
    assert row_filter(lambda row: True, None, {}).columns is None


def test_either_a_function_or_an_expression_is_required() -> None:
    with pytest.raises(ConfigError, match="either"):
        row_filter(None, None, {})
    with pytest.raises(ConfigError, match="either"):
        row_filter(len, "x > 1", {})


def test_an_expression_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match="not an expression"):
        row_filter(None, 5, {})


def test_an_expression_must_be_a_truth_value() -> None:
    with pytest.raises(ConfigError, match="not a truth value"):
        mask_of(expr="x + 1")


@pytest.mark.parametrize("count", [0, 1, 17, 999, 1000, 5000])
def test_exactly_the_stated_number_of_rows_has_a_hash_below_the_end(count: int) -> None:
    end = count_end(5, 1000, count)
    selected = HashFilter(5, 0, end).bind()(pa.table({"x": np.arange(1000)}), 0)
    assert selected.sum() == min(count, 1000)


def test_the_end_is_that_of_the_sorted_hashes_beyond_one_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spotfit.data.operations.row_filters._CHUNK_ROWS", 100)
    hashes = np.sort(row_hashes(2, 0, 1234))
    assert count_end(2, 1234, 700) == int(hashes[700])


def test_a_fraction_selects_about_that_share_of_the_rows() -> None:
    selected = HashFilter(1, 0, share_end(0.3)).bind()(pa.table({"x": np.arange(20_000)}), 0)
    assert abs(selected.mean() - 0.3) < 0.01


def test_ranges_of_hashes_that_meet_select_every_row_once() -> None:
    block, middle = pa.table({"x": np.arange(1000)}), share_end(0.4)
    low = HashFilter(1, 0, middle).bind()(block, 0)
    high = HashFilter(1, middle, share_end(1)).bind()(block, 0)
    assert (low != high).all()


def test_a_hash_depends_on_the_number_of_the_row_in_the_dataset() -> None:
    whole = row_hashes(4, 0, 100)
    assert (row_hashes(4, 60, 40) == whole[60:]).all()
    assert (row_hashes(5, 0, 100) != whole).all()


def test_equal_keys_stay_together() -> None:
    block = pa.table({"key": [n % 50 for n in range(1000)]})
    selected = KeyFilter("key", share_end(0.5)).bind()(block, 0)
    by_key = selected.reshape(20, 50)
    assert (by_key == by_key[0]).all()
    assert 10 < by_key[0].sum() < 40
    others = KeyFilter("key", share_end(0.5), is_complement=True).bind()(block, 0)
    assert (others != selected).all()


def test_null_is_a_class_of_its_own() -> None:
    column = pa.chunked_array([["a", None], ["a", "b", None]])
    classes = {value: rows.tolist() for value, rows in rows_by_class(column)}
    assert classes == {"a": [0, 2], "b": [3], None: [1, 4]}
