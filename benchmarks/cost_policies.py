"""Policies from the literature, in the terms of `spotfit_localsim.virtual.deadline_market`.

Both choose the cheapest spot offer that is available, and the cheapest on-demand offer.
"""

from spotfit.model.offer import Market
from spotfit_localsim.virtual.deadline_market import JobPolicy, JobState, deadline_state


def greedy() -> JobPolicy:
    """Use spot until only on-demand machines keep the deadline, then those until the end."""
    ends_on_demand = False

    def policy(state: JobState) -> int | None:
        nonlocal ends_on_demand
        now = deadline_state(state)
        if state.running_market is Market.SPOT and not ends_on_demand:
            return state.running
        if now.slack_s < 2 * now.changeover_s + now.look_s:
            ends_on_demand = True
        return _cheapest(state, Market.ON_DEMAND if ends_on_demand else Market.SPOT)

    return policy


def uniform_progress() -> JobPolicy:
    """The policy of "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024.

    Without machines, behind a uniform rate of progress: on-demand. On-demand, ahead of it by two
    changeovers: spot. Spot machines are used until they are lost. With too little slack for a loss:
    on-demand until the end.
    """
    ends_on_demand = False

    def policy(state: JobState) -> int | None:
        nonlocal ends_on_demand
        job, now = state.job, deadline_state(state)
        on_demand = _cheapest(state, Market.ON_DEMAND)
        if ends_on_demand:
            return on_demand
        if state.running_market is Market.SPOT:
            return state.running
        spot = _cheapest(state, Market.SPOT)
        rate = job.work / job.deadline
        done = job.work - state.work_left
        if state.running_market is Market.ON_DEMAND:
            is_ahead = done >= (state.now + 2 * job.changeover) * rate
            return spot if is_ahead and spot is not None else on_demand
        if now.slack_s < 2 * now.changeover_s + now.look_s:
            ends_on_demand = True
            return on_demand
        if spot is not None:
            return spot
        return on_demand if done < state.now * rate else None

    return policy


def _cheapest(state: JobState, market: Market) -> int | None:
    offers = state.job.offers
    granted = [
        n
        for n, offer in enumerate(offers)
        if offer.market is market and state.refused_since[n] is None
    ]
    return min(granted, key=lambda n: offers[n].usd_per_hour, default=None)
