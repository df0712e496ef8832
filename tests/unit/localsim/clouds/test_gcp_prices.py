"""The billing catalog of the simulated Google Cloud."""

from __future__ import annotations

import pytest

from spotfit_localsim.clouds.gcp_prices import find_query_violation, list_skus


def test_prices_have_the_form_of_money_and_sum_up() -> None:
    money_pb2 = pytest.importorskip("google.type.money_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    total = 0.0
    amounts = {"Core": 8, "Ram": 32, "GPU": 1}
    for sku in list_skus("sim-east1", spot_usd=0.4, on_demand_usd=12.5):
        (rate,) = sku["pricingInfo"][0]["pricingExpression"]["tieredRates"]
        money = json_format.ParseDict(rate["unitPrice"], money_pb2.Money())
        words = sku["description"].split()
        if words[0] in ("G2", "Nvidia") and words[-2:] == ["in", "Sim"] and "attached" not in words:
            amount = next(amounts[word] for word in words if word in amounts)
            total += amount * (money.units + money.nanos / 1e9)
    assert total == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("query", "is_valid"),
    [
        ({"pageSize": "5000", "currencyCode": "USD", "fields": "skus(description)"}, True),
        ({"page_size": "5000"}, False),
        ({"filter": "x"}, False),
        ({"currencyCode": "EUR"}, False),
    ],
)
def test_unknown_parameters_are_refused(query: dict[str, str], is_valid: bool) -> None:
    assert (find_query_violation(query) == "") == is_valid
