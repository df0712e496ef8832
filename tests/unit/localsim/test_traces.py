"""Recorded traces of every supported kind are converted to capacity over time."""

import json
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.traces import CapacityTrace, read_trace


def write_trace(tmp_path: Path, trace: Any) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    return path


@pytest.mark.parametrize("kind", ["availability", "preemption"])
def test_counts_at_fixed_intervals_are_read(tmp_path: Path, kind: str) -> None:
    trace = {"id": "zone", "kind": kind, "gap_seconds": 600, "data": [4, 4, 0, 0, 2]}
    assert read_trace(write_trace(tmp_path, trace)) == CapacityTrace(
        "zone",
        ((0.0, 4), (1200.0, 0), (2400.0, 2)),
        sampling_interval_s=600.0,
        duration_s=3000.0,
    )


@pytest.mark.parametrize(
    ("recorded", "expected"), [(1.5, 1.5), ([1.0, 2.0, 6.0], 3.0), ([], None), (None, None)]
)
def test_recorded_prices_are_read(tmp_path: Path, recorded: Any, expected: float | None) -> None:
    trace = {"kind": "availability", "gap_seconds": 600, "data": [4], "spot_price": recorded}
    read = read_trace(write_trace(tmp_path, trace | {"on_demand_price": 4}))
    assert (read.spot_usd_per_hour, read.on_demand_usd_per_hour) == (expected, 4.0)


def test_recorded_price_changes_follow_the_stretched_trace(tmp_path: Path) -> None:
    trace = {"kind": "availability", "gap_seconds": 600, "data": [4, 4, 0, 2]}
    read = read_trace(write_trace(tmp_path, trace | {"spot_price": [1.5, 1.5, 2, 1.5]}))
    assert read.spot_prices == ((0.0, 1.5), (1200.0, 2.0), (1800.0, 1.5))
    stretched = read.rescaled(duration_s=180.0, max_machines=4)
    assert stretched.spot_prices == ((0.0, 1.5), (120.0, 2.0), (180.0, 1.5))
    assert read_trace(write_trace(tmp_path, trace | {"spot_price": 1.5})).spot_prices == ()


def test_count_series_is_sorted_by_time(tmp_path: Path) -> None:
    rows = [["2021-12-10T13:08:45", 70], ["2021-12-10T13:07:45", 80], ["2021-12-10T13:09:45", 70]]
    trace = {"kind": "count-series", "rows": rows}
    read = read_trace(write_trace(tmp_path, trace))
    assert read.points == ((0.0, 80), (60.0, 70))
    assert read.sampling_interval_s == 60.0, "a change is somewhere between two rows"


def test_membership_events_are_counted(tmp_path: Path) -> None:
    events = [[0, "add", "a"], [0, "add", "b"], [5000, "remove", "a"], [9000, "add", "c"]]
    trace = {"kind": "membership", "unit": "ms", "events": events}
    assert read_trace(write_trace(tmp_path, trace)).points == ((0.0, 2), (5.0, 1), (9.0, 2))


def test_events_at_full_minutes_happened_at_some_time_within_them(tmp_path: Path) -> None:
    events = [[0, "add", "a"], [480_000, "add", "b"], [540_000, "remove", "a"]]
    trace = {"kind": "membership", "unit": "ms", "events": events}
    assert read_trace(write_trace(tmp_path, trace)).sampling_interval_s == 60.0


@pytest.mark.parametrize(
    "trace",
    [
        {"kind": "availability"},
        {"kind": "availability", "gap_seconds": 1, "data": []},
        {"kind": "avalability", "gap_seconds": 1, "data": [1]},
        [],
    ],
)
def test_invalid_trace_is_rejected_with_its_file_name(tmp_path: Path, trace: Any) -> None:
    with pytest.raises(ConfigError, match=r"trace\.json"):
        read_trace(write_trace(tmp_path, trace))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json"):
        read_trace(tmp_path / "gone.json")


def test_long_trace_is_rescaled_to_a_short_run_of_few_machines() -> None:
    year = CapacityTrace("year", ((0.0, 64), (1000.0, 0), (2000.0, 32)), sampling_interval_s=100.0)
    assert year.max_capacity == 64
    short = year.rescaled(duration_s=20.0, max_machines=4)
    assert short.points == ((0.0, 4), (10.0, 0), (20.0, 2))
    assert short.sampling_interval_s == 1.0
