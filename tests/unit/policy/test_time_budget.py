"""The time budget of a fit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.model.events import CancelRequested, FitEnded
from spotfit.model.view import View
from spotfit.policy.actions import AppendEvent, Wait
from spotfit.policy.scheduler import next_action
from spotfit.policy.time_budget import AGENT_MARGIN_S, end_of_time_budget, is_overdue
from spotfit.testing.builders import a_leader_state, a_round, a_spec, a_training, a_view

VIEW = a_view(spec=a_spec(time_budget_s=3600.0), round=a_round())
REASON = "the time budget of 60.0 min is used up"


def test_a_fit_within_its_budget_waits_for_its_end() -> None:
    state = a_leader_state(elapsed_s=3590.0, phase=a_training())
    assert next_action(VIEW, state, 50.0) == Wait(60.0, "the time budget of the run")


def test_a_fit_without_a_budget_never_ends_by_it() -> None:
    assert end_of_time_budget(a_view(), a_leader_state(elapsed_s=1e9), 0.0) is None


@pytest.mark.parametrize("view", [VIEW, replace(VIEW, round=None)], ids=["in a round", "waiting"])
def test_a_used_up_budget_cancels_the_fit_after_a_save(view: View) -> None:
    action = next_action(view, a_leader_state(elapsed_s=3600.0), 50.0)
    assert action == AppendEvent(CancelRequested(reason=REASON, save=True, is_time_budget=True))


def test_the_end_of_the_fit_states_the_budget() -> None:
    view = replace(VIEW, cancel_reason=REASON, is_time_budget_used=True)
    action = next_action(view, a_leader_state(elapsed_s=3600.0, phase=a_training()), 50.0)
    assert action == AppendEvent(FitEnded(outcome="cancelled", reason=REASON, is_time_budget=True))


def test_a_training_that_has_ended_keeps_its_result() -> None:
    finished = FitEnded(outcome="finished", result_key="r")
    view = replace(VIEW, round=None, pending_fit_end=finished)
    assert next_action(view, a_leader_state(elapsed_s=3600.0), 50.0) == AppendEvent(finished)


def test_an_agent_exits_by_itself_after_a_margin() -> None:
    assert not is_overdue(VIEW, 3600.0 + AGENT_MARGIN_S - 1)
    assert is_overdue(VIEW, 3600.0 + AGENT_MARGIN_S)
    assert not is_overdue(replace(VIEW, fit_end=FitEnded(outcome="finished")), 1e9)
    assert not is_overdue(a_view(), 1e9)
