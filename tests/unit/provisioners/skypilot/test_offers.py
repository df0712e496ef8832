"""Offers of SkyPilot with the catalogs of the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.offers import list_offers
from spotfit_provisioners.skypilot import render
from spotfit_provisioners.skypilot.offers import allowed_offers
from spotfit_provisioners.skypilot.options import SkyPilotOptions
from spotfit_provisioners.skypilot.provisioner import SkyPilotProvisioner

REQUEST = GroupRequest(token=Token("t-one"), num_workers=1, total_workers=1)
OPTIONS: dict[str, Any] = {"infra": ("aws/us-east-1",), "instance_type": "m6i.xlarge"}
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone\n"


@pytest.fixture
def catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".sky" / "catalogs"


def write_catalog(folder: Path, version: str, price: str) -> None:
    path = folder / version / "aws" / "vms.csv"
    path.parent.mkdir(parents=True)
    path.write_text(f"{HEADER}m6i.xlarge,,,{price},0.07,us-east-1,use1-az1\n")
    os.utime(path, (1000.0, 1000.0))


def test_newest_catalog_has_the_prices_at_its_age(catalogs: Path) -> None:
    write_catalog(catalogs, "v10", "0.2")
    write_catalog(catalogs, "v9", "0.1")
    listing = list_offers(SkyPilotProvisioner(SkyPilotOptions(**OPTIONS)), REQUEST)
    spot, on_demand = listing.offers
    assert spot.price is not None
    assert on_demand.price is not None
    assert (spot.price.usd_per_hour, on_demand.price.usd_per_hour) == (0.07, 0.2)
    assert on_demand.price.as_of_s == 1000.0
    assert "v10" in on_demand.price.source
    assert (spot.name, spot.region, spot.network, spot.options) == (
        "skypilot/aws/us-east-1/m6i.xlarge/spot",
        "us-east-1",
        "aws/us-east-1",
        {"infra": "aws/us-east-1"},
    )


def test_given_price_precedes_that_of_the_catalog(catalogs: Path) -> None:
    write_catalog(catalogs, "v8", "0.2")
    options = SkyPilotOptions(**OPTIONS, prices={"*": {"spot": 0}})
    listing = list_offers(SkyPilotProvisioner(options), REQUEST)
    assert [offer.price and offer.price.usd_per_hour for offer in listing.offers] == [0.0, 0.2]
    assert listing.remarks == ()


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"x"])
def test_missing_or_unreadable_catalog_has_a_reason(catalogs: Path, content: bytes | None) -> None:
    if content is not None:
        write_catalog(catalogs, "v8", "0.2")
        (catalogs / "v8/aws/vms.csv").write_bytes(content)
    listing = list_offers(SkyPilotProvisioner(SkyPilotOptions(**OPTIONS)), REQUEST)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert listing.remarks


def test_without_infrastructure_prices_are_unknown(catalogs: Path) -> None:
    listing = list_offers(SkyPilotProvisioner(SkyPilotOptions()), REQUEST)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert "infra" in listing.remarks[0]


def offers_of(options: SkyPilotOptions) -> dict[str, Offer]:
    return {offer.name: offer for offer in allowed_offers(options)}


def planned(
    options: SkyPilotOptions, offer: Offer | None, *, workers: int = 1, network: str = ""
) -> GroupPlan:
    request = GroupRequest(
        token=Token("t-1"),
        num_workers=workers,
        total_workers=workers,
        offer=offer,
        network=network,
    )
    return render.plan(request, options)


REGIONS = ("aws/us-east-1", "gcp/us-central1")


@pytest.mark.parametrize("spot", ["only", "preferred", "never"])
def test_plan_rents_exactly_the_offer(spot: Any) -> None:
    options = SkyPilotOptions(infra=REGIONS, spot=spot)
    for name, offer in offers_of(options).items():
        for workers, network in ((1, ""), (2, ""), (2, "aws/us-east-1")):
            plan = planned(options, offer, workers=workers, network=network)
            resources = plan.body["task"]["resources"]
            assert resources["infra"] == offer.network
            assert resources["use_spot"] is (offer.market is Market.SPOT)
            assert not {"any_of", "ordered"} & resources.keys()
            handle = SkyPilotProvisioner(options)._handle(plan)
            assert (handle.offer, handle.network) == (name, offer.network)


def test_offer_of_other_options_names_the_remedy() -> None:
    offer = offers_of(SkyPilotOptions(infra=REGIONS))["skypilot/gcp/us-central1/spot"]
    with pytest.raises(ConfigError, match="skypilot/gcp/us-central1/spot") as raised:
        planned(SkyPilotOptions(infra=REGIONS[:1]), offer)
    assert "infra" in raised.value.do


def test_offer_of_several_regions_has_one_machine_only() -> None:
    options = SkyPilotOptions(infra=("aws",))
    offer = offers_of(options)["skypilot/aws/on_demand"]
    planned(options, offer)
    with pytest.raises(ConfigError, match="several regions"):
        planned(options, offer, workers=2)


@pytest.mark.parametrize(
    ("options", "workers", "expected"),
    [
        (SkyPilotOptions(), 1, "skypilot/spot"),
        (SkyPilotOptions(infra=REGIONS[:1], spot="never"), 1, "skypilot/aws/us-east-1/on_demand"),
        # SkyPilot chooses the market, or the region.
        (SkyPilotOptions(infra=REGIONS[:1], spot="preferred"), 1, ""),
        (SkyPilotOptions(infra=REGIONS), 1, ""),
        (SkyPilotOptions(infra=REGIONS), 2, "skypilot/aws/us-east-1/spot"),
    ],
)
def test_offer_without_a_choice_is_named_if_it_is_determined(
    options: SkyPilotOptions, workers: int, expected: str
) -> None:
    plan = planned(options, None, workers=workers)
    assert "offer" not in plan.body
    assert SkyPilotProvisioner(options)._handle(plan).offer == expected


def test_machines_outside_of_the_options_have_no_offer() -> None:
    plan = planned(SkyPilotOptions(infra=REGIONS), None, workers=2, network="azure/eastus")
    assert SkyPilotProvisioner(SkyPilotOptions(infra=REGIONS))._handle(plan).offer == ""
