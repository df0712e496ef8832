"""The checks of deadline, budget and fallback, with their figures, and the limits in the spec."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotfit.client.cost_limits import (
    CostLimits,
    OfferPlan,
    check_limits,
    cost_spec,
    expected_cost_usd,
    feeder_cost_usd,
    limits_after,
    read_limits,
    worst_cost_usd,
)
from spotfit.client.run_config import RunConfig
from spotfit.core.errors import ConfigError
from spotfit.model.market_record import MarketRecord, MeasuredSpeed
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import FeederSpec
from spotfit.model.view import JournalView
from spotfit.provision.api import Traits
from spotfit.provision.offers import OfferListing

HOUR_S = 3600.0
NOW_MS = 1_000_000_000_000


def a_plan(name: str, usd: float, market: Market = Market.SPOT, machines: int = 2) -> OfferPlan:
    price = Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    offer = Offer(name=name, provisioner="aws_batch", market=market, price=price)
    return OfferPlan(offer, machines)


SPOT = a_plan("spot", 1.0)
ON_DEMAND = a_plan("on-demand", 4.0, Market.ON_DEMAND)


def limits(**fields: Any) -> CostLimits:
    """Limits of a training of ten hours that starts within half an hour."""
    usual: dict[str, Any] = {
        "deadline_s": None,
        "budget_usd": None,
        "uses_on_demand": False,
        "training_time_s": 10 * HOUR_S,
        "start_time_s": 1800.0,
        "lifetime_s": 5 * HOUR_S,
        "decision_interval_s": 30.0,
    }
    return CostLimits(**{**usual, **fields})


def errors(
    of_limits: CostLimits,
    *plans: OfferPlan,
    remarks: tuple[str, ...] = (),
    default: str | None = None,
) -> list[ConfigError]:
    listing = OfferListing(offers=(), remarks=remarks, default=default)
    return list(check_limits(of_limits, list(plans), listing, backend="aws_batch"))


# --- Limits of RunConfig --------------------------------------------------------------------------


def test_a_duration_is_a_deadline_from_now() -> None:
    assert read_limits(RunConfig(deadline="2h"), Traits(), NOW_MS).deadline_s == 2 * HOUR_S


def test_a_time_is_compared_with_the_clock_of_the_storage() -> None:
    deadline = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(hours=3)
    assert read_limits(RunConfig(deadline=deadline), Traits(), NOW_MS).deadline_s == 3 * HOUR_S


@pytest.mark.parametrize(
    ("run", "uses_on_demand"),
    [
        (RunConfig(), False),
        (RunConfig(budget_usd=1), False),
        (RunConfig(deadline="1h"), True),
        (RunConfig(deadline="1h", fallback="never"), False),
        (RunConfig(fallback="on_demand"), True),
    ],
    ids=["nothing", "budget", "deadline", "deadline without fallback", "fallback"],
)
def test_a_deadline_falls_back_to_on_demand_machines(
    run: RunConfig, *, uses_on_demand: bool
) -> None:
    assert read_limits(run, Traits(), NOW_MS).uses_on_demand == uses_on_demand


@pytest.mark.parametrize(
    ("fields", "is_set"),
    [
        ({}, False),
        ({"deadline_s": 1.0}, True),
        ({"budget_usd": 1.0}, True),
        ({"uses_on_demand": True}, True),
    ],
)
def test_any_limit_lets_the_leader_choose_offers(fields: dict[str, Any], *, is_set: bool) -> None:
    assert limits(**fields).is_set == is_set


def test_start_and_lifetime_are_those_of_the_backend() -> None:
    read = read_limits(RunConfig(), Traits(start_time_s=7.0, mean_lifetime_s=8.0), NOW_MS)
    assert (read.start_time_s, read.lifetime_s) == (7.0, 8.0)


# --- Errors ---------------------------------------------------------------------------------------


def test_limits_that_can_be_kept_are_no_error() -> None:
    assert (
        errors(
            limits(budget_usd=100.0, deadline_s=50 * HOUR_S, uses_on_demand=True), SPOT, ON_DEMAND
        )
        == []
    )


def test_without_prices_the_limits_are_an_error_with_the_remarks_of_the_backend() -> None:
    (error,) = errors(limits(budget_usd=1.0), remarks=("Access was denied.", "Ask for it."))
    assert str(error).startswith(
        "RunConfig(deadline=, budget_usd=, fallback=) needs the price of any offer that this run "
        "may use; the backend 'aws_batch' has none. Access was denied. Ask for it."
    )
    assert "prices" in (error.do or "")


def test_on_demand_machines_alone_are_no_offer_of_a_run_without_fallback() -> None:
    (error,) = errors(limits(budget_usd=1000.0), ON_DEMAND)
    assert "any offer that this run may use" in str(error)
    assert errors(limits(budget_usd=1000.0, uses_on_demand=True), ON_DEMAND) == []


def test_a_fallback_needs_a_price_of_on_demand_machines() -> None:
    (error,) = errors(limits(uses_on_demand=True), SPOT)
    assert "needs the price of on-demand machines, to which the run falls back" in str(error)


def test_a_deadline_before_the_end_of_the_training_is_an_error_with_both_durations() -> None:
    # Ten hours, a start of half an hour, and two decisions of half a minute.
    (error,) = errors(limits(deadline_s=10.5 * HOUR_S), SPOT)
    assert str(error).startswith(
        "RunConfig(deadline=...) is in 10.5 h: the training takes 10.0 h, and the start of "
        "machines takes 31.0 min. The deadline cannot be kept."
    )
    assert error.do == "Set a deadline of at least 10.6 h, or use more workers."


def test_the_deadline_and_the_budget_of_a_remedy_suffice() -> None:
    for training_time_s in (10.0, 400.0, 36_000.0):
        (error,) = errors(
            limits(deadline_s=1.0, training_time_s=training_time_s, start_time_s=1.23), SPOT
        )
        value, unit = (error.do or "").split("at least ")[1].split(",")[0].split()
        deadline_s = float(value) * {"s": 1, "min": 60, "h": HOUR_S}[unit]
        assert (
            errors(
                limits(deadline_s=deadline_s, training_time_s=training_time_s, start_time_s=1.23),
                SPOT,
            )
            == []
        )
    fields = {"deadline_s": 50 * HOUR_S, "uses_on_demand": True}
    (error,) = errors(limits(budget_usd=10.0, **fields), SPOT, ON_DEMAND)
    budget_usd = float((error.do or "").split("budget_usd=")[1].split()[0])
    assert errors(limits(budget_usd=budget_usd, **fields), SPOT, ON_DEMAND) == []


def test_the_earliest_possible_deadline_is_no_error() -> None:
    assert errors(limits(deadline_s=10.5 * HOUR_S + 60.0), SPOT) == []


def test_a_deadline_before_the_start_of_machines_is_an_error_without_a_training_time() -> None:
    (error,) = errors(limits(deadline_s=60.0, training_time_s=None), SPOT)
    assert "RunConfig(deadline=...) is in 60 s: the start of machines takes 31.0 min." in str(error)


def test_a_deadline_that_has_passed_is_an_error_with_that_word() -> None:
    (error,) = errors(limits(deadline_s=-60.0), SPOT)
    assert "RunConfig(deadline=...) has passed: the training takes 10.0 h" in str(error)


def test_a_deadline_that_the_budget_does_not_guarantee_is_an_error_with_figures() -> None:
    both = limits(deadline_s=50 * HOUR_S, budget_usd=50.0, uses_on_demand=True)
    # $8 per hour for 10 h, a start and two decisions; spot: $2 for 10 h and three starts.
    (error,) = errors(both, SPOT, ON_DEMAND)
    assert str(error).startswith(
        "The deadline cannot be guaranteed for $50.00: worst case $84.13, expected $23.00."
    )
    assert (error.do or "").startswith("Set budget_usd=84.14 or more; or RunConfig(fallback=")


def test_without_fallback_a_deadline_needs_no_budget_for_on_demand_machines() -> None:
    assert errors(limits(deadline_s=50 * HOUR_S, budget_usd=50.0), SPOT, ON_DEMAND) == []


def test_a_budget_below_the_expected_cost_is_an_error_with_both() -> None:
    (error,) = errors(limits(budget_usd=22.99), SPOT)
    assert str(error).startswith(
        "The training is expected to cost $23.00, more than budget_usd=22.99."
    )
    assert errors(limits(budget_usd=23.0), SPOT) == []


def test_a_budget_without_a_training_time_is_not_compared() -> None:
    assert errors(limits(budget_usd=5.0, training_time_s=None), SPOT) == []


def test_a_deadline_without_a_training_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    errors(limits(budget_usd=1.0, training_time_s=None), SPOT)
    assert caplog.messages == []
    errors(limits(deadline_s=50 * HOUR_S, training_time_s=None), SPOT)
    assert caplog.messages == ["deadline.unknown_training_time"]


# --- Figures --------------------------------------------------------------------------------------


def test_the_worst_case_is_all_work_on_the_cheapest_on_demand_machines() -> None:
    other = a_plan("other", 5.0, Market.ON_DEMAND)
    hours = 10 + (1800 + 60) / HOUR_S
    assert worst_cost_usd(limits(), [other, ON_DEMAND]) == pytest.approx(8.0 * hours)


def test_the_expected_cost_has_a_start_per_lifetime_of_spot_machines() -> None:
    assert expected_cost_usd(limits(), [SPOT], []) == pytest.approx(2.0 * (10 + 3 * 0.5))


def test_the_expected_cost_is_that_of_the_cheapest_offer() -> None:
    cheap = a_plan("cheap", 0.5)
    assert expected_cost_usd(limits(), [SPOT, cheap], []) == pytest.approx(1.0 * 11.5)


@pytest.mark.parametrize(("uses_on_demand", "hours"), [(True, 10.5), (False, 11.5)])
def test_on_demand_machines_count_only_if_they_may_be_rented(
    *, uses_on_demand: bool, hours: float
) -> None:
    equal = a_plan("equal", 1.0, Market.ON_DEMAND)
    fields = limits(uses_on_demand=uses_on_demand)
    assert expected_cost_usd(fields, [SPOT], [equal]) == pytest.approx(2.0 * hours)


# --- Feeders --------------------------------------------------------------------------------------

FEEDERS = FeederSpec(min_nodes=1, max_nodes=4, usd_per_hour=0.5)


def test_the_smallest_number_of_feeders_is_expected_and_the_largest_the_worst_case() -> None:
    fed = limits(feeders=FEEDERS)
    hours = 10 + (1800 + 60) / HOUR_S
    assert worst_cost_usd(fed, [ON_DEMAND]) == pytest.approx((8.0 + 2.0) * hours)
    assert expected_cost_usd(fed, [SPOT], []) == pytest.approx(23.0 + 0.5 * 10)


def test_feeders_are_part_of_the_budget() -> None:
    fields = {"deadline_s": 50 * HOUR_S, "uses_on_demand": True}
    assert errors(limits(budget_usd=100.0, **fields), SPOT, ON_DEMAND) == []
    (error,) = errors(limits(budget_usd=100.0, feeders=FEEDERS, **fields), SPOT, ON_DEMAND)
    assert error.message == (
        "The deadline cannot be guaranteed for $100.00: worst case $105.17, expected $28.00, with "
        "the machines for feeders."
    )
    (error,) = errors(limits(budget_usd=27.0, feeders=FEEDERS), SPOT)
    assert error.message.startswith("The training is expected to cost $28.00, with the machines")


def test_feeders_of_unknown_price_are_an_error_with_a_budget_only() -> None:
    unpriced = FeederSpec(min_nodes=0, max_nodes=4)
    (error,) = errors(limits(budget_usd=1000.0, feeders=unpriced), SPOT)
    assert "needs the price of machines for feeders" in error.message
    assert errors(limits(deadline_s=50 * HOUR_S, feeders=unpriced), SPOT) == []
    assert errors(limits(budget_usd=1000.0, feeders=FeederSpec()), SPOT) == []


@pytest.mark.parametrize(
    ("budget_usd", "rents_validation", "default", "count"),
    [(1000.0, True, "", 1), (1000.0, True, "spot", 0), (1000.0, False, "", 0), (None, True, "", 0)],
)
def test_a_budget_needs_the_offer_of_machines_for_validations(
    budget_usd: float | None, rents_validation: bool, default: str, count: int
) -> None:
    of_limits = limits(
        deadline_s=50 * HOUR_S, budget_usd=budget_usd, rents_validation=rents_validation
    )
    found = errors(of_limits, SPOT, default=default)
    assert len(found) == count
    assert all("machines for validations" in one.message for one in found)


def test_the_cost_of_feeders_is_known_without_machines() -> None:
    assert feeder_cost_usd(None, HOUR_S) == (0.0, 0.0)
    assert feeder_cost_usd(FeederSpec(min_nodes=0, max_nodes=2), HOUR_S) == (0.0, None)
    assert feeder_cost_usd(FEEDERS, 2 * HOUR_S) == (1.0, 4.0)


# --- Spec -----------------------------------------------------------------------------------------


def test_the_spec_has_the_deadline_as_a_time_of_the_storage() -> None:
    spec = cost_spec(limits(deadline_s=1.5), [SPOT], NOW_MS, listed=(SPOT.offer,))
    assert spec.deadline_ms == NOW_MS + 1500
    assert cost_spec(limits(), [SPOT], NOW_MS, listed=()).deadline_ms is None


def test_the_spec_has_all_offers_and_the_machines_of_those_that_may_be_rented() -> None:
    listed = (SPOT.offer, ON_DEMAND.offer)
    spec = cost_spec(limits(), [SPOT], NOW_MS, listed=listed)
    assert (spec.offers, spec.machines) == (listed, {"spot": 2})


def test_the_spec_has_the_other_limits() -> None:
    given = limits(budget_usd=9.0, uses_on_demand=True)
    spec = cost_spec(given, [SPOT], NOW_MS, listed=())
    assert (spec.budget_usd, spec.uses_on_demand) == (9.0, True)
    assert (spec.training_time_s, spec.start_time_s) == (10 * HOUR_S, 1800.0)


# --- Continued runs -------------------------------------------------------------------------------


def test_a_continued_run_needs_money_for_the_rest_of_the_training() -> None:
    few = limits(budget_usd=10.0)
    assert errors(few, SPOT), "the whole training costs more"
    assert errors(replace(few, progress=0.8), SPOT) == []


def test_the_budget_includes_what_earlier_fits_have_cost() -> None:
    continued = limits(budget_usd=10.0, progress=0.8, spent_usd=7.0)
    [error] = errors(continued, SPOT)
    assert error.message == (
        "The training is expected to cost $12.40, $7.00 of it spent already, more than "
        "budget_usd=10.00."
    )


def test_a_budget_that_is_spent_leaves_nothing_for_a_start() -> None:
    [error] = errors(limits(budget_usd=10.0, progress=0.8, spent_usd=9.9), SPOT)
    assert error.message.startswith(
        "RunConfig(budget_usd=10.00), of which $9.90 are spent, leaves nothing for the training"
    )
    assert error.do.startswith("Set a budget of more than 10.99, ")


@pytest.mark.parametrize(
    ("measured_h", "of_workers", "expected_h"),
    [
        (20.0, 2, 10.0),  # slower than the estimate of ten hours
        (5.0, 2, 5.0),  # the estimate counts
        (40.0, 1, 10.0),  # two workers are at most twice as fast as one
    ],
)
def test_a_continued_run_counts_at_the_slower_speed(
    measured_h: float, of_workers: int, expected_h: float
) -> None:
    speed = MeasuredSpeed(share=0.1, measured_s=0.1 * measured_h * HOUR_S)
    view = JournalView(market=MarketRecord(progress=0.5, speeds={of_workers: speed}))
    after = limits_after(limits(), view, NOW_MS, workers=2)
    assert after.work_left_s == pytest.approx(expected_h * HOUR_S)
