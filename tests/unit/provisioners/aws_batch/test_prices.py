"""Prices in answers of EC2 and of the Price List API, and rows that are no prices of machines."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotfit_provisioners.aws_batch.prices import (
    AwsOnDemandPrice,
    AwsSpotPrice,
    all_types,
    describe_maximum,
    highest_spot_price,
    on_demand_price,
    parse_products,
    parse_spot_prices,
)

NOW = datetime(2026, 11, 1, tzinfo=UTC)
PLAIN = {
    "instanceType": "p3.2xlarge",
    "regionCode": "us-east-1",
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
    "operation": "RunInstances",
}


def spot(price: str, zone: str = "use1-az1", *, hours_ago: float = 0, **fields: Any) -> Any:
    return {
        "InstanceType": "p3.2xlarge",
        "AvailabilityZone": f"name of {zone}",
        "AvailabilityZoneId": zone,
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": price,
        "Timestamp": NOW - timedelta(hours=hours_ago),
        **fields,
    }


def usd_by_zone(*entries: Any) -> dict[str, float | None]:
    return {row.zone: row.usd_per_hour for row in parse_spot_prices(entries)}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([spot("0.918"), spot("0.918")], {"use1-az1": 0.918}),
        ([spot("0.9"), spot("1.1", hours_ago=3)], {"use1-az1": 0.9}),
        ([spot("1.1", hours_ago=3), spot("0.9")], {"use1-az1": 0.9}),
        ([spot("0.9"), spot("1.1")], {"use1-az1": None}),
        ([spot("0.9"), spot("1.8", ProductDescription="Windows")], {"use1-az1": 0.9}),
        ([spot("0.9"), spot("1", "use1-az2")], {"use1-az1": 0.9, "use1-az2": 1.0}),
        ([spot("0.0000")], {"use1-az1": None}),
        ([spot("")], {"use1-az1": None}),
        ([spot("nan")], {"use1-az1": None}),
        ([spot("-1")], {"use1-az1": None}),
        ([spot("0.9", AvailabilityZoneId=None)], {"name of use1-az1": 0.9}),
        ([], {}),
    ],
    ids=[
        "twice",
        "newest first",
        "oldest first",
        "two at one time",
        "Windows",
        "two zones",
        "0",
        "empty",
        "nan",
        "negative",
        "without zone id",
        "none",
    ],
)
def test_spot_price_is_the_latest_one_of_linux(entries: Any, expected: Any) -> None:
    assert usd_by_zone(*entries) == expected


def test_highest_price_of_the_zones_is_certain_only_if_all_are_known() -> None:
    rows = parse_spot_prices([spot("0.9"), spot("1.2", "use1-az2")])
    assert highest_spot_price(rows, "p3.2xlarge") == (1.2, 2)
    assert highest_spot_price(rows, "p3.8xlarge") is None
    unknown = AwsSpotPrice(machine_type="p3.2xlarge", zone="use1-az3")
    assert highest_spot_price([*rows, unknown], "p3.2xlarge") is None


def product(*usd: str | None, unit: str = "Hrs", currency: str = "USD", **attributes: str) -> str:
    terms = {
        f"SKU.{number}": {"priceDimensions": {"D": {"unit": unit, "pricePerUnit": {currency: one}}}}
        for number, one in enumerate(usd)
    }
    reserved = {"R": {"priceDimensions": {"D": {"unit": "Hrs", "pricePerUnit": {"USD": "1.1"}}}}}
    return json.dumps(
        {
            "product": {"attributes": {**PLAIN, **attributes}},
            "terms": {"OnDemand": terms, "Reserved": reserved},
        }
    )


@pytest.mark.parametrize(
    ("entries", "usd"),
    [
        ([product("3.0600000000")], 3.06),
        ([product("3.06"), product("0.0", capacitystatus="AllocatedCapacityReservation")], 3.06),
        ([product("3.06"), product("9", capacitystatus="UnusedCapacityReservation")], 3.06),
        ([product("3.06"), product("9", operatingSystem="Windows")], 3.06),
        ([product("3.06"), product("9", tenancy="Dedicated")], 3.06),
        ([product("3.06"), product("9", preInstalledSw="SQL Std")], 3.06),
        ([product("3.06"), product("9", operation="RunInstances:0010")], 3.06),
        ([product("3.06"), product("9", marketoption="CapacityBlock")], 3.06),
        ([product("3.06"), product("9", regionCode="us-west-2")], 3.06),
        ([product("3.06"), product("9", instanceType="p3.8xlarge")], 3.06),
        ([product("3.06"), product("3.06")], 3.06),
        ([product("3.06"), product("9")], None),
        ([product("3.06", "9")], None),
        ([product("3.06"), product("0.0000000000")], None),
        ([product("0.0000000000")], None),
        ([product("3.06", unit="Quantity")], None),
        ([product("21.5", currency="CNY")], None),
        ([product()], None),
        ([product(None)], None),
        (["{", "[]", '{"product": 3}', "{}"], None),
        ([], None),
    ],
)
def test_on_demand_price_is_that_of_a_plain_instance(entries: list[str], usd: float | None) -> None:
    rows = parse_products(entries, machine_type="p3.2xlarge", region="us-east-1")
    assert rows == [AwsOnDemandPrice(machine_type="p3.2xlarge", usd_per_hour=usd)]
    assert on_demand_price(rows, "p3.2xlarge") == usd


def test_source_states_of_how_many_prices_it_is_the_highest() -> None:
    assert describe_maximum("EC2", 1, "zones") == "EC2"
    assert describe_maximum("EC2", 3, "zones") == "EC2, highest of 3 zones"
    assert all_types(["b", "a", "b"]) == "a,b"
