"""`Usage`: the machine-hours of a run and their cost, folded from its journal; and the bill of it.

A machine is billed in one or more attempts: a backend may restart it. Of each attempt the journal
has bounds of the start and of the end (`MachineTimes`). Its certain time is from the latest start
to the earliest end, its maximum time from the earliest start to the latest end.

    state of an attempt  | event                                          | next
    ---------------------|------------------------------------------------|------------------
    unknown              | `started_ms` is recorded                       | running
    unknown              | `is_unbilled` is recorded                      | -
    running              | `ended_ms`, or the start of another attempt    | added to the totals
    running, unknown     | its group is released                          | ending
    ending               | `ended_ms` is recorded                         | added to the totals
    ending               | `RELEASE_LIMIT_S` after the release            | added to the totals

Only groups with machines that may still be billed are kept; of all others the totals by offer.

A machine whose start is not recorded counts as not billed until its group is released: the leader
records every start within an observation interval. Machines of a request that was recorded as
refused, and that the backend granted nevertheless, are unknown to every process; they exit by
themselves and are not in the record.

Waste is counted in certain time, by the times of entries:

- Boot: from the start until the training function of the machine's first round has started.
- Repeated: from the last commit of a round, or its start, until the round ended, for all of its
  machines; 0 if its state was replicated or the next round started from memory, or if a commit of
  it follows. The commit is later than the snapshot, so that this is a lower bound.
- Idle: after the first round, all time outside of a round whose training function has started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.bill import Bill, OfferBill
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEntry,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    PricesChanged,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.group import GroupHandle
from spotfit.model.offer import Market, Offer
from spotfit.model.spec import RunSpec

# Backends end machines within seconds to two minutes: containers get 30 s to exit, VMs 90 s
# (https://cloud.google.com/compute/docs/shutdownscript#limitations).
RELEASE_LIMIT_S = 120.0
"""The longest time that a machine is billed after its release, if no process observes its end."""

_RELEASE_LIMIT_MS = round(RELEASE_LIMIT_S * 1000)

ATTEMPT_TOLERANCE_MS = 1000
"""A reported start that is later than the recorded one by less is of the same attempt."""

# More price changes than these between two proofs that a machine runs are combined to bounds.
_MAX_PRICE_STEPS = 64

_HOUR_MS = 3_600_000
_LATEST_MS = 2**62

Node = tuple[Token, int]


class PriceStep(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one offer from `from_ms` until the next step, in USD per hour; None if unknown."""

    from_ms: int
    usd: float | None
    max_usd: float | None
    """Unlike `usd` only after several steps were combined."""
    on_demand_usd: float | None


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Times in machine-milliseconds and their cost; None if a price is unknown.

    `max_usd` needs the highest price only.
    """

    ms: int = 0
    max_ms: int = 0
    usd: float | None = 0.0
    max_usd: float | None = 0.0
    on_demand_usd: float | None = 0.0

    def plus(self, other: Amounts) -> Amounts:
        """Return the sums."""
        return Amounts(
            ms=self.ms + other.ms,
            max_ms=self.max_ms + other.max_ms,
            usd=_sum(self.usd, other.usd),
            max_usd=_sum(self.max_usd, other.max_usd),
            on_demand_usd=_sum(self.on_demand_usd, other.on_demand_usd),
        )


class MachineUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One machine of a group, in its latest attempt. Times are milliseconds since 1970."""

    started_ms: tuple[int, int] | None = None
    """None if no attempt is known to be running."""
    ended_ms: tuple[int, int] | None = None
    """The end of the last attempt that is in the totals."""
    last_started_ms: int = 0
    """The latest start of that attempt."""
    was_restarted: bool = False
    """Whether another attempt may run by now, of which the start is not recorded."""
    may_be_restarted: bool = False
    """`MachineTimes.may_be_restarted` of the attempt."""
    agent: AgentId | None = None
    """The last agent of it that took part in a round or a validation."""
    attempt: int = 0
    """Number of the last recorded attempt; 0 if the backend does not report it."""
    is_unbilled: bool = False
    is_lost: bool = False
    """Whether its loss was recorded with or after the end of that attempt: it is not expected to be
    restarted any more."""
    waiting_ms: int = 0
    """The next attempt had not started by then."""
    proven_ms: int = 0
    """The journal shows that the attempt was running then."""
    worked_from_ms: int | None = None
    """When the training function of its first round started, or its first validation; for feeders,
    when they were requested."""
    idle_since_ms: int | None = None
    idle_ms: int = 0
    """Idle time before `idle_since_ms`."""
    paid: Amounts | None = None
    """Cost until `paid_until_ms`; the prices before are not kept."""
    paid_until_ms: int = 0


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A group with machines that are, or may be, billed."""

    planned_ms: int
    provisioner: str
    offer: str = ""
    """The name of the offer; '' if it is unknown."""
    max_usd_per_hour: float | None = None
    """The highest price of a machine of feeders, used if that of the offer is unknown; None if it
    is unknown, too, and for other machines."""
    handle: GroupHandle | None = None
    fit_count: int = 0
    """Number of the fit that requested it."""
    released_ms: int | None = None
    machines: tuple[MachineUse, ...]
    """By node."""

    @property
    def release_limit_ms(self) -> int | None:
        """Until when its machines are billed at most; None before its release."""
        return None if self.released_ms is None else self.released_ms + _RELEASE_LIMIT_MS

    @property
    def billable_nodes(self) -> list[int]:
        """The nodes whose last attempt may not have ended."""
        return [
            node
            for node, use in enumerate(self.machines)
            if use.started_ms or not (use.ended_ms or use.is_unbilled)
        ]


class RoundUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The open round."""

    number: int
    nodes: tuple[Node, ...]
    proven_ms: int
    """All of its machines were running then."""
    started_ms: int | None = None
    """When its training function started."""
    saved_ms: int = 0
    """The last commit of it."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The machine-hours of a run in all its fits.

    Its size is limited by the number of running machines and of offers.
    """

    groups: dict[Token, GroupUsage] = {}
    totals: dict[str, Amounts] = {}
    """Attempts that have ended, by the name of their offer."""
    offers: dict[str, Offer] = {}
    """All offers by name, with their present prices."""
    prices: dict[str, tuple[PriceStep, ...]] = {}
    feeder_usd_per_hour: float | None = None
    """`FeederSpec.usd_per_hour` of the last fit."""
    timed_provisioners: tuple[str, ...] = ()
    """Backends that have reported the time of a start."""
    fit_count: int = 0
    is_over: bool = False
    """Whether the last fit has ended."""
    round: RoundUsage | None = None
    validator: Node | None = None
    boot_ms: int = 0
    """Of attempts that have ended."""
    idle_ms: int = 0
    repeated_ms: int = 0
    unsaved_ms: int = 0
    """Work of the last round, which is repeated unless the next round starts from memory."""
    unsaved_round: int = 0
    proof_margin_ms: int = 0

    @property
    def ending_groups(self) -> dict[Token, GroupUsage]:
        """The released groups of which the end of a machine is not recorded yet."""
        return {token: one for token, one in self.groups.items() if one.released_ms is not None}


