"""Columns of several datasets side by side."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.operations.zipped_source import ZippedSource
from spotfit.data.plans.row_functions import MapRows
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.transforms import RenameColumns, SelectColumns
from spotfit.data.user_functions import user_function
from tests.unit.data.row_sources import column_of, number_plan


def zipped(*plans: RowPlan) -> RowPlan:
    return RowPlan.of_source(ZippedSource(plans))


def test_rows_of_different_units_are_aligned() -> None:
    left = number_plan(3, 4).with_transform(SelectColumns(("id",)))
    right = number_plan(1, 2, 4).with_transform(RenameColumns({"id": "other"}))
    plan = zipped(left, right)
    assert plan.manifest.unit_rows.tolist() == [3, 4]
    assert plan.schema.names == ["id", "other", "square", "group"]
    assert column_of(plan) == column_of(plan, "other") == list(range(7))


def test_repeated_names_get_a_number() -> None:
    plan = zipped(*(number_plan(3).with_transform(SelectColumns(("id",))) for _ in range(3)))
    assert plan.schema.names == ["id", "id_1", "id_2"]


def test_transforms_of_every_dataset_apply() -> None:
    double = MapRows(user_function("map", lambda row: {"double": row["id"] * 2}, {}))
    plan = zipped(number_plan(2, 2), number_plan(4).with_transform(double))
    assert column_of(plan, "double") == [0, 2, 4, 6]
    assert plan.runs_user_code


def test_datasets_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[3, 4\] rows"):
        column_of(zipped(number_plan(3), number_plan(4)))
