"""The offers of an elastic run, from the journal and the leader's observations."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.events import (
    FailureCause,
    GroupWaiting,
    MachinesChosen,
    NodeLost,
    PreemptionNoticed,
    RoundClosed,
)
from spotfit.model.group import NodeState
from spotfit.model.leader_state import Training
from spotfit.policy.elastic_choice import is_in_network
from spotfit.policy.machine_choice import choose_machines
from spotfit.testing.builders import a_group_status, a_notice, an_agent_id
from tests.unit.policy.networked_run import elect
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

WORK_S = 20 * HOUR_S
AMPLE_S, SHORT_S = 20 * HOUR_S, 650.0


def a_run(*offers: Any, slack_s: float | None = AMPLE_S, **cost: Any) -> OfferedRun:
    """A training of two to four workers."""
    if slack_s is not None:
        cost = {"deadline_ms": T0_MS + round((WORK_S + slack_s) * 1000), **cost}
        cost.setdefault("training_time_s", WORK_S)
    return OfferedRun(*offers, workers=(2, 4), **cost)


def decide(run: OfferedRun, at_s: float, **fields: Any) -> MachinesChosen:
    chosen = choose_machines(run.view, run.state(at_s, **fields), at_s)
    assert chosen is not None
    return chosen


def on_spot(run: OfferedRun, nodes: int) -> OfferedRun:
    """Spot machines for all are chosen, and `nodes` of them train since 110 s."""
    run.choose_workers(0, spot=4)
    run.request(0, "t-1", SPOT, nodes=nodes)
    run.connect("t-1", nodes=nodes)
    run.train(100)
    return run


def mixed(run: OfferedRun, standing: str = "") -> OfferedRun:
    """Two spot and two on-demand machines train since 110 s."""
    run.choose_workers(0, standing, spot=2, on_demand=2)
    run.request(0, "t-1", SPOT)
    run.request(0, "t-2", ON_DEMAND)
    run.connect("t-1")
    run.connect("t-2", first=2)
    run.train(100)
    return run


# --- With a deadline ------------------------------------------------------------------------------


def test_with_ample_slack_all_workers_are_on_spot() -> None:
    assert decide(a_run(), 0).workers == {"spot": 4}
    run = on_spot(a_run(), nodes=2)
    run.refuse(200, "t-2", SPOT)
    assert decide(run, 200).workers == {"spot": 4}, "what is granted suffices"


def test_with_little_slack_on_demand_machines_fill_the_gap() -> None:
    run = on_spot(a_run(slack_s=SHORT_S), nodes=3)
    run.refuse(200, "t-2", SPOT)
    assert decide(run, 200).workers == {"spot": 3, "on-demand": 1}


def test_without_slack_all_workers_are_on_demand() -> None:
    run = on_spot(a_run(slack_s=400.0), nodes=3)
    run.refuse(200, "t-2", SPOT)
    assert decide(run, 200).workers == {"on-demand": 4}


def test_a_complete_group_that_trains_stays_on_spot_with_the_slack_of_a_changeover() -> None:
    run = on_spot(a_run(slack_s=400.0), nodes=4)
    assert run.round is not None
    assert decide(run, 200, phase=Training(round=run.round, since=0.0)).workers == {"spot": 4}


def test_spot_machines_are_waited_for_with_ample_slack() -> None:
    run = a_run()
    run.refuse(0, "t-1", SPOT)
    chosen = decide(run, 1)
    assert (chosen.workers, chosen.standing_offer) == ({}, "spot")


def test_on_demand_machines_stay_until_a_whole_group_of_spot_machines_runs() -> None:
    run = mixed(a_run())
    chosen = decide(run, 200)
    assert chosen.workers == {"spot": 2, "on-demand": 2}
    assert chosen.standing_offer == "spot"
    run.request(200, "t-3", SPOT)
    assert decide(run, 201).workers == {"spot": 2, "on-demand": 2}, "it may be refused"
    run.bill(202, "t-3", started_s=202)
    assert decide(run, 203).workers == {"spot": 4}


CHEAPER = an_offer("cheaper", 0.7)


def on_demand(*offers: Any, standing: str = "") -> OfferedRun:
    """Four on-demand machines train since 110 s, with ample slack."""
    run = a_run(*offers, ON_DEMAND)
    run.choose_workers(0, standing, on_demand=4)
    run.request(0, "t-1", ON_DEMAND, nodes=4)
    run.connect("t-1", nodes=4)
    run.train(100)
    return run


def test_the_cheapest_group_of_spot_machines_is_requested_first() -> None:
    run = on_demand(SPOT, CHEAPER)
    assert decide(run, 200).standing_offer == "cheaper"
    run.refuse(200, "t-2", CHEAPER)
    assert decide(run, 200).standing_offer == "spot"


def test_a_group_of_spot_machines_that_is_granted_is_used_although_another_one_is_cheaper() -> None:
    run = on_demand(SPOT, CHEAPER, standing="spot")
    run.request(200, "t-2", SPOT, nodes=4)
    run.bill(201, "t-2", started_s=201, nodes=4)
    assert decide(run, 202).workers == {"spot": 4}


def test_no_standing_request_while_on_demand_machines_start_beside_spot_ones() -> None:
    run = on_spot(a_run(an_offer("spot", 3.0), CHEAPER, ON_DEMAND), nodes=4)
    run.choose_workers(200, on_demand=4)
    run.request(200, "t-2", ON_DEMAND, nodes=4)
    chosen = decide(run, 300)
    assert (chosen.workers, chosen.standing_offer) == ({"on-demand": 4}, "")
    run.add(300, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason=""))
    run.members.clear()
    run.connect("t-2", first=4, nodes=4)
    run.train(300)
    assert decide(run, 400).standing_offer == "cheaper"


def test_a_whole_group_is_not_requested_without_slack_for_its_losses() -> None:
    run = mixed(a_run(slack_s=SHORT_S))
    assert decide(run, 200).standing_offer == ""
    run.request(200, "t-3", SPOT)
    run.bill(202, "t-3", started_s=202)
    assert decide(run, 203).workers == {"spot": 2, "on-demand": 2}


def test_a_return_that_saves_nothing_is_not_requested() -> None:
    run = mixed(a_run(SPOT, an_offer("on-demand", 1.01, ON_DEMAND.market)))
    assert decide(run, 200).standing_offer == ""


def test_a_part_of_a_standing_request_is_used_after_the_time_of_a_start() -> None:
    run = mixed(a_run(), standing="spot")
    run.request(200, "t-3", SPOT)
    run.add(201, GroupWaiting(token=Token("t-3"), reason="no capacity"))
    run.connect("t-3", first=4, nodes=1)
    status = {Token("t-3"): a_group_status(NodeState.RUNNING, NodeState.WAITING)}
    partly = run.state(300).group_statuses | status
    assert decide(run, 0.0, group_statuses=partly).workers == {"spot": 2, "on-demand": 2}
    # Durations of starts are measured: the machines of the round took 110 s.
    assert decide(run, 111.0, group_statuses=partly).workers == {"spot": 3, "on-demand": 1}


def test_a_lost_spot_machine_is_replaced_by_an_on_demand_one() -> None:
    run = mixed(a_run(slack_s=SHORT_S))
    run.add(200, NodeLost(token=Token("t-1"), node=0, agent=an_agent_id(0), reason="lost"))
    run.members = run.members[1:]
    assert decide(run, 201).workers == {"spot": 1, "on-demand": 3}


def test_the_choice_stays_until_it_is_known_which_agents_are_lost() -> None:
    run = mixed(a_run(slack_s=SHORT_S))
    run.choose_workers(199, spot=4)
    run.members = run.members[1:]
    rejoin_s = run.view.spec.timing.rejoin_timeout_s
    elected = {"leading_since": 200.0, "group_statuses": {}}
    assert decide(run, 200.0 + rejoin_s, **elected).workers == {"spot": 4}
    assert decide(run, 200.1 + rejoin_s).workers != {"spot": 4}


def test_an_agent_that_left_after_its_notice_does_not_count() -> None:
    run = mixed(a_run(slack_s=SHORT_S))
    run.add(200, PreemptionNoticed(agent=an_agent_id(0), notice=a_notice()))
    assert decide(run, 201).workers == {"spot": 1, "on-demand": 3}
    run.members = run.members[1:]
    assert decide(run, 202).workers == {"spot": 1, "on-demand": 3}


def test_an_agent_that_left_after_its_notice_does_not_count_before_a_round() -> None:
    run = a_run(slack_s=SHORT_S)
    run.choose_workers(0, spot=4)
    run.request(0, "t-1", SPOT, nodes=4)
    run.connect("t-1", nodes=4)
    run.add(100, PreemptionNoticed(agent=an_agent_id(3), notice=a_notice()))
    expected = decide(run, 101).workers
    assert expected == {"spot": 3, "on-demand": 1}
    run.members = run.members[:3]
    left = {(Token("t-1"), 3): an_agent_id(3)}
    assert decide(run, 102, last_agent_by_node=left).workers == expected


def test_a_new_leader_waits_for_agents_with_a_notice_as_it_does_not_know_their_machines() -> None:
    run = a_run(slack_s=SHORT_S)
    run.choose_workers(0, spot=3, on_demand=1)
    run.request(0, "t-1", SPOT, nodes=4)
    run.connect("t-1", nodes=3)
    run.add(100, PreemptionNoticed(agent=an_agent_id(3), notice=a_notice()))
    rejoin_s = run.view.spec.timing.rejoin_timeout_s
    chosen = run.view.market.choice
    assert decide(run, 200.0, leading_since=200.0) == chosen
    assert decide(run, 200.1 + rejoin_s, leading_since=200.0) != chosen


def test_machines_that_wait_at_the_backend_do_not_count() -> None:
    run = on_spot(a_run(slack_s=SHORT_S), nodes=2)
    run.request(100, "t-2", SPOT)
    assert decide(run, 101).workers == {"spot": 4}
    run.add(102, GroupWaiting(token=Token("t-2"), reason="no capacity"))
    assert decide(run, 103).workers == {"spot": 2, "on-demand": 2}


def test_another_spot_offer_is_used_if_too_few_machines_are_granted() -> None:
    run = a_run(SPOT, DEARER, ON_DEMAND)
    run.choose_workers(0, spot=4)
    run.request(0, "t-1", SPOT, nodes=1)
    run.connect("t-1", nodes=1)
    run.refuse(1, "t-2", SPOT)
    assert decide(run, 2).workers == {"dearer": 4}
    run.choose_workers(3, dearer=4)
    run.refuse(4, "t-3", DEARER)
    assert decide(run, 5).workers == {"spot": 4}, "all others are refused"


def test_enough_machines_of_a_spot_offer_are_kept() -> None:
    run = on_spot(a_run(SPOT, DEARER, ON_DEMAND), nodes=2)
    run.refuse(200, "t-2", SPOT)
    assert decide(run, 201).workers == {"spot": 4}


def test_spot_machines_that_are_not_cheaper_are_not_used() -> None:
    assert decide(a_run(an_offer("spot", 5.0), ON_DEMAND), 0).workers == {"on-demand": 4}


def test_an_on_demand_offer_is_kept_unless_it_is_refused() -> None:
    cheaper = an_offer("cheaper", 3.0, ON_DEMAND.market)
    run = mixed(a_run(SPOT, ON_DEMAND, cheaper))
    assert decide(run, 200).workers == {"spot": 2, "on-demand": 2}
    assert decide(a_run(SPOT, ON_DEMAND, cheaper, slack_s=100.0), 0).workers == {"cheaper": 4}


# --- Networks -------------------------------------------------------------------------------------

EAST, WEST = an_offer("east", 1.0, network="a"), an_offer("west", 0.5, network="b")


def in_east(run: OfferedRun, nodes: int) -> OfferedRun:
    """Spot machines of the network a are chosen for all, and `nodes` of them train since 110 s."""
    run.choose_workers(0, east=4)
    run.request(0, "t-1", EAST, nodes=nodes, network="a")
    run.connect("t-1", nodes=nodes)
    run.train(100)
    return run


def test_spot_machines_are_those_of_the_network_in_which_machines_run() -> None:
    nearby = an_offer("on-demand", 4.0, ON_DEMAND.market, network="a")
    assert decide(a_run(EAST, WEST, nearby), 0).workers == {"west": 4}
    assert decide(in_east(a_run(EAST, WEST, nearby), nodes=2), 200).workers == {"east": 4}


@pytest.mark.parametrize(
    ("network", "workers"),
    [
        ("a", {"east": 3, "on-demand": 1}),
        ("", {"east": 3, "on-demand": 1}),
        ("b", {"on-demand": 4}),
    ],
)
def test_on_demand_machines_of_another_network_are_for_all_workers(
    network: str, workers: dict[str, int]
) -> None:
    on_demand = an_offer("on-demand", 4.0, ON_DEMAND.market, network=network)
    run = in_east(a_run(EAST, WEST, on_demand, slack_s=SHORT_S), nodes=3)
    run.refuse(200, "t-2", EAST)
    assert decide(run, 200).workers == workers


@pytest.mark.parametrize("reported", [NodeState.WAITING, NodeState.RUNNING])
def test_machines_that_boot_are_in_their_network(reported: NodeState) -> None:
    """The run is in the network b; machines of both networks are billed, and those of a run."""
    run = a_run(EAST, WEST, ON_DEMAND)
    elect(run, 0, 0, network="b")
    for token, offer, network in (("t-1", EAST, "a"), ("t-2", WEST, "b")):
        run.request(0, token, offer, network=network)
        run.bill(10, token, started_s=5)
    statuses = {
        Token("t-1"): a_group_status(NodeState.RUNNING, NodeState.RUNNING),
        Token("t-2"): a_group_status(reported, reported),
    }
    state = run.state(20, group_statuses=statuses)
    assert [is_in_network(run.view, state, one) for one in (EAST, WEST)] == [False, True]


def test_on_demand_machines_of_the_same_network_are_preferred() -> None:
    nearby = an_offer("nearby", 4.0, ON_DEMAND.market, network="a")
    cheaper = an_offer("cheaper", 3.0, ON_DEMAND.market, network="b")
    run = in_east(a_run(EAST, nearby, cheaper, slack_s=SHORT_S), nodes=3)
    run.refuse(200, "t-2", EAST)
    assert decide(run, 200).workers == {"east": 3, "nearby": 1}


# --- Without a known remaining time ---------------------------------------------------------------


def test_a_fallback_without_deadline_completes_the_minimum_only() -> None:
    run = a_run(slack_s=None)
    run.choose_workers(0, spot=4)
    run.request(0, "t-1", SPOT, nodes=1)
    run.connect("t-1", nodes=1)
    run.refuse(1, "t-2", SPOT)
    assert decide(run, 2).workers == {"spot": 4}, "a start of others takes longer"
    chosen = decide(run, START_S + LEASE_S + 2)
    assert chosen.workers == {"spot": 3, "on-demand": 1}
    assert chosen.standing_offer == "spot"


def test_without_spot_machines_all_workers_are_on_demand() -> None:
    assert decide(a_run(ON_DEMAND, slack_s=None), 0).workers == {"on-demand": 4}


def test_a_fallback_without_deadline_ends_once_spot_machines_suffice() -> None:
    run = a_run(slack_s=None)
    run.choose_workers(0, spot=3, on_demand=1)
    run.request(0, "t-1", SPOT)
    run.request(0, "t-2", ON_DEMAND, nodes=1)
    run.connect("t-1")
    run.connect("t-2", first=2, nodes=1)
    run.train(100)
    assert decide(run, 200).workers == {"spot": 4}


@pytest.mark.parametrize(("at_s", "workers"), [(100, {}), (200, {"on-demand": 2})])
def test_without_deadline_spot_is_waited_for_as_long_as_a_start_takes(
    at_s: float, workers: dict[str, int]
) -> None:
    run = a_run(slack_s=None)
    run.refuse(0, "t-1", SPOT)
    assert decide(run, at_s).workers == workers


def test_with_an_unknown_remaining_time_on_demand_machines_complete_the_group() -> None:
    run = on_spot(a_run(training_time_s=None), nodes=2)
    run.refuse(200, "t-2", SPOT)
    assert decide(run, 200).workers == {"spot": 2, "on-demand": 2}


def test_without_on_demand_machines_all_granted_spot_machines_are_used() -> None:
    run = on_spot(a_run(uses_on_demand=False, slack_s=100.0), nodes=2)
    assert decide(run, 200).workers == {"spot": 4}
