"""Offers of AWS Batch: boto3 against the price APIs of the simulated cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market
from spotfit.provision.offers import OfferListing, list_offers
from spotfit_localsim.clouds.aws_batch import REGION
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.price_history import PriceHistory
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.aws_batch import client as calls
from spotfit_provisioners.aws_batch import provisioner as provisioners
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.aws_batch.provisioner import AwsBatchProvisioner

pytest.importorskip("boto3")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

OTHER = "sim-west-1"
REQUEST = GroupRequest(token=Token("t-one"), num_workers=1, total_workers=1)
HISTORY = PriceHistory(
    spot={
        f"{REGION}a": ((-7200.0, 0.5), (-3600.0, 0.9)),
        f"{REGION}b": ((-7200.0, 0.7), (1e6, 5.0)),
        f"{OTHER}a": ((-7200.0, 0.6),),
    },
    on_demand={REGION: 3.06, OTHER: 3.5},
)


# One for all tests: a client of EC2 is costly to create.
@pytest.fixture(scope="module")
def shared_sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    calls._client.cache_clear()
    provisioners._client_for_region.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "something")
        folder = tmp_path_factory.mktemp("cloud")
        with running_simulator(folder, SimOptions(cloud="aws_batch")) as simulator:
            simulator.market.prices = HISTORY
            yield simulator
    calls._client.cache_clear()
    provisioners._client_for_region.cache_clear()


@pytest.fixture
def sim(
    shared_sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Simulator]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield shared_sim
    shared_sim.faults.deny_permissions([])
    shared_sim.faults.inject("throttled", 0)


def offers_of(sim: Simulator, **options: Any) -> OfferListing:
    common = {"queues": ("spot",), "region": REGION, "instance_types": ("p3.2xlarge",)}
    chosen = AwsBatchOptions(endpoint=sim.server.url, **{**common, **options})
    return list_offers(AwsBatchProvisioner(chosen), REQUEST)


def prices_of(listing: OfferListing) -> dict[str, float | None]:
    return {
        offer.name.removeprefix("aws_batch/"): offer.price.usd_per_hour if offer.price else None
        for offer in listing.offers
    }


def request_count(sim: Simulator) -> int:
    return sum(sim._request_counts.values())


def test_queues_have_spot_offers_and_regions_on_demand_offers(sim: Simulator) -> None:
    listing = offers_of(sim, queues=("spot", "other", f"{OTHER}:west"))
    assert prices_of(listing) == {
        f"{REGION}/spot/spot": 0.9,
        f"{REGION}/other/spot": 0.9,
        f"{OTHER}/{OTHER}:west/spot": 0.6,
        f"{REGION}/on_demand": 3.06,
        f"{OTHER}/on_demand": 3.5,
    }
    assert listing.remarks == ()
    first = listing.offers[0]
    assert (first.network, first.machine_type, first.options) == (
        REGION,
        "p3.2xlarge",
        {"queue": "spot"},
    )
    assert first.price is not None
    assert first.price.source == "EC2 spot price history, highest of 2 zones"


def test_offer_of_several_types_has_the_highest_of_their_prices(sim: Simulator) -> None:
    listing = offers_of(
        sim,
        instance_types=("p3.2xlarge", "g5.xlarge"),
        prices={"g5.xlarge": {"spot": 1.25, "on_demand": 1.0}},
    )
    assert prices_of(listing) == {f"{REGION}/spot/spot": 1.25, f"{REGION}/on_demand": 3.06}
    assert [offer.machine_type for offer in listing.offers] == ["", ""]


def test_prices_are_requested_once(sim: Simulator) -> None:
    before = request_count(sim)
    first = offers_of(sim)
    # Two zones have a page each; the price list has one.
    assert request_count(sim) == before + 3
    assert offers_of(sim) == first
    assert request_count(sim) == before + 3


def test_given_prices_need_no_request(sim: Simulator) -> None:
    before = request_count(sim)
    listing = offers_of(sim, prices={"*": {"spot": 1, "on_demand": 3}})
    assert [offer.price and offer.price.source for offer in listing.offers] == ["given"] * 2
    assert request_count(sim) == before


def test_denied_prices_are_unknown_with_a_reason(sim: Simulator) -> None:
    sim.faults.deny_permissions(["ec2:DescribeSpotPriceHistory", "pricing:GetProducts"])
    listing = offers_of(sim)
    assert [offer.price for offer in listing.offers] == [None, None]
    assert any("ec2:DescribeSpotPriceHistory" in remark for remark in listing.remarks)
    assert any("pricing:GetProducts" in remark for remark in listing.remarks)


def test_unreachable_api_leaves_the_last_prices(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioner = AwsBatchProvisioner(
        AwsBatchOptions(
            queues=("spot",),
            region=REGION,
            instance_types=("p3.2xlarge",),
            endpoint=sim.server.url,
        )
    )
    first = list_offers(provisioner, REQUEST)
    later_s = provisioner._prices.now_s() + 2 * 86400
    monkeypatch.setattr(provisioner._prices, "_wall_s", lambda: later_s)
    # botocore repeats a request twice.
    sim.faults.inject("throttled", 100)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    second = list_offers(provisioner, REQUEST)
    assert [offer.price for offer in second.offers] == [offer.price for offer in first.offers]
    assert all(remark.endswith("The prices are 48.0 h old.") for remark in second.remarks)
    assert len(second.remarks) == 2


def test_unknown_instance_type_has_no_price(sim: Simulator) -> None:
    listing = offers_of(sim, instance_types=("p3.2xlarge", "p9.none"))
    assert listing.offers[0].price is None
    assert any("p9.none" in remark for remark in listing.remarks)


def test_family_of_instance_types_has_no_price(sim: Simulator) -> None:
    listing = offers_of(sim, instance_types=("p3.2xlarge", "g5"))
    assert [offer.price for offer in listing.offers] == [None, None]
    assert listing.remarks == (
        f"No spot price of g5 in {REGION}.",
        f"No on_demand price of g5 in {REGION}.",
    )


def test_without_instance_types_prices_are_unknown(sim: Simulator) -> None:
    listing = offers_of(sim, instance_types=())
    assert [offer.market for offer in listing.offers] == [Market.SPOT, Market.ON_DEMAND]
    assert [offer.price for offer in listing.offers] == [None, None]
    assert "instance_types" in listing.remarks[0]
    assert offers_of(sim, instance_types=(), prices={"*": {"spot": 2}}).offers[0].price
