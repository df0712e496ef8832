"""Statistics of columns against those of pandas and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import (
    AbsMax,
    ApproximateQuantile,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    MissingValuePercentage,
    Quantile,
    Std,
    Sum,
    ZeroPercentage,
)
from tests.unit.data.fold_blocks import fold

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
    assert fold(aggregate, BLOCKS) == pytest.approx(expected, rel=1e-12)


def test_several_quantiles_are_exact() -> None:
    values = fold(ApproximateQuantile("x", [0.1, 0.5, 0.9]), BLOCKS)
    assert values == pytest.approx(FRAME["x"].quantile([0.1, 0.5, 0.9]).tolist(), rel=1e-12)


def test_the_deviation_of_large_values_is_exact() -> None:
    values = 1e9 + np.arange(10_000) % 2
    blocks = [pa.table({"x": part}) for part in np.array_split(values, 7)]
    assert fold(Std("x", ddof=0), blocks) == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("kind", [Sum, Min, Max, Mean, Std])
def test_a_null_that_is_not_ignored_makes_the_statistic_null(kind: Any) -> None:
    blocks = [pa.table({"x": [1.0, None]}), pa.table({"x": [2.0]})]
    assert fold(kind("x", ignore_nulls=False), blocks) is None
    assert fold(kind("x"), blocks) is not None


@pytest.mark.parametrize("kind", [Sum, Min, Max, Mean, Std])
def test_a_column_without_values_has_no_statistic(kind: Any) -> None:
    assert fold(kind("x"), [pa.table({"x": pa.nulls(3, pa.float64())})]) is None
    assert fold(kind("x"), []) is None


def test_a_statistic_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="not defined for a column of type") as caught:
        fold(Mean("s"), BLOCKS)
    assert "columns of numbers" in caught.value.do


def test_a_statistic_needs_a_column() -> None:
    with pytest.raises(ConfigError, match="needs a column"):
        Sum()


@pytest.mark.parametrize(
    ("values", "kind"), [([2**64 - 1, None, 1], "uint64"), ([2**63 - 1, 1], "int64")]
)
def test_sums_of_integers_do_not_wrap_around(values: list[Any], kind: str) -> None:
    blocks = [pa.table({"x": pa.array(values, kind)})] * 2
    total = 2 * sum(filter(None, values))
    assert fold(Sum("x"), blocks) == total
    count = 2 * sum(value is not None for value in values)
    assert fold(Mean("x"), blocks) == total / count
