"""Rows of an epoch, resolved window by window as the loader does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from spotfit.data.order import EpochOrder, LaneRange

Row: TypeAlias = tuple[int, int]
"""The unit, and the row of it."""


def rows_of(order: EpochOrder, ranges: Iterable[LaneRange]) -> list[Row]:
    result: list[Row] = []
    for lane, first, rows in ranges:
        for row in range(first, first + rows):
            window = order.window_at(lane, row)
            members = [
                (part.unit, part.first + index)
                for part in window.parts
                for index in range(part.rows)
            ]
            permuted = order.permutation(lane, window)
            inside = row - window.first
            result.append(members[inside if permuted is None else int(permuted[inside])])
    return result


def rows_at(order: EpochOrder, places: Iterable[int]) -> list[Row]:
    lanes = order.settings.lanes
    return rows_of(order, [LaneRange(place % lanes, place // lanes, 1) for place in places])
