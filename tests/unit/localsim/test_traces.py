"""Recorded histories of every known kind become capacity over time."""

import json
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit_localsim.traces import CapacityTrace, read_trace


def written(tmp_path: Path, told: Any) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("kind", ["availability", "preemption"])
def test_a_count_at_every_gap(tmp_path: Path, kind: str) -> None:
    told = {"id": "zone", "kind": kind, "gap_seconds": 600, "data": [4, 4, 0, 0, 2]}
    assert read_trace(written(tmp_path, told)) == CapacityTrace(
        "zone", ((0.0, 4), (1200.0, 0), (2400.0, 2)), sampling_interval_s=600.0
    )


def test_rows_of_moment_and_count_in_any_order(tmp_path: Path) -> None:
    rows = [["2021-12-10T13:08:45", 70], ["2021-12-10T13:07:45", 80], ["2021-12-10T13:09:45", 70]]
    told = {"kind": "count-series", "rows": rows}
    assert read_trace(written(tmp_path, told)).points == ((0.0, 80), (60.0, 70))


def test_machines_that_come_and_go(tmp_path: Path) -> None:
    events = [[0, "add", "a"], [0, "add", "b"], [5000, "remove", "a"], [9000, "add", "c"]]
    told = {"kind": "membership", "unit": "ms", "events": events}
    assert read_trace(written(tmp_path, told)).points == ((0.0, 2), (5.0, 1), (9.0, 2))


@pytest.mark.parametrize(
    "told",
    [
        {"kind": "availability"},
        {"kind": "availability", "gap_seconds": 1, "data": []},
        {"kind": "avalability", "gap_seconds": 1, "data": [1]},
        [],
    ],
)
def test_what_is_no_history_is_refused_and_named(tmp_path: Path, told: Any) -> None:
    with pytest.raises(ConfigError, match=r"trace\.json"):
        read_trace(written(tmp_path, told))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json"):
        read_trace(tmp_path / "gone.json")


def test_a_long_history_of_a_big_zone_fits_a_short_run_of_a_small_group() -> None:
    year = CapacityTrace("year", ((0.0, 64), (1000.0, 0), (2000.0, 32)), sampling_interval_s=100.0)
    assert year.max_capacity == 64
    short = year.rescaled(duration_s=20.0, max_machines=4)
    assert short.points == ((0.0, 4), (10.0, 0), (20.0, 2))
    assert short.sampling_interval_s == 1.0
