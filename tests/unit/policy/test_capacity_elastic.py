"""The machines of an elastic run that chooses how many workers it has on each offer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spotfit.core.ids import Token
from spotfit.model.leader_state import LeaderState, MemberStatus
from spotfit.policy.capacity import (
    chosen_members,
    find_lost_nodes,
    missing_by_offer,
    round_members,
    surplus_groups,
    workers_to_request_of,
)
from spotfit.testing.builders import an_agent_id
from tests.unit.policy.offered_run import ON_DEMAND, SPOT, T0_MS, OfferedRun

DEADLINE_MS = T0_MS + 10**9


def a_run(
    *, spot: int = 2, on_demand: int = 2, deadline_ms: int | None = DEADLINE_MS
) -> OfferedRun:
    """A run of 2 to 4 workers that train since 110 s on those numbers of machines."""
    run = OfferedRun(workers=(2, 4), deadline_ms=deadline_ms)
    run.choose_workers(0, spot=spot, on_demand=on_demand)
    run.request(0, "t-1", SPOT, nodes=spot)
    run.request(0, "t-2", ON_DEMAND, nodes=on_demand)
    run.connect("t-1", nodes=spot)
    run.connect("t-2", first=spot, nodes=on_demand)
    run.train(100)
    return run


def tokens(members: Sequence[MemberStatus]) -> list[str]:
    return [one.member.token for one in members]


def lost(run: OfferedRun, state: LeaderState) -> list[str]:
    return [one.token for one in find_lost_nodes(run.view, state, 0.0)]


# --- Requests -------------------------------------------------------------------------------------


def test_a_standing_request_is_for_the_rest_of_a_whole_group() -> None:
    run = a_run()
    run.choose_workers(200, "spot", spot=2, on_demand=2)
    assert missing_by_offer(run.view, run.state(200)) == [("spot", 2)]


@pytest.mark.parametrize(("refusals", "workers"), [(0, 4), (1, 2), (2, 2)])
def test_requests_are_halved_after_refusals_down_to_the_minimum(
    refusals: int, workers: int
) -> None:
    run = OfferedRun(workers=(2, 4), deadline_ms=DEADLINE_MS)
    run.choose_workers(0, spot=4)
    for number in range(refusals):
        run.refuse(0, f"t-{number}", SPOT)
    assert workers_to_request_of(run.view, run.state(0), "spot", 4) == workers


def test_machines_of_all_offers_count_for_the_minimum() -> None:
    run = a_run(spot=2, on_demand=1)
    run.choose_workers(200, spot=2, on_demand=2)
    for number in (3, 4):
        run.refuse(200, f"t-{number}", ON_DEMAND)
    assert workers_to_request_of(run.view, run.state(200), "on-demand", 2) == 1


def test_a_group_that_is_to_replace_on_demand_machines_is_requested_as_a_whole() -> None:
    run = a_run(spot=1, on_demand=3)
    run.choose_workers(200, "spot", spot=1, on_demand=3)
    run.refuse(200, "t-3", SPOT)
    assert workers_to_request_of(run.view, run.state(200), "spot", 3) == 3


# --- Members of the next round --------------------------------------------------------------------


def test_a_round_has_the_chosen_number_of_machines_of_each_offer() -> None:
    run = a_run(spot=2, on_demand=2)
    run.choose_workers(200, spot=3, on_demand=1)
    run.request(200, "t-3", SPOT, nodes=1)
    run.connect("t-3", first=4, nodes=1)
    assert tokens(chosen_members(run.view, run.state(200))) == ["t-1", "t-1", "t-2", "t-3"]
    assert round_members(run.view, run.state(200)) == chosen_members(run.view, run.state(200))


def test_spot_machines_that_are_not_chosen_work_until_others_have_joined() -> None:
    run = a_run(spot=2, on_demand=2)
    run.choose_workers(200, on_demand=4)
    assert sorted(tokens(round_members(run.view, run.state(200)))) == ["t-1", "t-1", "t-2", "t-2"]


def test_without_a_deadline_on_demand_machines_that_are_not_chosen_only_complete_the_minimum() -> (
    None
):
    run = a_run(spot=2, on_demand=2, deadline_ms=None)
    run.choose_workers(200, spot=4)
    assert tokens(round_members(run.view, run.state(200))) == ["t-1", "t-1"]
    run = a_run(spot=1, on_demand=3, deadline_ms=None)
    run.choose_workers(200, spot=4)
    assert tokens(round_members(run.view, run.state(200))) == ["t-1", "t-2", "t-2", "t-2"]


def test_with_a_deadline_on_demand_machines_work_until_the_spot_group_is_complete() -> None:
    run = a_run(spot=2, on_demand=2)
    run.choose_workers(200, spot=4)
    run.request(200, "t-3", SPOT, nodes=1)
    run.connect("t-3", first=4, nodes=1)
    members = tokens(round_members(run.view, run.state(200)))
    assert members == ["t-1", "t-1", "t-3", "t-2"]


# --- Releases -------------------------------------------------------------------------------------


def test_machines_beyond_the_chosen_number_are_released_when_they_have_no_workers() -> None:
    run = a_run(spot=2, on_demand=2)
    run.request(200, "t-3", SPOT)
    run.connect("t-3", first=4)
    assert lost(run, run.state(200)) == ["t-3", "t-3"]
    run.choose_workers(201, "spot", spot=2, on_demand=2)
    assert lost(run, run.state(201)) == [], "they are requested"


def test_machines_that_the_group_can_grow_into_are_kept() -> None:
    run = a_run(spot=2, on_demand=1)
    run.choose_workers(200, spot=3, on_demand=1)
    run.request(200, "t-3", SPOT, nodes=1)
    run.connect("t-3", first=3, nodes=1)
    assert lost(run, run.state(200)) == []


def test_the_leader_does_not_release_its_own_machine() -> None:
    run = a_run(spot=2, on_demand=2)
    run.request(200, "t-3", SPOT)
    run.connect("t-3", first=4)
    assert lost(run, run.state(200, agent_id=an_agent_id(4))) == ["t-3"]


@pytest.mark.parametrize(("standing", "surplus"), [("", ["t-3"]), ("spot", [])])
def test_a_request_beyond_the_chosen_number_is_released(standing: str, surplus: list[str]) -> None:
    run = a_run(spot=2, on_demand=2)
    run.request(200, "t-3", SPOT)
    run.choose_workers(201, standing, spot=2, on_demand=2)
    assert surplus_groups(run.view, run.state(201)) == [Token(one) for one in surplus]
