"""Goodput: a group on a recorded market keeps nearly all that could be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.model.cadence import Market, Odds
from spotfit_localsim.dice import Dice
from spotfit_localsim.goodput import (
    Group,
    Life,
    Ours,
    Setting,
    by_age,
    clairvoyant,
    every,
    goodput,
    live,
    lives,
)
from spotfit_localsim.traces import Trace, read_trace
from tests.house.tree import BENCHMARKS

SETTING = Setting(notice_s=30.0)
ZONE = Trace("zone", ((0.0, 4), (6000.0, 3), (9000.0, 4), (9600.0, 0)), tick_s=600.0)


def test_changes_come_at_any_time_inside_their_tick() -> None:
    for seed in range(20):
        first, second = lives(ZONE, 4, stream=Dice(seed).stream("market"))
        assert 5400.0 < first.lasts_s <= 6000.0
        assert 0.0 < second.lasts_s < 1200.0


def test_whose_end_nobody_saw_is_left_out() -> None:
    assert len(lives(Trace("zone", ((0.0, 1),)), 1, stream=Dice(1).stream("market"))) == 0


def test_what_is_not_committed_is_lost_without_notice() -> None:
    group = live(Life(60.0 + 300.0 + 20.0), SETTING, every(300.0))
    assert group.committed == 0.0  # half a second too early for the first save
    group = live(Life(60.0 + 300.0 + 20.5), SETTING, every(300.0))
    assert group.committed == 300.0


def test_a_notice_saves_all_but_the_last_seconds() -> None:
    group = live(Life(3660.0, announced=True), SETTING, every(1e9))
    assert 3600.0 - 18.0 < group.committed < 3600.0 - 10.0


def test_an_interval_may_depend_on_the_age() -> None:
    group = live(Life(60.0 + 2000.0), SETTING, by_age((100.0, 1e9, 1e9, 1e9, 1e9)))
    assert group.committed == pytest.approx(6 * (100.0 - 6.5) + 6.5), "none after ten minutes"


def test_each_life_counts_as_it_would_announced_and_as_it_would_not() -> None:
    life, pace = Life(3660.0), every(1e9)
    sure = goodput([life], replace(SETTING, honoured=1.0), pace)
    assert goodput([life], SETTING, pace) == 0.0
    assert goodput([life], replace(SETTING, honoured=0.25), pace) == pytest.approx(sure / 4)


def test_a_life_too_short_to_begin_keeps_nothing() -> None:
    assert live(Life(59.0, announced=True), SETTING, every(60.0)).committed == 0.0


def test_steps_are_slower_while_a_save_is_on_its_way() -> None:
    group = Group(Life(1000.0), SETTING)
    group.save(20.0)
    group.train(60.0 + 0.5 + 30.0)
    assert group.work == pytest.approx(20.0 * 0.7 + 10.0)


@pytest.mark.parametrize(("honoured", "at_most"), [(0.0, 0.06), (0.9, 0.02)])
def test_ours_is_close_to_who_knew_all_and_to_the_best_interval(
    honoured: float, at_most: float
) -> None:
    trace = read_trace(BENCHMARKS / "traces" / "gcp_h100x1_16_us-central1-a.json")
    history = lives(trace, trace.most, honoured=honoured, stream=Dice(1).stream(trace.name))
    odds = Odds(Market(notice_s=30.0 if honoured else 0.0), machines=trace.most)
    setting = replace(SETTING, honoured=honoured)
    ours = goodput(history, setting, Ours(odds))
    best = max(goodput(history, setting, every(60.0 * 2**n)) for n in range(7))
    assert clairvoyant(history, setting) - ours <= at_most
    assert best - ours <= 0.005
