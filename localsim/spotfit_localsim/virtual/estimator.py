"""Replays jobs on recorded markets with the production policies, for `trainer.estimate()`.

Every recording in turn is the market of the first spot offer; further offers have the next
recordings of the same set. Jobs start at times that are evenly distributed over the recording,
which continues at its beginning after its end. Machines are available while the recording has as
many as the job needs, or all of its own if it never has as many. An elastic group gets a part of
its machines while the recording has a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market
from spotfit.model.replay import ReplayedGroup, ReplayedJob, ReplayOutcome
from spotfit.policy.offer_choice import choose_spot_offer, choose_without_waiting
from spotfit_localsim.traces import BUNDLED_RECORDINGS, read_trace
from spotfit_localsim.virtual.deadline_market import (
    DeadlineJob,
    JobPolicy,
    JobState,
    MarketOffer,
    offer_states,
    production_policy,
    run_job,
)
from spotfit_localsim.virtual.elastic_market import CapacityOffer, ElasticJob, run_elastic_job
from spotfit_localsim.virtual.recorded_market import (
    MarketRecording,
    market_grid,
    market_recording,
    recorded_together,
)

MAX_STARTS = 12
"""Times at which a job starts in each recording, at most."""
MIN_RECORDINGS = 3
"""Recordings in which a job starts, at least."""
LIMIT_FACTOR = 10
"""A job ends after this many times its training time, but not before it saw all of a recording."""

_ELASTIC_WEIGHT = 5.0
"""Computing time of an elastic job, in that of one of fixed size."""


class RecordedMarkets:
    """Recorded markets and what became of jobs on them; see `spotfit.model.replay`."""

    def __init__(self, recordings: Sequence[MarketRecording], remarks: Sequence[str] = ()) -> None:
        self._recordings = tuple(recordings)
        self.remarks = tuple(remarks)

    @classmethod
    def read(cls, folder: Path | None = None) -> RecordedMarkets:
        """Read all recordings of a folder, by default those of this package.

        Other JSON files are named in `remarks`. Raises `ConfigError` if the folder has none.
        """
        path = BUNDLED_RECORDINGS if folder is None else folder
        recordings, remarks = [], []
        for file in sorted(path.glob("*.json")):
            try:
                one = market_recording(read_trace(file))
            except ConfigError as error:
                remarks.append(f"{file.name} is not used: {error.message}")
                continue
            if any(one.counts):
                recordings.append(one)
            else:
                remarks.append(f"{file.name} is not used: it has no machines.")
        if not recordings:
            raise ConfigError(
                f"The folder {path} has no recorded markets.",
                do="Name a folder with recordings in the format of spotfit_localsim.traces, or "
                "omit it to use those of spotfit.",
            )
        return cls(recordings, remarks)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the recordings."""
        return tuple(one.name for one in self._recordings)

    def replay(self, job: ReplayedJob, *, max_decisions: int) -> list[ReplayOutcome]:
        """Replay the job from several times of every recording; see `MarketReplay`."""
        starts = max_decisions / sum(_decisions(job, one) for one in self._recordings)
        # Long jobs that are only compared with each other start in some of the recordings.
        count = len(self._recordings)
        every = min(math.ceil(1 / max(starts, 1 / count)), math.ceil(count / MIN_RECORDINGS))
        return list(self._outcomes(job, min(MAX_STARTS, max(1, int(starts))), every))

    def _outcomes(self, job: ReplayedJob, starts: int, every: int) -> Iterator[ReplayOutcome]:
        spot = sum(offer.market is Market.SPOT for offer in job.offers)
        first_zones = set(self.names[::every])
        for zones in recorded_together(self._recordings):
            for number, first in enumerate(zones):
                if first.name not in first_zones:
                    continue
                used = [zones[(number + n) % len(zones)] for n in range(max(1, spot))]
                for start in range(starts):
                    at = start * len(first.counts) // starts
                    yield _outcome(job, used, at)


def _decisions(job: ReplayedJob, one: MarketRecording) -> float:
    """About how many choices of a job of fixed size cost as much computing time.

    One per tick, without machines one per unit.
    """
    waiting = market_grid(one.tick_s, job.changeover_s).tick / 10
    ticks = (job.deadline_s or 2 * job.work_s) / one.tick_s
    return ticks * (1 + waiting) * (1 if job.group is None else _ELASTIC_WEIGHT)