_UNKNOWN_FEEDER_OFFER = "#feeders"
"""The offer in the bill of feeders of known highest price whose backend does not name one. Apart
from machines of unknown price, which have none: their sum would be unknown."""

_NO_PRICE = (PriceStep(from_ms=0, usd=None, max_usd=None, on_demand_usd=None),)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


# --- Effects of journal entries -------------------------------------------------------------------


def fold_usage(usage: Usage, entry: JournalEntry) -> Usage:
    """Return the usage after one more entry. Pure; never raises for unknown groups."""
    at_ms, event = entry.written_at_ms, entry.event
    match event:
        case FitStarted(spec=spec):
            return _start_fit(usage, spec, at_ms)
        case PricesChanged(offers=offers):
            return _with_offers(usage, offers, at_ms)
        case GroupPlanned() | GroupSubmitted() | GroupRefused():
            return _request_group(_without_expired(usage, at_ms), event, at_ms)
        case MachinesObserved(times=times):
            return _without_settled(_with_times(usage, times))
        case NodeLost():
            return _lose_node(usage, event, at_ms)
        case GroupsReleased(token=token, other_tokens=others, times=times):
            released = _with_times(usage, times)
            for one in (token, *others):
                group = released.groups.get(one)
                if group is not None and group.released_ms is None:
                    released = _with_group(released, one, replace(group, released_ms=at_ms))
            return _without_expired(_without_settled(released), at_ms)
        case RoundOpened() | TrainingFunctionStarted() | RoundClosed() | CheckpointCommitted():
            return _apply_round_event(usage, event, at_ms)
        case ValidationStarted(token=token, node=node, agent=agent):
            usage = _with_agents(usage, {(token, node): agent}, at_ms)
            return replace(_work(usage, [(token, node)], at_ms), validator=(token, node))
        case ValidationEnded() if usage.validator is not None:
            validator = usage.validator
            still_works = usage.round is not None and validator in usage.round.nodes
            return replace(_idle(usage, [] if still_works else [validator], at_ms), validator=None)
        case TrainingEnded(fit_end=fit_end):
            return _end_round(usage, at_ms, is_saved=fit_end.outcome == "finished")
        case FitEnded(outcome=outcome):
            ended = _end_round(usage, at_ms, is_saved=outcome == "finished")
            return replace(_repeat_unsaved(ended), is_over=True, validator=None)
        case _:
            return usage


