"""Capacity of a run that chooses its offers: missing, unwanted and surplus machines."""

from __future__ import annotations

import pytest

from spotfit.core.ids import Token
from spotfit.model.events import (
    FailureCause,
    MachinesChosen,
    NodeLost,
    PreemptionNoticed,
    RoundClosed,
)
from spotfit.policy.capacity import (
    boot_failure_reason,
    final_refusal_reason,
    find_lost_nodes,
    is_of_other_offer,
    is_unwanted,
    missing_by_offer,
    missing_workers,
    staying_members,
    surplus_groups,
)
from spotfit.testing.builders import a_notice
from tests.unit.policy.offered_run import DEARER, ON_DEMAND, SPOT, OfferedRun

FIRST, SECOND = Token("t-1"), Token("t-2")


def on_demand_run() -> OfferedRun:
    """Two on-demand machines train since 110 s; SPOT is chosen at 200 s."""
    run = OfferedRun(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "on-demand")
    run.request(0, "t-1", ON_DEMAND)
    run.connect("t-1")
    run.train(100)
    run.choose(200, "spot")
    return run


# --- Missing machines -----------------------------------------------------------------------------


def test_before_a_choice_no_offer_is_missing() -> None:
    run = OfferedRun()
    assert missing_by_offer(run.view, run.state(0)) == []


def test_machines_of_a_chosen_offer_are_missing_until_they_are_requested() -> None:
    run = OfferedRun()
    run.choose(0, "spot")
    assert missing_by_offer(run.view, run.state(0)) == [("spot", 2)]
    run.request(0, "t-1", SPOT, nodes=1)
    assert missing_by_offer(run.view, run.state(0)) == [("spot", 1)]
    run.request(0, "t-2", SPOT, nodes=1)
    assert missing_by_offer(run.view, run.state(0)) == []


def test_machines_of_a_new_choice_start_beside_those_that_run() -> None:
    run = on_demand_run()
    assert missing_by_offer(run.view, run.state(200)) == [("spot", 2)]


def test_a_standing_request_comes_last_and_is_for_all_workers() -> None:
    run = OfferedRun()
    run.choose(0, "on-demand", standing="spot")
    assert missing_by_offer(run.view, run.state(0)) == [("on-demand", 2), ("spot", 2)]
    assert missing_workers(run.view, run.state(0)) == 2


def test_a_standing_request_that_is_also_chosen_is_one_request() -> None:
    run = OfferedRun()
    run.choose(0, "spot", standing="spot")
    assert missing_by_offer(run.view, run.state(0)) == [("spot", 2)]


def test_a_run_that_waits_misses_nothing() -> None:
    run = OfferedRun()
    run.choose(0)
    assert missing_by_offer(run.view, run.state(0)) == []


def test_a_lost_machine_is_missing() -> None:
    run = OfferedRun()
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.add(1, NodeLost(token=FIRST, node=0, agent=None, reason="lost"))
    assert missing_by_offer(run.view, run.state(1)) == [("spot", 1)]


@pytest.mark.parametrize("is_headless", [False, True])
def test_a_machine_with_a_notice_is_missing(*, is_headless: bool) -> None:
    run = OfferedRun()
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(10)
    run.add(20, PreemptionNoticed(agent=run.members[1].member.agent, notice=a_notice()))
    state = run.state(30, is_headless=is_headless, **({"members": {}} if is_headless else {}))
    assert missing_by_offer(run.view, state) == [("spot", 1)]


# --- Other offers ---------------------------------------------------------------------------------


def test_machines_of_another_offer_than_the_chosen_are_moved() -> None:
    run = on_demand_run()
    assert is_of_other_offer(run.view, FIRST)
    run.request(200, "t-2", SPOT)
    assert not is_of_other_offer(run.view, SECOND)
    assert [one.member.token for one in staying_members(run.view, run.state(200))] == []


def test_machines_are_kept_before_a_choice_and_while_the_run_waits() -> None:
    run = OfferedRun()
    run.request(0, "t-1", SPOT)
    assert not is_of_other_offer(run.view, FIRST)
    run.choose(0)
    assert not is_of_other_offer(run.view, FIRST)
    run.choose(0, "on-demand")
    assert is_of_other_offer(run.view, FIRST)


def test_machines_of_a_move_that_was_ended_are_not_kept_while_the_run_waits() -> None:
    run = on_demand_run()
    run.request(200, "t-2", SPOT)
    run.add(300, MachinesChosen(workers={}, incomplete_offer="spot"))
    assert not is_of_other_offer(run.view, FIRST)
    assert is_of_other_offer(run.view, SECOND)


def test_unknown_groups_are_kept() -> None:
    assert not is_of_other_offer(on_demand_run().view, Token("t-unknown"))


def test_a_standing_request_is_wanted() -> None:
    run = OfferedRun(SPOT, DEARER, ON_DEMAND)
    run.request(0, "t-1", SPOT)
    run.request(0, "t-2", DEARER)
    run.choose(0, "on-demand", standing="spot")
    assert not is_unwanted(run.view, FIRST)
    assert is_unwanted(run.view, SECOND)
    assert not is_unwanted(run.view, Token("t-unknown"))


