"""Estimates cost and duration before anything is rented: `trainer.estimate()`.

The prices are those that the backend lists now. Availability and lifetimes of spot machines come
from recorded markets, which the plugin in `spotfit.estimators` replays with the policies that
choose the machines of runs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from spotfit.client.cost_limits import OfferPlan, feeder_cost_usd, read_limits
from spotfit.client.cost_plan import CostPlan, plan_cost
from spotfit.client.estimate import (
    Estimate,
    EstimateLimits,
    FeederEstimate,
    OfferEstimate,
    distribution,
    format_confirmation,
)
from spotfit.client.feeder_plan import plan_feeders
from spotfit.client.request import (
    FitRequest,
    largest_group,
    may_rent_validation,
    plan_group,
)
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError, RunCancelledError
from spotfit.core.units import format_seconds, parse_seconds
from spotfit.host import plugins, system
from spotfit.model.group import GroupPlan
from spotfit.model.offer import Market, Offer
from spotfit.model.replay import (
    MarketReplay,
    ReplayedGroup,
    ReplayedJob,
    ReplayedOffer,
    ReplayOutcome,
)
from spotfit.model.spec import FeederSpec, RunTiming
from spotfit.provision.api import Traits

ENTRY_POINT_GROUP = "spotfit.estimators"
ASSUMED_PRICE_RATIO = 3.0
"""On-demand price divided by spot price, for the times of offers without prices."""
ASSUMED_RESTART_S = 120.0
"""For which an elastic group restarts, with the steps that are repeated; a run measures it."""
# Bounds of the computing time: about two seconds for the run, one for the table.
_MAX_DECISIONS = 100_000
_MAX_TABLE_DECISIONS = 40_000

Duration = float | str | timedelta
"""Seconds, a text such as '40h', or a `timedelta`."""


# --- The estimate of a request --------------------------------------------------------------------


def estimate_request(
    request: FitRequest,
    settings: Mapping[str, Any],
    *,
    changeover: Duration | None = None,
    restart: Duration | None = None,
    recordings: str | PathLike[str] | None = None,
) -> Estimate:
    """Return the estimate of a request; lists offers of its backend, rents nothing.

    `settings` are fields of `RunConfig`, which they replace if they are not None. Raises
    `ConfigError` for invalid values, a missing training time, an unknown provisioner and a folder
    without recordings.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    request = replace(request, run=replace(request.run, **given))
    folder = None if recordings is None else Path(recordings)
    markets: MarketReplay = plugins.load(ENTRY_POINT_GROUP, "recorded")(folder)
    provisioner, default = plan_group(request)
    workers, feeders = largest_group(request), request.feeder_spec
    limits = estimate_limits(request.run, provisioner.traits, changeover, restart)
    if feeders is not None:
        feeders = plan_feeders(feeders, provisioner, workers, needs_price=True)
    cost = plan_cost(
        request.run,
        provisioner,
        workers,
        system.wall_ms(),
        feeders=feeders,
        rents_validation=may_rent_validation(request),
    )
    limits = replace(limits, uses_on_demand=cost.limits.uses_on_demand)
    plans = _rented_offers(cost, provisioner.traits)
    scaling = request.scaling
    estimate = compute_estimate(
        plans,
        limits,
        markets,
        min_workers=scaling.min_workers,
        max_workers=scaling.max_workers,
        feeders=feeders,
        others=_other_offers(cost, plans, default),
        rejections=tuple(error.message for error in cost.errors(cost.limits)),
    )
    return replace(estimate, remarks=(*cost.listing.remarks, *estimate.remarks))


def _rented_offers(cost: CostPlan, traits: Traits) -> list[OfferPlan]:
    """Return the offers that the run may rent. Raises `ConfigError` if there are none."""
    if not cost.rentable:
        raise ConfigError(
            f"The backend {cost.backend!r} lists no offers that can be rented. "
            f"{' '.join(cost.listing.remarks)}".rstrip(),
            do="Change the options of the backend so that they allow an offer.",
        )
    if cost.limits.is_set or traits.spot:
        return cost.rentable
    # Without limits the backend chooses, here on-demand machines.
    return _on(Market.ON_DEMAND, cost.rentable) or cost.rentable


