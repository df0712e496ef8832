"""Passes over a shard: where they begin, their last steps, and what they record."""

from __future__ import annotations

from typing import Any

import pytest

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.iteration.pass_reader import read_pass
from spotfit.data.iteration.shard import LocalShuffle, ShardGroup, ShardPosition

ROWS = 26


def shard_of(rank: int = 0, world_size: int = 2) -> ShardPosition:
    group = ShardGroup(rank=rank, world_size=world_size, world_sizes=(world_size,))
    return ShardPosition(spotfit.data.range(ROWS), group)


def lengths(rows_per_step: int | None, **options: Any) -> list[int]:
    _, steps = read_pass(shard_of(), rows_per_step, **options)
    return [block.num_rows for block, _ in steps]


def test_steps_have_the_rows_of_this_rank() -> None:
    assert lengths(4) == [4, 4, 4, 1]


def test_global_steps_are_divided_among_the_ranks() -> None:
    assert lengths(8, is_global=True) == [4, 4, 4, 1]


def test_an_incomplete_last_step_is_dropped_on_request() -> None:
    assert lengths(4, drop_last=True) == [4, 4, 4]


def test_blocks_have_all_rows_of_the_shard() -> None:
    assert sum(lengths(None)) == ROWS // 2


def test_the_position_is_that_after_the_step() -> None:
    _, steps = read_pass(shard_of(), 4)
    assert [position for _, position in steps] == [8, 16, 24, 26]


def test_the_pass_begins_before_its_first_step_is_read() -> None:
    shard = shard_of()
    begun, _ = read_pass(shard, 4)
    begun.record_yielded(8)
    shard.count()
    assert shard.consumed == 8


def test_a_global_step_needs_a_row_for_each_rank() -> None:
    with pytest.raises(ConfigError, match="cannot be shared by 3 ranks"):
        read_pass(shard_of(0, 3), 2, is_global=True)


def test_a_local_shuffle_applies_to_the_order_of_the_run() -> None:
    shard = shard_of()
    read_pass(shard, 4, local_shuffle=LocalShuffle(buffer_rows=12, seed=3))
    state = shard.state()
    assert (state["shuffle"], state["seed"], state["window_rows"] * state["lanes"]) == (
        "rows",
        3,
        24,
    )
