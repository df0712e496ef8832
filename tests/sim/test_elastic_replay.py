"""Replays of elastic groups cost what complete runs cost on the same market, in virtual time."""

from __future__ import annotations

import pytest

from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.elastic_market import CapacityOffer, ElasticJob, run_elastic_job
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.scenario_library import varying_capacity_scenario
from spotfit_localsim.virtual.simulation import simulate

UNIT_S, TICK = 10.0, 3
# Boots of 20 to 60 s, detection and restarts of the scenario.
BOOT_S, LOSS_PAUSE_S, GROWTH_PAUSE_S = 70.0, 60.0, 25.0


def counts_of(trace: CapacityTrace, duration_s: float) -> tuple[int, ...]:
    """The least number of machines in each tick."""
    tick_s = UNIT_S * TICK
    starts = [at for at, _ in trace.points]
    ends = [*starts[1:], duration_s]
    return tuple(
        min(
            count
            for (at, count), end in zip(trace.points, ends, strict=True)
            if at < (tick + 1) * tick_s and end > tick * tick_s
        )
        for tick in range(int(duration_s / tick_s))
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a_replay_costs_and_takes_what_the_run_does(seed: int) -> None:
    scenario = varying_capacity_scenario(seed, min_workers=1)
    spot, on_demand = scenario.market.offers
    cost = scenario.cost
    assert spot.capacity is not None
    assert cost.training_time_s is not None
    assert cost.deadline_ms is not None
    deadline_s = (cost.deadline_ms - wall_ms(0.0)) / 1000
    job = ElasticJob(
        unit_s=UNIT_S,
        tick=TICK,
        boot=BOOT_S / UNIT_S,
        loss_pause=LOSS_PAUSE_S / UNIT_S,
        growth_pause=GROWTH_PAUSE_S / UNIT_S,
        work=cost.training_time_s / UNIT_S,
        deadline=deadline_s / UNIT_S,
        min_workers=1,
        max_workers=scenario.num_workers,
        offers=(
            CapacityOffer(
                market=spot.market,
                usd_per_hour=spot.prices[0][1],
                capacity=counts_of(spot.capacity, deadline_s + 600),
            ),
            CapacityOffer(market=on_demand.market, usd_per_hour=on_demand.prices[0][1]),
        ),
    )
    replayed, run = run_elastic_job(job), simulate(scenario, seed).cost
    assert not replayed.is_late
    assert replayed.usd == pytest.approx(run.total_usd, rel=0.1)
    assert replayed.finished_at * UNIT_S == pytest.approx(run.finished_at_s, rel=0.1)
