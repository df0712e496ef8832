"""Aggregates of distinct values: lists of them, and how often they occur."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.data.aggregate_base import AggregateFnV2


class Unique(AggregateFnV2):
    """The distinct values, in order of first occurrence."""

    null_is_value = True
    holds_values = True

    def __init__(
        self,
        on: str,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
        encode_lists: Any = None,
    ) -> None:
        name = alias_name or f"unique({on})"
        super().__init__(name, dict, on=on, ignore_nulls=ignore_nulls)
        self._encode_lists = encode_lists

    def aggregate_block(self, block: pa.Table) -> dict[Any, Any]:
        """Return the values as keys."""
        column = block.column(self.on)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            rows = column.to_pylist()
            values = [x for row in rows for x in row or ()] if self._encode_lists else rows
        elif pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            values = column.to_pylist()
        else:
            values = column.unique().to_pylist()
        distinct: dict[Any, Any] = {}
        for value in values:
            if value is not None or not self.ignore_nulls:
                distinct.setdefault(hashable(value), value)
        return distinct

    def combine(self, current_accumulator: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
        """Return the values of both: of equal ones, such as 0.0 and -0.0, the first."""
        return {**current_accumulator, **{k: new[k] for k in new if k not in current_accumulator}}

    def finalize(self, accumulator: dict[Any, Any]) -> Any:
        """Return the list of values."""
        return list(accumulator.values())


def hashable(value: Any) -> Any:
    """Return a form of a value that equals that of an equal value; NaN equals NaN."""
    if isinstance(value, float) and math.isnan(value):
        return "nan", None  # NaN differs from itself
    if isinstance(value, Mapping):
        return tuple((key, hashable(item)) for key, item in value.items())
    if isinstance(value, list | np.ndarray):
        return tuple(map(hashable, value))
    return value


class CountDistinct(Unique):
    """The number of distinct values."""

    def __init__(
        self,
        on: str,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name or f"count_distinct({on})")

    def finalize(self, accumulator: dict[Any, Any]) -> int:
        """Return the number of values."""
        return len(accumulator)


class AsList(AggregateFnV2):
    """All values, in order of the rows."""

    null_is_value = True
    holds_values = True

    def __init__(
        self,
        on: str,
        alias_name: str | None = None,
        ignore_nulls: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> None:
        name = alias_name or f"list({on})"
        super().__init__(name, list, on=on, ignore_nulls=ignore_nulls)

    def aggregate_block(self, block: pa.Table) -> list[Any]:
        """Return the values of a block."""
        column = block.column(self.on)
        values: list[Any] = (column.drop_null() if self.ignore_nulls else column).to_pylist()
        return values

    def combine(self, current_accumulator: list[Any], new: list[Any]) -> list[Any]:
        """Return all values."""
        return current_accumulator + new


class ValueCounter(AggregateFnV2):
    """How often each value occurs: a dictionary of the lists `values` and `counts`."""

    holds_values = True

    def __init__(self, on: str, alias_name: str | None = None) -> None:
        super().__init__(alias_name or f"value_counter({on})", dict, on=on)

    def aggregate_block(self, block: pa.Table) -> dict[Any, tuple[Any, int]]:
        """Return value and number by a hashable form of the value."""
        values = self.list_values(block.column(self.on))
        found: dict[Any, tuple[Any, int]] = {}
        for value in values:
            if value is not None:
                key = hashable(value)
                found[key] = value, found.get(key, (value, 0))[1] + 1
        return found

    def list_values(self, column: pa.ChunkedArray) -> list[Any]:
        """Return the values that are counted."""
        values: list[Any] = column.to_pylist()
        return values

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return the sums of the numbers."""
        result = dict(current_accumulator)
        for key, (value, number) in new.items():
            result[key] = value, result.get(key, (value, 0))[1] + number
        return result

    def finalize(self, accumulator: Any) -> Any:
        """Return the values in order of first occurrence, and their numbers."""
        pairs = list(accumulator.values())
        return {"values": [value for value, _ in pairs], "counts": [number for _, number in pairs]}


class ApproximateTopK(ValueCounter):
    """The `k` most frequent values with their numbers, which are exact here."""

    def __init__(
        self,
        on: str,
        k: int,
        log_capacity: int = 15,
        alias_name: str | None = None,
        encode_lists: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> None:
        super().__init__(on, alias_name or f"approx_topk({on})")
        self._k = k
        self._encode_lists = encode_lists

    def list_values(self, column: pa.ChunkedArray) -> list[Any]:
        """Return the values, or those of the lists."""
        values: list[Any] = column.to_pylist()
        return [x for row in values for x in row or ()] if self._encode_lists else values

    def finalize(self, accumulator: Any) -> Any:
        """Return the most frequent values, as rows with the column and `count`."""
        pairs = sorted(accumulator.values(), key=lambda pair: -pair[1])
        return [{self.on: value, "count": number} for value, number in pairs[: self._k]]
