"""The offers of a backend: what it can rent, and the price of each, as far as it is known.

A provisioner may implement `offers(request)`, which returns an `OfferListing`. It may use the
network, because prices change; `plan` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import Provisioner


@dataclass(frozen=True, slots=True)
class OfferListing:
    """The offers of a backend for one request."""

    offers: tuple[Offer, ...]
    """In the order of the backend's options; at least one."""
    remarks: tuple[str, ...] = ()
    """One sentence for each reason why prices are unknown or older than usual, for the user."""


def list_offers(provisioner: Provisioner, request: GroupRequest) -> OfferListing:
    """Return what the backend can rent for `request`, with prices. Rents nothing.

    Blocks on the backend's price APIs; prices that it asked for a short time ago are taken from the
    user's cache. A denied or unreachable API is no error: its prices are unknown or older, and a
    remark says why. Without the optional method `offers(request)` the result is one offer whose
    price is unknown. Raises `ConfigError` if the backend's options are invalid.
    """
    # Not a part of the protocol, like `find_group`: four calls suffice to train.
    method: Callable[[GroupRequest], OfferListing] | None = getattr(provisioner, "offers", None)
    if method is not None:
        return method(request)
    market = Market.SPOT if provisioner.traits.spot else Market.ON_DEMAND
    offer = Offer(
        name=offer_name(provisioner.name, market), provisioner=provisioner.name, market=market
    )
    remark = f"The backend {provisioner.name} has no prices."
    return OfferListing(offers=(offer,), remarks=(remark,))


def offer_name(provisioner: str, market: Market, *parts: str) -> str:
    """Return the name of an offer, such as 'aws_batch/us-east-1/spot-queue/spot'.

    `parts` distinguish it from other offers of the backend; empty ones are left out.
    """
    return "/".join([provisioner, *filter(None, parts), market.value])
