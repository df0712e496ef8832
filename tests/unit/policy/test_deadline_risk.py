"""What is recorded of a deadline that cannot be met, or cannot be planned."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.events import DeadlineAtRisk, FitEnded, FitStarted
from spotfit.model.leader_state import Training
from spotfit.policy.deadline_risk import find_deadline_risk, has_unknown_progress
from spotfit.testing.builders import a_committed_checkpoint
from tests.unit.policy.offered_run import SPOT, T0_MS, OfferedRun

DEADLINE_S = 2000.0
GIVEN: dict[str, Any] = {"deadline_ms": T0_MS + 2_000_000, "training_time_s": 1000.0}
MEASURED: dict[str, Any] = {"deadline_ms": T0_MS + 2_000_000}


def training_run(*progress: float | None, workers: tuple[int, int] = (2, 2), **cost: Any) -> Any:
    """A run that trains since 110 s and has committed these shares, one each 100 s."""
    run = OfferedRun(workers=workers, **cost)
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100)
    for n, share in enumerate(progress, start=1):
        checkpoint = a_committed_checkpoint(
            f"c{n}", report_index=n, progress=share, round_age_s=10.0 + n * 100.0
        )
        run.add(110 + n * 100, checkpoint)
    return run


def risk_at(run: OfferedRun, at_s: float) -> DeadlineAtRisk | None:
    fields: dict[str, Any] = {}
    if run.round is not None:
        fields["phase"] = Training(round=run.round, since=100.0)
    return find_deadline_risk(run.view, run.state(at_s, **fields), at_s)


def kind_at(run: OfferedRun, at_s: float) -> str | None:
    risk = risk_at(run, at_s)
    return None if risk is None else risk.risk


def test_a_run_without_a_deadline_has_no_risk() -> None:
    assert kind_at(training_run(None, training_time_s=1000.0), 9999) is None


# --- Checkpoints without progress -----------------------------------------------------------------


def test_a_first_checkpoint_without_progress_is_a_risk_with_its_remedy() -> None:
    risk = risk_at(training_run(None, **GIVEN), 210)
    assert risk is not None
    assert risk.risk == "no_progress"
    assert "16.7 min of it count as left" in risk.reason
    assert "progress=" in risk.remedy
    assert "total_steps=" in risk.remedy


def test_without_progress_and_training_time_the_time_left_is_unknown() -> None:
    risk = risk_at(training_run(None, **MEASURED), 210)
    assert risk is not None
    assert "unknown" in risk.reason


@pytest.mark.parametrize("progress", [(), (0.1,), (None, 0.1)])
def test_a_run_with_progress_or_without_checkpoints_has_no_risk(progress: Any) -> None:
    assert kind_at(training_run(*progress, **GIVEN), 320) is None


def test_checkpoints_of_an_earlier_fit_are_no_risk() -> None:
    run = training_run(None, **GIVEN)
    assert has_unknown_progress(run.view)
    run.add(300, FitEnded(outcome="cancelled"), FitStarted(spec=run.view.spec))
    assert not has_unknown_progress(run.view)


# --- A deadline that cannot be met ----------------------------------------------------------------


@pytest.mark.parametrize(("at_s", "risk"), [(1000, None), (1001, "late")])
def test_a_given_training_time_that_does_not_fit_is_a_risk(at_s: float, risk: str | None) -> None:
    run = OfferedRun(**GIVEN)
    assert kind_at(run, at_s) == risk, "1000 s are left"


def test_the_risk_has_the_figures() -> None:
    risk = risk_at(OfferedRun(**GIVEN), 1400)
    assert risk is not None
    assert "16.7 min of training are left with all workers, and 10.0 min of time" in risk.reason


def test_a_training_that_is_slower_than_the_estimate_is_a_risk() -> None:
    """The second interval has done 4 per cent in 100 s: 2300 s are left at 310 s."""
    assert kind_at(training_run(0.04, 0.08, **GIVEN), 310) == "late"


def test_the_speed_of_the_first_interval_is_no_risk() -> None:
    """It contains imports and compilation."""
    assert kind_at(training_run(0.01, **MEASURED), 210) is None


def test_a_smaller_group_is_no_risk_if_all_workers_can_meet_the_deadline() -> None:
    """Two workers need 2300 s, four at least half of that: 1150 s, of which two have done 545 s
    1090 s later."""
    run = training_run(0.04, 0.08, workers=(2, 4), **MEASURED)
    assert kind_at(run, 310) is None
    assert kind_at(run, 1380) is None
    assert kind_at(run, 1420) == "late"


def test_the_training_since_the_last_commit_counts() -> None:
    """At 1700 s 300 s are left, of which the commit at 310 s does not know."""
    assert kind_at(training_run(0.1, 0.2, **GIVEN), 1700) is None


def test_without_progress_the_work_left_is_no_risk_before_the_deadline() -> None:
    run = training_run(None, **GIVEN)
    run.add(210, DeadlineAtRisk(risk="no_progress", reason="known"))
    assert kind_at(run, 1999) is None
    assert kind_at(run, 2001) == "late"


def test_a_deadline_that_has_passed_is_a_risk_although_nothing_is_known() -> None:
    risk = risk_at(OfferedRun(**MEASURED), 2001)
    assert risk is not None
    assert risk.reason == "the deadline has passed; the training has not ended"


def test_a_recorded_risk_is_not_found_again() -> None:
    run = OfferedRun(**GIVEN)
    found = risk_at(run, 1500)
    assert found is not None
    run.add(1500, found)
    assert risk_at(run, 1600) is None


def test_a_new_fit_has_new_risks() -> None:
    run = OfferedRun(**GIVEN)
    run.add(1500, DeadlineAtRisk(risk="late", reason="known"), FitEnded(outcome="cancelled"))
    run.add(1500, FitStarted(spec=run.view.spec))
    assert kind_at(run, 1600) == "late"


def test_nothing_is_found_before_the_storages_clock_is_measured() -> None:
    run = OfferedRun(**GIVEN)
    assert find_deadline_risk(run.view, run.state(1500, wall_ms=None), 1500) is None
