"""Estimates cost and duration before anything is rented: `trainer.estimate()`.

The prices are those that the backend lists now. Availability and lifetimes of spot machines come
from recorded markets, which the plugin in `spotfit.estimators` replays with the policy that
schedules runs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from spotfit.client.estimate import (
    DEFAULT_CHANGEOVER_S,
    Estimate,
    EstimateLimits,
    OfferEstimate,
    distribution,
    format_confirmation,
)
from spotfit.client.request import PREFLIGHT_TOKEN, FitRequest, plan_group
from spotfit.core.errors import ConfigError, RunCancelledError
from spotfit.core.input_checks import ErrorCollector
from spotfit.core.units import parse_seconds
from spotfit.host import plugins, system
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.model.replay import MarketReplay, ReplayedJob, ReplayedOffer, ReplayOutcome
from spotfit.provision.offers import OfferListing, list_offers

ENTRY_POINT_GROUP = "spotfit.estimators"
ASSUMED_PRICE_RATIO = 3.0
"""On-demand price divided by spot price, for the times of offers without prices."""
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
    recordings: str | PathLike[str] | None = None,
) -> Estimate:
    """Return the estimate of a request; lists offers of its backend, rents nothing.

    `settings` replace those of the same names in `RunConfig` if they are not None: training_time_s,
    deadline, budget_usd, changeover_s and fallback. Raises `ConfigError` for invalid values, a
    missing training time, an unknown provisioner and a folder without recordings.
    """
    limits = read_limits(request.run, settings)
    folder = None if recordings is None else Path(recordings)
    markets: MarketReplay = plugins.load(ENTRY_POINT_GROUP, "recorded")(folder)
    provisioner, plan = plan_group(request)
    workers = request.scaling.max_workers
    group = GroupRequest(
        token=PREFLIGHT_TOKEN,
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=request.scaling.worker_resources,
    )
    listing = list_offers(provisioner, group)
    estimate = compute_estimate(listing, limits, markets, machines=plan.num_nodes)
    remarks = estimate.remarks
    if request.scaling.min_workers < workers:
        remarks += (f"The elastic group is estimated with {workers} workers all the time.",)
    return replace(estimate, workers=workers, remarks=remarks)


def read_limits(run: Any, settings: Mapping[str, Any]) -> EstimateLimits:
    """Return the limits of `settings`, else those of a `RunConfig`. Raises `ConfigError`."""
    errors = ErrorCollector()

    def setting(name: str, parse: Callable[[str, Any], Any]) -> Any:
        value = settings.get(name)
        value = getattr(run, name, None) if value is None else value
        return None if value is None else errors.check(lambda: parse(name, value))

    training_time_s = setting("training_time_s", _positive_seconds)
    deadline_s = setting("deadline", _seconds_until)
    budget_usd = setting("budget_usd", _positive_number)
    changeover_s = setting("changeover_s", _positive_seconds)
    errors.raise_all()
    if training_time_s is None:
        raise ConfigError(
            "The training time is unknown: without it neither cost nor duration can be estimated.",
            do="Pass estimate(training_time='40h') or RunConfig(training_time_s=...): the duration "
            "with all workers, if no machine is lost.",
        )
    return EstimateLimits(
        training_time_s=training_time_s,
        deadline_s=deadline_s,
        budget_usd=budget_usd,
        changeover_s=changeover_s or DEFAULT_CHANGEOVER_S,
        fallback=setting("fallback", lambda _, value: value) or "on_demand",
    )


def _positive_seconds(name: str, value: Any) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        value = parse_seconds(value, setting=f"{name}={value!r}")
    return _positive_number(name, value)


def _positive_number(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        kind = "US dollars" if name.endswith("_usd") else "seconds, or a text such as '40h'"
        raise ConfigError(
            f"{name}={value!r} must be greater than 0.", do=f"Pass a number of {kind}."
        )
    return float(value)


def _seconds_until(name: str, value: Any) -> float:
    if isinstance(value, datetime):
        value = value.timestamp() - system.wall_ms() / 1000
    return _positive_seconds(name, value)


# --- The arithmetic -------------------------------------------------------------------------------


def compute_estimate(
    listing: OfferListing, limits: EstimateLimits, markets: MarketReplay, *, machines: int
) -> Estimate:
    """Return the estimate of a run on `machines` machines with these offers and markets."""
    used = _used_offers(listing.offers, limits)
    is_priced = all(offer.price is not None for offer in used)
    job = _replayed_job(used, limits, machines)
    outcomes = markets.replay(job, max_decisions=_MAX_DECISIONS)
    costs = sorted(_finished(one, one.usd) for one in outcomes) if is_priced else []

    def replay_mean(used: Sequence[Offer], share: float) -> float:
        other = _replayed_job(used, limits, machines)
        if other == job:
            return statistics.fmean(costs)
        replayed = markets.replay(other, max_decisions=int(_MAX_TABLE_DECISIONS * share))
        return statistics.fmean(_finished(one, one.usd) for one in replayed)

    hours = (limits.training_time_s + limits.changeover_s) / 3600
    fallback = [_known_usd(one) for one in used if one.price and one.market is Market.ON_DEMAND]
    fallback_usd = min(fallback, default=0.0) * hours * machines
    is_late = [one.is_late for one in outcomes]
    may_fall_back = limits.fallback != "never"
    has_on_demand = any(offer.market is Market.ON_DEMAND for offer in listing.offers)
    return Estimate(
        workers=machines,
        machines=machines,
        limits=limits,
        earliest_deadline_s=hours * 3600 if has_on_demand and may_fall_back else None,
        worst_case_usd=max(*costs, fallback_usd) if costs else None,
        costs_usd=tuple(costs),
        finish_s=distribution([_finished(one, one.finish_s) for one in outcomes]),
        deadline_share=None if limits.deadline_s is None else 1 - sum(is_late) / len(is_late),
        offers=tuple(_offer_table(listing.offers, limits, machines, replay_mean)),
        recordings=tuple(markets.names),
        replays=len(outcomes),
        as_of_ms=system.wall_ms(),
        remarks=(*listing.remarks, *markets.remarks, *_price_remarks(listing.offers, used)),
    )


def _used_offers(offers: Sequence[Offer], limits: EstimateLimits) -> list[Offer]:
    """The offers that are replayed: those with a price, of each market that may be used."""
    spot = _priced([one for one in offers if one.market is Market.SPOT])
    on_demand = _priced([one for one in offers if one.market is Market.ON_DEMAND])
    keeps_deadline = limits.deadline_s is not None and limits.fallback != "never"
    return [*spot, *on_demand] if keeps_deadline or not spot else spot


def _priced(offers: list[Offer]) -> list[Offer]:
    return [one for one in offers if one.price is not None] or offers


def _replayed_job(used: Sequence[Offer], limits: EstimateLimits, machines: int) -> ReplayedJob:
    prices = {market: [_usd(one) for one in used if one.market is market] for market in Market}
    spot_usd = min((usd for usd in prices[Market.SPOT] if usd is not None), default=None)
    on_demand_usd = min((usd for usd in prices[Market.ON_DEMAND] if usd is not None), default=None)
    if spot_usd is None:
        spot_usd = 1.0 if on_demand_usd is None else on_demand_usd / ASSUMED_PRICE_RATIO
    if on_demand_usd is None:
        on_demand_usd = spot_usd * ASSUMED_PRICE_RATIO
    assumed = {Market.SPOT: spot_usd, Market.ON_DEMAND: on_demand_usd}
    offers = tuple(
        ReplayedOffer(market=one.market, usd_per_hour=assumed[one.market] if usd is None else usd)
        for one in used
        for usd in [_usd(one)]
    )
    return ReplayedJob(
        offers=offers,
        machines=machines,
        work_s=limits.training_time_s,
        changeover_s=limits.changeover_s,
        deadline_s=limits.deadline_s,
    )


def _offer_table(
    offers: Sequence[Offer],
    limits: EstimateLimits,
    machines: int,
    replay_mean: Callable[[Sequence[Offer], float], float],
) -> list[OfferEstimate]:
    """`replay_mean` returns the mean cost with these offers, in a share of the computing time."""
    expected = _expected_by_spot_price(offers, limits, replay_mean)
    machine_hours = (limits.training_time_s + limits.changeover_s) / 3600 * machines
    on_demand = [one for one in offers if one.market is Market.ON_DEMAND and one.price]
    table = []
    for one in offers:
        usd = _usd(one)
        twins = [_known_usd(other) for other in on_demand if _same_machines(one, other)]
        expected_usd = None if usd is None else expected.get(usd)
        if one.market is Market.ON_DEMAND:
            expected_usd = None if usd is None else usd * machine_hours
        on_demand_usd = min(twins) * machine_hours if twins else None
        table.append(
            OfferEstimate(offer=one, expected_usd=expected_usd, on_demand_usd=on_demand_usd)
        )
    return table


def _expected_by_spot_price(
    offers: Sequence[Offer],
    limits: EstimateLimits,
    replay_mean: Callable[[Sequence[Offer], float], float],
) -> dict[float, float]:
    """Mean cost with one spot offer and the cheapest on-demand one, by the price of the former."""
    on_demand = [one for one in offers if one.market is Market.ON_DEMAND]
    priced = [one for one in on_demand if one.price]
    fallback = [min(priced, key=_known_usd)] if priced else on_demand[:1]
    spot = {_known_usd(one): one for one in offers if one.market is Market.SPOT and one.price}
    expected = {}
    for usd, one in spot.items():
        used = _used_offers([one, *fallback], limits)
        if all(other.price for other in used):
            expected[usd] = replay_mean(used, 1 / len(spot))
    return expected


def _same_machines(one: Offer, other: Offer) -> bool:
    return (one.provisioner, one.region, one.machine_type) == (
        other.provisioner,
        other.region,
        other.machine_type,
    )


def _price_remarks(offers: Sequence[Offer], used: Sequence[Offer]) -> list[str]:
    unknown = [one.name for one in offers if one.price is None]
    if not unknown:
        return []
    if any(one.price is None for one in used):
        return [
            f"The cost is unknown, because these prices are: {', '.join(unknown)}. The times "
            f"assume on-demand machines at {ASSUMED_PRICE_RATIO:g} times the price of spot ones; "
            "the option `prices` of the backend states prices."
        ]
    return [f"Offers whose price is unknown are not used: {', '.join(unknown)}."]


def _usd(offer: Offer) -> float | None:
    return None if offer.price is None else offer.price.usd_per_hour


def _known_usd(offer: Offer) -> float:
    assert offer.price is not None
    return offer.price.usd_per_hour


def _finished(outcome: ReplayOutcome, value: float | None) -> float:
    return math.inf if outcome.finish_s is None or value is None else value


# --- Confirmation before anything is rented -------------------------------------------------------


def confirm_cost(
    request: FitRequest,
    limit_usd: float,
    *,
    is_terminal: Callable[[], bool] | None = None,
    ask: Callable[[str], str] = input,
) -> None:
    """Ask in the terminal whether a run may cost more than `limit_usd`; see `fit(confirm=)`.

    Does nothing without a terminal, or if the worst case is below the limit. Raises `ConfigError`
    for an invalid limit or a missing training time, and `RunCancelledError` if it is declined.
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
    budget_usd = estimate.limits.budget_usd
    most_usd = min(
        (usd for usd in (estimate.worst_case_usd, budget_usd) if usd is not None), default=None
    )
    # An unknown cost may be above the limit.
    if most_usd is not None and most_usd <= limit_usd:
        return
    question = "\n".join([*format_confirmation(estimate), "Rent the machines? [y/N] "])
    if ask(question).strip().lower() not in ("y", "yes"):
        raise RunCancelledError(
            "The estimated cost was declined; nothing was rented.",
            do="Call fit() without confirm=, or with a higher limit.",
        )


def _has_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
