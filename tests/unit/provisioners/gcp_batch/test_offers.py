"""Offers of Google Cloud Batch: REST against the billing catalog of the simulated cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.offers import OfferListing, list_offers
from spotfit_localsim.clouds.gcp_batch import BILLING_API, PROJECT, REGION, ZONE
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.price_history import PriceHistory
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner

pytest.importorskip("google.cloud.batch_v1")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

REQUEST = GroupRequest(
    token=Token("t-one"), num_workers=1, total_workers=1, resources_per_worker={"GPU": 1}
)


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cloud"
    with running_simulator(folder, SimOptions(cloud="gcp_batch")) as simulator:
        simulator.market.prices = PriceHistory(
            spot={ZONE: ((-60.0, 0.4),)}, on_demand={REGION: 1.2}
        )
        yield simulator
    calls._rest_session.cache_clear()


def offers_of(sim: Simulator, **options: Any) -> OfferListing:
    common = {"project": PROJECT, "region": REGION, "machine_type": "g2-standard-8"}
    chosen = GcpBatchOptions(endpoint=sim.server.url, **{**common, **options})
    return list_offers(GcpBatchProvisioner(chosen), REQUEST)


def prices_of(listing: OfferListing) -> dict[str, Any]:
    return {
        offer.name.removeprefix("gcp_batch/"): offer.price
        and pytest.approx(offer.price.usd_per_hour)
        for offer in listing.offers
    }


def test_price_of_a_machine_is_summed_over_all_pages(sim: Simulator) -> None:
    listing = offers_of(sim)
    assert prices_of(listing) == {
        f"{REGION}/g2-standard-8/spot": 0.4,
        f"{REGION}/g2-standard-8/on_demand": 1.2,
    }
    assert listing.remarks == ()
    before = sum(sim._request_counts.values())
    assert offers_of(sim) == listing
    assert sum(sim._request_counts.values()) == before


def test_each_allowed_zone_has_offers_and_given_prices_come_first(sim: Simulator) -> None:
    zones = (f"{REGION}-a", f"{REGION}-b")
    listing = offers_of(sim, zones=zones, prices={"g2-standard-8": {"spot": 0.1}})
    assert prices_of(listing) == {
        f"{zones[0]}/g2-standard-8/spot": 0.1,
        f"{zones[1]}/g2-standard-8/spot": 0.1,
        f"{zones[0]}/g2-standard-8/on_demand": 1.2,
        f"{zones[1]}/g2-standard-8/on_demand": 1.2,
    }
    assert [offer.options for offer in listing.offers[:2]] == [{"zones": zone} for zone in zones]


def test_disabled_billing_api_is_named(sim: Simulator) -> None:
    sim.faults.deny_permissions([BILLING_API])
    listing = offers_of(sim)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert f"gcloud services enable {BILLING_API}" in listing.remarks[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"machine_type": ""}, "machine_type"),
        ({"machine_type": "a9-mega-1"}, "a9-mega-1"),
        ({"machine_type": "n2-standard-8"}, "n2-standard-8"),
        ({"machine_type": "n1-standard-8", "accelerator": "nvidia-tesla-t4"}, "n1-standard-8"),
    ],
)
def test_machine_without_known_resources_or_prices_is_named(
    sim: Simulator, options: dict[str, str], reason: str
) -> None:
    listing = offers_of(sim, **options)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert reason in " ".join(listing.remarks)


def test_unexpected_answer_makes_prices_unknown(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.GcpRestClient, "get", lambda *_: {"skus": [3]})
    listing = offers_of(sim)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert "unexpected form" in listing.remarks[0]
