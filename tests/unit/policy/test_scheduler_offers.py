"""The scheduler's rules of a run that chooses its offers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    CancelRequested,
    DeadlineAtRisk,
    FailureCause,
    FitEnded,
    GroupsReleased,
    GroupWaiting,
    LeaderElected,
    MachinesChosen,
    NodeLost,
    PricesChanged,
    RoundClosed,
)
from spotfit.model.group import NodeState
from spotfit.model.leader_state import NoRound, Returned, Training
from spotfit.policy.actions import (
    AppendEvent,
    LeaderAction,
    ReleaseGroups,
    RequestMachines,
    Wait,
)
from spotfit.policy.cost_budget import SAVE_S
from spotfit.policy.scheduler import next_action, next_round
from spotfit.testing.builders import a_group_status, an_agent_id, member_statuses
from tests.unit.policy.networked_run import a_networked_run, close_round, standby
from tests.unit.policy.offered_run import (
    HOUR_S,
    ON_DEMAND,
    SPOT,
    T0_MS,
    OfferedRun,
    an_offer,
)

NOW = 1000.0


def action(run: OfferedRun, at_s: float = 0.0, **fields: Any) -> LeaderAction:
    fields = {"members": {}, **fields} if not run.members else fields
    return next_action(run.view, run.state(at_s, **fields), NOW)


def event(run: OfferedRun, at_s: float = 0.0, **fields: Any) -> Any:
    appended = action(run, at_s, **fields)
    assert isinstance(appended, AppendEvent), appended
    return appended.event


def training_on_spot(**cost: Any) -> OfferedRun:
    run = OfferedRun(**cost)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.bill(1, "t-1", started_s=0)
    run.connect("t-1")
    run.train(100)
    return run


def training(run: OfferedRun, **fields: Any) -> Training:
    assert run.round is not None
    usual: dict[str, Any] = {"since": NOW - 100, "running_ranks": {0, 1}}
    return Training(round=run.round, **{**usual, **fields})


# --- The choice -----------------------------------------------------------------------------------


def test_the_first_choice_is_recorded_before_machines_are_requested() -> None:
    chosen = event(OfferedRun())
    assert isinstance(chosen, MachinesChosen)
    assert chosen.workers == {"spot": 2}


def test_an_equal_choice_is_not_recorded_again() -> None:
    run = OfferedRun()
    run.choose(0, "spot")
    assert isinstance(action(run), RequestMachines)


def test_a_changed_standing_request_is_recorded() -> None:
    run = training_on_spot()
    run.choose(200, "spot", standing="on-demand")
    assert event(run, 300, phase=training(run)) == MachinesChosen(
        workers={"spot": 2}, reason="the machines that run are not much dearer than others"
    )


def test_a_changed_reason_is_not_recorded() -> None:
    run = training_on_spot()
    assert isinstance(action(run, 300, phase=training(run)), Wait)


def test_the_choice_is_made_again_within_half_a_minute() -> None:
    run = training_on_spot()
    waiting = action(run, 300, phase=training(run))
    assert isinstance(waiting, Wait)
    assert waiting.until <= NOW + 30.0


def test_a_run_whose_training_is_over_chooses_nothing() -> None:
    run = OfferedRun()
    run.add(0, CancelRequested(reason="by the user", save=False))
    assert isinstance(event(run), FitEnded)
    pending = replace(run.view, cancel_reason=None, pending_fit_end=FitEnded(outcome="finished"))
    decided = next_action(pending, run.state(0, members={}), NOW)
    assert not (isinstance(decided, AppendEvent) and isinstance(decided.event, MachinesChosen))


def test_a_budget_for_no_machines_ends_the_run() -> None:
    run = OfferedRun(budget_usd=0.01)
    ended = event(run)
    assert isinstance(ended, CancelRequested)
    assert ended.is_cost_budget
    run.add(0, ended)
    end = event(run)
    assert isinstance(end, FitEnded)
    assert (end.outcome, end.is_cost_budget) == ("cancelled", True)


# --- Requests -------------------------------------------------------------------------------------


def test_missing_machines_are_requested_of_the_chosen_offer() -> None:
    run = OfferedRun()
    run.choose(0, "spot")
    reason = "2 of 2 workers need a machine of spot"
    assert action(run) == RequestMachines(2, reason, offer=SPOT)


def test_a_request_has_the_price_in_force() -> None:
    run = OfferedRun()
    raised = an_offer("spot", 1.5)
    run.add(0, PricesChanged(offers=(raised,)))
    run.choose(0, "spot")
    requested = action(run)
    assert isinstance(requested, RequestMachines)
    assert requested.offer == raised


def test_a_refused_offer_is_requested_after_a_pause() -> None:
    run = OfferedRun(SPOT, uses_on_demand=False, budget_usd=100.0)
    run.choose(0, standing="spot")
    run.refuse(10, "t-0", SPOT)
    waiting = action(run, 10.4)
    assert isinstance(waiting, Wait)
    assert waiting.until == pytest.approx(NOW + 0.6)
    assert waiting.reason == "spot was refused 1 times: no capacity"
    assert isinstance(action(run, 11.0), RequestMachines)


def test_an_offer_of_an_unusable_network_is_requested_after_a_pause() -> None:
    far, sibling = (an_offer(name, 1.0, network="b") for name in ("far", "sibling"))
    run = OfferedRun(sibling, far, uses_on_demand=False, budget_usd=100.0)
    run.request(0, "t-1", far, network="b")
    lost = NodeLost(token=Token("t-1"), node=0, agent=None, reason="", is_unusable=True)
    run.add(10, lost, replace(lost, node=1), GroupsReleased(token=Token("t-1")))
    run.choose(10, standing="sibling")
    reason = "machines of the network of sibling could train nothing"
    assert action(run, 45.0) == Wait(NOW + 25.0, reason)


def test_a_refused_offer_does_not_delay_the_request_of_another() -> None:
    run = OfferedRun()
    run.refuse(0, "t-0", SPOT)
    run.choose(500, "on-demand", standing="spot")
    run.refuse(500, "t-2", SPOT)
    requested = action(run, 500.1)
    assert isinstance(requested, RequestMachines)
    assert requested.offer == ON_DEMAND


def test_a_cancelled_run_requests_nothing() -> None:
    run = OfferedRun()
    run.choose(0, "spot")
    run.add(0, CancelRequested(reason="by the user", save=False))
    assert isinstance(event(run), FitEnded)


def test_a_reason_to_wait_is_recorded_while_the_run_trains() -> None:
    run = training_on_spot()
    run.choose(200, "spot", standing="on-demand")
    run.request(200, "t-2", ON_DEMAND)
    state = run.state(210)
    waiting = replace(state.group_statuses[Token("t-2")], refusal="no capacity")
    statuses = {**state.group_statuses, Token("t-2"): waiting}
    recorded = event(run, 210, phase=training(run), group_statuses=statuses)
    assert recorded == GroupWaiting(token=Token("t-2"), reason="no capacity")


# --- Prices ---------------------------------------------------------------------------------------


def test_changed_prices_are_recorded_before_the_choice() -> None:
    raised = an_offer("spot", 1.5)
    assert event(OfferedRun(), listed_offers=(raised,)) == PricesChanged(offers=(raised,))


def test_equal_prices_are_not_recorded() -> None:
    assert isinstance(event(OfferedRun(), listed_offers=(SPOT, ON_DEMAND)), MachinesChosen)


# --- Deadline -------------------------------------------------------------------------------------


def late_run() -> OfferedRun:
    """A run of 1000 s whose deadline is 500 s after its start."""
    return training_on_spot(deadline_ms=T0_MS + 500_000, training_time_s=1000.0)


def test_a_deadline_that_cannot_be_met_is_recorded_once() -> None:
    run = late_run()
    risk = event(run, 120, phase=training(run))
    assert isinstance(risk, DeadlineAtRisk)
    run.add(120, risk)
    assert isinstance(action(run, 130, phase=training(run)), Wait)


def test_no_risk_is_recorded_once_the_function_has_returned() -> None:
    run = late_run()
    assert run.round is not None
    returned = Returned(
        round=run.round, since=NOW, opened_at=NOW - 100, result_key="", workers_stopped=False
    )
    assert isinstance(action(run, 120, phase=returned), Wait)


# --- Budget ---------------------------------------------------------------------------------------


def test_a_used_budget_cancels_the_run_with_a_save() -> None:
    run = training_on_spot(budget_usd=1.0)
    cancelled = event(run, HOUR_S, phase=training(run))
    assert isinstance(cancelled, CancelRequested)
    assert (cancelled.save, cancelled.is_cost_budget) == (True, True)


def test_the_budget_is_examined_in_time() -> None:
    run = training_on_spot(budget_usd=1.0)
    # Two machines at $1: 30 min, of which 155 s are kept for the stop.
    waiting = action(run, 1800.0 - 155.0 - 7.0, phase=training(run))
    assert isinstance(waiting, Wait)
    assert waiting.until == pytest.approx(NOW + 7.0)
    assert waiting.reason == "the budget of the run"


def test_the_last_save_of_a_used_budget_has_the_time_that_was_kept() -> None:
    run = training_on_spot(budget_usd=1.0)
    run.add(1700, CancelRequested(reason="used up", save=True, is_cost_budget=True))
    waits = training(run, save_requested_at=NOW - SAVE_S + 1, uploading_ranks={0})
    waiting = action(run, 1800, phase=waits)
    assert isinstance(waiting, Wait)
    assert waiting.until == pytest.approx(NOW + 1)
    late = training(run, save_requested_at=NOW - SAVE_S, uploading_ranks={0})
    ended = event(run, 1800, phase=late)
    assert isinstance(ended, FitEnded)
    assert ended.is_cost_budget


# --- Moves ----------------------------------------------------------------------------------------


def a_move() -> OfferedRun:
    run = OfferedRun()
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND)
    run.connect("t-1")
    run.train(100)
    run.choose(200, "spot")
    run.request(200, "t-2", SPOT)
    run.connect("t-2", first=2)
    return run


def test_between_rounds_the_leadership_moves_to_a_machine_of_the_chosen_offer() -> None:
    run = a_move()
    run.add(210, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="moving"))
    handover = event(run, 210)
    assert isinstance(handover, LeaderElected)
    assert handover.leader == run.members[2].member.agent


@pytest.mark.parametrize(
    ("elapsed_s", "joined", "waits"), [(0, 1, True), (0, 2, False), (60, 1, False)]
)
def test_after_a_move_the_next_round_waits_for_the_chosen_machines(
    *, elapsed_s: float, joined: int, waits: bool
) -> None:
    run = a_move()
    run.add(210, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="moving"))
    members = run.members[: 2 + joined]
    state = run.state(
        210,
        members=member_statuses(*members),
        agent_id=members[2].member.agent,
        phase=NoRound(since=NOW - elapsed_s),
        leading_since=NOW - elapsed_s,
    )
    opened = next_round(run.view, state, NOW)
    assert isinstance(opened, Wait) == waits
    if isinstance(opened, Wait):
        assert opened.reason == "machines of spot connect to the leader"
        assert opened.until == NOW + run.view.spec.timing.rejoin_timeout_s


def test_the_next_round_does_not_wait_for_chosen_machines_that_are_not_requested() -> None:
    run = OfferedRun()
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND)
    run.connect("t-1")
    run.choose(200, "spot")
    opened = next_round(run.view, run.state(210, phase=NoRound(since=NOW)), NOW)
    assert not isinstance(opened, Wait)


def test_between_rounds_the_run_is_handed_over_to_another_network() -> None:
    run = a_networked_run()
    close_round(run, 300)
    ready = {"standby": standby(2, 3), "phase": NoRound(since=NOW)}
    handover = event(run, 310, **ready)
    assert isinstance(handover, LeaderElected)
    assert (handover.leader, handover.network) == (an_agent_id(2), "b")
    run.add(310, CancelRequested(reason="cancelled"))
    assert isinstance(event(run, 310, **ready), FitEnded)


def test_a_round_does_not_wait_for_chosen_machines_of_another_network() -> None:
    run = a_networked_run()
    close_round(run, 300)
    opened = next_round(run.view, run.state(310, phase=NoRound(since=NOW)), NOW)
    assert not isinstance(opened, Wait)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_group_in_another_network_is_released_after_its_agents_have_exited(
    *, is_running: bool
) -> None:
    run = a_networked_run(chosen="near")
    run.add(300, PricesChanged(offers=(an_offer("far", 9.0, network="b"),)))
    for node in range(2):
        run.add(
            300, NodeLost(token=Token("t-2"), node=node, agent=an_agent_id(2 + node), reason="")
        )
    states = [NodeState.RUNNING if is_running else NodeState.GONE] * 2
    statuses = {Token("t-1"): a_group_status(), Token("t-2"): a_group_status(*states)}
    lost_at = {Token("t-2"): NOW - 1.0}
    phase = training(run, since=NOW - 10)
    fields = {"phase": phase, "group_statuses": statuses, "loss_recorded_at": lost_at}
    decided = action(run, 310, **fields)
    assert isinstance(decided, Wait if is_running else ReleaseGroups)


def test_machines_of_another_offer_are_released_once_a_round_runs_without_them() -> None:
    run = a_move()
    run.add(210, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="moving"))
    moved = run.members
    run.members = moved[2:]
    run.train(220)
    run.members = moved
    phase = training(run, since=NOW - 10)
    lost = event(run, 240, phase=phase, agent_id=moved[2].member.agent)
    assert isinstance(lost, NodeLost)
    assert (lost.token, lost.reason) == (
        Token("t-1"),
        "it was replaced by machines of another offer",
    )
