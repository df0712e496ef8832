"""Capacity, lifetimes and refusals of the simulated market."""

from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.market import UNLIMITED_CAPACITY, SimMarket, SimMarketConfig


def create_market(config: SimMarketConfig) -> SimMarket:
    return SimMarket(config, SeededStreams(1).stream("market"))


def test_capacity_follows_the_trace_until_faults_are_stopped() -> None:
    market = create_market(
        SimMarketConfig(capacity=CapacityTrace("t", ((0.0, 4), (10.0, 0), (20.0, 2))))
    )
    assert [market.capacity_at(now) for now in (0.0, 9.9, 10.0, 25.0)] == [4, 4, 0, 2]
    assert market.capacity_change_times() == (0.0, 10.0, 20.0)
    market.stop_faults()
    assert market.capacity_at(10.0) == UNLIMITED_CAPACITY


def test_lifetimes_have_the_configured_mean() -> None:
    market = create_market(SimMarketConfig(reclaims_per_hour=60.0))
    lifetimes_s = [market.draw_lifetime_s() or 0.0 for _ in range(3000)]
    assert 55 < sum(lifetimes_s) / len(lifetimes_s) < 65
    assert create_market(SimMarketConfig()).draw_lifetime_s() is None


def test_stopped_faults_refuse_and_reclaim_no_machine() -> None:
    market = create_market(
        SimMarketConfig(
            reclaims_per_hour=1.0,
            refusal_probability=1.0,
            lost_response_probability=1.0,
            boot_failure_probability=1.0,
        )
    )
    assert market.should_refuse()
    assert market.should_lose_response()
    assert market.should_fail_boot()
    market.stop_faults()
    assert not market.should_refuse()
    assert not market.should_lose_response()
    assert not market.should_fail_boot()
    assert market.draw_lifetime_s() is None
