"""Which offers a run with a deadline has its machines from. Pure.

`choose_offer` first decides between spot, on-demand and waiting (`deadline.choose_market`), then
compares the offers of that market by their all-in price per hour of training:

    p + (e + d·p) / m + (K - p) · short

    p      price of the offer
    e      cost of the network traffic of a restore there
    d      changeover time, paid without progress once per mean lifetime m of the offer; if others
           are replaced, which are paid for that time, too, once per half of it
    K      price of the cheapest on-demand offer
    short  share of the time to the deadline in which slack does not suffice for the losses that are
           expected on the offer, so that on-demand machines work instead

A spot offer whose price is nearer to K than to the cheapest spot offer is treated as a cheaper
on-demand offer: it is taken when the deadline requires machines, and left when a cheap offer is
available. Machines are only exchanged for cheaper ones that start beside them, which takes no slack
unless both are lost. An exchange that was chosen or requested is abandoned once it costs 5 per cent
more than the machines that run. Spot machines are started only with the slack for that, 2·d + look,
or d + 2·look beside on-demand machines.

With ample slack a run without machines also waits for a spot offer that is cheaper than those that
are granted, if it was refused recently: it will probably be granted again soon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spotfit.core.units import format_seconds
from spotfit.model.offer import Market
from spotfit.policy.deadline import (
    DeadlineState,
    MarketChoice,
    choose_market,
    reason_to_wait_for_cheaper,
)

# Weight of the mean lifetime over all offers in that of one offer, in losses.
_SHARED_WEIGHT_LOSSES = 2.0
# The mean lifetime of machines that would replace others, as a share of that of the offer. Machines
# that have run for a while are lost less often than new ones (decision 0058).
_REPLACEMENT_LIFETIME_SHARE = 0.5
# By how much cheaper an offer must be to be waited for while others are granted. Prices of one
# offer change by a few per cent.
_WAIT_SHARE = 0.05
# Share of its all-in price by which an offer that is chosen or requested beside machines that run
# may cost more than these. All-in prices depend on the time, which differs between two decisions.
_KEEP_SHARE = 0.05
# Without a deadline: by how much cheaper an offer must be for a move to it.
_MOVE_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferState:
    """What is known about one offer, for all machines of the run together."""

    market: Market
    usd_per_hour: float
    """Of all machines of the run together."""
    refused_s: float | None = None
    """How long its machines have been refused; None if they run or would be granted."""
    mean_lifetime_s: float = math.inf
    """Expected time until the first of the machines is lost."""
    restore_usd: float = 0.0
    """Cost of the network traffic of a restore."""
    is_rented: bool = False
    """Whether machines of it run or start."""
    is_refused_for_good: bool = False
    """Whether a further request is likely to be refused as well."""


class OfferChoice(NamedTuple):
    """The offer to have machines from, by its index; None to wait."""

    offer: int | None
    reason: str


def mean_lifetime_s(
    running_s: float, losses: int, *, total_running_s: float, total_losses: int, prior_s: float
) -> float:
    """Return the expected lifetime of machines of an offer from what the run observed itself.

    `running_s` and `losses` are those of the offer, the totals those of all spot offers of the run.
    Few observations lean on the mean over all offers, and that on `prior_s` with the weight of one
    loss.
    """
    overall_s = (total_running_s + prior_s) / (total_losses + 1)
    return (running_s + _SHARED_WEIGHT_LOSSES * overall_s) / (losses + _SHARED_WEIGHT_LOSSES)


def choose_offer(
    state: DeadlineState,
    offers: Sequence[OfferState],
    running: int | None,
    *,
    chosen: int | None = None,
    standing: int | None = None,
) -> OfferChoice:
    """Return the offer on which the run should have its machines now.

    `running` is the index of the offer whose machines run or start, `chosen` that of the last
    choice: its machines may start beside those. `standing` is that of the last standing request. At
    least one offer must be on-demand.
    """
    highest = min(one.usd_per_hour for one in offers if one.market is Market.ON_DEMAND)
    cheap = cheap_offers(offers, highest)
    granted = [n for n in cheap if offers[n].refused_s is None]
    if running is None and (waiting := _reason_to_wait(state, offers, cheap, highest)):
        return OfferChoice(None, waiting)
    # Waiting for spot machines that cost more than on-demand ones would save nothing.
    market, reason = MarketChoice(Market.ON_DEMAND, "spot machines are not cheaper")
    if cheap:
        lowest = min(offers[n].usd_per_hour for n in granted or cheap)
        market, reason = choose_market(
            state,
            _market_of(running, cheap),
            spot_refused_s=_shortest_refusal_s(offers[n] for n in cheap),
            price_ratio=highest / lowest if lowest > 0 else math.inf,
            is_returning=chosen in cheap,
            is_requested=standing in cheap,
        )
    if market is None:
        return OfferChoice(None, reason)
    others = [n for n, one in enumerate(offers) if one.refused_s is None and n not in cheap]
    candidates = _affordable(state, offers, granted if market is Market.SPOT else others, running)
    now = None if running is None else offers[running]
    prices = {
        n: _price_of_staying(state, offers[n], highest)
        if n == running
        else _all_in_price(state, offers[n], highest, replaced=now)
        for n in candidates
    }
    if now is not None:
        kept = prices.keys() & {chosen, standing} - {running}
        prices |= {n: (1 - _KEEP_SHARE) * prices[n] for n in kept}
    best = min(prices, key=lambda n: (prices[n], n != running))
    if now is not None and best != running:
        reason += f"; {_usd(offers[best])} instead of {_usd(now)}"
    return OfferChoice(best, reason)


def _reason_to_wait(
    state: DeadlineState, offers: Sequence[OfferState], cheap: Sequence[int], highest: float
) -> str:
    """Why to wait for cheaper spot machines than those that are granted; '' for no reason."""
    granted = [offers[n] for n in cheap if offers[n].refused_s is None]
    # Machines that remain after a loss would be paid for while they wait.
    if not granted or any(one.is_rented for one in offers):
        return ""
    limit = (1 - _WAIT_SHARE) * min(one.usd_per_hour for one in granted)
    lowest = min(_all_in_price(state, one, highest, replaced=None) for one in granted)
    refused_s = [
        one.refused_s
        for one in (offers[n] for n in cheap)
        if one.refused_s is not None
        and not one.is_refused_for_good
        and one.usd_per_hour < limit
        and _all_in_price(state, one, highest, replaced=None) < lowest
    ]
    return reason_to_wait_for_cheaper(state, min(refused_s)) if refused_s else ""


def cheap_offers(offers: Sequence[OfferState], highest: float) -> list[int]:
    """Return the spot offers that cost less than the mean of the cheapest one and `highest`.

    By their indexes; `highest` is the price of on-demand machines, in US dollars per hour.
    """
    spot = [n for n, one in enumerate(offers) if one.market is Market.SPOT]
    lowest = min((offers[n].usd_per_hour for n in spot), default=highest)
    return [n for n in spot if offers[n].usd_per_hour <= (lowest + highest) / 2]


def choose_without_waiting(
    offers: Sequence[OfferState], running: int | None, *, changeover_s: float
) -> OfferChoice:
    """Return the offer of a run that is to wait as little as possible, at the lowest price.

    For runs without a deadline, or whose remaining training time is unknown. Spot machines, and
    on-demand ones while spot is refused for longer than `changeover_s`, the time that they take to
    start.
    """
    highest = min(one.usd_per_hour for one in offers if one.market is Market.ON_DEMAND)
    cheap = cheap_offers(offers, highest)
    spot = choose_spot_offer(offers, running, among=cheap)
    if spot.offer is not None and offers[spot.offer].refused_s is None:
        return spot
    refused_s = _shortest_refusal_s(offers[n] for n in cheap)
    if running is None and refused_s is not None and refused_s < changeover_s:
        reason = f"spot machines are refused for {format_seconds(refused_s)}"
        return OfferChoice(None, reason)
    on_demand = [n for n, one in enumerate(offers) if one.market is Market.ON_DEMAND]
    best = min(on_demand, key=lambda n: (offers[n].refused_s is not None, offers[n].usd_per_hour))
    return OfferChoice(best, "spot machines are refused" if cheap else "spot is not cheaper")


def choose_spot_offer(
    offers: Sequence[OfferState], running: int | None, *, among: Sequence[int] | None = None
) -> OfferChoice:
    """Return the cheapest of the spot offers `among` (all of them) that is not refused.

    The offer that runs is kept unless another one costs a fifth less: a move is paid twice for the
    time of its start. None if all are refused.
    """
    spot = [n for n, one in enumerate(offers) if one.market is Market.SPOT]
    granted = [n for n in (spot if among is None else among) if offers[n].refused_s is None]
    if not granted:
        return OfferChoice(None, "spot machines are refused")
    best = min(granted, key=lambda n: offers[n].usd_per_hour)
    if running in granted:
        assert running is not None
        limit = (1 - _MOVE_SHARE) * offers[running].usd_per_hour
        if offers[best].usd_per_hour > limit:
            return OfferChoice(running, "the machines that run are not much dearer than others")
    return OfferChoice(best, f"the cheapest spot machines cost {_usd(offers[best])}")


def _affordable(
    state: DeadlineState,
    offers: Sequence[OfferState],
    possible: Sequence[int],
    running: int | None,
) -> list[int]:
    """Those of the `possible` offers whose machines may be lost at once, with those that run."""
    needed_s = 2 * state.changeover_s + state.look_s
    if running is not None and offers[running].market is Market.ON_DEMAND:
        needed_s = state.changeover_s + 2 * state.look_s
    affordable = [
        n
        for n in possible
        if n == running or state.slack_s >= needed_s or offers[n].market is Market.ON_DEMAND
    ]
    return affordable if affordable or running is None else [running]


def _usd(offer: OfferState) -> str:
    return f"${offer.usd_per_hour:.2f} per hour"


def _shortest_refusal_s(offers: Iterable[OfferState]) -> float | None:
    """How long all of them have been refused; None if one is not, or without offers."""
    refused = [one.refused_s for one in offers]
    known = [refused_s for refused_s in refused if refused_s is not None]
    return min(known, default=None) if len(known) == len(refused) else None


def _market_of(running: int | None, cheap: Sequence[int]) -> Market | None:
    if running is None:
        return None
    return Market.SPOT if running in cheap else Market.ON_DEMAND


def _all_in_price(
    state: DeadlineState, offer: OfferState, highest: float, *, replaced: OfferState | None
) -> float:
    """The price of moving to an offer; `replaced` are the machines that work meanwhile."""
    changeover_hours = state.changeover_s / 3600
    paid, lifetime_s = offer.usd_per_hour, offer.mean_lifetime_s
    if replaced is not None:
        paid += replaced.usd_per_hour
        lifetime_s *= _REPLACEMENT_LIFETIME_SHARE
    lifetime_hours = min(lifetime_s, state.time_left_s) / 3600
    start_usd = offer.restore_usd + changeover_hours * paid
    start = start_usd / max(lifetime_hours, changeover_hours)
    return start + _price_of_staying(state, offer, highest)


def _price_of_staying(state: DeadlineState, offer: OfferState, highest: float) -> float:
    return offer.usd_per_hour + (highest - offer.usd_per_hour) * _short(state, offer)


def _short(state: DeadlineState, offer: OfferState) -> float:
    losses_s = state.changeover_s * state.time_left_s / offer.mean_lifetime_s
    if losses_s <= 0:
        return 0.0
    free_s = state.slack_s - 2 * state.changeover_s - state.look_s
    return min(1.0, max(0.0, 1 - free_s / losses_s))
