"""Offers of SkyPilot with the catalogs of the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.offers import list_offers
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