def _start_fit(usage: Usage, spec: RunSpec, at_ms: int) -> Usage:
    # A leader may write an entry before it notices that an agent is silent, or after it was frozen
    # itself for less than its lease.
    margin_s = spec.timing.heartbeat_timeout_s + spec.timing.lease_timeout_s
    started = replace(
        usage,
        fit_count=usage.fit_count + 1,
        is_over=False,
        proof_margin_ms=round(margin_s * 1000),
        feeder_usd_per_hour=spec.feeders.usd_per_hour if spec.feeders is not None else None,
    )
    offers = (*spec.cost.offers, *(spec.feeders.offers if spec.feeders is not None else ()))
    return _with_offers(_without_expired(started, at_ms), offers, at_ms)


def _request_group(
    usage: Usage, event: GroupPlanned | GroupSubmitted | GroupRefused, at_ms: int
) -> Usage:
    match event:
        case GroupPlanned(plan=plan, request=request):
            offer = request.offer
            if offer is not None and offer.name not in usage.offers:
                usage = _with_offers(usage, (offer,), at_ms)
            # No entry shows when feeders begin to work: all of their time counts as work.
            is_feeder = request.role == "feed"
            use = MachineUse(worked_from_ms=at_ms if is_feeder else None)
            group = GroupUsage(
                planned_ms=at_ms,
                provisioner=plan.provisioner,
                machines=(use,) * plan.num_nodes,
                offer=offer.name if offer is not None else "",
                max_usd_per_hour=usage.feeder_usd_per_hour if is_feeder else None,
                fit_count=usage.fit_count,
            )
            return _with_group(usage, plan.token, group)
        case GroupSubmitted(token=token, handle=handle) if token in usage.groups:
            group = usage.groups[token]
            name = handle.offer or group.offer or _only_offer(usage, group.provisioner)
            if not name and group.max_usd_per_hour is not None:
                name = _UNKNOWN_FEEDER_OFFER
            return _with_group(usage, token, replace(group, handle=handle, offer=name))
        case GroupRefused(token=token) if token in usage.groups:
            # Nothing was granted; or, for a group of an earlier fit, its backend has no record of
            # it any more.
            group = usage.groups[token]
            for node, use in enumerate(group.machines):
                if use.started_ms is not None:
                    usage = _end_attempt(usage, token, node, (0, at_ms))
            return _without_groups(usage, [token])
        case _:
            return usage


def _only_offer(usage: Usage, provisioner: str) -> str:
    names = [one.name for one in usage.offers.values() if one.provisioner == provisioner]
    return names[0] if len(names) == 1 else ""


def _lose_node(usage: Usage, event: NodeLost, at_ms: int) -> Usage:
    token, node, times = event.token, event.node, event.times
    group = usage.groups.get(token)
    if group is None or node >= len(group.machines):
        return usage
    if event.machine_returned and (times is None or times.ended_ms is None):
        use = group.machines[node]
        if use.started_ms is not None and is_exact(use.started_ms):
            # The backend reports the start of the next attempt, or has reported it before.
            opened = usage.round if usage.round and (token, node) in usage.round.nodes else None
            proven_ms = _proven_ms(use, opened)
            returned = replace(use, proven_ms=proven_ms, was_restarted=True)
            usage = _with_use(usage, token, node, returned)
        elif use.started_ms is not None:
            usage = _end_attempt(usage, token, node, (0, at_ms))
    if times is not None:
        usage = _with_times(usage, {token: (times,)})
    use = usage.groups[token].machines[node]
    if event.machine_returned or use.started_ms is not None or use.ended_ms is None:
        return usage
    return _with_use(usage, token, node, replace(use, is_lost=True))


def is_timed(usage: Usage, group: GroupUsage) -> bool:
    """Whether the backend of the group reports from when on it bills a machine. Pure."""
    return group.provisioner in usage.timed_provisioners


def _with_group(usage: Usage, token: Token, group: GroupUsage) -> Usage:
    return replace(usage, groups={**usage.groups, token: group})


def _without_groups(usage: Usage, tokens: Iterable[Token]) -> Usage:
    removed = set(tokens)
    if not removed:
        return usage
    return replace(
        usage, groups={token: one for token, one in usage.groups.items() if token not in removed}
    )


def _with_use(usage: Usage, token: Token, node: int, use: MachineUse) -> Usage:
    return _with_uses(usage, {(token, node): use})


def _without_settled(usage: Usage) -> Usage:
    return _without_groups(
        usage, [token for token, one in usage.ending_groups.items() if not one.billable_nodes]
    )


