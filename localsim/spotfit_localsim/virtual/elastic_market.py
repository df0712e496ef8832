"""Cost of an elastic job on recorded spot markets, with the production choice of its machines.

Units and ticks are those of `deadline_market`. The number of spot machines that an offer has
changes at ticks. A request gets as many machines as there are, a standing request all or none. The
loss of machines that train interrupts the group for the loss pause; machines that join it interrupt
it for the growth pause. The speed is proportional to the number of workers. A choice is made at
every tick, whenever machines have started, and in every unit in which some workers do not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotfit.model.events import MachinesChosen
from spotfit.model.offer import Market
from spotfit.policy.deadline import MEAN_SPOT_LIFETIME_S, DeadlineState
from spotfit.policy.elastic_choice import ElasticGroup, ElasticOffer, choose_group
from spotfit.policy.offer_choice import OfferState, mean_lifetime_s
from spotfit_localsim.virtual.deadline_market import JobResult

_ROUNDING_ERROR = 1e-6
"""Of sums of durations, in units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOffer:
    """One offer over time; on-demand machines are always granted."""

    market: Market
    usd_per_hour: float
    """Of one machine."""
    capacity: Sequence[int] = ()
    """Spot machines by tick; none afterwards."""
    slots: int = 1
    """Workers per machine."""
    network: str = ""
    """Machines of different networks cannot train together; those of '' can with all."""

    def machines_for(self, workers: int) -> int:
        """Return how many machines that many workers need."""
        return -(-workers // self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """A job and its market. Durations are in units of `unit_s` seconds."""

    unit_s: float
    tick: int
    boot: float
    """From the request of a machine to its first progress."""
    loss_pause: float
    growth_pause: float
    work: float
    """Training time with `max_workers`."""
    deadline: float | None
    min_workers: int
    max_workers: int
    offers: tuple[CapacityOffer, ...]


@dataclass(slots=True, eq=False)
class _Machines:
    """The machines of one offer, and what was observed of it."""

    offer: CapacityOffer
    name: str
    ready: int = 0
    boot_ends: list[float] = field(default_factory=list)
    """When each of the others is ready."""
    limited_since: float | None = None
    """Since when the offer has too few machines for the whole group."""
    refused_since: float | None = None
    """Since when it has too few to train."""
    running_units: float = 0.0
    losses: int = 0

    @property
    def count(self) -> int:
        return self.ready + len(self.boot_ends)

    @property
    def ready_slots(self) -> int:
        return self.ready * self.offer.slots

    def stop(self, count: int) -> int:
        """Stop machines, those that boot first; return how many of them were ready."""
        booting = min(count, len(self.boot_ends))
        del self.boot_ends[len(self.boot_ends) - booting :]
        self.ready -= count - booting
        return count - booting

    def finish_boots(self, now: float) -> bool:
        booting = [end for end in self.boot_ends if end > now + _ROUNDING_ERROR]
        finished = len(self.boot_ends) - len(booting)
        self.boot_ends = booting
        self.ready += finished
        return finished > 0


@dataclass(slots=True)
class _ElasticRun:
    job: ElasticJob
    machines: tuple[_Machines, ...]
    work_left: float
    """In units of one worker."""
    now: float = 0.0
    network: str = ""
    """In which the group trains; '' before."""
    members: tuple[_Machines, ...] = ()
    """Those whose machines are in that network."""
    pause_until: float = 0.0
    choice: MachinesChosen = field(default_factory=lambda: MachinesChosen(workers={}))
    usd: float = 0.0

    @property
    def tick(self) -> int:
        return int(self.now / self.job.tick + _ROUNDING_ERROR)

    @property
    def workers(self) -> int:
        """Those that have a machine which is ready, in the network of the group."""
        return min(self.job.max_workers, sum(one.ready_slots for one in self.members))

    @property
    def can_train(self) -> bool:
        return self.workers >= self.job.min_workers

    @property
    def is_training(self) -> bool:
        return self.can_train and self.now >= self.pause_until

    def chosen(self, one: _Machines) -> int:
        """Workers that the offer is to have machines for, with the standing request."""
        if one.name == self.choice.standing_offer:
            return self.job.max_workers
        return self.choice.workers.get(one.name, 0)


ElasticPolicy = Callable[
    [ElasticGroup, DeadlineState | None, Sequence[ElasticOffer]], MachinesChosen
]


def run_elastic_job(
    job: ElasticJob, policy: ElasticPolicy = choose_group, *, limit: float | None = None
) -> JobResult:
    """Simulate the job until its work is done, also after the deadline, but not after `limit`.

    The names of the offers are their indexes.
    """
    machines = tuple(_Machines(offer, str(n)) for n, offer in enumerate(job.offers))
    run = _ElasticRun(job, machines, float(job.work * job.max_workers), members=machines)
    while run.work_left > _ROUNDING_ERROR and (limit is None or run.now <= limit):
        _lose_machines(run)
        _join(run)
        run.choice = policy(_group(run), _goal(run), _offers(run))
        _request(run)
        _release(run)
        _advance(run)
    is_late = job.deadline is not None and run.now > job.deadline + _ROUNDING_ERROR
    is_finished = run.work_left <= _ROUNDING_ERROR
    return JobResult(run.usd, run.now, is_late, is_finished=is_finished)


def _are_connected(one: str, other: str) -> bool:
    return "" in (one, other) or one == other


def _capacity(run: _ElasticRun, one: _Machines) -> float:
    if one.offer.market is Market.ON_DEMAND:
        return math.inf
    return one.offer.capacity[run.tick] if run.tick < len(one.offer.capacity) else 0


def _lose_machines(run: _ElasticRun) -> None:
    """Apply the capacity of the tick."""
    could_train = run.can_train
    for one in run.machines:
        capacity = _capacity(run, one)
        slots = capacity * one.offer.slots
        one.limited_since = _since(one.limited_since, run, is_true=slots < run.job.max_workers)
        one.refused_since = _since(one.refused_since, run, is_true=slots < run.job.min_workers)
        if one.count > capacity and one.stop(one.count - int(capacity)):
            one.losses += 1
            if could_train and one in run.members:
                run.pause_until = max(run.pause_until, run.now + run.job.loss_pause)


def _since(before: float | None, run: _ElasticRun, *, is_true: bool) -> float | None:
    if not is_true:
        return None
    return run.now if before is None else before


def _join(run: _ElasticRun) -> None:
    """Let machines that have started join the group; the choice may be in another network."""
    could_train = run.can_train
    started = [one.finish_boots(run.now) for one in run.machines]
    is_interrupted = any(
        has_started and one in run.members
        for has_started, one in zip(started, run.machines, strict=True)
    )
    if (moved := _network_of_choice(run)) != run.network:
        run.network, is_interrupted = moved, True
        run.members = tuple(one for one in run.machines if _are_connected(one.offer.network, moved))
    # A pause that is in progress is the restart for these, too.
    if is_interrupted and could_train and run.now >= run.pause_until:
        run.pause_until = run.now + run.job.growth_pause


def _network_of_choice(run: _ElasticRun) -> str:
    """The network to train in: another one once all workers that are chosen can train there."""
    chosen = [one for one in run.machines if one.name in run.choice.workers and one.ready]
    networks = {one.offer.network for one in chosen} - {"", run.network}
    if not run.network or not any(one.count for one in run.members if one.offer.network):
        return min(networks, default="")
    wanted = sum(run.choice.workers.values())
    for network in sorted(networks):
        there = [one for one in chosen if _are_connected(one.offer.network, network)]
        if sum(min(one.ready_slots, run.chosen(one)) for one in there) >= wanted:
            return network
    return run.network


# --- What the policy sees -------------------------------------------------------------------------


def _group(run: _ElasticRun) -> ElasticGroup:
    job, unit_s = run.job, run.job.unit_s
    training = frozenset(one.name for one in run.members if one.ready)
    return ElasticGroup(
        max_workers=job.max_workers,
        min_workers=job.min_workers,
        has_deadline=job.deadline is not None,
        has_spot=True,
        workers=run.choice.workers,
        standing_offer=run.choice.standing_offer,
        round_offers=training if run.can_train else None,
        changeover_s=job.boot * unit_s,
        detection_s=(job.loss_pause - job.growth_pause) * unit_s,
        restart_s=job.growth_pause * unit_s,
        repeated_s=0.0,
    )


def _goal(run: _ElasticRun) -> DeadlineState | None:
    job, unit_s = run.job, run.job.unit_s
    if job.deadline is None:
        return None
    pause = max(0.0, run.pause_until - run.now)
    return DeadlineState(
        time_left_s=(job.deadline - run.now) * unit_s,
        work_left_s=(run.work_left / job.max_workers + pause) * unit_s,
        changeover_s=job.boot * unit_s,
        look_s=unit_s,
    )


def _offers(run: _ElasticRun) -> list[ElasticOffer]:
    """Spot offers of other networks are not considered while machines run, as in a run."""
    is_training = run.is_training
    spot = [one for one in run.machines if one.offer.market is Market.SPOT]
    total_s = sum(one.running_units for one in spot) * run.job.unit_s
    losses = sum(one.losses for one in spot)
    considered = run.members if any(one.count for one in run.machines) else run.machines
    return [
        _observed(run, one, total_s, losses, is_training=is_training)
        for one in run.machines
        if one in considered or one.offer.market is Market.ON_DEMAND
    ]


def _observed(
    run: _ElasticRun,
    one: _Machines,
    total_running_s: float,
    total_losses: int,
    *,
    is_training: bool,
) -> ElasticOffer:
    unit_s, slots = run.job.unit_s, one.offer.slots
    is_spot = one.offer.market is Market.SPOT
    lifetime_s = mean_lifetime_s(
        one.running_units * unit_s,
        one.losses,
        total_running_s=total_running_s,
        total_losses=total_losses,
        prior_s=MEAN_SPOT_LIFETIME_S,
    )
    is_refused = one.refused_since is not None and not one.count
    state = OfferState(
        market=one.offer.market,
        usd_per_hour=one.offer.usd_per_hour * one.offer.machines_for(run.job.max_workers),
        refused_s=_elapsed_s(run, one.refused_since) if is_refused else None,
        mean_lifetime_s=lifetime_s if is_spot else math.inf,
        is_rented=one.count > 0,
    )
    in_group = one.ready_slots if one in run.members else 0
    return ElasticOffer(
        name=one.name,
        state=state,
        network=one.offer.network,
        started=one.count * slots,
        requested=one.count * slots,
        in_group=in_group,
        training=in_group if is_training else 0,
        limited_s=_elapsed_s(run, one.limited_since),
        is_requested=one.count > 0,
        # A run requests refused offers in turn, and so finds one that is not refused any more.
        request_due_s=0.0 if one.limited_since is None else 1.0,
    )


def _elapsed_s(run: _ElasticRun, since: float | None) -> float | None:
    return None if since is None else (run.now - since) * run.job.unit_s


# --- Machines and time ----------------------------------------------------------------------------


def _request(run: _ElasticRun) -> None:
    for one in run.machines:
        missing = one.offer.machines_for(run.chosen(one)) - one.count
        granted = min(missing, _capacity(run, one) - one.count)
        if one.name == run.choice.standing_offer and granted < missing:
            continue
        one.boot_ends += [run.now + run.job.boot] * max(0, int(granted))


def _release(run: _ElasticRun) -> None:
    """Machines that are not chosen work until those that are chosen suffice."""
    job = run.job
    needed = job.min_workers if job.deadline is None else job.max_workers
    suffice = {one.name: min(one.ready_slots, run.chosen(one)) for one in run.members}
    total, can_train = sum(suffice.values()), run.can_train
    for one in run.machines:
        excess = one.count - one.offer.machines_for(run.chosen(one))
        if excess <= 0:
            continue
        if can_train:
            # Machines of earlier choices that have not started are of no use.
            one.stop(min(excess, len(one.boot_ends)))
        kept = max(run.chosen(one), needed - total + suffice.get(one.name, 0))
        one.stop(max(0, one.count - one.offer.machines_for(kept)))


def _advance(run: _ElasticRun) -> None:
    """Advance to the next event, by one unit at most while some workers do not train."""
    job = run.job
    ends: list[float] = [(run.tick + 1) * job.tick]
    ends += [end for one in run.machines for end in one.boot_ends]
    if run.pause_until > run.now:
        ends.append(run.pause_until)
    if run.is_training:
        ends.append(run.now + run.work_left / run.workers)
    if run.workers < job.max_workers and (job.deadline is not None or not run.can_train):
        ends.append(run.now + 1)
    length, can_train = min(ends) - run.now, run.can_train
    if run.is_training:
        run.work_left -= length * run.workers
    for one in run.machines:
        run.usd += one.count * one.offer.usd_per_hour * length * job.unit_s / 3600
        if one.ready and can_train:
            one.running_units += length
    run.now = min(ends)
