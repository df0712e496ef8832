"""Offers of backends with and without the optional method."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.api import Traits
from spotfit.provision.offers import (
    OfferListing,
    highest_default_price,
    list_offers,
    offer_name,
    select_offer,
)

REQUEST = GroupRequest(token=Token("t-one"), num_workers=1, total_workers=1)


@dataclass
class Backend:
    is_spot: bool = True
    name: str = "mine"

    @property
    def traits(self) -> Traits:
        return Traits(spot=self.is_spot)


class PricedBackend(Backend):
    def offers(self, request: GroupRequest) -> OfferListing:
        offer = Offer(name=request.token, provisioner=self.name, market=Market.ON_DEMAND)
        return OfferListing(offers=(offer,))


@pytest.mark.parametrize(("is_spot", "market"), [(True, Market.SPOT), (False, Market.ON_DEMAND)])
def test_backend_without_the_method_has_one_offer_of_unknown_price(
    is_spot: bool, market: Market
) -> None:
    listing = list_offers(Backend(is_spot), REQUEST)  # type: ignore[arg-type]  # what is called
    (offer,) = listing.offers
    assert (offer.name, offer.market, offer.price) == (f"mine/{market}", market, None)
    assert "mine" in listing.remarks[0]


def test_backend_with_the_method_lists_its_own_offers() -> None:
    listing = list_offers(PricedBackend(), REQUEST)  # type: ignore[arg-type]  # what is called
    assert [offer.name for offer in listing.offers] == ["t-one"]


def test_empty_parts_are_left_out_of_a_name() -> None:
    assert offer_name("aws_batch", Market.SPOT, "us-east-1", "") == "aws_batch/us-east-1/spot"


def an_offer(name: str, market: Market = Market.SPOT, **fields: str) -> Offer:
    return Offer(name=name, provisioner="mine", market=market, **fields)  # type: ignore[arg-type]


PRICE = Price(usd_per_hour=2.0, source="given", as_of_s=0.0)


def test_offer_of_a_request_is_selected_whatever_its_price_is() -> None:
    listed = [an_offer("a", zone="z1"), an_offer("b", zone="z2")]
    wanted = replace(listed[1], price=PRICE)
    assert select_offer(replace(REQUEST, offer=wanted), listed, do="…") is wanted
    assert select_offer(REQUEST, listed, do="…") is None


@pytest.mark.parametrize(
    "other",
    [
        an_offer("a", Market.ON_DEMAND),
        an_offer("a", zone="z1"),
        an_offer("a", machine_type="p5"),
        replace(an_offer("a"), provisioner="theirs"),
        replace(an_offer("a"), options={"queue": "q"}),
    ],
)
def test_offer_that_the_options_do_not_allow_is_an_error_with_the_remedy(other: Offer) -> None:
    with pytest.raises(ConfigError, match="a, b") as raised:
        select_offer(replace(REQUEST, offer=other), [an_offer("a"), an_offer("b")], do="set x")
    assert raised.value.do == "set x"


def priced(name: str, market: Market, usd: float | None) -> Offer:
    price = None if usd is None else Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    return Offer(name=name, provisioner="mine", market=market, price=price)


@pytest.mark.parametrize(
    ("default", "is_spot", "expected"),
    [
        (None, True, 2.0),  # the highest price of spot machines
        ("a", True, 1.0),
        ("c", True, 5.0),
        ("", False, 5.0),
    ],
)
def test_a_request_without_an_offer_costs_what_the_backend_may_grant(
    default: str | None, expected: float, *, is_spot: bool
) -> None:
    offers = (
        priced("a", Market.SPOT, 1.0),
        priced("b", Market.SPOT, 2.0),
        priced("c", Market.ON_DEMAND, 5.0),
    )
    listing = OfferListing(offers, default=default)
    assert highest_default_price(listing, Traits(spot=is_spot)) == expected


def test_the_default_price_is_unknown_if_that_of_a_possible_offer_is() -> None:
    offers = (priced("a", Market.SPOT, 1.0), priced("b", Market.SPOT, None))
    assert highest_default_price(OfferListing(offers), Traits()) is None


def test_a_backend_with_only_the_other_market_has_the_price_of_that() -> None:
    offers = (priced("a", Market.ON_DEMAND, 3.0),)
    assert highest_default_price(OfferListing(offers), Traits()) == 3.0
