"""Offers of backends with and without the optional method."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import Traits
from spotfit.provision.offers import OfferListing, list_offers, offer_name

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
