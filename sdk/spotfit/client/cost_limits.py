"""Deadline, budget and fallback of a run: checks with figures before anything is rented."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError
from spotfit.core.units import format_seconds
from spotfit.host import log
from spotfit.model.offer import Market, Offer
from spotfit.model.spec import CostSpec, FeederSpec, RunTiming
from spotfit.model.usage import bill_of
from spotfit.model.view import JournalView
from spotfit.policy.cost_budget import longest_stop_s
from spotfit.policy.training_time import estimated_training_s
from spotfit.provision.api import Traits
from spotfit.provision.offers import OfferListing


class OfferPlan(NamedTuple):
    """An offer with a known price, and how many machines of it all workers need."""

    offer: Offer
    machines: int
    slots: int = 1
    """Workers per machine."""

    @property
    def usd_per_hour(self) -> float:
        """Price of all machines; the offer must have a known one."""
        assert self.offer.price is not None
        return self.offer.price.usd_per_hour * self.machines


@dataclass(frozen=True)
class CostLimits:
    """The limits of `RunConfig`, relative to the present."""

    deadline_s: float | None
    """Time until the deadline; None without one."""
    budget_usd: float | None
    uses_on_demand: bool
    training_time_s: float | None
    start_time_s: float
    """Time from a request for machines to the first step."""
    lifetime_s: float
    """Expected lifetime of spot machines, all together."""
    decision_interval_s: float
    """Longest time until the leader decides again."""
    progress: float = 0.0
    """Share of the training that earlier fits of the run have done, in 0..1."""
    spent_usd: float = 0.0
    """What earlier fits of the run have cost at most; the budget includes it."""
    feeders: FeederSpec | None = None
    """The machines for feeders, whose cost is part of the budget."""
    rents_validation: bool = False
    """Whether machines for validations may be rented."""

    @property
    def work_left_s(self) -> float | None:
        """Training time that is left; None if it is unknown."""
        if self.training_time_s is None:
            return None
        return self.training_time_s * (1 - self.progress)

    @property
    def is_set(self) -> bool:
        """Whether the leader must choose offers, so that their prices are needed."""
        has_limit = self.deadline_s is not None or self.budget_usd is not None
        return has_limit or self.uses_on_demand

    @property
    def changeover_s(self) -> float:
        """Time from a loss of machines to progress on others, including decisions."""
        return self.start_time_s + 2 * self.decision_interval_s


def read_limits(
    run: RunConfig, traits: Traits, now_ms: int, feeders: FeederSpec | None = None
) -> CostLimits:
    """Return the limits of `run` at `now_ms`, the storage's time in ms since 1970."""
    deadline_s = None
    if isinstance(run.deadline, timedelta):
        deadline_s = run.deadline.total_seconds()
    elif isinstance(run.deadline, datetime):
        deadline_s = run.deadline.timestamp() - now_ms / 1000
    assert run.training_time_s is None or isinstance(run.training_time_s, float)
    fallback = run.fallback or ("never" if deadline_s is None else "on_demand")
    return CostLimits(
        deadline_s=deadline_s,
        budget_usd=run.budget_usd,
        uses_on_demand=fallback == "on_demand",
        training_time_s=run.training_time_s,
        start_time_s=traits.start_time_s,
        lifetime_s=traits.mean_lifetime_s,
        decision_interval_s=decision_interval_s(traits),
        feeders=feeders,
    )


def limits_after(limits: CostLimits, view: JournalView, now_ms: int, *, workers: int) -> CostLimits:
    """Return the limits of a fit with `workers` that continues the run of `view`.

    `now_ms` as in `bill_of`. The training time is that of the leader.
    """
    spent = [one.max_usd for one in bill_of(view, now_ms).offers if one.max_usd is not None]
    estimate_s = limits.training_time_s
    return replace(
        limits,
        training_time_s=estimated_training_s(view.market, workers, estimate_s=estimate_s),
        progress=view.market.progress or 0.0,
        spent_usd=sum(spent),
    )


def decision_interval_s(traits: Traits) -> float:
    """Return the longest time until the leader decides again which machines the run is to have."""
    # Machines on this computer start within seconds; a decision costs no request.
    return 1.0 if traits.is_nearby else RunTiming().decision_interval_s


