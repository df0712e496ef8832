"""Offers are listed without delaying a fit for long, and without failing it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from spotfit.client.offer_query import OfferQuery, query_offers
from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing
from tests.unit.control.fake_provisioner import FakeProvisioner

REQUEST = GroupRequest(token=Token("t-1"), num_workers=2, total_workers=2)
PRICE = Price(usd_per_hour=1.2, source="given", as_of_s=0.0)
PRICED = Offer(name="cloud/spot", provisioner="cloud", market=Market.SPOT, price=PRICE)
UNPRICED = Offer(name="cloud/on_demand", provisioner="cloud", market=Market.ON_DEMAND)
REMARK = "The price list was denied."


class Backend(FakeProvisioner):
    """A cloud whose offers a test defines."""

    def __init__(self, list_offers: Callable[[], OfferListing], *, name: str = "cloud") -> None:
        super().__init__()
        self.name = name
        self.list_offers = list_offers

    def offers(self, request: GroupRequest) -> OfferListing:
        assert request is REQUEST
        return self.list_offers()


def listing(*offers: Offer, remarks: tuple[str, ...] = ()) -> Callable[[], OfferListing]:
    return lambda: OfferListing(offers=offers, remarks=remarks)


def failing(error: Exception) -> Callable[[], OfferListing]:
    def fail() -> OfferListing:
        raise error

    return fail


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, Any]]]:
    caplog.set_level("INFO", logger="spotfit")

    def read() -> list[tuple[str, Any]]:
        fields = [(one.getMessage(), vars(one)) for one in caplog.records]
        return [(event, each.get("reason", each.get("text"))) for event, each in fields]

    return read


def test_offers_are_returned_and_their_prices_and_remarks_logged(
    logged: Callable[[], list[tuple[str, Any]]],
) -> None:
    query = OfferQuery(Backend(listing(PRICED, UNPRICED, remarks=(REMARK,))), REQUEST)
    assert query.wait() == (PRICED, UNPRICED)
    assert logged() == [
        ("offers.listed", "price of a machine: spot $1.20 an hour"),
        ("offers.remark", REMARK),
    ]


def test_nothing_is_logged_for_machines_of_this_computer(
    logged: Callable[[], list[tuple[str, Any]]],
) -> None:
    local = Backend(listing(UNPRICED, remarks=("no price list",)), name="local")
    assert OfferQuery(local, REQUEST).wait() == (UNPRICED,)
    assert OfferQuery(FakeProvisioner(), REQUEST).wait() == ()
    assert logged() == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("no such zone"), "no such zone"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_a_failure_is_one_line(
    logged: Callable[[], list[tuple[str, Any]]], error: Exception, reason: str
) -> None:
    assert OfferQuery(Backend(failing(error)), REQUEST).wait() == ()
    assert logged() == [("offers.not_listed", reason)]


def test_a_backend_that_does_not_respond_is_not_waited_for(
    logged: Callable[[], list[tuple[str, Any]]],
) -> None:
    released = threading.Event()

    def block() -> OfferListing:
        released.wait()
        return OfferListing(offers=(PRICED,))

    query = OfferQuery(Backend(block), REQUEST)
    assert query.wait(timeout_s=0.01) == ()
    released.set()
    assert logged() == [("offers.not_listed", "the backend has not listed them after 0.01 s")]


def test_the_listing_runs_beside_the_upload() -> None:
    started = threading.Event()

    def list_once() -> OfferListing:
        started.set()
        return OfferListing(offers=(PRICED,))

    query = OfferQuery(Backend(list_once), REQUEST)
    assert started.wait(10.0), "before wait() is called"
    assert query.wait() == (PRICED,)


def test_offers_that_a_fit_requires_are_returned() -> None:
    assert query_offers(Backend(listing(UNPRICED, PRICED)), REQUEST).offers == (UNPRICED, PRICED)


def test_unknown_offers_that_a_fit_requires_are_an_error() -> None:
    with pytest.raises(ConfigError, match="prices of the backend 'cloud' are unknown") as raised:
        query_offers(Backend(failing(OSError("refused"))), REQUEST)
    assert "OSError: refused" in str(raised.value)
    assert "option prices=" in raised.value.do
