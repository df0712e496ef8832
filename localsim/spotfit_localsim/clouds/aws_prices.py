"""Spot price history of EC2 and the price list of AWS, as botocore's models define their requests.

Documentation: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html,
https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_pricing_GetProducts.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from spotfit_localsim.clouds.capacity import RealTimeMarket

PRICING_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
"""Only they have an endpoint of the Price List API."""
_HISTORY_S = 90 * 86400.0
# A price of Windows, too: clients that do not filter must not take it.
_PRODUCTS = {"Linux/UNIX": 1.0, "Windows": 1.6}
_LISTS = {"InstanceType": "InstanceTypes", "ProductDescription": "ProductDescriptions"}
_MEMBERS = {
    "StartTime": "StartTime",
    "EndTime": "EndTime",
    "AvailabilityZone": "AvailabilityZone",
    "AvailabilityZoneId": "AvailabilityZoneId",
    "NextToken": "NextToken",
}
_ENVELOPE = ("Action", "Version")


def to_spot_price_request(arguments: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the request of EC2's query protocol in the form of botocore's model.

    Arguments that this simulator does not know are kept, so that the model rejects them.
    """
    request: dict[str, Any] = {}
    for name, values in arguments.items():
        prefix, _, number = name.rpartition(".")
        if prefix in _LISTS and number.isdecimal():
            request.setdefault(_LISTS[prefix], []).append(values[0])
        elif name == "MaxResults" and values[0].isdecimal():
            request[name] = int(values[0])
        elif name not in _ENVELOPE:
            request[_MEMBERS.get(name, name)] = values[0]
    return request


def spot_price_items(
    request: Mapping[str, Any], market: RealTimeMarket, region: str, *, now_s: float
) -> list[str]:
    """Return the entries of the answer as XML, the newest first.

    Raises `ValueError` for a time that is none.
    """
    start_s = _moment_s(request.get("StartTime"), now_s - _HISTORY_S)
    end_s = _moment_s(request.get("EndTime"), now_s)
    entries = [
        (moment_s, _item(kind, product, zone, price * _PRODUCTS[product], moment_s))
        for zone in market.prices.zones(region, f"{region}a")
        if request.get("AvailabilityZone", zone) == zone
        and request.get("AvailabilityZoneId", zone_id(zone)) == zone_id(zone)
        for moment_s, price in _changes_between(market, zone, start_s, end_s)
        for kind in request.get("InstanceTypes", ["g5.xlarge"])
        for product in request.get("ProductDescriptions", list(_PRODUCTS))
        if product in _PRODUCTS
    ]
    return [item for _, item in sorted(entries, key=lambda entry: -entry[0])]


def zone_id(zone: str) -> str:
    """Return the id of a zone, such as 'use1-az1' of 'us-east-1a'."""
    region, letter = zone[:-1], zone[-1]
    words = region.split("-")
    short = words[0] + "".join(word[0] for word in words[1:-1]) + words[-1]
    return f"{short}-az{ord(letter) - ord('a') + 1}"


def product_entries(
    request: Mapping[str, Any], market: RealTimeMarket, *, now_s: float
) -> list[str]:
    """Return the entries of the price list that match the filters, as JSON."""
    filters = {one["Field"]: one["Value"] for one in request.get("Filters", [])}
    region = filters.get("regionCode", "sim-east-1")
    products = list(_products(filters.get("instanceType", "g5.xlarge"), region, market))
    published = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [
        msgspec.json.encode(
            {
                "product": {
                    "productFamily": "Compute Instance",
                    "attributes": attributes,
                    "sku": f"SKU{number}",
                },
                "serviceCode": "AmazonEC2",
                "terms": _terms(f"SKU{number}", usd),
                "version": "20260101000000",
                "publicationDate": published,
            }
        ).decode()
        for number, (attributes, usd) in enumerate(products)
        if filters.items() <= attributes.items()
    ]


def _products(
    instance_type: str, region: str, market: RealTimeMarket
) -> Iterator[tuple[dict[str, str], float]]:
    """Yield attributes and prices: the plain instance, and others that only attributes tell."""
    usd = market.prices.on_demand_usd(region)
    plain = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
        "licenseModel": "No License required",
        "operation": "RunInstances",
        "usagetype": f"BoxUsage:{instance_type}",
        "marketoption": "OnDemand",
        "servicecode": "AmazonEC2",
    }
    # Entries of capacity reservations; those of an allocated one are free of charge.
    yield {**plain, "capacitystatus": "AllocatedCapacityReservation"}, 0.0
    yield plain, usd
    yield {**plain, "capacitystatus": "UnusedCapacityReservation"}, usd
    yield {**plain, "operatingSystem": "Windows", "operation": "RunInstances:0002"}, 1.8 * usd
    yield {**plain, "preInstalledSw": "SQL Std", "operation": "RunInstances:0004"}, 2.5 * usd
    yield {**plain, "tenancy": "Dedicated"}, 1.1 * usd


def _terms(sku: str, usd: float) -> dict[str, Any]:
    code = f"{sku}.JRTCKXETXF"
    rate = f"{code}.6YS6EN2CT7"
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${usd:.4f} per On Demand instance hour",
        "appliesTo": [],
        "rateCode": rate,
        "pricePerUnit": {"USD": f"{usd:.10f}"},
    }
    reserved = {**dimension, "pricePerUnit": {"USD": f"{0.6 * usd:.10f}"}}
    return {
        "OnDemand": {
            code: {
                "priceDimensions": {rate: dimension},
                "sku": sku,
                "effectiveDate": "2026-01-01T00:00:00Z",
                "offerTermCode": "JRTCKXETXF",
                "termAttributes": {},
            }
        },
        "Reserved": {
            f"{sku}.4NA7Y494T4": {
                "priceDimensions": {f"{sku}.4NA7Y494T4.6YS6EN2CT7": reserved},
                "sku": sku,
                "effectiveDate": "2026-01-01T00:00:00Z",
                "offerTermCode": "4NA7Y494T4",
                "termAttributes": {"LeaseContractLength": "1yr", "PurchaseOption": "No Upfront"},
            }
        },
    }


def _changes_between(
    market: RealTimeMarket, zone: str, start_s: float, end_s: float
) -> list[tuple[float, float]]:
    """Return the changes in the range, and the last one before it, which is in force at its start.

    The model of botocore says so of StartTime and EndTime.
    """
    changes = [change for change in market.price_changes(zone) if change[0] <= end_s]
    before = [change for change in changes if change[0] <= start_s]
    return [*before[-1:], *(change for change in changes if change[0] > start_s)]


def _item(kind: str, product: str, zone: str, usd: float, moment_s: float) -> str:
    fields = {
        "instanceType": kind,
        "productDescription": product,
        "spotPrice": f"{usd:.6f}",
        "timestamp": datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "availabilityZone": zone,
        "availabilityZoneId": zone_id(zone),
    }
    return "".join(f"<{name}>{text}</{name}>" for name, text in fields.items())


def _moment_s(text: str | None, default_s: float) -> float:
    if text is None:
        return default_s
    if not re.match(r"\d{4}-\d\d-\d\dT", text):
        raise ValueError(f"Invalid timestamp {text}")
    return datetime.fromisoformat(text).timestamp()
