"""Machines for feeders from a backend of their own, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as struct_replace

from spotfit.model.events import (
    FitStarted,
    GroupPlanned,
    GroupsReleased,
    LeaderElected,
    NodeLost,
    RoundOpened,
)
from spotfit.model.spec import CostSpec, FeederSpec
from spotfit.model.usage import bill_of
from spotfit.policy.cost_budget import longest_stop_s
from spotfit.provision import feeder_backend
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.billing_check import CLOCK_TOLERANCE_S
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.market import price_at
from spotfit_localsim.virtual.scenario_library import (
    backend_change_with_feeders,
    feeders_of_another_backend,
)
from spotfit_localsim.virtual.sim_cloud import PROVISIONER_NAME
from spotfit_localsim.virtual.simulation import simulate
from spotfit_localsim.virtual.timeline import SimulationResult
from tests.sim.test_networks import MARKET, RETURN, SPOT_FROM_S

FEEDERS = FeederSpec(min_nodes=2, max_nodes=2, resources={"CPU": 1.0})
GPU, CPU = feeders_of_another_backend.market.offers


def planned_feeders(result: SimulationResult) -> list[GroupPlanned]:
    events = (entry.event for entry in result.entries)
    return [one for one in events if isinstance(one, GroupPlanned) and one.request.role == "feed"]


def test_feeders_are_rented_under_their_own_offer_and_workers_never_are(seeds: range) -> None:
    lost_feeders = 0
    for seed in seeds:
        result = simulate(feeders_of_another_backend, seed)
        of_feeders = {one.plan.token for one in planned_feeders(result)}
        machines = result.cost.machines
        offers = {(one.token in of_feeders, one.offer) for one in machines}
        assert offers == {(True, "cpu"), (False, "gpu")}
        lost = {one.event.token for one in result.entries if isinstance(one.event, NodeLost)}
        lost_feeders += len(lost & of_feeders)
    assert lost_feeders >= len(seeds)


def test_the_bill_has_both_offers_with_their_prices(seeds: range) -> None:
    for seed in seeds:
        result = simulate(feeders_of_another_backend, seed)
        bills = {one.offer: one for one in bill_of(result.view, wall_ms(result.duration_s)).offers}
        assert set(bills) == {"gpu", "cpu#feeders"}
        for config, name in ((GPU, "gpu"), (CPU, "cpu#feeders")):
            bill, usd_per_hour = bills[name], price_at(config.prices, 0.0)
            assert bill.usd == pytest.approx(usd_per_hour * bill.machine_s / 3600)
            assert bill.max_usd == pytest.approx(usd_per_hour * bill.max_machine_s / 3600)
            machines = [one for one in result.cost.machines if one.offer == config.name]
            billed_s = sum(one.billed_s(result.duration_s) for one in machines)
            tolerance_s = CLOCK_TOLERANCE_S * len(machines)
            assert bill.machine_s - tolerance_s <= billed_s <= bill.max_machine_s + tolerance_s


marked = feeder_backend._marked

CALM_CPU = replace(CPU, reclaims_per_hour=0.0, refusal_probability=0.0)
MOVE = replace(
    RETURN,
    market=replace(MARKET, offers=(*MARKET.offers, replace(CALM_CPU, region="west"))),
    feeders=FEEDERS,
)
"""The workers move from the east to the west, where the feeders are."""


def test_the_next_fit_releases_the_feeders_of_the_first_backend(seeds: range) -> None:
    left = 0
    for seed in seeds:
        entries = simulate(backend_change_with_feeders, seed).entries
        second = [n for n, one in enumerate(entries) if isinstance(one.event, FitStarted)][1]
        of_first = {
            one.event.plan.token
            for one in entries[:second]
            if isinstance(one.event, GroupPlanned) and one.event.request.role == "feed"
        }
        settled = {
            token
            for one in entries[second:]
            if isinstance(one.event, GroupsReleased)
            for token in (one.event.token, *one.event.other_tokens)
        }
        left += len(of_first & settled)
    assert left, "at least one fit has left machines for feeders to the next one"


def test_feeders_are_requested_only_in_a_network_of_their_backend() -> None:
    result = simulate(MOVE, 1)
    entries = result.entries
    moved = next(
        n
        for n, one in enumerate(entries)
        if isinstance(one.event, LeaderElected) and one.event.network == "west"
    )
    requested = [
        n
        for n, one in enumerate(entries)
        if isinstance(one.event, GroupPlanned) and one.event.request.role == "feed"
    ]
    rounds = [n for n, one in enumerate(entries) if isinstance(one.event, RoundOpened)]
    assert rounds[0] < moved, "workers have trained in the east before"
    assert requested
    assert min(requested) > moved


def test_feeders_are_released_when_the_workers_leave_their_network() -> None:
    market = replace(MOVE.market, offers=(*MARKET.offers, replace(CALM_CPU, region="east")))
    result = simulate(replace(MOVE, market=market), 1)
    fed = [one for one in result.cost.machines if one.offer == "cpu"]
    assert len(fed) == 2
    for machine in fed:
        assert machine.ended_at_s is not None
        assert SPOT_FROM_S < machine.ended_at_s < result.duration_s - 100.0


@pytest.mark.parametrize("is_named", [True, False], ids=["named offer", "unknown offer"])
def test_a_budget_ends_the_run_before_feeders_exceed_it(
    monkeypatch: pytest.MonkeyPatch, *, is_named: bool
) -> None:
    """Two feeders cost as much as the workers: the rate of both is what the budget must pay."""
    cpu = replace(CALM_CPU, region="west", prices=((0.0, 2.0),))
    market = replace(
        MARKET,
        offers=(
            replace(MARKET.offers[1], capacity=CapacityTrace("always", ((0.0, 4),))),
            cpu,
            replace(cpu, name="other-cpu", prices=((0.0, 1.0),)),
        ),
    )
    if not is_named:  # as the backends that let the provider choose a zone
        monkeypatch.setattr(
            feeder_backend, "_marked", lambda *given: struct_replace(marked(*given), offer="")
        )
    budget_usd = 1.0
    scenario = replace(
        RETURN,
        market=market,
        feeders=FEEDERS,
        cost=CostSpec(
            offers=market.offers_at(0.0, PROVISIONER_NAME),
            machines={"spot": 2},
            budget_usd=budget_usd,
            training_time_s=620.0,
            start_time_s=60.0,
        ),
        cost_limits=None,
        may_exhaust_budget=True,
    )
    result = simulate(scenario, 1)
    assert {one.offer for one in result.cost.machines} == {"spot", "cpu"}
    assert result.view.is_cost_budget_used
    spent_usd = sum(2.0 * one.billed_s(result.duration_s) / 3600 for one in result.cost.machines)
    # The stop is paid for at this rate; it takes only a part of the time that is kept for it.
    kept_usd = 8.0 / 3600 * longest_stop_s(scenario.timing)
    assert budget_usd - kept_usd - 0.01 <= spent_usd <= budget_usd - kept_usd / 2