def _other_offers(
    cost: CostPlan, plans: Sequence[OfferPlan], default: GroupPlan
) -> list[OfferPlan]:
    """Return the other offers that the backend lists, with machines like those of `plans`.

    `default` is the plan of the backend without an offer.
    """
    names = {one.offer.name for one in plans}
    others = [offer for offer in cost.listing.offers if offer.name not in names]
    return [
        next(
            (one._replace(offer=offer) for one in plans if _is_same_machine(one.offer, offer)),
            OfferPlan(offer, default.num_nodes, default.slots_per_node),
        )
        for offer in others
    ]


def estimate_limits(
    run: RunConfig,
    traits: Traits,
    changeover: Duration | None = None,
    restart: Duration | None = None,
) -> EstimateLimits:
    """Return what is estimated for a run. Raises `ConfigError` without a training time."""
    # The clock of this computer: the storage need not be accessible.
    limits = read_limits(run, traits, system.wall_ms())
    if limits.training_time_s is None:
        raise ConfigError(
            "The training time is unknown: without it neither cost nor duration can be estimated.",
            do="Pass estimate(training_time='40h') or RunConfig(training_time_s='40h'): the "
            "duration with all workers, if no machine is lost.",
        )
    return EstimateLimits(
        training_time_s=limits.training_time_s,
        deadline_s=limits.deadline_s,
        budget_usd=limits.budget_usd,
        changeover_s=_positive_s(
            changeover,
            limits.changeover_s,
            setting="changeover",
            do="Pass the time from a loss of machines to new progress, such as '10m'.",
        ),
        restart_s=_positive_s(
            restart,
            ASSUMED_RESTART_S,
            setting="restart",
            do="Pass the time for which an elastic group restarts, such as '2m'.",
        ),
        uses_on_demand=limits.uses_on_demand,
        fallback=run.fallback,
    )


def _positive_s(value: Duration | None, default_s: float, *, setting: str, do: str) -> float:
    """Return a duration in seconds. Raises `ConfigError` if it is not positive and finite."""
    if value is None:
        return default_s
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    else:
        seconds = parse_seconds(value, setting=f"{setting}={value!r}")
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{setting}={value!r} must be greater than 0.", do=do)
    return seconds


# --- The arithmetic -------------------------------------------------------------------------------


def compute_estimate(
    plans: Sequence[OfferPlan],
    limits: EstimateLimits,
    markets: MarketReplay,
    *,
    min_workers: int,
    max_workers: int,
    feeders: FeederSpec | None = None,
    others: Sequence[OfferPlan] = (),
    rejections: tuple[str, ...] = (),
) -> Estimate:
    """Return the estimate of a run on these offers and markets.

    The plans are those of `max_workers`; with fewer `min_workers` the group is elastic. `others`
    are offers that the run may not rent, for comparison; `rejections` as in `Estimate`.
    """
    fed = _estimate_feeders(feeders, limits)
    expected_usd, highest_usd = (fed.expected_usd, fed.highest_usd) if fed else (0.0, 0.0)
    group = None
    if min_workers < max_workers:
        group = ReplayedGroup(
            min_workers=max(1, min_workers),
            max_workers=max_workers,
            loss_pause_s=RunTiming().lease_timeout_s + limits.restart_s,
            growth_pause_s=limits.restart_s,
        )
    used = _used_offers(plans, limits)
    job = _replayed_job(used, limits, group)
    outcomes = markets.replay(job, max_decisions=_MAX_DECISIONS)
    is_priced = all(one.offer.price for one in used)
    costs = sorted(_finished(one, one.usd) for one in outcomes) if is_priced else []

    def replay_mean(others: Sequence[OfferPlan], share: float) -> float:
        other = _replayed_job(others, limits, group)
        if other == job:
            return statistics.fmean(costs)
        replayed = markets.replay(other, max_decisions=int(_MAX_TABLE_DECISIONS * share))
        return statistics.fmean(_finished(one, one.usd) for one in replayed)

    hours = (limits.training_time_s + limits.changeover_s) / 3600
    on_demand = _on(Market.ON_DEMAND, used)
    on_demand_usd = min((one.usd_per_hour * hours for one in on_demand if is_priced), default=0.0)
    worst_usd = max(*costs, on_demand_usd) if costs else None
    is_late = [one.is_late for one in outcomes]
    can_fall_back = limits.fallback != "never" and bool(_priced(_on(Market.ON_DEMAND, plans)))
    return Estimate(
        workers=max_workers,
        min_workers=min_workers,
        limits=limits,
        earliest_deadline_s=hours * 3600 if can_fall_back else None,
        worst_case_usd=_sum(worst_usd, highest_usd),
        costs_usd=() if expected_usd is None else tuple(usd + expected_usd for usd in costs),
        finish_s=distribution([_finished(one, one.finish_s) for one in outcomes]),
        deadline_share=None if limits.deadline_s is None else 1 - sum(is_late) / len(is_late),
        offers=tuple(_offer_table(plans, others, limits, replay_mean)),
        recordings=tuple(markets.names),
        replays=len(outcomes),
        unfinished_share=sum(one.finish_s is None for one in outcomes) / len(outcomes),
        as_of_ms=system.wall_ms(),
        remarks=(*markets.remarks, *_price_remarks(plans, used), *_group_remarks(group)),
        feeders=fed,
        rejections=rejections,
    )


