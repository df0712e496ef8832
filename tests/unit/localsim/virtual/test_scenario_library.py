"""Named scenarios, and random scenarios that depend on their seed only."""

from spotfit_localsim.virtual.scenario import InvalidCredentials, KillForMemory
from spotfit_localsim.virtual.scenario_library import SCENARIOS, random_scenario


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
