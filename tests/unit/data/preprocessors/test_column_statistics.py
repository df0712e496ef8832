"""Statistics of columns: independent of how the rows are cut into blocks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors.column_statistics import (
    Bounds,
    BoundsStatistic,
    Moments,
    MomentsStatistic,
    QuantilesStatistic,
    Statistic,
    TokenCountsStatistic,
    ValueCountsStatistic,
    fold_states,
    observe_all,
)
from spotfit.data.preprocessors.vectorizers import Tokenization

floats = st.one_of(st.none(), st.just(math.nan), st.floats(min_value=-1e6, max_value=1e6, width=32))
cuts = st.lists(st.integers(min_value=0, max_value=60), max_size=6)


def blocks_of(values: list[Any], bounds: list[int], kind: pa.DataType) -> list[pa.Table]:
    """Return the column `x` in blocks that end at the bounds; some are empty."""
    whole = pa.table({"x": pa.array(values, kind)})
    ends = [0, *sorted(min(bound, len(values)) for bound in bounds), len(values)]
    return [whole.slice(a, b - a) for a, b in itertools.pairwise(ends)]


def fold(statistics: Sequence[Statistic], blocks: Iterable[pa.Table]) -> dict[Statistic, Any]:
    """Return the result of each statistic over all blocks."""
    return fold_states(statistics, (observe_all(statistics, block) for block in blocks))


def grouped(statistic: Statistic, blocks: list[pa.Table]) -> Any:
    """Return the result of a balanced tree of merges, instead of one after the other."""
    states = [statistic.observe(block) for block in blocks]
    while len(states) > 1:
        pairs = [states[i : i + 2] for i in range(0, len(states), 2)]
        states = [statistic.merge(*p) if len(p) == 2 else p[0] for p in pairs]
    return statistic.result(states[0])


@given(st.lists(floats, max_size=60), cuts)
def test_moments_equal_those_of_all_rows(values: list[float | None], bounds: list[int]) -> None:
    present = [v for v in values if v is not None and not math.isnan(v)]
    statistic = MomentsStatistic("x")
    blocks = blocks_of(values, bounds, pa.float64())
    for moments in (fold([statistic], blocks)[statistic], grouped(statistic, blocks)):
        if not present:
            assert moments == Moments(None, None)
        else:
            assert math.isclose(moments.mean, np.mean(present), rel_tol=1e-9, abs_tol=1e-6)
            assert math.isclose(moments.std, np.std(present), rel_tol=1e-9, abs_tol=1e-6)


def test_the_deviation_of_large_values_is_accurate() -> None:
    values = [1e9 + n for n in range(10)]
    statistic = MomentsStatistic("x")
    moments = fold([statistic], blocks_of(values, [3, 7], pa.float64()))[statistic]
    assert moments.std == pytest.approx(np.std(np.arange(10)), rel=1e-9)


@given(st.lists(floats, max_size=60), cuts)
def test_bounds_equal_those_of_all_rows(values: list[float | None], bounds: list[int]) -> None:
    present = [v for v in values if v is not None and not math.isnan(v)]
    statistic = BoundsStatistic("x")
    blocks = blocks_of(values, bounds, pa.float64())
    expected = Bounds(min(present), max(present)) if present else Bounds(None, None)
    assert fold([statistic], blocks)[statistic] == expected
    assert grouped(statistic, blocks) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(pa.int8(), int), (pa.uint64(), int), (pa.float32(), float), (pa.decimal128(5, 2), float)],
)
def test_bounds_have_the_type_of_the_column(kind: pa.DataType, expected: type) -> None:
    statistic = BoundsStatistic("x")
    bounds = fold([statistic], blocks_of([3, 1, 2], [1], kind))[statistic]
    assert (bounds, type(bounds.min)) == ((1, 3), expected)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), max_size=60), cuts)
def test_counts_and_their_order_equal_those_of_all_rows(
    values: list[str | None], bounds: list[int]
) -> None:
    statistic = ValueCountsStatistic("x")
    blocks = blocks_of(values, bounds, pa.string())
    expected = list(Counter(values).items())
    assert list(fold([statistic], blocks)[statistic].items()) == expected
    assert list(grouped(statistic, blocks).items()) == expected


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=3), max_size=30), cuts)
def test_lists_are_counted_as_a_whole_or_by_element(
    values: list[list[str]], bounds: list[int]
) -> None:
    whole, elements = ValueCountsStatistic("x", explode_lists=False), ValueCountsStatistic("x")
    results = fold([whole, elements], blocks_of(values, bounds, pa.list_(pa.string())))
    assert results[whole] == Counter(map(tuple, values))
    assert results[elements] == Counter(element for row in values for element in row)


def test_a_missing_list_has_no_elements() -> None:
    statistic = ValueCountsStatistic("x")
    blocks = blocks_of([["a"], None, ["a"]], [], pa.list_(pa.string()))
    assert fold([statistic], blocks)[statistic] == {"a": 2}


def test_nan_counts_as_missing() -> None:
    statistic = ValueCountsStatistic("x")
    blocks = blocks_of([math.nan, None, 1.0], [1], pa.float64())
    assert fold([statistic], blocks)[statistic] == {None: 2, 1.0: 1}


@given(st.lists(st.sampled_from(["a b", "", "b", None]), max_size=30), cuts)
def test_tokens_are_counted(values: list[str | None], bounds: list[int]) -> None:
    statistic = TokenCountsStatistic("x", Tokenization(None))
    found = fold([statistic], blocks_of(values, bounds, pa.string()))[statistic]
    expected = Counter(token for text in values if text is not None for token in text.split(" "))
    assert list(found.items()) == list(expected.items())


@given(st.lists(floats, max_size=60), cuts)
def test_quantiles_of_few_rows_are_exact(values: list[float | None], bounds: list[int]) -> None:
    present = sorted(v for v in values if v is not None and not math.isnan(v))
    statistic = QuantilesStatistic("x", 32)
    blocks = blocks_of(values, bounds, pa.float64())
    ranks = [0.0, 0.25, 0.5, 1.0]
    places = [min(int(rank * len(present)), len(present) - 1) for rank in ranks]
    expected = [present[place] for place in places] if present else None
    assert fold([statistic], blocks)[statistic].quantiles(ranks) == expected
    assert grouped(statistic, blocks).quantiles(ranks) == expected


def test_no_blocks_give_the_results_of_no_rows() -> None:
    statistics: list[Statistic] = [
        MomentsStatistic("x"),
        BoundsStatistic("x"),
        ValueCountsStatistic("x"),
    ]
    assert list(fold(statistics, []).values()) == [Moments(None, None), Bounds(None, None), {}]


@pytest.mark.parametrize("kind", [pa.string(), pa.date32(), pa.list_(pa.int64())])
def test_a_column_without_numbers_is_rejected(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="needs numbers"):
        MomentsStatistic("x").observe(pa.table({"x": pa.nulls(2, kind)}))


def test_a_column_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no column 'x'"):
        MomentsStatistic("x").observe(pa.table({"y": [1]}))


def test_structs_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="one value in each row"):
        ValueCountsStatistic("x").observe(pa.table({"x": [{"a": 1}]}))
