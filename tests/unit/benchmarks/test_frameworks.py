"""The figures of training libraries, from recorded events."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks import frameworks_workload, workload
from benchmarks.frameworks import FIGURES, SAVE_EVERY, STEPS, read_restart, read_save
from benchmarks.run_once import Run, parse_events


def run_of(events: Iterable[dict[str, Any]]) -> Run:
    """A run from 0 to 100 s that uses one processor."""
    lines = [json.dumps({"fit": 0} | event) + "\n" for event in events]
    empty_fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Run)}
    known = {
        "events": parse_events(lines),
        "started": 0.0,
        "ended": 100.0,
        "cpu": ((0.0, 0.0), (100.0, 100.0)),
        "cpu_s": 100.0,
    }
    return Run(**(empty_fields | known))


def event(name: str, rank: int, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "rank": rank, "at": at, "attempt": 0} | fields


RESTARTED = [
    event("first_line", 0, 5.0, entered=4.0),
    event("first_line", 1, 5.5, entered=4.5),
    event("trained", 0, 9.0, step=12),
    event("killed", 1, 10.0),
    event("trained", 0, 12.0, step=11, attempt=1),
    event("trained", 1, 13.0, step=11, attempt=1),
    event("trained", 0, 14.0, step=12, attempt=1),
]


def test_restart_lasts_from_the_kill_to_the_next_step_of_the_last_worker() -> None:
    reading = read_restart(run_of(RESTARTED))
    assert reading is not None
    assert (reading.value, reading.since, reading.until) == (3.0, 10.0, 13.0)


def test_restart_has_the_first_line_of_the_last_worker_and_the_lost_steps() -> None:
    reading = read_restart(run_of(RESTARTED))
    assert reading is not None
    assert reading.more == {
        "first_line_s": 4.5,
        "first_line_cpu_s": 4.5,
        "total_s": 100.0,
        "total_cpu_s": 100.0,
        "steps_lost": 2,
    }


@pytest.mark.parametrize("missing", [0, 3, 5], ids=["first line", "kill", "next step"])
def test_restart_that_lacks_an_event_has_no_figure(missing: int) -> None:
    assert read_restart(run_of(RESTARTED[:missing] + RESTARTED[missing + 1 :])) is None


def steps_with_saves(*stalls_s: float) -> list[dict[str, Any]]:
    """Steps of 1 s with 0.1 s between them, and each stall on rank 1 after its save."""
    found, now, stalls = [], 0.0, iter(stalls_s)
    for step in range(1, STEPS + 1):
        found += [event("began", rank, now, step=step) for rank in range(2)]
        now += 1.0
        found += [event("trained", rank, now, step=step) for rank in range(2)]
        now += 0.1
        if step % SAVE_EVERY == 0:
            now += next(stalls)
    return [*found, {"event": "fit_returned", "at": now, "checkpoints": len(stalls_s)}]


def test_stall_is_the_mean_time_beyond_that_between_steps_without_a_save() -> None:
    reading = read_save(run_of(steps_with_saves(0.4, 0.2, 0.3)))
    assert reading is not None
    assert reading.value == pytest.approx(0.3)
    assert reading.more["stalls_s"] == pytest.approx([0.4, 0.2, 0.3])
    assert reading.more["p95_s"] == pytest.approx(0.39)
    assert reading.more["loop_s"] == pytest.approx(STEPS - 1 + 0.1 * (STEPS - 1) + 0.9)


def test_stall_of_a_save_is_that_of_the_slowest_rank() -> None:
    events = steps_with_saves(0.0, 0.0, 0.0)
    late = next(e for e in events if e["event"] == "began" and e["step"] == SAVE_EVERY + 1)
    late["at"] += 0.6
    reading = read_save(run_of(events))
    assert reading is not None
    assert reading.value == pytest.approx(0.2)


def test_run_that_has_not_committed_each_save_has_no_figure() -> None:
    events = steps_with_saves(0.1, 0.1, 0.1)
    events[-1]["checkpoints"] = 2
    assert read_save(run_of(events)) is None


def test_run_that_has_not_returned_has_no_figure() -> None:
    assert read_save(run_of(steps_with_saves(0.1, 0.1, 0.1)[:-1])) is None


def test_every_figure_runs_its_training_function_on_both_sides() -> None:
    for name, figure in FIGURES.items():
        (target,) = figure.peer_targets
        for setting in (figure.ours, target.setting):
            library = name.partition("_")[2]
            found = workload.find(figure.job(setting).work)
            assert found is getattr(frameworks_workload, library)


def test_both_sides_have_environments_of_their_own() -> None:
    for figure in FIGURES.values():
        settings = (figure.ours, *(target.setting for target in figure.peer_targets))
        assert [setting.venv for setting in settings] == ["ours-frameworks", "ray-frameworks"]
