"""Hangs: who answers no more, who does not get on, and who never began."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.events import Blame, RoundClosed
from spotfit.model.spec import Vigil
from spotfit.model.watch import Progress
from spotfit.policy.actions import Wait
from spotfit.policy.hang import Hang, looked_for_at, not_begun, suspected
from spotfit.testing.builders import a_round, a_spec, a_view, a_watch

WATCHED = Vigil(hang_s=60.0)


def come(*steps: int, moved_at: float = 100.0, **more: Any) -> Progress:
    """All begun, and so far."""
    usual: dict[str, Any] = {"running": frozenset(range(len(steps)))}
    return Progress(steps, moved_at, **{**usual, **more})


# --- who answers no more -------------------------------------------------------------------------


def test_while_all_answer_nobody_is_suspected() -> None:
    assert suspected(Vigil(), {}, come(3, 3), 9e9) is None


def test_who_does_not_answer_ends_the_round_whatever_the_others_do() -> None:
    seen = suspected(Vigil(), {2: 601.0, 0: 700.4}, come(3, 3, 9), 100.0)
    assert seen == Hang((0, 2), "ranks 0, 2 have not answered for 700 s", ends_it=True)


# --- who does not get on -------------------------------------------------------------------------


def test_slowness_is_only_looked_for_where_that_is_wanted() -> None:
    assert suspected(Vigil(), {}, come(3, 3), 9e9) is None
    assert looked_for_at(Vigil(), come(3, 3)) == float("inf")
    assert looked_for_at(WATCHED, come(3, 3)) == 160.0


@pytest.mark.parametrize(("now", "hangs"), [(159.9, False), (160.0, True)])
def test_a_round_in_which_nobody_gets_on_hangs(now: float, hangs: bool) -> None:
    seen = suspected(WATCHED, {}, come(3, 3), now)
    assert (seen is not None) == hangs
    if seen is not None:
        told = "no rank has reported, met the others or saved for 60 s"
        assert seen == Hang((0, 1), told, ends_it=False)


def test_those_who_came_least_far_are_the_ones_that_are_waited_for() -> None:
    seen = suspected(Vigil(hang_s=60.0, hang_ends=True), {}, come(4, 3, 4, 3), 200.0)
    assert seen is not None
    assert (seen.ranks, seen.ends_it) == ((1, 3), True)
    assert seen.why.endswith("; ranks 1, 3 have come less far than the others")


def test_who_has_returned_is_not_waited_for() -> None:
    seen = suspected(WATCHED, {}, come(1, 9, 9, returned=frozenset({0})), 200.0)
    assert seen is not None
    assert seen.ranks == (1, 2)
    assert "less far" not in seen.why


@pytest.mark.parametrize(
    "busy",
    [{"running": frozenset({0})}, {"uploading": True}, {"validating": True}],
    ids=["starting", "saving", "being validated"],
)
def test_what_takes_its_time_is_no_hang(busy: Any) -> None:
    assert suspected(WATCHED, {}, come(3, 3, **busy), 9e9) is None


# --- who never began -----------------------------------------------------------------------------


def begun(*ranks: int, now: float, start_s: float = 30.0) -> RoundClosed | Wait | None:
    """A round of two that was opened at 100."""
    view = a_view(round=a_round(), spec=a_spec(vigil=Vigil(start_s=start_s)))
    assert view.round is not None
    return not_begun(view, a_watch(running=set(ranks), turned_at=100.0), view.round, now)


def test_once_all_have_begun_nothing_is_waited_for() -> None:
    assert begun(0, 1, now=9e9) is None


def test_without_a_limit_a_round_may_take_for_ever_to_begin() -> None:
    assert begun(now=9e9, start_s=0.0) is None


def test_workers_have_some_time_to_begin() -> None:
    waits = begun(1, now=120.0)
    assert isinstance(waits, Wait)
    assert (waits.until, waits.why) == (130.0, "1 of 2 workers have not begun")


def test_who_takes_too_long_to_begin_is_the_platforms_to_pay() -> None:
    closed = begun(1, now=130.0)
    assert isinstance(closed, RoundClosed)
    assert (closed.blame, closed.number) == (Blame.PLATFORM, 1)
    assert closed.why == "rank 0 has not begun 30 s after the round was opened"
    [failure] = closed.failures
    assert (failure.rank, failure.kind, failure.blame) == (0, "timeout", Blame.PLATFORM)
