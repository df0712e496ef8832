"""The storms have names of their own, and a storm from a seed is always the same one."""

from spotfit_localsim.virtual.scenario_library import SCENARIOS, random_scenario


def test_every_scenario_has_its_name() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)


def test_a_seed_is_one_storm_and_another_seed_another() -> None:
    assert random_scenario(3) == random_scenario(3)
    assert len({repr(random_scenario(seed)) for seed in range(50)}) == 50


def test_storms_are_of_every_kind() -> None:
    storms = [random_scenario(seed) for seed in range(200)]
    assert any(storm.min_workers is not None for storm in storms)
    assert any(storm.workload.crashes for storm in storms)
    assert any(storm.market.capacity for storm in storms)
    assert any(storm.laptop.dies_at_s for storm in storms)
    assert any(storm.network.partitions_per_hour for storm in storms)
    assert any(storm.faults.crash_probability for storm in storms)


def test_a_mistake_of_the_user_is_always_within_the_budget() -> None:
    for storm in (random_scenario(seed) for seed in range(200)):
        assert len(storm.workload.crashes) <= storm.failure_limits.worker
