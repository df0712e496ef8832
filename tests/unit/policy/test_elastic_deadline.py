"""The numbers of machines of an elastic run with a deadline."""

from dataclasses import replace

import pytest

from spotfit.policy.elastic_deadline import ElasticState, choose_group_sizes

HOUR = 3600.0
STATE = ElasticState(
    time_left_s=60 * HOUR,
    work_left_s=48 * HOUR,
    max_machines=16,
    spot_machines=6,
    spot_available=6,
    on_demand_machines=0,
    changeover_s=360.0,
    loss_pause_s=216.0,
    growth_pause_s=36.0,
    look_s=24.0,
    losses_per_hour=0.5,
)
AMPLE_S, SHORT_S, NONE_S = 12 * HOUR, 2.5 * HOUR, 0.1 * HOUR


def sizes(slack_s: float, state: ElasticState = STATE) -> tuple[int, int]:
    spot, on_demand, _ = choose_group_sizes(replace(state, work_left_s=60 * HOUR - slack_s))
    return spot, on_demand


@pytest.mark.parametrize(
    ("slack_s", "expected"), [(AMPLE_S, (6, 0)), (SHORT_S, (6, 10)), (NONE_S, (0, 16))]
)
def test_on_demand_machines_are_added_as_slack_shrinks(
    slack_s: float, expected: tuple[int, int]
) -> None:
    assert sizes(slack_s) == expected


def test_all_granted_machines_are_used_while_slack_is_ample() -> None:
    assert sizes(AMPLE_S, replace(STATE, spot_available=11)) == (11, 0)


@pytest.mark.parametrize(("available", "expected"), [(15, (6, 10)), (16, (16, 0))])
def test_with_little_slack_only_the_whole_group_replaces_on_demand_machines(
    available: int, expected: tuple[int, int]
) -> None:
    state = replace(STATE, spot_available=available, on_demand_machines=10)
    assert sizes(SHORT_S, state) == expected


def test_running_on_demand_machines_are_not_released_for_slack() -> None:
    assert sizes(AMPLE_S, replace(STATE, on_demand_machines=10)) == (6, 10)


@pytest.mark.parametrize(("available", "expected"), [(7, (0, 0)), (8, (8, 0))])
def test_with_ample_slack_fewer_spot_machines_than_the_minimum_are_not_used(
    available: int, expected: tuple[int, int]
) -> None:
    state = replace(STATE, min_machines=8, spot_machines=0, spot_available=available)
    assert sizes(AMPLE_S, state) == expected


def test_with_little_slack_on_demand_machines_complete_too_few_spot_machines() -> None:
    assert sizes(SHORT_S, replace(STATE, min_machines=8)) == (6, 10)


@pytest.mark.parametrize(
    ("slack_s", "training", "expected"),
    [
        (0.1 * HOUR, 16, (16, 0)),
        (0.1 * HOUR, 15, (0, 16)),
        (0.1 * HOUR - 1, 16, (0, 16)),
        (-1.0, 16, (16, 0)),
    ],
    ids=["complete", "incomplete", "less than a changeover", "too late"],
)
def test_a_complete_group_that_trains_stays_until_a_changeover_is_left(
    slack_s: float, training: int, expected: tuple[int, int]
) -> None:
    state = replace(STATE, spot_machines=16, spot_available=16, spot_training=training)
    assert sizes(slack_s, state) == expected


def test_a_return_keeps_slack_for_the_losses_to_come() -> None:
    """Until the deadline 20 losses are expected, which cost the pause and 0.4 of a changeover."""
    kept_s = STATE.safety_s + 20 * (216.0 + 0.4 * 360.0)
    state = replace(STATE, spot_available=16, on_demand_machines=10)
    assert sizes(kept_s + 1, state) == (16, 0)
    assert sizes(kept_s, state) == (6, 10)


def test_a_return_that_is_requested_ends_with_less_slack() -> None:
    kept_s = STATE.safety_s + 20 * (216.0 + 0.4 * 360.0)
    state = replace(STATE, spot_available=16, on_demand_machines=10, is_return_requested=True)
    assert sizes(kept_s - 215.0, state) == (16, 0)
    assert sizes(kept_s - 216.0, state) == (6, 10)
