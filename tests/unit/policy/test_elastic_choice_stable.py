"""The choice of an elastic run, decided again from what the last choice led to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import MachinesChosen
from spotfit.model.group import NodeState
from spotfit.model.leader_state import LeaderState
from spotfit.model.market_record import MarketRecord, OfferRecord, RequestRecord
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec, RunTiming
from spotfit.model.view import View
from spotfit.policy.machine_choice import choose_machines
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
WORK_S, START_S = 20_000.0, 100.0
SPOT, OTHER, ON_DEMAND = Token("t-spot"), Token("t-other"), Token("t-on-demand")
OFFER_OF = {SPOT: "spot", OTHER: "other", ON_DEMAND: "on_demand"}
TIMING = RunTiming(decision_interval_s=1.0, lease_timeout_s=20.0, round_fill_timeout_s=20.0)


def an_offer(name: str, usd: float, market: Market = Market.SPOT) -> Offer:
    price = Price(usd_per_hour=usd, source="given", as_of_s=T0_MS / 1000)
    return Offer(name=name, provisioner="cloud", market=market, price=price)


OFFERS = (
    an_offer("spot", 1.0),
    an_offer("other", 1.1),
    an_offer("on_demand", 4.0, Market.ON_DEMAND),
)


def a_costed_view(
    slack_s: float | None,
    nodes: dict[Token, int],
    *,
    working: dict[Token, int],
    refused: tuple[str, ...] = (),
    **cost: Any,
) -> View:
    """A run of 2 to 4 workers with groups of as many machines as `nodes` says."""
    usual: dict[str, Any] = {
        "offers": OFFERS,
        "machines": {offer.name: 4 for offer in OFFERS},
        "uses_on_demand": True,
        "training_time_s": WORK_S,
        "start_time_s": START_S,
    }
    if slack_s is not None:
        usual["deadline_ms"] = T0_MS + int(1000 * (slack_s + WORK_S + 5.0))
    market = MarketRecord(
        requests={token: RequestRecord(offer=OFFER_OF[token], planned_s=0.0) for token in nodes},
        offers={name: OfferRecord(refusals=3, refused_since_s=100.0) for name in refused},
    )
    groups = {token: a_group(token=token, nodes=count) for token, count in nodes.items() if count}
    members = members_of(working)
    opened = {"round": a_round(members=members)} if len(members) >= 2 else {}
    spec = a_spec(min_workers=2, max_workers=4, cost=CostSpec(**{**usual, **cost}), timing=TIMING)
    return a_view(spec=spec, groups=groups, market=market, **opened)


def members_of(connected: dict[Token, int]) -> list[Any]:
    return [
        a_member(node, agent=AgentId(f"a-{token}-{node}"), token=token, node=node)
        for token, count in connected.items()
        for node in range(count)
    ]


def observations(nodes: dict[Token, int], connected: dict[Token, int]) -> LeaderState:
    statuses = {
        token: a_group_status(
            *(
                NodeState.RUNNING if node < connected.get(token, 0) else NodeState.WAITING
                for node in range(count)
            )
        )
        for token, count in nodes.items()
    }
    members = [a_member_status(member=one, joined_at=NOW - 10) for one in members_of(connected)]
    return a_leader_state(
        members=member_statuses(*members),
        is_headless=not members,
        group_statuses=statuses,
        leading_since=0.0,
        elapsed_s=500.0,
        wall_ms=T0_MS,
    )


SLACKS_S = (-50.0, 50.0, 130.0, 200.0, 260.0, 300.0, 400.0, 600.0, 1000.0, 4000.0, 100_000.0, None)
NODES = [
    {SPOT: spot, OTHER: other, ON_DEMAND: on_demand}
    for spot, other, on_demand in itertools.product((0, 1, 2, 4), (0, 2), (0, 2, 4))
]
CHOICES = [
    {},
    {"spot": 4},
    {"other": 4},
    {"on_demand": 4},
    {"spot": 2, "on_demand": 2},
    {"spot": 1, "on_demand": 1},
]


@pytest.mark.parametrize("refused", [(), ("spot",), ("spot", "other")])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids="connected {:.0%}".format)
@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_a_choice_is_not_changed_back_by_the_next_decisions(
    chosen: dict[str, int], share: float, refused: tuple[str, ...]
) -> None:
    for slack_s, nodes in itertools.product(SLACKS_S, NODES):
        rented = {token: count for token, count in nodes.items() if count}
        connected = {token: int(share * count) for token, count in rented.items()}
        view = a_costed_view(slack_s, rented, working=connected, refused=refused)
        choice = MachinesChosen(workers=chosen)
        view = replace(view, market=replace(view.market, choice=choice))
        state = observations(rented, connected)
        choices = []
        for _ in range(2):
            decided = choose_machines(view, state, NOW)
            assert decided is not None
            choices.append((decided.workers, decided.standing_offer))
            view = replace(view, market=replace(view.market, choice=decided))
        text = f"slack {slack_s}, {nodes}, connected {connected}: {choices}"
        assert choices[0] == choices[1], text
