"""Named scenarios, and random scenarios that depend on their seed only."""

from spotfit.model.offer import Market
from spotfit_localsim.virtual.engine import WALL_EPOCH_MS
from spotfit_localsim.virtual.scenario import (
    AtMoveClosed,
    AtNetworkChange,
    InvalidCredentials,
    KillForMemory,
)
from spotfit_localsim.virtual.scenario_library import (
    SCENARIOS,
    budget_scenario,
    deadline_scenario,
    network_scenario,
    random_scenario,
)


def test_scenario_names_are_unique() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)


def test_random_scenario_depends_on_its_seed() -> None:
    assert random_scenario(3) == random_scenario(3)
    assert len({repr(random_scenario(seed)) for seed in range(50)}) == 50


def test_random_scenarios_cover_all_kinds_of_faults() -> None:
    scenarios = [random_scenario(seed) for seed in range(200)]
    assert any(scenario.min_workers is not None for scenario in scenarios)
    assert any(scenario.workload.crashes for scenario in scenarios)
    assert any(scenario.market.capacity for scenario in scenarios)
    assert any(scenario.laptop.dies_at_s for scenario in scenarios)
    assert any(scenario.network.partitions_per_hour for scenario in scenarios)
    assert any(scenario.faults.crash_probability for scenario in scenarios)


def test_number_of_user_crashes_is_within_the_retry_budget() -> None:
    for scenario in (random_scenario(seed) for seed in range(200)):
        assert len(scenario.workload.crashes) <= scenario.failure_limits.worker


def test_random_scenarios_cover_the_faults_of_real_accounts() -> None:
    scenarios = [random_scenario(seed) for seed in range(1000, 1200)]
    kinds = {type(event) for scenario in scenarios for event in scenario.events}
    assert {InvalidCredentials, KillForMemory} <= kinds
    assert any(scenario.time_budget_s for scenario in scenarios)
    assert any(scenario.timing.partial_capacity_timeout_s < 60.0 for scenario in scenarios)
    assert any(scenario.market.read_lag_s for scenario in scenarios)


def test_number_of_memory_kills_is_within_the_retry_budget() -> None:
    for scenario in (random_scenario(seed) for seed in range(1000, 1200)):
        kills = sum(isinstance(event, KillForMemory) for event in scenario.events)
        assert len(scenario.workload.crashes) + kills <= scenario.failure_limits.worker


def test_deadlines_leave_the_training_time_and_a_changeover() -> None:
    assert deadline_scenario(3) == deadline_scenario(3)
    for scenario in map(deadline_scenario, range(200)):
        deadline_ms, training_s = scenario.cost.deadline_ms, scenario.cost.training_time_s
        assert deadline_ms is not None
        assert training_s is not None
        assert training_s > scenario.workload.steps * scenario.workload.step_s[1]
        assert 1.08 <= ((deadline_ms - WALL_EPOCH_MS) / 1000 - 600.0) / training_s <= 1.9001
        deadline_s = (deadline_ms - WALL_EPOCH_MS) / 1000
        assert deadline_s < scenario.faults_duration_s, "the market recovers after it"


def test_deadline_scenarios_offer_spot_zones_and_on_demand_machines() -> None:
    scenarios = [deadline_scenario(seed) for seed in range(200)]
    for scenario in scenarios:
        markets = [offer.market for offer in scenario.cost.offers]
        assert markets.count(Market.ON_DEMAND) == 1
        assert {offer.network for offer in scenario.cost.offers} == {"sim-east"}
        assert scenario.cost.uses_on_demand
    assert {len(scenario.cost.offers) for scenario in scenarios} == {2, 3, 4, 5}
    spot = [one for scenario in scenarios for one in scenario.market.offers[:-1]]
    assert any(one.early_loss_probability for one in spot)
    assert any(one.capacity and one.capacity.max_capacity == 0 for one in spot)
    assert any(one.capacity and len(one.capacity.points) > 30 for one in spot)
    assert any(len(one.prices) > 3 for one in spot)
    refuses = [scenario.market.offers[-1].refusal_probability > 0 for scenario in scenarios]
    assert 0.1 < sum(refuses) / len(refuses) < 0.3
    assert any(scenario.min_workers == 1 for scenario in scenarios)
    assert any(scenario.wall_clock_error_s for scenario in scenarios)
    assert any(scenario.market.drop_notice_probability for scenario in scenarios)


def test_deadline_scenarios_have_elastic_groups_on_partly_available_zones() -> None:
    scenarios = [deadline_scenario(seed) for seed in range(200)]
    elastic = [one for one in scenarios if one.min_workers is not None]
    assert 0.4 < len(elastic) / len(scenarios) < 0.6
    assert all(1 <= (one.min_workers or 0) <= one.num_workers for one in elastic)
    slower = [one for one in elastic if one.workload.full_size]
    assert all(one.workload.full_size == one.num_workers for one in slower)
    traces = [offer.capacity for one in slower for offer in one.market.offers if offer.capacity]
    levels = [{count for _, count in trace.points} for trace in traces]
    assert any(len(counts) > 2 for counts in levels)


def test_budget_scenarios_have_a_budget_and_sometimes_a_deadline() -> None:
    scenarios = [budget_scenario(seed) for seed in range(60)]
    assert all(scenario.may_exhaust_budget for scenario in scenarios)
    assert all((scenario.cost.budget_usd or 0.0) > 0 for scenario in scenarios)
    with_deadline = sum(scenario.cost.deadline_ms is not None for scenario in scenarios)
    assert 15 < with_deadline < 45


def test_network_scenarios_have_on_demand_machines_and_spot_zones_in_two_networks() -> None:
    assert network_scenario(3) == network_scenario(3)
    scenarios = [network_scenario(seed) for seed in range(60)]
    for scenario in scenarios:
        on_demand = [one for one in scenario.cost.offers if one.market is Market.ON_DEMAND]
        assert [one.network for one in on_demand] == ["sim-east", "sim-west"]
        assert scenario.cost.machines.keys() == {one.name for one in scenario.cost.offers}
    spot = [one.network for scenario in scenarios for one in scenario.cost.offers[:-2]]
    assert 0.3 < spot.count("sim-west") / len(spot) < 0.7
    triggers = {type(event.trigger) for scenario in scenarios for event in scenario.events}
    assert {AtMoveClosed, AtNetworkChange} <= triggers
    assert 5 < sum(scenario.cost.budget_usd is not None for scenario in scenarios) < 40
