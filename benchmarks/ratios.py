"""Statistics of pairs of runs: the median of their ratios and its lower bound.

A ratio says how many times better spotfit is than the peer in one pair. The bound is the lower end
of the 95 % bootstrap interval of the median, computed exactly instead of by sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median, median_low

TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ratio of a set of pairs: its median, and the lower end of the 95 % interval."""

    median: float
    lower: float
    pairs: int

    def clears(self, bar: float) -> bool:
        return self.lower >= bar


def verdict(ratios: Sequence[float]) -> Verdict:
    """Return the statistics of at least one ratio."""
    return Verdict(median=median(ratios), lower=lower_bound(ratios), pairs=len(ratios))


def lower_bound(sample: Sequence[float]) -> float:
    """Return the smallest value that a resampled median does not exceed with probability ≥ 2.5 %.

    With an even number of values the lower median is used, which is conservative.
    """
    ordered = sorted(sample)
    for place, value in enumerate(ordered, start=1):
        if median_at_most(place, of=len(ordered)) >= TAIL:
            return value
    return median_low(ordered)


def median_at_most(place: int, *, of: int) -> float:
    """Return the probability that the median of a resample is at most the value of this rank.

    The low median is that small if at least half of the draws are: a binomial tail. Ranks start
    at 1.
    """
    hit = place / of
    needed = (of + 1) // 2
    return sum(
        comb(of, hits) * hit**hits * (1 - hit) ** (of - hits) for hits in range(needed, of + 1)
    )


def order(pairs: int) -> list[bool]:
    """Return for each pair whether spotfit runs first: A B, B A, A B, …"""
    return [pair % 2 == 0 for pair in range(pairs)]


def compare_costs(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the medians of both sides, and the ratio with its lower bound, where less is better.

    Each pair is the figure of spotfit and that of the peer.
    """
    found = verdict([times_better(*pair, more_is_better=False) for pair in pairs])
    return {
        "spotfit": median(ours for ours, _ in pairs),
        "peer": median(theirs for _, theirs in pairs),
        "ratio": found.median,
        "lower": found.lower,
    }


def times_better(ours: float, theirs: float, *, more_is_better: bool) -> float:
    """Return how many times better spotfit is; 2.0 means twice as fast."""
    return ours / theirs if more_is_better else theirs / ours
