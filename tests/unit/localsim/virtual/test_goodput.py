"""Goodput: a group on a recorded market keeps nearly all that could be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.model.failure_model import FailureModel, MarketPrior
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.traces import CapacityTrace, read_trace
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
from tests.house.tree import BENCHMARKS

SETTING = GoodputConfig(notice_s=30.0)
ZONE = CapacityTrace(
    "zone", ((0.0, 4), (6000.0, 3), (9000.0, 4), (9600.0, 0)), sampling_interval_s=600.0
)


def test_changes_come_at_any_time_inside_their_tick() -> None:
    for seed in range(20):
        first, second = group_lifetimes(ZONE, 4, stream=SeededStreams(seed).stream("market"))
        assert 5400.0 < first.duration_s <= 6000.0
        assert 0.0 < second.duration_s < 1200.0


def test_whose_end_nobody_saw_is_left_out() -> None:
    assert (
        len(
            group_lifetimes(
                CapacityTrace("zone", ((0.0, 1),)), 1, stream=SeededStreams(1).stream("market")
            )
        )
        == 0
    )


def test_what_is_not_committed_is_lost_without_notice() -> None:
    group = simulate_lifetime(GroupLifetime(60.0 + 300.0 + 20.0), SETTING, fixed_interval(300.0))
    assert group.committed_work_s == 0.0  # half a second too early for the first save
    group = simulate_lifetime(GroupLifetime(60.0 + 300.0 + 20.5), SETTING, fixed_interval(300.0))
    assert group.committed_work_s == 300.0


def test_a_notice_saves_all_but_the_last_seconds() -> None:
    group = simulate_lifetime(GroupLifetime(3660.0, has_notice=True), SETTING, fixed_interval(1e9))
    assert 3600.0 - 18.0 < group.committed_work_s < 3600.0 - 10.0


def test_an_interval_may_depend_on_the_age() -> None:
    group = simulate_lifetime(
        GroupLifetime(60.0 + 2000.0), SETTING, interval_by_age((100.0, 1e9, 1e9, 1e9, 1e9))
    )
    assert group.committed_work_s == pytest.approx(6 * (100.0 - 6.5) + 6.5), (
        "none after ten minutes"
    )


def test_each_life_counts_as_it_would_announced_and_as_it_would_not() -> None:
    life, pace = GroupLifetime(3660.0), fixed_interval(1e9)
    sure = goodput([life], replace(SETTING, noticed_fraction=1.0), pace)
    assert goodput([life], SETTING, pace) == 0.0
    assert goodput([life], replace(SETTING, noticed_fraction=0.25), pace) == pytest.approx(sure / 4)


def test_a_life_too_short_to_begin_keeps_nothing() -> None:
    assert (
        simulate_lifetime(
            GroupLifetime(59.0, has_notice=True), SETTING, fixed_interval(60.0)
        ).committed_work_s
        == 0.0
    )


def test_steps_are_slower_while_a_save_is_on_its_way() -> None:
    group = GroupSimulation(GroupLifetime(1000.0), SETTING)
    group.save(20.0)
    group.train(60.0 + 0.5 + 30.0)
    assert group.work_s == pytest.approx(20.0 * 0.7 + 10.0)


@pytest.mark.parametrize(("honoured", "at_most"), [(0.0, 0.06), (0.9, 0.02)])
def test_ours_is_close_to_who_knew_all_and_to_the_best_interval(
    honoured: float, at_most: float
) -> None:
    trace = read_trace(BENCHMARKS / "traces" / "gcp_h100x1_16_us-central1-a.json")
    history = group_lifetimes(
        trace,
        trace.max_capacity,
        noticed_fraction=honoured,
        stream=SeededStreams(1).stream(trace.name),
    )
    odds = FailureModel(
        market_prior=MarketPrior(notice_s=30.0 if honoured else 0.0), num_nodes=trace.max_capacity
    )
    setting = replace(SETTING, noticed_fraction=honoured)
    ours = goodput(history, setting, ProductionPolicy(odds))
    best = max(goodput(history, setting, fixed_interval(60.0 * 2**n)) for n in range(7))
    assert oracle_goodput(history, setting) - ours <= at_most
    assert best - ours <= 0.005
