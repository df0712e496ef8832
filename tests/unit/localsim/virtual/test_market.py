"""What the market gives, and for how long."""

from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.market import UNLIMITED_CAPACITY, SimMarket, SimMarketConfig


def tide(market: SimMarketConfig) -> SimMarket:
    return SimMarket(market, SeededStreams(1).stream("market"))


def test_capacity_follows_the_history_until_the_storm_is_over() -> None:
    moving = tide(SimMarketConfig(capacity=CapacityTrace("t", ((0.0, 4), (10.0, 0), (20.0, 2)))))
    assert [moving.capacity_at(moment) for moment in (0.0, 9.9, 10.0, 25.0)] == [4, 4, 0, 2]
    assert moving.capacity_change_times() == (0.0, 10.0, 20.0)
    moving.stop_faults()
    assert moving.capacity_at(10.0) == UNLIMITED_CAPACITY


def test_machines_live_as_long_as_the_market_says_on_average() -> None:
    moving = tide(SimMarketConfig(reclaims_per_hour=60.0))
    lives = [moving.draw_lifetime_s() or 0.0 for _ in range(3000)]
    assert 55 < sum(lives) / len(lives) < 65
    assert tide(SimMarketConfig()).draw_lifetime_s() is None


def test_after_the_storm_nobody_is_refused_reclaimed_or_left_without_answer() -> None:
    moving = tide(
        SimMarketConfig(
            reclaims_per_hour=1.0,
            refusal_probability=1.0,
            lost_response_probability=1.0,
            boot_failure_probability=1.0,
        )
    )
    assert moving.should_refuse()
    assert moving.should_lose_response()
    assert moving.should_fail_boot()
    moving.stop_faults()
    assert not moving.should_refuse()
    assert not moving.should_lose_response()
    assert not moving.should_fail_boot()
    assert moving.draw_lifetime_s() is None
