"""Which offers a run has its machines from: the journal and the observations as input."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import MachinesChosen
from spotfit.model.group import NodeState
from spotfit.model.leader_state import LeaderState
from spotfit.model.market_record import MarketRecord, OfferRecord, RequestRecord, RoundRecord
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec, RunTiming
from spotfit.model.view import View
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import find_lost_nodes, surplus_groups
from spotfit.policy.machine_choice import choose_machines
from spotfit.policy.scheduler import next_round
from spotfit.testing.builders import (
    a_group,
    a_group_status,
    a_leader_state,
    a_member,
    a_member_status,
    a_round,
    a_spec,
    a_view,
    member_statuses,
)

NOW = 1000.0
T0_MS = 1_000_000_000_000
SPOT, ON_DEMAND = Token("t-spot"), Token("t-on-demand")
WORK_S = 100.0
START_S = 10.0
TIMING = RunTiming(decision_interval_s=1.0, lease_timeout_s=20.0, rejoin_timeout_s=5.0)
CLOCK_MARGIN_S = 5.0


def an_offer(market: Market, usd: float) -> Offer:
    price = Price(usd_per_hour=usd, source="given", as_of_s=T0_MS / 1000)
    return Offer(name=market.value, provisioner="cloud", market=market, region="r", price=price)


OFFERS = (an_offer(Market.SPOT, 1.0), an_offer(Market.ON_DEMAND, 3.0))
OFFER_OF = {SPOT: "spot", ON_DEMAND: "on_demand"}


def a_costed_view(slack_s: float, *tokens: Token, chosen: str = "", **fields: Any) -> View:
    """A run of two workers; `tokens` are groups of two machines that were granted."""
    deadline_s = slack_s + WORK_S + CLOCK_MARGIN_S
    cost = CostSpec(
        offers=OFFERS,
        machines={offer.name: 2 for offer in OFFERS},
        deadline_ms=T0_MS + int(1000 * deadline_s),
        uses_on_demand=True,
        training_time_s=WORK_S,
        start_time_s=START_S,
    )
    requests = {one: RequestRecord(offer=OFFER_OF[one], planned_s=0.0) for one in tokens}
    choice = MachinesChosen(workers={chosen: 2}, reason="") if chosen else None
    market = MarketRecord(**{"choice": choice, "requests": requests, **fields})
    groups = {one: a_group(token=one) for one in tokens}
    return a_view(spec=a_spec(cost=cost, timing=TIMING), groups=groups, market=market)


def observations(*connected: Token, **fields: Any) -> LeaderState:
    """Agents on both machines of the groups `connected`; the leader is new."""
    members = [
        a_member_status(member=a_member(node, agent=AgentId(f"a-{token}-{node}"), token=token))
        for token in connected
        for node in (0, 1)
    ]
    states = {one: NodeState.RUNNING if one in connected else NodeState.WAITING for one in OFFER_OF}
    statuses = {one: a_group_status(state, state) for one, state in states.items()}
    usual: dict[str, Any] = {
        "group_statuses": statuses,
        "leading_since": NOW,
        "elapsed_s": 500.0,
        "wall_ms": T0_MS,
    }
    return a_leader_state(members=member_statuses(*members), **{**usual, **fields})


def choose(view: View, state: LeaderState) -> list[str]:
    chosen = choose_machines(view, state, NOW)
    assert chosen is not None
    return list(chosen.workers)


SLACKS_S = (20.0, 55.0, 75.0, 79.0, 90.0, 110.0, 200.0)
NO_GROUPS: tuple[Token, ...] = ()


@pytest.mark.parametrize("connected", [NO_GROUPS, (SPOT,), (ON_DEMAND,), (SPOT, ON_DEMAND)])
@pytest.mark.parametrize("rented", [NO_GROUPS, (SPOT,), (ON_DEMAND,), (SPOT, ON_DEMAND)])
@pytest.mark.parametrize("chosen", ["", "spot", "on_demand"])
@pytest.mark.parametrize("spot_state", [None, NodeState.WAITING, NodeState.RUNNING])
def test_a_choice_is_not_changed_back_by_the_next_decision(
    connected: tuple[Token, ...], rented: tuple[Token, ...], chosen: str, spot_state: NodeState
) -> None:
    if not set(connected) <= set(rented):
        return
    state = observations(*connected, is_headless=not connected)
    if spot_state is not None:
        spot_status = {SPOT: a_group_status(spot_state, spot_state)}
        state = replace(state, group_statuses=state.group_statuses | spot_status)
    for slack_s in SLACKS_S:
        view = a_costed_view(slack_s, *rented, chosen=chosen)
        first = choose_machines(view, state, NOW)
        assert first is not None
        after = replace(view, market=replace(view.market, choice=first))
        assert choose(after, state) == list(first.workers), f"slack {slack_s}: {first.reason}"


def test_a_new_leader_does_not_take_machines_that_train_for_refused_ones() -> None:
    """They were requested long ago, and are neither connected nor observed yet."""
    opened = RoundRecord(tokens=(SPOT,), start_progress=0.0)
    view = a_costed_view(60.0, SPOT, chosen="spot", round=opened)
    assert choose(view, observations(group_statuses={}, is_headless=True)) == ["spot"]


def test_a_leader_without_any_agent_keeps_the_choice() -> None:
    """Its own agent connects first. An earlier refusal counts until a round is opened."""
    refused = {"spot": OfferRecord(refusals=1, refused_since_s=400.0)}
    view = a_costed_view(60.0, SPOT, ON_DEMAND, chosen="spot", offers=refused)
    assert choose(view, observations()) == ["spot"]


def test_machines_that_wait_for_longer_than_a_start_are_refused() -> None:
    view = a_costed_view(60.0, SPOT, chosen="spot")
    waiting = a_group_status(NodeState.WAITING, NodeState.WAITING)
    assert choose(view, observations(group_statuses={SPOT: waiting}, is_headless=True)) == [
        "on_demand"
    ]
    since = NOW - START_S - 1
    unseen = observations(leading_since=since, group_statuses={}, is_headless=True)
    assert choose(view, unseen) == ["on_demand"], "nor are they observed"


def test_a_round_on_machines_of_two_offers_waits_for_those_of_the_chosen_one() -> None:
    view = a_costed_view(200.0, SPOT, ON_DEMAND, chosen="spot")
    both = observations(ON_DEMAND, SPOT)
    last = [*both.members][-1]
    state = replace(both, members={k: one for k, one in both.members.items() if k != last})
    assert isinstance(next_round(view, state, NOW), Wait)
    opened = next_round(view, state, NOW + TIMING.rejoin_timeout_s)
    assert not isinstance(opened, Wait)
    assert opened.world_size == 2


def test_a_round_does_not_wait_for_an_offer_without_enough_machines() -> None:
    view = a_costed_view(200.0, ON_DEMAND, chosen="spot")
    assert not isinstance(next_round(view, observations(ON_DEMAND), NOW), Wait)


def test_the_standing_request_is_kept_by_a_backend_that_restarts_machines() -> None:
    view = a_costed_view(200.0, SPOT, ON_DEMAND, chosen="on_demand")
    state = observations(ON_DEMAND, requeues_itself=True)
    assert surplus_groups(view, state) == [SPOT]
    choice = MachinesChosen(workers={"on_demand": 2}, standing_offer="spot")
    standing = replace(view, market=replace(view.market, choice=choice))
    assert surplus_groups(standing, state) == []


def test_a_machine_of_the_standing_request_may_join_a_run_that_is_complete() -> None:
    view = a_costed_view(200.0, SPOT, ON_DEMAND, chosen="on_demand")
    members = [
        a_member(node, agent=AgentId(f"a-{ON_DEMAND}-{node}"), token=ON_DEMAND) for node in (0, 1)
    ]
    opened = a_round(members=members)
    view = replace(view, round=opened, last_round=opened, round_opened_slot=4)
    state = observations(SPOT, ON_DEMAND, requeues_itself=True)
    lost = {one.token for one in find_lost_nodes(view, state, NOW)}
    assert lost == {SPOT}, "without a standing request it is not needed"
    choice = MachinesChosen(workers={"on_demand": 2}, standing_offer="spot")
    standing = replace(view, market=replace(view.market, choice=choice))
    assert list(find_lost_nodes(standing, state, NOW)) == []
