"""Goodput of a group on a recorded market, compared with the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.model.failure_model import FailureModel, MarketPrior
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import BUNDLED_RECORDINGS, CapacityTrace, read_trace
from spotfit_localsim.virtual.goodput import (
    GoodputConfig,
    GroupLifetime,
    GroupSimulation,
    ProductionPolicy,
    fixed_interval,
    goodput,
    group_lifetimes,
    interval_by_age,
    oracle_goodput,
    simulate_lifetime,
)

CONFIG = GoodputConfig(notice_s=30.0)
ZONE = CapacityTrace(
    "zone", ((0.0, 4), (6000.0, 3), (9000.0, 4), (9600.0, 0)), sampling_interval_s=600.0
)


def test_capacity_changes_are_distributed_over_their_sampling_interval() -> None:
    for seed in range(20):
        first, second = group_lifetimes(ZONE, 4, stream=SeededStreams(seed).stream("market"))
        assert 5400.0 < first.duration_s <= 6000.0
        assert 0.0 < second.duration_s < 1200.0


def test_lifetime_without_an_observed_end_is_excluded() -> None:
    assert (
        len(
            group_lifetimes(
                CapacityTrace("zone", ((0.0, 1),)), 1, stream=SeededStreams(1).stream("market")
            )
        )
        == 0
    )


def test_uncommitted_work_is_lost_without_notice() -> None:
    group = simulate_lifetime(GroupLifetime(60.0 + 300.0 + 20.0), CONFIG, fixed_interval(300.0))
    assert group.committed_work_s == 0.0  # ends 0.5 s before the first commit
    group = simulate_lifetime(GroupLifetime(60.0 + 300.0 + 20.5), CONFIG, fixed_interval(300.0))
    assert group.committed_work_s == 300.0


def test_notice_loses_only_the_last_seconds() -> None:
    group = simulate_lifetime(GroupLifetime(3660.0, has_notice=True), CONFIG, fixed_interval(1e9))
    assert 3600.0 - 18.0 < group.committed_work_s < 3600.0 - 10.0


def test_interval_may_depend_on_the_age() -> None:
    group = simulate_lifetime(
        GroupLifetime(60.0 + 2000.0), CONFIG, interval_by_age((100.0, 1e9, 1e9, 1e9, 1e9))
    )
    assert group.committed_work_s == pytest.approx(6 * (100.0 - 6.5) + 6.5), (
        "no save after ten minutes"
    )


def test_goodput_is_weighted_by_the_noticed_fraction() -> None:
    lifetime, save_policy = GroupLifetime(3660.0), fixed_interval(1e9)
    with_notice = goodput([lifetime], replace(CONFIG, noticed_fraction=1.0), save_policy)
    assert goodput([lifetime], CONFIG, save_policy) == 0.0
    assert goodput(
        [lifetime], replace(CONFIG, noticed_fraction=0.25), save_policy
    ) == pytest.approx(with_notice / 4)


def test_lifetime_shorter_than_the_start_commits_nothing() -> None:
    assert (
        simulate_lifetime(
            GroupLifetime(59.0, has_notice=True), CONFIG, fixed_interval(60.0)
        ).committed_work_s
        == 0.0
    )


def test_steps_are_slower_during_an_upload() -> None:
    group = GroupSimulation(GroupLifetime(1000.0), CONFIG)
    group.save(20.0)
    group.train(60.0 + 0.5 + 30.0)
    assert group.work_s == pytest.approx(20.0 * 0.7 + 10.0)


@pytest.mark.parametrize(("noticed_fraction", "max_difference"), [(0.0, 0.06), (0.9, 0.02)])
def test_production_policy_is_close_to_the_oracle_and_the_best_interval(
    noticed_fraction: float, max_difference: float
) -> None:
    trace = read_trace(BUNDLED_RECORDINGS / "gcp_h100x1_16_us-central1-a.json")
    history = group_lifetimes(
        trace,
        trace.max_capacity,
        noticed_fraction=noticed_fraction,
        stream=SeededStreams(1).stream(trace.name),
    )
    failure_model = FailureModel(
        market_prior=MarketPrior(notice_s=30.0 if noticed_fraction else 0.0),
        num_nodes=trace.max_capacity,
    )
    config = replace(CONFIG, noticed_fraction=noticed_fraction)
    production = goodput(history, config, ProductionPolicy(failure_model))
    best_interval = max(goodput(history, config, fixed_interval(60.0 * 2**n)) for n in range(7))
    assert oracle_goodput(history, config) - production <= max_difference
    assert best_interval - production <= 0.005


def test_the_policy_learns_a_notice_only_where_it_was_saved() -> None:
    noticed = [GroupLifetime(3660.0, has_notice=True)]
    failure_model = FailureModel(market_prior=MarketPrior(notice_s=30.0))
    in_time, too_late = ProductionPolicy(failure_model), ProductionPolicy(failure_model)
    goodput(noticed, replace(CONFIG, noticed_fraction=1.0), in_time)
    goodput(noticed, replace(CONFIG, noticed_fraction=1.0, final_upload_s=60.0), too_late)
    assert in_time.failure_model.lifetimes.announced_count == 1
    assert too_late.failure_model.lifetimes.announced_count == 0
    untrained = ProductionPolicy(failure_model)
    goodput([GroupLifetime(50.0, has_notice=True)], CONFIG, untrained)
    assert untrained.failure_model.lifetimes.untrained_count == 1


def test_many_saves_at_one_interval_are_computed_like_single_ones() -> None:
    group = GroupSimulation(GroupLifetime(2000.0), CONFIG)
    single = GroupSimulation(GroupLifetime(2000.0), CONFIG)
    for each in (group, single):
        each.train(160.0)
        each.save(20.0)
    group.repeat_save(100.0, 5)
    for _ in range(5):
        single.train(single.saved_at + 100.0)
        single.save(20.0)
    assert (group.committed_work_s, group.work_s, group.now, group.commit_due_at) == pytest.approx(
        (single.committed_work_s, single.work_s, single.now, single.commit_due_at)
    )
