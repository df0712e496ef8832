"""Bills of the kinds that are presented to users."""

from __future__ import annotations

from typing import Any

from spotfit.model.bill import Bill, OfferBill
from spotfit.model.offer import Market

SPOT = OfferBill(
    offer="aws_batch/us-east-1/q/spot",
    market=Market.SPOT,
    machine_s=16.2 * 3600,
    max_machine_s=16.4 * 3600,
    usd=4.15,
    max_usd=4.30,
    on_demand_usd=32.85,
)
ON_DEMAND = OfferBill(
    offer="aws_batch/us-east-1/on_demand",
    market=Market.ON_DEMAND,
    machine_s=2 * 3600,
    max_machine_s=2 * 3600,
    usd=8.25,
    max_usd=8.25,
    on_demand_usd=8.25,
)
UNPRICED = OfferBill(
    offer="slurm/h100/on_demand",
    market=Market.ON_DEMAND,
    machine_s=5 * 3600,
    max_machine_s=5 * 3600,
    usd=None,
    max_usd=None,
    on_demand_usd=None,
)
LOCAL = OfferBill(
    offer="",
    market=Market.SPOT,
    machine_s=60.0,
    max_machine_s=60.0,
    usd=None,
    max_usd=None,
    on_demand_usd=None,
)


def a_bill(*offers: OfferBill, **fields: Any) -> Bill:
    """Return the final bill of these offers, by default of spot and on-demand machines."""
    return Bill(**{"offers": offers or (SPOT, ON_DEMAND), "is_final": True, **fields})