def _without_expired(usage: Usage, at_ms: int) -> Usage:
    """The usage, in which the ends of groups are settled that were released long ago."""
    expired = {
        token: limit_ms
        for token, one in usage.ending_groups.items()
        if (limit_ms := one.release_limit_ms) is not None and limit_ms <= at_ms
    }
    for token, limit_ms in expired.items():
        for node in usage.groups[token].billable_nodes:
            usage = _end_attempt(usage, token, node, (0, limit_ms))
    return _without_groups(usage, expired)


# --- Starts and ends ------------------------------------------------------------------------------


def _with_times(usage: Usage, times: Mapping[Token, Iterable[MachineTimes]]) -> Usage:
    for token, times_of_group in times.items():
        for one in times_of_group:
            if token in usage.groups and 0 <= one.node < len(usage.groups[token].machines):
                usage = _with_machine_times(usage, token, one)
    return usage


def _with_machine_times(usage: Usage, token: Token, times: MachineTimes) -> Usage:
    node, started_ms, ended_ms = times.node, times.started_ms, times.ended_ms
    use = usage.groups[token].machines[node]
    if times.waiting_ms is not None:
        waiting_ms = max(use.waiting_ms, times.waiting_ms)
        usage = _with_use(usage, token, node, replace(use, waiting_ms=waiting_ms))
    if times.is_unbilled and use.started_ms is None:
        return _with_use(usage, token, node, replace(use, is_unbilled=True))
    # Equal times are the exact start and end of one attempt.
    if started_ms and ended_ms and ended_ms != started_ms and ended_ms[1] <= started_ms[0]:
        usage, ended_ms = _end_attempt(usage, token, node, ended_ms), None
    if times.unseen_until_ms is not None:
        usage = _count_unseen(usage, token, node, times.unseen_until_ms)
    if started_ms is not None:
        usage = _start_attempt(usage, token, node, started_ms)
        use = usage.groups[token].machines[node]
        attempt = use.attempt if times.attempt is None else times.attempt
        use = replace(use, attempt=attempt, may_be_restarted=times.may_be_restarted)
        usage = _with_use(usage, token, node, use)
    if ended_ms is not None:
        usage = _end_attempt(usage, token, node, ended_ms)
    return usage


def _count_unseen(usage: Usage, token: Token, node: int, until_ms: int) -> Usage:
    """Count the time until `until_ms` in which a machine without an attempt may have had some."""
    group = usage.groups[token]
    use = group.machines[node]
    since_ms = max(_earliest_start(group, use))
    if use.started_ms is not None or until_ms <= since_ms:
        return usage
    unseen = _amounts(
        usage, group, MachineUse(started_ms=(since_ms, until_ms)), (until_ms, until_ms)
    )
    total = usage.totals.get(group.offer, Amounts())
    usage = replace(usage, totals={**usage.totals, group.offer: total.plus(unseen)})
    return _with_use(usage, token, node, replace(use, waiting_ms=until_ms))


def is_exact(bounds: tuple[int, int]) -> bool:
    """Whether a time is known exactly, because the provider has reported it."""
    return bounds[0] == bounds[1]


def is_later_attempt(use: MachineUse, started_ms: tuple[int, int]) -> bool:
    """Whether an attempt with that start is later than all recorded ones of the machine. Pure.

    `started_ms` are the bounds of the start, in ms since 1970.
    """
    if use.started_ms is not None:
        return is_exact(started_ms) and started_ms[0] > use.started_ms[1] + ATTEMPT_TOLERANCE_MS
    if use.ended_ms is None:
        return True
    # The bounds of an end may include the start of the next attempt.
    if is_exact(started_ms):
        return is_other_start(started_ms[0], use.last_started_ms, use.ended_ms)
    return started_ms[1] > use.ended_ms[1]


def is_other_start(start_ms: int, last_ms: int, ended_ms: tuple[int, int] | None) -> bool:
    """Whether a reported start is that of an attempt after the one that started at `last_ms`. Pure.

    `ended_ms` are the bounds of the end of that one, None if it is not known.
    """
    is_after_end = ended_ms is not None and is_exact(ended_ms) and start_ms >= ended_ms[1]
    return start_ms > last_ms + ATTEMPT_TOLERANCE_MS or (is_after_end and start_ms > last_ms)


def _start_attempt(usage: Usage, token: Token, node: int, started_ms: tuple[int, int]) -> Usage:
    group = usage.groups[token]
    use = group.machines[node]
    if not is_later_attempt(use, started_ms):
        # A time that was bounded before may be reported later.
        if use.started_ms is None or is_exact(use.started_ms) or not is_exact(started_ms):
            return usage
        return _with_use(_timed(usage, group), token, node, replace(use, started_ms=started_ms))
    if use.started_ms is not None:
        usage = _end_attempt(usage, token, node, (0, started_ms[0]))
        use = usage.groups[token].machines[node]
    if is_exact(started_ms):
        usage = _timed(usage, group)
    else:
        earliest = max(started_ms[0], *_earliest_start(group, use))
        started_ms = (min(earliest, started_ms[1] - 1), started_ms[1])
    # Its agent may have worked before its machine was observed to run.
    started = replace(
        use, started_ms=started_ms, is_unbilled=False, is_lost=False, was_restarted=False
    )
    return _with_use(usage, token, node, started)


