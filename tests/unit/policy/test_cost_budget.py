"""The budget: what is spent, when the run is ended, and which machines are affordable."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    CancelRequested,
    FitEnded,
    GroupPlanned,
    GroupsReleased,
    GroupSubmitted,
    PricesChanged,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.spec import FeederSpec
from spotfit.model.usage import RELEASE_LIMIT_S
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import SELF_EXIT_TIMEOUT_S
from spotfit.policy.cost_budget import (
    SAVE_S,
    affords,
    budget_left_s,
    end_of_budget,
    end_without_offers,
    stop_time_s,
)
from tests.unit.policy.offered_run import (
    HOUR_S,
    LEASE_S,
    ON_DEMAND,
    SPOT,
    START_S,
    OfferedRun,
    an_offer,
)

STOP_S = SAVE_S + SELF_EXIT_TIMEOUT_S + LEASE_S


def renting(budget_usd: float | None, feeders: FeederSpec | None = None) -> OfferedRun:
    """Two spot machines, for $2 per hour, that have run since the start of the fit."""
    run = OfferedRun(budget_usd=budget_usd, feeders=feeders)
    run.request(0, "t-1", SPOT)
    run.bill(1, "t-1", started_s=0)
    return run


def test_the_time_that_is_left_is_that_of_the_rate_without_the_stop() -> None:
    run = renting(10.0)
    assert stop_time_s(run.view) == STOP_S
    assert budget_left_s(run.view, run.state(HOUR_S)) == pytest.approx(4 * HOUR_S - STOP_S)


def test_other_machines_shorten_the_time_that_is_left() -> None:
    run = renting(10.0)
    left_s = budget_left_s(run.view, run.state(HOUR_S), more_usd_per_hour=6.0)
    assert left_s == pytest.approx(HOUR_S - STOP_S)


def test_feeders_whose_offer_the_backend_chose_shorten_the_time_that_is_left() -> None:
    run = renting(10.0)
    token = Token("t-feed")
    request = GroupRequest(token=token, num_workers=1, total_workers=1, role="feed")
    plan = GroupPlan(token=token, provisioner="local", num_nodes=1, slots_per_node=1)
    handle = GroupHandle(token=token, provisioner="local", name="f", offer=SPOT.name)
    planned, submitted = (
        GroupPlanned(request=request, plan=plan),
        GroupSubmitted(token=token, handle=handle),
    )
    run.add(1, planned)
    assert budget_left_s(run.view, run.state(HOUR_S)) == pytest.approx(4 * HOUR_S - STOP_S)
    run.add(1, submitted)
    # $8 are left, and three machines cost $3 per hour.
    assert budget_left_s(run.view, run.state(HOUR_S)) == pytest.approx(8 / 3 * HOUR_S - STOP_S)


@pytest.mark.parametrize("offer", ["", "unlisted"], ids=["no offer", "an offer without a price"])
def test_feeders_of_unknown_price_count_at_the_highest_from_their_request_on(offer: str) -> None:
    run = renting(10.0, FeederSpec(max_nodes=1, usd_per_hour=2.0))
    token, before_s = Token("t-feed"), budget_left_s(run.view, run.state(HOUR_S))
    request = GroupRequest(token=token, num_workers=1, total_workers=1, role="feed")
    plan = GroupPlan(token=token, provisioner="local", num_nodes=1, slots_per_node=1)
    handle = GroupHandle(token=token, provisioner="local", name="f", offer=offer)
    run.add(HOUR_S, GroupPlanned(request=request, plan=plan))
    assert before_s == pytest.approx(4 * HOUR_S - STOP_S)
    # $8 are left, and three machines cost $4 per hour.
    assert budget_left_s(run.view, run.state(HOUR_S)) == pytest.approx(2 * HOUR_S - STOP_S)
    run.add(HOUR_S, GroupSubmitted(token=token, handle=handle))
    run.bill(HOUR_S, "t-feed", started_s=HOUR_S, nodes=1)
    assert budget_left_s(run.view, run.state(HOUR_S)) == pytest.approx(2 * HOUR_S - STOP_S)
    assert budget_left_s(run.view, run.state(2 * HOUR_S)) == pytest.approx(HOUR_S - STOP_S)
    run.add(2 * HOUR_S, GroupsReleased(token=token))
    # $6 are spent, with at most two minutes until the end of the released machine.
    left_s = budget_left_s(run.view, run.state(3 * HOUR_S))
    assert left_s == pytest.approx(HOUR_S - STOP_S - RELEASE_LIMIT_S)


def test_the_rate_follows_the_price_in_force() -> None:
    run = renting(10.0)
    run.add(HOUR_S, PricesChanged(offers=(an_offer("spot", 4.0),)))
    # $2 are spent, and the machines cost $8 per hour.
    assert budget_left_s(run.view, run.state(HOUR_S)) == pytest.approx(HOUR_S - STOP_S, abs=1)


def test_without_machines_the_budget_lasts() -> None:
    run = OfferedRun(budget_usd=10.0)
    assert budget_left_s(run.view, run.state(HOUR_S)) == float("inf")


def test_released_machines_have_been_paid() -> None:
    run = renting(1.0)
    run.add(HOUR_S, GroupsReleased(token=Token("t-1")))
    assert budget_left_s(run.view, run.state(2 * HOUR_S)) == 0.0


def test_the_run_continues_while_saving_and_stopping_are_affordable() -> None:
    run = renting(10.0)
    last_s = 5 * HOUR_S - STOP_S
    end = end_of_budget(run.view, run.state(last_s - 1), 50.0)
    assert isinstance(end, Wait)
    assert end.until == pytest.approx(51.0)
    assert isinstance(end_of_budget(run.view, run.state(last_s + 1), 50.0), CancelRequested)


def test_the_budget_is_examined_every_half_minute() -> None:
    run = renting(1000.0)
    assert end_of_budget(run.view, run.state(1), 50.0) == Wait(80.0, "the budget of the run")


def test_a_used_budget_ends_the_fit_with_a_save_and_figures() -> None:
    run = renting(10.0)
    assert end_of_budget(run.view, run.state(5 * HOUR_S), 0.0) == CancelRequested(
        reason="the budget of $10.00 is used up: $10.00 are spent, and $0.09 are kept for saving "
        "and for the stop of the machines",
        save=True,
        is_cost_budget=True,
    )


def test_a_training_that_has_ended_keeps_its_result() -> None:
    run = renting(10.0)
    finished = FitEnded(outcome="finished")
    view = replace(run.view, pending_fit_end=finished)
    assert end_of_budget(view, run.state(6 * HOUR_S), 0.0) == finished


def test_a_cancelled_run_is_not_ended_again() -> None:
    run = renting(1.0)
    run.add(2, CancelRequested(reason="by the user"))
    assert end_of_budget(run.view, run.state(5 * HOUR_S), 0.0) is None


def test_without_a_budget_or_a_clock_nothing_ends() -> None:
    assert end_of_budget(renting(None).view, renting(None).state(9e5), 0.0) is None
    run = renting(1.0)
    assert end_of_budget(run.view, run.state(9e5, wall_ms=None), 0.0) is None


# --- further machines -----------------------------------------------------------------------------


@pytest.mark.parametrize(("spare_s", "is_affordable"), [(1.0, True), (-1.0, False)])
def test_machines_must_pay_for_their_start(*, spare_s: float, is_affordable: bool) -> None:
    # Two on-demand machines cost $8 per hour.
    budget_usd = 8.0 * (START_S + STOP_S + spare_s) / HOUR_S
    run = OfferedRun(budget_usd=budget_usd)
    assert affords(run.view, run.state(0), ON_DEMAND) == is_affordable


def test_machines_start_beside_those_that_are_rented() -> None:
    budget_usd = 8.0 * (START_S + STOP_S + 1) / HOUR_S
    run = renting(budget_usd)
    assert not affords(run.view, run.state(1), ON_DEMAND)
    assert affords(run.view, run.state(1), SPOT)


def test_all_machines_are_affordable_without_a_budget_or_a_clock() -> None:
    assert affords(OfferedRun().view, OfferedRun().state(0), ON_DEMAND)
    run = OfferedRun(budget_usd=0.01)
    assert affords(run.view, run.state(0, wall_ms=None), ON_DEMAND)


def test_a_run_that_can_rent_nothing_more_is_ended_with_figures() -> None:
    run = OfferedRun(budget_usd=0.01)
    assert end_without_offers(run.view, run.state(0)) == CancelRequested(
        reason="the budget of $0.01 does not suffice for the start and the stop of machines: $0.00 "
        "are spent",
        save=True,
        is_cost_budget=True,
    )


def test_rented_machines_may_use_what_is_left() -> None:
    run = renting(0.5)
    assert end_without_offers(run.view, run.state(1)) is None


def test_a_run_without_a_budget_or_a_clock_is_not_ended() -> None:
    assert end_without_offers(OfferedRun().view, OfferedRun().state(0)) is None
    run = OfferedRun(budget_usd=0.01)
    assert end_without_offers(run.view, run.state(0, wall_ms=None)) is None
