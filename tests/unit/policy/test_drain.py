"""Drain: what is done with the time a notice leaves, and when the size changes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.cadence import Costs
from spotfit.model.events import Blame, RoundClosed, Taken
from spotfit.model.spec import Limits
from spotfit.model.view import View
from spotfit.model.watch import Copy, Watch
from spotfit.policy.actions import Wait
from spotfit.policy.drain import (
    UNKNOWN_NOTICE_S,
    LastChance,
    LetFinish,
    SaveLast,
    TooLate,
    TrainOn,
    last_words,
    leave_in_time,
    may_outlive,
    regroup,
    renew,
    save_at_notice,
)
from spotfit.testing.builders import (
    TOKEN,
    a_commit,
    a_group,
    a_last_life,
    a_member,
    a_notice,
    a_round,
    a_seat,
    a_spec,
    a_view,
    a_watch,
    an_agent,
    seats,
)

SPARE = Token("t-2")
NOTICED = 100.0
LEAVING = a_seat(1, notice=a_notice(seconds_left=60.0))
REPLACEMENT = a_seat(2, member=a_member(2, token=SPARE, node=0))


def noticed(*, saved: bool = False, **given: Any) -> View:
    """a1 has announced its end in slot 7; the replacement's group is granted."""
    usual: dict[str, Any] = {
        "round": a_round(),
        "notices": {an_agent(1): a_notice(seconds_left=60.0)},
        "noticed_slots": {an_agent(1): 7},
        "latest_committed_slot": 8 if saved else 6,
        "groups": {TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)},
    }
    return a_view(**{**usual, **given})


def seen(*some: Any) -> Watch:
    """The last commit was at 109.9."""
    return a_watch(
        seats=seats(a_seat(0), *some), committed_at=109.9, noticed_at={an_agent(1): NOTICED}
    )


def leaving(view: View, watch: Watch, now: float) -> RoundClosed | Wait | None:
    assert view.round is not None
    return leave_in_time(view, watch, view.round, now)


def test_without_a_notice_there_is_nothing_to_do() -> None:
    assert leaving(a_view(round=a_round()), a_watch(), NOTICED) is None


def test_a_notice_for_a_machine_without_a_place_changes_nothing() -> None:
    assert leaving(noticed(round=a_round(members=[a_member(0)])), seen(LEAVING), NOTICED) is None


@pytest.mark.parametrize(
    ("saved", "replaced", "now", "outcome"),
    [
        (False, False, 110.0, "1 machines leave in 50 s"),
        (True, False, 110.0, "1 machines leave in 50 s"),
        (False, True, 110.0, "1 machines leave in 50 s"),
        (True, True, 110.0, "saved after the notice, and replaced"),
        (True, True, 130.0, "replaced; changing over at the next save"),
        (True, True, 158.5, "saved after the notice, and replaced"),
        (False, False, 160.0, "the time the notice gave is over"),
    ],
    ids=[
        "neither",
        "saved",
        "replaced",
        "both",
        "both, but a while ago",
        "last chance",
        "too late",
    ],
)
def test_it_trains_on_until_saved_and_replaced_or_out_of_time(
    saved: bool, replaced: bool, now: float, outcome: str
) -> None:
    watch = seen(LEAVING, REPLACEMENT) if replaced else seen(LEAVING)
    verdict = leaving(noticed(saved=saved), watch, now)
    assert verdict is not None
    assert verdict.why == outcome
    if isinstance(verdict, RoundClosed):
        assert (verdict.number, verdict.blame) == (1, Blame.PREEMPTION)
        assert verdict.taken == Taken({"t-1/1": (1,)}, timed_out=outcome.startswith("the time"))
    else:
        assert verdict.until == (158.0 if "next save" in outcome else 160.0)


KEPT = a_round(members=[a_member(0, vault="a:9"), a_member(1, slots=2, vault="b:9")])


def copied(told_at: float, *, by: int = 0, steps: tuple[int, ...] = (9, 9)) -> dict[int, Copy]:
    """Of the ranks of a1, kept by that machine."""
    vault = KEPT.places[by].vault
    return {rank: Copy(step, vault, told_at) for rank, step in zip((1, 2), steps, strict=True)}


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, False),
        ({"taken_at": 105.5}, True),
        ({"taken_at": None}, True),
        ({"replaced_at": None}, True),
        ({"copies": copied(109.9)}, True),
    ],
    ids=["before", "since then", "a user's files", "nobody was told", "and all is copied"],
)
def test_a_commit_of_what_was_saved_before_the_replacement_came_is_no_occasion(
    given: dict[str, Any], changes: bool
) -> None:
    """It was long on its way, and what was trained since then can lie with a neighbour at once."""
    early: dict[str, Any] = {"taken_at": 101.0, "replaced_at": 105.0, **given}
    watch = replace(seen(LEAVING, REPLACEMENT), **early)
    verdict = leaving(noticed(round=KEPT, saved=True), watch, 110.0)
    assert isinstance(verdict, RoundClosed) == changes
    if isinstance(verdict, RoundClosed):
        assert verdict.why == "saved after the notice, and replaced"


