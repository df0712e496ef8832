"""Save triggers, save costs and the lifetime histogram."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors, ConfigTypeError
from spotfit.model.failure_model import (
    AGE_BUCKET_EDGES_S,
    LifetimeHistogram,
    SaveCostEstimate,
    SaveTrigger,
    age_bucket,
    parse_save_trigger,
)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("auto", SaveTrigger(auto=True)),
        (" Auto ", SaveTrigger(auto=True)),
        ("10m", SaveTrigger(every_s=600.0)),
        ("1.5 h", SaveTrigger(every_s=5400.0)),
        (500, SaveTrigger(every_steps=500)),
        ("500 steps", SaveTrigger(every_steps=500)),
        ("1 step", SaveTrigger(every_steps=1)),
        ("epoch", SaveTrigger(epochs=True)),
        ("at_notice", SaveTrigger()),
        (["auto", "epoch"], SaveTrigger(auto=True, epochs=True)),
        (("10m", 500, "epoch"), SaveTrigger(every_s=600.0, every_steps=500, epochs=True)),
    ],
)
def test_every_accepts_the_documented_forms(every: Any, expected: SaveTrigger) -> None:
    assert parse_save_trigger(every) == expected


def test_max_overhead_is_a_limit_only_if_the_user_sets_it() -> None:
    assert parse_save_trigger("auto").max_overhead is None
    assert parse_save_trigger("auto", max_overhead=0.1).max_overhead == 0.1


@pytest.mark.parametrize(
    ("every", "message"),
    [
        ("auot", "Did you mean 'auto'"),
        ("10 parsecs", "not a valid duration"),
        ("0s", "must be > 0"),
        ("500", "without quotes for steps"),
        (0, "number of steps must be >= 1"),
        (-3, "number of steps must be >= 1"),
        ([], "empty"),
        ("", "is not a duration"),
        ("-5m", "is not a duration"),
        (["auto", "10m"], "chooses the interval itself"),
        (["10m", "5m"], "a duration more than once"),
    ],
)
def test_an_invalid_every_raises_with_a_remedy(every: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_save_trigger(every)
    assert error.value.do


def test_every_accepts_a_timedelta() -> None:
    assert parse_save_trigger(timedelta(minutes=7)) == parse_save_trigger("7m")
    with pytest.raises(ConfigError, match="must be > 0"):
        parse_save_trigger(timedelta())


@pytest.mark.parametrize("every", [None, 2.5, True, {"steps": 5}])
def test_every_of_another_type_raises_config_type_error(every: Any) -> None:
    with pytest.raises(ConfigTypeError, match="must be an int, a str or a timedelta"):
        parse_save_trigger(every)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan"), "3%", True])
def test_max_overhead_must_be_between_0_and_1(share: Any) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        parse_save_trigger("auto", max_overhead=share)


def test_all_invalid_conditions_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as errors:
        parse_save_trigger(["auot", 0, "7"], max_overhead=3.5)
    assert len(errors.value.errors) == 4


def test_the_cost_of_a_save_is_stall_plus_slowdown() -> None:
    assert (
        SaveCostEstimate(stall_s=0.5, slowdown_fraction=0.3, commit_s=20.0).cost_per_save_s == 6.5
    )


def test_age_bucket_edges_belong_to_the_next_bucket() -> None:
    assert [age_bucket(edge) for edge in (0.0, *AGE_BUCKET_EDGES_S)] == [0, 1, 2, 3, 4]
    assert age_bucket(599.9) == 0


def test_a_lifetime_adds_exposure_to_every_bucket_it_spans() -> None:
    lifetimes = LifetimeHistogram().with_end(2000.0, saved_in_time=False)
    assert lifetimes.observed_s == (600.0, 1200.0, 200.0, 0.0, 0.0)
    assert lifetimes.end_counts == (0, 0, 1, 0, 0)
    assert (lifetimes.total_count, lifetimes.announced_count) == (1, 0)


def test_an_end_before_the_training_is_never_announced_in_time() -> None:
    lifetimes = LifetimeHistogram().with_end(60.0, saved_in_time=False, was_training=False)
    assert (lifetimes.total_count, lifetimes.announced_count, lifetimes.untrained_count) == (
        1,
        0,
        1,
    )
    assert lifetimes.observed_s[0] == 60.0, "it counts as a loss"


def test_a_running_group_adds_exposure_without_an_end() -> None:
    lifetimes = LifetimeHistogram().with_end(60.0, saved_in_time=True).with_observed(40.0)
    assert lifetimes.observed_s[0] == 100.0
    assert (lifetimes.total_count, lifetimes.announced_count) == (1, 1)
