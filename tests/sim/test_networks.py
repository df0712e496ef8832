"""Moves between networks in virtual time: training continues until the new machines are ready."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from msgspec import structs

from spotfit.model.events import (
    FailureCause,
    GroupsReleased,
    LeaderElected,
    NodeLost,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.offer import Market
from spotfit.model.spec import CostSpec
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.cost_invariants import CostBounds
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.market import SimMarketConfig, SimOfferConfig
from spotfit_localsim.virtual.scenario import (
    AtMoveClosed,
    AtNetworkChange,
    AtStep,
    CrashAgent,
    FreezeAgent,
    LaptopConfig,
    ReclaimMachine,
    Scenario,
    ScenarioEvent,
)
from spotfit_localsim.virtual.scenario_library import network_scenario
from spotfit_localsim.virtual.sim_cloud import PROVISIONER_NAME
from spotfit_localsim.virtual.sim_network import SimNetwork
from spotfit_localsim.virtual.simulation import simulate
from spotfit_localsim.virtual.timeline import SimulationResult
from spotfit_localsim.virtual.workload import Workload

SPOT_FROM_S, STEPS = 300.0, 600
MARKET = SimMarketConfig(
    offers=(
        SimOfferConfig(
            name="on demand",
            market=Market.ON_DEMAND,
            prices=((0.0, 10.0),),
            region="east",
        ),
        SimOfferConfig(
            name="spot",
            prices=((0.0, 2.0),),
            region="west",
            capacity=CapacityTrace("late", ((0.0, 0), (SPOT_FROM_S, 4))),
        ),
    ),
    rejects_when_full=True,
)
RETURN = Scenario(
    "return to spot in another network",
    num_workers=4,
    slots_per_machine=2,
    workload=Workload(steps=STEPS, step_s=(1.0, 1.01), save_every=20),
    market=MARKET,
    cost=CostSpec(
        offers=MARKET.offers_at(0.0, PROVISIONER_NAME),
        machines={"on demand": 2, "spot": 2},
        deadline_ms=wall_ms(1000.0),
        uses_on_demand=True,
        training_time_s=620.0,
        start_time_s=60.0,
    ),
    cost_limits=CostBounds(arrival_s=60.0, changeover_s=120.0, set_size=2, restart_s=30.0),
    faults_duration_s=2000.0,
    completion_timeout_s=1000.0,
)
"""Its on-demand machines train in the east until spot machines of the west are ready."""


def networks(result: SimulationResult) -> list[str]:
    """The networks of the leaders with a machine, in order."""
    events = (entry.event for entry in result.entries)
    return [one.network for one in events if isinstance(one, LeaderElected) and one.network]


def gaps_s(result: SimulationResult) -> list[float]:
    """The times without training between two rounds."""
    rounds = result.cost.rounds
    return [
        after.trains_from_s - before.closed_at_s
        for before, after in itertools.pairwise(rounds)
        if after.trains_from_s is not None and before.closed_at_s is not None
    ]


def with_event(*events: ScenarioEvent, laptop_dies_at_s: float | None = None) -> Scenario:
    return replace(RETURN, events=events, laptop=LaptopConfig(dies_at_s=laptop_dies_at_s))


@pytest.mark.parametrize("seed", range(3))
def test_machines_of_another_network_start_beside_those_that_train(seed: int) -> None:
    result = simulate(RETURN, seed)
    assert networks(result) == ["east", "west"]
    assert result.steps_repeated == 0
    assert result.event_count < 60_000, "agents that stand by wait for their next report"
    assert max(gaps_s(result)) < 5.0, "an election, and the start of the workers"
    by_offer = {machine.offer: machine for machine in result.cost.machines}
    on_demand, spot = by_offer["on demand"], by_offer["spot"]
    assert on_demand.ended_at_s is not None
    assert spot.up_at_s is not None
    assert spot.up_at_s < on_demand.ended_at_s


def test_the_old_machines_are_released_once_a_round_is_open_in_the_new_network() -> None:
    events = [entry.event for entry in simulate(RETURN, 0).entries]
    kinds = [
        type(one)
        for one in events
        if isinstance(one, (RoundClosed, LeaderElected, RoundOpened, NodeLost, GroupsReleased))
    ]
    start = kinds.index(RoundClosed)
    assert kinds[start : start + 6] == [
        RoundClosed,
        LeaderElected,
        RoundOpened,
        NodeLost,
        NodeLost,
        GroupsReleased,
    ]


@pytest.mark.parametrize("laptop_dies_at_s", [None, 200.0])
@pytest.mark.parametrize(
    "trigger", [AtMoveClosed(0.0), AtNetworkChange(0.0), AtNetworkChange(0.4)], ids=repr
)
def test_a_lost_leader_delays_a_change_and_loses_nothing(
    trigger: AtMoveClosed | AtNetworkChange, laptop_dies_at_s: float | None
) -> None:
    event = CrashAgent(trigger, "leader")
    result = simulate(with_event(event, laptop_dies_at_s=laptop_dies_at_s), 1)
    assert result.steps_repeated == 0
    assert networks(result)[-1] == "west"
    # Its lease expires after 20 s; a lost machine in the west is not awaited.
    assert max(gaps_s(result)) < 45.0


def test_the_run_returns_if_the_new_machines_are_lost_before_they_train() -> None:
    result = simulate(with_event(ReclaimMachine(AtNetworkChange(0.0), "all")), 0)
    assert networks(result)[:3] == ["east", "west", "east"]
    assert result.steps_repeated == 0
    assert max(gaps_s(result)) < 60.0
    assert result.outcome == "finished"


def test_a_suspended_new_leader_is_replaced() -> None:
    result = simulate(with_event(FreezeAgent(AtNetworkChange(0.0), 60.0, "leader")), 0)
    assert result.steps_repeated == 0
    assert max(gaps_s(result)) < 60.0


def test_machines_of_the_old_network_lost_before_the_change_are_not_awaited() -> None:
    """The machines of the west are ready, and continue with the last checkpoint."""
    event = CrashAgent(AtStep(226), "all")
    ready = replace(MARKET, offers=(MARKET.offers[0], replace(MARKET.offers[1], boot_s=(5.0, 6.0))))
    result = simulate(replace(with_event(event), market=ready), 0)
    assert result.outcome == "finished"


@pytest.fixture
def firewall_in_the_west(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the machines of the west."""
    is_blocked = SimNetwork.is_blocked

    def firewalled(network: SimNetwork, sender: str, receiver: str) -> bool:
        is_in_west = network.network_by_host.get(sender) == "west"
        return (is_in_west and sender != receiver) or is_blocked(network, sender, receiver)

    monkeypatch.setattr(SimNetwork, "is_blocked", firewalled)


