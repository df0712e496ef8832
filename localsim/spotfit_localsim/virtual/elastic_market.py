"""Cost of an elastic job with a deadline on a recorded spot market.

Units and ticks are those of `deadline_market`. The number of spot machines that a zone has changes
at ticks. The loss of some machines interrupts the whole group for the loss pause; additional
machines interrupt it for the growth pause. The speed is proportional to the number of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotfit.policy.elastic_deadline import ElasticState, GroupSizes, choose_group_sizes

# Weight of the prior rate of losses, one in this time, in the observed rate.
_PRIOR_LOSS_INTERVAL_S = 3 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """A job and its market. Durations are integers in units of `unit_s` seconds."""

    unit_s: float
    tick: int
    boot: int
    """From the request of a machine to its first progress."""
    loss_pause: int
    growth_pause: int
    work: int
    """Units of training with `max_machines`."""
    deadline: int
    min_machines: int
    max_machines: int
    capacity: Sequence[int]
    """Spot machines that the zone has, by tick; none afterwards."""
    price_ratio: float
    """Price of an on-demand machine; that of a spot machine is 1 per hour."""


@dataclass(slots=True)
class _Machines:
    """Machines of one market."""

    ready: int = 0
    boot_ends: list[int] = field(default_factory=list)
    """When each of the others is ready."""

    @property
    def count(self) -> int:
        return self.ready + len(self.boot_ends)

    def start(self, count: int, ready_at: int) -> None:
        self.boot_ends += [ready_at] * count

    def stop(self, count: int) -> int:
        """Stop machines, those that boot first; return how many of them were ready."""
        booting = min(count, len(self.boot_ends))
        del self.boot_ends[len(self.boot_ends) - booting :]
        self.ready -= count - booting
        return count - booting

    def finish_boots(self, now: int) -> bool:
        finished = sum(end <= now for end in self.boot_ends)
        self.boot_ends = [end for end in self.boot_ends if end > now]
        self.ready += finished
        return finished > 0


@dataclass(slots=True)
class _ElasticRun:
    job: ElasticJob
    work_left: float
    """In units of one machine."""
    now: int = 0
    spot: _Machines = field(default_factory=_Machines)
    on_demand: _Machines = field(default_factory=_Machines)
    pause: int = 0
    losses: int = 0
    spot_units: int = 0
    cost: float = 0.0


ElasticPolicy = Callable[[ElasticState], GroupSizes]


@dataclass(frozen=True, slots=True)
class ElasticResult:
    """The end of a simulated elastic job."""

    cost: float
    """In hours of one spot machine."""
    is_late: bool


def run_elastic_job(job: ElasticJob, policy: ElasticPolicy = choose_group_sizes) -> ElasticResult:
    """Simulate the job until its work is done, also after the deadline."""
    run = _ElasticRun(job, float(job.work * job.max_machines))
    while run.work_left > 0:
        capacity = _lose_machines(run)
        started = [group.finish_boots(run.now) for group in (run.spot, run.on_demand)]
        if any(started) and not run.pause:
            run.pause = job.growth_pause
        _resize(run, policy(_state(run, capacity)))
        _train(run)
    hours = run.cost * job.unit_s / 3600
    return ElasticResult(hours, is_late=run.now > job.deadline)


def _lose_machines(run: _ElasticRun) -> int:
    """Apply the capacity of the tick and return it."""
    tick = run.now // run.job.tick
    capacity = run.job.capacity[tick] if tick < len(run.job.capacity) else 0
    if run.spot.count > capacity and run.spot.stop(run.spot.count - capacity):
        run.losses += 1
        run.pause = max(run.pause, run.job.loss_pause)
    return capacity


def _state(run: _ElasticRun, capacity: int) -> ElasticState:
    job, unit_s = run.job, run.job.unit_s
    observed_s = run.spot_units * unit_s + _PRIOR_LOSS_INTERVAL_S
    return ElasticState(
        time_left_s=(job.deadline - run.now) * unit_s,
        work_left_s=(run.work_left / job.max_machines + run.pause) * unit_s,
        max_machines=job.max_machines,
        min_machines=job.min_machines,
        spot_machines=run.spot.count,
        spot_available=min(capacity, job.max_machines),
        spot_training=run.spot.ready,
        on_demand_machines=run.on_demand.count,
        changeover_s=job.boot * unit_s,
        loss_pause_s=job.loss_pause * unit_s,
        growth_pause_s=job.growth_pause * unit_s,
        look_s=unit_s,
        losses_per_hour=(run.losses + 1) * 3600 / observed_s,
    )


def _resize(run: _ElasticRun, sizes: GroupSizes) -> None:
    ready_at = run.now + run.job.boot
    run.spot.start(max(0, sizes.spot - run.spot.count), ready_at)
    run.on_demand.start(max(0, sizes.on_demand - run.on_demand.count), ready_at)
    # Machines stay until those that replace them train.
    if run.on_demand.ready >= run.job.max_machines - sizes.spot:
        run.spot.stop(max(0, run.spot.count - sizes.spot))
    needed = max(sizes.on_demand, run.job.max_machines - run.spot.ready)
    run.on_demand.stop(max(0, run.on_demand.count - needed))


def _train(run: _ElasticRun) -> None:
    run.cost += run.spot.count + run.job.price_ratio * run.on_demand.count
    run.spot_units += run.spot.ready > 0
    working = min(run.job.max_machines, run.spot.ready + run.on_demand.ready)
    if run.pause:
        run.pause -= 1
    elif working >= run.job.min_machines:
        run.work_left -= working
    run.now += 1
