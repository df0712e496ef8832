"""The budget of a run in US dollars: when it is ended, and when no machines are requested any more.

The cost of saving and of stopping the machines is kept: while `spent + rate · stop time` is below
the budget, the run continues. At that limit a `Checkpointer` saves, then the fit ends as after a
cancel. The run spends at most the budget, plus what its machines cost while the leader is replaced,
and plus what the provider charges beyond the observed times.
"""

from __future__ import annotations

from spotfit.model.events import CancelRequested, FitEnded
from spotfit.model.leader_state import LeaderState
from spotfit.model.offer import Offer
from spotfit.model.spec import RunTiming
from spotfit.model.usage import bill_of
from spotfit.model.view import MachineGroup, View
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import SELF_EXIT_TIMEOUT_S
from spotfit.policy.offer_prices import current_offers
from spotfit.policy.training_time import start_time_s

# Time for the next step, its snapshot and its upload, if no save was measured yet.
SAVE_S = 120.0


def end_of_budget(
    view: View, state: LeaderState, now: float
) -> CancelRequested | FitEnded | Wait | None:
    """Return the event that ends a fit whose budget is used up, or a `Wait` until then. Pure.

    None without a budget, once the run is cancelled, and before the storage's clock was measured. A
    training that has ended keeps its result; its pending validations are left to the next fit.
    """
    budget_usd = view.spec.cost.budget_usd
    if budget_usd is None or view.cancel_reason is not None or state.wall_ms is None:
        return None
    left_s = budget_left_s(view, state)
    if left_s > 0:
        interval_s = view.spec.timing.decision_interval_s
        return Wait(now + min(left_s, interval_s), "the budget of the run")
    if view.pending_fit_end is not None:
        return view.pending_fit_end
    spent_usd = _spent_usd(view, state)
    kept_usd = _usd_per_hour(view) / 3600 * stop_time_s(view)
    reason = (
        f"the budget of ${budget_usd:.2f} is used up: ${spent_usd:.2f} are spent, and "
        f"${kept_usd:.2f} are kept for saving and for the stop of the machines"
    )
    return CancelRequested(reason=reason, save=True, is_cost_budget=True)


def affords(view: View, state: LeaderState, *offers: Offer) -> bool:
    """Whether the budget suffices for machines of all the offers, beside those that are rented.

    They must pay for their start, or they would train nothing. True without a budget.
    """
    usd_per_hour = sum(
        offer.price.usd_per_hour * view.spec.cost.machines.get(offer.name, 1)
        for offer in offers
        if offer.price is not None
    )
    return affords_price(view, state, usd_per_hour)


def affords_price(view: View, state: LeaderState, usd_per_hour: float) -> bool:
    """Whether the budget suffices for machines of that price, beside those that are rented."""
    if view.spec.cost.budget_usd is None or state.wall_ms is None:
        return True
    return budget_left_s(view, state, more_usd_per_hour=usd_per_hour) > start_time_s(view)


def end_without_offers(view: View, state: LeaderState) -> CancelRequested | None:
    """Return the event that ends a fit whose budget does not suffice for machines of any offer.

    None without a budget, and while machines are rented: they may use what is left.
    """
    budget_usd = view.spec.cost.budget_usd
    is_renting = any(group.active_nodes for group in view.groups.values())
    if budget_usd is None or state.wall_ms is None or is_renting:
        return None
    spent_usd = _spent_usd(view, state)
    reason = (
        f"the budget of ${budget_usd:.2f} does not suffice for the start and the stop of machines: "
        f"${spent_usd:.2f} are spent"
    )
    return CancelRequested(reason=reason, save=True, is_cost_budget=True)


def budget_left_s(view: View, state: LeaderState, *, more_usd_per_hour: float = 0.0) -> float:
    """Return how long the machines may still run before they must save, in seconds.

    Those that are rented, and others that cost `more_usd_per_hour`. Infinite if nothing is rented
    and less than the budget is spent. The run must have a budget, and the clock be measured.
    """
    budget_usd = view.spec.cost.budget_usd
    assert budget_usd is not None
    left_usd = budget_usd - _spent_usd(view, state)
    rate_usd = (_usd_per_hour(view) + more_usd_per_hour) / 3600
    if rate_usd == 0:
        return float("inf") if left_usd > 0 else 0.0
    return left_usd / rate_usd - stop_time_s(view)


def stop_time_s(view: View) -> float:
    """Return how long saving and stopping may take, whose cost is kept of the budget."""
    return longest_stop_s(view.spec.timing)


def longest_stop_s(timing: RunTiming) -> float:
    """Return the time for the last save, for agents that exit, and for another leader."""
    return SAVE_S + SELF_EXIT_TIMEOUT_S + timing.lease_timeout_s


def _spent_usd(view: View, state: LeaderState) -> float:
    assert state.wall_ms is not None
    # The maximum of feeders is known under each offer; an earlier fit may have used offers of
    # unknown price.
    offers = bill_of(view, state.wall_ms).offers
    return sum(one.max_usd for one in offers if one.max_usd is not None)


def _usd_per_hour(view: View) -> float:
    """The price of all machines that may run, of feeders under an unknown offer the highest."""
    prices = {
        offer.name: offer.price.usd_per_hour
        for offer in current_offers(view)
        if offer.price is not None
    }
    feeders = view.spec.feeders
    of_feeders = (feeders.usd_per_hour if feeders is not None else None) or 0.0
    return sum(
        prices.get(_offer_of(group), of_feeders if group.role == "feed" else 0.0)
        * len(group.active_nodes)
        for group in view.groups.values()
    )


def _offer_of(group: MachineGroup) -> str:
    """The name of its offer; that of feeders, which the backend chooses, once it is granted."""
    if group.offer is not None:
        return group.offer.name
    return group.handle.offer if group.handle is not None else ""
