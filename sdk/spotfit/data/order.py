"""The order of an epoch: a pure function of the units, the settings and the epoch.

1. The units are permuted, and their rows form one line of N rows.
2. The line is cut into L *lanes* of equal length; the first N mod L lanes have one row more.
3. A lane is cut into *windows* of whole units, except at the ends of the lane. The rows of a window
   are permuted.
4. Place p of the epoch is row p div L of lane p mod L.

A step covers the places [k, k + G). Its rows are arranged lane by lane, and each rank takes a
contiguous share, so that a rank reads few lanes. The number of ranks is not part of the order:
k, the number of rows that all ranks together have taken, is a position for any number of ranks.

Every access takes O(log units); nothing of length N is held, except the permutation of one window.
Another order for the same arguments needs a new format version, because a run may resume with a
later release: see `tests/unit/data/golden_orders.json`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from spotfit.core.errors import ConfigError
from spotfit.data.source import IntArray, int_array

if TYPE_CHECKING:
    from typing import TypeAlias

    WordArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"

Shuffle = Literal["none", "units", "rows"]

# Constants of splitmix64 (Steele, Lea and Flood 2014).
_INCREMENT = 0x9E3779B97F4A7C15
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_WORD = 2**64 - 1

_UNITS_STREAM, _ROWS_STREAM = 0, 1


class OrderSettings(NamedTuple):
    """What determines the order of every epoch, besides the units. A run does not change it."""

    seed: int = 0
    lanes: int = 1
    window_rows: int = 0
    """Rows that are permuted together, on average; 0: those of each unit."""
    shuffle: Shuffle = "none"
    """"units" permutes the units; "rows" also the rows of each window."""
    slice_rows: int = 64
    """Rows of a lane that transforms get together. They determine random augmentations."""


class UnitPart(NamedTuple):
    """`rows` rows of a unit, from its row `first` on."""

    unit: int
    first: int
    rows: int


class Window(NamedTuple):
    """Rows of a lane that are read together."""

    number: int
    """Increases along the lane, not always by one."""
    first: int
    """Number of the window's first row in the lane."""
    rows: int
    parts: tuple[UnitPart, ...]

    @property
    def end(self) -> int:
        """Number of the first row of the lane after this window."""
        return self.first + self.rows


class LaneRange(NamedTuple):
    """`rows` rows of a lane, from its row `first` on."""

    lane: int
    first: int
    rows: int

    @property
    def end(self) -> int:
        """Number of the first row of the lane after this range."""
        return self.first + self.rows


class RankPlaces(NamedTuple):
    """Rows of a rank in the order of their places."""

    ranges: list[LaneRange]
    """Rows of lanes that contain them."""
    indices: IntArray | None
    """For each place, the row in the ranges one after the other; None: they are in this order."""


