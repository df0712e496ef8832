"""Which offers an elastic run has its machines from, and how many workers on each. Pure.

One spot offer is used at a time, beside the cheapest on-demand one of its network: in a round all
machines are connected. While machines run, spot offers of other networks are not considered.
Numbers are those of workers.

    run                                   | policy
    --------------------------------------|---------------------------------------------------------
    deadline, remaining time known        | `elastic_deadline.choose_group_sizes`
    deadline, remaining time unknown      | spot; on-demand for all others while spot is refused
    no deadline, fallback to on-demand    | spot; on-demand up to the minimum while spot is refused
    no fallback to on-demand              | all granted spot machines of the cheapest offer

    chosen                                | requested
    --------------------------------------|---------------------------------------------------------
    all workers on spot                   | what is missing; after refusals half of it, and so on
    some on spot, the others on demand    | the others; a whole group of spot machines (standing)
    none                                  | spot machines of one offer after the other (standing)

The number of spot workers beside on-demand ones only falls, until a whole group of spot machines is
granted: growing one by one would interrupt the training each time. Machines of a standing request
that a backend with a queue grants in part are used once they have waited for the others for as long
as a start takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from spotfit.core.ids import Token
from spotfit.core.units import format_count
from spotfit.model.events import MachinesChosen
from spotfit.model.group import NodeState, find_node_status
from spotfit.model.leader_state import LeaderState, MemberStatus, Training
from spotfit.model.offer import Market, Offer
from spotfit.model.view import View
from spotfit.policy.capacity import nodes_of_offer
from spotfit.policy.deadline import DeadlineState, pays_to_return
from spotfit.policy.elastic_deadline import ElasticState, GroupSizes, choose_group_sizes
from spotfit.policy.idle_machines import MAX_REPEATED_SHARE
from spotfit.policy.offer_choice import OfferState, cheap_offers, choose_spot_offer
from spotfit.policy.request_backoff import offer_request_due_s
from spotfit.policy.training_time import changeover_s, repeated_work_s, restart_s, start_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOffer:
    """An offer with its machines, in worker slots."""

    name: str
    state: OfferState
    network: str
    """As in `Offer.network`."""
    started: int
    """Of machines that run or boot."""
    requested: int
    """As `started`, and of those whose request is not refused."""
    in_group: int
    """Of machines that work, or have waited for longer than a start takes; between rounds, of all
    whose agents are connected."""
    training: int
    """Of machines whose workers train."""
    limited_s: float | None
    """How long a part of what was requested has been refused; None if nothing was."""
    is_requested: bool = False
    """Whether machines of it are requested, or run."""
    request_due_s: float = 0.0
    """When it may be requested again; only compared with that of other offers."""
    is_paused: bool = False
    """Whether it has granted too few machines for a move, see `incomplete_moves`."""

    @property
    def is_spot(self) -> bool:
        """Whether its machines may be lost to the market."""
        return self.state.market is Market.SPOT


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGroup:
    """The group of an elastic run, and what it has measured. Times are in seconds."""

    max_workers: int
    min_workers: int
    """Fewer workers train nothing; at least 1."""
    has_deadline: bool
    has_spot: bool
    """Whether the backend has spot machines at all."""
    workers: Mapping[str, int]
    """The last choice: the number of workers by the name of the offer."""
    standing_offer: str = ""
    """The standing request of the last choice; '' for none."""
    round_offers: frozenset[str] | None = None
    """The offers of the machines in the open round; None if no round is open."""
    changeover_s: float
    """From a loss to new progress on other machines."""
    detection_s: float
    """From a loss to its detection, at most."""
    restart_s: float
    """From the end of a round to the first step of the next one, with the wait for machines that
    start."""
    repeated_s: float
    """Training that a loss repeats, at most."""


def observe_group(view: View, *, is_move_ended: bool = False) -> ElasticGroup:
    """Return the group as the journal has it.

    With `is_move_ended` as if the machines that train were chosen: the run does not leave them.
    """
    spec, market = view.spec, view.market
    opened, choice, requests = market.round, market.choice, market.requests
    workers = {} if choice is None else choice.workers
    if is_move_ended:
        workers = _round_workers(view) | workers
    return ElasticGroup(
        max_workers=spec.max_workers,
        min_workers=max(1, spec.min_workers),
        has_deadline=spec.cost.deadline_ms is not None,
        has_spot=any(one.market is Market.SPOT for one in spec.cost.offers),
        workers=workers,
        standing_offer="" if choice is None else choice.standing_offer,
        round_offers=None
        if opened is None
        else frozenset(requests[token].offer for token in opened.tokens if token in requests),
        changeover_s=changeover_s(view),
        detection_s=spec.timing.lease_timeout_s,
        restart_s=restart_s(view) + spec.timing.round_fill_timeout_s,
        repeated_s=repeated_work_s(view),
    )


def _round_workers(view: View) -> dict[str, int]:
    """The number of workers of the open round by the name of the offer."""
    workers: Counter[str] = Counter()
    for one in view.round.assignments if view.round else ():
        if one.token in view.market.requests:
            workers[view.market.requests[one.token].offer] += one.num_workers
    return dict(workers)


def observe_offer(
    view: View,
    state: LeaderState,
    now: float,
    *,
    offer: Offer,
    offer_state: OfferState,
    waiting: AbstractSet[Token],
    is_paused: bool = False,
) -> ElasticOffer:
    """Return the offer with its machines; `waiting` are the groups that count as refused.

    With `is_paused` the offer counts as refused, and is not requested.
    """
    name = offer.name
    started, requested, in_group, training = 0, 0, 0, 0
    leaving = _leaving_nodes(view, state)
    for token, node in nodes_of_offer(view, state, name):
        if (token, node) in leaving:
            continue
        slots = view.groups[token].plan.slots_per_node
        has_started = _has_started(view, state, token, node)
        started += slots * has_started
        requested += slots * (has_started or token not in waiting)
        in_group += slots * _is_in_group(view, state, now, token, node)
        training += slots * _trains(view, state, token, node)
    return ElasticOffer(
        name=name,
        state=replace(offer_state, refused_s=0.0) if is_paused else offer_state,
        network=offer.network,
        started=started,
        requested=requested,
        in_group=in_group,
        training=training,
        limited_s=_limited_s(view, state, name, waiting),
        is_requested=any(one.offer == name for one in view.market.requests.values()),
        request_due_s=offer_request_due_s(view, name),
        is_paused=is_paused,
    )


def is_in_network(view: View, state: LeaderState, offer: Offer) -> bool:
    """Whether machines of the offer can be in a round with those that run; True without any.

    On-demand machines of other networks always count: the whole group may move to them.
    """
    # Also machines that boot: they are reported to run one group after the other, and the network
    # must not change in between.
    networks = {
        view.network_of(token)
        for token in view.market.requests
        if any(_has_started(view, state, token, one) for one in view.groups[token].active_nodes)
    } - {""}
    network = view.network if view.network in networks else min(networks, default="")
    return offer.market is Market.ON_DEMAND or not network or offer.network in ("", network)


def is_waiting_for_agents(view: View, state: LeaderState, now: float) -> bool:
    """Whether agents may still connect to the leader, or be recorded as lost: those of the last
    round, and those with a preemption notice, whose machines a new leader does not know.

    Their machines may run or not: a choice would be changed back as soon as that is known.
    """
    assignments = view.last_round.assignments if view.last_round else ()
    missing = [
        one
        for one in assignments
        if one.agent not in state.members
        and one.agent not in view.lost_agents
        and one.token in view.groups
        and view.groups[one.token].is_node_active(one.node)
    ]
    known = state.members.keys() | view.lost_agents | set(state.last_agent_by_node.values())
    since = max([state.phase.since, state.leading_since, *state.disconnected_since.values()])
    is_recent = now - since <= view.spec.timing.rejoin_timeout_s
    is_expected = bool(missing) or not view.notices.keys() <= known
    return is_expected and is_recent and not state.is_headless


def _leaving_nodes(view: View, state: LeaderState) -> set[tuple[Token, int]]:
    """Machines whose agents have disconnected after a preemption notice."""
    assignments = view.last_round.assignments if view.last_round else ()
    agents = {(one.token, one.node): one.agent for one in assignments} | dict(
        state.last_agent_by_node
    )
    connected = {(one.member.token, one.member.node) for one in state.members.values()}
    return {node for node, agent in agents.items() if agent in view.notices} - connected


def _limited_s(
    view: View, state: LeaderState, name: str, waiting: AbstractSet[Token]
) -> float | None:
    record, requests = view.market.record_of(name), view.market.requests
    since_s = [
        requests[token].planned_s
        for token, _ in nodes_of_offer(view, state, name)
        if token in waiting and not _has_started_all(view, state, token)
    ]
    if record.refused_since_s is not None:
        since_s.append(record.refused_since_s)
    return max((state.elapsed_s - one for one in since_s), default=None)


def _has_started_all(view: View, state: LeaderState, token: Token) -> bool:
    return all(_has_started(view, state, token, n) for n in view.groups[token].active_nodes)


def _has_started(view: View, state: LeaderState, token: Token, node: int) -> bool:
    status = find_node_status(state.group_statuses, token, node)
    is_running = status is not None and status.state is NodeState.RUNNING
    usage = view.usage.groups.get(token)
    is_billed = usage is not None and usage.machines[node].started_ms is not None
    has_agent = _member_on(state, token, node) is not None
    # Also one whose agent has just disconnected, until the machine is recorded as lost.
    return is_running or is_billed or (token, node) in state.last_agent_by_node or has_agent


def _is_in_group(view: View, state: LeaderState, now: float, token: Token, node: int) -> bool:
    member = _member_on(state, token, node)
    if view.round is None:
        return member is not None
    if any((one.token, one.node) == (token, node) for one in view.round.assignments):
        return True
    return member is not None and now - member.joined_at > start_time_s(view)


def _member_on(state: LeaderState, token: Token, node: int) -> MemberStatus | None:
    """The connected agent on that machine."""
    members = state.members.values()
    on_node = (one for one in members if (one.member.token, one.member.node) == (token, node))
    return next(on_node, None)


def _trains(view: View, state: LeaderState, token: Token, node: int) -> bool:
    phase = state.phase
    if not isinstance(phase, Training) or view.round_startup_s is None:
        return False
    return any((one.token, one.node) == (token, node) for one in phase.round.assignments)


# --- The choice -----------------------------------------------------------------------------------


def choose_group(
    group: ElasticGroup, goal: DeadlineState | None, offers: Sequence[ElasticOffer]
) -> MachinesChosen:
    """Return how many workers the run is to have on each of `offers`, and the standing request.

    `goal` is how far the run is from its deadline; None without one, or if that is unknown.
    """
    cheap = _cheap_spot(offers)
    spot = _spot_offer(group, offers, cheap)
    on_demand = _on_demand_offer(group, offers, beside=spot)
    beside = sum(group.workers.get(one.name, 0) for one in offers if not one.is_spot)
    if on_demand is None:
        return _all_on_spot(group, spot, cheap, "all machines that are granted, on spot only")
    chosen = 0 if spot is None else group.workers.get(spot.name, 0)
    if goal is None:
        return _without_goal(group, spot, cheap, on_demand=on_demand, beside=beside)
    elastic = _elastic_state(group, goal, spot, cheap, chosen=chosen, beside=beside)
    sizes = choose_group_sizes(elastic)
    if not cheap:
        sizes = GroupSizes(0, group.max_workers, "spot machines are not cheaper")
    if sizes.on_demand and spot is not None and not _are_connected(spot, on_demand):
        sizes = GroupSizes(0, group.max_workers, f"{sizes.reason}; in another network")
    if sizes.on_demand == 0:
        return _all_on_spot(group, spot, cheap, sizes.reason)
    workers = {} if spot is None or sizes.spot == 0 else {spot.name: sizes.spot}
    workers = {**workers, on_demand.name: sizes.on_demand}
    is_wanted = _is_return_wanted(elastic, cheap, on_demand) and not _is_moving(group, workers)
    wanted = cheap if is_wanted else []
    return MachinesChosen(
        workers=workers,
        standing_offer=_standing_offer(wanted),
        reason=sizes.reason,
    )


def _all_on_spot(
    group: ElasticGroup,
    spot: ElasticOffer | None,
    cheap: Sequence[ElasticOffer],
    reason: str,
) -> MachinesChosen:
    """All workers on one spot offer, as far as it grants machines; none while all are refused."""
    if spot is not None:
        return MachinesChosen(workers={spot.name: group.max_workers}, reason=reason)
    return MachinesChosen(
        workers={},
        standing_offer=_standing_offer(cheap),
        reason=f"{reason}; spot machines are refused",
    )


def _without_goal(
    group: ElasticGroup,
    spot: ElasticOffer | None,
    cheap: Sequence[ElasticOffer],
    *,
    on_demand: ElasticOffer,
    beside: int,
) -> MachinesChosen:
    """Without waiting longer than a start takes, on as few on-demand machines as that permits."""
    if not (group.has_spot or group.has_deadline):
        return MachinesChosen(
            workers={on_demand.name: group.max_workers}, reason="there are no spot machines"
        )
    # A deadline that may be missed is no reason to train with few machines.
    needed = group.max_workers if group.has_deadline else group.min_workers
    missing = _missing_without_goal(group, spot, cheap, needed=needed, beside=beside)
    if missing and spot is not None and not _are_connected(spot, on_demand):
        spot, missing = None, needed
    unknown = "; the remaining training time is unknown" if group.has_deadline else ""
    if missing == 0:
        return _all_on_spot(group, spot, cheap, f"spot machines{unknown}")
    workers = {on_demand.name: missing}
    if spot is not None and missing < group.max_workers:
        workers = {spot.name: group.max_workers - missing, **workers}
    few = format_count(missing, "worker")
    return MachinesChosen(
        workers=workers,
        standing_offer=_standing_offer(cheap),
        reason=f"spot machines are refused, for {few} of at least {needed}{unknown}",
    )


def _missing_without_goal(
    group: ElasticGroup,
    spot: ElasticOffer | None,
    cheap: Sequence[ElasticOffer],
    *,
    needed: int,
    beside: int,
) -> int:
    """How many workers need on-demand machines."""
    if beside:
        return max(0, needed - (0 if spot is None else min(spot.started, spot.in_group)))
    if not cheap:
        return needed
    if spot is not None and (spot.limited_s is None or spot.requested >= needed):
        return 0
    among = cheap if spot is None else [spot]
    refused_s = min(one.limited_s or 0.0 for one in among)
    # Waiting costs less than a start of on-demand machines until then.
    if group.round_offers is None and refused_s < group.changeover_s:
        return 0
    return needed - (0 if spot is None else spot.started)


def _elastic_state(
    group: ElasticGroup,
    goal: DeadlineState,
    spot: ElasticOffer | None,
    cheap: Sequence[ElasticOffer],
    *,
    chosen: int,
    beside: int,
) -> ElasticState:
    """The input of the policy. `chosen` workers are on spot now, and `beside` on demand."""
    size = group.max_workers
    used, available = _spot_workers(spot, size, chosen=chosen, beside=beside)
    lifetimes_s = [one.state.mean_lifetime_s for one in (cheap if spot is None else [spot])]
    return ElasticState(
        time_left_s=goal.time_left_s,
        work_left_s=goal.work_left_s,
        changeover_s=goal.changeover_s,
        look_s=goal.look_s,
        max_machines=size,
        min_machines=group.min_workers,
        spot_machines=used,
        spot_available=available,
        spot_training=0 if spot is None else spot.training,
        on_demand_machines=beside,
        is_return_requested=bool(beside and group.standing_offer),
        loss_pause_s=group.detection_s + group.restart_s + group.repeated_s,
        growth_pause_s=group.restart_s + MAX_REPEATED_SHARE * group.repeated_s,
        losses_per_hour=3600 / min(lifetimes_s, default=math.inf),
    )


def _spot_workers(
    spot: ElasticOffer | None, size: int, *, chosen: int, beside: int
) -> tuple[int, int]:
    """How many workers spot machines that run or start are for, and how many they could be for.

    Beside on-demand machines, spot ones count as long as they are chosen, so that the next decision
    has the same facts. Without them, machines that are not refused are expected to be granted.
    """
    if spot is None:
        return 0, 0
    if beside:
        used = min(size, spot.requested, max(chosen, spot.in_group))
        return used, size if spot.started >= size else used
    used = min(size, spot.requested)
    return used, size if spot.limited_s is None else used


# --- Offers ---------------------------------------------------------------------------------------


def _are_connected(one: ElasticOffer, other: ElasticOffer) -> bool:
    """Whether machines of both offers can be in one round."""
    return "" in (one.network, other.network) or one.network == other.network


def _on_demand_offer(
    group: ElasticGroup, offers: Sequence[ElasticOffer], *, beside: ElasticOffer | None
) -> ElasticOffer | None:
    """The on-demand offer that is chosen already, unless it is refused, else the cheapest one.

    Of the network of the spot machines `beside` it, if that has one.
    """
    return min(
        (one for one in offers if not one.is_spot),
        key=lambda one: (
            beside is not None and not _are_connected(one, beside),
            one.state.refused_s is not None,
            one.name not in group.workers,
            one.state.usd_per_hour,
        ),
        default=None,
    )


def _cheap_spot(offers: Sequence[ElasticOffer]) -> list[ElasticOffer]:
    """Those that are waited for: all without on-demand machines, else those that cost less."""
    on_demand = [one.state.usd_per_hour for one in offers if not one.is_spot]
    if not on_demand:
        return [one for one in offers if one.is_spot]
    states = [one.state for one in offers]
    return [offers[n] for n in cheap_offers(states, min(on_demand))]


def _spot_offer(
    group: ElasticGroup, offers: Sequence[ElasticOffer], cheap: Sequence[ElasticOffer]
) -> ElasticOffer | None:
    """The spot offer to have machines from; None if all are refused.

    The one that is chosen, or whose machines run, unless its machines are too few to train, or
    they train and another one costs a fifth less: that one may not be granted.
    """
    chosen = group.workers
    granted = [one for one in cheap if one.state.refused_s is None]
    enough = [one for one in granted if not _is_too_small(group, one)]
    among = enough or granted
    current = max(
        among,
        key=lambda one: (one.name in chosen and one.requested > 0, one.started, one.name in chosen),
        default=None,
    )
    if current is not None and current.name not in chosen and not current.started:
        current = None
    if current is not None and current.started and not current.training:
        return current
    running = None if current is None else list(offers).index(current)
    states = [one.state for one in offers]
    indexes = [n for n, one in enumerate(offers) if one in among]
    best = choose_spot_offer(states, running, among=indexes).offer
    return None if best is None else offers[best]


def _is_too_small(group: ElasticGroup, offer: ElasticOffer) -> bool:
    """Whether it has machines, but grants no more, and too few for a round."""
    return offer.limited_s is not None and 0 < offer.requested < group.min_workers


def _is_return_wanted(
    elastic: ElasticState, cheap: Sequence[ElasticOffer], on_demand: ElasticOffer
) -> bool:
    """Whether a whole group of spot machines would replace the on-demand ones."""
    lowest = min((one.state.usd_per_hour for one in cheap), default=0.0)
    ratio = on_demand.state.usd_per_hour / lowest if lowest > 0 else math.inf
    return elastic.may_return and pays_to_return(elastic.changeover_s, ratio)


def _is_moving(group: ElasticGroup, workers: Mapping[str, int]) -> bool:
    """Whether machines of `workers` start beside ones of other offers that train: a standing
    request would be a second set of machines beside these."""
    return bool((group.round_offers or frozenset()) - workers.keys())


def _standing_offer(wanted: Sequence[ElasticOffer]) -> str:
    """The offer of the standing request; '' if none is wanted.

    A request that waits is kept; otherwise the offers are requested in turn, the cheapest first.
    """
    first = min(
        (one for one in wanted if not one.is_paused),
        key=lambda one: (not one.is_requested, one.request_due_s, one.state.usd_per_hour),
        default=None,
    )
    return "" if first is None else first.name
