"""Listing the offers again at intervals."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.control.price_watch import PriceWatch
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.offers import OfferListing
from spotfit.testing.builders import a_request
from tests.unit.control.fake_provisioner import DeferredCalls, FakeProvisioner

FIRST = Offer(name="first", provisioner="local", market=Market.SPOT)
SECOND = Offer(name="second", provisioner="local", market=Market.SPOT)


class ListingProvisioner(FakeProvisioner):
    """Lists the next of `listings` at each call; raises those that are exceptions."""

    def __init__(self, *listings: Offer | Exception) -> None:
        super().__init__()
        self.listings = list(listings)
        self.requests: list[GroupRequest] = []

    def offers(self, request: GroupRequest) -> OfferListing:
        self.requests.append(request)
        listed = self.listings.pop(0)
        if isinstance(listed, Exception):
            raise listed
        return OfferListing(offers=(listed,))


class Watched:
    def __init__(self, *listings: Offer | Exception) -> None:
        self.provisioner = ListingProvisioner(*listings)
        self.calls = DeferredCalls()
        backend: Any = self.provisioner
        self.watch = PriceWatch(backend, self.calls)

    def advance(self, now: float) -> None:
        self.watch.advance([a_request()], now, every_s=600.0)

    def list_at(self, now: float) -> None:
        self.advance(now)
        self.calls.complete()
        self.advance(now)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.watch.listed]


def test_offers_are_listed_at_once_for_the_request() -> None:
    watched = Watched(FIRST)
    assert watched.names == []
    watched.list_at(0.0)
    assert watched.names == ["first"]
    assert watched.provisioner.requests == [a_request()]


def test_a_listing_in_flight_blocks_nothing() -> None:
    watched = Watched(FIRST)
    watched.advance(0.0)
    watched.advance(1.0)
    assert watched.names == []
    assert list(watched.calls.pending) == ["list offers"]


def test_offers_are_listed_again_after_the_interval() -> None:
    watched = Watched(FIRST, SECOND)
    watched.list_at(0.0)
    watched.advance(599.9)
    assert not watched.calls.pending
    watched.list_at(600.0)
    assert watched.names == ["second"]


def test_the_interval_begins_when_the_result_is_collected() -> None:
    watched = Watched(FIRST, SECOND)
    watched.advance(0.0)
    watched.calls.complete()
    watched.advance(100.0)
    watched.advance(699.9)
    assert not watched.calls.pending


def test_a_failed_listing_keeps_the_offers_until_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched(FIRST, OSError("denied"), SECOND)
    watched.list_at(0.0)
    watched.list_at(600.0)
    assert watched.names == ["first"]
    assert "offers.not_listed" in caplog.messages
    watched.advance(1199.9)
    assert not watched.calls.pending
    watched.list_at(1200.0)
    assert watched.names == ["second"]


def test_the_offers_of_several_requests_are_listed_together() -> None:
    watched = Watched(FIRST, SECOND)
    requests = [a_request(), replace(a_request(), role="feed")]
    watched.watch.advance(requests, 0.0, every_s=600.0)
    watched.calls.complete()
    watched.watch.advance(requests, 0.0, every_s=600.0)
    assert watched.names == ["first", "second"]
    assert watched.provisioner.requests == requests
