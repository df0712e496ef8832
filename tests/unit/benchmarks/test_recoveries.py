"""Kills and recoveries, from recorded events."""

import json

import pytest

from benchmarks.recoveries import recoveries, summarize
from benchmarks.run_once import Events, parse_events


def recorded_events(*events: tuple[str, float, dict[str, int]]) -> Events:
    lines = [
        json.dumps({"event": name, "at": at, "fit": 0} | fields) for name, at, fields in events
    ]
    return parse_events(line + "\n" for line in lines)


def begins(at: float, *, rank: int, attempt: int, step: int) -> tuple[str, float, dict[str, int]]:
    return "attempt_started", at, {"rank": rank, "attempt": attempt, "step": step}


RECOVERED_THEN_STUCK = recorded_events(
    begins(0.0, rank=0, attempt=0, step=0),
    begins(0.0, rank=1, attempt=0, step=0),
    ("killed", 10.0, {"rank": 1, "attempt": 0}),
    begins(10.5, rank=0, attempt=1, step=2),
    begins(12.0, rank=1, attempt=1, step=2),
    ("killed", 20.0, {"rank": 0, "attempt": 1}),
    begins(21.0, rank=1, attempt=2, step=4),
)


def test_recovery_ends_with_the_step_of_the_last_rank() -> None:
    assert recoveries(RECOVERED_THEN_STUCK, 2)[0].recovered_s == 2.0


def test_steps_after_the_checkpoint_count_as_lost() -> None:
    assert recoveries(RECOVERED_THEN_STUCK, 2)[0].steps_lost == 1


def test_missing_recovery_counts_as_the_limit() -> None:
    value, more = summarize(recoveries(RECOVERED_THEN_STUCK, 2), limit_s=90.0)
    assert value == pytest.approx((2.0 + 90.0) / 2)
    assert (more["recovered"], more["kills"]) == (1, 2)


def test_run_without_kills_has_no_recoveries() -> None:
    assert recoveries(recorded_events(begins(0.0, rank=0, attempt=0, step=0)), 1) == []
