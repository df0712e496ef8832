"""The price of a Google Cloud machine: the sum of its cores, memory, GPUs and local SSDs. Pure.

The Billing Catalog has prices of resources, which are recognised by their descriptions in English:
"Spot Preemptible A3 Instance Core running in Americas". Format:
https://docs.cloud.google.com/billing/docs/reference/rest/v1/services.skus/list. The descriptions
are those that the catalog had in 2026; a resource that none matches is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from spotfit.model.offer import Market
from spotfit_provisioners.gcp_batch.machine_types import GcpMachineShape
from spotfit_provisioners.prices.cache import PositivePrice

COMPUTE_ENGINE_SERVICE = "6F81-5844-456A"
# Of Google's monthly prices: https://cloud.google.com/compute/disks-image-pricing
_HOURS_PER_MONTH = 730
_USAGE_TYPES = ("OnDemand", "Preemptible")
_SPOT = "Spot Preemptible"
# Prices of commitments, reservations, queued capacity and hosts of one tenant.
_OTHER_TERMS = re.compile(r"Commitment|Reserved|DWS|Calendar Mode|Sole Tenancy|Custom|Premium for")

# Pattern of the description by accelerator type. A SKU of B200 contains the share of cores and
# memory of the machine. Google names the GPU of a3-megagpu-8g Mega or Plus.
_GPUS: Mapping[str, str] = {
    "nvidia-tesla-p4": "Nvidia Tesla P4 GPU",
    "nvidia-tesla-p100": "Nvidia Tesla P100 GPU",
    "nvidia-tesla-v100": "Nvidia Tesla V100 GPU",
    "nvidia-tesla-t4": "Nvidia Tesla T4 GPU",
    "nvidia-l4": "Nvidia L4 GPU",
    "nvidia-tesla-a100": "Nvidia Tesla A100 GPU",
    "nvidia-a100-80gb": "Nvidia Tesla A100 80GB GPU",
    "nvidia-h100-80gb": "Nvidia H100 80GB GPU",
    "nvidia-h100-mega-80gb": "Nvidia H100 (80GB (Mega|Plus)|Mega 80GB) GPU",
    "nvidia-rtx-pro-6000": "RTX 6000 96GB",
    "nvidia-b200": r"A4 Nvidia B200 \(1 gpu slice\)",
}
_UNITS = {"core": "h", "gpu": "h", "ram": "GiBy.h", "ssd": "GiBy.mo"}
Resource = Literal["core", "ram", "gpu", "ssd"]


class GcpSkuPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one unit of a resource; None if it is 0, graduated or in another currency."""

    description: str
    usage_type: str
    unit: str
    """'h', 'GiBy.h' or 'GiBy.mo'."""
    usd: PositivePrice | None = None


def parse_skus(skus: Iterable[Mapping[str, Any]], *, region: str) -> list[GcpSkuPrice]:
    """Return the prices of machine resources in the region, without those of other terms."""
    return [
        GcpSkuPrice(
            description=sku["description"],
            usage_type=sku["category"]["usageType"],
            unit=str(expression.get("usageUnit", "")),
            usd=_unit_price(expression),
        )
        for sku in skus
        if region in sku.get("serviceRegions", ())
        and _is_machine_resource(sku.get("category", {}))
        and not _OTHER_TERMS.search(sku.get("description", ""))
        for expression in _current_expression(sku)
    ]


def machine_price(
    rows: Iterable[GcpSkuPrice], shape: GcpMachineShape, market: Market
) -> float | None:
    """Return the price of a machine in US dollars per hour; None if it is unknown."""
    rows = list(rows)
    total = 0.0
    for resource, pattern, amount in _resources(shape):
        price = _resource_price(rows, resource, pattern, market)
        if price is None:
            return None
        total += amount * price
    return total or None


def _is_machine_resource(category: Mapping[str, Any]) -> bool:
    is_compute = category.get("resourceFamily") == "Compute"
    is_local_ssd = category.get("resourceGroup") == "LocalSSD"
    return (is_compute or is_local_ssd) and category.get("usageType") in _USAGE_TYPES


def _current_expression(sku: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    # "A timeline of pricing info for this SKU in chronological order", says the documentation of
    # the field; it has one entry unless the request has a time range.
    for pricing in sku.get("pricingInfo", [])[-1:]:
        yield pricing.get("pricingExpression", {})


def _unit_price(expression: Mapping[str, Any]) -> float | None:
    tiers = expression.get("tieredRates", [])
    if len(tiers) != 1 or float(tiers[0].get("startUsageAmount", 0)):
        return None
    money = tiers[0].get("unitPrice", {})
    if money.get("currencyCode") != "USD":
        return None
    # JSON of protobuf writes 64-bit integers as text, and may omit zeros.
    price = int(money.get("units", 0)) + int(money.get("nanos", 0)) / 1e9
    return price if price > 0 else None


def _resources(shape: GcpMachineShape) -> Iterator[tuple[Resource, str, float]]:
    """Yield the resources of a machine: kind, pattern of the description, and amount."""
    if shape.gpus:
        yield "gpu", _GPUS.get(shape.gpu_type, r"(?!)"), shape.gpus
    if not shape.is_priced_by_gpu:
        yield "core", rf"{shape.series} Core", shape.cores
        yield "ram", rf"{shape.series} Ram", shape.memory_gib
    if shape.local_ssd_gib:
        yield "ssd", "SSD backed Local Storage", shape.local_ssd_gib / _HOURS_PER_MONTH


def _resource_price(
    rows: Iterable[GcpSkuPrice], resource: Resource, pattern: str, market: Market
) -> float | None:
    description = re.compile(_description(resource, pattern, market))
    prices = {
        row.usd if row.unit == _UNITS[resource] else None
        for row in rows
        if description.fullmatch(row.description)
        # The description decides: spot SKUs of B200 have the usage type OnDemand.
        and (market is Market.SPOT or row.usage_type == "OnDemand")
    }
    # Different prices for one description are not a price.
    return prices.pop() if len(prices) == 1 else None


def _description(resource: Resource, pattern: str, market: Market) -> str:
    """Return the pattern of whole descriptions, which names the place at the end."""
    is_spot = market is Market.SPOT
    if resource == "ssd":
        # Without a place for several regions together.
        attached = " attached to Spot Preemptible VMs" if is_spot else ""
        return rf"{pattern}{attached}( (running )?in .+)?"
    # The slice of B200 is the only GPU whose description has the form of cores and memory.
    if resource == "gpu" and not pattern.startswith("A4 "):
        attached = " attached to Spot Preemptible VMs" if is_spot else ""
        return rf"{pattern}{attached} running in .+"
    return rf"{_SPOT + ' ' if is_spot else ''}{pattern} running in .+"
