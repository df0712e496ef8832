"""Partial results of blocks, merged in order."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import Count, Min, Sum
from spotfit.data.aggregate_base import AggregateFn, AggregateFnV2, columns_of, fold_all

BLOCKS = [pa.table({"n": [1, 2]}), pa.table({"n": [5]})]


def test_one_pass_computes_several_statistics_and_reads_their_columns() -> None:
    requested: list[Any] = []

    def blocks(columns: list[str] | None) -> list[pa.Table]:
        requested.append(columns)
        return BLOCKS

    values = fold_all([Sum("n"), Min("n"), Count()], blocks)
    assert list(values) == ["sum(n)", "min(n)", "count()"]
    assert requested == [["n"]]


def test_a_class_of_the_user_is_merged_in_order() -> None:
    class Joined(AggregateFnV2):
        def __init__(self) -> None:
            super().__init__("joined", lambda: "", on="s")

        def aggregate_block(self, block: pa.Table) -> str:
            return "".join(block["s"].to_pylist())

        def combine(self, current_accumulator: str, new: str) -> str:
            return current_accumulator + new

        def finalize(self, accumulator: str) -> str:
            return accumulator.upper()

    values = fold_all([Joined()], lambda _: [pa.table({"s": ["a", "b"]}), pa.table({"s": ["c"]})])
    assert values == {"joined": "ABC"}


@pytest.mark.parametrize("by_row", [True, False])
def test_functions_of_the_user_are_an_aggregate(by_row: bool) -> None:
    rows = {"accumulate_row": lambda total, row: total + row["n"]}
    blocks = {"accumulate_block": lambda total, block: total + sum(block["n"].to_pylist())}
    total: Any = AggregateFn(
        init=lambda _key: 0,
        merge=lambda a, b: a + b,
        name="total",
        finalize=lambda value: -value,
        **(rows if by_row else blocks),
    )
    assert fold_all([total], lambda _: BLOCKS) == {"total": -8}


def test_an_aggregate_of_functions_needs_one_of_them() -> None:
    with pytest.raises(ConfigError, match="either accumulate_row or accumulate_block"):
        AggregateFn(init=lambda _key: 0, merge=max, name="none")


def test_only_columns_of_the_aggregates_are_read() -> None:
    assert columns_of([Sum("n"), Min("n"), Count()]) == ["n"]
    assert columns_of([Count()]) is None
    assert columns_of([Sum("n"), AggregateFn(lambda _: 0, max, "f", lambda a, _: a)]) is None