NO_VAULT = a_round(members=[a_member(0), a_member(1, slots=2, vault="b:9")])
HUGE = (a_commit("c", size_bytes=30 * 2**30),)
"""Half of it is copied in 72 s."""


@pytest.mark.parametrize(
    "given",
    [
        {"round": NO_VAULT},
        {"round": a_round(members=[a_member(1, vault="b:9")])},
        {"spec": a_spec(limits=Limits(preemption_grace_s=30.0)), "left_s": 33.0},
        {"left_s": 3.0},
        {"checkpoints": HUGE},
    ],
    ids=["no vault", "nobody stays", "the machine goes before the grace", "no time", "too large"],
)
def test_where_nothing_later_will_be_copied_a_commit_is_what_there_is(
    given: dict[str, Any],
) -> None:
    left_s = given.pop("left_s", 50.0)
    view = noticed(**{"round": KEPT, "saved": True, **given})
    grace_s = view.spec.limits.preemption_grace_s if view.spec is not None else 0.0
    now = NOTICED + 60.0 + grace_s - left_s
    there = seen(LEAVING, REPLACEMENT)
    watch = replace(there, taken_at=99.0, replaced_at=100.5, committed_at=now)
    verdict = leaving(view, watch, now)
    assert isinstance(verdict, RoundClosed)
    assert verdict.why == "what was saved before the notice is committed, and replaced"


@pytest.mark.parametrize(
    ("copies", "changes"),
    [
        (copied(109.9), True),
        (copied(105.0), False),
        (copied(NOTICED - 1), False),
        (copied(109.9, by=1), False),
        (copied(109.9, steps=(9, 6)), False),
        ({1: copied(109.9)[1]}, False),
    ],
    ids=["fresh", "a while ago", "before the notice", "with who leaves", "torn", "a part missing"],
)
def test_what_lies_with_those_who_stay_need_not_be_committed(
    copies: dict[int, Copy], changes: bool
) -> None:
    """Else the change would wait for the bucket, though the next round begins from memory."""
    watch = replace(seen(LEAVING, REPLACEMENT), copies=copies)
    verdict = leaving(noticed(round=KEPT), watch, 110.0)
    assert isinstance(verdict, RoundClosed) == changes
    if isinstance(verdict, RoundClosed):
        assert verdict.safe
        assert verdict.blame is Blame.PREEMPTION


def test_a_notice_without_a_time_is_given_one() -> None:
    view = noticed(notices={an_agent(1): a_notice(seconds_left=None)})
    verdict = leaving(view, seen(LEAVING), NOTICED)
    assert isinstance(verdict, Wait)
    assert verdict.until == NOTICED + UNKNOWN_NOTICE_S


def test_the_grace_the_user_gave_comes_on_top() -> None:
    view = noticed(spec=a_spec(limits=Limits(preemption_grace_s=30.0)))
    verdict = leaving(view, seen(LEAVING), NOTICED)
    assert isinstance(verdict, Wait)
    assert verdict.until == 190.0


def test_the_first_to_go_sets_the_time() -> None:
    soon = a_seat(0, notice=a_notice(seconds_left=5.0))
    view = noticed(
        notices={
            an_agent(0): a_notice(seconds_left=5.0),
            an_agent(1): a_notice(seconds_left=60.0),
        },
        noticed_slots={an_agent(0): 7, an_agent(1): 7},
    )
    noticed_at = {an_agent(0): NOTICED, an_agent(1): NOTICED}
    verdict = leaving(view, a_watch(seats=seats(soon, LEAVING), noticed_at=noticed_at), NOTICED)
    assert isinstance(verdict, Wait)
    assert verdict.until == 105.0


def test_a_successor_counts_from_when_it_took_over() -> None:
    watch = a_watch(seats=seats(a_seat(0)), led_since=500.0)
    verdict = leaving(noticed(), watch, 500.0)
    assert isinstance(verdict, Wait)
    assert verdict.until == 560.0