def _earliest_start(group: GroupUsage, use: MachineUse) -> tuple[int, int, int]:
    # The time until the latest end is counted with the attempt before.
    return group.planned_ms, use.waiting_ms, use.ended_ms[1] if use.ended_ms else 0


def _timed(usage: Usage, group: GroupUsage) -> Usage:
    if is_timed(usage, group):
        return usage
    return replace(usage, timed_provisioners=(*usage.timed_provisioners, group.provisioner))


def _end_attempt(usage: Usage, token: Token, node: int, ended_ms: tuple[int, int]) -> Usage:
    """Add an attempt to the totals; one of unknown start may have run since it was last waiting."""
    group = usage.groups[token]
    use = group.machines[node]
    if use.started_ms is None:
        if use.ended_ms is not None or use.is_unbilled:
            return usage
        earliest = max(_earliest_start(group, use))
        use = replace(use, started_ms=(min(earliest, ended_ms[1]), ended_ms[1]))
    opened = usage.round if usage.round and (token, node) in usage.round.nodes else None
    ended_ms = _end_bounds(ended_ms, _proven_ms(use, opened))
    total = usage.totals.get(group.offer, Amounts())
    boot_ms, idle_ms = _wasted_ms(use, ended_ms[0])
    usage = replace(
        usage,
        totals={**usage.totals, group.offer: total.plus(_amounts(usage, group, use, ended_ms))},
        boot_ms=usage.boot_ms + boot_ms,
        idle_ms=usage.idle_ms + idle_ms,
    )
    assert use.started_ms is not None
    ended = MachineUse(ended_ms=ended_ms, last_started_ms=use.started_ms[1], attempt=use.attempt)
    return _with_use(usage, token, node, ended)


def _end_bounds(ended_ms: tuple[int, int], proven_ms: int) -> tuple[int, int]:
    """The bounds of the end of an attempt that was running at `proven_ms`."""
    if is_exact(ended_ms):
        return ended_ms
    return min(max(ended_ms[0], proven_ms), ended_ms[1]), ended_ms[1]


def _proven_ms(use: MachineUse, opened: RoundUsage | None) -> int:
    """When the attempt was running; `opened` is the round if the machine takes part in it."""
    # Later rounds of a restarted machine may show that the next attempt runs.
    proven_ms = opened.proven_ms if opened is not None and not use.was_restarted else 0
    return max(use.proven_ms, proven_ms, use.started_ms[1] if use.started_ms else 0)


def _round_by_node(usage: Usage) -> dict[Node, RoundUsage]:
    return dict.fromkeys(usage.round.nodes, usage.round) if usage.round is not None else {}


def _wasted_ms(use: MachineUse, end_ms: int) -> tuple[int, int]:
    """The boot and idle time of an attempt that runs until `end_ms` at least."""
    start_ms = use.started_ms[1] if use.started_ms else end_ms
    boot_end_ms = end_ms if use.worked_from_ms is None else min(use.worked_from_ms, end_ms)
    return max(0, boot_end_ms - start_ms), use.idle_ms + _idle_ms(use, end_ms)


def _idle_ms(use: MachineUse, until_ms: int) -> int:
    """The idle time since the machine has worked.

    The recorded start may be of a later attempt than the one that has worked.
    """
    if use.idle_since_ms is None:
        return 0
    start_ms = use.started_ms[1] if use.started_ms else 0
    return max(0, until_ms - max(use.idle_since_ms, start_ms))


# --- Rounds ---------------------------------------------------------------------------------------


def _apply_round_event(
    usage: Usage,
    event: RoundOpened | TrainingFunctionStarted | RoundClosed | CheckpointCommitted,
    at_ms: int,
) -> Usage:
    proven_ms = at_ms - usage.proof_margin_ms
    match event:
        case RoundOpened(round=opened):
            # Work that is still in the memory of a machine is not repeated.
            if opened.memory_snapshot is not None:
                usage = replace(usage, unsaved_ms=0)
            agents = {(one.token, one.node): one.agent for one in opened.assignments}
            round_usage = RoundUsage(number=opened.number, nodes=(*agents,), proven_ms=proven_ms)
            usage = _with_agents(_without_expired(usage, at_ms), agents, at_ms)
            return replace(_repeat_unsaved(usage), round=round_usage)
        case TrainingFunctionStarted() if usage.round is not None:
            return _start_training(usage, usage.round, at_ms)
        case CheckpointCommitted(round=number, round_age_s=float()) if (
            usage.round is not None and usage.round.number == number
        ):
            usage = _start_training(usage, usage.round, at_ms)
            assert usage.round is not None
            return replace(usage, round=replace(usage.round, saved_ms=at_ms))
        case CheckpointCommitted(round=number) if number == usage.unsaved_round:
            return replace(usage, unsaved_ms=0)
        case RoundClosed(state_replicated=state_replicated):
            return _end_round(usage, at_ms, is_saved=state_replicated)
        case _:
            return usage


