"""Offers of a backend: machines that it can rent, and their price.

An offer is chosen before a group is requested, and recorded with the group: the bill and the
decisions of later leaders are computed from it.
"""

from __future__ import annotations

import enum

import msgspec


class Market(enum.StrEnum):
    """The terms on which a machine is rented."""

    SPOT = "spot"
    """Cheaper; the provider may take the machine back at any time."""
    ON_DEMAND = "on_demand"
    """Never taken back by the provider."""


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one machine."""

    usd_per_hour: float
    """Of one machine with all its accelerators, without taxes, discounts and network traffic."""
    source: str
    """Where it comes from, in words: "given", "EC2 spot price history", a catalog's file name."""
    as_of_s: float
    """When the source stated it, in seconds since 1970-01-01 UTC."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of one type in one place, on one market.

    `zone`, `region` and `machine_type` are the provider's names, and '' where the backend leaves
    the choice to the provider. Machines of different `network` cannot connect to each other.
    """

    name: str
    """Unique among the offers of a run, and the same whenever the backend lists its offers."""
    provisioner: str
    """The name of the entry point of the backend."""
    market: Market
    region: str = ""
    zone: str = ""
    machine_type: str = ""
    network: str = ""
    """As in `GroupHandle.network`."""
    price: Price | None = None
    """None if it is unknown; never 0 for an unknown price."""
    options: dict[str, str] = {}
    """What selects this offer in a request, in the backend's own terms."""
