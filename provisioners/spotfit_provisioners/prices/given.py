"""Prices given by the user: the option `prices` of every backend.

    prices = {"p5.48xlarge": {"spot": 14.5, "on_demand": 55.04}, "*": {"spot": 2}}

The names are machine types in the backend's terms; `ANY_TYPE` stands for all others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector, did_you_mean
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing, offer_name

ANY_TYPE = "*"
GIVEN_SOURCE = "given"
_MARKETS = tuple(market.value for market in Market)
_EXAMPLE = '{"p5.48xlarge": {"spot": 14.5, "on_demand": 55.04}}'


def check_prices(
    prices: Mapping[str, Any], *, option: str, types: Collection[str] | None = None
) -> None:
    """Raise `ConfigError`, or `ConfigErrors` with all mistakes, if `prices` is invalid.

    `option` is its name in messages, such as 'AwsBatchOptions(prices=…)'. `types` are the only
    valid names, if the backend has no others.
    """
    errors = ErrorCollector()
    for message in _mistakes(prices, types):
        errors.add(
            ConfigError(
                f"{option}: {message}",
                do=f"Write US dollars per machine and hour, such as prices={_EXAMPLE}.",
            )
        )
    errors.raise_all()


def _mistakes(prices: Any, types: Collection[str] | None) -> Iterator[str]:
    if not isinstance(prices, Mapping):
        yield f"{prices!r} does not map machine types to prices."
        return
    for name, by_market in prices.items():
        if types is not None and name not in types:
            valid = " or ".join(map(repr, types))
            yield f"{name!r} is not the name of a machine type of this backend; use {valid}."
        if not isinstance(by_market, Mapping):
            yield f"{name!r} has the prices {by_market!r}, which do not name a market."
            continue
        for market, price in by_market.items():
            if market not in _MARKETS:
                hint = did_you_mean(str(market), _MARKETS) or f"Use {' or '.join(_MARKETS)}."
                yield f"{name!r} has a price for the unknown market {market!r}. {hint}"
            # bool is a number in Python; True is no price.
            elif isinstance(price, bool) or not isinstance(price, int | float):
                yield f"{name!r} has the {market} price {price!r}, which is not a number."
            elif not math.isfinite(price) or price < 0:
                yield f"{name!r} has the {market} price {price!r}, which is not 0 or more."


def given_price(
    prices: Mapping[str, Mapping[str, float]], machine_type: str, market: Market, *, now_s: float
) -> Price | None:
    """Return the price that the user gave for the machine type, else that for all; None if neither.

    `now_s` is the present time, since 1970-01-01 UTC: the options state the price now.
    """
    for name in (machine_type, ANY_TYPE):
        usd_per_hour = prices.get(name, {}).get(market.value)
        if usd_per_hour is not None:
            return Price(usd_per_hour=float(usd_per_hour), source=GIVEN_SOURCE, as_of_s=now_s)
    return None


def given_market(
    prices: Mapping[str, Mapping[str, float]], machine_type: str, *, default: Market
) -> Market:
    """Return the market of the user's own machines of that type.

    It is the only one for which the user gave a price of that machine type, or else of all types;
    otherwise `default`.
    """
    for name in (machine_type, ANY_TYPE):
        markets = [market for market in Market if market.value in prices.get(name, {})]
        if markets:
            return markets[0] if len(markets) == 1 else default
    return default


def own_machine_offer(
    provisioner: str,
    prices: Mapping[str, Mapping[str, float]],
    market: Market,
    *,
    machine_type: str = "",
    parts: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    now_s: float,
) -> Offer:
    """Return an offer of a backend without a price list: clusters and hosts of the user.

    `parts` distinguish its name from those of other types; by default `machine_type` does.
    """
    return Offer(
        name=offer_name(provisioner, market, *(parts or (machine_type,))),
        provisioner=provisioner,
        market=market,
        machine_type=machine_type,
        price=given_price(prices, machine_type, market, now_s=now_s),
        options=dict(options or {}),
    )


def own_machine_listing(
    offers: Sequence[Offer], *, default: str, remarks: Sequence[str] = ()
) -> OfferListing:
    """Return the listing of such offers, with a remark if a price is missing."""
    no_price = (
        f"{offers[0].provisioner} has no price list: set prices="
        '{"*": {"on_demand": …}} in its options.'
    )
    is_unknown = any(offer.price is None for offer in offers)
    return OfferListing(
        offers=tuple(offers),
        remarks=(*((no_price,) if is_unknown else ()), *remarks),
        default=default,
    )
