"""The position of a shard: epochs, counted batches, resumes."""

from __future__ import annotations

from typing import Any

import pytest

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.iteration.shard import (
    LocalShuffle,
    PassPosition,
    ShardGroup,
    ShardPosition,
    choose_order,
)

ROWS = 100
STEP = 10


def make_position(dataset: Dataset | None = None, world_size: int = 2) -> ShardPosition:
    group = ShardGroup(rank=0, world_size=world_size, world_sizes=(world_size,), seed=3)
    return ShardPosition(
        spotfit.data.range(ROWS) if dataset is None else dataset, group, name="train"
    )


def take_batches(position: ShardPosition, count: int) -> None:
    """Iterate one pass: `count` batches are yielded, the loop then leaves it."""
    this_pass = position.begin_pass(STEP)
    for taken in range(1, count + 1):
        this_pass.record_yielded(this_pass.first_row + taken * STEP)
    this_pass.end(is_exhausted=False)


def test_a_batch_counts_when_the_next_one_is_requested() -> None:
    position = make_position()
    this_pass = position.begin_pass(STEP)
    this_pass.record_yielded(STEP)
    assert position.consumed == 0
    this_pass.record_yielded(2 * STEP)
    assert position.consumed == STEP


def test_a_report_counts_the_current_batch() -> None:
    position = make_position()
    position.begin_pass(STEP).record_yielded(STEP)
    position.count()
    assert position.state()["consumed"] == STEP


def test_an_exhausted_pass_ends_the_epoch() -> None:
    position = make_position()
    this_pass = position.begin_pass(STEP)
    this_pass.record_yielded(ROWS)
    this_pass.end(is_exhausted=True)
    assert (position.epoch, position.consumed) == (1, 0)


def test_a_loop_that_leaves_a_pass_ends_the_epoch() -> None:
    position = make_position()
    take_batches(position, 3)
    assert (position.epoch, position.consumed) == (1, 0)


def test_looking_at_one_batch_leaves_the_epoch_new() -> None:
    position = make_position()
    take_batches(position, 1)
    assert position.begin_pass(STEP).epoch == 0


def test_a_pass_that_was_only_looked_at_does_not_choose_the_order() -> None:
    position = make_position()
    position.begin_pass(2).record_yielded(2)
    order = position.begin_pass(STEP, local_shuffle=LocalShuffle(50, seed=3)).order
    assert (order.shuffle, order.seed) == ("rows", 3)


def test_an_epoch_keeps_its_order_until_its_end() -> None:
    before = make_position()
    this_pass = before.begin_pass(STEP)
    this_pass.record_yielded(STEP)
    before.count()
    resumed = make_position()
    resumed.resume(before.state())
    assert resumed.begin_pass(3 * STEP).order == this_pass.order
    resumed.end_epoch()
    assert resumed.begin_pass(30 * STEP).order != this_pass.order


def test_another_pass_begins_the_next_epoch() -> None:
    position = make_position()
    first = position.begin_pass(STEP)
    first.record_yielded(STEP)
    first.record_yielded(2 * STEP)
    assert position.begin_pass(STEP).epoch == 1
    # The earlier pass is still iterated, for example by a generator that was not closed.
    first.record_yielded(3 * STEP)
    first.end(is_exhausted=True)
    assert (position.epoch, position.consumed) == (1, 0)


def test_a_resumed_shard_reads_the_rest_of_the_epoch_in_its_order() -> None:
    before = make_position()
    this_pass = before.begin_pass(STEP)
    this_pass.record_yielded(3 * STEP)
    before.count()

    resumed = make_position(world_size=3)
    resumed.resume(before.state())
    next_pass = resumed.begin_pass(4 * STEP)
    assert (next_pass.epoch, next_pass.first_row) == (0, 3 * STEP)
    assert next_pass.order == this_pass.order


def test_the_pass_after_a_resumed_one_is_the_next_epoch() -> None:
    position = make_position()
    position.resume({**_state_at(3 * STEP)})
    take_batches(position, 2)
    assert position.begin_pass(STEP).epoch == 1


def test_a_position_at_the_end_of_an_epoch_resumes_with_an_empty_pass() -> None:
    position = make_position()
    position.resume(_state_at(ROWS))
    this_pass = position.begin_pass(STEP)
    assert this_pass.first_row == ROWS
    this_pass.end(is_exhausted=True)
    assert (position.epoch, position.consumed) == (1, 0)


# --- loops that take a part of each epoch ---------------------------------------------------------


def take_and_report(position: ShardPosition, count: int) -> tuple[PassPosition, dict[str, Any]]:
    """Begin a pass that takes some batches, and report while the loop still holds its iterator."""
    this_pass = position.begin_pass(STEP)
    for taken in range(1, count + 1):
        this_pass.record_yielded(this_pass.first_row + taken * STEP)
    position.count()
    return this_pass, position.state()


def resumed_at(state: dict[str, Any]) -> tuple[int, int]:
    position = make_position()
    position.resume(state)
    this_pass = position.begin_pass(STEP)
    return this_pass.epoch, this_pass.first_row


def test_a_loop_that_takes_equal_parts_of_each_epoch_resumes_with_the_next_epoch() -> None:
    position = make_position()
    passes = [take_and_report(position, 6) for _ in range(3)]
    assert [resumed_at(state) for _, state in passes] == [(0, 6 * STEP), (2, 0), (3, 0)]