class EpochOrder:
    """The order of the rows of one epoch."""

    def __init__(self, unit_rows: IntArray, settings: OrderSettings, epoch: int) -> None:
        if settings.lanes < 1:
            raise ConfigError(f"An order needs at least one lane, not {settings.lanes}.")
        self.settings = settings
        self.epoch = epoch
        order = np.arange(len(unit_rows))
        if settings.shuffle != "none":
            order = permutation(hash_key(settings.seed, epoch, _UNITS_STREAM), len(unit_rows))
        order = order[unit_rows[order] > 0]
        self._units = int_array(order)
        self._bounds = int_array(np.concatenate([[0], np.cumsum(unit_rows[order])]))
        self.row_count = int(self._bounds[-1])
        # Without a permutation of rows, each part of a unit is a window, which needs least memory.
        self._window_rows = max(settings.window_rows, 1) if settings.shuffle == "rows" else 1

    def lane_rows(self, lane: int) -> int:
        """Return the number of rows of a lane."""
        return self._lane_begin(lane + 1) - self._lane_begin(lane)

    def lane_rows_before(self, lane: int, place: int) -> int:
        """Return how many rows of a lane are at places before `place`."""
        return (place - lane + self.settings.lanes - 1) // self.settings.lanes

    def window_at(self, lane: int, row: int) -> Window:
        """Return the window that contains a row of a lane."""
        begin, end = self._lane_begin(lane), self._lane_begin(lane + 1)
        if not 0 <= row < end - begin:
            raise IndexError(f"lane {lane} has {end - begin} rows, no row {row}")
        piece = int(self._bounds.searchsorted(begin + row, side="right")) - 1
        number, grid_begin, grid_end = self._grid_cell(
            lane, max(int(self._bounds[piece]) - begin, 0)
        )
        first_piece = int(self._bounds.searchsorted(begin + grid_begin))
        if grid_begin == 0:
            first_piece = int(self._bounds.searchsorted(begin, side="right")) - 1
        end_piece = int(self._bounds.searchsorted(min(begin + grid_end, end)))
        bounds = self._bounds[first_piece : end_piece + 1].clip(begin, end)
        firsts = (bounds[:-1] - self._bounds[first_piece:end_piece]).tolist()
        units = self._units[first_piece:end_piece].tolist()
        parts = tuple(map(UnitPart, units, firsts, np.diff(bounds).tolist()))
        return Window(number, int(bounds[0]) - begin, int(bounds[-1] - bounds[0]), parts)

    def permutation(self, lane: int, window: Window) -> IntArray | None:
        """Return the row of the window for each of its places; None: the rows stay in order."""
        if self.settings.shuffle != "rows":
            return None
        return permutation(
            hash_key(self.settings.seed, self.epoch, _ROWS_STREAM, lane, window.number), window.rows
        )

    def rank_rows(
        self, first: int, count: int, world_size: int, rank: int, *, equal: bool = False
    ) -> list[LaneRange]:
        """Return a rank's rows of the step of `count` places from `first` on, in order.

        `equal` gives all ranks the same number of rows, see `share`.
        """
        begin, end = share(count, world_size, rank, equal=equal)
        lanes = self.settings.lanes
        each, more = divmod(count, lanes)
        # `more` lanes from that of the first place on, modulo L, have one row more in this step.
        first_lane, end_lane = first % lanes, first % lanes + more

        def offset(lane: int) -> int:
            extra = max(min(lane, end_lane) - first_lane, 0) + max(min(lane, end_lane - lanes), 0)
            return lane * each + extra

        ranges = []
        lane = bisect_right(range(lanes), begin, key=offset) - 1
        while begin < end:
            part = min(offset(lane + 1), end) - begin
            if part > 0:
                row = self.lane_rows_before(lane, first) + begin - offset(lane)
                ranges.append(LaneRange(lane, row, part))
                begin += part
            lane += 1
        return ranges

    def rank_places(self, first: int, count: int, world_size: int, rank: int) -> RankPlaces:
        """Return a rank's rows of the places [first, first + count) in steps of a row per rank.

        Of a last step with fewer places than ranks, some ranks have no row.
        """
        steps = first + np.arange(count // world_size * world_size).reshape(-1, world_size)
        # As in `rank_rows`: the places of a step are arranged lane by lane.
        by_lane = np.argsort(steps % self.settings.lanes, axis=1, kind="stable")[:, rank]
        places = np.take_along_axis(steps, by_lane[:, None], axis=1)[:, 0]
        if rest := count % world_size:
            last = np.arange(first + count - rest, first + count)
            begin, end = share(rest, world_size, rank)
            last = last[np.argsort(last % self.settings.lanes, kind="stable")][begin:end]
            places = np.concatenate([places, last])
        rows, lanes = np.divmod(places, self.settings.lanes)
        ranges, indices, offset = [], np.empty_like(rows), 0
        for lane in np.unique(lanes).tolist():
            of_lane = rows[lanes == lane]
            begin, end = int(of_lane.min()), int(of_lane.max()) + 1
            ranges.append(LaneRange(lane, begin, end - begin))
            indices[lanes == lane] = of_lane - begin + offset
            offset += end - begin
        in_order = len(ranges) == 1 and offset == len(rows)
        return RankPlaces(ranges, None if in_order else int_array(indices))

    def _lane_begin(self, lane: int) -> int:
        each, more = divmod(self.row_count, self.settings.lanes)
        return lane * each + min(lane, more)

    def _grid_cell(self, lane: int, row: int) -> tuple[int, int, int]:
        """Return number, begin and end of the grid cell that contains a row of a lane.

        A window consists of the parts of units that begin in one cell. The first cell of lane l has
        (l + 1) / L of the rows of the others, so that the lanes need their next windows in turn.
        """
        rows = self._window_rows
        first_rows = max(rows * (lane + 1) // self.settings.lanes, 1)
        number = (row + rows - first_rows) // rows
        end = first_rows + number * rows
        return number, end - rows if number else 0, end


def hash_key(*values: int) -> int:
    """Return a 64-bit hash of integers, the same on every machine and with every release."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = _finalise((state + np.uint64(_INCREMENT)) ^ np.uint64(value & _WORD))
    return int(state[0])


def permutation(key: int, count: int) -> IntArray:
    """Return a permutation of the integers below `count` that depends on `key` only."""
    # Without ties, every sort gives one result.
    return np.argsort(hash_numbers(key, 0, count))


def hash_numbers(key: int, first: int, count: int) -> WordArray:
    """Return a 64-bit hash of each integer from `first` on; those of one key are distinct."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    # The words differ, and `_finalise` is a bijection.
    return _finalise(numbers * np.uint64(_INCREMENT) + np.uint64(key))


def _finalise(words: WordArray) -> WordArray:
    words = (words ^ (words >> np.uint64(30))) * _FACTOR_1
    words = (words ^ (words >> np.uint64(27))) * _FACTOR_2
    return words ^ (words >> np.uint64(31))


def share(count: int, world_size: int, rank: int, *, equal: bool = False) -> tuple[int, int]:
    """Return begin and end of a rank's share of `count` rows; they differ by at most one row.

    `equal` leaves out the last rows, fewer than there are ranks, so that they do not differ.
    """
    if equal:
        count -= count % world_size
    return rank * count // world_size, (rank + 1) * count // world_size


def choose_lanes(step_rows: int, world_sizes: Sequence[int], unit_count: int) -> int:
    """Return the number of lanes with the least reading, for steps of `step_rows` of all ranks.

    That is a divisor d of `step_rows` between the largest number of ranks and four times as many:
    if d is no divisor, about every unit is read twice. If there is none, the largest divisor below.
    More lanes mix better, so of equal ones the largest; never more lanes than units.
    """
    largest = max(world_sizes)
    limit = max(min(4 * largest, unit_count), 1)
    divisors = [lanes for lanes in range(1, limit + 1) if step_rows % lanes == 0]
    return max(
        [lanes for lanes in divisors if lanes >= largest] or divisors[-1:],
        key=lambda lanes: (-_read_amplification(lanes, world_sizes), lanes),
    )


def _read_amplification(lanes: int, world_sizes: Sequence[int]) -> Fraction:
    """Return how often all ranks together read each unit, summed over the numbers of ranks."""
    return sum(
        (Fraction(lanes + size - gcd(lanes, size), lanes) for size in world_sizes), Fraction()
    )


def choose_window_rows(
    unit_rows: IntArray, unit_bytes: IntArray, lanes: int, *, world_size: int, budget_bytes: int
) -> int:
    """Return the most rows of a window with which a rank holds at most `budget_bytes`.

    `world_size` is the smallest number of ranks, with which each rank has the most lanes. A window
    may be longer than `window_rows` by the rows of a unit. 0 if one unit per lane is too much.
    """
    row_count = int(unit_rows.sum())
    if not row_count:
        return 0
    held_lanes = -(-lanes // world_size)
    rows = budget_bytes * row_count // (held_lanes * max(int(unit_bytes.sum()), 1))
    return max(min(rows - int(unit_rows.max()), -(-row_count // lanes)), 0)
