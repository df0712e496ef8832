"""Cost of a job of fixed size with a deadline on recorded spot markets, for any choice of offers.

Time is divided into units; availability changes at ticks of several units. The machines are lost
together when their offer becomes unavailable, at once and without notice. Every start of machines
is paid for, and makes progress only after the changeover time. A choice is made at every tick, and
in every unit without machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotfit.model.offer import Market
from spotfit.policy.deadline import MEAN_SPOT_LIFETIME_S, DeadlineState
from spotfit.policy.offer_choice import OfferState, choose_offer, mean_lifetime_s


@dataclass(frozen=True, slots=True)
class MarketOffer:
    """One offer over time; on-demand offers are always available."""

    market: Market
    usd_per_hour: float
    available: Sequence[bool] = ()
    """By tick; false afterwards."""

    def is_available(self, tick: int) -> bool:
        """Whether machines run, or would be granted, during the tick."""
        if self.market is Market.ON_DEMAND:
            return True
        return tick < len(self.available) and self.available[tick]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """A job and its market. Durations are integers in units of `unit_s` seconds."""

    unit_s: float
    tick: int
    boot: int
    """From the request of machines to their first progress."""
    work: int
    """Training time of the whole job."""
    deadline: int
    offers: tuple[MarketOffer, ...]
    repeated: int = 0
    """Work that a loss repeats, at most."""
    starts_beside: bool = True
    """Whether machines may be replaced by others that start while they work."""

    @property
    def changeover(self) -> int:
        """Longest time without progress after a loss."""
        return self.boot + self.repeated


@dataclass(slots=True)
class JobState:
    """What a policy may see."""

    job: DeadlineJob
    work_left: int
    now: int = 0
    running: int | None = None
    """Index of the offer whose machines run or start."""
    boot_left: int = 0
    """Until those machines make progress."""
    trained: int = 0
    """Work of those machines."""
    beside: int | None = None
    """Index of the offer whose machines start beside those."""
    beside_boot_left: int = 0
    refused_since: list[int | None] = field(default_factory=list)
    """By offer: since when it is not available; None if it is."""
    running_units: list[int] = field(default_factory=list)
    """By offer: how long its machines have run."""
    losses: list[int] = field(default_factory=list)
    """By offer."""
    usd: float = 0.0

    @property
    def running_market(self) -> Market | None:
        """The market of the machines that run or start."""
        return None if self.running is None else self.job.offers[self.running].market


JobPolicy = Callable[[JobState], int | None]
"""Returns the index of the offer to have machines from, or None to wait."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a simulated job."""

    usd: float
    finished_at: float
    """In units."""
    is_late: bool
    is_finished: bool = True


def run_job(job: DeadlineJob, policy: JobPolicy, *, limit: int | None = None) -> JobResult:
    """Simulate the job until its work is done, also after the deadline, but not after `limit`."""
    count = len(job.offers)
    state = JobState(
        job,
        job.work,
        refused_since=[None] * count,
        running_units=[0] * count,
        losses=[0] * count,
    )
    while state.work_left > 0 and (limit is None or state.now <= limit):
        _apply_availability(state)
        _start_machines(state, policy(state))
        _advance(state)
    is_late = state.now > job.deadline
    return JobResult(state.usd, state.now, is_late, is_finished=state.work_left == 0)


def production_policy(state: JobState) -> int | None:
    """Return the choice of `policy.offer_choice` with the lifetimes that the job observed."""
    return choose_offer(deadline_state(state), offer_states(state), state.running).offer


def offer_states(state: JobState) -> list[OfferState]:
    """Return what the job knows about its offers, in the terms of the production policy."""
    job, unit_s = state.job, state.job.unit_s
    spot = [n for n, offer in enumerate(job.offers) if offer.market is Market.SPOT]
    total_s, losses = sum(state.running_units[n] for n in spot) * unit_s, sum(state.losses)
    return [
        OfferState(
            market=offer.market,
            usd_per_hour=offer.usd_per_hour,
            refused_s=None if since is None else (state.now - since) * unit_s,
            mean_lifetime_s=math.inf
            if offer.market is Market.ON_DEMAND
            else mean_lifetime_s(
                state.running_units[n] * unit_s,
                state.losses[n],
                total_running_s=total_s,
                total_losses=losses,
                prior_s=MEAN_SPOT_LIFETIME_S,
            ),
        )
        for n, (offer, since) in enumerate(zip(job.offers, state.refused_since, strict=True))
    ]


def deadline_state(state: JobState) -> DeadlineState:
    """Return how far the job is from its deadline, in the terms of the production policy."""
    job = state.job
    boot_left = state.boot_left if state.running is not None else 0
    return DeadlineState(
        time_left_s=(job.deadline - state.now) * job.unit_s,
        work_left_s=(state.work_left + boot_left) * job.unit_s,
        changeover_s=job.changeover * job.unit_s,
        look_s=job.unit_s,
    )


def _apply_availability(state: JobState) -> None:
    tick = state.now // state.job.tick
    for n, offer in enumerate(state.job.offers):
        if offer.is_available(tick):
            state.refused_since[n] = None
            continue
        if state.refused_since[n] is None:
            state.refused_since[n] = state.now
        if n in (state.running, state.beside):
            state.losses[n] += 1
        if state.beside == n:
            state.beside = None
        if state.running == n:
            state.work_left += min(state.trained, state.job.repeated)
            state.running, state.trained = None, 0
    if state.running is None and state.beside is not None:
        state.running, state.boot_left = state.beside, state.beside_boot_left
        state.beside = None


def _start_machines(state: JobState, choice: int | None) -> None:
    if choice is None or choice == state.running:
        state.running, state.beside = choice, None
        return
    if state.refused_since[choice] is not None:
        raise ValueError(f"offer {choice} is not available")
    if state.running is None or not state.job.starts_beside:
        state.running, state.boot_left, state.trained = choice, state.job.boot, 0
    elif state.beside != choice:
        state.beside, state.beside_boot_left = choice, state.job.boot


def _advance(state: JobState) -> None:
    """Advance to the next tick, or by one unit without machines."""
    if state.running is None:
        state.now += 1
        return
    end = (state.now // state.job.tick + 1) * state.job.tick
    while state.now < end and state.work_left > 0:
        length = min(end - state.now, state.boot_left + state.work_left)
        if state.beside is not None:
            length = min(length, state.beside_boot_left)
        _train(state, length)
        if state.beside is not None and state.beside_boot_left == 0:
            state.running, state.boot_left = state.beside, 0
            state.beside, state.trained = None, 0


def _train(state: JobState, length: int) -> None:
    trained = max(0, length - state.boot_left)
    state.work_left -= trained
    state.trained += trained
    state.boot_left = max(0, state.boot_left - length)
    state.now += length
    for n in (state.running, state.beside):
        if n is not None:
            state.running_units[n] += length
            hours = length * state.job.unit_s / 3600
            state.usd += state.job.offers[n].usd_per_hour * hours
    state.beside_boot_left -= length
