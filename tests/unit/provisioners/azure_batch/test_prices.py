"""Prices of VM sizes in answers of Azure, and rows that must not be taken for them."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.offer import Market
from spotfit_provisioners.azure_batch.prices import (
    AzurePrice,
    parse_items,
    price_filter,
    region_of_endpoint,
)

SIZE, REGION = "Standard_NC4as_T4_v3", "westeurope"
NOW_S = 1_800_000_000.0  # January 2027


def item(usd: Any, meter: str = "NC4as T4 v3", **fields: Any) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": REGION,
        "armSkuName": SIZE,
        "meterName": meter,
        "skuName": meter,
        "productName": "Virtual Machines NCasT4 v3 Series",
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "effectiveStartDate": "2020-10-01T00:00:00Z",
        **fields,
    }


def usd_by_market(*items: dict[str, Any]) -> dict[Market, float | None]:
    rows = parse_items(items, region=REGION, vm_size=SIZE, now_s=NOW_S)
    return {row.market: row.usd_per_hour for row in rows}


PLAIN = item(0.6)
SPOT = item(0.1, "NC4as T4 v3 Spot")


def test_both_markets_are_read() -> None:
    rows = parse_items([PLAIN, SPOT], region=REGION, vm_size=SIZE.lower(), now_s=NOW_S)
    assert rows == [
        AzurePrice(market=Market.ON_DEMAND, region=REGION, usd_per_hour=0.6),
        AzurePrice(market=Market.SPOT, region=REGION, usd_per_hour=0.1),
    ]


@pytest.mark.parametrize(
    "other",
    [
        item(9.0, productName="Virtual Machines NCasT4 v3 Series Windows"),
        item(9.0, productName="Virtual Machines NCasT4 v3 Series Win"),
        item(9.0, "NC4as T4 v3 Spot", productName="Virtual Machines NCasT4 v3 Series Windows"),
        item(9.0, "NC4as T4 v3 Low Priority"),
        item(9.0, productName="NCasT4 v3 Series CloudServices"),
        item(9.0, productName="NCasT4 v3 Series Dedicated Host"),
        item(9.0, type="DevTestConsumption"),
        item(9.0, type="Reservation"),
        item(9.0, unitOfMeasure="1/Month"),
        item(9.0, armRegionName="eastus"),
        item(9.0, armSkuName="Standard_NC8as_T4_v3"),
        item(9.0, serviceName="Cloud Services"),
        item(9.0, effectiveStartDate="2030-01-01T00:00:00Z"),
        item(9.0, effectiveEndDate="2026-01-01T00:00:00Z"),
        item(0.6, isPrimaryMeterRegion=False),
    ],
    ids=lambda one: " ".join(str(value) for value in one.values() if value not in PLAIN.values()),
)
def test_other_rows_are_ignored(other: dict[str, Any]) -> None:
    expected = {Market.ON_DEMAND: 0.6, Market.SPOT: 0.1}
    # The last row of a product must not win, and the first one neither.
    assert usd_by_market(PLAIN, SPOT, other) == usd_by_market(other, PLAIN, SPOT) == expected


@pytest.mark.parametrize(
    "changed",
    [{"retailPrice": 0.0}, {"retailPrice": None}, {"retailPrice": "0.6"}, {"currencyCode": "EUR"}],
    ids=str,
)
def test_row_without_a_certain_price_is_unknown(changed: dict[str, Any]) -> None:
    assert usd_by_market(item(0.6, **changed))[Market.ON_DEMAND] is None


def test_two_prices_are_none() -> None:
    assert usd_by_market(PLAIN, item(0.7)) == {Market.ON_DEMAND: None}
    assert usd_by_market(PLAIN, item(0.0)) == {Market.ON_DEMAND: None}


@pytest.mark.parametrize(
    ("endpoint", "region"),
    [
        ("https://training.westeurope.batch.azure.com", "westeurope"),
        ("https://training.EastUS2.batch.azure.com/", "eastus2"),
        ("https://training.usgovvirginia.batch.usgovcloudapi.net", ""),
        ("http://127.0.0.1:4321", ""),
        ("", ""),
    ],
)
def test_region_is_part_of_the_endpoint(endpoint: str, region: str) -> None:
    assert region_of_endpoint(endpoint) == region


def test_filter_quotes_values() -> None:
    assert price_filter("west'europe", "S") == (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and "
        "armRegionName eq 'west''europe' and armSkuName eq 'S'"
    )
