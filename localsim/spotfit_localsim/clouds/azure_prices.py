"""The Retail Prices API of Azure, as far as VM sizes of the simulated region need it.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices. The form of
its errors is not documented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

REGION = "sim"
PAGE_SIZE = 3
"""Items per page; up to 1,000 in the real service."""
_TERM = re.compile(r"(\w+) eq '((?:[^']|'')*)'")
# "Filter values are case sensitive" since 2023-01-01-preview; fields that can be filtered.
_FIELDS = {
    "armRegionName": "armRegionName",
    "armSkuName": "armSkuName",
    "location": "location",
    "meterId": "meterId",
    "meterName": "meterName",
    "priceType": "type",
    "productName": "productName",
    "serviceFamily": "serviceFamily",
    "serviceName": "serviceName",
    "skuName": "skuName",
}


def parse_filter(text: str) -> dict[str, str]:
    """Return the wanted value of each field of an item. Raises `ValueError` if it is no filter.

    Only comparisons with `eq` that are joined by `and` are simulated.
    """
    wanted: dict[str, str] = {}
    for term in text.split(" and ") if text else []:
        match = _TERM.fullmatch(term.strip())
        if match is None or match[1] not in _FIELDS:
            raise ValueError(f"Invalid filter clause: {term!r}")
        wanted[_FIELDS[match[1]]] = match[2].replace("''", "'")
    return wanted


def list_items(
    wanted: Mapping[str, str], *, spot_usd: float, on_demand_usd: float
) -> list[dict[str, Any]]:
    """Return the items that have the wanted values."""
    vm_size = wanted.get("armSkuName", "Standard_D4s_v5")
    items = _items(vm_size, spot_usd, on_demand_usd)
    return [item for item in items if wanted.items() <= item.items()]


def _items(vm_size: str, spot_usd: float, on_demand_usd: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of a VM size, among them those that only names tell from the plain one."""
    name = vm_size.removeprefix("Standard_").replace("_", " ")
    product = f"Virtual Machines {name.split()[0]} Series"
    # The last row of a product must not win.
    rows = [
        (product, name, on_demand_usd),
        (product, f"{name} Spot", spot_usd),
        (product, f"{name} Low Priority", spot_usd / 2),
        (f"{product} Windows", name, 1.8 * on_demand_usd),
        (f"{product} Windows", f"{name} Spot", 1.8 * spot_usd),
        (f"{product} Windows", f"{name} Low Priority", 0.0),
    ]
    for product_name, meter_name, usd in rows:
        yield _item(vm_size, product_name, meter_name, usd, "Consumption")
    yield _item(vm_size, product, name, 0.5 * on_demand_usd, "DevTestConsumption")
    yield {**_item(vm_size, product, name, 4000.0, "Reservation"), "reservationTerm": "1 Year"}


def _item(
    vm_size: str, product_name: str, meter_name: str, usd: float, kind: str
) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": REGION,
        "location": "Simulated",
        "effectiveStartDate": "2026-01-01T00:00:00Z",
        "meterId": "00000000-0000-0000-0000-000000000000",
        "meterName": meter_name,
        "productId": "DZH318Z0SIM",
        "skuId": "DZH318Z0SIM/0001",
        "productName": product_name,
        "skuName": meter_name,
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": kind,
        "isPrimaryMeterRegion": True,
        "armSkuName": vm_size,
    }
