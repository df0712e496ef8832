"""The limits of a run's cost and the offers that it may rent, for `fit()` and for `estimate()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from spotfit.client.cost_limits import (
    CostLimits,
    OfferPlan,
    check_limits,
    cost_spec,
    limits_after,
    read_limits,
)
from spotfit.client.offer_query import query_offers
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector
from spotfit.host import system
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market
from spotfit.model.spec import CostSpec, FeederSpec
from spotfit.model.view import JournalView
from spotfit.provision.api import Provisioner
from spotfit.provision.feeder_backend import backends_of
from spotfit.provision.offers import OfferListing


@dataclass(frozen=True)
class CostPlan:
    """The limits of the cost, and the offers of the backend."""

    limits: CostLimits
    rentable: list[OfferPlan]
    """The offers that the backend's options can rent, also those without a price."""
    plans: list[OfferPlan]
    """Those of them with a price: a run with limits rents no others."""
    listing: OfferListing
    """All offers; the remarks say why some cannot be rented."""
    backend: str
    workers: int
    spec: CostSpec

    def errors(self, limits: CostLimits) -> Iterator[ConfigError]:
        """Yield an error for each contradiction between `limits` and the offers."""
        if limits.is_set:
            yield from check_limits(limits, self.plans, self.listing, backend=self.backend)

    def check(self, limits: CostLimits) -> None:
        """Raise `ConfigError`, or `ConfigErrors` with all contradictions to `limits`."""
        checks = ErrorCollector()
        for error in self.errors(limits):
            checks.add(error)
        checks.raise_all()

    def check_continued(self, view: JournalView) -> None:
        """Check the limits of a fit that continues the run of `view`; raises as `check`."""
        now_ms = system.wall_ms()
        self.check(limits_after(self.limits, view, now_ms, workers=self.workers))


def plan_cost(
    run: RunConfig,
    provisioner: Provisioner,
    workers: GroupRequest,
    now_ms: int,
    *,
    feeders: FeederSpec | None = None,
    rents_validation: bool = False,
) -> CostPlan:
    """Return the limits of `run` and the offers of its backend; rents nothing.

    `workers` is the request for all workers, `now_ms` the storage's time in ms since 1970. Raises
    `ConfigError` if the offers cannot be listed.
    """
    limits = dataclasses.replace(
        read_limits(run, provisioner.traits, now_ms, feeders), rents_validation=rents_validation
    )
    listing = query_offers(provisioner, workers)
    listed = {one.market for one in listing.offers}
    if limits.is_set and run.fallback is None and listed == {Market.ON_DEMAND}:
        limits = dataclasses.replace(limits, uses_on_demand=True)  # "never" would leave no machines
    rentable, remarks = [], list(listing.remarks)
    for offer in listing.offers:
        try:
            plan = provisioner.plan(replace(workers, offer=offer))
        except ConfigError as error:  # such as on-demand machines without a queue
            remarks.append(error.message)
        else:
            rentable.append(OfferPlan(offer, plan.num_nodes, plan.slots_per_node))
    listing = dataclasses.replace(listing, remarks=tuple(remarks))
    plans = [one for one in rentable if one.offer.price is not None]
    return CostPlan(
        limits,
        rentable,
        plans,
        listing,
        backend=next(backends_of(provisioner)).name,
        workers=workers.total_workers,
        spec=cost_spec(limits, plans, now_ms, listed=listing.offers),
    )
