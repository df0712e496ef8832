"""The choice of offers, from the journal and the leader's observations."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import FailureCause, GroupsReleased, GroupWaiting, NodeLost, RoundClosed
from spotfit.model.group import NodeState
from spotfit.model.offer import Market
from spotfit.model.spec import FeederSpec, RunTiming
from spotfit.policy.cost_budget import affords
from spotfit.policy.machine_choice import choose_machines, deadline_state
from spotfit.testing.builders import a_group_status, an_agent_id
from tests.unit.policy.offered_run import (
    DEARER,
    HOUR_S,
    LEASE_S,
    ON_DEMAND,
    SPOT,
    START_S,
    T0_MS,
    OfferedRun,
    an_offer,
)

# Of the storage's clock, see `deadline_state`.
CLOCK_MARGIN_S = 5.0
INTERVAL_S = 30.0
ON_SPOT, ON_ON_DEMAND = {"spot": 2}, {"on-demand": 2}
WAITING: dict[str, int] = {}


def a_run(*offers: Any, deadline_s: float | None = None, **cost: Any) -> OfferedRun:
    deadline_ms = None if deadline_s is None else T0_MS + round(deadline_s * 1000)
    return OfferedRun(*offers, deadline_ms=deadline_ms, **cost)


def workers(run: OfferedRun, at_s: float = 0.0, **fields: Any) -> dict[str, int] | None:
    chosen = choose_machines(run.view, run.state(at_s, **fields), at_s)
    return None if chosen is None else chosen.workers


def standing(run: OfferedRun, at_s: float = 0.0, **fields: Any) -> str:
    chosen = choose_machines(run.view, run.state(at_s, **fields), at_s)
    assert chosen is not None
    return chosen.standing_offer


def training_on(run: OfferedRun, offer: Any, *, network: str = "") -> None:
    """Machines of the offer are chosen and train since 110 s."""
    run.choose(0, offer.name)
    run.request(0, "t-1", offer, network=network)
    run.connect("t-1")
    run.train(100)


# --- Which policy ---------------------------------------------------------------------------------


def test_the_backend_chooses_without_limits() -> None:
    assert workers(a_run(uses_on_demand=False, machines={})) is None


def test_a_deadline_with_much_slack_is_kept_on_spot() -> None:
    assert workers(a_run(deadline_s=10 * HOUR_S, training_time_s=HOUR_S)) == ON_SPOT


def test_workers_never_use_an_offer_of_feeders() -> None:
    feeders = FeederSpec(max_nodes=1, offers=(an_offer("cpu#feeders", 0.01),))
    run = a_run(deadline_s=10 * HOUR_S, training_time_s=HOUR_S, feeders=feeders)
    assert workers(run) == ON_SPOT


def test_a_deadline_with_little_slack_is_kept_on_demand() -> None:
    run = a_run(deadline_s=HOUR_S + 150.0, training_time_s=HOUR_S)
    assert workers(run) == ON_ON_DEMAND


def test_spot_is_waited_for_with_slack() -> None:
    run = a_run(deadline_s=10 * HOUR_S, training_time_s=HOUR_S)
    run.refuse(0, "t-0", SPOT)
    assert workers(run, 1) == WAITING


def test_the_reason_of_the_choice_has_the_slack() -> None:
    run = a_run(deadline_s=10 * HOUR_S, training_time_s=HOUR_S)
    chosen = choose_machines(run.view, run.state(0), 0.0)
    assert chosen is not None
    assert "9.0 h of slack" in chosen.reason


def test_with_an_unknown_training_time_spot_is_not_waited_for() -> None:
    run = a_run(deadline_s=10 * HOUR_S)
    run.refuse(0, "t-0", SPOT)
    chosen = choose_machines(run.view, run.state(HOUR_S), HOUR_S)
    assert chosen is not None
    assert chosen.workers == ON_ON_DEMAND
    assert chosen.reason == "spot machines are refused; the remaining training time is unknown"


def test_a_fallback_without_deadline_does_not_wait() -> None:
    run = a_run()
    assert workers(run) == ON_SPOT
    run.refuse(0, "t-0", SPOT)
    chosen = choose_machines(run.view, run.state(HOUR_S), HOUR_S)
    assert chosen is not None
    assert (chosen.workers, chosen.reason) == (ON_ON_DEMAND, "spot machines are refused")


def test_on_demand_machines_are_not_chosen_without_fallback() -> None:
    run = a_run(deadline_s=1.0, training_time_s=HOUR_S, uses_on_demand=False)
    assert workers(run) == ON_SPOT
    run.refuse(0, "t-0", SPOT)
    assert workers(run, HOUR_S) == WAITING


def test_the_last_choice_stays_until_the_storages_clock_is_measured() -> None:
    run = a_run(deadline_s=10 * HOUR_S, training_time_s=HOUR_S)
    assert workers(run, wall_ms=None) is None
    run.choose(0, "on-demand")
    assert workers(run, 1, wall_ms=None) == ON_ON_DEMAND


def test_without_a_deadline_the_clock_is_not_needed() -> None:
    assert workers(a_run(), wall_ms=None) == ON_SPOT


def test_a_leader_without_its_own_agent_keeps_the_choice() -> None:
    run = a_run()
    run.choose(0, "on-demand")
    assert workers(run, 1, is_headless=False) == ON_ON_DEMAND
    assert workers(run, 1, is_headless=True) == ON_SPOT


def test_the_last_choice_stays_until_all_groups_are_observed() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    training_on(run, SPOT)
    run.choose(200, "dearer")
    assert workers(run, 201, group_statuses={}, leading_since=201.0) == {"dearer": 2}
    assert workers(run, 201) == ON_SPOT


# --- The state of the deadline --------------------------------------------------------------------


def test_the_state_of_the_deadline_is_relative_to_the_storages_clock() -> None:
    run = a_run(deadline_s=1000.0, training_time_s=300.0)
    state = deadline_state(run.view, run.state(100), 0.0)
    assert state is not None
    assert state.time_left_s == 900.0 - CLOCK_MARGIN_S
    assert state.work_left_s == 300.0
    assert state.changeover_s == LEASE_S + START_S
    assert state.look_s == run.view.spec.timing.decision_interval_s + LEASE_S


@pytest.mark.parametrize(
    ("cost", "fields"),
    [
        ({"training_time_s": 1.0}, {}),
        ({"deadline_s": 1.0}, {}),
        ({"deadline_s": 1.0, "training_time_s": 1.0}, {"wall_ms": None}),
    ],
    ids=["no deadline", "unknown training time", "no clock"],
)
def test_a_deadline_without_all_figures_has_no_state(
    cost: dict[str, Any], fields: dict[str, Any]
) -> None:
    run = a_run(**cost)
    assert deadline_state(run.view, run.state(0, **fields), 0.0) is None


# --- Which offers may be chosen -------------------------------------------------------------------


def test_the_cheapest_machines_are_those_of_all_workers() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND, machines={"spot": 2, "dearer": 1, "on-demand": 2})
    assert workers(run) == {"dearer": 2}


@pytest.mark.parametrize(
    "machines", [{"dearer": 2, "on-demand": 2}, {"spot": 2, "dearer": 2, "on-demand": 2}]
)
def test_offers_without_price_or_machines_are_not_chosen(machines: dict[str, int]) -> None:
    spot = SPOT if "spot" not in machines else an_offer("spot", None)
    assert workers(a_run(spot, DEARER, ON_DEMAND, machines=machines)) == {"dearer": 2}


def test_offers_that_the_budget_does_not_pay_are_not_chosen() -> None:
    run = a_run(an_offer("spot", 100.0), DEARER, ON_DEMAND, budget_usd=1.0)
    assert workers(run) == {"dearer": 2}


def test_without_an_affordable_offer_there_is_no_choice() -> None:
    assert workers(a_run(budget_usd=0.01)) is None


def test_machines_that_run_are_chosen_although_others_were_not_affordable() -> None:
    run = a_run(budget_usd=0.25)
    training_on(run, SPOT)
    assert not affords(run.view, run.state(200), SPOT)
    assert workers(run, 200) == ON_SPOT


def test_machines_are_chosen_in_all_networks() -> None:
    near, far = an_offer("near", 1.0, network="a"), an_offer("far", 0.1, network="b")
    anywhere = replace(ON_DEMAND, network="a")
    run = a_run(near, far, anywhere)
    training_on(run, near, network="a")
    assert workers(run, 200) == {"far": 2}


# --- Refusals -------------------------------------------------------------------------------------


def test_an_offer_is_refused_since_its_first_refusal() -> None:
    run = a_run(training_time_s=HOUR_S)
    run.refuse(10, "t-0", SPOT)
    # Shorter than a changeover: waiting costs less than on-demand machines.
    assert workers(run, 10 + START_S) == WAITING
    run.refuse(10 + START_S, "t-1", SPOT)
    assert workers(run, 10 + START_S + LEASE_S) == ON_ON_DEMAND


def test_a_request_without_machines_is_refused_after_the_start_time() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    assert workers(run, START_S) == ON_SPOT
    assert workers(run, START_S + 1) == {"dearer": 2}


def test_a_request_that_waits_with_a_reason_is_refused_at_once() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.add(1, GroupWaiting(token=Token("t-1"), reason="no capacity"))
    assert workers(run, 2) == {"dearer": 2}


def test_a_request_whose_status_has_a_refusal_is_refused_at_once() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    status = replace(a_group_status(NodeState.WAITING), refusal="no capacity")
    assert workers(run, 2, group_statuses={Token("t-1"): status}) == {"dearer": 2}


@pytest.mark.parametrize("is_connected", [True, False])
def test_machines_that_run_are_not_refused(*, is_connected: bool) -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    statuses = {}
    if is_connected:
        run.connect("t-1", nodes=1)
    else:
        statuses = {Token("t-1"): a_group_status(NodeState.RUNNING, NodeState.WAITING)}
    assert workers(run, 500, group_statuses=statuses) == ON_SPOT


def test_an_agent_that_has_just_disconnected_does_not_make_its_offer_refused() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.wait_at_backend(1, "t-1")
    assert workers(run, 500) == {"dearer": 2}
    left = {(Token("t-1"), 0): an_agent_id(0)}
    assert workers(run, 500, last_agent_by_node=left) == ON_SPOT, "its loss is not recorded yet"
    run.add(501, NodeLost(token=Token("t-1"), node=0, agent=an_agent_id(0), reason="reclaimed"))
    assert workers(run, 501, last_agent_by_node=left) == {"dearer": 2}


@pytest.mark.parametrize(("observed_at", "chosen"), [(500, ON_SPOT), (502, {"dearer": 2})])
def test_a_lost_agent_does_not_make_its_offer_refused_until_the_others_are_observed(
    observed_at: float, chosen: dict[str, int]
) -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.wait_at_backend(1, "t-1")
    run.add(501, NodeLost(token=Token("t-1"), node=0, agent=an_agent_id(0), reason="reclaimed"))
    times = {"agent_lost_at": {"t-1": 501.0}, "status_as_of": {"t-1": observed_at}}
    assert workers(run, 503, **times) == chosen


def test_all_offers_of_a_network_whose_machines_can_train_nothing_count_as_refused() -> None:
    far, sibling = (an_offer(name, 1.0, network="b") for name in ("far", "sibling"))
    near = an_offer("near", 3.0, network="a")
    run = a_run(near, far, sibling, uses_on_demand=False)
    run.request(10, "t-1", far, network="b")
    assert workers(run, 20) == {"far": 2}
    lost = NodeLost(token=Token("t-1"), node=0, agent=None, reason="", is_unusable=True)
    run.add(100, lost, replace(lost, node=1))
    assert workers(run, 101) == {"near": 2}
    assert workers(run, 161) == {"sibling": 2}


def test_refused_on_demand_machines_are_requested_again_if_all_are() -> None:
    run = a_run(deadline_s=HOUR_S + 150.0, training_time_s=HOUR_S)
    run.refuse(0, "t-0", ON_DEMAND)
    assert workers(run, 1) == ON_ON_DEMAND


def test_refused_on_demand_machines_are_not_chosen_while_others_are_granted() -> None:
    other = an_offer("other", 5.0, Market.ON_DEMAND)
    run = a_run(SPOT, ON_DEMAND, other, deadline_s=HOUR_S + 150.0, training_time_s=HOUR_S)
    run.refuse(0, "t-0", ON_DEMAND)
    assert workers(run, 1) == {"other": 2}
    assert standing(run, 1) == "", "only spot machines are requested in advance"


# --- Machines that run ----------------------------------------------------------------------------


def test_machines_that_train_are_kept_unless_others_cost_a_fifth_less() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    training_on(run, DEARER)
    assert workers(run, 200) == {"dearer": 2}
    run = a_run(SPOT, an_offer("dearer", 1.3), ON_DEMAND)
    training_on(run, an_offer("dearer", 1.3))
    assert workers(run, 200) == ON_SPOT


def test_spot_machines_that_start_are_kept_like_those_that_train() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "dearer")
    run.request(0, "t-1", DEARER)
    assert workers(run, 10) == {"dearer": 2}


def test_machines_that_train_count_before_those_that_start() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    training_on(run, DEARER)
    run.choose(200, "spot")
    run.request(200, "t-2", SPOT)
    assert workers(run, 201) == {"dearer": 2}


def test_spot_machines_that_train_without_slack_are_left_once_on_demand_ones_start() -> None:
    # Between d + look and 2·d + look of slack.
    run = a_run(deadline_s=HOUR_S + 250.0, training_time_s=HOUR_S)
    training_on(run, SPOT)
    assert workers(run, 100) == ON_SPOT
    run.choose(100, "on-demand")
    run.request(100, "t-2", ON_DEMAND)
    assert workers(run, 100) == ON_ON_DEMAND


def test_connected_machines_count_whatever_is_chosen() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.request(0, "t-1", DEARER)
    assert workers(run, 1) == ON_SPOT, "they do not count while they start"
    run.connect("t-1")
    assert workers(run, 1) == {"dearer": 2}


def test_an_incomplete_set_of_machines_does_not_count() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "dearer")
    run.request(0, "t-1", DEARER, nodes=1)
    assert workers(run, 1) == ON_SPOT


def test_an_offer_whose_machines_are_lost_often_is_left_for_a_dearer_one() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND, deadline_s=10 * HOUR_S, training_time_s=HOUR_S)
    assert workers(run) == ON_SPOT
    for n in range(10):
        run.request(0, f"t-{n}", SPOT)
        run.connect(f"t-{n}")
        run.train(0)
        run.add(10, RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost"))
        run.add(10, GroupsReleased(token=Token(f"t-{n}")))
        run.members.clear()
    assert workers(run, 100) == {"dearer": 2}


def test_after_the_loss_of_a_machine_the_choice_is_that_of_a_run_without_machines() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    training_on(run, DEARER)
    closed = RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost")
    lost = NodeLost(token=Token("t-1"), node=1, agent=run.members[1].member.agent, reason="lost")
    run.add(200, closed, lost)
    run.members.pop()
    assert workers(run, 201) == ON_SPOT


def test_cheaper_on_demand_machines_are_chosen_once_although_spot_could_be_waited_for() -> None:
    dear = an_offer("dear", 5.0)
    run = a_run(SPOT, dear, ON_DEMAND, deadline_s=10 * HOUR_S, training_time_s=HOUR_S)
    training_on(run, dear)
    run.refuse(150, "t-2", SPOT)
    assert workers(run, 200) == ON_ON_DEMAND
    run.choose(200, "on-demand")
    assert workers(run, 201) == ON_ON_DEMAND, "not to wait, and on-demand again"


def test_spot_may_take_the_place_of_on_demand_machines_that_start_only_with_slack() -> None:
    # Slack of 2·d + look suffices without machines, d + 2·look + reserve beside others.
    look_s = RunTiming().decision_interval_s + LEASE_S
    changeover_s = LEASE_S + START_S
    slack_s = 2 * changeover_s + look_s
    run = a_run(deadline_s=HOUR_S + slack_s + CLOCK_MARGIN_S - 1, training_time_s=HOUR_S)
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND)
    assert workers(run) == ON_ON_DEMAND
    run = a_run(deadline_s=HOUR_S + slack_s + CLOCK_MARGIN_S + 1, training_time_s=HOUR_S)
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND)
    assert workers(run) == ON_SPOT


# --- Standing requests ----------------------------------------------------------------------------


def test_a_refused_offer_that_the_run_would_move_to_is_requested_as_well() -> None:
    run = a_run()
    training_on(run, ON_DEMAND)
    run.refuse(200, "t-0", SPOT)
    assert standing(run, 300) == "spot"
    assert workers(run, 300) == ON_ON_DEMAND


def test_an_offer_that_would_not_be_chosen_is_not_requested() -> None:
    run = a_run(deadline_s=HOUR_S + 150.0, training_time_s=HOUR_S)
    run.refuse(0, "t-0", SPOT)
    assert workers(run, 1) == ON_ON_DEMAND
    assert standing(run, 1) == ""


def test_while_spot_machines_start_no_others_are_requested() -> None:
    run = a_run(an_offer("cheap", 0.5), SPOT, ON_DEMAND)
    run.refuse(0, "t-0", an_offer("cheap", 0.5))
    assert workers(run, 1) == ON_SPOT
    assert standing(run, 1) == ""
    training_on(run, SPOT)
    assert standing(run, 200) == "cheap"


def test_a_waiting_request_is_kept_as_the_standing_one() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    training_on(run, ON_DEMAND)
    run.refuse(200, "t-0", SPOT)
    run.refuse(300, "t-3", DEARER)
    run.request(310, "t-2", DEARER)
    run.add(311, GroupWaiting(token=Token("t-2"), reason="no capacity"))
    assert standing(run, 400) == "dearer"


@pytest.mark.parametrize("requested", ["", "spot"])
def test_a_standing_request_is_kept_and_used_with_slack_just_below_that_for_a_new_one(
    requested: str,
) -> None:
    # A changeover of 120 s, two intervals of 50 s and a reserve of 43 s; 13 s are missing.
    run = a_run(deadline_s=HOUR_S + 250.0 + CLOCK_MARGIN_S, training_time_s=HOUR_S)
    training_on(run, ON_DEMAND)
    run.refuse(0, "t-0", SPOT)
    run.choose(0, "on-demand", standing=requested)
    assert standing(run) == requested
    run.request(0, "t-2", SPOT)
    run.bill(0, "t-2", started_s=0)
    assert workers(run) == (ON_SPOT if requested else ON_ON_DEMAND)


def test_refused_offers_are_requested_in_turn() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    training_on(run, ON_DEMAND)
    run.refuse(200, "t-0", SPOT)
    run.refuse(201, "t-2", DEARER)
    assert standing(run, 300) == "spot"
    run.refuse(300, "t-3", SPOT)
    assert standing(run, 301) == "dearer"
