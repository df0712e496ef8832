"""The market of a simulated cloud: capacity from a trace and a limit, times from seeded streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market
from spotfit_localsim.clouds.capacity import UNLIMITED_CAPACITY, MarketOptions, RealTimeMarket
from spotfit_localsim.random_streams import SeededStreams


def test_capacity_is_unlimited_by_default() -> None:
    assert RealTimeMarket(MarketOptions(), started_s=0.0).capacity_at(1e6) == UNLIMITED_CAPACITY


def test_trace_is_replayed_at_the_configured_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"kind": "availability", "gap_seconds": 60, "data": [4, 0, 2]}))
    market = RealTimeMarket(MarketOptions(trace=str(path), speed=60.0), started_s=100.0)
    assert [market.capacity_at(now) for now in (100.0, 100.9, 101.5, 102.5, 999.0)] == [
        4,
        4,
        0,
        2,
        2,
    ]
    market.max_machines = 1
    assert market.capacity_at(102.5) == 1


def test_machines_have_an_unlimited_lifetime_without_reclaims() -> None:
    without_reclaims, with_reclaims = (
        RealTimeMarket(MarketOptions(reclaims_per_hour=n), started_s=0.0) for n in (0.0, 60.0)
    )
    assert without_reclaims.draw_lifetime_s(SeededStreams(1).stream("life")) is None
    lifetimes_s = [
        with_reclaims.draw_lifetime_s(SeededStreams(n).stream("life")) for n in range(300)
    ]
    assert 40 < sum(filter(None, lifetimes_s)) / 300 < 80, "a minute on average"


def test_same_seed_gives_the_same_boot_time() -> None:
    market = RealTimeMarket(MarketOptions(boot_s=10.0), started_s=0.0)
    first, again = (market.draw_boot_s(SeededStreams(3).stream("boot")) for _ in range(2))
    assert first == again
    assert 9.0 <= first <= 11.0


def test_spot_and_on_demand_have_separate_capacities(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"kind": "availability", "gap_seconds": 60, "data": [0, 0]}))
    options = MarketOptions(trace=str(path), on_demand_capacity=3)
    market = RealTimeMarket(options, started_s=0.0)
    assert market.capacity_at(0.0, Market.SPOT) == 0
    assert market.capacity_at(0.0, Market.ON_DEMAND) == 3
    market.max_on_demand_machines = 0
    assert market.capacity_at(0.0, Market.ON_DEMAND) == 0
    market.max_on_demand_machines = None
    assert market.capacity_at(0.0, Market.ON_DEMAND) == UNLIMITED_CAPACITY


def test_on_demand_machines_boot_in_their_own_time_and_are_never_preempted() -> None:
    options = MarketOptions(boot_s=10.0, on_demand_boot_s=100.0, reclaims_per_hour=60.0)
    market = RealTimeMarket(options, started_s=0.0)
    boot_s = market.draw_boot_s(SeededStreams(3).stream("boot"), Market.ON_DEMAND)
    assert 90.0 <= boot_s <= 110.0
    assert market.draw_lifetime_s(SeededStreams(1).stream("life"), Market.ON_DEMAND) is None
    same = RealTimeMarket(MarketOptions(boot_s=10.0), started_s=0.0)
    assert 9.0 <= same.draw_boot_s(SeededStreams(3).stream("boot"), Market.ON_DEMAND) <= 11.0


@pytest.mark.parametrize(
    "options",
    [
        {"speed": 0.0},
        {"speed": -1.0},
        {"boot_s": -1.0},
        {"on_demand_boot_s": -1.0},
        {"on_demand_capacity": -1},
    ],
)
def test_invalid_market_options_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        MarketOptions(**options)  # type: ignore[arg-type]  # one of several fields