def check_limits(
    limits: CostLimits, plans: list[OfferPlan], listing: OfferListing, *, backend: str
) -> Iterator[ConfigError]:
    """Yield an error for each contradiction between the limits and what the backend offers."""
    spot = [one for one in plans if one.offer.market is Market.SPOT]
    on_demand = [one for one in plans if one.offer.market is Market.ON_DEMAND]
    listed = {one.market for one in listing.offers}
    if not limits.uses_on_demand and listed == {Market.ON_DEMAND}:
        yield ConfigError(
            "RunConfig(fallback='never') permits spot machines only, but the backend "
            f"{backend!r} has only on-demand machines.",
            do="Remove fallback, or set fallback='on_demand'.",
        )
        return
    if not (spot or (on_demand and limits.uses_on_demand)):
        yield _unknown_prices(listing, backend, "any offer that this run may use")
        return
    if limits.uses_on_demand and not on_demand:
        yield _unknown_prices(listing, backend, "on-demand machines, to which the run falls back")
        return
    if limits.budget_usd is not None and feeder_cost_usd(limits.feeders, 3600.0).highest is None:
        yield ConfigError(
            "RunConfig(budget_usd=…) needs the price of machines for feeders, which is unknown.",
            do="Give prices with the option prices of their backend, or train without feeders.",
        )
        return
    if limits.budget_usd is not None and limits.rents_validation and listing.default == "":
        yield ConfigError(
            "RunConfig(budget_usd=…) needs the price of machines for validations, but the backend "
            f"{backend!r} grants one of several offers without naming it.",
            do="Name one zone, queue or machine type in provisioner, or validate beside the "
            "workers with ValidationConfig(own_machine=False).",
        )
        return
    yield from _check_deadline(limits)
    too_small = list(_check_start(limits, plans))
    yield from too_small
    if limits.work_left_s is None:
        if limits.deadline_s is not None:
            log.warning(
                "deadline.unknown_training_time",
                reason="the deadline is not guaranteed before the progress was measured",
                do="set RunConfig(training_time_s=...), and pass total_steps to the Checkpointer "
                "or progress to report()",
            )
        return
    if not too_small:
        yield from _check_budget(limits, spot, on_demand)


def _check_start(limits: CostLimits, plans: list[OfferPlan]) -> Iterator[ConfigError]:
    """Without money for a start and a stop no machine would be requested."""
    if limits.budget_usd is None:
        return
    usable = [
        one.usd_per_hour
        for one in plans
        if one.offer.market is Market.SPOT or limits.uses_on_demand
    ]
    stop_s = longest_stop_s(RunTiming())
    needed_usd = min(usable) * (limits.start_time_s + stop_s) / 3600
    least_usd = limits.spent_usd + needed_usd
    if limits.budget_usd <= least_usd:
        yield ConfigError(
            f"RunConfig(budget_usd={limits.budget_usd:.2f}){_spent_text(limits)} leaves nothing "
            f"for the training: the start of machines takes {format_seconds(limits.start_time_s)}, "
            f"and {format_seconds(stop_s)} are kept for the last save and the stop, together "
            f"${needed_usd:.2f} on the cheapest machines.",
            do=f"Set a budget of more than {least_usd:.2f}, or choose cheaper machines or fewer "
            "workers.",
        )


def _spent_text(limits: CostLimits) -> str:
    return f", of which ${limits.spent_usd:.2f} are spent," if limits.spent_usd else ""


def _unknown_prices(listing: OfferListing, backend: str, what: str) -> ConfigError:
    remarks = " ".join(listing.remarks)
    return ConfigError(
        f"RunConfig(deadline=, budget_usd=, fallback=) needs the price of {what}; the backend "
        f"{backend!r} has none. {remarks}".rstrip(),
        do="Give prices with the option prices of the backend, permit it to read them, or list "
        "the on-demand machines in its options.",
    )


def _check_deadline(limits: CostLimits) -> Iterator[ConfigError]:
    if limits.deadline_s is None:
        return
    work_s = limits.work_left_s or 0.0
    earliest_s = work_s + limits.changeover_s
    if limits.deadline_s >= earliest_s:
        return
    is_in = f"is in {format_seconds(limits.deadline_s)}" if limits.deadline_s > 0 else "has passed"
    needed = f"the start of machines takes {format_seconds(limits.changeover_s)}"
    if limits.work_left_s is not None:
        rest = f"remaining {1 - limits.progress:.0%} of the " if limits.progress else ""
        needed = f"the {rest}training takes {format_seconds(work_s)}, and {needed}"
    yield ConfigError(
        f"RunConfig(deadline=...) {is_in}: {needed}. The deadline cannot be kept.",
        do=f"Set a deadline of at least {_rounded_up(earliest_s)}, or use more workers.",
    )


def _rounded_up(seconds: float) -> str:
    """The duration for a remedy: the value that is shown must suffice."""
    unit_s = 360 if seconds >= 7200 else 6 if seconds >= 120 else 1
    return format_seconds(math.ceil(seconds / unit_s) * unit_s)


