"""Prices of EC2 instances in answers of EC2 and of the Price List API. Pure.

Only prices of Linux without further software, on shared hosts, are read. Formats:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_SpotPrice.html and
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/reading-service-price-list-file-for-services.html.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from spotfit.core.codec import DECODE_ERRORS
from spotfit_provisioners.prices.cache import PositivePrice

_LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
# Attributes of the machines that Batch rents. Reserved capacity has its own entries: those with
# another capacity status have a price of 0, or that of an instance that is not used.
_ATTRIBUTES: Mapping[str, str] = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
}
# 'RunInstances:0010' and others stand for licensed software.
_OPERATION = "RunInstances"


class AwsSpotPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The spot price of an instance type in one zone; None if EC2's answer is contradictory."""

    machine_type: str
    zone: str
    """The id, such as 'use1-az1': names of zones differ between accounts."""
    usd_per_hour: PositivePrice | None = None


class AwsOnDemandPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The on-demand price of an instance type in a region; None if it is not certain."""

    machine_type: str
    usd_per_hour: PositivePrice | None = None


def parse_spot_prices(entries: Iterable[Mapping[str, Any]]) -> list[AwsSpotPrice]:
    """Return the latest price of each instance type and zone, sorted."""
    latest: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry.get("ProductDescription") not in _LINUX:
            continue
        zone = entry.get("AvailabilityZoneId") or entry.get("AvailabilityZone") or ""
        known = latest.setdefault((str(entry["InstanceType"]), str(zone)), [])
        if known and entry["Timestamp"] > known[0]["Timestamp"]:
            known.clear()
        if not known or entry["Timestamp"] == known[0]["Timestamp"]:
            known.append(entry)
    return [
        AwsSpotPrice(
            machine_type=machine_type,
            zone=zone,
            usd_per_hour=_only_price(entry["SpotPrice"] for entry in known),
        )
        for (machine_type, zone), known in sorted(latest.items())
    ]


def parse_products(
    price_list: Iterable[str], *, machine_type: str, region: str
) -> list[AwsOnDemandPrice]:
    """Return the on-demand price of the instance type in the region, without it if unknown.

    `price_list` are entries of GetProducts. Reads only those that describe the machines which Batch
    rents, also if the request did not filter them.
    """
    required = {**_ATTRIBUTES, "instanceType": machine_type, "regionCode": region}
    prices = [
        price
        for entry in price_list
        for product in [_decode_product(entry)]
        if required.items() <= product["product"].get("attributes", {}).items()
        and product["product"]["attributes"].get("operation", _OPERATION) == _OPERATION
        # Entries of capacity blocks have other market options.
        and product["product"]["attributes"].get("marketoption", "OnDemand") == "OnDemand"
        for price in _hourly_prices(product)
    ]
    return [AwsOnDemandPrice(machine_type=machine_type, usd_per_hour=_only_price(prices))]


def highest_spot_price(rows: Iterable[AwsSpotPrice], machine_type: str) -> tuple[float, int] | None:
    """Return the highest price of the instance type, and the number of zones; None if unknown.

    Batch chooses the zone of a machine, so that no lower price is certain.
    """
    prices = [row.usd_per_hour for row in rows if row.machine_type == machine_type]
    known = [price for price in prices if price is not None]
    return (max(known), len(known)) if known and len(known) == len(prices) else None


def on_demand_price(rows: Iterable[AwsOnDemandPrice], machine_type: str) -> float | None:
    """Return the price of the instance type; None if it is unknown."""
    return _only_price(row.usd_per_hour for row in rows if row.machine_type == machine_type)


def _decode_product(entry: str) -> dict[str, Any]:
    try:
        product = msgspec.json.decode(entry)
    except DECODE_ERRORS:
        product = None
    is_product = isinstance(product, dict) and isinstance(product.get("product"), dict)
    return product if is_product else {"product": {}}


def _hourly_prices(product: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the prices in US dollars of the terms on demand; None for other units."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            # In China the only currency is CNY.
            is_hourly = dimension.get("unit") in ("Hrs", "Hours")
            yield dimension["pricePerUnit"].get("USD") if is_hourly else None


def _only_price(values: Iterable[Any]) -> float | None:
    """Return the price if the values are equal, positive numbers; else None."""
    prices = {_to_price(value) for value in values}
    return prices.pop() if len(prices) == 1 else None


def _to_price(value: Any) -> float | None:
    try:
        price = float(value)
    except (TypeError, ValueError):
        return None
    return price if math.isfinite(price) and price > 0 else None


def describe_maximum(source: str, count: int, noun: str) -> str:
    """Return the source of the highest of `count` prices, such as '…, highest of 3 zones'."""
    return source if count == 1 else f"{source}, highest of {count} {noun}"


def all_types(instance_types: Sequence[str]) -> str:
    """Return the instance types as one text, the same for every order."""
    return ",".join(sorted(set(instance_types)))
