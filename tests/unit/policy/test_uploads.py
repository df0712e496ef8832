"""Waiting for uploads that outlive their round: as long as the work they would save, no longer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.model.events import Blame, RoundClosed
from spotfit.model.holding import Part, State
from spotfit.model.spec import Tempo
from spotfit.model.watch import Watch
from spotfit.policy.uploads import awaited
from spotfit.testing.builders import a_member, a_round, a_seat, a_spec, a_view, a_watch, seats

TOO_MANY = {Blame.WORKER: 1}
CLOSED = a_view(last_round=a_round(3), spec=a_spec(tempo=Tempo(upload_patience_s=600.0)))


def over(carrying: int | None = 3, **given: Any) -> Watch:
    """Round 3 was closed at 100, and a1 uploads for it."""
    usual: dict[str, Any] = {
        "turned_at": 100.0,
        "unsaved_s": 30.0,
        "seats": seats(a_seat(0), a_seat(1, carrying=carrying)),
    }
    return a_watch(**{**usual, **given})


def test_an_upload_is_awaited_as_long_as_the_work_it_would_save() -> None:
    wait = awaited(CLOSED, over(), 129.9)
    assert wait is not None
    assert wait.until == 130.0
    assert "1 machines still upload" in wait.why
    assert awaited(CLOSED, over(), 130.0) is None


def test_nothing_is_awaited_of_what_all_machines_remember() -> None:
    alone = a_view(last_round=a_round(3, members=[a_member(1)]), spec=CLOSED.spec)
    held = (Part(State(3, 9), 0, 1),)
    watch = over(seats=seats(a_seat(1, carrying=3, held=held)))
    assert awaited(alone, watch, 100.0) is None
    assert awaited(alone, over(seats=seats(a_seat(1, carrying=3))), 100.0) is not None


def test_a_run_that_has_failed_waits_for_all_of_it() -> None:
    """No round follows that would have it from memory, and nobody waits to go on."""
    alone = a_view(last_round=a_round(3, members=[a_member(1)]), spec=CLOSED.spec)
    failed = replace(alone, last_closed=RoundClosed(3, Blame.WORKER, "bug"), failures=TOO_MANY)
    held = (Part(State(3, 9), 0, 1),)
    watch = over(unsaved_s=0.1, seats=seats(a_seat(1, carrying=3, held=held)))
    wait = awaited(failed, watch, 120.0)
    assert wait is not None
    assert wait.until == 700.0
    assert awaited(failed, watch, 700.0) is None
    assert awaited(failed, over(seats=seats(a_seat(1))), 100.0) is None


def test_never_for_ever() -> None:
    wait = awaited(CLOSED, over(unsaved_s=math.inf), 100.0)
    assert wait is not None
    assert wait.until == 700.0


@pytest.mark.parametrize("carrying", [None, 2])
def test_nothing_is_awaited_of_rounds_before(carrying: int | None) -> None:
    assert awaited(CLOSED, over(carrying), 100.0) is None


def test_nothing_is_awaited_while_a_round_is_open_or_before_the_first() -> None:
    assert awaited(a_view(round=a_round(3)), over(), 100.0) is None
    assert awaited(a_view(), over(), 100.0) is None


def test_a_machine_whose_workers_still_end_may_yet_say_that_it_uploads() -> None:
    ending = over(seats=seats(a_seat(0), a_seat(1, running=3)))
    wait = awaited(CLOSED, ending, 100.0)
    assert wait is not None
    assert wait.until == 100.0 + Tempo().stop_patience_s
    assert awaited(CLOSED, ending, wait.until) is None
