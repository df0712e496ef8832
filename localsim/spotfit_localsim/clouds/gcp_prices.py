"""The Cloud Billing catalog of Google, as far as machines of the simulated region need it.

https://docs.cloud.google.com/billing/docs/reference/rest/v1/services.skus/list. The price of a
machine is divided among its cores, its memory and its GPU: `PRICED_TYPE` costs what the price
history says, and other types cost more or less by the sum of their resources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SERVICE = "6F81-5844-456A"
"""The id of Compute Engine in the catalog."""
PRICED_TYPE = "g2-standard-8"
_CORES, _MEMORY_GIB = 8, 32
_SHARES = {"core": 0.3, "ram": 0.2, "gpu": 0.5}
MAX_PAGE_SIZE = 5000
_PARAMETERS = (
    "pageSize",
    "pageToken",
    "currencyCode",
    "startTime",
    "endTime",
    # System parameters: https://docs.cloud.google.com/apis/docs/system-parameters
    "fields",
    "key",
    "alt",
    "$alt",
    "prettyPrint",
)


def find_query_violation(query: Mapping[str, str]) -> str:
    """Return what the service would refuse in the query of a list of SKUs; '' if it is valid."""
    if unknown := [name for name in query if name not in _PARAMETERS]:
        return f'Invalid JSON payload received. Unknown name "{unknown[0]}": Cannot bind query.'
    if query.get("currencyCode", "USD") != "USD":
        return "This simulator has prices in USD only."
    return ""


def list_skus(region: str, *, spot_usd: float, on_demand_usd: float) -> list[dict[str, Any]]:
    """Return the SKUs, with those that clients must not take for resources of a machine."""
    return [
        {"name": f"services/{SERVICE}/skus/SIM-{number:04}", "skuId": f"SIM-{number:04}", **sku}
        for number, sku in enumerate(_skus(region, spot_usd, on_demand_usd))
    ]


def _skus(region: str, spot_usd: float, on_demand_usd: float) -> Iterator[dict[str, Any]]:
    spot, plain = _unit_prices(spot_usd), _unit_prices(on_demand_usd)
    core, ram, gpu = "G2 Instance Core", "G2 Instance Ram", "Nvidia L4 GPU"
    attached = "attached to Spot Preemptible VMs running in Sim"
    yield _sku(
        f"Commitment v1: {core} in Sim for 1 Year", "CPU", "Commit1Yr", plain["core"], region
    )
    yield _sku(f"{core} running in Sim", "CPU", "OnDemand", plain["core"], region)
    yield _sku(f"{ram} running in Sim", "RAM", "OnDemand", plain["ram"], region, unit="GiBy.h")
    yield _sku(f"{gpu} running in Sim", "GPU", "OnDemand", plain["gpu"], region)
    # Half the price, in another region.
    yield _sku(f"{core} running in Elsewhere", "CPU", "OnDemand", plain["core"] / 2, "other1")
    yield _sku(f"Reserved {gpu} in Sim in Calendar Mode", "GPU", "OnDemand", spot["gpu"], region)
    dws = f"{gpu} attached to DWS Defined Duration VMs running in Sim"
    yield _sku(dws, "GPU", "OnDemand", spot["gpu"], region)
    yield _sku(
        f"Spot Preemptible {core} running in Sim", "CPU", "Preemptible", spot["core"], region
    )
    yield _sku(
        f"Spot Preemptible {ram} running in Sim",
        "RAM",
        "Preemptible",
        spot["ram"],
        region,
        unit="GiBy.h",
    )
    yield _sku(f"{gpu} {attached}", "GPU", "Preemptible", spot["gpu"], region)
    yield _sku("SSD backed Local Storage", "LocalSSD", "OnDemand", 0.08, region, unit="GiBy.mo")


def _unit_prices(usd: float) -> dict[str, float]:
    amounts = {"core": _CORES, "ram": _MEMORY_GIB, "gpu": 1}
    return {name: usd * share / amounts[name] for name, share in _SHARES.items()}


def _sku(
    description: str, group: str, usage: str, usd: float, region: str, *, unit: str = "h"
) -> dict[str, Any]:
    units, nanos = divmod(round(usd * 1e9), 10**9)
    rate = {
        "startUsageAmount": 0,
        "unitPrice": {"currencyCode": "USD", "units": str(units), "nanos": nanos},
    }
    return {
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Storage" if group == "LocalSSD" else "Compute",
            "resourceGroup": group,
            "usageType": usage,
        },
        "serviceRegions": [region],
        "pricingInfo": [
            {
                "summary": "",
                "pricingExpression": {
                    "usageUnit": unit,
                    "displayQuantity": 1,
                    "tieredRates": [rate],
                },
                "currencyConversionRate": 1,
                "effectiveTime": "2026-01-01T00:00:00Z",
            }
        ],
        "serviceProviderName": "Google",
    }
