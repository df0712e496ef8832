"""Contradictions between the limits of a run and what its backend offers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from spotfit.client.cost_limits import (
    OfferPlan,
    check_limits,
    decision_interval_s,
    read_limits,
)
from spotfit.client.run_config import RunConfig
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.api import Traits
from spotfit.provision.offers import OfferListing

NOW_MS = 1_000_000_000_000
# 155 s are kept for the stop; with the start of 45 s, that is 200 s.
TRAITS = Traits(start_time_s=45.0, observe_interval_s=0.2)


def a_plan(market: Market, usd: float) -> OfferPlan:
    price = Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    return OfferPlan(Offer(name=market.value, provisioner="b", market=market, price=price), 1)


PLANS = [a_plan(Market.SPOT, 360.0), a_plan(Market.ON_DEMAND, 1080.0)]


def errors(plans: list[OfferPlan] = PLANS, **run: Any) -> list[str]:
    limits = read_limits(RunConfig(**run), TRAITS, NOW_MS)
    listing = OfferListing(tuple(one.offer for one in plans))
    return [error.message for error in check_limits(limits, plans, listing, backend="b")]


def test_limits_that_can_be_kept_are_no_errors() -> None:
    assert errors(deadline="1h", training_time_s=60, budget_usd=100) == []


def test_a_budget_that_does_not_pay_for_start_and_stop_is_an_error() -> None:
    (error,) = errors(budget_usd=19.0)
    assert "start of machines takes 45 s" in error
    assert "together $20.00" in error
    assert errors(budget_usd=21.0) == []


def test_spot_machines_only_are_refused_where_there_are_none() -> None:
    (error,) = errors([a_plan(Market.ON_DEMAND, 1.0)], fallback="never", budget_usd=100)
    assert "has only on-demand machines" in error


def test_such_a_budget_is_reported_once() -> None:
    assert len(errors(budget_usd=19.0, deadline="1h", training_time_s=600)) == 1


def test_a_deadline_of_the_past_is_named_as_such() -> None:
    (error,) = errors(deadline=datetime.fromtimestamp(NOW_MS / 1000 - 60, UTC))
    assert error.startswith("RunConfig(deadline=...) has passed")


@pytest.mark.parametrize(("observe_s", "expected_s"), [(0.2, 1.0), (10.0, 30.0)])
def test_backends_of_this_computer_decide_often(observe_s: float, expected_s: float) -> None:
    assert decision_interval_s(Traits(observe_interval_s=observe_s)) == expected_s