def _with_agents(usage: Usage, agents: Mapping[Node, AgentId], at_ms: int) -> Usage:
    """The usage, in which a machine that may have been restarted is in the attempt of its agent.

    Only from now on that attempt is known to run. The time until now is part of the maximum.
    """
    for (token, node), use in [*_running(usage, agents)]:
        agent, started_ms = agents[token, node], use.started_ms
        if started_ms is not None:
            if not use.may_be_restarted or use.agent == agent:
                continue
            # Equal bounds would be a time that the backend has reported.
            started_ms = (started_ms[0], at_ms + 1)
            if use.agent is not None:
                usage = _end_attempt(usage, token, node, (0, at_ms))
                use = replace(usage.groups[token].machines[node], may_be_restarted=True)
                started_ms = (at_ms, at_ms + 1)
        usage = _with_use(usage, token, node, replace(use, agent=agent, started_ms=started_ms))
    return usage


def _start_training(usage: Usage, opened: RoundUsage, at_ms: int) -> Usage:
    """Record the start of the training function, if it is not, and that all machines run."""
    if opened.started_ms is None:
        usage = _work(usage, opened.nodes, at_ms)
        opened = replace(opened, started_ms=at_ms)
    proven_ms = max(opened.proven_ms, at_ms - usage.proof_margin_ms)
    return replace(usage, round=replace(opened, proven_ms=proven_ms))


def _end_round(usage: Usage, at_ms: int, *, is_saved: bool) -> Usage:
    ended = usage.round
    if ended is None:
        return usage
    proven = {
        node: replace(use, proven_ms=_proven_ms(use, ended))
        for node, use in _running(usage, ended.nodes)
    }
    usage = _with_uses(usage, proven)
    unsaved_ms = 0
    if ended.started_ms is not None:
        # Without one of its machines a round trains nothing, until a leader has noticed the loss.
        ends_ms = _end_times_ms(usage, ended.nodes)
        stopped_ms = min([at_ms, *(one for one in ends_ms if one >= ended.started_ms)])
        usage = _idle(usage, ended.nodes, stopped_ms)
        unsaved_ms = max(0, stopped_ms - max(ended.started_ms, ended.saved_ms)) * len(ended.nodes)
    return replace(
        usage, round=None, unsaved_ms=0 if is_saved else unsaved_ms, unsaved_round=ended.number
    )


def _end_times_ms(usage: Usage, nodes: Iterable[Node]) -> Iterator[int]:
    """The latest possible ends of the machines that have ended, or of their last attempts."""
    for _, use in _running(usage, nodes):
        if use.ended_ms is not None:
            yield use.ended_ms[1]


def _repeat_unsaved(usage: Usage) -> Usage:
    return replace(usage, repeated_ms=usage.repeated_ms + usage.unsaved_ms, unsaved_ms=0)


def _running(usage: Usage, nodes: Iterable[Node]) -> Iterator[tuple[Node, MachineUse]]:
    """Yield the machines of groups that are not settled.

    Also those whose start is not recorded yet: an agent may join before its machine is observed.
    """
    for token, node in nodes:
        if token in usage.groups and node < len(usage.groups[token].machines):
            yield (token, node), usage.groups[token].machines[node]


def _with_uses(usage: Usage, uses: Mapping[Node, MachineUse]) -> Usage:
    changed = {token: [*usage.groups[token].machines] for token, _ in uses}
    for (token, node), use in uses.items():
        changed[token][node] = use
    groups = {
        token: replace(usage.groups[token], machines=tuple(machines))
        for token, machines in changed.items()
    }
    return replace(usage, groups={**usage.groups, **groups})


def _work(usage: Usage, nodes: Iterable[Node], at_ms: int) -> Usage:
    """The machines train, or validate, from now on."""
    uses: dict[Node, MachineUse] = {}
    for node, use in _running(usage, nodes):
        worked_from_ms = at_ms if use.worked_from_ms is None else use.worked_from_ms
        uses[node] = replace(
            use,
            worked_from_ms=worked_from_ms,
            idle_since_ms=None,
            idle_ms=use.idle_ms + _idle_ms(use, at_ms),
        )
    return _with_uses(usage, uses)


