"""The choice between spot, on-demand and no machines."""

from dataclasses import replace

import pytest

from spotfit.model.offer import Market
from spotfit.policy.deadline import (
    DeadlineState,
    MarketChoice,
    choose_market,
    reason_to_wait_for_cheaper,
)

HOUR = 3600.0
# Two hours of work; a changeover takes 6 minutes. Kept for later changes: 0.1 · τ / 3 hours.
STATE = DeadlineState(
    time_left_s=4 * HOUR,
    work_left_s=2 * HOUR,
    changeover_s=360.0,
    look_s=60.0,
)


def choose(
    slack_s: float,
    running: Market | None = None,
    *,
    refused_s: float | None = None,
    price_ratio: float = 3.0,
) -> MarketChoice:
    state = replace(STATE, time_left_s=STATE.work_left_s + slack_s)
    return choose_market(state, running, spot_refused_s=refused_s, price_ratio=price_ratio)


@pytest.mark.parametrize(
    ("running", "available", "slack_s", "expected"),
    [
        (Market.SPOT, True, 360.0, Market.SPOT),
        (Market.SPOT, True, 359.0, Market.ON_DEMAND),
        (Market.SPOT, True, 0.0, Market.ON_DEMAND),
        (Market.SPOT, True, -1.0, Market.SPOT),  # the deadline is missed on any machines
        (None, True, 2 * 360 + 60, Market.SPOT),
        (None, True, 2 * 360 + 59, Market.ON_DEMAND),
        (Market.ON_DEMAND, True, 780.0, Market.SPOT),
        (Market.ON_DEMAND, True, 600.0, Market.ON_DEMAND),
        (Market.ON_DEMAND, False, 4 * HOUR, Market.ON_DEMAND),
        (None, False, 4 * HOUR, None),
        (None, False, 900.0, Market.ON_DEMAND),
    ],
)
def test_slack_decides(
    running: Market | None, *, available: bool, slack_s: float, expected: Market | None
) -> None:
    assert choose(slack_s, running, refused_s=None if available else 0.0).market is expected


def test_spot_machines_that_end_before_others_start_are_kept() -> None:
    state = replace(STATE, work_left_s=360.0, time_left_s=400.0)
    choice = choose_market(state, Market.SPOT, spot_refused_s=None, price_ratio=3.0)
    assert choice.market is Market.SPOT


def test_spot_machines_that_start_are_kept_without_the_reserve() -> None:
    # 0.1 h · 2.17 h / 3 h are the reserve: 260 s.
    state = replace(STATE, time_left_s=STATE.work_left_s + 600.0)
    for is_returning, expected in ((False, Market.ON_DEMAND), (True, Market.SPOT)):
        choice = choose_market(
            state,
            Market.ON_DEMAND,
            spot_refused_s=None,
            price_ratio=3.0,
            is_returning=is_returning,
        )
        assert choice.market is expected


@pytest.mark.parametrize(("slack_s", "expected"), [(685.0, Market.SPOT), (680.0, Market.ON_DEMAND)])
def test_a_requested_return_is_kept_with_a_reserve_that_is_smaller_by_the_time_between_decisions(
    slack_s: float, expected: Market
) -> None:
    state = replace(STATE, time_left_s=STATE.work_left_s + slack_s)
    for is_requested, market in ((False, Market.ON_DEMAND), (True, expected)):
        choice = choose_market(
            state,
            Market.ON_DEMAND,
            spot_refused_s=None,
            price_ratio=3.0,
            is_requested=is_requested,
        )
        assert choice.market is market


def test_the_longer_spot_is_refused_the_less_is_waited() -> None:
    assert choose(0.5 * HOUR, refused_s=0.0).market is None
    assert choose(0.5 * HOUR, refused_s=2 * HOUR).market is Market.ON_DEMAND


def test_spot_that_saves_less_than_its_start_costs_is_not_returned_to() -> None:
    choice = choose(4 * HOUR, Market.ON_DEMAND, price_ratio=1.1)
    assert choice.market is Market.ON_DEMAND
    assert choice.reason == "a return to spot machines would cost more than it saves"


def test_the_reason_states_the_slack_and_what_is_kept() -> None:
    reason = choose(2 * HOUR, refused_s=0.0).reason
    assert reason.startswith("waiting for spot machines: 2.0 h of slack, ")


def wait_for_cheaper(slack_h: float, refused_h: float) -> str:
    state = replace(STATE, time_left_s=STATE.work_left_s + slack_h * HOUR)
    return reason_to_wait_for_cheaper(state, refused_h * HOUR)


def test_cheaper_spot_is_waited_for_with_the_slack_for_all_outages_to_come() -> None:
    # 2 h to 4 h: outages of 1.33 h, half of which are kept, and as much for a long outage.
    assert wait_for_cheaper(2.0, 0.0) == (
        "waiting for cheaper spot machines: 2.0 h of slack, 62.0 min are kept"
    )
    assert not wait_for_cheaper(0.7, 0.0)
    assert wait_for_cheaper(2.0, 2.0)
    assert not wait_for_cheaper(1.4, 2.0)
    assert wait_for_cheaper(1.4, 0.0)


def test_cheaper_spot_that_is_refused_for_long_is_not_waited_for() -> None:
    assert wait_for_cheaper(100.0, 2.0)
    assert not wait_for_cheaper(100.0, 2.01)
