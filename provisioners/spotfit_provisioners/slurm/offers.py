"""The offers of a Slurm cluster: its partitions, and those without preemptions. Pure."""

from __future__ import annotations

from spotfit.model.offer import Market, Offer
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.prices.given import (
    given_market,
    own_machine_listing,
    own_machine_offer,
)
from spotfit_provisioners.slurm.options import SlurmOptions

PARTITION, QOS = "partitions", "qos"
"""Keys of `Offer.options`: the options of the backend that select the offer."""


def list_offers(options: SlurmOptions, *, now_s: float = 0.0) -> OfferListing:
    """Return an offer for each partition, and those of on-demand machines.

    `now_s` is the time of the given prices, in seconds since 1970-01-01 UTC.
    """
    partitions = options.partitions or ("",)
    if not options.on_demand_partitions and not options.on_demand_qos:
        offers = [
            _offer(
                options, given_market(options.prices, one, default=Market.SPOT), one, now_s=now_s
            )
            for one in partitions
        ]
    else:
        offers = [_offer(options, Market.SPOT, one, now_s=now_s) for one in partitions]
        offers += [
            _offer(options, Market.ON_DEMAND, one, qos=options.on_demand_qos, now_s=now_s)
            for one in options.on_demand_partitions or partitions
        ]
    # Slurm chooses among several partitions.
    return own_machine_listing(offers, default=offers[0].name if len(partitions) == 1 else "")


def _offer(
    options: SlurmOptions, market: Market, partition: str, *, qos: str = "", now_s: float
) -> Offer:
    selected = {PARTITION: partition, QOS: qos}
    return own_machine_offer(
        options.provisioner,
        options.prices,
        market,
        machine_type=partition,
        parts=[partition, qos],
        options={name: value for name, value in selected.items() if value},
        now_s=now_s,
    )