def test_a_loop_that_takes_all_batches_and_no_end_resumes_with_the_next_epoch() -> None:
    position = make_position()
    take_and_report(position, ROWS // STEP)
    assert resumed_at(take_and_report(position, ROWS // STEP)[1]) == (2, 0)


def test_a_report_within_a_part_resumes_there_and_the_part_continues() -> None:
    position = make_position()
    take_and_report(position, 6)
    state = take_and_report(position, 4)[1]
    assert resumed_at(state) == (1, 4 * STEP)
    resumed = make_position()
    resumed.resume(state)
    assert resumed_at(take_and_report(resumed, 2)[1]) == (2, 0)


def test_a_loop_whose_last_pass_was_exhausted_resumes_within_the_epoch() -> None:
    position = make_position()
    this_pass, _ = take_and_report(position, ROWS // STEP)
    this_pass.end(is_exhausted=True)
    assert resumed_at(take_and_report(position, ROWS // STEP)[1]) == (1, ROWS)


def test_a_loop_that_has_left_one_pass_resumes_within_the_next_epoch() -> None:
    position = make_position()
    take_batches(position, 3)
    assert resumed_at(take_and_report(position, 5)[1]) == (1, 5 * STEP)


def test_positions_of_earlier_versions_are_resumed() -> None:
    state = _state_at(3 * STEP)
    del state["batches"], state["left_batches"]
    assert resumed_at(state) == (0, 3 * STEP)


def test_the_end_of_a_resumed_pass_is_known_until_the_next_pass_begins() -> None:
    position = make_position()
    position.resume(_state_at(6 * STEP))
    position.begin_pass(STEP).end(is_exhausted=True)
    assert position.resumed_end == (0, 6 * STEP)
    position.begin_pass(STEP).end(is_exhausted=True)
    assert position.resumed_end is None


# --- resumes --------------------------------------------------------------------------------------


def test_the_first_pass_reads_the_position_to_resume() -> None:
    reads: list[str] = []

    def restore() -> dict[str, object]:
        reads.append("restore")
        return _state_at(2 * STEP)

    position = ShardPosition(spotfit.data.range(ROWS), ShardGroup(), restore=restore)
    assert position.begin_pass(STEP).first_row == 2 * STEP
    position.begin_pass(STEP)
    assert reads == ["restore"]


@pytest.mark.parametrize("has_saved", [True, False])
def test_the_position_to_resume_is_known_before_the_first_pass(*, has_saved: bool) -> None:
    state = _state_at(2 * STEP) if has_saved else {}
    position = ShardPosition(spotfit.data.range(ROWS), ShardGroup(), restore=lambda: state)
    assert position.resume_saved() is has_saved
    assert position.consumed == (2 * STEP if has_saved else 0)


def test_a_position_within_an_epoch_of_other_rows_is_refused() -> None:
    position = make_position(spotfit.data.range(ROWS + 1))
    with pytest.raises(ConfigError, match=r"'train' has other rows .*row 30 of epoch 0"):
        position.resume(_state_at(3 * STEP))


def test_other_rows_are_accepted_at_the_begin_of_an_epoch() -> None:
    position = make_position(spotfit.data.range(ROWS + 1))
    position.resume({**_state_at(0), "epoch": 4})
    assert position.begin_pass(STEP).epoch == 4


def test_a_resume_is_logged_with_its_position(capsys: pytest.CaptureFixture[str]) -> None:
    make_position().resume(_state_at(3 * STEP))
    output = capsys.readouterr().err
    assert "data.resumed" in output
    assert "consumed_rows=30" in output


def test_steps_count_the_oldest_batch_of_a_loop_that_reads_ahead() -> None:
    position = make_position()
    position.counts_steps = True
    this_pass = position.begin_pass(STEP)
    this_pass.record_yielded(STEP)
    this_pass.record_yielded(2 * STEP)
    position.count_step()
    position.count()  # a report
    assert position.consumed == STEP


def test_a_pass_that_was_read_ahead_ends_its_epoch_when_the_next_one_begins() -> None:
    position = make_position()
    position.counts_steps = True
    this_pass = position.begin_pass(STEP)
    this_pass.record_yielded(ROWS)
    this_pass.end(is_exhausted=True)
    position.count_step()
    assert (position.epoch, position.consumed) == (0, ROWS)
    assert position.begin_pass(STEP).epoch == 1


def test_the_end_of_an_epoch_depends_on_the_incomplete_last_step() -> None:
    position = make_position(spotfit.data.range(ROWS + 5))
    this_pass = position.begin_pass(STEP)
    this_pass.record_yielded(ROWS)
    position.count()
    assert not position.is_at_end
    position.begin_pass(STEP, drop_last=True).record_yielded(ROWS)
    position.count()
    assert position.is_at_end


def test_one_rank_reads_unshuffled_rows_in_the_order_of_the_dataset() -> None:
    assert choose_order(spotfit.data.range(ROWS), ShardGroup(), STEP).lanes == 1


def test_the_order_is_the_same_on_all_ranks_and_for_all_sizes_of_the_group() -> None:
    dataset = spotfit.data.range(10**7)
    orders = {
        choose_order(dataset, ShardGroup(rank=rank, world_size=size, world_sizes=(2, 3, 4)), 960)
        for size in (2, 3, 4)
        for rank in range(size)
    }
    assert len(orders) == 1


def _state_at(consumed: int) -> dict[str, Any]:
    position = make_position()
    position.begin_pass(STEP).record_yielded(consumed)
    position.count()
    return position.state()


def test_transforms_get_the_rows_of_their_batch_size() -> None:
    dataset = spotfit.data.range(10**6).map_batches(dict, batch_size=1024)
    assert choose_order(dataset, ShardGroup(), STEP).slice_rows == 1024


def test_the_rows_of_a_transform_are_limited() -> None:
    dataset = spotfit.data.range(10**6).map_batches(dict, batch_size=10**6)
    assert choose_order(dataset, ShardGroup(), STEP).slice_rows == 8192
