"""Statistics as partial results of blocks that are merged in order of the rows: their base classes.

`aggregate.py` has the statistics themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.plans.row_functions import block_rows


class AggregateFnV2:
    """A statistic of one column, or of all rows where `on` is None.

    Subclasses define `aggregate_block` and `combine`, and `finalize` where the partial result is
    not the statistic. `ignore_nulls` leaves null values out; without it, a column that has one
    gives None.
    """

    counts_rows = False
    """Whether a block's number of rows suffices where `on` is None."""
    null_is_value = False
    """Whether a null counts like any other value, also if nulls are not ignored."""
    holds_values = False
    """Whether the partial result grows with the number of values."""

    def __init__(
        self,
        name: str,
        zero_factory: Callable[[], Any] = lambda: None,
        *,
        on: str | None,
        ignore_nulls: bool = True,
    ) -> None:
        self.name = name
        self.on = on
        self.ignore_nulls = ignore_nulls
        self.zero_factory = zero_factory

    def get_target_column(self) -> str | None:
        """Return the column, or None for all rows."""
        return self.on

    def aggregate_block(self, block: pa.Table) -> Any:
        """Return the partial result of the rows of a block; None if there is nothing to count."""
        raise TypeError(f"{type(self).__name__} does not define aggregate_block()")

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return the partial result of the rows of two partial results, the earlier one first."""
        raise TypeError(f"{type(self).__name__} does not define combine()")

    def finalize(self, accumulator: Any) -> Any:
        """Return the statistic of a partial result."""
        return accumulator

    def fold_block(self, current: Any, block: pa.Table) -> Any:
        """Return the partial result after another block. `current` is None before the first."""
        if current is _NULL or self._has_null(block):
            return _NULL
        new = self.aggregate_block(block)
        return current if new is None else new if current is None else self.combine(current, new)

    def result(self, current: Any) -> Any:
        """Return the statistic of what `fold_block` returned.

        None without rows, or if a null is not ignored.
        """
        if current is _NULL:
            return None
        current = self.zero_factory() if current is None else current
        return None if current is None else self.finalize(current)

    def _has_null(self, block: pa.Table) -> bool:
        if self.ignore_nulls or self.null_is_value or self.on is None:
            return False
        return bool(block.column(self.on).null_count)


_NULL = object()
"""The partial result of a column that has a null value which is not ignored."""


class AggregateFn:
    """A statistic of the user, made of functions, as in older versions of Ray."""

    on = None
    counts_rows = False

    def __init__(
        self,
        init: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any],
        name: str,
        accumulate_row: Callable[[Any, dict[str, Any]], Any] | None = None,
        accumulate_block: Callable[[Any, Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
    ) -> None:
        if (accumulate_row is None) == (accumulate_block is None):
            raise ConfigError(
                "AggregateFn needs either accumulate_row or accumulate_block.",
                do="Pass exactly one of them.",
            )
        self.name = name
        self._init, self._merge = init, merge
        self._accumulate_row, self._accumulate_block = accumulate_row, accumulate_block
        self._finalize = finalize or (lambda result: result)

    def get_target_column(self) -> None:
        """Return None: the functions get whole rows."""

    def fold_block(self, current: Any, block: pa.Table) -> Any:
        """Return the partial result after another block, in a list; None before the first."""
        new = self._init(None)
        if self._accumulate_block is not None:
            new = self._accumulate_block(new, block)
        elif self._accumulate_row is not None:
            for row in block_rows(block):
                new = self._accumulate_row(new, row)
        return [new if current is None else self._merge(current[0], new)]

    def result(self, current: Any) -> Any:
        """Return the statistic of what `fold_block` returned."""
        return self._finalize(self._init(None) if current is None else current[0])


def fold_all(
    aggregates: Sequence[Any], blocks: Callable[[list[str] | None], Iterable[pa.Table]]
) -> dict[str, Any]:
    """Return the value of each aggregate under its name, in one pass.

    `blocks` returns the blocks with the given columns; None: with all.
    """
    results: list[Any] = [None] * len(aggregates)
    for block in blocks(columns_of(aggregates)):
        results = [
            aggregate.fold_block(current, block)
            for aggregate, current in zip(aggregates, results, strict=True)
        ]
    return {
        aggregate.name: aggregate.result(current)
        for aggregate, current in zip(aggregates, results, strict=True)
    }


def columns_of(aggregates: Sequence[Any]) -> list[str] | None:
    """Return the columns that the aggregates need; None: all."""
    columns = [aggregate.get_target_column() for aggregate in aggregates]
    if any(
        column is None and not aggregate.counts_rows
        for column, aggregate in zip(columns, aggregates, strict=True)
    ):
        return None
    named = list(dict.fromkeys(column for column in columns if column is not None))
    return named or None
