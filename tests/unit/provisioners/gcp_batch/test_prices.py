"""The price of a Google Cloud machine, and SKUs that must not be taken for its resources."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.offer import Market
from spotfit_provisioners.gcp_batch.machine_types import find_shape
from spotfit_provisioners.gcp_batch.prices import machine_price, parse_skus

HERE = "us-central1"


def sku(
    description: str,
    usd: float,
    *,
    usage: str = "OnDemand",
    unit: str = "h",
    region: str = HERE,
    family: str = "Compute",
    group: str = "",
    currency: str = "USD",
    tiers: int = 1,
) -> dict[str, Any]:
    units, nanos = divmod(round(usd * 1e9), 10**9)
    price = {"currencyCode": currency, "units": str(units), "nanos": nanos}
    rates = [{"startUsageAmount": number, "unitPrice": price} for number in range(tiers)]
    return {
        "description": description,
        "category": {"resourceFamily": family, "resourceGroup": group, "usageType": usage},
        "serviceRegions": [region],
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": rates}}],
    }


def spot(description: str, usd: float, **fields: Any) -> dict[str, Any]:
    return sku(description, usd, usage="Preemptible", **fields)


SSD = "SSD backed Local Storage"
VMS = "attached to Spot Preemptible VMs running in Americas"
N1 = [
    sku("N1 Predefined Instance Core running in Americas", 0.03),
    sku("N1 Predefined Instance Ram running in Americas", 0.004, unit="GiBy.h"),
    sku("Nvidia Tesla T4 GPU running in Americas", 0.35),
    spot("Spot Preemptible N1 Predefined Instance Core running in Americas", 0.006),
    spot("Spot Preemptible N1 Predefined Instance Ram running in Americas", 0.001, unit="GiBy.h"),
    spot(f"Nvidia Tesla T4 GPU {VMS}", 0.11),
]
A3 = [
    sku("A3 Instance Core running in Americas", 0.03),
    sku("A3 Instance Ram running in Americas", 0.003, unit="GiBy.h"),
    sku("Nvidia H100 80GB GPU running in Americas", 10.0),
    sku(SSD, 0.08, unit="GiBy.mo", family="Storage", group="LocalSSD"),
    # Prices of Mega, whose names contain those of H100.
    sku("A3Plus Instance Core running in Americas", 0.02),
    sku("A3Plus Instance Ram running in Americas", 0.002, unit="GiBy.h"),
    sku("Nvidia H100 80GB Plus GPU running in Americas", 11.0),
]
B200 = [
    sku("A4 Nvidia B200 (1 gpu slice) running in Americas", 16.0),
    sku("Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas", 5.0),
]


def price(
    skus: list[dict[str, Any]],
    machine_type: str,
    market: Market = Market.ON_DEMAND,
    *,
    accelerator: str = "",
    gpus: int = 0,
) -> float | None:
    shape = find_shape(machine_type, accelerator, gpus)
    assert shape is not None
    return machine_price(parse_skus(skus, region=HERE), shape, market)


@pytest.mark.parametrize(
    ("market", "usd"),
    [(Market.ON_DEMAND, 8 * 0.03 + 30 * 0.004), (Market.SPOT, 8 * 0.006 + 30 * 0.001)],
)
def test_machine_costs_its_cores_and_memory(market: Market, usd: float) -> None:
    assert price(N1, "n1-standard-8", market) == pytest.approx(usd)


def test_attached_gpus_are_added() -> None:
    host = price(N1, "n1-standard-8", Market.SPOT)
    found = price(N1, "n1-standard-8", Market.SPOT, accelerator="nvidia-tesla-t4", gpus=2)
    assert host is not None
    assert found == pytest.approx(host + 2 * 0.11)


def test_built_in_gpus_and_local_ssds_are_added() -> None:
    gpus_usd, ssd_usd = 8 * 10.0, 6000 * 0.08 / 730
    expected = 208 * 0.03 + 1872 * 0.003 + gpus_usd + ssd_usd
    assert price(A3, "a3-highgpu-8g") == pytest.approx(expected)


def test_mega_gpus_have_their_own_names() -> None:
    expected = 208 * 0.02 + 1872 * 0.002 + 8 * 11.0 + 6000 * 0.08 / 730
    assert price(A3, "a3-megagpu-8g") == pytest.approx(expected)


@pytest.mark.parametrize(("market", "usd"), [(Market.ON_DEMAND, 128.0), (Market.SPOT, 40.0)])
def test_spot_slices_of_b200_have_the_usage_type_on_demand(market: Market, usd: float) -> None:
    assert price(B200, "a4-highgpu-8g", market) == pytest.approx(usd)


@pytest.mark.parametrize(
    "other",
    [
        sku("N1 Predefined Instance Core running in Belgium", 9.0, region="europe-west1"),
        sku("Commitment v1: N1 Predefined Instance Core in Americas", 9.0, usage="Commit1Yr"),
        sku("N1 Predefined Instance Core running in Americas", 9.0, usage="Commit1Yr"),
        sku("Reserved N1 Predefined Instance Core running in Americas", 9.0),
        sku("N1 Predefined Sole Tenancy Instance Core running in Americas", 9.0),
        sku("Custom Instance Core running in Americas", 9.0),
        sku("Nvidia Tesla T4 GPU attached to DWS Defined Duration VMs running in Americas", 9.0),
        sku("Nvidia Tesla T4 Virtual Workstation GPU running in Americas", 9.0),
        sku("N1 Predefined Instance Core running in Americas", 9.0, family="License"),
        sku("N1 Predefined Instance Core running in Americas", 0.03),
    ],
    ids=lambda one: str(one["description"]),
)
def test_other_skus_are_not_resources_of_the_machine(other: dict[str, Any]) -> None:
    def total(skus: list[dict[str, Any]]) -> float | None:
        return price(skus, "n1-standard-8", accelerator="nvidia-tesla-t4", gpus=1)

    assert total([*N1, other]) == total([other, *N1]) == total(N1)


@pytest.mark.parametrize(
    "changed",
    [
        sku("N1 Predefined Instance Core running in Americas", 0.0),
        sku("N1 Predefined Instance Core running in Americas", 0.03, currency="EUR"),
        sku("N1 Predefined Instance Core running in Americas", 0.03, unit="mo"),
        sku("N1 Predefined Instance Core running in Americas", 0.03, tiers=2),
        None,
    ],
    ids=["0", "currency", "unit", "graduated", "missing"],
)
def test_resource_without_a_certain_price_makes_that_of_the_machine_unknown(
    changed: dict[str, Any] | None,
) -> None:
    assert price([*N1[1:], *([changed] if changed else [])], "n1-standard-8") is None


def test_two_prices_of_a_resource_are_none() -> None:
    second = sku("N1 Predefined Instance Core running in Iowa", 0.031)
    assert price([*N1, second], "n1-standard-8") is None


def test_host_without_its_gpu_has_no_price() -> None:
    without_gpu = [one for one in A3 if "GPU" not in one["description"]]
    assert price(without_gpu, "a3-highgpu-8g") is None


def test_incomplete_skus_are_left_out() -> None:
    assert parse_skus([{}, {"serviceRegions": [HERE]}], region=HERE) == []
