"""The least cost of a job with a deadline, with knowledge of the whole market.

An exact dynamic program over ticks, offers and remaining work, from the deadline backwards. It
stops machines before it starts others, and changes only at ticks. The policies may start machines
beside others and in every unit, so that they can be cheaper than it, by little.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spotfit_localsim.virtual.deadline_market import DeadlineJob

_IMPOSSIBLE = np.float32(1e12)

Costs = npt.NDArray[np.float32]
"""Least cost by price list, offer, ticks since the start and remaining work."""


def least_usd(job: DeadlineJob, prices: Sequence[Sequence[float]]) -> list[float]:
    """Return the least cost of `job` for each list of prices per hour, in the order of its offers.

    `job.repeated` is not considered.
    """
    per_unit = np.array(prices, np.float32) * np.float32(job.unit_s / 3600)
    # Boot time that is left after each tick since the start; the last state makes full progress.
    boots = [job.boot]
    while boots[-1] > 0:
        boots.append(max(0, boots[-1] - job.tick))
    count, ages = len(job.offers), max(1, len(boots) - 1)
    none = np.full((len(prices), job.work + 1), _IMPOSSIBLE)
    none[:, 0] = 0
    costs: Costs = np.repeat(none[:, None, None, :], count, axis=1).repeat(ages, axis=2)
    for tick in range(job.deadline // job.tick - 1, -1, -1):
        started = _tick(costs[:, :, 0], boots[0], job, per_unit)
        available = [n for n in range(count) if job.offers[n].is_available(tick)]
        # Without machines at the start of the tick, or changing to others.
        changed = np.minimum(none, started[:, available].min(axis=1))
        changed[:, 0] = 0
        before = np.repeat(changed[:, None, None, :], count, axis=1).repeat(ages, axis=2)
        for age in range(ages):
            older = min(age + 1, ages - 1)
            stayed = _tick(costs[:, available, older], boots[age + 1], job, per_unit[:, available])
            before[:, available, age] = np.minimum(before[:, available, age], stayed)
        none, costs = changed, before
    return [float(cost) for cost in none[:, job.work]]


def _tick(after: Costs, boot_left: int, job: DeadlineJob, per_unit: Costs) -> Costs:
    """Costs before a tick with machines that boot for `boot_left`, from those after it."""
    progress = max(0, job.tick - boot_left)
    length = np.full(after.shape[-1], job.tick, np.float32)
    last = np.arange(min(progress, job.work) + 1)
    length[: len(last)] = boot_left + last
    before = np.zeros_like(after)
    before[..., progress:] = after[..., : after.shape[-1] - progress]
    before += per_unit[..., None] * length
    before[..., 0] = 0
    return before
