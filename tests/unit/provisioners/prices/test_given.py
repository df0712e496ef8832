"""The option `prices`: its mistakes, and which price it gives."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.model.offer import Market
from spotfit.provision.profile import parse_options
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.kubernetes.options import KubernetesOptions
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.prices.given import (
    check_prices,
    given_market,
    given_price,
    own_machine_listing,
    own_machine_offer,
)
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.ssh.options import SshOptions

PRICES: dict[str, dict[str, float]] = {
    "p5.48xlarge": {"spot": 14.5},
    "*": {"spot": 2, "on_demand": 0},
}
ALL_OPTIONS = [
    AwsBatchOptions,
    AzureBatchOptions,
    GcpBatchOptions,
    KubernetesOptions,
    LocalOptions,
    SkyPilotOptions,
    SlurmOptions,
    SshOptions,
]


@pytest.mark.parametrize("price", [-1, -0.01, math.nan, math.inf, "2.1", None, True, [1]])
def test_a_price_that_is_no_amount_is_rejected(price: object) -> None:
    with pytest.raises(ConfigError, match="p5"):
        check_prices({"p5": {"spot": price}}, option="X(prices=…)")


@pytest.mark.parametrize("prices", [3, [1], {"p5": 3}, {"p5": {"spott": 1}}, {"p5": {1: 1}}])
def test_other_forms_are_rejected(prices: Any) -> None:
    with pytest.raises(ConfigError, match=r"X\(prices=…\)"):
        check_prices(prices, option="X(prices=…)")


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as raised:
        check_prices(
            {"a": {"spot": -1, "on_demand": math.nan}, "b": {"spto": 1}, "c": 5},
            option="X(prices=…)",
        )
    assert len(raised.value.errors) == 4
    assert "Did you mean 'spot'" in str(raised.value)


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_every_backend_checks_its_prices(options: type) -> None:
    with pytest.raises(ConfigErrors) as raised:
        parse_options(options, {"prices": '{"*": {"spot": -1, "on_demand": "2"}}'})
    assert len(raised.value.errors) == 2
    parse_options(options, {"prices": '{"*": {"spot": 0, "on_demand": 2.5}}'})


@pytest.mark.parametrize("options", [SshOptions, LocalOptions])
def test_backend_without_machine_types_has_one_price(options: type) -> None:
    with pytest.raises(ConfigError, match="machine type"):
        options(prices={"p5.48xlarge": {"spot": 1}})


@pytest.mark.parametrize(
    ("machine_type", "market", "usd"),
    [
        ("p5.48xlarge", Market.SPOT, 14.5),
        ("p5.48xlarge", Market.ON_DEMAND, 0.0),
        ("g5.xlarge", Market.SPOT, 2.0),
        ("", Market.SPOT, 2.0),
    ],
)
def test_price_of_the_type_precedes_that_of_all(
    machine_type: str, market: Market, usd: float
) -> None:
    price = given_price(PRICES, machine_type, market, now_s=5.0)
    assert price is not None
    assert (price.usd_per_hour, price.source, price.as_of_s) == (usd, "given", 5.0)


def test_price_that_is_not_given_is_unknown() -> None:
    assert given_price({"a": {"spot": 1}}, "a", Market.ON_DEMAND, now_s=0) is None
    assert given_price({"a": {"spot": 1}}, "b", Market.SPOT, now_s=0) is None


@pytest.mark.parametrize(
    ("prices", "expected"),
    [
        ({}, Market.SPOT),
        ({"h100": {"on_demand": 20.0}}, Market.ON_DEMAND),
        ({"*": {"on_demand": 20.0}}, Market.ON_DEMAND),
        ({"h100": {"spot": 5.0}, "*": {"on_demand": 20.0}}, Market.SPOT),
        ({"*": {"spot": 5.0, "on_demand": 20.0}}, Market.SPOT),
    ],
)
def test_own_machines_are_on_the_market_of_their_price(
    prices: dict[str, dict[str, float]], expected: Market
) -> None:
    assert given_market(prices, "h100", default=Market.SPOT) is expected


def test_known_prices_need_no_remark() -> None:
    offer = own_machine_offer("ssh", {"*": {"on_demand": 0}}, Market.ON_DEMAND, now_s=0.0)
    assert (offer.name, offer.price and offer.price.usd_per_hour) == ("ssh/on_demand", 0.0)
    assert own_machine_listing([offer], default=offer.name).remarks == ()
    offer = own_machine_offer("ssh", {}, Market.ON_DEMAND, now_s=0.0)
    assert "no price list" in own_machine_listing([offer], default=offer.name).remarks[0]
