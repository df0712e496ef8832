"""The invariants of what a run rents and pays, as functions of the record of a simulation.

    find_missed_deadline    the deadline is kept if on-demand machines arrive in time
    find_exceeded_budget    the cost is never above the budget plus the stated margin
    find_unused_machines    at most one set of other machines beside those that train, and not long
    find_early_stops        machines are exchanged by starting the new ones first
    find_unstable_choice    the choice of machines is not changed back and forth
    find_alternations       a choice is not changed back before anything else was recorded

Each returns the first violation, or None; `find_cost_violation` checks all of them. `CostRecord`
has the exact times and prices of the cloud, which no process of the run knows. All times are
seconds of virtual time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as with_

from spotfit.core.ids import Token
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    GroupsReleased,
    JournalEntry,
    MachinesChosen,
    NodeLost,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
)
from spotfit.model.offer import Market
from spotfit.model.spec import CostSpec
from spotfit_localsim.virtual.engine import WALL_EPOCH_MS
from spotfit_localsim.virtual.sim_cloud import CloudRequest, MachineRecord

TimedEntry = tuple[float, JournalEntry]
"""When a journal entry was written, and the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBounds:
    """What the invariants permit."""

    arrival_s: float
    """Longest time from the request of on-demand machines until they are up."""
    changeover_s: float
    """Longest time from a loss to new progress on on-demand machines, with the repeated work."""
    set_size: int
    """Number of machines with which the run trains."""
    margin_usd: float = 0.0
    """By how much a budget may be exceeded."""
    unused_s: float = 600.0
    """Longest time that a machine waits for a round that includes it while another one trains."""
    settle_s: float = 60.0
    """Longest time until further machines beside those are released."""
    restart_s: float = 60.0
    """Longest time without training at a change of machines that no loss has caused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRound:
    """One round of the training."""

    number: int
    machines: frozenset[tuple[Token, int]]
    """Token and node index of its machines."""
    opened_at_s: float
    trains_from_s: float | None = None
    """When all ranks had started the training function; None if they have not."""
    closed_at_s: float | None = None
    cause: FailureCause | None = None

    @property
    def tokens(self) -> frozenset[Token]:
        """The groups of its machines."""
        return frozenset(token for token, _ in self.machines)

    def has(self, machine: MachineRecord) -> bool:
        """Whether the machine takes part in the round."""
        return (machine.token, machine.node) in self.machines


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRecord:
    """What a run has rented and done until `ended_at_s`."""

    cost: CostSpec = field(default_factory=CostSpec)
    is_elastic: bool = False
    """Whether a set of machines may be of a spot offer and an on-demand one together."""
    machines: tuple[MachineRecord, ...] = ()
    requests: tuple[CloudRequest, ...] = ()
    rounds: tuple[ObservedRound, ...] = ()
    released_at_s: tuple[tuple[Token, float], ...] = ()
    """When the run decided to release each group, or a machine of it."""
    chosen_at_s: tuple[float, ...] = ()
    """When the choice of machines was changed, in order."""
    replaced: frozenset[tuple[Token, int]] = frozenset()
    """Token and node index of the machines whose agents the run has stopped."""
    alternations_s: tuple[float, ...] = ()
    """When a choice of machines was changed back although nothing was recorded since the change."""
    finished_at_s: float | None = None
    """When the result of the finished training was recorded; None if it did not finish."""
    billed_usd: tuple[tuple[str, float], ...] = ()
    """Cost by offer."""
    ended_at_s: float = 0.0
    """The end of the simulation."""

    @property
    def total_usd(self) -> float:
        """The cost of all machines."""
        return sum(usd for _, usd in self.billed_usd)

    @property
    def deadline_s(self) -> float | None:
        """The deadline in virtual time; None without one."""
        deadline_ms = self.cost.deadline_ms
        return None if deadline_ms is None else (deadline_ms - WALL_EPOCH_MS) / 1000

    def is_lost(self, machine: MachineRecord) -> bool:
        """Whether the machine ended although the run had neither finished nor released it."""
        ended_s = machine.ended_at_s
        if ended_s is None or (self.finished_at_s is not None and ended_s >= self.finished_at_s):
            return False
        # A release is recorded after the machine has ended.
        if machine.reason == "released" or (machine.token, machine.node) in self.replaced:
            return False
        released = [at_s for token, at_s in self.released_at_s if token == machine.token]
        return not any(at_s <= ended_s for at_s in released)


def read_rounds(entries: Iterable[TimedEntry]) -> tuple[ObservedRound, ...]:
    """Return the rounds that the entries contain, in order."""
    rounds: dict[int, ObservedRound] = {}
    for at_s, entry in entries:
        match entry.event:
            case RoundOpened(round=opened):
                machines = frozenset((one.token, one.node) for one in opened.assignments)
                rounds[opened.number] = ObservedRound(
                    number=opened.number, machines=machines, opened_at_s=at_s
                )
            case TrainingFunctionStarted(round_number=number):
                rounds[number] = with_(rounds[number], trains_from_s=at_s)
            case RoundClosed(round_number=number, cause=cause):
                rounds[number] = with_(rounds[number], closed_at_s=at_s, cause=cause)
    return tuple(rounds.values())


def read_releases(entries: Iterable[TimedEntry]) -> tuple[tuple[Token, float], ...]:
    """Return the groups that the run decided to release, completely or in part, with the time."""
    releases: list[tuple[Token, float]] = []
    for at_s, entry in entries:
        match entry.event:
            case GroupsReleased(token=token, other_tokens=others):
                releases += ((one, at_s) for one in (token, *others))
            case NodeLost(token=token, is_unused=True):
                releases.append((token, at_s))
    return tuple(releases)


def read_replaced(entries: Iterable[TimedEntry]) -> frozenset[tuple[Token, int]]:
    """Return the machines that the run has replaced while their agents were connected."""
    events = (entry.event for _, entry in entries)
    return frozenset(
        (event.token, event.node)
        for event in events
        if isinstance(event, NodeLost) and event.agent is not None and event.cause is None
    )


def read_choices(entries: Iterable[TimedEntry]) -> tuple[float, ...]:
    """Return when the choice of machines was changed."""
    return tuple(at_s for at_s, entry in entries if isinstance(entry.event, MachinesChosen))


def read_alternations(entries: Iterable[TimedEntry]) -> tuple[float, ...]:
    """Return when a choice was replaced by the one before, with no other entry in between.

    Within a second: later, the leader may have observed what no entry contains.
    """
    found: list[float] = []
    choices: list[MachinesChosen] = []
    chosen_at_s = -math.inf  # when the entry before was a choice
    for at_s, entry in entries:
        event = entry.event
        if not isinstance(event, MachinesChosen):
            chosen_at_s = -math.inf
            continue
        if at_s - chosen_at_s <= 1.0 and choices[:-1] and _is_same_choice(event, choices[-2]):
            found.append(at_s)
        choices, chosen_at_s = [*choices[-1:], event], at_s
    return tuple(found)


def _is_same_choice(one: MachinesChosen, other: MachinesChosen) -> bool:
    return (one.workers, one.standing_offer) == (other.workers, other.standing_offer)


def read_finish(entries: Iterable[TimedEntry]) -> float | None:
    """Return when the training was recorded as finished; None if it was not."""
    for at_s, entry in entries:
        event = entry.event.fit_end if isinstance(entry.event, TrainingEnded) else entry.event
        if isinstance(event, FitEnded) and event.outcome == "finished":
            return at_s
    return None


def find_cost_violation(record: CostRecord, limits: CostBounds) -> str | None:
    """Return the first violation of any invariant."""
    found = (
        find_missed_deadline(record, limits),
        find_exceeded_budget(record, limits),
        find_unused_machines(record, limits),
        find_early_stops(record, limits),
        find_unstable_choice(record),
        find_alternations(record),
    )
    return next(filter(None, found), None)


# --- deadline -------------------------------------------------------------------------------------


def find_missed_deadline(record: CostRecord, limits: CostBounds) -> str | None:
    """A missed deadline although the conditions of the guarantee were met."""
    deadline_s = record.deadline_s
    if deadline_s is None or unmet_conditions(record, limits):
        return None
    if record.finished_at_s is None:
        is_over = record.ended_at_s > deadline_s
        return f"not finished at the deadline of {deadline_s:.0f} s" if is_over else None
    late_s = record.finished_at_s - deadline_s
    return f"finished {late_s:.0f} s after the deadline" if late_s > 0 else None


def unmet_conditions(record: CostRecord, limits: CostBounds) -> tuple[str, ...]:
    """Return why the deadline is not guaranteed; empty if it is.

    On-demand machines must not be refused or lost, and must be up `arrival_s` after their request.
    The deadline must leave the time of the training and of one changeover. With a budget it is not
    guaranteed.
    """
    return tuple(_unmet_conditions(record, limits))


def _unmet_conditions(record: CostRecord, limits: CostBounds) -> Iterator[str]:
    needed_s = (record.cost.training_time_s or 0.0) + limits.changeover_s
    if record.deadline_s is not None and record.deadline_s < needed_s:
        yield f"the training and a changeover take {needed_s:.0f} s"
    if not record.cost.uses_on_demand:
        yield "on-demand machines are not permitted"
    if record.cost.budget_usd is not None:
        yield "the budget limits what may be rented"
    for request in record.requests:
        if request.market is not Market.ON_DEMAND:
            continue
        if request.refusal:
            yield f"{request.token} was refused: {request.refusal}"
            continue
        # A machine that is released while it boots does not count as late.
        machines = [one for one in record.machines if one.token == request.token]
        late = [one for one in machines if _is_late(one, request.at_s + limits.arrival_s)]
        is_unbilled = len(machines) < request.num_nodes
        has_release = any(token == request.token for token, _ in record.released_at_s)
        if late or (is_unbilled and not has_release):
            yield f"machines of {request.token} were not up within {limits.arrival_s:.0f} s"
    for machine in record.machines:
        if machine.market is Market.ON_DEMAND and record.is_lost(machine):
            yield f"{machine.name} was lost: {machine.reason}"


def _is_late(machine: MachineRecord, latest_s: float) -> bool:
    if machine.up_at_s is not None:
        return machine.up_at_s > latest_s
    return machine.ended_at_s is None or machine.ended_at_s > latest_s


# --- budget ---------------------------------------------------------------------------------------


def find_exceeded_budget(record: CostRecord, limits: CostBounds) -> str | None:
    """A cost above the budget plus the margin that was stated to the user."""
    budget_usd = record.cost.budget_usd
    if budget_usd is None or record.total_usd <= budget_usd + limits.margin_usd:
        return None
    return f"${record.total_usd:.2f} were billed; the budget is ${budget_usd:.2f}"


# --- machines beside those that train -------------------------------------------------------------


def find_unused_machines(record: CostRecord, limits: CostBounds) -> str | None:
    """Machines that are paid for beside those of the open round without need.

    While a round trains there are at most `set_size` machines of one other offer, or of one per
    market for an elastic group, and as many further ones of its own; after `settle_s` the others
    must be released. No machine that is up waits longer than `unused_s` for a round that includes
    it.
    """
    unused = (_unused_machine(record, machine, limits.unused_s) for machine in record.machines)
    first = next(filter(None, unused), None)
    return first or _too_many_beside(record, limits)


def _unused_machine(record: CostRecord, machine: MachineRecord, unused_s: float) -> str | None:
    if machine.up_at_s is None:
        return None
    ended_s = record.ended_at_s if machine.ended_at_s is None else machine.ended_at_s
    since_s: float | None = None
    for one in record.rounds:
        begin_s, end_s = _training_span(record, one)
        begin_s, end_s = max(begin_s, machine.up_at_s), min(end_s, ended_s)
        if one.has(machine):
            since_s = None
        elif begin_s < end_s:
            since_s = begin_s if since_s is None else since_s
            if end_s - since_s > unused_s:
                return f"{machine.name} was unused for more than {unused_s:.0f} s"
    return None


def _training_span(record: CostRecord, one: ObservedRound) -> tuple[float, float]:
    """The start and the end of the training in the round, which are equal if there was none."""
    ends_s = (one.closed_at_s, record.finished_at_s, record.ended_at_s)
    end_s = min(end_s for end_s in ends_s if end_s is not None)
    return (end_s if one.trains_from_s is None else one.trains_from_s), end_s


def _too_many_beside(record: CostRecord, limits: CostBounds) -> str | None:
    for one in record.rounds:
        begin_s, end_s = _training_span(record, one)
        own = {machine.offer for machine in record.machines if one.has(machine)}
        others = [machine for machine in record.machines if not one.has(machine)]
        times = {begin_s, end_s}
        for machine in others:
            times |= {machine.billed_from_s, machine.ended_at_s or record.ended_at_s}
        since_s: float | None = None
        for at_s, until_s in itertools.pairwise(sorted(t for t in times if begin_s <= t <= end_s)):
            # Further machines of the same offers: replacements, or those that an elastic group
            # waits for.
            billed = [machine for machine in others if machine.is_billed_at(at_s)]
            sets = Counter("" if one.offer in own else one.offer for one in billed)
            offers = sorted(filter(None, sets))
            markets = {one.market for one in billed if one.offer not in own}
            is_mixed = record.is_elastic and len(offers) == len(markets)
            allowed = limits.set_size if is_mixed or len(offers) <= 1 else 0
            if sets[""] <= limits.set_size and sets.total() - sets[""] <= allowed:
                since_s = None
                continue
            since_s = at_s if since_s is None else since_s
            if until_s - since_s > limits.settle_s:
                names = ", ".join(offers) or "the same offer"
                return (
                    f"{sets.total()} machines of {names} beside round {one.number} for more than "
                    f"{limits.settle_s:.0f} s"
                )
    return None


# --- changes --------------------------------------------------------------------------------------


# Rounds are closed for other causes although no machine is lost: a network that is interrupted, a
# leader that is suspended, an error of the user's code.
_CAUSES_OF_CHANGES = (FailureCause.RESIZE, FailureCause.PREEMPTION)


def find_early_stops(record: CostRecord, limits: CostBounds) -> str | None:
    """A change of machines, without any loss, that stopped the training for too long.

    The next round must train `restart_s` after the last one was closed. A group of an open round
    must not be released while another round is to follow.
    """
    offers = {machine.token: machine.offer for machine in record.machines}
    for before, after in itertools.pairwise(record.rounds):
        closed_s = before.closed_at_s
        if closed_s is None or _has_loss(record, before):
            continue
        for token, at_s in record.released_at_s:
            if before.opened_at_s < at_s < closed_s and token in before.tokens:
                return f"{token} was released while round {before.number} trained with it"
        offers_before, offers_after = (
            {offers.get(token) for token in one.tokens} for one in (before, after)
        )
        is_change = offers_before != offers_after and before.cause in _CAUSES_OF_CHANGES
        trains_s = after.trains_from_s
        # A loss shortly before may not have been noticed yet.
        since_s = closed_s - limits.restart_s
        if not is_change or trains_s is None or _is_interrupted(record, since_s, trains_s):
            continue
        gap_s = trains_s - closed_s
        if gap_s > limits.restart_s:
            return f"no training for {gap_s:.0f} s before round {after.number}"
    return None


# Prices, refusals and losses change a choice a few times per minute.
_MAX_CHOICES, _CHOICES_S = 20, 60.0


def find_unstable_choice(record: CostRecord) -> str | None:
    """A choice that was changed again and again within a minute."""
    times_s = record.chosen_at_s
    for first_s, last_s in zip(times_s, times_s[_MAX_CHOICES:], strict=False):
        if last_s - first_s < _CHOICES_S:
            return f"the choice of machines was changed {_MAX_CHOICES} times after {first_s:.0f} s"
    return None


def find_alternations(record: CostRecord) -> str | None:
    """A choice that was changed back for no recorded reason."""
    first = next(iter(record.alternations_s), None)
    return None if first is None else f"the choice was changed back at {first:.0f} s for no reason"


def _is_interrupted(record: CostRecord, from_s: float, until_s: float) -> bool:
    """Whether a machine was lost, or received a notice, during a change."""
    return any(
        (machine.noticed_at_s is not None and from_s <= machine.noticed_at_s <= until_s)
        or (
            machine.ended_at_s is not None
            and from_s <= machine.ended_at_s <= until_s
            and record.is_lost(machine)
        )
        for machine in record.machines
    )


def _has_loss(record: CostRecord, one: ObservedRound) -> bool:
    """Whether a machine of the round was lost, or had a notice, before it was closed."""
    closed_s = one.closed_at_s
    assert closed_s is not None
    return any(
        (machine.noticed_at_s is not None and machine.noticed_at_s <= closed_s)
        or (
            record.is_lost(machine)
            and machine.ended_at_s is not None
            and machine.ended_at_s <= closed_s
        )
        for machine in record.machines
        if one.has(machine)
    )
