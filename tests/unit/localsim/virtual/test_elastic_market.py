"""Elastic jobs on a simulated market, in units of an hour."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spotfit.model.events import MachinesChosen
from spotfit.model.offer import Market
from spotfit.policy.deadline import DeadlineState
from spotfit.policy.elastic_choice import ElasticGroup, ElasticOffer, choose_group
from spotfit_localsim.virtual.elastic_market import CapacityOffer, ElasticJob, run_elastic_job

ON_DEMAND = CapacityOffer(market=Market.ON_DEMAND, usd_per_hour=3.0)


def spot(*capacity: int, usd: float = 1.0, **fields: Any) -> CapacityOffer:
    """Each number of machines lasts four hours."""
    return CapacityOffer(market=Market.SPOT, usd_per_hour=usd, capacity=capacity, **fields)


def a_job(*offers: CapacityOffer, **fields: Any) -> ElasticJob:
    """Four hours of four workers; without loss pauses if the first machines stay."""
    usual: dict[str, Any] = {"min_workers": 1, "deadline": 24}
    return ElasticJob(
        unit_s=3600.0,
        tick=4,
        boot=1,
        loss_pause=1,
        growth_pause=0,
        work=4,
        max_workers=4,
        offers=offers,
        **{**usual, **fields},
    )


JOB = a_job(spot(4, 4, 4, 4, 4, 4), ON_DEMAND)


def all_spot(
    _group: ElasticGroup, _goal: DeadlineState | None, _offers: Sequence[ElasticOffer]
) -> MachinesChosen:
    return MachinesChosen(workers={"0": 4})


def test_all_machines_train_after_their_boot() -> None:
    result = run_elastic_job(JOB, all_spot)
    assert (result.usd, result.finished_at, result.is_late) == (4 * (1 + 4.0), 5, False)


def test_fewer_machines_train_longer_for_the_same_price() -> None:
    result = run_elastic_job(replace(JOB, offers=(spot(2, 2, 2, 2, 2, 2), ON_DEMAND)), all_spot)
    assert (result.usd, result.finished_at) == (2 * (1 + 8.0), 9)


def test_the_loss_of_a_machine_interrupts_the_group() -> None:
    result = run_elastic_job(replace(JOB, offers=(spot(4, 2, 2, 2, 2, 2), ON_DEMAND)), all_spot)
    # Three hours of four machines, one of a pause, two of the other two machines.
    assert result.usd == 4 * 4 + 2 * (1 + 2.0)


def test_further_machines_interrupt_the_group() -> None:
    job = replace(JOB, growth_pause=2, offers=(spot(2, 4, 4, 4), ON_DEMAND))
    result = run_elastic_job(job, all_spot)
    # Two machines train for three hours and while the others boot; all pause for two hours.
    assert result.finished_at == 5 + 2 + 2
    assert result.usd == 2 * 4 + 4 * (1 + 2 + 2.0)


def test_too_few_machines_are_paid_but_do_not_train() -> None:
    job = replace(JOB, min_workers=4, offers=(spot(2, 4, 4, 4), ON_DEMAND))
    result = run_elastic_job(job, all_spot)
    assert result.usd == 2 * 4 + 4 * (1 + 4.0)


def test_machines_of_several_workers_are_rented_whole() -> None:
    job = replace(JOB, offers=(spot(2, 2, 2, usd=3.0, slots=3), ON_DEMAND))
    assert run_elastic_job(job, all_spot).usd == 2 * 3.0 * (1 + 4.0)


def test_a_job_that_never_has_machines_ends_at_the_limit() -> None:
    job = a_job(spot(0), deadline=None)
    result = run_elastic_job(job, limit=30)
    assert (result.is_finished, result.usd) == (False, 0.0)


# --- With the production policy -------------------------------------------------------------------


def test_the_deadline_is_kept_without_any_spot_machine() -> None:
    result = run_elastic_job(replace(JOB, offers=(spot(0, 0, 0, 0, 0, 0), ON_DEMAND)))
    assert not result.is_late
    assert result.usd == 3.0 * 4 * (1 + 4.0)


def test_a_deadline_that_can_just_be_kept_is_kept() -> None:
    result = run_elastic_job(replace(JOB, deadline=5))
    assert (result.is_late, result.usd) == (False, 3.0 * 4 * 5.0)


def test_with_ample_slack_a_smaller_group_trains_on_spot() -> None:
    job = a_job(spot(*[2] * 100), ON_DEMAND, deadline=400)
    assert run_elastic_job(job).usd == 2 * (1 + 8.0)


def test_with_ample_slack_machines_below_the_minimum_are_waited_for() -> None:
    job = a_job(spot(2, 2, 4, 4, *[4] * 96), ON_DEMAND, deadline=400, min_workers=3)
    result = run_elastic_job(job)
    assert (result.usd, result.finished_at) == (4 * (1 + 4.0), 8 + 5)


def test_the_cheapest_of_several_zones_with_enough_machines_is_used() -> None:
    zones = spot(*[1] * 100, usd=0.5), spot(*[4] * 100)
    job = a_job(*zones, ON_DEMAND, deadline=400, min_workers=2)
    assert run_elastic_job(job).usd == 4 * (1 + 4.0)


def test_without_a_deadline_on_demand_machines_complete_the_minimum() -> None:
    job = a_job(spot(0, 0, 0, 0, 0, 0), ON_DEMAND, deadline=None, min_workers=2)
    result = run_elastic_job(job)
    # A wait of one start, then two machines for eight hours.
    assert (result.usd, result.finished_at) == (3.0 * 2 * (1 + 8.0), 1 + 1 + 8)


def test_without_fallback_the_group_has_what_is_granted_on_spot() -> None:
    result = run_elastic_job(a_job(spot(*[2] * 6), deadline=None))
    assert (result.usd, result.finished_at) == (2 * (1 + 8.0), 1 + 8)


def test_the_standing_request_is_for_a_zone_that_has_machines_for_all() -> None:
    def policy(
        _group: ElasticGroup, _goal: DeadlineState | None, offers: Sequence[ElasticOffer]
    ) -> MachinesChosen:
        started = [one.name for one in offers if one.is_spot and one.started]
        if started:
            return MachinesChosen(workers={started[0]: 4})
        due = min((one for one in offers if one.is_spot), key=lambda one: one.request_due_s)
        return MachinesChosen(workers={"2": 4}, standing_offer=due.name)

    zones = spot(*[3] * 6), spot(0, 4, 4, 4)
    result = run_elastic_job(replace(a_job(*zones, ON_DEMAND), work=6), policy)
    # On demand until 5 h, and then on spot machines that have started beside them.
    assert (result.usd, result.finished_at) == (3.0 * 4 * 5 + 4 * 3.0, 7)


# --- Networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["", "a", "b"])
def test_machines_train_until_those_of_another_offer_are_ready(network: str) -> None:
    job = a_job(spot(*[2] * 6, network="a"), replace(ON_DEMAND, network=network))

    def policy(
        _group: ElasticGroup, goal: DeadlineState | None, _offers: Sequence[ElasticOffer]
    ) -> MachinesChosen:
        assert goal is not None
        is_late = goal.time_left_s <= 20 * 3600
        return MachinesChosen(workers={"1": 4} if is_late else {"0": 2})

    result = run_elastic_job(job, policy)
    # Two spot machines train from 1 to 5 h, then four on-demand ones, which start at 4 h.
    assert (result.usd, result.finished_at) == (2 * 5 + 3.0 * 4 * (1 + 2), 7)


def test_machines_of_two_networks_do_not_train_together() -> None:
    zones = spot(*[2] * 6, network="a"), spot(*[2] * 6, network="b")

    def policy(
        _group: ElasticGroup, _goal: DeadlineState | None, _offers: Sequence[ElasticOffer]
    ) -> MachinesChosen:
        return MachinesChosen(workers={"0": 2, "1": 2})

    assert run_elastic_job(a_job(*zones), policy).finished_at == 1 + 8
    connected = a_job(*(replace(zone, network="") for zone in zones))
    assert run_elastic_job(connected, policy).finished_at == 1 + 4


def test_spot_offers_of_other_networks_are_not_considered_while_machines_run() -> None:
    seen: list[int] = []

    def policy(
        group: ElasticGroup, goal: DeadlineState | None, offers: Sequence[ElasticOffer]
    ) -> MachinesChosen:
        seen.append(len(offers))
        return choose_group(group, goal, offers)

    zones = spot(*[4] * 6, network="a"), spot(*[4] * 6, network="b")
    run_elastic_job(a_job(*zones, ON_DEMAND, deadline=400), policy)
    assert (seen[0], seen[-1]) == (3, 2)
