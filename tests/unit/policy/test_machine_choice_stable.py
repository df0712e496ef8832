"""Which offers a run has its machines from, decided again from what the last choice led to."""

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import MachinesChosen
from spotfit.model.group import NodeState
from spotfit.model.market_record import MarketRecord, OfferRecord, RequestRecord, RoundRecord
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec
from spotfit.model.usage import GroupUsage, MachineUse, Usage
from spotfit.policy.capacity import surplus_groups
from spotfit.policy.machine_choice import choose_machines
from spotfit.policy.request_backoff import offer_request_due_s
from spotfit.testing.builders import (
    TOKEN,
    a_group,
    a_group_status,
    a_leader_state,
    a_member,
    a_round,
    a_spec,
    a_view,
)


def an_offer(name: str, usd: float) -> Offer:
    return Offer(
        name=name,
        provisioner="local",
        market=Market(name),
        price=Price(usd_per_hour=usd, source="given", as_of_s=0.0),
    )


OFFERS = (an_offer("spot", 1.0), an_offer("on_demand", 5.0))


def a_cost(*, deadline_s: float, **fields: Any) -> CostSpec:
    return CostSpec(
        offers=OFFERS,
        machines={"spot": 2, "on_demand": 2},
        uses_on_demand=True,
        deadline_ms=round(deadline_s * 1000),
        training_time_s=1800.0,
        **fields,
    )


def test_connected_on_demand_machines_run_whatever_is_chosen() -> None:
    """With slack for a move to spot beside them, but not for a start of spot machines alone."""
    record = MarketRecord(
        requests={TOKEN: RequestRecord(offer="on_demand", planned_s=0.0)},
        choice=MachinesChosen(workers={"on_demand": 2}),
    )
    view = a_view(spec=a_spec(cost=a_cost(deadline_s=2800.0)), market=record)
    state = a_leader_state(wall_ms=0, group_statuses={TOKEN: a_group_status()})
    chosen: list[str] = []
    for _ in range(3):
        choice = choose_machines(view, state, 0.0)
        assert choice is not None
        chosen += choice.workers
        view = replace(view, market=replace(view.market, choice=choice))
    assert chosen == ["spot", "spot", "spot"]


@pytest.mark.parametrize(
    ("refused_s", "trains", "pause_s"),
    [(600.0, True, 60.0), (3600.0, True, 180.0), (86400.0, True, 600.0), (86400.0, False, 60.0)],
)
def test_standing_requests_pause_for_a_share_of_the_outage_while_others_train(
    refused_s: float, trains: bool, pause_s: float
) -> None:
    refused = OfferRecord(refusals=50, refused_since_s=100.0, refused_at_s=100.0 + refused_s)
    record = MarketRecord(
        choice=MachinesChosen(workers={"on_demand": 2}, standing_offer="spot"),
        offers={"spot": refused, "on_demand": refused},
        round=RoundRecord(tokens=(TOKEN,), start_progress=0.0) if trains else None,
    )
    view = a_view(market=record)
    assert offer_request_due_s(view, "spot") == refused.refused_at_s + pause_s
    assert offer_request_due_s(view, "on_demand") == refused.refused_at_s + 60.0, "it is needed"


@pytest.mark.parametrize("trains", [True, False])
def test_a_waiting_request_of_another_offer_is_released_once_a_round_is_open(trains: bool) -> None:
    """Before, it may become the standing request, and would lose its place in the queue."""
    waiting = Token("waiting")
    record = MarketRecord(
        choice=MachinesChosen(workers={"on_demand": 2}),
        requests={
            TOKEN: RequestRecord(offer="on_demand", planned_s=0.0),
            waiting: RequestRecord(offer="spot", planned_s=0.0, waiting_since_s=0.0),
        },
    )
    groups = {TOKEN: a_group(), waiting: a_group(token=waiting)}
    members = (a_member(0), a_member(1))
    opened = {"round": a_round(members=members)} if trains else {}
    view = a_view(market=record, groups=groups, **opened)
    assert surplus_groups(view, a_leader_state()) == ([waiting] if trains else [])


@pytest.mark.parametrize(("is_billed", "chosen"), [(True, "spot"), (False, "on_demand")])
def test_a_request_whose_machines_boot_for_long_is_not_refused(
    is_billed: bool, chosen: str
) -> None:
    """It has waited for longer than starts take; on-demand machines train."""
    slow = Token("slow")
    record = MarketRecord(
        choice=MachinesChosen(workers={"spot": 2}),
        requests={
            TOKEN: RequestRecord(offer="on_demand", planned_s=0.0, has_trained=True),
            slow: RequestRecord(offer="spot", planned_s=0.0),
        },
        round=RoundRecord(tokens=(TOKEN,), start_progress=0.0),
    )
    use = MachineUse(started_ms=(0, 0) if is_billed else None)
    group = GroupUsage(planned_ms=0, provisioner="local", machines=(use, use))
    view = a_view(
        spec=a_spec(cost=a_cost(deadline_s=20_000.0)),
        market=record,
        groups={TOKEN: a_group(), slow: a_group(token=slow)},
        usage=Usage(groups={slow: group}),
    )
    waiting = a_group_status(NodeState.WAITING, NodeState.WAITING)
    state = a_leader_state(
        wall_ms=0, elapsed_s=700.0, group_statuses={TOKEN: a_group_status(), slow: waiting}
    )
    choice = choose_machines(view, state, 0.0)
    assert choice is not None
    assert list(choice.workers) == [chosen]
