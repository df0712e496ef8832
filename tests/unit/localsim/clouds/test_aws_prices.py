"""Spot price history and price list of the simulated AWS, as AWS documents them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotfit_localsim.clouds.aws_prices import (
    product_entries,
    spot_price_items,
    to_spot_price_request,
    zone_id,
)
from spotfit_localsim.clouds.capacity import MarketOptions, RealTimeMarket
from spotfit_localsim.clouds.price_history import PriceHistory

REGION = "us-east-1"
NOW_S = 1_795_000_000.0  # 2026-11-18T11:06:40Z


@pytest.fixture
def market() -> RealTimeMarket:
    market = RealTimeMarket(MarketOptions(), started_s=NOW_S)
    market.prices = PriceHistory(
        spot={
            "us-east-1a": ((-100 * 86400.0, 1.0), (-3 * 86400.0, 2.0), (-600.0, 3.0)),
            "us-east-1b": ((-86400.0, 5.0), (600.0, 6.0)),
        },
        on_demand={REGION: 9.8},
    )
    return market


def prices(market: RealTimeMarket, **request: Any) -> list[str]:
    request = {"ProductDescriptions": ["Linux/UNIX"], "InstanceTypes": ["p3.2xlarge"], **request}
    items = spot_price_items(request, market, REGION, now_s=NOW_S)
    return [item.partition("<spotPrice>")[2].partition("00000<")[0] for item in items]


def test_without_a_start_the_history_of_90_days_comes_newest_first(market: RealTimeMarket) -> None:
    assert prices(market) == ["3.0", "5.0", "2.0", "1.0"]


def test_start_at_the_present_returns_the_prices_in_force(market: RealTimeMarket) -> None:
    assert prices(market, StartTime="2026-11-18T11:06:40Z") == ["3.0", "5.0"]


def test_end_excludes_later_prices(market: RealTimeMarket) -> None:
    range_ = {"StartTime": "2026-11-16T00:00:00Z", "EndTime": "2026-11-18T00:00:00Z"}
    assert prices(market, **range_) == ["5.0", "2.0"]


@pytest.mark.parametrize(
    "where", [{"AvailabilityZone": "us-east-1b"}, {"AvailabilityZoneId": "use1-az2"}]
)
def test_zone_is_selected_by_name_or_id(market: RealTimeMarket, where: dict[str, str]) -> None:
    assert prices(market, **where) == ["5.0"]


def test_without_product_descriptions_other_systems_are_listed(market: RealTimeMarket) -> None:
    items = spot_price_items({"AvailabilityZone": "us-east-1b"}, market, REGION, now_s=NOW_S)
    assert [("Windows" in item, "<spotPrice>8" in item) for item in items] == [
        (False, False),
        (True, True),
    ]


def test_invalid_time_is_refused(market: RealTimeMarket) -> None:
    with pytest.raises(ValueError, match="soon"):
        prices(market, StartTime="soon")


def test_query_protocol_becomes_the_members_of_the_model() -> None:
    arguments = {
        "Action": ["DescribeSpotPriceHistory"],
        "Version": ["2016-11-15"],
        "InstanceType.1": ["a"],
        "InstanceType.2": ["b"],
        "ProductDescription.1": ["Linux/UNIX"],
        "MaxResults": ["5"],
        "Foo": ["bar"],
    }
    assert to_spot_price_request(arguments) == {
        "InstanceTypes": ["a", "b"],
        "ProductDescriptions": ["Linux/UNIX"],
        "MaxResults": 5,
        "Foo": "bar",
    }


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("us-east-1a", "use1-az1"),
        ("eu-central-1c", "euc1-az3"),
        ("ap-southeast-2b", "aps2-az2"),
    ],
)
def test_zone_ids_are_short(zone: str, expected: str) -> None:
    assert zone_id(zone) == expected


def test_filters_select_products(market: RealTimeMarket) -> None:
    def count(**fields: str) -> int:
        filters = [
            {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in fields.items()
        ]
        return len(product_entries({"Filters": filters}, market, now_s=NOW_S))

    linux = {"instanceType": "p3.2xlarge", "regionCode": REGION, "operatingSystem": "Linux"}
    assert count(**linux) == 5
    assert count(**linux, tenancy="Shared", capacitystatus="Used", preInstalledSw="NA") == 1
    assert count(**linux, unknownField="x") == 0


def test_products_have_the_form_of_the_price_list(market: RealTimeMarket) -> None:
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": REGION}]
    plain = json.loads(product_entries({"Filters": filters}, market, now_s=NOW_S)[1])
    assert plain["product"]["attributes"]["capacitystatus"] == "Used"
    (term,) = plain["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert dimension["pricePerUnit"] == {"USD": "9.8000000000"}
