"""The offers of a run with the prices in force, and the changes of prices to record. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from spotfit.model.events import PricesChanged
from spotfit.model.leader_state import LeaderState
from spotfit.model.offer import Offer
from spotfit.model.view import View


def current_offers(view: View) -> tuple[Offer, ...]:
    """Return the offers of the run's spec with the prices that were recorded last.

    Including those for feeders only, which are not in `CostSpec.machines`.
    """
    prices, feeders = view.market.prices, view.spec.feeders
    offers = (*view.spec.cost.offers, *(feeders.offers if feeders is not None else ()))
    return tuple(replace(offer, price=prices.get(offer.name, offer.price)) for offer in offers)


def price_changes(view: View, state: LeaderState) -> PricesChanged | None:
    """Return the offers whose prices have changed since they were recorded; None without any.

    A price that could not be read is unchanged.
    """
    listed = {offer.name: offer.price for offer in state.listed_offers}
    changed = []
    for offer in current_offers(view):
        price = listed.get(offer.name)
        before_usd = offer.price.usd_per_hour if offer.price is not None else None
        if price is not None and price.usd_per_hour != before_usd:
            changed.append(replace(offer, price=price))
    return PricesChanged(offers=tuple(changed)) if changed else None
