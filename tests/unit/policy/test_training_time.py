"""The time that a run still trains, and that its starts take."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.events import FailureCause, RoundClosed
from spotfit.model.leader_state import Training
from spotfit.model.market_record import MarketRecord, MeasuredSpeed
from spotfit.policy.training_time import (
    changeover_s,
    complete_training_s,
    start_time_s,
    work_left_at_s,
    work_left_s,
)
from spotfit.testing.builders import a_committed_checkpoint, a_spec, a_view
from tests.unit.policy.offered_run import LEASE_S, SPOT, START_S, T0_MS, OfferedRun


def test_the_start_time_is_given_until_it_was_measured() -> None:
    assert start_time_s(OfferedRun().view) == START_S


@pytest.mark.parametrize(
    ("durations_s", "expected_s"),
    [((50.0,), 50.0), ((60.0, 50.0), 60.0), (tuple(range(10, 0, -1)), 9), (tuple(range(11)), 9)],
)
def test_of_ten_starts_the_slowest_is_ignored(
    durations_s: tuple[float, ...], expected_s: float
) -> None:
    assert start_time_s(a_view(market=MarketRecord(start_durations_s=durations_s))) == expected_s


def test_a_changeover_is_detection_start_and_repeated_work() -> None:
    record = MarketRecord(start_durations_s=(50.0,), commit_gaps_s=(30.0, 70.0, 10.0))
    view = a_view(market=record)
    assert changeover_s(view) == view.spec.timing.lease_timeout_s + 50.0 + 70.0


def test_a_changeover_without_commits_is_detection_and_start() -> None:
    assert changeover_s(OfferedRun().view) == LEASE_S + START_S


@pytest.mark.parametrize(
    ("measured_s", "given_s", "expected_s"),
    [
        (0.0, None, None),
        (0.0, 500.0, 500.0),
        (40.0, None, 400.0),
        (40.0, 500.0, 500.0),
        (60.0, 500.0, 600.0),
    ],
    ids=["unknown", "given", "measured", "given is longer", "measured is longer"],
)
def test_the_complete_training_takes_the_longer_of_measurement_and_estimate(
    measured_s: float, given_s: float | None, expected_s: float | None
) -> None:
    spec = OfferedRun(training_time_s=given_s).view.spec
    speeds = {2: MeasuredSpeed(share=0.1, measured_s=measured_s)} if measured_s else {}
    record = MarketRecord(speeds=speeds)
    assert complete_training_s(a_view(spec=spec, market=record)) == expected_s


def a_run(**cost: Any) -> OfferedRun:
    """A run that trains since 110 s, with a commit of a quarter 50 s after the round was opened."""
    run = OfferedRun(**cost)
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100)
    run.add(150, a_committed_checkpoint(progress=0.25, round_age_s=50.0))
    return run


def training(run: OfferedRun, since: float = 0.0) -> Training:
    assert run.round is not None
    return Training(round=run.round, since=since)


def test_nothing_is_known_without_an_estimate_and_a_measurement() -> None:
    run = OfferedRun()
    assert work_left_s(run.view, run.state(0), 0.0) is None
    assert work_left_s(a_view(spec=a_spec()), run.state(0), 0.0) is None


def test_all_work_is_left_before_the_first_commit() -> None:
    run = OfferedRun(training_time_s=1000.0)
    assert work_left_s(run.view, run.state(0), 0.0) == 1000.0


def test_without_a_round_the_work_since_the_last_checkpoint_is_left() -> None:
    run = a_run(training_time_s=1000.0)
    assert work_left_s(run.view, run.state(200), 100.0) == 750.0


def test_the_training_since_the_last_commit_is_done() -> None:
    run = a_run(training_time_s=1000.0)
    state = run.state(200, phase=training(run))
    # The round is 100 s old; its commit was made at 50 s.
    assert work_left_s(run.view, state, 100.0) == 700.0


def test_a_round_that_starts_has_trained_nothing() -> None:
    run = OfferedRun(training_time_s=1000.0)
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100, startup_s=40.0)
    assert work_left_s(run.view, run.state(130, phase=training(run)), 40.0) == 1000.0
    assert work_left_s(run.view, run.state(150, phase=training(run)), 50.0) == 990.0


def test_a_round_that_has_not_called_the_training_function_has_trained_nothing() -> None:
    run = a_run(training_time_s=1000.0)
    view = run.view
    starting = a_view(spec=view.spec, market=view.market, round=run.round, round_startup_s=None)
    assert work_left_s(starting, run.state(200, phase=training(run)), 100.0) == 750.0


def test_a_training_that_takes_longer_than_expected_has_nothing_left() -> None:
    run = a_run(training_time_s=100.0)
    assert work_left_s(run.view, run.state(500, phase=training(run)), 400.0) == 0.0


def test_a_process_that_does_not_lead_computes_the_same_from_the_storages_clock() -> None:
    run = a_run(training_time_s=1000.0, deadline_ms=T0_MS + 2_000_000)
    # The commit was written 50 s ago.
    assert work_left_at_s(run.view, T0_MS + 200_000) == 700.0
    run.add(200, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost"))
    assert work_left_at_s(run.view, T0_MS + 300_000) == 750.0