def _idle(usage: Usage, nodes: Iterable[Node], at_ms: int) -> Usage:
    """The machines neither train nor validate from now on."""
    return _with_uses(
        usage,
        {
            node: replace(use, idle_since_ms=at_ms)
            for node, use in _running(usage, nodes)
            if use.worked_from_ms is not None and use.idle_since_ms is None
        },
    )


# --- Prices ---------------------------------------------------------------------------------------


def _with_offers(usage: Usage, offers: Iterable[Offer], at_ms: int) -> Usage:
    known = {**usage.offers, **{one.name: one for one in offers}}
    if known == usage.offers:
        return usage
    usage = _paid_as_proven(usage)
    on_demand = _on_demand_prices(known.values())
    prices = dict(usage.prices)
    for name, offer in known.items():
        steps = prices.get(name, ())
        usd = offer.price.usd_per_hour if offer.price is not None else None
        on_demand_usd = on_demand.get(_place_of(offer))
        if steps and (steps[-1].usd, steps[-1].on_demand_usd) == (usd, on_demand_usd):
            continue
        # Not before the previous one: the clocks of two authors may differ a little. The first
        # price is used at all times before the second one, and its author may have a wrong clock:
        # a client has not measured the clock of the storage when it starts the fit.
        from_ms = max(at_ms, steps[-1].from_ms) if len(steps) > 1 else at_ms
        step = PriceStep(from_ms=from_ms, usd=usd, max_usd=usd, on_demand_usd=on_demand_usd)
        prices[name] = (*steps, step)
    return _without_old_prices(replace(usage, offers=known, prices=prices))


def _place_of(offer: Offer) -> tuple[str, str, str]:
    return offer.provisioner, offer.region, offer.machine_type


def _on_demand_prices(offers: Iterable[Offer]) -> dict[tuple[str, str, str], float]:
    """The cheapest on-demand price by backend, region and machine type."""
    prices: dict[tuple[str, str, str], float] = {}
    for offer in offers:
        if offer.market is Market.ON_DEMAND and offer.price is not None:
            place, usd = _place_of(offer), offer.price.usd_per_hour
            prices[place] = min(usd, prices.get(place, usd))
    return prices


def _paid_as_proven(usage: Usage) -> Usage:
    """The usage, in which attempts are paid until the time that they are known to have run."""
    uses: dict[Node, MachineUse] = {}
    rounds = _round_by_node(usage)
    for token, group in usage.groups.items():
        for node, use in enumerate(group.machines):
            until_ms = _proven_ms(use, rounds.get((token, node)))
            if use.started_ms is not None and until_ms > max(use.paid_until_ms, use.started_ms[1]):
                paid = _amounts(usage, group, use, (until_ms, until_ms))
                uses[token, node] = replace(use, paid=paid, paid_until_ms=until_ms)
    return _with_uses(usage, uses) if uses else usage


def _without_old_prices(usage: Usage) -> Usage:
    """The usage without prices that no attempt can have, and with few steps per offer."""
    oldest: dict[str, int] = {}
    for group in usage.groups.values():
        unpaid = [_unpaid_since_ms(group, group.machines[node]) for node in group.billable_nodes]
        # The offer of a pending group may not be known.
        for name in [group.offer] if group.offer else usage.offers:
            oldest[name] = min([*unpaid, oldest.get(name, _LATEST_MS)], default=_LATEST_MS)
    prices: dict[str, tuple[PriceStep, ...]] = {}
    for name, steps in usage.prices.items():
        first = len(steps) - 1
        while first > 0 and name in oldest and steps[first].from_ms > oldest[name]:
            first -= 1
        prices[name] = _combined(steps[first:])
    return replace(usage, prices=prices)


def _unpaid_since_ms(group: GroupUsage, use: MachineUse) -> int:
    if use.paid is not None:
        return use.paid_until_ms
    return use.started_ms[0] if use.started_ms else max(_earliest_start(group, use))


def _combined(steps: tuple[PriceStep, ...]) -> tuple[PriceStep, ...]:
    while len(steps) > _MAX_PRICE_STEPS:
        first, second = steps[:2]
        pairs = [
            (first.usd, second.usd),
            (first.max_usd, second.max_usd),
            (first.on_demand_usd, second.on_demand_usd),
        ]
        low, high, on_demand = (None if a is None or b is None else (a, b) for a, b in pairs)
        step = PriceStep(
            from_ms=first.from_ms,
            usd=min(low) if low else None,
            max_usd=max(high) if high else None,
            on_demand_usd=min(on_demand) if on_demand else None,
        )
        steps = (step, *steps[2:])
    return steps


