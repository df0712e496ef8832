"""When a round of an elastic group ends without waiting for its next commit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.model.leader_state import Training
from spotfit.model.market_record import MarketRecord, RoundRecord
from spotfit.model.spec import RunTiming
from spotfit.model.view import View
from spotfit.policy.idle_machines import MAX_REPEATED_SHARE, reason_to_repeat
from spotfit.testing.builders import a_member, a_round, a_spec, a_training, a_view

OPEN = RoundRecord(tokens=(), workers=1, start_progress=0.0, committed_age_s=10.0)
MEASURED = MarketRecord(
    round=replace(OPEN, has_committed=True),
    commit_gaps_s=(300.0, 200.0),
    first_gaps_s=(900.0,),
    startups_s=(5.0,),
)


def training_with(workers: int, **fields: object) -> Training:
    """A round that was opened at 0; its last commit, or its start, was at 10 s."""
    return a_training(round=a_round(members=[a_member(n) for n in range(workers)]), **fields)


def a_run(record: MarketRecord) -> View:
    spec = a_spec(timing=RunTiming(round_fill_timeout_s=20.0))
    return a_view(spec=spec, market=record, round_startup_s=10.0)


def reason(
    record: MarketRecord,
    now: float,
    *,
    workers: int = 1,
    slots: int = 2,
    is_start_expected: bool = False,
    **fields: object,
) -> str:
    training = training_with(workers, **fields)
    return reason_to_repeat(
        a_run(record), training, now, slots=slots, is_start_expected=is_start_expected
    )


def test_a_round_ends_if_more_work_would_be_lost_by_waiting() -> None:
    # 2 · 60 s · 1 worker are less than the 140 s for which the second one would wait.
    assert reason(MEASURED, 70.0) == (
        "repeating 60 s of 1 worker, as 1 more worker would wait for 2.3 min"
    )
    assert reason(MEASURED, 80.0) == ""


def test_the_more_workers_repeat_their_work_the_later_the_round_ends() -> None:
    assert reason(MEASURED, 40.0, workers=4, slots=5) == ""
    assert reason(MEASURED, 40.0, workers=4, slots=8) != ""


def test_one_more_restart_counts_if_further_machines_start() -> None:
    assert reason(MEASURED, 60.0)
    assert not reason(MEASURED, 60.0, is_start_expected=True)


def test_a_checkpoint_that_is_being_uploaded_is_waited_for() -> None:
    assert not reason(MEASURED, 20.0, uploading_ranks=frozenset({0}))


def test_the_first_interval_of_a_round_is_compared_with_other_first_ones() -> None:
    first = replace(MEASURED, round=OPEN)
    assert reason(first, 200.0)
    assert not reason(MEASURED, 200.0)


def test_without_a_measurement_an_interval_of_ten_minutes_is_assumed() -> None:
    unknown = MarketRecord(round=OPEN)
    assert reason(unknown, 205.0)
    assert not reason(unknown, 215.0)


def test_a_round_whose_commit_is_overdue_ends_if_many_workers_wait() -> None:
    # A smaller group takes longer from one commit to the next.
    assert not reason(MEASURED, 300.0, slots=4)
    assert not reason(MEASURED, 500.0, slots=4, workers=2)
    assert reason(MEASURED, 600.0, slots=5)


def test_no_more_than_ten_minutes_are_repeated() -> None:
    assert reason(MEASURED, 609.0, slots=16)
    assert not reason(MEASURED, 611.0, slots=16)


def test_a_suggested_save_has_time() -> None:
    assert not reason(MEASURED, 50.0, slots=3, save_suggested_at=40.0)
    assert reason(MEASURED, 50.0, slots=12, save_suggested_at=40.0)


def test_workers_that_still_start_are_not_interrupted() -> None:
    view = replace(a_run(MEASURED), round_startup_s=None)
    training = training_with(1)
    assert not reason_to_repeat(view, training, 20.0, slots=8, is_start_expected=False)


@pytest.mark.parametrize("size", [2, 4, 7, 16, 100])
def test_the_repeated_work_of_the_group_is_bounded(size: int) -> None:
    interval_s, longest_s = 200.0, 0.0
    for workers in range(1, size):
        for age_s in range(int(interval_s)):
            if reason(MEASURED, 10.0 + age_s, workers=workers, slots=size):
                longest_s = max(longest_s, age_s * workers / size)
    assert 0 < longest_s <= MAX_REPEATED_SHARE * interval_s