def test_an_elastic_group_may_go_on_smaller_once_nobody_more_is_expected() -> None:
    elastic = a_spec(workers_min=1, workers_max=2)
    alone = noticed(saved=True, spec=elastic, groups={TOKEN: a_group()})
    smaller = leaving(alone, seen(LEAVING), 110.0)
    assert smaller == RoundClosed(1, Blame.RESIZE, "saved after the notice; 1 workers go on")
    coming = noticed(saved=True, spec=elastic)
    assert isinstance(leaving(coming, seen(LEAVING), 110.0), Wait)


# --- gone as announced, while others still save --------------------------------------------------

RELAXED = a_spec(relax_collectives=True)
PATIENT = a_spec(limits=Limits(preemption_grace_s=30.0))


def after(view: View, now: float, **seen: Any) -> RoundClosed | Wait | None:
    """a1's machine is gone; it was noticed at 100, to go in 60 s."""
    assert view.round is not None
    there = a_watch(
        seats=seats(a_seat(0)),
        gone={an_agent(1): 150.0},
        noticed_at={an_agent(1): NOTICED},
        **seen,
    )
    return last_words(view, there, view.round, now)


@pytest.mark.parametrize(
    ("view", "outlives"),
    [
        (noticed(spec=RELAXED), True),
        (noticed(spec=PATIENT), True),
        (noticed(), False),
        (noticed(spec=RELAXED, notices={}), False),
        (noticed(spec=RELAXED, round=a_round(members=[a_member(1), a_member(0)])), False),
    ],
    ids=["relaxed", "with grace", "by default", "not announced", "it has rank 0"],
)
def test_who_may_go_on_without_a_machine(view: View, outlives: bool) -> None:
    assert view.round is not None
    place = view.round.place_of(an_agent(1))
    assert place is not None
    assert may_outlive(view, place) == outlives


def test_while_everybody_is_here_there_are_no_last_words() -> None:
    view = noticed(spec=RELAXED)
    assert view.round is not None
    assert last_words(view, seen(LEAVING), view.round, 110.0) is None


def test_with_relaxed_collectives_those_who_stay_may_begin_to_save() -> None:
    waits = after(noticed(spec=RELAXED), 150.0)
    assert isinstance(waits, Wait)
    assert waits.until == 160.0
    over = after(noticed(spec=RELAXED), 160.0)
    assert isinstance(over, RoundClosed)
    assert (over.blame, over.taken) == (Blame.PREEMPTION, Taken({"t-1/1": (1,)}))


def test_once_they_have_saved_the_next_round_is_not_kept_waiting() -> None:
    assert isinstance(after(noticed(spec=RELAXED, saved=True), 150.0), RoundClosed)


@pytest.mark.parametrize(
    ("saving", "now", "waits"),
    [({0}, 150.0, True), ({0}, 189.9, True), ({0}, 190.0, False), ({0, 1}, 150.0, False)],
    ids=["under way", "grace", "grace is over", "the lost one has files, too"],
)
def test_what_they_can_finish_they_may_finish_within_the_grace(
    saving: set[int], now: float, waits: bool
) -> None:
    verdict = after(noticed(spec=PATIENT), now, saving=frozenset(saving))
    assert isinstance(verdict, Wait if waits else RoundClosed)


def test_with_nothing_to_finish_grace_is_not_waited_out() -> None:
    assert isinstance(after(noticed(spec=PATIENT), 150.0), RoundClosed)


# --- growing -------------------------------------------------------------------------------------

ELASTIC = a_spec(workers_min=1, workers_max=3, resize_every_s=30.0)
SMALL = a_round(members=[a_member(0)])


def growing(view: View, watch: Watch, now: float) -> RoundClosed | Wait | None:
    assert view.round is not None
    return regroup(view, watch, view.round, now)


def small(**given: Any) -> View:
    return a_view(**{"spec": ELASTIC, "round": SMALL, "latest_committed_slot": 9, **given})


@pytest.mark.parametrize(
    ("view", "watch"),
    [
        (small(spec=a_spec(workers_max=3)), a_watch()),
        (small(), a_watch(seats=seats(a_seat(0)))),
        (small(round=a_round(members=[a_member(0, slots=3)])), a_watch()),
    ],
    ids=["of fixed size", "nobody waits", "full"],
)
def test_who_does_not_grow(view: View, watch: Watch) -> None:
    assert growing(view, watch, 1000.0) is None


def test_it_grows_just_after_a_commit_and_not_too_often() -> None:
    early = growing(small(), a_watch(turned_at=990.0, committed_at=1000.0), 1000.0)
    assert isinstance(early, Wait)
    assert early.until == 1020.0
    due = growing(small(), a_watch(turned_at=970.0, committed_at=999.9), 1000.0)
    assert due == RoundClosed(1, Blame.RESIZE, "2 workers have a place, 1 are at work")


