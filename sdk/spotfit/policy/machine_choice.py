"""Which offers a run has its machines from: policies applied to the journal and to observations.

    run                                  | policy
    -------------------------------------|----------------------------------------------------------
    deadline, remaining time known       | `offer_choice.choose_offer`
    deadline, remaining time unknown     | spot machines, on-demand ones where spot is refused
    no deadline, fallback to on-demand   | the same
    deadline, no fallback                | the cheapest spot offer that is not refused
    elastic group                        | `elastic_choice.choose_group`

The choice is written to the journal when it changes (`MachinesChosen`). Requests follow from it:
`capacity.missing_by_offer` counts the machines of each chosen offer only, so that machines of a new
choice start beside those that run. These are released once all workers have other machines.

A refused spot offer that the run would move to is requested as well, as a standing request: with
growing pauses at a backend that refuses at once, as one waiting group at a backend with a queue.

Spot machines of a move that has been incomplete for too long are released (`incomplete_moves`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from msgspec.structs import replace as replace_struct

from spotfit.core.ids import Token
from spotfit.model.events import MachinesChosen
from spotfit.model.leader_state import LeaderState
from spotfit.model.market_record import network_of
from spotfit.model.offer import Market, Offer
from spotfit.model.view import View
from spotfit.policy import cost_budget, elastic_choice, offer_choice
from spotfit.policy.capacity import (
    has_agents,
    has_machines,
    slots_of_offer,
)
from spotfit.policy.deadline import DeadlineState
from spotfit.policy.elastic_choice import ElasticOffer
from spotfit.policy.incomplete_moves import incomplete_move, is_move_paused
from spotfit.policy.offer_choice import OfferChoice, OfferState
from spotfit.policy.offer_prices import current_offers
from spotfit.policy.request_backoff import offer_request_due_s, unusable_until_s
from spotfit.policy.training_time import changeover_s, start_time_s, work_left_s

# Clocks of storage services and the rounding of their time stamps to seconds.
_CLOCK_MARGIN_S = 5.0


class _Candidate(NamedTuple):
    offer: Offer
    state: OfferState


def choose_machines(view: View, state: LeaderState, now: float) -> MachinesChosen | None:
    """Return the offers that the run is to have its machines from; None if the backend chooses.

    `now` is the leader's `Clock.now()` in seconds; `state.elapsed_s` and `state.wall_ms` are of the
    same moment.
    """
    candidates = _candidates(view, state, now)
    if not candidates:
        return None
    if not _is_informed(view, state, now):
        return view.market.choice
    goal = deadline_state(view, state, now)
    incomplete, why = incomplete_move(view, state)
    paused = {one.offer.name for one in candidates if is_move_paused(view, state, one.offer.name)}
    paused |= {incomplete}
    if view.spec.is_elastic:
        if elastic_choice.is_waiting_for_agents(view, state, now):
            return view.market.choice
        offers = _elastic_offers(view, state, candidates, now, paused=paused)
        if not offers:
            return view.market.choice
        group = elastic_choice.observe_group(view, is_move_ended=bool(incomplete))
        chosen = elastic_choice.choose_group(group, goal, offers)
    else:
        others = [one for one in candidates if one.offer.name not in paused]
        chosen = _choose_one_offer(view, state, goal, others or candidates, now)
    if not incomplete:
        return chosen
    reason = f"{why}; {chosen.reason}"
    return replace_struct(chosen, incomplete_offer=incomplete, reason=reason)


def _is_informed(view: View, state: LeaderState, now: float) -> bool:
    """Whether this leader knows the storage's clock, its own agent, and the state of every group.

    A new leader would take machines that run for missing ones. It waits no longer than a start
    takes: the backend may not respond.
    """
    if view.market.choice is not None and not state.is_headless and not state.members:
        return False
    if view.spec.cost.deadline_ms is not None and state.wall_ms is None:
        return False
    return now - state.leading_since > start_time_s(view) or all(
        token in state.group_statuses
        for token, group in view.groups.items()
        if group.role == "train" and group.handle is not None and group.active_nodes
    )


def deadline_state(view: View, state: LeaderState, now: float) -> DeadlineState | None:
    """Return how far the run is from its deadline; None without one, or if that is unknown."""
    work_s = work_left_s(view, state, now)
    if view.spec.cost.deadline_ms is None or work_s is None or state.wall_ms is None:
        return None
    left_s = (view.spec.cost.deadline_ms - state.wall_ms) / 1000 - _CLOCK_MARGIN_S
    return DeadlineState(
        time_left_s=left_s,
        work_left_s=work_s,
        changeover_s=changeover_s(view),
        look_s=_look_s(view),
    )


def _look_s(view: View) -> float:
    # Without a leader, a new one is elected within the lease.
    return view.spec.timing.decision_interval_s + view.spec.timing.lease_timeout_s


# --- What is known about the offers ---------------------------------------------------------------


def _candidates(view: View, state: LeaderState, now: float) -> list[_Candidate]:
    """The offers that may be chosen, of all networks: machines of another one start beside."""
    cost = view.spec.cost
    if not cost.chooses_offers:
        return []
    possible = [
        offer
        for offer in current_offers(view)
        if offer.price is not None
        and offer.name in cost.machines
        and (offer.market is Market.SPOT or cost.uses_on_demand)
        and (_tokens_of(view, offer.name) or cost_budget.affords(view, state, offer))
    ]
    refused = {offer.name: _refused_s(view, state, offer, now) for offer in possible}
    on_demand = [one.name for one in possible if one.market is Market.ON_DEMAND]
    # Without another way to keep the deadline, refused on-demand machines are requested again.
    if all(refused[name] is not None for name in on_demand):
        refused |= dict.fromkeys(on_demand)
    return [_Candidate(one, _offer_state(view, one, refused[one.name])) for one in possible]


def _elastic_offers(
    view: View,
    state: LeaderState,
    candidates: Sequence[_Candidate],
    now: float,
    *,
    paused: AbstractSet[str],
) -> list[ElasticOffer]:
    waiting = {one for one in view.market.requests if _is_refused(view, state, one, now)}
    return [
        elastic_choice.observe_offer(
            view,
            state,
            now,
            offer=one.offer,
            offer_state=one.state,
            waiting=waiting,
            is_paused=one.offer.name in paused,
        )
        for one in candidates
        if elastic_choice.is_in_network(view, state, one.offer)
    ]


def _offer_state(view: View, offer: Offer, refused_s: float | None) -> OfferState:
    assert offer.price is not None
    market, spot = view.market, Market.SPOT
    record = market.record_of(offer.name)
    of_spot = [market.record_of(one.name) for one in view.spec.cost.offers if one.market is spot]
    lifetime_s = offer_choice.mean_lifetime_s(
        record.running_s,
        record.losses,
        total_running_s=sum(one.running_s for one in of_spot),
        total_losses=sum(one.losses for one in of_spot),
        prior_s=view.spec.market_prior.mean_lifetime_s,
    )
    return OfferState(
        market=offer.market,
        usd_per_hour=offer.price.usd_per_hour * view.spec.cost.machines.get(offer.name, 1),
        refused_s=refused_s,
        mean_lifetime_s=lifetime_s if offer.market is spot else math.inf,
        is_rented=refused_s is None and bool(_tokens_of(view, offer.name)),
        is_refused_for_good=bool(record.final_refusal),
    )


def _refused_s(view: View, state: LeaderState, offer: Offer, now: float) -> float | None:
    """How long its machines have been refused; None if they run or would be granted."""
    tokens = _tokens_of(view, offer.name)
    if any(has_machines(state, token) or _is_billed(view, token) for token in tokens):
        return None
    # An agent has just disconnected, or its loss was recorded: the backend's status of the other
    # machines may be older than the agent.
    if any(_had_agent(view, state, token) for token in tokens):
        return None
    record = view.market.record_of(offer.name)
    waiting_s = [
        state.elapsed_s - view.market.requests[token].planned_s
        for token in tokens
        if _is_refused(view, state, token, now)
    ]
    if record.refused_since_s is not None:
        waiting_s.append(state.elapsed_s - record.refused_since_s)
    unusable = view.market.unusable_networks.get(network_of(offer))
    if unusable is not None and state.elapsed_s < unusable_until_s(view, offer.name):
        waiting_s.append(state.elapsed_s - unusable.since_s)
    return max(waiting_s, default=None)


def _is_refused(view: View, state: LeaderState, token: Token, now: float) -> bool:
    """Whether a request that waits at the backend counts as refused."""
    request, status = view.market.requests[token], state.group_statuses.get(token)
    waited_s = state.elapsed_s - request.planned_s
    if status is None and request.has_trained:
        # A new leader has not observed the machines yet: they probably run since long ago.
        waited_s = min(waited_s, now - state.leading_since)
    has_reason = bool(status and status.refusal) or request.waiting_since_s is not None
    return has_reason or waited_s > start_time_s(view)


def _tokens_of(view: View, offer: str) -> list[Token]:
    return [
        token
        for token, one in view.market.requests.items()
        if one.offer == offer and view.groups[token].active_nodes
    ]


def _had_agent(view: View, state: LeaderState, token: Token) -> bool:
    """Whether an agent has been connected whose machine is not lost, or was not when the backend
    reported its last status."""
    if state.status_as_of.get(token, -math.inf) < state.agent_lost_at.get(token, -math.inf):
        return True
    nodes = view.groups[token].active_nodes
    return any((token, node) in state.last_agent_by_node for node in nodes)


def _is_billed(view: View, token: Token) -> bool:
    """Whether machines of the group are billed, as while they boot; some boot for long."""
    usage = view.usage.groups.get(token)
    return usage is not None and any(one.started_ms is not None for one in usage.machines)


def _running_offer(
    view: View, state: LeaderState, candidates: Sequence[_Candidate], now: float
) -> int | None:
    """The offer whose machines train, else one whose machines are complete: the chosen one first.

    After the loss of a machine the choice is made again, as for a run without machines. Machines
    that start count for the chosen offer only, and not if they are on-demand: they train nothing,
    so that spot machines may only take their place with the slack of a run without machines.

    Connected machines count whatever is chosen, except spot machines once on-demand ones are.
    Otherwise a choice would be made from other facts than the next one, and could be changed back
    and forth.
    """
    names = [one.offer.name for one in candidates]
    requests, choice = view.market.requests, view.market.choice
    trained = view.market.round.tokens if view.market.round is not None else ()
    offers = [requests[token].offer for token in trained if token in requests]
    chosen = () if choice is None else tuple(choice.workers)
    on_demand = {one.offer.name for one in candidates if one.offer.market is Market.ON_DEMAND}
    if on_demand.intersection(chosen):
        # Spot machines that still train while on-demand ones start: the slack no longer suffices
        # for their loss, so that they are not chosen because they run.
        names_that_count = [name for name in names if name in on_demand]
        offers = [name for name in offers if name in on_demand]
    else:
        names_that_count = names
    for name in dict.fromkeys([*chosen, *names_that_count]):
        if slots_of_offer(view, state, name) < view.spec.max_workers:
            continue
        tokens = _tokens_of(view, name)
        is_connected = any(has_agents(state, token) for token in tokens)
        is_starting = any(not _is_refused(view, state, one, now) for one in tokens)
        if is_connected or (is_starting and name in chosen and name not in on_demand):
            offers.append(name)
    return next((names.index(name) for name in offers if name in names), None)


# --- The choice -----------------------------------------------------------------------------------


def _choose_one_offer(
    view: View,
    state: LeaderState,
    goal: DeadlineState | None,
    candidates: Sequence[_Candidate],
    now: float,
) -> MachinesChosen:
    """The choice of a group of fixed size."""
    running = _running_offer(view, state, candidates, now)
    chosen = _choose(view, goal, candidates, running)
    if chosen.offer is None:
        chosen = _unless_reversed(view, state, goal, candidates, chosen, now)
    standing = _standing_offer(view, state, goal, candidates, running, chosen=chosen)
    workers = {}
    if chosen.offer is not None:
        workers[candidates[chosen.offer].offer.name] = view.spec.max_workers
    return MachinesChosen(workers=workers, standing_offer=standing, reason=chosen.reason)


def _choose(
    view: View, goal: DeadlineState | None, candidates: Sequence[_Candidate], running: int | None
) -> OfferChoice:
    offers = [one.state for one in candidates]
    if not any(one.market is Market.ON_DEMAND for one in offers):
        return offer_choice.choose_spot_offer(offers, running)
    if goal is not None:
        indexes = {one.offer.name: n for n, one in enumerate(candidates)}
        before = view.market.choice or MachinesChosen(workers={})
        return offer_choice.choose_offer(
            goal,
            offers,
            running,
            chosen=next((indexes[name] for name in before.workers if name in indexes), None),
            standing=indexes.get(before.standing_offer),
        )
    chosen = offer_choice.choose_without_waiting(offers, running, changeover_s=changeover_s(view))
    if view.spec.cost.deadline_ms is None:
        return chosen
    unknown = "the remaining training time is unknown"
    return OfferChoice(chosen.offer, f"{chosen.reason}; {unknown}")


def _unless_reversed(
    view: View,
    state: LeaderState,
    goal: DeadlineState | None,
    candidates: Sequence[_Candidate],
    waiting: OfferChoice,
    now: float,
) -> OfferChoice:
    """`waiting`, or the present choice if the next decision would return to it.

    Spot machines that train count again once no on-demand ones are chosen. If these are cheaper
    than them, they would be chosen again, and so on without end.
    """
    choice = view.market.choice
    if choice is None or not choice.workers:
        return waiting
    without = replace_struct(choice, workers={})
    after = replace_struct(view, market=replace_struct(view.market, choice=without))
    again = _choose(after, goal, candidates, _running_offer(after, state, candidates, now))
    is_reversed = again.offer is not None and candidates[again.offer].offer.name in choice.workers
    return again if is_reversed else waiting


def _standing_offer(
    view: View,
    state: LeaderState,
    goal: DeadlineState | None,
    candidates: Sequence[_Candidate],
    running: int | None,
    *,
    chosen: OfferChoice,
) -> str:
    """The refused spot offer that the run would move to; '' if there is none."""
    # One set of spot machines at a time, unless others train.
    starts_spot = chosen.offer is not None and candidates[chosen.offer].state.market is Market.SPOT
    if view.market.round is None and starts_spot:
        return ""
    wanted = [
        one.offer.name
        for one in candidates
        if one.state.market is Market.SPOT
        and one.state.refused_s is not None
        and _is_chosen_if_granted(view, state, goal, candidates, running, one)
    ]
    # A request that waits is kept; otherwise the offers are requested in turn.
    return min(
        wanted,
        key=lambda name: (
            not _tokens_of(view, name),
            offer_request_due_s(view, name),
        ),
        default="",
    )


def _is_chosen_if_granted(
    view: View,
    state: LeaderState,
    goal: DeadlineState | None,
    candidates: Sequence[_Candidate],
    running: int | None,
    wanted: _Candidate,
) -> bool:
    """Whether the run would move to the refused offer `wanted` once its machines are granted.

    They are then paid from the budget, too, which may not suffice for machines of others any more:
    the next decision would be made without these, and could release the machines again.
    """
    is_requested = bool(_tokens_of(view, wanted.offer.name))
    rented = () if is_requested else (wanted.offer,)
    after = [
        _Candidate(one.offer, replace(one.state, refused_s=None)) if one is wanted else one
        for one in candidates
        if one is wanted
        or _tokens_of(view, one.offer.name)
        or cost_budget.affords(view, state, one.offer, *rented)
    ]
    names = [one.offer.name for one in after]
    runs = None if running is None else candidates[running].offer.name
    index = names.index(runs) if runs in names else None
    chosen = _choose(view, goal, after, index).offer
    return chosen is not None and after[chosen].offer.name == wanted.offer.name
