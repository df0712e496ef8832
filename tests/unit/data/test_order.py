"""The order of an epoch, against a plain model of it and in runs with random restarts."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.order import (
    EpochOrder,
    OrderSettings,
    Shuffle,
    choose_lanes,
    choose_window_rows,
    hash_key,
    permutation,
    share,
)
from spotfit.data.source import IntArray, int_array
from tests.unit.data.order_rows import Row, rows_at, rows_of

GOLDEN = json.loads((Path(__file__).parent / "golden_orders.json").read_text())
SHUFFLES: tuple[Shuffle, ...] = ("none", "units", "rows")


class Plan(NamedTuple):
    unit_rows: list[int]
    settings: OrderSettings
    epoch: int

    @property
    def order(self) -> EpochOrder:
        return EpochOrder(int_array(self.unit_rows), self.settings, self.epoch)

    @property
    def rows(self) -> list[Row]:
        return [(unit, row) for unit, rows in enumerate(self.unit_rows) for row in range(rows)]


plans = st.builds(
    Plan,
    unit_rows=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    settings=st.builds(
        OrderSettings,
        seed=st.integers(0, 2**64 - 1),
        lanes=st.integers(1, 12),
        window_rows=st.integers(0, 50),
        shuffle=st.sampled_from(SHUFFLES),
    ),
    epoch=st.integers(0, 5),
)


# ── a plain model of the order ────────────────────────────────────────────────────────────────────


def model_of_order(plan: Plan) -> list[Row]:
    """All rows in the order of the epoch, by loops over rows as the module's docstring says it."""
    seed, lanes, window_rows, shuffle, _ = plan.settings
    units = list(range(len(plan.unit_rows)))
    if shuffle != "none":
        units = permutation(hash_key(seed, plan.epoch, 0), len(units)).tolist()
    line = [(unit, row) for unit in units for row in range(plan.unit_rows[unit])]
    each, more = divmod(len(line), lanes)
    ends = [(lane + 1) * each + min(lane + 1, more) for lane in range(lanes)]
    parts = [line[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    if shuffle == "rows":
        for lane, rows in enumerate(parts):
            parts[lane] = _permute_windows(plan, lane, rows, max(window_rows, 1))
    return [parts[place % lanes][place // lanes] for place in range(len(line))]


def _permute_windows(plan: Plan, lane: int, rows: list[Row], window_rows: int) -> list[Row]:
    cells: dict[int, list[Row]] = {}
    cell = 0
    for number, (unit, row) in enumerate(rows):
        if number == 0 or unit != rows[number - 1][0]:
            first_end = max(window_rows * (lane + 1) // plan.settings.lanes, 1)
            cell = 0 if number < first_end else 1 + (number - first_end) // window_rows
        cells.setdefault(cell, []).append((unit, row))
    result = []
    for cell, members in cells.items():
        key = hash_key(plan.settings.seed, plan.epoch, 1, lane, cell)
        result += [members[index] for index in permutation(key, len(members)).tolist()]
    return result


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────


def global_batch(
    order: EpochOrder, position: int, count: int, world_size: int, *, equal: bool = False
) -> list[list[Row]]:
    """The rows of each rank in one step."""
    return [
        rows_of(order, order.rank_rows(position, count, world_size, rank, equal=equal))
        for rank in range(world_size)
    ]


def flat(batch: list[list[Row]]) -> list[Row]:
    return [row for rows in batch for row in rows]


def arranged_by_lane(rows: list[Row], position: int, lanes: int) -> list[Row]:
    places = sorted(range(len(rows)), key=lambda index: (position + index) % lanes)
    return [rows[index] for index in places]


@given(plans)
def test_places_units_and_windows_match_the_model(plan: Plan) -> None:
    order = plan.order

    assert rows_at(order, range(order.row_count)) == model_of_order(plan)


@given(plans, st.data())
def test_a_random_place_matches_the_model(plan: Plan, data: st.DataObject) -> None:
    model = model_of_order(plan)
    places = data.draw(st.lists(st.integers(0, max(len(model) - 1, 0)), max_size=5))
    places = places if model else []

    assert rows_at(plan.order, places) == [model[p] for p in places]


@given(plans)
def test_every_row_is_in_the_order_once(plan: Plan) -> None:
    assert sorted(model_of_order(plan)) == plan.rows


class Round(NamedTuple):
    """A run from its start or restart to its loss."""

    world_size: int
    steps: int
    restart: float
    """Where the next round begins, as a fraction of the steps of this one: 1 loses no step."""


rounds = st.lists(
    st.builds(
        Round,
        world_size=st.integers(1, 8),
        steps=st.integers(1, 12),
        restart=st.sampled_from([1.0, 1.0, 0.0, 0.5]),
    ),
    min_size=1,
    max_size=6,
)


@given(plans, rounds, st.integers(1, 40))
def test_global_batches_do_not_depend_on_the_numbers_of_ranks(
    plan: Plan, rounds: list[Round], step_rows: int
) -> None:
    """Fixed global batch: the same content and order as with one rank; every row once."""
    order, model = plan.order, model_of_order(plan)
    position, trained = 0, list[Row]()
    # The last round has no end but that of the epoch.
    for round_ in [*rounds, Round(rounds[-1].world_size, len(model), 1.0)]:
        begin = position
        for _ in range(round_.steps):
            count = min(step_rows, len(model) - position)
            batch = flat(global_batch(order, position, count, round_.world_size))
            expected = model[position : position + count]
            assert batch == arranged_by_lane(expected, position, plan.settings.lanes)
            trained[position:] = batch
            position += count
        restart = begin + int((position - begin) // step_rows * round_.restart) * step_rows
        position = position if round_.restart == 1.0 else restart

    assert sorted(trained) == plan.rows


@given(plans, rounds, st.integers(1, 8))
def test_fixed_batches_per_rank_leave_out_fewer_rows_than_ranks(
    plan: Plan, rounds: list[Round], rank_batch: int
) -> None:
    """The global batch changes with the number of ranks; shares stay equal in every step."""
    order = plan.order
    row_count = len(plan.rows)
    position, trained = 0, list[Row]()
    last_world_size = 1
    for round_ in [*rounds, Round(rounds[-1].world_size, row_count, 1.0)]:
        world_size, ends = round_.world_size, [position]
        last_world_size = world_size if position < row_count else last_world_size
        for _ in range(round_.steps):
            count = min(rank_batch * world_size, row_count - position)
            batch = global_batch(order, position, count, world_size, equal=True)
            assert len({len(rows) for rows in batch}) == 1
            trained[position:] = flat(batch)
            position += count
            ends.append(position)
        position = ends[int((len(ends) - 1) * round_.restart)]

    assert max(Counter(trained).values(), default=1) == 1
    assert row_count - len(trained) < last_world_size


@given(plans, st.integers(1, 8), st.data())
def test_places_by_row_are_those_of_steps_of_one_row_per_rank(
    plan: Plan, world_size: int, data: st.DataObject
) -> None:
    order, row_count = plan.order, len(plan.rows)
    first = data.draw(st.integers(0, row_count))
    count = data.draw(st.integers(0, row_count - first))
    for rank in range(world_size):
        expected = []
        for step in range(first, first + count, world_size):
            places = min(world_size, first + count - step)
            expected += rows_of(order, order.rank_rows(step, places, world_size, rank))
        ranges, indices = order.rank_places(first, count, world_size, rank)
        rows = rows_of(order, ranges)
        assert (rows if indices is None else [rows[index] for index in indices]) == expected


@given(plans)
def test_windows_of_a_lane_cover_each_row_once_and_lanes_cut_few_units(plan: Plan) -> None:
    order = plan.order
    rows, windows_of_unit = Counter[Row](), Counter[int]()
    for lane in range(plan.settings.lanes):
        row = 0
        while row < order.lane_rows(lane):
            window = order.window_at(lane, row)
            assert window.first == row
            assert window.rows == sum(part.rows for part in window.parts) > 0
            for unit, first, count in window.parts:
                windows_of_unit[unit] += 1
                rows.update((unit, first + index) for index in range(count))
            row = window.end

    assert sorted(rows.elements()) == plan.rows
    assert sum(windows_of_unit.values()) - len(windows_of_unit) < plan.settings.lanes


@given(plans)
def test_a_window_exceeds_the_setting_by_less_than_a_unit(plan: Plan) -> None:
    order = plan.order
    limit = max(plan.settings.window_rows, 1) + max(plan.unit_rows)
    for lane in range(plan.settings.lanes):
        row = 0
        while row < order.lane_rows(lane):
            window = order.window_at(lane, row)
            assert window.rows < limit
            row = window.end


def test_lanes_begin_their_second_windows_in_turn() -> None:
    order = EpochOrder(
        int_array([10] * 400), OrderSettings(lanes=4, window_rows=200, shuffle="rows"), 0
    )

    assert [order.window_at(lane, 0).rows for lane in range(4)] == [50, 100, 150, 200]
    assert [order.window_at(lane, 300).rows for lane in range(4)] == [200] * 4


def test_a_row_beyond_the_lane_is_refused() -> None:
    order = EpochOrder(int_array([10]), OrderSettings(lanes=3), 0)

    with pytest.raises(IndexError, match="lane 1 has 3 rows, no row 3"):
        order.window_at(1, 3)


def test_an_order_without_lanes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one lane, not 0"):
        EpochOrder(int_array([10]), OrderSettings(lanes=0), 0)


# ── stability ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_orders_are_those_of_earlier_releases(golden: dict[str, object]) -> None:
    """A run may resume with a later release: another order here needs a new format version.

    Do not regenerate the file to make this test pass. Add plans of the new version to it.
    """
    plan = Plan(golden["unit_rows"], OrderSettings(**golden["settings"]), golden["epoch"])  # type: ignore[arg-type]

    assert list(map(list, rows_at(plan.order, range(100)))) == golden["places"]


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of the published generator with seed 0.
    assert hash_key(0) == 0xE220A8397B1DCDAF
    keys = [hash_key(0), hash_key(0x9E3779B97F4A7C15 ^ (2 * 0x9E3779B97F4A7C15 % 2**64))]
    assert keys[1] == 0x6E789E6AA1B965F4


def test_permutations_are_equally_frequent() -> None:
    frequencies = Counter(tuple(permutation(hash_key(key), 4).tolist()) for key in range(4_800))

    assert len(frequencies) == 24
    # The 99.9th percentile of chi-squared with 23 degrees of freedom is 49.7.
    assert sum((count - 200) ** 2 / 200 for count in frequencies.values()) < 49.7


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_a_permutation_contains_each_number_once(key: int, count: int) -> None:
    assert sorted(permutation(key, count).tolist()) == list(range(count))


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        tuple(rows_at(Plan([20] * 5, OrderSettings(seed, 2, 50, "rows"), epoch).order, range(9)))
        for seed in range(3)
        for epoch in range(3)
    }

    assert len(orders) == 9


# ── scale ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_epoch_of_ten_billion_rows_resumes_without_holding_its_rows() -> None:
    unit_rows = int_array(np.full(1_000_000, 10_000))
    began_cpu_s = time.process_time()
    tracemalloc.start()
    order = EpochOrder(unit_rows, OrderSettings(7, 64, 20_000, "rows"), 3)
    units_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    ranges = order.rank_rows(order.row_count // 2, 4_096, 48, 17)
    for lane, row, _ in ranges:
        order.permutation(lane, order.window_at(lane, row))
    rows_bytes = tracemalloc.get_traced_memory()[1] - units_bytes
    tracemalloc.stop()

    assert sum(rows for _, _, rows in ranges) in (4_096 // 48, 4_096 // 48 + 1)
    assert units_bytes < 20 * len(unit_rows)
    assert rows_bytes < 5_000_000
    # About 0.3 s; an algorithm that visits every row would take minutes.
    assert time.process_time() - began_cpu_s < 20


# ── shares ────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 100), st.integers(1, 12))
def test_shares_are_contiguous_and_differ_by_at_most_one(count: int, world_size: int) -> None:
    shares = [share(count, world_size, rank) for rank in range(world_size)]
    lengths = {end - begin for begin, end in shares}

    assert [index for begin, end in shares for index in range(begin, end)] == list(range(count))
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 100), st.integers(1, 12))
def test_equal_shares_leave_out_the_last_rows(count: int, world_size: int) -> None:
    shares = [share(count, world_size, rank, equal=True) for rank in range(world_size)]
    rows = [index for begin, end in shares for index in range(begin, end)]

    assert {end - begin for begin, end in shares} == {count // world_size}
    assert rows == list(range(count - count % world_size))


# ── choices ───────────────────────────────────────────────────────────────────────────────────────


def reads_per_unit(unit_rows: IntArray, lanes: int, step_rows: int, world_size: int) -> float:
    """How often all ranks together read each unit of an epoch."""
    order = EpochOrder(unit_rows, OrderSettings(1, lanes, 0, "rows"), 0)
    reads = set()
    for position in range(0, order.row_count - step_rows + 1, step_rows):
        for rank in range(world_size):
            for lane, first, rows in order.rank_rows(position, step_rows, world_size, rank):
                for row in (first, first + rows - 1):
                    reads.add((rank, order.window_at(lane, row).parts[0].unit))
    return len(reads) / len(unit_rows)


@pytest.mark.parametrize(
    ("lanes", "world_size", "expected"), [(8, 8, 1.0), (8, 4, 1.0), (8, 6, 1.5), (16, 6, 1.25)]
)
def test_ranks_together_read_units_as_often_as_computed(
    lanes: int, world_size: int, expected: float
) -> None:
    unit_rows = int_array([300] * 8 * lanes)

    assert reads_per_unit(unit_rows, lanes, 240, world_size) == pytest.approx(expected, abs=0.01)


def test_lanes_that_do_not_divide_the_step_cost_more_reads() -> None:
    unit_rows = int_array([300] * 64)

    assert reads_per_unit(unit_rows, 8, 250, 8) > 1.9


def test_chosen_lanes_read_least() -> None:
    # 24 lanes: 1, 1, 1, 1, 28/24, 1, 30/24, 1. No other divisor of 960 from 8 to 32 is better.
    assert choose_lanes(960, range(1, 9), 1_000) == 24


def test_of_equal_choices_the_most_lanes_are_chosen() -> None:
    assert choose_lanes(256, [4], 1_000) == 16


def test_there_are_never_more_lanes_than_units() -> None:
    assert choose_lanes(960, [4], 15) == 12
    assert choose_lanes(960, [8], 7) == 6


def test_without_a_suitable_divisor_the_largest_below_is_chosen() -> None:
    assert choose_lanes(2 * 101, [5], 1_000) == 2


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 1_000), min_size=1, max_size=30),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(10**5, 10**8),
)
def test_chosen_windows_stay_within_the_budget(
    rows: list[int], lanes: int, world_size: int, budget_bytes: int
) -> None:
    unit_rows, row_bytes = int_array(rows), 100
    window_rows = choose_window_rows(
        unit_rows, int_array(unit_rows * row_bytes), lanes, world_size=world_size,
        budget_bytes=budget_bytes,
    )  # fmt: skip
    held_rows = -(-lanes // world_size) * (window_rows + max(rows))

    assert window_rows == 0 or held_rows * row_bytes <= budget_bytes
    assert window_rows <= -(-sum(rows) // lanes)
