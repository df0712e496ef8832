"""The checkpoint interval: lifetime estimate, optimal interval and save decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.model.failure_model import (
    FailureModel,
    LifetimeHistogram,
    MarketPrior,
    SaveCostEstimate,
    SaveTrigger,
    parse_save_trigger,
)
from spotfit.policy.checkpoint_interval import (
    FIRST_SAVE_S,
    MAX_CHECK_INTERVAL_S,
    LifetimeEstimate,
    SaveLater,
    SaveNow,
    TrainingProgress,
    check_interval_s,
    decide_save,
    estimate_lifetime,
    optimal_interval,
    steps_until_check,
)

COSTS = SaveCostEstimate(stall_s=0.5, slowdown_fraction=0.3, commit_s=20.0)
HOURS = 3600.0
AHEAD = LifetimeEstimate(mean_remaining_s=2 * HOURS, announced_fraction=0.0)
AUTO = SaveTrigger(auto=True)


def progress_at(now: float, **fields: Any) -> TrainingProgress:
    """Progress of a training that started at time 0 with one step per second."""
    defaults: dict[str, Any] = {"step": int(now), "last_save_at": 0.0, "last_save_step": 0}
    return TrainingProgress(now, **{**defaults, **fields})


def interval_s(
    costs: SaveCostEstimate, ahead: LifetimeEstimate, max_overhead: float | None = None
) -> float:
    return optimal_interval(costs, ahead, max_overhead=max_overhead).interval_s


# --- optimal interval ----------------------------------------------------------------------------


def test_without_notice_the_interval_is_young_daly() -> None:
    assert interval_s(COSTS, AHEAD) == pytest.approx(math.sqrt(2 * 6.5 * 7200))


def test_announced_ends_do_not_shorten_the_interval() -> None:
    message = LifetimeEstimate(2 * HOURS, announced_fraction=0.9)
    assert interval_s(COSTS, message) == pytest.approx(interval_s(COSTS, AHEAD) * math.sqrt(10))


def test_the_interval_is_finite_if_all_ends_are_announced() -> None:
    assert math.isfinite(interval_s(COSTS, LifetimeEstimate(2 * HOURS, announced_fraction=1.0)))


@given(
    stall_s=st.floats(0.001, 10),
    slowdown=st.floats(0, 0.9),
    commit_s=st.floats(0.1, 600),
    lifetime_s=st.floats(60, 1e6),
    announced=st.floats(0, 1),
    max_overhead=st.floats(0.001, 0.5),
)
def test_max_overhead_bounds_the_interval_unless_commits_take_longer(
    stall_s: float,
    slowdown: float,
    commit_s: float,
    lifetime_s: float,
    announced: float,
    max_overhead: float,
) -> None:
    costs = SaveCostEstimate(stall_s=stall_s, slowdown_fraction=slowdown, commit_s=commit_s)
    best = optimal_interval(
        costs, LifetimeEstimate(lifetime_s, announced), max_overhead=max_overhead
    )
    assert best.interval_s >= commit_s
    assert (
        costs.cost_per_save_s / best.interval_s <= max_overhead * 1.000001
        or best.interval_s == (stall_s + commit_s)
    )


def test_max_overhead_holds_for_frequent_ends() -> None:
    best = optimal_interval(COSTS, LifetimeEstimate(600.0, 0.0), max_overhead=0.035)
    assert best.interval_s == pytest.approx(6.5 / 0.035)
    assert best.reason.endswith("; more frequent saves would exceed max_overhead=3.5%")


def test_observed_losses_are_worth_more_than_3_5_percent_of_the_time() -> None:
    best = optimal_interval(COSTS, LifetimeEstimate(600.0, 0.0), max_overhead=None)
    assert best.interval_s == pytest.approx(math.sqrt(2 * 6.5 * 600.0))
    assert best.reason.endswith("the group is lost every 10.0 min")


def test_a_declared_lifetime_is_not_worth_more_than_3_5_percent_of_the_time() -> None:
    declared = LifetimeEstimate(600.0, 0.0, has_losses=False)
    best = optimal_interval(COSTS, declared, max_overhead=None)
    assert best.interval_s == pytest.approx(6.5 / 0.035)
    assert best.reason.endswith("; no loss was observed, so saves take at most 3.5% of the time")


def test_an_optimum_below_the_commit_time_saves_back_to_back() -> None:
    slow = SaveCostEstimate(stall_s=0.1, slowdown_fraction=0.01, commit_s=300.0)
    best = optimal_interval(slow, LifetimeEstimate(1800.0, 0.0), max_overhead=0.035)
    assert best.interval_s == pytest.approx(300.1)
    assert "starts when the last is committed" in best.reason


def test_the_reason_contains_costs_and_lifetime() -> None:
    why = optimal_interval(COSTS, LifetimeEstimate(2 * HOURS, 0.9), max_overhead=0.035).reason
    assert why == (
        "a save costs 6.50 s (0.50 s stall, 30% slower for 20 s); "
        "the group is lost every 2.0 h, 90% of losses are announced in time"
    )


# --- lifetime estimate ---------------------------------------------------------------------------


def observed_lifetimes(*lifetimes_s: float, **fields: Any) -> FailureModel:
    """Groups of one machine, each lost unannounced after one of the lifetimes."""
    lifetimes = LifetimeHistogram()
    for lifetime_s in lifetimes_s:
        lifetimes = lifetimes.with_end(lifetime_s, saved_in_time=False)
    return FailureModel(
        **{"market_prior": MarketPrior(mean_lifetime_s=4 * HOURS), "lifetimes": lifetimes, **fields}
    )


def test_without_observations_the_backends_lifetime_is_used() -> None:
    ahead = estimate_lifetime(observed_lifetimes(), round_age_s=0.0)
    assert ahead.mean_remaining_s == pytest.approx(4 * HOURS)
    assert ahead.announced_fraction == 0.0


def test_the_prior_lifetime_is_divided_by_the_root_of_the_nodes() -> None:
    assert estimate_lifetime(
        observed_lifetimes(num_nodes=16), round_age_s=0.0
    ).mean_remaining_s == pytest.approx(1 * HOURS)


def test_observations_soon_outweigh_the_prior() -> None:
    often = observed_lifetimes(*[0.1 * HOURS] * 20)
    assert estimate_lifetime(often, round_age_s=0.0).mean_remaining_s == pytest.approx(
        0.1 * HOURS, rel=0.4
    )


def test_a_surviving_group_has_a_growing_expected_lifetime() -> None:
    lifetimes_s = [
        estimate_lifetime(observed_lifetimes(), round_age_s=hours * HOURS).mean_remaining_s
        for hours in (0, 1, 5, 50)
    ]
    assert lifetimes_s == sorted(lifetimes_s)
    assert lifetimes_s[-1] > 5 * lifetimes_s[0]


def test_a_resize_does_not_reset_the_group_age() -> None:
    assert estimate_lifetime(
        observed_lifetimes(group_age_s=5 * HOURS), round_age_s=60.0
    ) == estimate_lifetime(observed_lifetimes(), round_age_s=5 * HOURS + 60.0)


def test_frequent_early_losses_shorten_the_interval_of_young_groups() -> None:
    failure_model = observed_lifetimes(*[300.0, 5 * HOURS] * 20)
    young, old = (
        estimate_lifetime(failure_model, round_age_s=age_s) for age_s in (60.0, 3 * HOURS)
    )
    assert interval_s(COSTS, young, 0.5) < interval_s(COSTS, old, 0.5) / 2


def test_the_announced_fraction_is_learned() -> None:
    announcing = MarketPrior(mean_lifetime_s=4 * HOURS, notice_s=30.0)
    assert estimate_lifetime(
        observed_lifetimes(market_prior=announcing), round_age_s=0.0
    ).announced_fraction == pytest.approx(0.9)
    let_down = observed_lifetimes(*[600.0] * 18, market_prior=announcing)
    assert estimate_lifetime(let_down, round_age_s=0.0).announced_fraction == pytest.approx(0.09)


def test_only_observed_losses_are_known() -> None:
    assert not estimate_lifetime(observed_lifetimes(), round_age_s=9 * HOURS).has_losses
    assert estimate_lifetime(observed_lifetimes(600.0), round_age_s=0.0).has_losses


def test_ends_before_the_training_do_not_change_the_announced_fraction() -> None:
    announcing = MarketPrior(mean_lifetime_s=4 * HOURS, notice_s=120.0)
    lifetimes = LifetimeHistogram()
    for _ in range(20):
        lifetimes = lifetimes.with_end(40.0, saved_in_time=False, was_training=False)
    ahead = estimate_lifetime(
        FailureModel(market_prior=announcing, lifetimes=lifetimes), round_age_s=0.0
    )
    assert ahead.announced_fraction == pytest.approx(0.9)
    assert ahead.mean_remaining_s < 0.3 * HOURS, "they are losses all the same"


def test_a_notice_shorter_than_a_save_is_ignored() -> None:
    short = observed_lifetimes(market_prior=MarketPrior(mean_lifetime_s=4 * HOURS, notice_s=30.0))
    assert estimate_lifetime(
        short, round_age_s=0.0, notice_save_s=29.0
    ).announced_fraction == pytest.approx(0.9)
    assert estimate_lifetime(short, round_age_s=0.0, notice_save_s=31.0).announced_fraction == 0.0


# --- decisions -----------------------------------------------------------------------------------


def test_auto_saves_after_the_interval() -> None:
    due = interval_s(COSTS, AHEAD)
    held = decide_save(AUTO, progress_at(due - 1), costs=COSTS, lifetime=AHEAD)
    assert isinstance(held, SaveLater)
    assert held.until == pytest.approx(due)
    assert isinstance(decide_save(AUTO, progress_at(due + 1), costs=COSTS, lifetime=AHEAD), SaveNow)


def test_the_first_save_is_early_and_measures() -> None:
    held = decide_save(AUTO, progress_at(FIRST_SAVE_S - 1), costs=None, lifetime=AHEAD)
    assert isinstance(held, SaveLater)
    assert "which measures" in held.reason
    assert isinstance(
        decide_save(AUTO, progress_at(FIRST_SAVE_S), costs=None, lifetime=AHEAD), SaveNow
    )


def test_auto_starts_no_save_while_one_is_in_flight() -> None:
    held = decide_save(AUTO, progress_at(9999.0, saves_in_flight=1), costs=COSTS, lifetime=AHEAD)
    assert held == SaveLater(9999.0, "the last save is still in flight")


def test_duration_and_steps_trigger_whichever_is_first() -> None:
    trigger = parse_save_trigger(["10m", 500])
    assert isinstance(
        decide_save(trigger, progress_at(499.0), costs=None, lifetime=None), SaveLater
    )
    assert decide_save(trigger, progress_at(499.0, step=500), costs=None, lifetime=None) == SaveNow(
        "500 steps since the last save"
    )
    by_time = decide_save(trigger, progress_at(600.0, step=60), costs=None, lifetime=None)
    assert isinstance(by_time, SaveNow)
    assert "set by the user" in by_time.reason


def test_the_end_of_an_epoch_is_saved_once() -> None:
    trigger = parse_save_trigger("epoch")
    ended = progress_at(50.0, epoch_ended=True)
    assert decide_save(trigger, ended, costs=None, lifetime=None) == SaveNow("an epoch has ended")
    saved = progress_at(50.0, epoch_ended=True, last_save_step=50)
    assert isinstance(decide_save(trigger, saved, costs=None, lifetime=None), SaveLater)


def test_at_notice_never_saves_otherwise() -> None:
    held = decide_save(
        parse_save_trigger("at_notice"), progress_at(1e6), costs=COSTS, lifetime=AHEAD
    )
    assert isinstance(held, SaveLater)
    assert held.until == math.inf


def test_without_snapshot_memory_no_save_starts() -> None:
    full = progress_at(700.0, saves_in_flight=2, has_free_slot=False)
    held = decide_save(parse_save_trigger("10m"), full, costs=None, lifetime=None)
    assert held == SaveLater(700.0, "2 saves are in flight and use all snapshot memory")


# --- preemption risk -----------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["auto", "at_notice", "10m", 10**6, "epoch"])
def test_a_preemption_risk_triggers_a_save_with_every_trigger(every: Any) -> None:
    trigger = parse_save_trigger(every)
    without_risk = decide_save(trigger, progress_at(20.0), costs=COSTS, lifetime=AHEAD)
    assert isinstance(without_risk, SaveLater)
    message = decide_save(
        trigger, progress_at(20.0, preemption_risk="higher risk"), costs=COSTS, lifetime=AHEAD
    )
    assert message == SaveNow("elevated preemption risk: higher risk")


@pytest.mark.parametrize(
    "moment",
    [
        progress_at(20.0, preemption_risk="x", last_save_step=20),
        progress_at(20.0, preemption_risk="x", saves_in_flight=1),
        progress_at(20.0, preemption_risk="x", has_free_slot=False),
        progress_at(6.0, preemption_risk="x"),
    ],
    ids=["saved", "save in flight", "no memory", "little unsaved work"],
)
def test_a_preemption_risk_triggers_no_save_that_is_not_worth_its_costs(
    moment: TrainingProgress,
) -> None:
    decision = decide_save(parse_save_trigger("at_notice"), moment, costs=COSTS, lifetime=AHEAD)
    assert isinstance(decision, SaveLater)


# --- check interval ------------------------------------------------------------------------------


def test_the_check_interval_is_as_short_as_its_costs_allow() -> None:
    assert check_interval_s(0.0) == 0.25
    assert check_interval_s(0.001) == pytest.approx(1.0)
    assert check_interval_s(1.0) == MAX_CHECK_INTERVAL_S


def test_the_next_check_follows_the_step_rate() -> None:
    assert steps_until_check(100, 1.0, within_s=1.0) == 100
    assert steps_until_check(100, 4.0, within_s=1.0) == 25
    assert steps_until_check(1, 60.0, within_s=1.0) == 1


@given(st.integers(1, 10**6), st.floats(0, 1e4), st.floats(0, 2))
def test_a_fast_phase_extends_the_check_interval_only_gradually(
    done: int, passed_s: float, within_s: float
) -> None:
    assert 1 <= steps_until_check(done, passed_s, within_s=within_s) <= max(done + 1, 1.5 * done)
