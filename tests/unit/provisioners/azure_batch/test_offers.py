"""Offers of Azure Batch: azure-core against the retail prices of the simulated cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ProvisionError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.offers import OfferListing, list_offers
from spotfit_localsim.clouds.azure_batch import ACCOUNT_ID
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.price_history import PriceHistory
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch.client import AzureRetailPricesClient
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner

pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

REQUEST = GroupRequest(token=Token("t-one"), num_workers=1, total_workers=1)


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cloud"
    with running_simulator(folder, SimOptions(cloud="azure_batch")) as simulator:
        simulator.market.prices = PriceHistory(
            spot={"sim": ((-60.0, 0.2),)}, on_demand={"sim": 0.75}
        )
        yield simulator
    calls._anonymous_pipeline.cache_clear()
    calls._management_pipeline.cache_clear()


def offers_of(sim: Simulator, **options: Any) -> OfferListing:
    common = {
        "endpoint": sim.server.url,
        "management_endpoint": sim.server.url,
        "account_id": ACCOUNT_ID,
        "vm_size": "Standard_D4s_v5",
    }
    return list_offers(AzureBatchProvisioner(AzureBatchOptions(**{**common, **options})), REQUEST)


def test_prices_are_read_from_all_pages(sim: Simulator) -> None:
    listing = offers_of(sim)
    assert {offer.name: offer.price and offer.price.usd_per_hour for offer in listing.offers} == {
        "azure_batch/Standard_D4s_v5/spot": 0.2,
        "azure_batch/Standard_D4s_v5/on_demand": 0.75,
    }
    assert listing.remarks == ()
    before = sum(sim._request_counts.values())
    assert offers_of(sim) == listing
    assert sum(sim._request_counts.values()) == before


def test_given_price_replaces_one_market(sim: Simulator) -> None:
    listing = offers_of(sim, prices={"Standard_D4s_v5": {"spot": 0.05}})
    assert [offer.price and offer.price.usd_per_hour for offer in listing.offers] == [0.05, 0.75]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"vm_size": "", "pool": "mine"}, "vm_size"), ({"account_id": "", "pool": "mine"}, "region")],
)
def test_prices_are_unknown_without_size_or_region(
    sim: Simulator, options: dict[str, str], reason: str
) -> None:
    listing = offers_of(sim, **options)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert reason in listing.remarks[0]


def test_unavailable_api_leaves_prices_unknown(sim: Simulator) -> None:
    sim.faults.inject("unavailable", 10)
    listing = offers_of(sim)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert listing.remarks[0].startswith("Prices of Azure: ")


@pytest.mark.parametrize(
    "link", ["https://prices.azure.com/api", "http://127.0.0.2/api", "file:///etc/passwd"]
)
def test_link_to_another_server_is_not_followed(
    sim: Simulator, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = AzureRetailPricesClient(sim.server.url)
    with pytest.raises(ProvisionError, match="another server"):
        client._check_link(link)


def test_vendor_rejects_a_filter_that_it_does_not_know(sim: Simulator) -> None:
    client = AzureRetailPricesClient(sim.server.url)
    with pytest.raises(ProvisionError, match="filter"):
        list(client.list_items("armSkuName contains 'x'", "2023-01-01-preview"))
