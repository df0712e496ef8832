"""How far a run is from its deadline, while it trains and after its end."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from spotfit.client.console import format_summary
from spotfit.client.deadline_status import DeadlineStatus, deadline_status, format_slack
from spotfit.model.events import DeadlineAtRisk, FitEnded, TrainingEnded
from spotfit.testing.builders import a_committed_checkpoint
from tests.unit.policy.offered_run import SPOT, T0_MS, OfferedRun

LIMITS: dict[str, Any] = {"deadline_ms": T0_MS + 2_000_000, "training_time_s": 1000.0}


def a_run(progress: float | None = 0.25, **limits: Any) -> OfferedRun:
    """A run that trains since 110 s, and has committed at 150 s."""
    run = OfferedRun(**limits)
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100)
    run.add(150, a_committed_checkpoint(progress=progress, round_age_s=50.0))
    return run


def status_at(run: OfferedRun, at_s: float) -> DeadlineStatus:
    found = deadline_status(run.view, T0_MS + round(at_s * 1000))
    assert found is not None
    return found


def test_a_run_without_a_deadline_has_no_status() -> None:
    assert deadline_status(a_run(training_time_s=1000.0).view, T0_MS) is None


def test_the_slack_is_the_time_left_without_the_work_left() -> None:
    status = status_at(a_run(**LIMITS), 200)
    assert status == DeadlineStatus(at_ms=T0_MS + 2_000_000, slack_s=1800.0 - 700.0)
    assert format_slack(status) == "18.3 min of slack"


def test_negative_slack_is_lateness() -> None:
    run = a_run(**LIMITS, uses_on_demand=False)
    run.add(1000, a_committed_checkpoint("c2", report_index=2, progress=0.3, round_age_s=900.0))
    status = status_at(run, 1000)
    assert status.slack_s is not None
    assert status.slack_s < 0
    assert format_slack(status).endswith(" late")


@pytest.mark.parametrize(
    ("progress", "limits"),
    [(None, LIMITS), (0.25, {**LIMITS, "training_time_s": None})],
    ids=["no progress", "no training time"],
)
def test_an_unknown_slack_is_none(progress: float | None, limits: dict[str, Any]) -> None:
    run = OfferedRun(**limits)
    if progress is None:
        run = a_run(None, **limits)
    status = status_at(run, 200)
    assert status.slack_s is None
    assert format_slack(status) == ""


def test_recorded_risks_are_part_of_the_status() -> None:
    run = a_run(**LIMITS)
    run.add(160, DeadlineAtRisk(risk="late", reason="slow"))
    assert status_at(run, 200).risks == ("slow",)


@pytest.mark.parametrize(
    ("end_s", "slack_s", "text"),
    [(1990, 10.0, "met 10 s early"), (2019, -19.0, "missed by 19 s")],
)
def test_a_finished_run_has_met_or_missed_its_deadline(
    end_s: float, slack_s: float, text: str
) -> None:
    run = a_run(**LIMITS)
    run.add(end_s, FitEnded(outcome="finished"))
    status = status_at(run, 9999)
    assert (status.slack_s, status.is_final) == (slack_s, True)
    assert format_slack(status) == text
    assert f"; deadline {text}; " in format_summary(run.view, "/runs/a")


def test_validations_after_the_training_do_not_count() -> None:
    run = a_run(**LIMITS)
    run.add(1990, TrainingEnded(fit_end=FitEnded(outcome="finished")))
    assert status_at(run, 3000).slack_s == 10.0
    run.add(5000, FitEnded(outcome="finished"))
    assert status_at(run, 6000).slack_s == 10.0


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_a_run_that_has_not_finished_has_no_final_slack(
    outcome: Literal["failed", "cancelled"],
) -> None:
    run = a_run(**LIMITS)
    run.add(1990, FitEnded(outcome=outcome))
    assert status_at(run, 1991).slack_s is None
    assert "deadline" not in format_summary(run.view, "/runs/a")
