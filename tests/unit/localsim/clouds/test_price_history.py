"""Files of prices over time."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.clouds.capacity import MarketOptions, RealTimeMarket
from spotfit_localsim.clouds.price_history import (
    DEFAULT_ON_DEMAND_USD,
    DEFAULT_SPOT,
    PriceHistory,
    read_price_history,
)

FILE = '{"spot": {"here-1a": [[0, 2.0], [3600, 2.5]]}, "on_demand": {"here-1": 9.8}}'


def test_recorded_prices_are_replayed_at_the_speed_of_the_market(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(FILE)
    market = RealTimeMarket(MarketOptions(price_history=str(path), speed=60.0), started_s=1000.0)
    assert market.price_changes("here-1a") == [(1000.0, 2.0), (1060.0, 2.5)]
    prices = [market.spot_price_at("here-1a", now_s) for now_s in (900.0, 1059.0, 1060.0)]
    assert prices == [2.0, 2.0, 2.5]
    assert market.prices.on_demand_usd("here-1") == 9.8


def test_other_zones_have_default_prices() -> None:
    history = PriceHistory(spot={"here-1b": ((0.0, 1.0),)})
    assert history.zones("here-1", "here-1a") == ["here-1b"]
    assert history.zones("there-1", "there-1a") == ["there-1a"]
    assert history.changes("there-1a") == DEFAULT_SPOT
    assert history.on_demand_usd("there-1") == DEFAULT_ON_DEMAND_USD


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"spots": {}}',
        '{"spot": {"a": []}}',
        '{"spot": {"a": [[0, 0]]}}',
        '{"spot": {"a": [[0, -1]]}}',
        '{"spot": {"a": [[60, 1], [0, 2]]}}',
        '{"on_demand": {"a": 0}}',
    ],
)
def test_invalid_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.json"):
        read_price_history(path)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_price_history(tmp_path / "none")