def _full_cents(usd: float) -> float:
    return math.ceil(round(usd * 100, 6)) / 100


def _check_budget(
    limits: CostLimits, spot: list[OfferPlan], on_demand: list[OfferPlan]
) -> Iterator[ConfigError]:
    budget_usd = limits.budget_usd
    if budget_usd is None or limits.work_left_s is None:
        return
    expected_usd = limits.spent_usd + expected_cost_usd(limits, spot, on_demand)
    if limits.deadline_s is not None and limits.uses_on_demand:
        worst_usd = limits.spent_usd + worst_cost_usd(limits, on_demand)
        if worst_usd > budget_usd:
            yield ConfigError(
                f"The deadline cannot be guaranteed for ${budget_usd:.2f}: worst case "
                f"${worst_usd:.2f}, expected ${expected_usd:.2f}{_including(limits)}.",
                do=f"Set budget_usd={_full_cents(worst_usd):.2f} or more; or "
                "RunConfig(fallback='never'), which keeps the budget and does not guarantee the "
                "deadline.",
            )
            return
    if expected_usd > budget_usd:
        yield ConfigError(
            f"The training is expected to cost ${expected_usd:.2f}{_including(limits)}, more than "
            f"budget_usd={budget_usd:.2f}.",
            do="Set a larger budget, or choose cheaper machines.",
        )


def _including(limits: CostLimits) -> str:
    spent = f", ${limits.spent_usd:.2f} of it spent already" if limits.spent_usd else ""
    has_feeders = limits.feeders is not None and limits.feeders.max_nodes > 0
    return spent + (", with the machines for feeders" if has_feeders else "")


def worst_cost_usd(limits: CostLimits, on_demand: list[OfferPlan]) -> float:
    """Return the cost if on-demand machines do the work left, after one start without progress.

    With the largest number of machines for feeders, whose price must be known.
    """
    assert limits.work_left_s is not None
    duration_s = limits.work_left_s + limits.changeover_s
    feeders_usd = feeder_cost_usd(limits.feeders, duration_s).highest
    cheapest = min(one.usd_per_hour for one in on_demand)
    return cheapest * duration_s / 3600 + (feeders_usd or 0.0)


def expected_cost_usd(
    limits: CostLimits, spot: list[OfferPlan], on_demand: list[OfferPlan]
) -> float:
    """Return the cost of the work left on the cheapest offer, with the losses expected on it.

    With the smallest number of machines for feeders, whose price must be known.
    """
    work_s = limits.work_left_s
    assert work_s is not None
    starts = 1 + work_s / limits.lifetime_s
    costs = [one.usd_per_hour * (work_s + starts * limits.start_time_s) / 3600 for one in spot]
    if limits.uses_on_demand:
        costs += [one.usd_per_hour * (work_s + limits.start_time_s) / 3600 for one in on_demand]
    return min(costs) + (feeder_cost_usd(limits.feeders, work_s).lowest or 0.0)


class FeederCost(NamedTuple):
    """The cost of the machines for feeders in US dollars; None if their price is unknown."""

    lowest: float | None
    """With the smallest number of machines."""
    highest: float | None
    """With the largest number."""


def feeder_cost_usd(feeders: FeederSpec | None, duration_s: float) -> FeederCost:
    """Return the cost of the feeders of a run that trains for `duration_s` seconds."""
    if feeders is None:
        return FeederCost(0.0, 0.0)

    def cost_usd(machines: int) -> float | None:
        if not machines:
            return 0.0
        usd = feeders.usd_per_hour
        return None if usd is None else usd * machines * duration_s / 3600

    return FeederCost(cost_usd(feeders.min_nodes), cost_usd(feeders.max_nodes))


def cost_spec(
    limits: CostLimits, plans: list[OfferPlan], now_ms: int, *, listed: tuple[Offer, ...]
) -> CostSpec:
    """Return the limits for the run's spec; `now_ms` is the storage's time in ms since 1970.

    `listed` are all offers of the backend: the bill compares with those that cannot be rented.
    """
    deadline_ms = None
    if limits.deadline_s is not None:
        deadline_ms = now_ms + round(limits.deadline_s * 1000)
    return CostSpec(
        offers=listed,
        machines={one.offer.name: one.machines for one in plans},
        deadline_ms=deadline_ms,
        budget_usd=limits.budget_usd,
        uses_on_demand=limits.uses_on_demand,
        training_time_s=limits.training_time_s,
        start_time_s=limits.start_time_s,
    )