def _estimate_feeders(feeders: FeederSpec | None, limits: EstimateLimits) -> FeederEstimate | None:
    if feeders is None or not feeders.max_nodes:
        return None
    training_s = limits.training_time_s
    return FeederEstimate(
        min_machines=feeders.min_nodes,
        max_machines=feeders.max_nodes,
        usd_per_hour=feeders.usd_per_hour,
        expected_usd=feeder_cost_usd(feeders, training_s).lowest,
        highest_usd=feeder_cost_usd(feeders, training_s + limits.changeover_s).highest,
    )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _used_offers(plans: Sequence[OfferPlan], limits: EstimateLimits) -> list[OfferPlan]:
    """The offers that are replayed: those with a price, of each market that may be used.

    Those without a price only if the run needs them.
    """
    spot, on_demand = _on(Market.SPOT, plans), _on(Market.ON_DEMAND, plans)
    if limits.uses_on_demand and _priced(on_demand):
        return [*_priced(spot), *_priced(on_demand)]
    spot, on_demand = _priced(spot) or spot, _priced(on_demand) or on_demand
    return [*spot, *on_demand] if limits.uses_on_demand or not spot else spot


def _on(market: Market, plans: Sequence[OfferPlan]) -> list[OfferPlan]:
    return [one for one in plans if one.offer.market is market]


def _priced(plans: list[OfferPlan]) -> list[OfferPlan]:
    return [one for one in plans if one.offer.price]


def _replayed_job(
    used: Sequence[OfferPlan], limits: EstimateLimits, group: ReplayedGroup | None
) -> ReplayedJob:
    known = {
        market: min((one.usd_per_hour for one in _on(market, used) if one.offer.price), default=0.0)
        for market in Market
    }
    spot_usd = known[Market.SPOT] or known[Market.ON_DEMAND] / ASSUMED_PRICE_RATIO or 1.0
    assumed = {
        Market.SPOT: spot_usd,
        Market.ON_DEMAND: known[Market.ON_DEMAND] or spot_usd * ASSUMED_PRICE_RATIO,
    }
    return ReplayedJob(
        offers=tuple(
            ReplayedOffer(
                market=one.offer.market,
                machines=one.machines,
                usd_per_hour=one.usd_per_hour if one.offer.price else assumed[one.offer.market],
                slots=one.slots,
                network=one.offer.network,
            )
            for one in used
        ),
        work_s=limits.training_time_s,
        changeover_s=limits.changeover_s,
        deadline_s=limits.deadline_s,
        group=group,
    )


def _offer_table(
    plans: Sequence[OfferPlan],
    others: Sequence[OfferPlan],
    limits: EstimateLimits,
    replay_mean: Callable[[Sequence[OfferPlan], float], float],
) -> list[OfferEstimate]:
    """`replay_mean` returns the mean cost with these offers, in a share of the computing time."""
    expected = _expected_on_spot(plans, limits, replay_mean)
    hours = (limits.training_time_s + limits.changeover_s) / 3600
    on_demand = _priced(_on(Market.ON_DEMAND, [*plans, *others]))
    table = []
    for one in (*plans, *others):
        twins = [other for other in on_demand if _is_same_machine(one.offer, other.offer)]
        expected_usd = None
        if one.offer.price and one not in others:
            is_spot = one.offer.market is Market.SPOT
            expected_usd = expected.get(_cost_key(one)) if is_spot else one.usd_per_hour * hours
        table.append(
            OfferEstimate(
                offer=one.offer,
                machines=one.machines,
                expected_usd=expected_usd,
                on_demand_usd=min((twin.usd_per_hour * hours for twin in twins), default=None),
                is_rentable=one not in others,
            )
        )
    return table


