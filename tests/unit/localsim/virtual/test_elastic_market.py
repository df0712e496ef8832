"""Elastic jobs on a simulated market, in units of an hour."""

from dataclasses import replace

from spotfit.policy.elastic_deadline import ElasticState, GroupSizes
from spotfit_localsim.virtual.elastic_market import ElasticJob, run_elastic_job

JOB = ElasticJob(
    unit_s=3600.0,
    tick=4,
    boot=1,
    loss_pause=1,
    growth_pause=0,
    work=4,
    deadline=24,
    min_machines=1,
    max_machines=4,
    capacity=(4, 4, 4, 4, 4, 4),
    price_ratio=3.0,
)


def all_spot(state: ElasticState) -> GroupSizes:
    return GroupSizes(state.spot_available, 0, "")


def test_all_machines_train_after_their_boot() -> None:
    result = run_elastic_job(JOB, all_spot)
    assert (result.cost, result.is_late) == (4 * (1 + 4.0), False)


def test_fewer_machines_train_longer_for_the_same_price() -> None:
    result = run_elastic_job(replace(JOB, capacity=(2,) * 6), all_spot)
    assert result.cost == 2 * (1 + 8.0)


def test_the_loss_of_a_machine_interrupts_the_group() -> None:
    result = run_elastic_job(replace(JOB, capacity=(4, 2, 2, 2, 2, 2)), all_spot)
    # Three hours of four machines, one of a pause, two of the other two machines.
    assert result.cost == 4 * 4 + 2 * (1 + 2.0)


def test_too_few_machines_are_paid_but_do_not_train() -> None:
    result = run_elastic_job(replace(JOB, capacity=(2, 4, 4, 4), min_machines=4), all_spot)
    assert result.cost == 2 * 4 + 4 * (1 + 4.0)


def test_the_deadline_is_kept_without_any_spot_machine() -> None:
    result = run_elastic_job(replace(JOB, capacity=(0,) * 6))
    assert not result.is_late
    assert result.cost == 3.0 * 4 * (1 + 4.0)
