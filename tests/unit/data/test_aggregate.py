"""Statistics of columns against those of pandas and NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import (
    AbsMax,
    AggregateFn,
    AggregateFnV2,
    AsList,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    MissingValuePercentage,
    Quantile,
    Std,
    Sum,
    Unique,
    ZeroPercentage,
    fold_all,
)

_RNG = np.random.default_rng(5)
FRAME = pd.DataFrame(
    {"x": _RNG.normal(1e6, 3.0, 1000), "n": _RNG.integers(-5, 5, 1000), "s": list("abcde") * 200}
)
FRAME.loc[::7, "x"] = None
BLOCKS = [
    pa.Table.from_pandas(FRAME.iloc[begin:end], preserve_index=False)
    for begin, end in ((0, 1), (1, 300), (300, 300), (300, 301), (301, 1000))
]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (Sum("x"), FRAME["x"].sum()),
        (Sum("n"), FRAME["n"].sum()),
        (Min("x"), FRAME["x"].min()),
        (Max("n"), FRAME["n"].max()),
        (AbsMax("n"), FRAME["n"].abs().max()),
        (Mean("x"), FRAME["x"].mean()),
        (Std("x"), FRAME["x"].std()),
        (Std("x", ddof=0), FRAME["x"].std(ddof=0)),
        (Quantile("x", q=0.25), FRAME["x"].quantile(0.25)),
        (Count(), 1000),
        (Count("x"), 1000),
        (Count("x", ignore_nulls=True), FRAME["x"].count()),
        (CountDistinct("s"), 5),
        (MissingValuePercentage("x"), 100 * FRAME["x"].isna().mean()),
        (ZeroPercentage("n"), 100 * (FRAME["n"] == 0).mean()),
    ],
)
def test_a_statistic_is_that_of_pandas(aggregate: Any, expected: float) -> None:
    assert aggregate.fold(BLOCKS) == pytest.approx(expected, rel=1e-12)


def test_the_deviation_of_large_values_is_exact() -> None:
    values = 1e9 + np.arange(10_000) % 2
    blocks = [pa.table({"x": part}) for part in np.array_split(values, 7)]
    assert Std("x", ddof=0).fold(blocks) == pytest.approx(0.5, rel=1e-9)


def test_distinct_values_are_in_order_of_first_occurrence() -> None:
    blocks = [pa.table({"x": [3, 1]}), pa.table({"x": [2, 1, None, 3]})]
    assert Unique("x").fold(blocks) == [3, 1, 2]
    assert Unique("x", ignore_nulls=False).fold(blocks) == [3, 1, 2, None]


def test_nan_is_one_value() -> None:
    blocks = [pa.table({"x": [math.nan, 1.0]}), pa.table({"x": [math.nan]})]
    assert len(Unique("x").fold(blocks)) == 2


def test_lists_are_values_or_are_flattened() -> None:
    blocks = [pa.table({"x": [[1, 2], [1, 2], [2, 3]]})]
    assert Unique("x").fold(blocks) == [[1, 2], [2, 3]]
    assert Unique("x", encode_lists=True).fold(blocks) == [1, 2, 3]


def test_a_list_has_all_values_in_order() -> None:
    blocks = [pa.table({"x": [3, None]}), pa.table({"x": [1]})]
    assert AsList("x").fold(blocks) == [3, None, 1]
    assert AsList("x", ignore_nulls=True).fold(blocks) == [3, 1]


@pytest.mark.parametrize("kind", [Sum, Min, Max, Mean, Std])
def test_a_null_that_is_not_ignored_makes_the_statistic_null(kind: Any) -> None:
    blocks = [pa.table({"x": [1.0, None]}), pa.table({"x": [2.0]})]
    assert kind("x", ignore_nulls=False).fold(blocks) is None
    assert kind("x").fold(blocks) is not None


@pytest.mark.parametrize("kind", [Sum, Min, Max, Mean, Std])
def test_a_column_without_values_has_no_statistic(kind: Any) -> None:
    assert kind("x").fold([pa.table({"x": pa.nulls(3, pa.float64())})]) is None
    assert kind("x").fold([]) is None


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
    assert fold_all([total], lambda _: BLOCKS) == {"total": -int(FRAME["n"].sum())}


def test_a_statistic_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="not defined for a column of type") as caught:
        Mean("s").fold(BLOCKS)
    assert "columns of numbers" in caught.value.do


def test_a_statistic_needs_a_column() -> None:
    with pytest.raises(ConfigError, match="needs a column"):
        Sum()
