"""Hang detection: silent workers, missing progress, and rounds that do not start."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.events import FailureCause, RoundClosed
from spotfit.model.leader_state import RoundProgress
from spotfit.model.spec import HangDetectionConfig
from spotfit.policy.actions import Wait
from spotfit.policy.failure_detection import (
    SuspectedHang,
    close_unstarted_round,
    detect_hang,
    next_hang_check_at,
)
from spotfit.testing.builders import (
    a_leader_state,
    a_round,
    a_spec,
    a_training,
    a_view,
)

WATCHED = HangDetectionConfig(no_progress_timeout_s=60.0)


def progress(*steps: int, moved_at: float = 100.0, **more: Any) -> RoundProgress:
    """All ranks running, with those progress counts."""
    usual: dict[str, Any] = {"running_ranks": frozenset(range(len(steps)))}
    return RoundProgress(progress_counts=steps, progressed_at=moved_at, **{**usual, **more})


# --- silent workers ------------------------------------------------------------------------------


def test_without_silent_workers_no_hang_is_suspected() -> None:
    assert detect_hang(HangDetectionConfig(), {}, progress(3, 3), 9e9) is None


def test_a_silent_worker_ends_the_round() -> None:
    seen = detect_hang(HangDetectionConfig(), {2: 601.0, 0: 700.4}, progress(3, 3, 9), 100.0)
    assert seen == SuspectedHang((0, 2), "ranks 0, 2 have not answered for 700 s", ends_round=True)


# --- missing progress ----------------------------------------------------------------------------


def test_missing_progress_is_only_checked_if_enabled() -> None:
    assert detect_hang(HangDetectionConfig(), {}, progress(3, 3), 9e9) is None
    assert next_hang_check_at(HangDetectionConfig(), progress(3, 3)) == float("inf")
    assert next_hang_check_at(WATCHED, progress(3, 3)) == 160.0


@pytest.mark.parametrize(("now", "hangs"), [(159.9, False), (160.0, True)])
def test_a_round_without_progress_is_suspected(now: float, hangs: bool) -> None:
    seen = detect_hang(WATCHED, {}, progress(3, 3), now)
    assert (seen is not None) == hangs
    if seen is not None:
        message = "no rank has reported, saved or joined a collective for 60 s"
        assert seen == SuspectedHang((0, 1), message, ends_round=False)


def test_the_ranks_with_the_least_progress_are_named() -> None:
    seen = detect_hang(
        HangDetectionConfig(no_progress_timeout_s=60.0, abort_on_hang=True),
        {},
        progress(4, 3, 4, 3),
        200.0,
    )
    assert seen is not None
    assert (seen.ranks, seen.ends_round) == ((1, 3), True)
    assert seen.reason.endswith("; ranks 1, 3 have made less progress than the others")


def test_returned_ranks_are_not_named() -> None:
    seen = detect_hang(WATCHED, {}, progress(1, 9, 9, returned_ranks=frozenset({0})), 200.0)
    assert seen is not None
    assert seen.ranks == (1, 2)
    assert "less far" not in seen.reason


@pytest.mark.parametrize(
    "busy",
    [{"running_ranks": frozenset({0})}, {"is_uploading": True}, {"is_validating": True}],
    ids=["starting", "saving", "being validated"],
)
def test_starting_saving_and_validating_rounds_are_not_suspected(busy: Any) -> None:
    assert detect_hang(WATCHED, {}, progress(3, 3, **busy), 9e9) is None


# --- rounds that do not start --------------------------------------------------------------------


def check_start(*ranks: int, now: float, start_s: float = 30.0) -> RoundClosed | Wait | None:
    """A round of two workers opened at 100."""
    view = a_view(
        round=a_round(), spec=a_spec(hang_detection=HangDetectionConfig(start_timeout_s=start_s))
    )
    training = a_training(running_ranks=set(ranks), since=100.0)
    return close_unstarted_round(view, a_leader_state(phase=training), training, now)


def test_a_started_round_is_not_closed() -> None:
    assert check_start(0, 1, now=9e9) is None


def test_without_start_timeout_a_round_may_start_arbitrarily_late() -> None:
    assert check_start(now=9e9, start_s=0.0) is None


def test_workers_have_the_start_timeout_to_start() -> None:
    waits = check_start(1, now=120.0)
    assert isinstance(waits, Wait)
    assert (waits.until, waits.reason) == (130.0, "1 of 2 workers are starting")


def test_a_round_that_does_not_start_is_charged_to_the_platform() -> None:
    closed = check_start(1, now=130.0)
    assert isinstance(closed, RoundClosed)
    assert (closed.cause, closed.round_number) == (FailureCause.PLATFORM, 1)
    assert closed.reason == "rank 0 has not started within 30 s"
    [failure] = closed.failures
    assert (failure.rank, failure.kind, failure.cause) == (0, "timeout", FailureCause.PLATFORM)
