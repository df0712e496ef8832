"""Jobs with a deadline on simulated markets, in units of an hour unless stated otherwise."""

from dataclasses import replace

import pytest

from benchmarks.cost import adversarial_job
from benchmarks.cost_optimum import least_usd
from spotfit.model.offer import Market
from spotfit_localsim.virtual.deadline_market import (
    DeadlineJob,
    MarketOffer,
    production_policy,
    run_job,
)

ON_DEMAND = MarketOffer(Market.ON_DEMAND, 3.0)


def a_job(*available: bool, work: int, starts_beside: bool = True) -> DeadlineJob:
    """Ticks of four units; a boot takes one unit."""
    spot = MarketOffer(Market.SPOT, 1.0, available)
    return DeadlineJob(
        unit_s=3600.0,
        tick=4,
        boot=1,
        work=work,
        deadline=4 * len(available),
        offers=(spot, ON_DEMAND),
        starts_beside=starts_beside,
    )


def test_boots_are_paid_without_progress() -> None:
    result = run_job(a_job(True, True, work=5), lambda _: 0)
    assert (result.usd, result.finished_at, result.is_late) == (6.0, 6, False)


def test_a_loss_needs_another_start() -> None:
    job = a_job(True, False, True, work=5)
    result = run_job(job, lambda state: 0 if state.refused_since[0] is None else None)
    assert (result.usd, result.finished_at) == (4.0 + 3.0, 8 + 3)


def test_a_loss_repeats_unsaved_work() -> None:
    job = replace(a_job(True, False, True, True, work=5), repeated=2)
    result = run_job(job, lambda state: 0 if state.refused_since[0] is None else None)
    assert result.usd == 4.0 + 4.0 + 1.0


@pytest.mark.parametrize(("beside", "finished_at"), [(True, 9), (False, 10)])
def test_machines_that_start_beside_others_cost_no_time(*, beside: bool, finished_at: int) -> None:
    job = a_job(False, True, True, work=8, starts_beside=beside)
    result = run_job(job, lambda state: 1 if state.refused_since[0] is not None else 0)
    assert result.finished_at == finished_at
    on_demand_h, spot_h = (5, 5) if beside else (4, 6)
    assert result.usd == 3.0 * on_demand_h + spot_h


def test_the_optimum_waits_for_spot_and_ends_on_demand() -> None:
    job = a_job(False, True, False, work=6)
    assert least_usd(job, [(1.0, 3.0), (1.0, 9.0)]) == [4.0 + 3.0 * 4, 4.0 + 9.0 * 4]


def test_the_optimum_is_not_above_the_policy_on_a_stable_market() -> None:
    job = a_job(*[True] * 6, work=20)
    assert least_usd(job, [(1.0, 3.0)])[0] == run_job(job, production_policy).usd == 21.0


def test_no_deadline_is_missed_on_adversarial_markets() -> None:
    late = [
        seed for seed in range(150) if run_job(adversarial_job(seed), production_policy).is_late
    ]
    assert not late