@pytest.mark.parametrize("committed_at", [None, 990.0])
def test_it_does_not_throw_away_steps_to_grow(committed_at: float | None) -> None:
    verdict = growing(small(), a_watch(committed_at=committed_at), 1000.0)
    assert isinstance(verdict, Wait)
    assert "growing after a commit" in verdict.why


def test_a_commit_of_the_round_before_is_no_occasion() -> None:
    view = small(next_slot=20, latest_committed_slot=9)
    assert isinstance(growing(view, a_watch(committed_at=999.5), 1000.0), Wait)


def test_a_look_at_every_moment_is_still_a_wait() -> None:
    eager = a_spec(workers_min=1, workers_max=3, resize_every_s=0.0)
    verdict = growing(small(spec=eager), a_watch(), 1000.0)
    assert isinstance(verdict, Wait)
    assert verdict.until == 1001.0


def test_a_range_of_one_size_is_elastic_and_full() -> None:
    only = a_spec(workers_min=2, workers_max=2, elastic=True)
    assert growing(small(spec=only, round=a_round()), a_watch(committed_at=999.9), 1000.0) is None


def test_it_does_not_grow_for_a_machine_that_is_still_importing() -> None:
    cold = a_watch(seats=seats(a_seat(0), a_seat(1, warm=False)), committed_at=999.9)
    assert growing(small(), cold, 1000.0) is None


def test_a_replacement_that_is_still_importing_is_not_changed_over_to() -> None:
    """The group trains on meanwhile: waiting here costs nothing, waiting there costs everybody."""
    cold = a_seat(2, member=a_member(2, token=SPARE, node=0), warm=False)
    verdict = leaving(noticed(saved=True), seen(LEAVING, cold), 110.0)
    assert isinstance(verdict, Wait)


# --- the save at a notice ------------------------------------------------------------------------

GIB = 2**30


def chance(left_s: float, **given: Any) -> LastChance:
    """1 GiB, which takes 13.1 s at 100 MiB/s with all that belongs to it, or 3.3 s to a peer."""
    usual: dict[str, Any] = {
        "unsaved_s": 30.0,
        "step_s": 0.5,
        "costs": Costs(stall_s=0.5, slowdown=0.3, commit_s=20.0),
        "size_bytes": GIB,
        "bucket_bytes_per_s": 100 * 2.0**20,
    }
    return LastChance(left_s, **{**usual, **given})


def test_with_time_to_spare_the_group_trains_on_and_saves_at_the_end() -> None:
    verdict = save_at_notice(chance(120.0))
    assert isinstance(verdict, TrainOn)
    assert verdict.for_s == pytest.approx(120 - (0.5 + 0.5 + 1.2 * 10.24 + 1.0) - 0.5)
    later = save_at_notice(chance(120.0 - verdict.for_s - 0.1))
    assert isinstance(later, SaveLast)
    assert later.way == "bucket"


def test_a_slow_step_shall_not_come_between_the_last_moment_and_the_save() -> None:
    """13.8 s are needed, and the next step may be one that takes 8 s."""
    slow = {"slow_step_s": 8.0}
    assert isinstance(save_at_notice(chance(22.0, **slow)), SaveLast)
    verdict = save_at_notice(chance(30.0, **slow))
    assert isinstance(verdict, TrainOn)
    assert verdict.for_s == pytest.approx(30 - (0.5 + 0.5 + 1.2 * 10.24 + 1.0) - 8.0)


def test_for_less_than_a_slow_step_is_not_saved_before_the_last_moment() -> None:
    assert isinstance(save_at_notice(chance(22.0, slow_step_s=8.0, unsaved_s=7.0)), TrainOn)
    assert isinstance(save_at_notice(chance(15.0, slow_step_s=8.0, unsaved_s=7.0)), SaveLast)


def test_much_that_is_unsaved_does_not_wait_for_the_end() -> None:
    assert isinstance(save_at_notice(chance(120.0, unsaved_s=651.0)), SaveLast)
    assert isinstance(save_at_notice(chance(120.0, unsaved_s=649.0)), TrainOn)


def test_once_the_replacement_stands_ready_it_is_saved_at_once() -> None:
    verdict = save_at_notice(chance(120.0, replaced=True))
    assert isinstance(verdict, SaveLast)
    assert "replacement stands ready" in verdict.why


