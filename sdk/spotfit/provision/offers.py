"""The offers of a backend: what it can rent, and the price of each, as far as it is known.

A provisioner may implement `offers(request)`, which returns an `OfferListing`. It may use the
network, because prices change; `plan` does not. Its `plan` rents exactly `GroupRequest.offer`, if
it is set, and `submit` returns the name of the offer in `GroupHandle.offer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.api import Provisioner, Traits


@dataclass(frozen=True, slots=True)
class OfferListing:
    """The offers of a backend for one request."""

    offers: tuple[Offer, ...]
    """In the order of the backend's options; at least one."""
    remarks: tuple[str, ...] = ()
    """One sentence for each reason why prices are unknown or older than usual, for the user."""
    default: str | None = None
    """The name of the offer that a request without an offer is granted. '' if it is not known in
    advance, for example because the provider chooses a zone; None if the backend does not state
    it."""


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


def highest_default_price(listing: OfferListing, traits: Traits) -> float | None:
    """Return the highest price in USD per hour of what a request without an offer may be granted.

    `traits` are those of the backend. None if a price of it is unknown.
    """
    market = Market.SPOT if traits.spot else Market.ON_DEMAND
    offers = [one for one in listing.offers if one.name == listing.default]
    offers = offers or [one for one in listing.offers if one.market is market]
    prices = [one.price.usd_per_hour for one in offers or listing.offers if one.price is not None]
    return max(prices) if prices and len(prices) == len(offers or listing.offers) else None


def offer_name(provisioner: str, market: Market, *parts: str) -> str:
    """Return the name of an offer, such as 'aws_batch/us-east-1/spot-queue/spot'.

    `parts` distinguish it from other offers of the backend; empty ones are left out.
    """
    return "/".join([provisioner, *filter(None, parts), market.value])


def select_offer(request: GroupRequest, offers: Iterable[Offer], *, do: str) -> Offer | None:
    """Return the offer that `request` names; None if it names none.

    For implementations of `plan`: `offers` are those that the backend's options allow, with or
    without prices. Raises `ConfigError` with the remedy `do` if the named one is none of them, for
    example because it was listed with other options.
    """
    offer = request.offer
    if offer is None:
        return None
    allowed = list(offers)
    if not any(_is_same(offer, one) for one in allowed):
        names = ", ".join(one.name for one in allowed) or "none"
        raise ConfigError(
            f"The offer {offer.name} ({offer.market.value}) cannot be rented with the options of "
            f"{offer.provisioner}. Their offers are: {names}.",
            do=do,
        )
    return offer


def _is_same(one: Offer, other: Offer) -> bool:
    # The name has no effect on what is rented, and the price changes.
    return replace(one, name="", price=None) == replace(other, name="", price=None)
