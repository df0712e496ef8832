"""The offers of Google Cloud Batch: spot and on-demand machines of one type, by allowed zone."""

from __future__ import annotations

from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing, offer_name
from spotfit_provisioners.gcp_batch import prices
from spotfit_provisioners.gcp_batch.client import GcpRestClient, unreadable_answer_errors
from spotfit_provisioners.gcp_batch.machine_types import find_shape
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.prices.cache import (
    ON_DEMAND_MAX_AGE_S,
    CachedRows,
    PriceCache,
    note_problem,
)
from spotfit_provisioners.prices.given import given_price

BACKEND = "gcp_batch"
SOURCE = "Google Cloud Billing catalog"


def list_offers(
    request: GroupRequest, options: GcpBatchOptions, cache: PriceCache, services: GcpRestClient
) -> OfferListing:
    """Return the offers of each zone of `zones`, or of the region as a whole.

    Google's prices are those of a region. The number of attached GPUs is that of the request.
    """
    remarks: dict[str, None] = {}
    found = {
        market: given_price(options.prices, options.machine_type, market, now_s=cache.now_s())
        for market in Market
    }
    missing = [market for market in Market if found[market] is None]
    if missing:
        gpus = hardware.count_gpus(request.resources_per_worker, options.workers_per_node)
        found.update(_listed_prices(missing, options, gpus, cache, services, remarks))
    offers = tuple(
        Offer(
            name=offer_name(BACKEND, market, zone or options.region, options.machine_type),
            provisioner=BACKEND,
            market=market,
            region=options.region,
            zone=zone,
            machine_type=options.machine_type,
            price=found[market],
            options={"zones": zone} if zone else {},
        )
        for market in Market
        for zone in options.zones or ("",)
    )
    return OfferListing(offers=offers, remarks=tuple(remarks))


def _listed_prices(
    markets: list[Market],
    options: GcpBatchOptions,
    gpus: int,
    cache: PriceCache,
    services: GcpRestClient,
    remarks: dict[str, None],
) -> dict[Market, Price | None]:
    if not options.machine_type:
        remarks[
            "GcpBatchOptions(machine_type) is not set, so that prices are unknown: Batch or the "
            "instance template chooses."
        ] = None
        return {}
    shape = find_shape(options.machine_type, options.accelerator, gpus)
    if shape is None:
        attached = f" with {options.accelerator}" if options.accelerator else ""
        remarks[
            f"The resources of {options.machine_type}{attached} are not known; set the option "
            "prices."
        ] = None
        return {}
    listed = note_problem(
        remarks, f"Prices in {options.region}", _read_skus(options, cache, services)
    )
    totals = {market: prices.machine_price(listed.rows, shape, market) for market in markets}
    if unknown := [market.value for market, total in totals.items() if total is None]:
        where = f"{options.machine_type} in {options.region}"
        remarks[f"No {' or '.join(unknown)} price of {where}."] = None
    return {
        market: Price(usd_per_hour=total, source=SOURCE, as_of_s=listed.as_of_s)
        for market, total in totals.items()
        if total is not None
    }


def _read_skus(
    options: GcpBatchOptions, cache: PriceCache, services: GcpRestClient
) -> CachedRows[prices.GcpSkuPrice]:
    """Return the prices of resources in the region, at most a day old.

    The catalog has no filter: all of it is read, several megabytes, for both markets together.
    """
    return cache.read(
        {"source": SOURCE, "region": options.region, "endpoint": options.endpoint},
        prices.GcpSkuPrice,
        lambda: prices.parse_skus(
            services.list_skus(prices.COMPUTE_ENGINE_SERVICE), region=options.region
        ),
        max_age_s=ON_DEMAND_MAX_AGE_S,
        errors=unreadable_answer_errors(),
    )
