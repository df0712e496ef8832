"""Mergeable statistics of columns, and the fold over blocks that computes several in one pass.

A statistic is a value: it observes one block, merges two states, and reduces the state of all rows
to a result. Blocks may be observed anywhere and in any order; states are merged in the order of the
blocks, so that the bits of the result do not depend on timing. NaN counts as missing everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from spotfit.data.preprocessors.columns import (
    as_float64,
    column_of,
    drop_missing,
    float64_array,
    is_list,
    list_values,
    numeric_column,
    python_values,
    single_values,
)
from spotfit.data.preprocessors.quantile_sketch import QuantileSketch, sketch_of


class Statistic(Protocol):
    """A statistic of one column. Immutable, hashable; equal ones are computed once."""

    @property
    def column(self) -> str:
        """Name of the column."""
        ...

    def observe(self, block: pa.Table) -> Any:
        """Return the state of the rows of a block. Raises `ConfigError` for unsuitable columns."""
        ...

    def merge(self, first: Any, second: Any) -> Any:
        """Return the state of the rows of both, where those of `first` come first."""
        ...

    def result(self, state: Any) -> Any:
        """Return the statistic of a state; of None, that of no rows."""
        ...


Results: TypeAlias = Mapping[Statistic, Any]


def observe_all(statistics: Sequence[Statistic], block: pa.Table) -> list[Any]:
    """Return the states of the rows of a block, statistic by statistic."""
    return [statistic.observe(block) for statistic in statistics]


def fold_states(
    distinct: Sequence[Statistic], observed: Iterable[Sequence[Any]]
) -> dict[Statistic, Any]:
    """Return the result of each statistic, from the states of all blocks in their order."""
    states: Sequence[Any] | None = None
    for block in observed:
        states = block if states is None else merge_states(distinct, states, block)
    finals = states if states is not None else [None] * len(distinct)
    return {one: one.result(state) for one, state in zip(distinct, finals, strict=True)}


def merge_states(
    statistics: Sequence[Statistic], first: Sequence[Any], second: Sequence[Any]
) -> list[Any]:
    """Merge the states of two stretches of rows, statistic by statistic."""
    states = zip(statistics, first, second, strict=True)
    return [one.merge(before, after) for one, before, after in states]


class MomentsState(NamedTuple):
    """Number of values, sum, and sum of squared distances from the mean."""

    rows: int
    total: float
    squares: float


class Moments(NamedTuple):
    """Mean and population standard deviation; None without values."""

    mean: float | None
    std: float | None


@dataclass(frozen=True)
class MomentsStatistic:
    """Mean and standard deviation (ddof 0) of a numeric column.

    States are merged by the formula of Chan, Golub and LeVeque (1979).
    """

    column: str

    def observe(self, block: pa.Table) -> MomentsState:
        """Return count, sum and squares of a block."""
        values = as_float64(drop_missing(numeric_column(block, self.column)))
        if not len(values):
            return MomentsState(0, 0.0, 0.0)
        variance = pc.variance(values).as_py()
        return MomentsState(len(values), pc.sum(values).as_py(), variance * len(values))

    def merge(self, first: MomentsState, second: MomentsState) -> MomentsState:
        """Add up two states."""
        if not first.rows or not second.rows:
            return first if first.rows else second
        count = first.rows + second.rows
        distance = second.total / second.rows - first.total / first.rows
        between = distance * distance * first.rows * second.rows / count
        squares = first.squares + second.squares + between
        return MomentsState(count, first.total + second.total, squares)

    def result(self, state: MomentsState | None) -> Moments:
        """Return mean and deviation."""
        if state is None or not state.rows:
            return Moments(None, None)
        return Moments(state.total / state.rows, math.sqrt(state.squares / state.rows))


class Bounds(NamedTuple):
    """Smallest and largest value, of the column's type; None without values."""

    min: Any
    max: Any


@dataclass(frozen=True)
class BoundsStatistic:
    """Smallest and largest value of a numeric column."""

    column: str

    def observe(self, block: pa.Table) -> Bounds:
        """Return the bounds of a block."""
        bounds = pc.min_max(drop_missing(numeric_column(block, self.column)))
        return Bounds(bounds["min"].as_py(), bounds["max"].as_py())

    def merge(self, first: Bounds, second: Bounds) -> Bounds:
        """Return the bounds of both."""
        if first.min is None or second.min is None:
            return second if first.min is None else first
        return Bounds(min(first.min, second.min), max(first.max, second.max))

    def result(self, state: Bounds | None) -> Bounds:
        """Return the bounds."""
        return Bounds(None, None) if state is None else state


@dataclass(frozen=True)
class QuantilesStatistic:
    """Sketch of the quantiles of a numeric column; the result is a `QuantileSketch`."""

    column: str
    width: int

    def observe(self, block: pa.Table) -> QuantileSketch:
        """Return the sketch of a block."""
        values = as_float64(drop_missing(numeric_column(block, self.column)))
        return sketch_of(float64_array(values), self.width)

    def merge(self, first: QuantileSketch, second: QuantileSketch) -> QuantileSketch:
        """Return the sketch of both."""
        return first.merge(second)

    def result(self, state: QuantileSketch | None) -> QuantileSketch:
        """Return the sketch."""
        return QuantileSketch(self.width) if state is None else state


ValueCounts: TypeAlias = dict[Any, int]
"""Values in the order of their first occurrence, with their counts. Missing rows: None."""


class _CountsStatistic:
    """Counts are added up; the order of the values is that of their first occurrence."""

    def merge(self, first: ValueCounts, second: ValueCounts) -> ValueCounts:
        """Add up the counts."""
        merged = dict(first)
        for value, count in second.items():
            merged[value] = merged.get(value, 0) + count
        return merged

    def result(self, state: ValueCounts | None) -> ValueCounts:
        """Return the counts."""
        return {} if state is None else state


@dataclass(frozen=True)
class ValueCountsStatistic(_CountsStatistic):
    """How often each value of a column occurs. Lists count as tuples, or element by element.

    Element by element, missing lists count nothing.
    """

    column: str
    explode_lists: bool = True

    def observe(self, block: pa.Table) -> ValueCounts:
        """Return the counts of a block."""
        column = column_of(block, self.column)
        if not is_list(column.type):
            return _value_counts(single_values(block, self.column))
        if self.explode_lists:
            return _value_counts(list_values(column))
        return _count(python_values(column))


@dataclass(frozen=True)
class TokenCountsStatistic(_CountsStatistic):
    """How often each token occurs in the texts of a column. Missing texts have no tokens."""

    column: str
    tokenize: Callable[[pa.ChunkedArray], pa.ChunkedArray]

    def observe(self, block: pa.Table) -> ValueCounts:
        """Return the counts of a block."""
        return _value_counts(list_values(self.tokenize(column_of(block, self.column))))


def _value_counts(column: pa.ChunkedArray) -> ValueCounts:
    if not len(column):
        return {}
    counted = pc.value_counts(column)
    merged: ValueCounts = {}
    counts = counted.field("counts").to_pylist()
    for value, count in zip(python_values(counted.field("values")), counts, strict=True):
        merged[value] = merged.get(value, 0) + count
    return merged


def _count(values: Iterable[Any]) -> ValueCounts:
    counts: ValueCounts = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts
