"""The error of the sketch stays below its bound, however the values are merged."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfit.data.preprocessors.quantile_sketch import QuantileSketch, sketch_of

RANKS = np.linspace(0.01, 0.99, 25)


def rank_error(sketch: QuantileSketch, values: np.ndarray) -> float:
    """Return the largest distance of a quantile's rank from the asked one, as a share of all."""
    ordered = np.sort(values)
    found = sketch.quantiles(list(RANKS))
    assert found is not None
    low = np.searchsorted(ordered, found, side="left") / len(values)
    high = np.searchsorted(ordered, found, side="right") / len(values)
    return float(np.max(np.maximum(np.maximum(low - RANKS, RANKS - high), 0)))


def bound(width: int, count: int) -> float:
    """Return the guaranteed error: one half of a pair per step, and the rounding of the rank."""
    levels = max(1, math.ceil(math.log2(max(count / width, 1))) + 1)
    return levels / (2 * width) + 1 / count


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 3_000), min_size=1, max_size=12),
    st.sampled_from([8, 32, 100]),
    st.booleans(),
)
def test_the_error_is_below_the_bound(
    seed: int, sizes: list[int], width: int, balanced: bool
) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.normal(loc=index, size=size) for index, size in enumerate(sizes)]
    values = np.concatenate(parts)
    sketches = [sketch_of(part, width) for part in parts]
    while balanced and len(sketches) > 1:
        pairs = [sketches[i : i + 2] for i in range(0, len(sketches), 2)]
        sketches = [functools.reduce(QuantileSketch.merge, pair) for pair in pairs]
    sketch = functools.reduce(QuantileSketch.merge, sketches)
    assert sketch.row_count == len(values)
    if len(values):
        assert rank_error(sketch, values) <= bound(width, len(values))


def test_memory_grows_with_the_logarithm_of_the_rows() -> None:
    rng = np.random.default_rng(7)
    sketch = sketch_of(rng.random(500_000), 100)
    assert sum(len(level) for level in sketch.levels) <= 2 * 100 * len(sketch.levels)
    assert len(sketch.levels) <= math.log2(500_000 / 100) + 2


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_values_have_no_bias(order: int) -> None:
    values = np.arange(100_000, dtype=np.float64)[::order]
    sketch = functools.reduce(
        QuantileSketch.merge, [sketch_of(part, 400) for part in np.split(values, 100)]
    )
    assert rank_error(sketch, values) < 0.002


def test_merging_in_the_same_order_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    parts = [sketch_of(rng.random(1_000), 16) for _ in range(9)]
    first, second = (functools.reduce(QuantileSketch.merge, parts) for _ in range(2))
    assert [level.tobytes() for level in first.levels] == [
        level.tobytes() for level in second.levels
    ]


def test_no_values_have_no_quantiles() -> None:
    assert QuantileSketch(8).quantiles([0.5]) is None
    assert sketch_of(np.empty(0), 8).merge(QuantileSketch(8)).quantiles([0.5]) is None