def _outcome(job: ReplayedJob, zones: Sequence[MarketRecording], start: int) -> ReplayOutcome:
    grid = market_grid(zones[0].tick_s, job.changeover_s)
    if job.group is None:
        fixed = market_job(job, zones, start)
        limit = _limit(zones, fixed.tick, fixed.work + fixed.boot)
        result = run_job(fixed, policy_of(job), limit=limit)
    else:
        elastic = elastic_job(job, job.group, zones, start)
        limit = _limit(zones, elastic.tick, math.ceil(elastic.work + elastic.boot))
        result = run_elastic_job(elastic, limit=limit)
    finish_s = result.finished_at * grid.unit_s if result.is_finished else None
    is_late = job.deadline_s is not None and (finish_s is None or result.is_late)
    if finish_s is not None and job.deadline_s is not None and not is_late:
        finish_s = min(finish_s, job.deadline_s)  # the units of the job are rounded
    return ReplayOutcome(
        recording=zones[0].name,
        usd=result.usd,
        finish_s=finish_s,
        is_late=is_late,
    )


def market_job(job: ReplayedJob, zones: Sequence[MarketRecording], start: int) -> DeadlineJob:
    """Return the job on these zones, one for each spot offer, from tick `start`."""
    grid = market_grid(zones[0].tick_s, job.changeover_s)
    work = math.ceil(job.work_s / grid.unit_s - 1e-6)
    longest = _limit(zones, grid.tick, work + grid.boot)
    deadline = longest
    if job.deadline_s is not None:
        deadline = int(job.deadline_s / grid.unit_s + 1e-6)
        if job.deadline_s >= job.work_s + job.changeover_s:
            deadline = max(deadline, work + grid.boot)  # units are rounded
    ticks = max(longest, deadline) // grid.tick + 1
    spot = itertools.count()
    offers = tuple(
        MarketOffer(
            offer.market,
            offer.usd_per_hour,
            ()
            if offer.market is Market.ON_DEMAND
            else tuple(
                count == offer.machines
                for count in _capacity(offer.machines, zones, next(spot), start, ticks)
            ),
        )
        for offer in job.offers
    )
    return DeadlineJob(
        unit_s=grid.unit_s,
        tick=grid.tick,
        boot=grid.boot,
        work=work,
        deadline=deadline,
        offers=offers,
    )


def elastic_job(
    job: ReplayedJob, group: ReplayedGroup, zones: Sequence[MarketRecording], start: int
) -> ElasticJob:
    """Return the job of an elastic group on these zones, as `market_job`."""
    grid = market_grid(zones[0].tick_s, job.changeover_s)
    unit_s = grid.unit_s
    work, boot = job.work_s / unit_s, job.changeover_s / unit_s
    deadline = None if job.deadline_s is None else job.deadline_s / unit_s
    longest = _limit(zones, grid.tick, math.ceil(work + boot))
    ticks = max(longest, math.ceil(deadline or 0)) // grid.tick + 1
    spot = itertools.count()
    offers = tuple(
        CapacityOffer(
            market=offer.market,
            usd_per_hour=offer.usd_per_hour / offer.machines,
            capacity=()
            if offer.market is Market.ON_DEMAND
            else _capacity(offer.machines, zones, next(spot), start, ticks),
            slots=offer.slots,
            network=offer.network,
        )
        for offer in job.offers
    )
    return ElasticJob(
        unit_s=unit_s,
        tick=grid.tick,
        boot=boot,
        loss_pause=group.loss_pause_s / unit_s,
        growth_pause=group.growth_pause_s / unit_s,
        work=work,
        deadline=deadline,
        min_workers=group.min_workers,
        max_workers=group.max_workers,
        offers=offers,
    )


def _limit(zones: Sequence[MarketRecording], tick: int, least: int) -> int:
    """Units after which the job ends; `least` is how many it takes without outages."""
    recorded = max(len(one.counts) for one in zones) * tick
    return max(LIMIT_FACTOR * least, recorded + least)


def _capacity(
    machines: int, zones: Sequence[MarketRecording], number: int, start: int, ticks: int
) -> tuple[int, ...]:
    """How many of the machines the offer with this number has, by tick.

    Of a recording that never has as many, its share of them.
    """
    zone = zones[number]
    # A recording that is used for several offers has different times for each.
    same = [n for n, other in enumerate(zones) if other is zone]
    shift = same.index(number) * len(zone.counts) // len(same)
    at = (start + shift) % len(zone.counts)
    most = min(machines, zone.machines)
    counts = tuple(min(count, most) * machines // most for count in zone.counts)
    return (counts[at:] + counts * (ticks // len(counts) + 1))[:ticks]


def policy_of(job: ReplayedJob) -> JobPolicy:
    """Return the policy that `policy.machine_choice` applies to a run with these offers."""
    if all(offer.market is Market.SPOT for offer in job.offers):
        return _spot_policy
    if job.deadline_s is not None:
        return production_policy
    changeover_s = job.changeover_s
    return lambda state: (
        choose_without_waiting(offer_states(state), state.running, changeover_s=changeover_s).offer
    )


def _spot_policy(state: JobState) -> int | None:
    # The policy returns the same; most of the time of a job without fallback is waiting.
    if None not in state.refused_since:
        return None
    return choose_spot_offer(offer_states(state), state.running).offer