def test_the_save_on_its_way_is_enough_for_a_replacement_that_waits() -> None:
    verdict = save_at_notice(chance(60.0, replaced=True, in_flight_s=0.5))
    assert isinstance(verdict, LetFinish)


BESIDE: dict[str, Any] = {
    "replaced": True,
    "in_flight_s": 30.0,
    "peer_bytes_per_s": 1000 * 2.0**20,
}
"""One is on its way; another takes 3.3 s to a peer."""


def test_a_change_does_not_wait_for_the_bucket_where_a_peer_can_have_more() -> None:
    verdict = save_at_notice(chance(60.0, **BESIDE, unsaved_s=3.5))
    assert isinstance(verdict, SaveLast)
    assert verdict.way == "peer"
    assert "3.50 s of work were done since the last save" in verdict.why


@pytest.mark.parametrize(
    ("left_s", "given"),
    [
        (60.0, {"unsaved_s": 3.0}),
        (60.0, {"room": False}),
        (60.0, {"peer_bytes_per_s": 0.0}),
        (3.0, {}),
    ],
    ids=["it is copied just now", "the training would wait", "nobody stays", "no time"],
)
def test_else_what_is_on_its_way_is_left_alone(left_s: float, given: dict[str, Any]) -> None:
    assert isinstance(save_at_notice(chance(left_s, **{**BESIDE, **given})), LetFinish)


def test_no_save_has_the_training_wait_for_room() -> None:
    full = {"in_flight_s": 5.0, "room": False}
    verdict = save_at_notice(chance(19.5, **full))
    assert isinstance(verdict, TrainOn)
    assert 0.5 <= verdict.for_s < 1.0, "there may be some by the next step"
    assert isinstance(save_at_notice(chance(19.5, in_flight_s=5.0)), SaveLast)


def test_a_peer_takes_what_the_bucket_cannot_take_in_time() -> None:
    verdict = save_at_notice(chance(3.5, peer_bytes_per_s=1000 * 2.0**20))
    assert isinstance(verdict, SaveLast)
    assert verdict.way == "peer"


def test_nothing_slows_down_the_save_on_its_way_when_no_other_fits() -> None:
    assert isinstance(save_at_notice(chance(20.0, in_flight_s=10.0)), LetFinish)
    assert isinstance(save_at_notice(chance(120.0, in_flight_s=10.0)), TrainOn)


@pytest.mark.parametrize("speed", [0.0, 50 * 2.0**20])
def test_without_time_nothing_is_begun(speed: float) -> None:
    assert save_at_notice(chance(15.0, bucket_bytes_per_s=speed)) == TooLate(
        "15 s are left: not enough for a save"
    )


# --- machines that will not be brought back once more --------------------------------------------


def renewing(view: View, watch: Watch, now: float) -> RoundClosed | Wait | None:
    assert view.round is not None
    return renew(view, watch, view.round, now)


GROUPS = {TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)}
OPEN = a_view(round=a_round(), groups=GROUPS, latest_committed_slot=8)


def on_last_life(*some: Any, **given: Any) -> Watch:
    usual: dict[str, Any] = {"committed_at": 109.9, "statuses": {TOKEN: a_last_life(1)}}
    return a_watch(seats=seats(a_seat(0), a_seat(1), *some), **{**usual, **given})


def test_a_machine_on_its_last_life_is_left_just_after_a_commit() -> None:
    verdict = renewing(OPEN, on_last_life(REPLACEMENT), 110.0)
    assert isinstance(verdict, RoundClosed)
    assert verdict.blame is Blame.RESIZE, "which costs nobody anything"
    assert "t-1/1 would not be brought back once more" in verdict.why


def test_between_commits_it_works_on() -> None:
    verdict = renewing(OPEN, on_last_life(REPLACEMENT), 115.0)
    assert isinstance(verdict, Wait)
    assert "at the next commit" in verdict.why
    nothing_saved = replace(OPEN, latest_committed_slot=-1)
    assert isinstance(renewing(nothing_saved, on_last_life(REPLACEMENT), 110.0), Wait)


@pytest.mark.parametrize(
    "watch",
    [
        on_last_life(),
        on_last_life(replace(REPLACEMENT, warm=False)),
        on_last_life(REPLACEMENT, statuses={TOKEN: a_last_life()}),
        on_last_life(REPLACEMENT, statuses={TOKEN: a_last_life(1), SPARE: a_last_life(0, nodes=1)}),
    ],
    ids=["nobody stands ready", "one that is cold", "it would come back", "it is as good as lost"],
)
def test_without_anything_better_it_works_on(watch: Watch) -> None:
    assert renewing(OPEN, watch, 110.0) is None