def test_a_chosen_offer_is_wanted() -> None:
    run = OfferedRun()
    run.request(0, "t-1", SPOT)
    run.choose(0, "spot")
    assert not is_unwanted(run.view, FIRST)


# --- Surplus --------------------------------------------------------------------------------------


def moved_run() -> OfferedRun:
    """The chosen spot machines have joined and train, and on-demand ones still start."""
    run = OfferedRun(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "spot")
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.train(100)
    run.request(150, "t-2", ON_DEMAND)
    return run


def test_a_group_of_another_offer_is_surplus_once_all_workers_have_machines() -> None:
    run = moved_run()
    assert surplus_groups(run.view, run.state(200)) == [SECOND]


def test_a_group_of_a_former_choice_is_surplus_while_the_machines_of_the_last_one_start() -> None:
    run = OfferedRun(SPOT, DEARER, ON_DEMAND)
    run.choose(0, "dearer")
    run.request(0, "t-1", DEARER)
    run.connect("t-1")
    run.train(100)
    run.choose(200, "on-demand")
    run.request(200, "t-2", ON_DEMAND)
    run.choose(201, "spot")
    assert surplus_groups(run.view, run.state(210)) == [SECOND]


def test_a_group_of_another_offer_is_kept_while_machines_are_missing() -> None:
    run = moved_run()
    run.members.pop()
    assert surplus_groups(run.view, run.state(200)) == []


def test_an_elastic_run_releases_a_group_of_another_offer_as_soon_as_it_trains() -> None:
    run = OfferedRun(SPOT, DEARER, ON_DEMAND, workers=(1, 4))
    run.choose_workers(0, spot=4)
    run.request(0, "t-1", SPOT)
    run.connect("t-1")
    run.request(50, "t-2", DEARER, nodes=4)
    assert surplus_groups(run.view, run.state(90)) == []
    run.train(100)
    assert surplus_groups(run.view, run.state(200)) == [SECOND]


def test_a_group_whose_agents_are_connected_is_no_surplus() -> None:
    run = moved_run()
    run.connect("t-2", first=2, nodes=1)
    assert surplus_groups(run.view, run.state(200)) == []


def test_a_group_that_trains_is_no_surplus() -> None:
    run = on_demand_run()
    run.request(200, "t-2", SPOT)
    run.members.clear()
    run.connect("t-2", first=2)
    assert surplus_groups(run.view, run.state(210)) == []
    run.add(211, RoundClosed(round_number=1, cause=FailureCause.PLATFORM, reason="lost"))
    assert surplus_groups(run.view, run.state(212)) == [], "no round is open"


def test_a_standing_request_is_no_surplus() -> None:
    run = moved_run()
    run.choose(160, "spot", standing="on-demand")
    assert surplus_groups(run.view, run.state(200)) == []


def test_a_headless_leader_releases_no_surplus() -> None:
    run = moved_run()
    assert surplus_groups(run.view, run.state(200, is_headless=True)) == []


def test_a_machine_of_another_offer_without_workers_is_lost_in_a_full_round() -> None:
    run = moved_run()
    run.connect("t-2", first=2, nodes=1)
    lost = [
        (one.token, one.node, one.reason)
        for one in find_lost_nodes(run.view, run.state(200), 200.0)
    ]
    assert lost == [(SECOND, 0, "it was replaced by machines of another offer")]


# --- Reasons to end -------------------------------------------------------------------------------


def test_the_run_ends_once_each_offer_is_refused_for_good() -> None:
    run = OfferedRun()
    run.refuse(0, "t-1", SPOT, reason="no such image", is_final=True)
    assert final_refusal_reason(run.view) is None
    run.refuse(0, "t-2", ON_DEMAND, reason="no quota", is_final=True)
    assert final_refusal_reason(run.view) == "no quota"


def test_offers_that_the_run_may_not_rent_need_no_refusal() -> None:
    run = OfferedRun(uses_on_demand=False, budget_usd=1.0)
    run.refuse(0, "t-1", SPOT, reason="no such image", is_final=True)
    assert final_refusal_reason(run.view) == "no such image"


def test_a_run_that_has_trained_is_not_ended_by_final_refusals() -> None:
    run = on_demand_run()
    run.refuse(300, "t-2", SPOT, is_final=True)
    run.refuse(300, "t-3", ON_DEMAND, is_final=True)
    run.refuse(300, "t-4", DEARER, is_final=True)
    assert final_refusal_reason(run.view) is None


def test_boot_failures_are_no_reason_once_an_agent_has_started() -> None:
    run = on_demand_run()
    lost = NodeLost(token=SECOND, node=0, agent=None, reason="lost")
    for _ in range(60):
        run.request(200, "t-2", SPOT)
        run.add(200, lost)
    assert boot_failure_reason(run.view) is None
