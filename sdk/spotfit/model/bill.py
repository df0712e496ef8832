"""`Bill`: what the machines of a run have cost, by offer.

A bill is computed from the journal (`model.usage.bill_of`). Each quantity has a certain value,
which the run has used at least, and a maximum: the journal may only bound when a machine started or
ended.
"""

from __future__ import annotations

import msgspec

from spotfit.model.offer import Market


class OfferBill(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that were rented under one offer."""

    offer: str
    """Its name; '' for machines of a backend without offers."""
    market: Market
    machine_s: float
    """Certain billed time of all its machines, in machine-seconds."""
    max_machine_s: float
    usd: float | None
    """Cost of the certain time; None if the price is unknown."""
    max_usd: float | None
    """None if the price is unknown; of feeders, if the highest price is unknown, too."""
    on_demand_usd: float | None
    """What the certain time would have cost on the on-demand offer of the same region and machine
    type; None if that price is unknown."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a run in all its fits, without disks, storage, network traffic and taxes."""

    offers: tuple[OfferBill, ...] = ()
    boot_s: float = 0.0
    """Machine-seconds before all workers of the first round of a machine had started."""
    repeated_s: float = 0.0
    """Machine-seconds of training that was lost with machines, and was or must be repeated."""
    idle_s: float = 0.0
    """Other machine-seconds without training: waits between rounds, restarts, and after the end."""
    is_final: bool = False
    """Whether all machines are released; the maximum cannot grow any more."""

    @property
    def machine_s(self) -> float:
        """Certain billed time of all machines, in machine-seconds."""
        return sum(one.machine_s for one in self.offers)

    @property
    def max_machine_s(self) -> float:
        """Maximum billed time of all machines, in machine-seconds."""
        return sum(one.max_machine_s for one in self.offers)

    @property
    def usd(self) -> float | None:
        """Certain cost in US dollars; None if the price of a used offer is unknown."""
        return _sum_known([one.usd for one in self.offers])

    @property
    def max_usd(self) -> float | None:
        """Maximum cost in US dollars; None if `max_usd` of a used offer is unknown."""
        return _sum_known([one.max_usd for one in self.offers])

    @property
    def on_demand_usd(self) -> float | None:
        """Cost of the certain time on on-demand machines; None if a price is unknown."""
        return _sum_known([one.on_demand_usd for one in self.offers])

    @property
    def saved_share(self) -> float | None:
        """Share of the on-demand cost that was saved, from 0 to 1; None if a price is unknown.

        Negative if the machines were dearer than on-demand ones.
        """
        usd, on_demand_usd = self.usd, self.on_demand_usd
        if usd is None or not on_demand_usd:
            return None
        return 1 - usd / on_demand_usd


def _sum_known(amounts: list[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
