"""The offers of an Azure Batch pool: spot and dedicated nodes of its VM size."""

from __future__ import annotations

from spotfit.core.errors import ProvisionError
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing, offer_name
from spotfit_provisioners.azure_batch import prices, render
from spotfit_provisioners.azure_batch.client import (
    AzureResourceManagerClient,
    AzureRetailPricesClient,
    unreadable_answer_errors,
)
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.prices.cache import (
    SPOT_MAX_AGE_S,
    CachedRows,
    PriceCache,
    note_problem,
)
from spotfit_provisioners.prices.given import given_price

BACKEND = render.BACKEND
SOURCE = "Azure retail prices"


def list_offers(options: AzureBatchOptions, cache: PriceCache) -> OfferListing:
    """Return a spot and an on-demand offer; their prices are those of `vm_size` in the region."""
    remarks: dict[str, None] = {}
    region = own_region = prices.region_of_endpoint(options.endpoint)
    found: dict[Market, Price | None] = {
        market: given_price(options.prices, options.vm_size, market, now_s=cache.now_s())
        for market in Market
    }
    missing = [market for market in Market if found[market] is None]
    if missing and not options.vm_size:
        # The size of an existing pool is not read: the caller may not be permitted to.
        remarks["AzureBatchOptions(vm_size) is not set, so that prices are unknown."] = None
    elif missing:
        listed = note_problem(remarks, "Prices of Azure", _read_prices(options, cache))
        region = next((row.region for row in listed.rows), region)
        found.update({market: _price_on(listed, market) for market in missing})
        if unknown := [market.value for market in Market if found[market] is None]:
            where = f"{options.vm_size} in {region or 'the region of the account'}"
            remarks[f"No {' or '.join(unknown)} price of {where}."] = None
    offers = tuple(
        Offer(
            # Not `region`, which may have come from an answer that is missing the next time.
            name=offer_name(BACKEND, market, own_region, options.vm_size),
            provisioner=BACKEND,
            market=market,
            region=region,
            machine_type=options.vm_size,
            network=render.network(options, market),
            price=found[market],
        )
        for market in Market
    )
    return OfferListing(offers=offers, remarks=tuple(remarks))


def _price_on(listed: CachedRows[prices.AzurePrice], market: Market) -> Price | None:
    row = next((row for row in listed.rows if row.market is market), None)
    if row is None or row.usd_per_hour is None:
        return None
    return Price(usd_per_hour=row.usd_per_hour, source=SOURCE, as_of_s=listed.as_of_s)


def _read_prices(options: AzureBatchOptions, cache: PriceCache) -> CachedRows[prices.AzurePrice]:
    """Return the prices of both markets, which one request answers."""

    def fetch() -> list[prices.AzurePrice]:
        region = prices.region_of_endpoint(options.endpoint) or _read_region(options)
        client = AzureRetailPricesClient(options.endpoint)
        items = client.list_items(prices.price_filter(region, options.vm_size), prices.API_VERSION)
        return prices.parse_items(
            items, region=region, vm_size=options.vm_size, now_s=cache.now_s()
        )

    return cache.read(
        {"source": SOURCE, "account": options.endpoint, "size": options.vm_size},
        prices.AzurePrice,
        fetch,
        max_age_s=SPOT_MAX_AGE_S,
        errors=unreadable_answer_errors(),
    )


def _read_region(options: AzureBatchOptions) -> str:
    """Return the region of the account from Resource Manager. Raises `ProvisionError`."""
    management = AzureResourceManagerClient(options.management_endpoint)
    account = None
    if options.account_id:
        account = management.get(options.account_id, "2025-06-01", "read the region of the account")
    if not account or "location" not in account:
        raise ProvisionError(
            f"The region of the Batch account {options.endpoint} is not known.",
            do="Set AzureBatchOptions(account_id=…), or the option prices.",
        )
    # Resource Manager may write it with spaces: 'West Europe'.
    return str(account["location"]).replace(" ", "").lower()
