"""The retail prices of the simulated Azure."""

from __future__ import annotations

import pytest

from spotfit_localsim.clouds.azure_prices import list_items, parse_filter


def test_filter_selects_items_by_exact_values() -> None:
    text = "serviceName eq 'Virtual Machines' and priceType eq 'Consumption'"
    items = list_items(parse_filter(text), spot_usd=0.2, on_demand_usd=0.8)
    assert len(items) == 6
    assert (
        list_items(
            parse_filter(
                text.lower().replace("servicename", "serviceName").replace("pricetype", "priceType")
            ),
            spot_usd=0.2,
            on_demand_usd=0.8,
        )
        == []
    )
    names = {(item["productName"][-7:], item["meterName"]): item["retailPrice"] for item in items}
    assert names["Windows", "D4s v5 Low Priority"] == 0.0
    assert names["Windows", "D4s v5 Spot"] == pytest.approx(0.36)


@pytest.mark.parametrize(
    "text",
    [
        "armSkuName contains 'x'",
        "armSkuName eq x",
        "retailPrice eq '1'",
        "armSkuName eq 'a' or armSkuName eq 'b'",
        "armskuname eq 'a'",
    ],
)
def test_other_filters_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="filter"):
        parse_filter(text)


def test_quotes_in_values_are_doubled() -> None:
    assert parse_filter("skuName eq 'a''b'") == {"skuName": "a'b"}
