"""The machines for feeders before anything is rented: price, offers and common networks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.client.feeder_plan import feeder_request, plan_feeders
from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import FeederSpec
from spotfit.provision.feeder_backend import FeederBackendProvisioner
from spotfit.provision.offers import OfferListing
from tests.unit.control.fake_provisioner import FakeProvisioner

FEEDERS = FeederSpec(min_nodes=1, max_nodes=3, resources={"CPU": 16.0})
WORKERS = GroupRequest(
    token=Token("t-1"), num_workers=8, total_workers=8, resources_per_worker={"GPU": 1.0}
)


class ListingCloud(FakeProvisioner):
    """Offers one spot machine in each of its networks."""

    def __init__(self, *networks: str, usd: float | None = 1.0) -> None:
        super().__init__()
        price = None if usd is None else Price(usd_per_hour=usd, source="given", as_of_s=0.0)
        self.offers_by_network = tuple(
            Offer(
                name=f"{network}/spot",
                provisioner=self.name,
                market=Market.SPOT,
                network=network,
                price=price,
            )
            for network in networks
        )
        self.requests: list[GroupRequest] = []

    def offers(self, request: GroupRequest) -> OfferListing:
        self.requests.append(request)
        return OfferListing(offers=self.offers_by_network)


def planned(workers: Any, feeders: Any = None, *, needs_price: bool = False) -> FeederSpec:
    provisioner = workers if feeders is None else FeederBackendProvisioner(workers, feeders)
    return plan_feeders(FEEDERS, provisioner, WORKERS, needs_price=needs_price)


def test_the_request_is_for_one_machine_with_the_processors_of_feeders() -> None:
    request = feeder_request(FEEDERS, WORKERS)
    assert (request.num_workers, request.total_workers, request.role) == (1, 1, "feed")
    assert request.resources_per_worker == {"CPU": 16.0}


def test_offers_of_the_workers_backend_are_not_listed_without_a_budget() -> None:
    cloud = ListingCloud("")
    assert planned(cloud) == FEEDERS
    assert not cloud.requests


def test_no_offers_are_listed_without_machines() -> None:
    cloud, none = ListingCloud(""), replace(FEEDERS, min_nodes=0, max_nodes=0)
    assert plan_feeders(none, cloud, WORKERS, needs_price=True) == none
    assert not cloud.requests


def test_the_price_is_that_of_the_workers_backend_without_another_one() -> None:
    cloud = ListingCloud("", usd=2.0)
    assert planned(cloud, needs_price=True) == replace(FEEDERS, usd_per_hour=2.0)
    assert [one.role for one in cloud.requests] == ["feed"]


def test_a_backend_of_their_own_has_offers_networks_and_a_price() -> None:
    spec = planned(ListingCloud("us", "eu", usd=9.0), ListingCloud("asia", "eu", usd=0.3))
    assert [one.name for one in spec.offers] == ["asia/spot#feeders", "eu/spot#feeders"]
    assert spec.networks == ("eu",)
    assert spec.usd_per_hour == 0.3


def test_a_backend_without_a_common_network_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"machines in asia, and those of the workers are in eu"):
        planned(ListingCloud("eu", "us"), ListingCloud("asia"))
    with pytest.raises(ConfigError, match=r"in a network without a name, and .* in us"):
        planned(ListingCloud("us"), ListingCloud(""))


def test_an_unknown_price_stays_unknown() -> None:
    assert planned(ListingCloud(""), ListingCloud("", usd=None)).usd_per_hour is None
