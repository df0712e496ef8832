"""Rows of several datasets by weights."""

from __future__ import annotations

import pickle
from collections import Counter

import cloudpickle
import pytest

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.operations.mixed_source import MixStoppingCondition, mixed_source
from spotfit.data.plans.row_functions import MapRows
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.transforms import SelectColumns
from spotfit.data.user_functions import user_function
from tests.unit.data.row_sources import column_of, number_plan

DROP = MixStoppingCondition.STOP_ON_LONGEST_DROP
SHORTEST = MixStoppingCondition.STOP_ON_SHORTEST


def labelled(label: int, *unit_rows: int) -> RowPlan:
    function = user_function("map", lambda row: {"id": row["id"], "label": label}, {})
    return number_plan(*unit_rows).with_transform(MapRows(function))


def mixed(
    plans: list[RowPlan], weights: list[float] | None, condition: MixStoppingCondition
) -> RowPlan:
    return RowPlan.of_source(mixed_source(plans, weights, condition))


def test_rows_alternate_by_default() -> None:
    plan = mixed([labelled(0, 3), labelled(1, 3)], None, DROP)
    assert column_of(plan, "label") == [0, 1, 0, 1, 0, 1]
    assert column_of(plan) == [0, 0, 1, 1, 2, 2]


def test_each_dataset_has_its_own_captured_values() -> None:
    def offset(offsets: list[complex]) -> RowPlan:
        function = user_function("map", lambda row: {"id": row["id"] + offsets[0].real}, {})
        return number_plan(2).with_transform(MapRows(function))

    assert column_of(mixed([offset([0j]), offset([10 + 0j])], None, DROP)) == [0, 10, 1, 11]


def test_every_stretch_has_the_weights() -> None:
    plan = mixed([labelled(0, 40, 50), labelled(1, 30)], [3, 1], DROP)
    labels = column_of(plan, "label")
    assert len(labels) == 120
    assert all(Counter(labels[n : n + 4]) == {0: 3, 1: 1} for n in range(0, 120, 4))


def test_the_longest_dataset_continues_alone() -> None:
    plan = mixed([labelled(0, 4), labelled(1, 10, 10)], None, DROP)
    assert column_of(plan, "label") == [0, 1] * 4 + [1] * 16
    assert [n for n, x in zip(column_of(plan), column_of(plan, "label"), strict=True) if x] == [
        *range(20)
    ]


def test_the_shortest_dataset_may_end_the_mix() -> None:
    plan = mixed([labelled(0, 4), labelled(1, 10, 10)], [1, 2], SHORTEST)
    assert Counter(column_of(plan, "label")) == {0: 4, 1: 8}


@pytest.mark.parametrize("weights", [[0.7, 0.1, 0.2], [1, 1, 1], [5, 0.01, 3]])
def test_every_row_occurs_once_in_its_order(weights: list[float]) -> None:
    plans = [labelled(0, 17, 5), labelled(1, 1, 2, 3, 4), labelled(2, 90)]
    plan = mixed(plans, weights, DROP)
    rows = list(zip(column_of(plan, "label"), column_of(plan), strict=True))
    for label, count in enumerate((22, 10, 90)):
        assert [row for of, row in rows if of == label] == list(range(count))
    assert plan.manifest.row_count == 122


def test_columns_that_a_dataset_lacks_are_null() -> None:
    part = number_plan(2).with_transform(SelectColumns(("id",)))
    plan = mixed([part, number_plan(2)], None, DROP)
    assert column_of(plan, "square") == [None, 0, None, 1]


def test_a_pickle_reads_the_same_rows() -> None:
    plan = mixed([labelled(0, 5), labelled(1, 3, 4)], [2, 1], DROP)
    assert column_of(pickle.loads(cloudpickle.dumps(plan))) == column_of(plan)


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1]])
def test_a_positive_weight_for_each_dataset_is_required(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        mixed([number_plan(1), number_plan(1)], weights, DROP)


def test_datasets_are_mixed() -> None:
    first, second = spotfit.data.range(6), spotfit.data.range(3)
    rows = first.mix(second, weights=[2, 1], stopping_condition=DROP).take_all()
    assert Counter(row["id"] for row in rows) == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
