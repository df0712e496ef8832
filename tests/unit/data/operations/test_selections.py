"""Sources of rows that are left out or multiplied."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import cloudpickle
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.operations.row_filters import HashFilter, StratifiedFilter, row_filter, share_end
from spotfit.data.operations.selections import (
    FilteredSource,
    FlatMapSource,
    select_places,
    stratified_ends,
)
from spotfit.data.plans.row_functions import MapRows
from spotfit.data.plans.row_plan import RowPlan, Rows, ShuffleSettings
from spotfit.data.user_functions import user_function
from tests.unit.data.row_sources import column_of, number_plan, number_source


def filtered(plan: RowPlan, function: Any = None, expr: Any = None) -> RowPlan:
    return RowPlan.of_source(FilteredSource(plan, row_filter(function, expr, {})))


def test_units_have_the_rows_that_stay() -> None:
    plan = filtered(number_plan(3, 2, 4), expr="id >= 3")
    assert plan.manifest.unit_rows.tolist() == [0, 2, 4]
    assert column_of(plan) == [3, 4, 5, 6, 7, 8]


def test_counting_reads_the_columns_of_the_expression_only() -> None:
    source = number_source(3, 2)
    plan = filtered(RowPlan.of_source(source), expr="group == 1")
    assert plan.manifest.row_count == 2
    assert source.reads == [(0, ("group",)), (1, ("group",))]


def test_reading_adds_the_columns_of_the_expression() -> None:
    source = number_source(3)
    plan = filtered(RowPlan.of_source(source), expr="group == 1")
    assert column_of(plan, "square") == [1]
    assert source.reads[-1] == (0, ("square", "group"))


def test_a_filter_sees_the_rows_after_the_transforms() -> None:
    doubled = MapRows(user_function("map", lambda row: {"id": row["id"] * 2}, {}))
    plan = filtered(number_plan(3, 3).with_transform(doubled), expr="id > 5")
    assert column_of(plan) == [6, 8, 10]


def test_filters_of_filters_combine() -> None:
    plan = filtered(filtered(number_plan(5, 5), expr="id > 1"), lambda row: row["id"] % 2 == 0)
    assert column_of(plan) == [2, 4, 6, 8]


def test_a_function_that_changes_its_answers_is_reported() -> None:
    calls = []

    def unstable(row: dict[str, Any]) -> bool:
        calls.append(row)
        return len(calls) > 3

    plan = filtered(number_plan(4), unstable)
    assert plan.manifest.row_count == 1
    with pytest.raises(ConfigError, match=r"filter\(unstable\) returned 4 rows"):
        column_of(plan)


def test_a_pickle_has_the_counts_and_reads_the_same_rows() -> None:
    source = number_source(3, 2)
    plan = filtered(RowPlan.of_source(source), lambda row: row["id"] != 1)
    assert plan.manifest.row_count == 4
    copy = pickle.loads(cloudpickle.dumps(plan))
    copied = copy.manifest.sources[0].plan.manifest.sources[0]
    before = len(copied.reads)
    assert copy.manifest.row_count == 4
    assert len(copied.reads) == before
    assert column_of(copy) == [0, 2, 3, 4]


def test_the_identity_depends_on_rows_and_condition() -> None:
    plans = [
        filtered(number_plan(5), expr="id > 1"),
        filtered(number_plan(5), expr="id > 2"),
        filtered(number_plan(6), expr="id > 1"),
        filtered(number_plan(5), lambda row: row["id"] > 1),
    ]
    assert len({plan.digest for plan in plans}) == 4


def test_flat_map_returns_all_rows_of_each_result() -> None:
    function = user_function("flat_map", lambda row: [{"n": row["id"]}] * row["id"], {})
    plan = RowPlan.of_source(FlatMapSource(number_plan(2, 3), function))
    assert plan.manifest.unit_rows.tolist() == [1, 9]
    assert column_of(plan, "n") == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert plan.schema.names == ["n"]
    assert plan.runs_user_code


CALLS: list[int] = []


def doubled(row: dict[str, Any]) -> list[dict[str, Any]]:
    # Pickled by name, so that its copies count here.
    CALLS.append(row["id"])
    return [{"n": row["id"]}] * 2


def test_a_worker_knows_the_columns_without_calling_the_function() -> None:
    function = user_function("flat_map", doubled, {})
    body = cloudpickle.dumps(RowPlan.of_source(FlatMapSource(number_plan(2), function)))
    CALLS.clear()
    copy = pickle.loads(body)
    assert copy.manifest.schema.names == ["n"]
    assert CALLS == []
    assert column_of(copy, "n") == [0, 0, 1, 1]
    assert CALLS == [0, 1]


def test_flat_map_accepts_a_single_row_and_a_generator() -> None:
    single = user_function("flat_map", lambda row: row, {})
    assert column_of(RowPlan.of_source(FlatMapSource(number_plan(3), single))) == [0, 1, 2]
    several = user_function("flat_map", lambda row: (row for _ in range(2)), {})
    assert column_of(RowPlan.of_source(FlatMapSource(number_plan(2), several))) == [0, 0, 1, 1]


def test_flat_map_may_return_no_row_at_all() -> None:
    function = user_function("flat_map", lambda row: [], {})
    plan = RowPlan.of_source(FlatMapSource(number_plan(3), function))
    assert plan.manifest.row_count == 0
    assert plan.schema.names == []


def test_a_sample_is_chosen_without_reading_rows() -> None:
    source = number_source(50, 50)
    sample = HashFilter(1, 0, share_end(0.2))
    plan = RowPlan.of_source(FilteredSource(RowPlan.of_source(source), sample))
    assert 5 < plan.manifest.row_count < 40
    assert source.reads == []


def places(plan: RowPlan, shuffle: ShuffleSettings, begin: int, end: int) -> list[int]:
    return column_of(RowPlan(Rows(lambda: select_places(plan, shuffle, begin, end))))


def test_places_of_unshuffled_rows_are_a_slice() -> None:
    assert places(number_plan(3, 4), ShuffleSettings(), 2, 5) == [2, 3, 4]


@pytest.mark.parametrize("kind", ["units", "rows"])
def test_places_of_shuffled_rows_are_disjoint_samples(kind: Any) -> None:
    shuffle = ShuffleSettings(kind, 7)
    parts = [places(number_plan(*[5] * 20), shuffle, *part) for part in ((0, 30), (30, 100))]
    assert [len(part) for part in parts] == [30, 70]
    assert sorted(parts[0] + parts[1]) == list(range(100))
    assert max(parts[0]) > 60


def test_a_stratified_share_has_its_part_of_each_class() -> None:
    plan = number_plan(*[10] * 9)
    ends = stratified_ends(plan, "group", 0.2)
    assert sorted(ends) == [0, 1, 2]
    test = RowPlan.of_source(FilteredSource(plan, StratifiedFilter("group", ends)))
    train = RowPlan.of_source(
        FilteredSource(plan, StratifiedFilter("group", ends, is_complement=True))
    )
    assert Counter(column_of(test, "group")) == {0: 6, 1: 6, 2: 6}
    assert sorted(column_of(test) + column_of(train)) == list(range(90))
