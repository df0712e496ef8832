"""The offer of the hosts. Pure."""

from __future__ import annotations

from spotfit.model.offer import Market
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.prices.given import (
    given_market,
    own_machine_listing,
    own_machine_offer,
)
from spotfit_provisioners.ssh.options import SshOptions


def list_offers(options: SshOptions, *, now_s: float = 0.0) -> OfferListing:
    """Return one offer, because hosts differ in nothing that can be requested.

    `now_s` is the time of the given price, in seconds since 1970-01-01 UTC.
    """
    market = given_market(options.prices, "", default=Market.ON_DEMAND)
    offer = own_machine_offer(options.provisioner, options.prices, market, now_s=now_s)
    return own_machine_listing([offer], default=offer.name)
