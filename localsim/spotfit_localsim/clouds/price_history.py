"""Prices of the simulated clouds over time, from a JSON file.

    {"spot": {"sim-east-1a": [[0, 2.1], [3600, 2.3]]}, "on_demand": {"sim-east-1": 9.8}}

Spot prices are rows of (seconds since the simulator started, US dollars per machine and hour) for
each zone, on-demand prices those of a region. They are replayed at the `speed` of the market. All
machine types have the same price. Zones and regions that are missing have default prices.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import msgspec

from spotfit.core.codec import DECODE_ERRORS
from spotfit.core.errors import ConfigError

PriceChange = tuple[float, Annotated[float, msgspec.Meta(gt=0)]]
"""Time in seconds and price in US dollars per hour."""
DEFAULT_SPOT: tuple[PriceChange, ...] = ((-30 * 86400.0, 0.1234), (-86400.0, 0.4321))
"""The price in force, and a lower one of a month ago that must be ignored."""
DEFAULT_ON_DEMAND_USD = 1.0066


class PriceHistory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of one machine, by zone and by region."""

    spot: dict[str, tuple[PriceChange, ...]] = {}
    on_demand: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}

    def zones(self, region: str, default: str) -> list[str]:
        """Return the zones of a region with spot prices, or `default` if there are none."""
        return sorted(zone for zone in self.spot if zone.startswith(region)) or [default]

    def changes(self, zone: str) -> tuple[PriceChange, ...]:
        """Return the spot prices of a zone with the time from which each is in force."""
        return self.spot.get(zone, DEFAULT_SPOT)

    def on_demand_usd(self, region: str) -> float:
        """Return the on-demand price of a region."""
        return self.on_demand.get(region, DEFAULT_ON_DEMAND_USD)


def read_price_history(path: Path) -> PriceHistory:
    """Parse a file. Raises `ConfigError` for an unreadable or invalid one."""
    try:
        history = msgspec.json.decode(path.read_bytes(), type=PriceHistory)
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigError(
            f"The prices in {path} cannot be read: {error}.",
            do='Write for example {"spot": {"sim-east-1a": [[0, 2.1], [3600, 2.3]]}}.',
        ) from error
    for zone, changes in history.spot.items():
        moments = [moment for moment, _ in changes]
        if not moments or any(late <= early for early, late in itertools.pairwise(moments)):
            raise ConfigError(
                f"The spot prices of {zone} in {path} are empty or not in the order of time.",
                do="Write rows of (seconds, US dollars per hour), the earliest one first.",
            )
    return history
