"""Partitions and QOS as offers, and plans that rent them."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit_provisioners.slurm.offers import list_offers
from spotfit_provisioners.slurm.options import SlurmOptions
from spotfit_provisioners.slurm.render import plan


def offers_of(options: SlurmOptions) -> dict[str, Offer]:
    return {offer.name: offer for offer in list_offers(options).offers}


def planned_arguments(options: SlurmOptions, offer: Offer | None) -> list[str]:
    request = GroupRequest(token=Token("t-1"), num_workers=1, total_workers=1, offer=offer)
    arguments: list[str] = plan(request, options).body["arguments"]
    return [one for one in arguments if one.startswith(("--partition=", "--qos="))]


def test_partition_is_on_the_market_of_its_price() -> None:
    listing = list_offers(
        SlurmOptions(partitions=("h100", "v100"), prices={"h100": {"on_demand": 20}})
    )
    assert [(offer.name, offer.options) for offer in listing.offers] == [
        ("slurm/h100/on_demand", {"partitions": "h100"}),
        ("slurm/v100/spot", {"partitions": "v100"}),
    ]
    assert [offer.price is None for offer in listing.offers] == [False, True]
    assert "slurm has no price list" in listing.remarks[0]
    assert listing.default == "", "Slurm chooses the partition"


def test_on_demand_partition_is_rented_instead_of_the_others() -> None:
    options = SlurmOptions(
        partitions=("low", "scavenge"), on_demand_partitions=("high",), qos="normal"
    )
    offers = offers_of(options)
    assert set(offers) == {"slurm/low/spot", "slurm/scavenge/spot", "slurm/high/on_demand"}
    qos = "--qos=normal"
    assert planned_arguments(options, offers["slurm/high/on_demand"]) == ["--partition=high", qos]
    assert planned_arguments(options, offers["slurm/low/spot"]) == ["--partition=low", qos]
    assert planned_arguments(options, None) == ["--partition=low,scavenge", qos]


def test_on_demand_qos_is_used_in_the_same_partition() -> None:
    options = SlurmOptions(
        partitions=("gpu",), qos="low", on_demand_qos="high", prices={"gpu": {"on_demand": 8}}
    )
    offers = offers_of(options)
    assert set(offers) == {"slurm/gpu/spot", "slurm/gpu/high/on_demand"}
    arguments = planned_arguments(options, offers["slurm/gpu/high/on_demand"])
    assert arguments == ["--partition=gpu", "--qos=high"]
    assert [offer.price is None for offer in offers.values()] == [True, False]


def test_default_partition_has_both_markets_by_qos() -> None:
    options = SlurmOptions(on_demand_qos="high", prices={"*": {"spot": 1, "on_demand": 4}})
    listing = list_offers(options)
    assert [
        (one.name, one.market, one.price and one.price.usd_per_hour) for one in listing.offers
    ] == [
        ("slurm/spot", Market.SPOT, 1),
        ("slurm/high/on_demand", Market.ON_DEMAND, 4),
    ]
    assert listing.default == "slurm/spot"


def test_partition_with_and_without_preemptions_needs_a_qos() -> None:
    with pytest.raises(ConfigError, match="gpu is in partitions"):
        SlurmOptions(partitions=("gpu", "low"), on_demand_partitions=("gpu",))
    SlurmOptions(partitions=("gpu",), on_demand_partitions=("gpu",), on_demand_qos="high")


def test_offer_of_other_options_names_the_remedy() -> None:
    offer = offers_of(SlurmOptions(on_demand_partitions=("high",)))["slurm/high/on_demand"]
    with pytest.raises(ConfigError, match="slurm/high/on_demand") as raised:
        planned_arguments(SlurmOptions(), offer)
    assert "on_demand_partitions" in raised.value.do