def _expected_on_spot(
    plans: Sequence[OfferPlan],
    limits: EstimateLimits,
    replay_mean: Callable[[Sequence[OfferPlan], float], float],
) -> dict[tuple[float, int], float]:
    """Mean cost with one spot offer and, if it may be used, the cheapest on-demand one."""
    on_demand = _on(Market.ON_DEMAND, plans)
    priced = _priced(on_demand)
    fallback = [min(priced, key=lambda one: one.usd_per_hour)] if priced else on_demand[:1]
    # Offers with equal prices have equal replays.
    spot = {_cost_key(one): one for one in _priced(_on(Market.SPOT, plans))}
    expected = {}
    for key, one in spot.items():
        used = _used_offers([one, *fallback], limits)
        if all(other.offer.price for other in used):
            expected[key] = replay_mean(used, 1 / len(spot))
    return expected


def _cost_key(plan: OfferPlan) -> tuple[float, int]:
    return plan.usd_per_hour, plan.machines


def _is_same_machine(one: Offer, other: Offer) -> bool:
    return (one.provisioner, one.region, one.machine_type) == (
        other.provisioner,
        other.region,
        other.machine_type,
    )


def _price_remarks(plans: Sequence[OfferPlan], used: Sequence[OfferPlan]) -> list[str]:
    unknown = [one.offer.name for one in plans if one.offer.price is None]
    if not unknown:
        return []
    if all(one.offer.price for one in used):
        return [f"Offers whose price is unknown are not used: {', '.join(unknown)}."]
    return [
        f"The cost is unknown, because these prices are: {', '.join(unknown)}. The times assume "
        f"on-demand machines at {ASSUMED_PRICE_RATIO:g} times the price of spot ones; the option "
        "`prices` of the backend states prices."
    ]


def _group_remarks(group: ReplayedGroup | None) -> list[str]:
    if group is None:
        return []
    restart = format_seconds(group.growth_pause_s)
    return [
        f"Machines that leave or join the elastic group interrupt it for {restart}; `restart` "
        "states another time."
    ]


def _finished(outcome: ReplayOutcome, value: float | None) -> float:
    return math.inf if outcome.finish_s is None or value is None else value


# --- Confirmation before anything is rented -------------------------------------------------------


def confirm_cost(
    request: FitRequest,
    limit_usd: float,
    *,
    is_terminal: Callable[[], bool] | None = None,
    prompt: Callable[[str], str] = input,
) -> None:
    """Ask in the terminal whether a run may cost more than `limit_usd`; see `fit(confirm=)`.

    Does nothing without a terminal, or if the worst case or the budget is not above the limit.
    Raises `ConfigError` for an invalid limit or a missing training time, and `RunCancelledError` if
    it is declined.
    """
    is_number = isinstance(limit_usd, (int, float)) and not isinstance(limit_usd, bool)
    if not is_number or not limit_usd >= 0:
        raise ConfigError(
            f"fit(confirm={limit_usd!r}): confirm must be a number of US dollars.",
            do="Write fit(confirm=100), or omit it to never be asked.",
        )
    if not (_has_terminal if is_terminal is None else is_terminal)():
        return
    estimate = estimate_request(request, {})
    known = [usd for usd in (estimate.worst_case_usd, request.run.budget_usd) if usd is not None]
    # An unknown cost may be above the limit.
    if known and min(known) <= limit_usd:
        return
    question = "\n".join([*format_confirmation(estimate), "Rent the machines? [y/N] "])
    if prompt(question).strip().lower() not in ("y", "yes"):
        raise RunCancelledError(
            "The estimated cost was declined; nothing was rented.",
            do="Call fit() without confirm=, or with a higher limit.",
        )


def _has_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
