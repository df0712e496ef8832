"""Cadence: when the next checkpoint is due, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.model.cadence import Cadence, Costs, Endings, Market, Odds, parse_cadence
from spotfit.policy.cadence import (
    FIRST_S,
    LOOK_S,
    Hold,
    Moment,
    Outlook,
    Save,
    best_interval,
    judge,
    look_every_s,
    outlook,
    steps_to_look,
)

COSTS = Costs(stall_s=0.5, slowdown=0.3, commit_s=20.0)
HOURS = 3600.0
AHEAD = Outlook(life_s=2 * HOURS, announced=0.0)
AUTO = Cadence(auto=True)


def at(now: float, **given: Any) -> Moment:
    """Training began at 0 with step 0; by now it has made a step a second."""
    usual: dict[str, Any] = {"step": int(now), "saved_at": 0.0, "saved_step": 0}
    return Moment(now, **{**usual, **given})


def every_s(costs: Costs, ahead: Outlook, max_overhead: float = 0.035) -> float:
    return best_interval(costs, ahead, max_overhead=max_overhead).every_s


# --- the formula -----------------------------------------------------------------------------


def test_without_notice_it_is_the_root_of_twice_cost_times_life() -> None:
    assert every_s(COSTS, AHEAD) == pytest.approx(math.sqrt(2 * 6.5 * 7200))


def test_announced_ends_need_no_saves_before_them() -> None:
    told = Outlook(2 * HOURS, announced=0.9)
    assert every_s(COSTS, told) == pytest.approx(every_s(COSTS, AHEAD) * math.sqrt(10))


def test_no_share_of_announced_ends_makes_it_infinite() -> None:
    assert math.isfinite(every_s(COSTS, Outlook(2 * HOURS, announced=1.0)))


@given(
    stall_s=st.floats(0.001, 10),
    slowdown=st.floats(0, 0.9),
    commit_s=st.floats(0.1, 600),
    life_s=st.floats(60, 1e6),
    announced=st.floats(0, 1),
    max_overhead=st.floats(0.001, 0.5),
)
def test_saves_never_cost_more_than_the_user_allows_unless_commits_take_longer(
    stall_s: float,
    slowdown: float,
    commit_s: float,
    life_s: float,
    announced: float,
    max_overhead: float,
) -> None:
    costs = Costs(stall_s, slowdown, commit_s)
    best = best_interval(costs, Outlook(life_s, announced), max_overhead=max_overhead)
    assert best.every_s >= commit_s
    assert costs.each_s / best.every_s <= max_overhead * 1.000001 or best.every_s == (
        stall_s + commit_s
    )


def test_the_largest_overhead_holds_when_ends_are_frequent() -> None:
    best = best_interval(COSTS, Outlook(600.0, 0.0), max_overhead=0.035)
    assert best.every_s == pytest.approx(6.5 / 0.035)
    assert "3.5%" in best.why


def test_where_the_root_is_below_the_commit_the_next_save_begins_at_the_commit() -> None:
    slow = Costs(stall_s=0.1, slowdown=0.01, commit_s=300.0)
    best = best_interval(slow, Outlook(1800.0, 0.0), max_overhead=0.035)
    assert best.every_s == pytest.approx(300.1)
    assert "begins when the last is committed" in best.why


def test_the_reason_names_what_it_was_found_from() -> None:
    why = best_interval(COSTS, Outlook(2 * HOURS, 0.9), max_overhead=0.035).why
    assert why == (
        "a save costs 6.50 s (0.50 s standing still, 30% slower for 20 s); "
        "the group is lost every 2.0 h, 90% of that announced in time"
    )


# --- what is to be expected ------------------------------------------------------------------


def seen(*lives_s: float, **given: Any) -> Odds:
    """Groups of one machine, each lost after so long without a word."""
    endings = Endings()
    for life_s in lives_s:
        endings = endings.with_end(life_s, saved=False)
    return Odds(**{"market": Market(life_s=4 * HOURS), "endings": endings, **given})


def test_before_anything_is_seen_the_backends_word_holds() -> None:
    ahead = outlook(seen(), lived_s=0.0)
    assert ahead.life_s == pytest.approx(4 * HOURS)
    assert ahead.announced == 0.0


def test_many_machines_are_lost_sooner_than_one_but_not_each_for_itself() -> None:
    assert outlook(seen(machines=16), lived_s=0.0).life_s == pytest.approx(1 * HOURS)


def test_what_is_seen_soon_outweighs_the_backends_word() -> None:
    often = seen(*[0.1 * HOURS] * 20)
    assert outlook(often, lived_s=0.0).life_s == pytest.approx(0.1 * HOURS, rel=0.4)


def test_a_group_that_lives_on_is_ever_less_likely_to_be_lost() -> None:
    lives = [outlook(seen(), lived_s=hours * HOURS).life_s for hours in (0, 1, 5, 50)]
    assert lives == sorted(lives)
    assert lives[-1] > 5 * lives[0]


def test_a_group_is_no_younger_for_having_changed_its_size() -> None:
    assert outlook(seen(age_s=5 * HOURS), lived_s=60.0) == outlook(seen(), lived_s=5 * HOURS + 60.0)


def test_where_the_young_are_lost_saves_are_frequent_while_it_is_young() -> None:
    odds = seen(*[300.0, 5 * HOURS] * 20)
    young, old = (outlook(odds, lived_s=lived_s) for lived_s in (60.0, 3 * HOURS))
    assert every_s(COSTS, young, 0.5) < every_s(COSTS, old, 0.5) / 2


def test_notices_are_believed_as_far_as_they_are_honoured() -> None:
    announcing = Market(4 * HOURS, notice_s=30.0)
    assert outlook(seen(market=announcing), lived_s=0.0).announced == pytest.approx(0.9)
    let_down = seen(*[600.0] * 18, market=announcing)
    assert outlook(let_down, lived_s=0.0).announced == pytest.approx(0.09)


def test_a_notice_too_short_for_a_save_is_none() -> None:
    short = seen(market=Market(4 * HOURS, notice_s=30.0))
    assert outlook(short, lived_s=0.0, last_save_s=29.0).announced == pytest.approx(0.9)
    assert outlook(short, lived_s=0.0, last_save_s=31.0).announced == 0.0


# --- the verdict -----------------------------------------------------------------------------


def test_auto_waits_for_the_interval_then_saves() -> None:
    due = every_s(COSTS, AHEAD)
    held = judge(AUTO, at(due - 1), costs=COSTS, ahead=AHEAD)
    assert isinstance(held, Hold)
    assert held.until == pytest.approx(due)
    assert isinstance(judge(AUTO, at(due + 1), costs=COSTS, ahead=AHEAD), Save)


def test_the_first_save_comes_early_and_measures() -> None:
    held = judge(AUTO, at(FIRST_S - 1), costs=None, ahead=AHEAD)
    assert isinstance(held, Hold)
    assert "to measure" in held.why
    assert isinstance(judge(AUTO, at(FIRST_S), costs=None, ahead=AHEAD), Save)


def test_auto_begins_no_save_while_one_is_on_its_way() -> None:
    held = judge(AUTO, at(9999.0, in_flight=1), costs=COSTS, ahead=AHEAD)
    assert held == Hold(9999.0, "the last save is still on its way")


def test_every_so_many_minutes_or_steps_whichever_is_first() -> None:
    wish = parse_cadence(["10m", 500])
    assert isinstance(judge(wish, at(499.0), costs=None, ahead=None), Hold)
    assert judge(wish, at(499.0, step=500), costs=None, ahead=None) == Save(
        "500 steps since the last save"
    )
    by_time = judge(wish, at(600.0, step=60), costs=None, ahead=None)
    assert isinstance(by_time, Save)
    assert "as the user wants" in by_time.why


def test_the_end_of_an_epoch_is_saved_once() -> None:
    wish = parse_cadence("epoch")
    ended = at(50.0, epoch_ended=True)
    assert judge(wish, ended, costs=None, ahead=None) == Save("an epoch has ended")
    saved = at(50.0, epoch_ended=True, saved_step=50)
    assert isinstance(judge(wish, saved, costs=None, ahead=None), Hold)


def test_at_notice_means_only_then() -> None:
    held = judge(parse_cadence("at_notice"), at(1e6), costs=COSTS, ahead=AHEAD)
    assert isinstance(held, Hold)
    assert held.until == math.inf


def test_without_room_for_a_snapshot_nothing_begins_and_the_reason_is_told() -> None:
    full = at(700.0, in_flight=2, room=False)
    held = judge(parse_cadence("10m"), full, costs=None, ahead=None)
    assert held == Hold(700.0, "2 saves are on their way, and hold all the room")


# --- in danger -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["auto", "at_notice", "10m", 10**6, "epoch"])
def test_in_danger_one_is_saved_whatever_is_set(every: Any) -> None:
    cadence = parse_cadence(every)
    calm = judge(cadence, at(20.0), costs=COSTS, ahead=AHEAD)
    assert isinstance(calm, Hold)
    told = judge(cadence, at(20.0, advised="higher risk"), costs=COSTS, ahead=AHEAD)
    assert told == Save("higher risk; saving soon is wise")


@pytest.mark.parametrize(
    "moment",
    [
        at(20.0, advised="x", saved_step=20),
        at(20.0, advised="x", in_flight=1),
        at(20.0, advised="x", room=False),
        at(6.0, advised="x"),
    ],
    ids=["all is saved", "a save is on its way", "no room", "less is unsaved than a save costs"],
)
def test_in_danger_nothing_is_saved_in_vain(moment: Moment) -> None:
    verdict = judge(parse_cadence("at_notice"), moment, costs=COSTS, ahead=AHEAD)
    assert isinstance(verdict, Hold)


# --- when all ranks look -------------------------------------------------------------------------


def test_looks_are_as_near_as_is_cheap() -> None:
    assert look_every_s(0.0) == 0.25
    assert look_every_s(0.001) == pytest.approx(1.0)
    assert look_every_s(1.0) == LOOK_S


def test_the_next_look_comes_as_soon_as_steps_are_fast() -> None:
    assert steps_to_look(100, 1.0, within_s=1.0) == 100
    assert steps_to_look(100, 4.0, within_s=1.0) == 25
    assert steps_to_look(1, 60.0, within_s=1.0) == 1


@given(st.integers(1, 10**6), st.floats(0, 1e4), st.floats(0, 2))
def test_nobody_trusts_in_fast_steps_for_much_longer_than_they_lasted(
    done: int, passed_s: float, within_s: float
) -> None:
    assert 1 <= steps_to_look(done, passed_s, within_s=within_s) <= max(done + 1, 1.5 * done)
