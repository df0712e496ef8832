"""A mergeable sketch of quantiles with a guaranteed error, without random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

FloatArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"


class QuantileSketch(NamedTuple):
    """Values in levels: each value of level h stands for 2**h values of the input.

    A level of 2 * `width` values or more is sorted, and every second value moves up one level. Each
    such step changes the rank of a value by at most 2**h, and needs 2 * `width` values of weight
    2**h, so the rank of N values is wrong by at most N * levels / (2 * `width`) (the deterministic
    algorithm of Manku, Rajagopalan and Lindsay, SIGMOD 1998). Up to 2 * `width` - 1 values nothing
    is lost: the quantiles are exact.
    """

    width: int
    levels: tuple[FloatArray, ...] = ()
    odd_steps: int = 0
    """Bit h: whether level h keeps the odd values at its next step, so that errors cancel out."""

    @property
    def row_count(self) -> int:
        """Number of values of the input."""
        return sum(len(level) << height for height, level in enumerate(self.levels))

    def merge(self, other: QuantileSketch) -> QuantileSketch:
        """Return the sketch of the values of both."""
        height = max(len(self.levels), len(other.levels))
        return _compact(
            self.width,
            [np.concatenate([_level(self, h), _level(other, h)]) for h in range(height)],
            self.odd_steps ^ other.odd_steps,
        )

    def quantiles(self, ranks: Sequence[float]) -> list[float] | None:
        """Return for each rank from 0 to 1 the value below which that share of the values lies.

        None if there are no values.
        """
        if not self.row_count:
            return None
        values = np.concatenate(self.levels)
        weights = np.repeat(
            [1 << height for height in range(len(self.levels))],
            [len(level) for level in self.levels],
        )
        order = np.argsort(values, kind="stable")
        ends = np.cumsum(weights[order])
        # The value at the index floor(rank * N) of the sorted input, as Ray's sketch returns it.
        places = np.minimum(np.floor(np.asarray(ranks) * ends[-1]), ends[-1] - 1)
        return [float(v) for v in values[order][np.searchsorted(ends, places, side="right")]]


def sketch_of(values: FloatArray, width: int) -> QuantileSketch:
    """Return the sketch of values, none of which is NaN."""
    return _compact(width, [values], 0)


def _level(sketch: QuantileSketch, height: int) -> FloatArray:
    empty = np.empty(0)
    return sketch.levels[height] if height < len(sketch.levels) else empty


def _compact(width: int, levels: list[FloatArray], odd_steps: int) -> QuantileSketch:
    height = 0
    while height < len(levels):
        level = levels[height]
        if len(level) >= 2 * width:
            if height + 1 == len(levels):
                levels.append(np.empty(0))
            ordered = np.sort(level)
            # Of an odd number of values the largest or the smallest stays, in turns.
            odd = odd_steps >> height & 1
            spare = len(ordered) % 2
            paired = ordered[spare * odd : len(ordered) - spare * (1 - odd)]
            levels[height] = ordered[:spare] if odd else ordered[len(ordered) - spare :]
            levels[height + 1] = np.concatenate([levels[height + 1], paired[odd::2]])
            odd_steps ^= 1 << height
        height += 1
    return QuantileSketch(width, tuple(levels), odd_steps)
