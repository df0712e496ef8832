"""Prices of Azure VM sizes in answers of the Retail Prices API. Pure.

Format: https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from spotfit.model.offer import Market
from spotfit_provisioners.prices.cache import PositivePrice

API_VERSION = "2023-01-01-preview"
_BATCH_HOST = re.compile(r"https://[^./]+\.([a-z0-9]+)\.batch\.azure\.com/?", re.IGNORECASE)
# Rows of one VM size that differ only in these names. " Win" is an abbreviation in some of them.
_OTHER_PRODUCTS = re.compile(r"Windows|\bWin\b|Cloud ?Services|Dedicated Host", re.IGNORECASE)


class AzurePrice(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a VM size on one market; None if there are several."""

    market: Market
    region: str
    usd_per_hour: PositivePrice | None = None


def region_of_endpoint(endpoint: str) -> str:
    """Return the region in the URL of a Batch account; '' if the URL has another form."""
    match = _BATCH_HOST.fullmatch(endpoint)
    return match[1].lower() if match else ""


def price_filter(region: str, vm_size: str) -> str:
    """Return the OData filter for the prices of a VM size in a region."""
    terms = {
        "serviceName": "Virtual Machines",
        "priceType": "Consumption",
        "armRegionName": region,
        "armSkuName": vm_size,
    }
    # A quote within a value is doubled, as in OData.
    quoted = ((name, value.replace("'", "''")) for name, value in terms.items())
    return " and ".join(f"{name} eq '{value}'" for name, value in quoted)


def parse_items(
    items: Iterable[Mapping[str, Any]], *, region: str, vm_size: str, now_s: float
) -> list[AzurePrice]:
    """Return the prices of Linux VMs of that size, one for each market that has any."""
    found: dict[Market, set[float | None]] = {}
    for item in items:
        if _is_linux_machine(item, region, vm_size) and _is_in_force(item, now_s):
            is_spot = "Spot" in f"{item.get('meterName', '')} {item.get('skuName', '')}"
            market = Market.SPOT if is_spot else Market.ON_DEMAND
            found.setdefault(market, set()).add(_price(item))
    return [
        AzurePrice(
            market=market,
            region=region,
            usd_per_hour=prices.pop() if len(prices) == 1 else None,
        )
        for market, prices in sorted(found.items())
    ]


def _is_linux_machine(item: Mapping[str, Any], region: str, vm_size: str) -> bool:
    names = f"{item.get('meterName', '')} {item.get('skuName', '')}"
    required = {
        "type": "Consumption",
        "serviceName": "Virtual Machines",
        "armRegionName": region,
        "unitOfMeasure": "1 Hour",
    }
    return (
        all(item.get(name) == value for name, value in required.items())
        and str(item.get("armSkuName", "")).lower() == vm_size.lower()
        and "Low Priority" not in names
        and not _OTHER_PRODUCTS.search(str(item.get("productName", "")))
    )


def _is_in_force(item: Mapping[str, Any], now_s: float) -> bool:
    """Whether the price is neither announced nor over."""
    start, end = (item.get(name) for name in ("effectiveStartDate", "effectiveEndDate"))
    return (start is None or _moment_s(start) <= now_s) and (end is None or now_s < _moment_s(end))


def _moment_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _price(item: Mapping[str, Any]) -> float | None:
    value = item.get("retailPrice")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    is_price = math.isfinite(value) and value > 0 and item.get("currencyCode") == "USD"
    return float(value) if is_price else None