def _amounts(
    usage: Usage, group: GroupUsage, use: MachineUse, ended_ms: tuple[int, int]
) -> Amounts:
    """The time and cost of an attempt with these bounds of its end."""
    assert use.started_ms is not None
    earliest, latest = use.started_ms
    ms = max(0, ended_ms[0] - latest)
    max_ms = max(ms, ended_ms[1] - earliest)
    steps = usage.prices.get(group.offer, _NO_PRICE)
    paid, until_ms = use.paid or Amounts(), use.paid_until_ms
    # An attempt may have ended before the time until which it was paid, in rare cases.
    share = min(1.0, ms / paid.ms) if paid.ms else 1.0
    max_share = min(1.0, max_ms / paid.max_ms) if paid.max_ms else 1.0
    since_ms, max_since_ms = max(latest, until_ms), max(earliest, until_ms)
    usd = _cost(steps, since_ms, ended_ms[0], "usd")
    max_ended_ms = max(ended_ms[1], max_since_ms)
    max_usd = _cost(steps, max_since_ms, max_ended_ms, "max_usd")
    if max_usd is None and group.max_usd_per_hour is not None:
        max_usd = group.max_usd_per_hour * (max_ended_ms - max_since_ms) / _HOUR_MS
    on_demand_usd = _cost(steps, since_ms, ended_ms[0], "on_demand_usd")
    return Amounts(
        ms=ms,
        max_ms=max_ms,
        usd=_sum(_scaled(paid.usd, share), usd),
        max_usd=_sum(_scaled(paid.max_usd, max_share), max_usd),
        on_demand_usd=_sum(_scaled(paid.on_demand_usd, share), on_demand_usd),
    )


def _scaled(usd: float | None, share: float) -> float | None:
    return None if usd is None else usd * share


def _cost(steps: tuple[PriceStep, ...], start_ms: int, end_ms: int, field: str) -> float | None:
    """The cost from `start_ms` to `end_ms` in USD; None if a price in it is unknown."""
    if all(getattr(step, field) is None for step in steps):
        return None
    total = 0.0
    for index, step in enumerate(steps):
        # Before the first known price, that price is used.
        from_ms = start_ms if index == 0 else max(start_ms, step.from_ms)
        to_ms = end_ms if index + 1 == len(steps) else min(end_ms, steps[index + 1].from_ms)
        if to_ms <= from_ms:
            continue
        price: float | None = getattr(step, field)
        if price is None:
            return None
        total += price * (to_ms - from_ms) / _HOUR_MS
    return total


# --- The bill -------------------------------------------------------------------------------------


class BilledRun(Protocol):
    """A view of a run, with the usage of its machines."""

    @property
    def usage(self) -> Usage: ...


def bill_of(view: BilledRun, now_ms: int) -> Bill:
    """Return the bill of a run in all its fits, at `now_ms` in milliseconds since 1970. Pure.

    `now_ms` is of the clock of the entries' authors; the journal of a running run should have been
    read to its end. Attempts that run are certain until the journal last proves it, and end at
    `now_ms` at most.
    """
    usage, rounds = view.usage, _round_by_node(view.usage)
    totals, boot_ms, idle_ms = dict(usage.totals), usage.boot_ms, usage.idle_ms
    is_final = usage.is_over
    for token, group in usage.groups.items():
        limit_ms = group.release_limit_ms
        is_final = is_final and limit_ms is not None and now_ms >= limit_ms
        for node in group.billable_nodes:
            use = group.machines[node]
            if use.started_ms is None:
                if limit_ms is None:
                    continue
                earliest = max(_earliest_start(group, use))
                use = replace(use, started_ms=(earliest, max(now_ms, earliest)))
            assert use.started_ms is not None
            latest_ms = max(now_ms, use.started_ms[1])
            if limit_ms is not None:
                latest_ms = min(latest_ms, limit_ms)
            proven_ms = _proven_ms(use, rounds.get((token, node)))
            ended_ms = _end_bounds((0, latest_ms), proven_ms)
            amounts = _amounts(usage, group, use, ended_ms)
            totals[group.offer] = totals.get(group.offer, Amounts()).plus(amounts)
            boot, idle = _wasted_ms(use, ended_ms[0])
            boot_ms, idle_ms = boot_ms + boot, idle_ms + idle
    return Bill(
        offers=tuple(_offer_bill(usage, name, one) for name, one in totals.items() if one.max_ms),
        boot_s=boot_ms / 1000,
        repeated_s=usage.repeated_ms / 1000,
        idle_s=idle_ms / 1000,
        is_final=is_final,
    )


def _offer_bill(usage: Usage, name: str, amounts: Amounts) -> OfferBill:
    offer = usage.offers.get(name)
    return OfferBill(
        offer=name,
        market=offer.market if offer is not None else Market.SPOT,
        machine_s=amounts.ms / 1000,
        max_machine_s=amounts.max_ms / 1000,
        usd=amounts.usd,
        max_usd=amounts.max_usd,
        on_demand_usd=amounts.on_demand_usd,
    )