@pytest.mark.usefixtures("firewall_in_the_west")
def test_a_network_whose_machines_cannot_connect_is_left() -> None:
    result = simulate(RETURN, 0)
    assert result.outcome == "finished"
    assert networks(result)[:3] == ["east", "west", "east"]
    assert max(gaps_s(result)) < 45.0
    lost = [one.event for one in result.entries if isinstance(one.event, NodeLost)]
    assert any(one.reason.startswith("no round could be opened in its network") for one in lost)
    causes = [one.event.cause for one in result.entries if isinstance(one.event, RoundClosed)]
    assert set(causes) == {FailureCause.RESIZE}


@pytest.mark.usefixtures("firewall_in_the_west")
def test_a_network_that_stays_unusable_is_rented_ever_less_often() -> None:
    steps = 5000
    scenario = replace(
        RETURN,
        workload=replace(RETURN.workload, steps=steps),
        cost=structs.replace(RETURN.cost, deadline_ms=None),
        faults_duration_s=2.0 * steps,
        completion_timeout_s=2.0 * steps,
    )
    result = simulate(scenario, 0)
    assert result.outcome == "finished"
    lost = [one.event for one in result.entries if isinstance(one.event, NodeLost)]
    # In 90 minutes, after pauses of 60, 120, 240, … s.
    assert 5 <= len({one.token for one in lost if one.is_unusable}) <= 8
    assert any("(4 times in a row); no further machines" in one.reason for one in lost)


@pytest.mark.parametrize("seed", [1023, 5001])
def test_a_run_on_adversarial_markets_of_two_networks(seed: int) -> None:
    """1023: machines that stand by receive notices. 5001: the run changes back and forth."""
    scenario = network_scenario(seed)
    result = simulate(scenario, seed)
    assert {one.region for one in scenario.cost.offers} == {"sim-east", "sim-west"}
    assert result.network_changes > 0


def test_machines_that_boot_do_not_change_the_offers_of_an_elastic_run() -> None:
    """Machines of two networks are reported to run one group after the other."""
    assert simulate(network_scenario(730003), 730003).violation is None


@pytest.mark.parametrize(
    ("seed", "defect"),
    [
        (730204, "machines of both markets, one set of an elastic group, counted as two sets"),
        (730228, "a standing request was switched on and off at equal prices"),
    ],
)
def test_regression_seeds_of_networks_pass(seed: int, defect: str) -> None:
    assert simulate(network_scenario(seed), seed).violation is None, defect
