"""Statistics of pairs, against known values."""

import random
from statistics import median_low

import pytest

from benchmarks.ratios import (
    compare_costs,
    lower_bound,
    median_at_most,
    order,
    times_better,
    verdict,
)


def test_of_seven_pairs_the_second_worst_bounds_the_median() -> None:
    assert verdict([9.0, 3.0, 5.0, 4.0, 8.0, 6.0, 7.0]).lower == 4.0
    assert verdict([9.0, 3.0, 5.0, 4.0, 8.0, 6.0, 7.0]).median == 6.0


def test_one_pair_claims_only_itself() -> None:
    only = verdict([2.5])
    assert (only.median, only.lower, only.pairs) == (2.5, 2.5, 1)


@pytest.mark.parametrize("of", [1, 2, 3, 6, 7, 20, 51])
def test_every_resample_is_at_most_the_largest(of: int) -> None:
    assert median_at_most(of, of=of) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [5, 6, 7, 12])
def test_exact_bound_matches_sampling(size: int, rng: random.Random) -> None:
    sample = [rng.uniform(1.0, 10.0) for _ in range(size)]
    medians = sorted(median_low(rng.choices(sample, k=size)) for _ in range(20_000))
    # Sampling and the exact bound agree except at a step of the distribution.
    assert medians[int(0.02 * 20_000)] <= lower_bound(sample) <= medians[int(0.03 * 20_000)]


def test_bound_below_the_target_does_not_clear_it() -> None:
    found = verdict([12.0, 11.0, 9.0, 12.0, 11.0, 9.5, 12.0])
    assert found.median > 10.0
    assert not found.clears(10.0)
    assert found.clears(9.5)


def test_less_is_better_for_costs() -> None:
    found = compare_costs([(1.0, 3.0), (2.0, 4.0), (4.0, 8.0)])
    assert found == {"spotfit": 2.0, "peer": 4.0, "ratio": 2.0, "lower": 2.0}


def test_sides_alternate_in_running_first() -> None:
    assert order(5) == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("ours", "theirs", "more_is_better", "better"),
    [(0.5, 5.0, False, 10.0), (98.0, 100.0, True, 0.98)],
)
def test_better_is_above_one_whichever_way_the_figure_counts(
    ours: float, theirs: float, more_is_better: bool, better: float
) -> None:
    assert times_better(ours, theirs, more_is_better=more_is_better) == pytest.approx(better)
