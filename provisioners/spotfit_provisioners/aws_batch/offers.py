"""The offers of AWS Batch: spot and on-demand by queue.

Batch chooses zone and instance type of a machine. The price of an offer is therefore the highest
one of its zones and of `instance_types`: no machine of the offer costs more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing, offer_name
from spotfit_provisioners.aws_batch import prices
from spotfit_provisioners.aws_batch.client import (
    list_products,
    list_spot_prices,
    unreadable_answer_errors,
)
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.prices.cache import (
    ON_DEMAND_MAX_AGE_S,
    SPOT_MAX_AGE_S,
    CachedRows,
    PriceCache,
    note_problem,
)
from spotfit_provisioners.prices.given import given_price

BACKEND = "aws_batch"
SPOT_SOURCE = "EC2 spot price history"
ON_DEMAND_SOURCE = "AWS price list"


def list_offers(
    options: AwsBatchOptions, cache: PriceCache, region_of: Callable[[str], str]
) -> OfferListing:
    """Return one offer for each queue.

    A region without an on-demand queue has an offer that cannot be rented (`render.plan` raises an
    error): it has the price of on-demand machines, for comparison. `region_of` returns the region
    of an entry of the options.
    """
    book = _PriceBook(options, cache)
    types = options.instance_types

    def offer(market: Market, region: str, queue: str = "") -> Offer:
        return Offer(
            name=offer_name(BACKEND, market, region, queue),
            provisioner=BACKEND,
            market=market,
            region=region,
            machine_type=types[0] if len(types) == 1 else "",
            network=region,
            price=book.price(market, region),
            options={"queue": queue} if queue else {},
        )

    spot = {queue: region_of(queue) for queue in options.queues}
    on_demand = {queue: region_of(queue) for queue in options.on_demand_queues}
    others = [one for one in dict.fromkeys(spot.values()) if one not in on_demand.values()]
    offers = (
        *(offer(Market.SPOT, region, queue) for queue, region in spot.items()),
        *(offer(Market.ON_DEMAND, region, queue) for queue, region in on_demand.items()),
        *(offer(Market.ON_DEMAND, region) for region in others),
    )
    return OfferListing(offers=offers, remarks=tuple(book.remarks))


@dataclass(slots=True)
class _PriceBook:
    """Prices of the instance types of the options, given or asked for."""

    options: AwsBatchOptions
    cache: PriceCache
    remarks: dict[str, None] = field(default_factory=dict)
    """Why prices are unknown or old, each once and in order."""

    def price(self, market: Market, region: str) -> Price | None:
        """Return the highest price of the instance types; None if one is unknown."""
        types = self.options.instance_types
        if not types:
            given = given_price(self.options.prices, "", market, now_s=self.cache.now_s())
            if given is None:
                self.remarks[
                    "AwsBatchOptions(instance_types) is not set, so that prices are unknown."
                ] = None
            return given
        found = [self._price_of_type(one, market, region) for one in types]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            missing = [name for name, one in zip(types, found, strict=True) if one is None]
            self.remarks[f"No {market.value} price of {', '.join(missing)} in {region}."] = None
            return None
        highest = max(known, key=lambda one: one.usd_per_hour)
        return Price(
            usd_per_hour=highest.usd_per_hour,
            source=prices.describe_maximum(highest.source, len(known), "instance types"),
            as_of_s=min(one.as_of_s for one in known),
        )

    def _price_of_type(self, machine_type: str, market: Market, region: str) -> Price | None:
        given = given_price(self.options.prices, machine_type, market, now_s=self.cache.now_s())
        if given is not None:
            return given
        # A family such as 'g5', of which Batch chooses a size; EC2 would refuse the request.
        if "." not in machine_type:
            return None
        if market is Market.SPOT:
            spot = self._spot_rows(region)
            highest = prices.highest_spot_price(spot.rows, machine_type)
            if highest is None:
                return None
            source = prices.describe_maximum(SPOT_SOURCE, highest[1], "zones")
            return Price(usd_per_hour=highest[0], source=source, as_of_s=spot.as_of_s)
        listed = self._on_demand_rows(region, machine_type)
        price = prices.on_demand_price(listed.rows, machine_type)
        if price is None:
            return None
        return Price(usd_per_hour=price, source=ON_DEMAND_SOURCE, as_of_s=listed.as_of_s)

    def _spot_rows(self, region: str) -> CachedRows[prices.AwsSpotPrice]:
        types = [one for one in self.options.instance_types if "." in one]
        endpoint = self.options.endpoint
        return note_problem(
            self.remarks,
            f"Spot prices in {region}",
            self.cache.read(
                {
                    "source": SPOT_SOURCE,
                    "region": region,
                    "types": prices.all_types(types),
                    "endpoint": endpoint,
                },
                prices.AwsSpotPrice,
                lambda: prices.parse_spot_prices(list_spot_prices(region, types, endpoint)),
                max_age_s=SPOT_MAX_AGE_S,
                errors=unreadable_answer_errors(),
            ),
        )

    def _on_demand_rows(
        self, region: str, machine_type: str
    ) -> CachedRows[prices.AwsOnDemandPrice]:
        endpoint = self.options.endpoint
        return note_problem(
            self.remarks,
            f"On-demand prices in {region}",
            self.cache.read(
                {
                    "source": ON_DEMAND_SOURCE,
                    "region": region,
                    "types": machine_type,
                    "endpoint": endpoint,
                },
                prices.AwsOnDemandPrice,
                lambda: prices.parse_products(
                    list_products(region, machine_type, endpoint),
                    machine_type=machine_type,
                    region=region,
                ),
                max_age_s=ON_DEMAND_MAX_AGE_S,
                errors=unreadable_answer_errors(),
            ),
        )
