"""Parts of a dataset."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.operations.splits import (
    even_bounds,
    hashed_plans,
    index_bounds,
    part_plans,
    proportion_bounds,
    sample_filter,
    sampled_plan,
    stratified_plans,
    train_test_bounds,
)
from spotfit.data.plans.row_plan import RowPlan, ShuffleSettings
from tests.unit.data.row_sources import column_of, number_plan, number_source


@pytest.mark.parametrize(
    ("bounds", "count", "expected"),
    [
        (even_bounds(3, equal=False), 10, [0, 3, 6, 10]),
        (even_bounds(3, equal=True), 10, [0, 3, 6, 9]),
        (even_bounds(3, equal=False), 2, [0, 0, 1, 2]),
        (index_bounds([2, 5]), 10, [0, 2, 5, 10]),
        (index_bounds([2, 50]), 10, [0, 2, 10, 10]),
        (proportion_bounds([0.2, 0.5]), 10, [0, 2, 7, 10]),
        (proportion_bounds([0.01, 0.01]), 10, [0, 1, 2, 10]),
        (train_test_bounds(0.25), 8, [0, 6, 8]),
        (train_test_bounds(3), 8, [0, 5, 8]),
    ],
)
def test_bounds_are_those_of_ray(bounds: Any, count: int, expected: list[int]) -> None:
    assert list(bounds(count)) == expected


@pytest.mark.parametrize(
    "create",
    [
        lambda: even_bounds(0, equal=False),
        lambda: index_bounds([]),
        lambda: index_bounds([3, 2]),
        lambda: index_bounds([-1]),
        lambda: proportion_bounds([]),
        lambda: proportion_bounds([0.5, 0.5]),
        lambda: proportion_bounds([0.0]),
        lambda: train_test_bounds(1.0),
        lambda: train_test_bounds(0),
        lambda: train_test_bounds(20)(8),
        lambda: proportion_bounds([0.5])(1),
        lambda: sample_filter(1.5, None),
    ],
)
def test_invalid_parts_are_refused(create: Any) -> None:
    with pytest.raises(ConfigError):
        create()


@pytest.mark.parametrize("test_size", ["0.5", None, True])
def test_the_size_of_a_test_part_is_a_number(test_size: Any) -> None:
    with pytest.raises(ConfigTypeError):
        train_test_bounds(test_size)


def test_a_split_lists_and_reads_nothing() -> None:
    source = number_source(4, 4)
    plan = RowPlan.of_source(source)
    parts = part_plans(plan, ShuffleSettings(), even_bounds(2, equal=False), 2)
    assert "manifest" not in vars(plan.rows)
    assert [column_of(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_parts_of_shuffled_rows_are_random_and_disjoint() -> None:
    shuffle = ShuffleSettings("rows", 2)
    train, test = part_plans(number_plan(*[10] * 10), shuffle, train_test_bounds(0.2), 2)
    rows = column_of(train), column_of(test)
    assert [len(part) for part in rows] == [80, 20]
    assert sorted(rows[0] + rows[1]) == list(range(100))
    assert rows[1] != list(range(80, 100))


def test_a_stratified_split_has_the_proportions_of_the_classes() -> None:
    train, test = stratified_plans(number_plan(*[15] * 4), "group", 0.2)
    assert Counter(column_of(test, "group")) == {0: 4, 1: 4, 2: 4}
    assert sorted(column_of(train) + column_of(test)) == list(range(60))


def test_a_stratified_split_accepts_a_number_of_rows() -> None:
    _, test = stratified_plans(number_plan(*[15] * 4), "group", 15)
    assert Counter(column_of(test, "group")) == {0: 5, 1: 5, 2: 5}


def test_a_streaming_split_has_every_row_once() -> None:
    train, test = hashed_plans(number_plan(*[50] * 10), 0.3, column=None, seed=1)
    assert sorted(column_of(train) + column_of(test)) == list(range(500))
    assert 100 < len(column_of(test)) < 200


def test_a_streaming_split_by_key_keeps_keys_together() -> None:
    train, test = hashed_plans(number_plan(*[50] * 4), 0.5, column="group", seed=None)
    groups = set(column_of(train, "group")), set(column_of(test, "group"))
    assert groups[0] | groups[1] == {0, 1, 2}
    assert not groups[0] & groups[1]


def test_a_sample_is_that_of_its_seed() -> None:
    plan = number_plan(*[50] * 4)
    samples = [column_of(sampled_plan(plan, sample_filter(0.5, seed))) for seed in (1, 1, 2)]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]
    assert 60 < len(samples[0]) < 140
