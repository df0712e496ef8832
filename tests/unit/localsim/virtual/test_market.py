"""Capacity, lifetimes and refusals of the simulated market."""

import itertools

import pytest

from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market
from spotfit_localsim.clouds.price_history import PriceHistory
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.market import (
    UNLIMITED_CAPACITY,
    SimMarket,
    SimMarketConfig,
    SimOffer,
    SimOfferConfig,
    cost_usd,
    price_at,
    random_levels,
    random_outages,
)

PRICES = ((0.0, 3.6), (100.0, 7.2), (200.0, 1.8))


def create_market(config: SimMarketConfig) -> SimMarket:
    return SimMarket(config, SeededStreams(1).stream("market"))


def create_offer(config: SimOfferConfig) -> SimOffer:
    return SimOffer(config, SeededStreams(1).stream(config.name))


def test_capacity_follows_the_trace_until_faults_are_stopped() -> None:
    market = create_market(
        SimMarketConfig(capacity=CapacityTrace("t", ((0.0, 4), (10.0, 0), (20.0, 2))))
    )
    offer = market.offers[""]
    assert [offer.capacity_at(now) for now in (-1.0, 0.0, 9.9, 10.0, 25.0)] == [4, 4, 4, 0, 2]
    assert offer.capacity_change_times() == (0.0, 10.0, 20.0)
    assert offer.capacity_drop_times() == (10.0,)
    market.stop_faults()
    assert offer.capacity_at(10.0) == UNLIMITED_CAPACITY


def test_lifetimes_have_the_configured_mean() -> None:
    offer = create_market(SimMarketConfig(reclaims_per_hour=60.0)).offers[""]
    lifetimes_s = [offer.draw_lifetime_s() or 0.0 for _ in range(3000)]
    assert 55 < sum(lifetimes_s) / len(lifetimes_s) < 65
    assert create_market(SimMarketConfig()).offers[""].draw_lifetime_s() is None


def test_stopped_faults_refuse_and_reclaim_no_machine() -> None:
    market = create_market(
        SimMarketConfig(
            reclaims_per_hour=1.0,
            refusal_probability=1.0,
            lost_response_probability=1.0,
            boot_failure_probability=1.0,
        )
    )
    offer = market.offers[""]
    assert offer.should_refuse(0.0)
    assert market.should_lose_response()
    assert market.should_fail_boot()
    market.stop_faults()
    assert not offer.should_refuse(0.0)
    assert not market.should_lose_response()
    assert not market.should_fail_boot()
    assert offer.draw_lifetime_s() is None


def test_price_in_force_is_that_of_the_last_change() -> None:
    assert [price_at(PRICES, now) for now in (-5.0, 99.0, 100.0, 900.0)] == [3.6, 3.6, 7.2, 1.8]
    history = PriceHistory(spot={"sim-east-1a": PRICES})
    assert price_at(history.changes("sim-east-1a"), 150.0) == 7.2


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"),
    [(0.0, 100.0, 0.1), (50.0, 250.0, 0.05 + 0.2 + 0.025), (100.0, 100.0, 0.0), (300, 500, 0.1)],
)
def test_every_second_is_billed_at_its_own_price(
    start_s: float, end_s: float, expected: float
) -> None:
    assert cost_usd(PRICES, start_s, end_s) == pytest.approx(expected)


def test_offers_are_listed_with_the_prices_in_force() -> None:
    config = SimMarketConfig(
        offers=(
            SimOfferConfig(name="a", zone="sim-east-a", prices=PRICES),
            SimOfferConfig(name="b", market=Market.ON_DEMAND, network="other"),
        )
    )
    first, second = config.offers_at(150.0, "sim")
    assert (first.name, first.market, first.zone) == ("a", Market.SPOT, "sim-east-a")
    assert first.price is not None
    assert (first.price.usd_per_hour, first.price.as_of_s) == (7.2, 150.0)
    assert (first.network, second.network) == ("sim-east", "other")


def test_offers_need_different_names() -> None:
    with pytest.raises(ConfigError, match="different names"):
        SimMarketConfig(offers=(SimOfferConfig(name="a"), SimOfferConfig(name="a")))


def test_on_demand_machines_have_no_end_of_their_lifetime() -> None:
    config = SimOfferConfig(
        name="a", market=Market.ON_DEMAND, reclaims_per_hour=60.0, early_loss_probability=1.0
    )
    assert create_offer(config).draw_lifetime_s() is None


def test_machines_may_be_lost_directly_after_their_start() -> None:
    config = SimOfferConfig(
        name="a", reclaims_per_hour=0.01, early_loss_probability=0.5, early_loss_s=(1.0, 2.0)
    )
    offer = create_offer(config)
    lifetimes_s = [offer.draw_lifetime_s() or 0.0 for _ in range(400)]
    assert 0.4 < sum(1.0 <= one <= 2.0 for one in lifetimes_s) / len(lifetimes_s) < 0.6


def test_request_is_accepted_after_the_longest_time_of_refusals() -> None:
    offer = create_offer(SimOfferConfig(name="a", refusal_probability=1.0, max_refused_s=60.0))
    refused = [offer.should_refuse(now) for now in (100.0, 130.0, 161.0, 170.0, 229.0, 231.0)]
    assert refused == [True, True, False, True, True, False]


def test_random_outages_alternate_with_capacity() -> None:
    def draw(seed: int) -> CapacityTrace:
        return random_outages(
            SeededStreams(seed).stream("outages"),
            machines=3,
            mean_available_s=100.0,
            mean_outage_s=50.0,
            duration_s=100_000.0,
        )

    counts = [count for _, count in draw(1).points]
    assert set(counts) == {0, 3}
    assert all(one != other for one, other in itertools.pairwise(counts))
    assert 1000 < len(counts) < 1700
    assert draw(1) == draw(1) != draw(2)


def test_random_levels_have_all_numbers_of_machines() -> None:
    def draw(seed: int) -> CapacityTrace:
        stream = SeededStreams(seed).stream("levels")
        return random_levels(stream, machines=3, mean_s=100.0, duration_s=100_000.0)

    counts = [count for _, count in draw(1).points]
    assert set(counts) == {0, 1, 2, 3}
    assert 900 < len(counts) < 1100
    assert draw(1) == draw(1) != draw(2)
