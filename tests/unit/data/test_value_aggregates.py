"""Aggregates of distinct values."""

from __future__ import annotations

import math

import pyarrow as pa

from spotfit.data.value_aggregates import ApproximateTopK, AsList, Unique, ValueCounter
from tests.unit.data.fold_blocks import fold

WORDS = [pa.table({"w": ["b", "a", None]}), pa.table({"w": ["a", "c", "a"]})]
LISTS = [pa.table({"w": [[1, 2], [2]]}), pa.table({"w": [None, [1, 2]]})]


def test_distinct_values_are_in_order_of_first_occurrence() -> None:
    blocks = [pa.table({"x": [3, 1]}), pa.table({"x": [2, 1, None, 3]})]
    assert fold(Unique("x"), blocks) == [3, 1, 2]
    assert fold(Unique("x", ignore_nulls=False), blocks) == [3, 1, 2, None]


def test_nan_is_one_value() -> None:
    blocks = [pa.table({"x": [math.nan, 1.0]}), pa.table({"x": [math.nan]})]
    assert len(fold(Unique("x"), blocks)) == 2


def test_lists_are_values_or_are_flattened() -> None:
    blocks = [pa.table({"x": [[1, 2], [1, 2], [2, 3]]})]
    assert fold(Unique("x"), blocks) == [[1, 2], [2, 3]]
    assert fold(Unique("x", encode_lists=True), blocks) == [1, 2, 3]


def test_a_list_has_all_values_in_order() -> None:
    blocks = [pa.table({"x": [3, None]}), pa.table({"x": [1]})]
    assert fold(AsList("x"), blocks) == [3, None, 1]
    assert fold(AsList("x", ignore_nulls=True), blocks) == [3, 1]


def test_values_are_counted() -> None:
    assert fold(ValueCounter("w"), WORDS) == {"values": ["b", "a", "c"], "counts": [1, 3, 1]}
    assert fold(ValueCounter("w"), LISTS) == {"values": [[1, 2], [2]], "counts": [2, 1]}
    assert fold(ValueCounter("w"), []) == {"values": [], "counts": []}


def test_the_most_frequent_values_are_exact() -> None:
    assert fold(ApproximateTopK("w", 2), WORDS) == [{"w": "a", "count": 3}, {"w": "b", "count": 1}]
    assert fold(ApproximateTopK("w", 1, encode_lists=True), LISTS) == [{"w": 2, "count": 3}]
