"""Goodput: recordings, verdict, table and plot."""

import json
from pathlib import Path

import pytest

from benchmarks.goodput import (
    COST_SETTINGS,
    FIXED_INTERVALS_S,
    LARGE_SAVES,
    SMALL_SAVES,
    Row,
    best_by_age,
    main,
    plot,
    table,
    verdict,
)


def row(*, ours: float, notice: bool = False, costs: str = SMALL_SAVES) -> Row:
    fixed = {interval_s: 90.0 if interval_s == 300.0 else 80.0 for interval_s in FIXED_INTERVALS_S}
    return Row(
        trace="gcp_zone",
        costs=costs,
        cost_per_save_s=COST_SETTINGS[costs].costs.cost_per_save_s,
        notice=notice,
        notice_s=30.0 if notice else 0.0,
        machines=16,
        groups=12,
        mean_lifetime_s=7200.0,
        bound=96.0,
        ours=ours,
        worst_seed=ours - 0.5,
        fixed=fixed,
        by_age=91.25,
        ages_s=(300.0,) * 5,
    )


def test_best_interval_is_chosen_in_hindsight() -> None:
    one = row(ours=91.0)
    assert one.best == (300.0, 90.0)
    assert (one.regret, one.lead_over_fixed, one.gap_to_by_age) == (5.0, 1.0, 0.25)


def test_intervals_by_age_are_found_by_coordinate_search() -> None:
    best = (90.0, 300.0, 7800.0, 60.0, 300.0)

    def share(ages_s: tuple[float, ...]) -> float:
        return -sum(
            abs(FIXED_INTERVALS_S.index(one) - FIXED_INTERVALS_S.index(other))
            for one, other in zip(ages_s, best, strict=True)
        )

    assert best_by_age(share, 600.0) == (best, 0.0)


def test_verdict_states_whether_targets_are_reached() -> None:
    output = verdict([row(ours=91.0), row(ours=93.0, notice=True)])
    assert "5.00 points below the upper bound on average (reached: ≤ 6)" in output
    assert "3.00 points below the upper bound on average (missed: ≤ 2)" in output
    assert "At worst -3.00 relative to the best fixed interval (missed" in verdict([row(ours=87.0)])
    assert "by age: 4.25 on average, 4.25 at worst" in verdict([row(ours=87.0)])


def test_verdict_counts_targets_out_of_reach_of_intervals_by_age() -> None:
    rows = [row(ours=91.0, notice=True), row(ours=95.0, notice=True)]
    result = (
        "1 of 2 recordings are within 2; of the other 1, 1 would not be with the best intervals"
    )
    assert result in verdict(rows)


def test_recording_is_one_table_row_and_two_plot_lines() -> None:
    rows = [row(ours=91.0), row(ours=93.0, notice=True)]
    (line,) = table(rows).splitlines()[2:]
    assert line.startswith("| gcp_zone | 12 | 2.0 h | 96.0 | **91.0** (5.0) | 91.2 | 90.0 at 300 s")
    assert "**93.0** (3.0)" in line
    drawn = plot(rows)
    assert drawn.startswith("<svg")
    assert drawn.count(">gcp_zone") == 2


def test_large_saves_have_no_target_for_the_distance_from_the_bound() -> None:
    output = verdict([row(ours=70.0, costs=LARGE_SAVES)])
    assert "26.00 points below the upper bound on average, 26.00 at worst" in output
    assert "relative to the best fixed interval (missed: ≥ -1" in output


def test_any_recording_in_a_folder_is_measured_once_per_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.goodput.RESULTS", tmp_path / "results")
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "MANIFEST.json").write_text("[]")
    calm = {"id": "calm", "kind": "availability", "gap_seconds": 600, "data": [1, 0, 1]}
    (traces / "calm.json").write_text(json.dumps(calm))
    events = [[600_000 * n, "remove" if n % 2 else "add", f"node{n // 2}"] for n in range(2 * 12)]
    (traces / "any_name.json").write_text(
        json.dumps({"id": "any_name", "kind": "membership", "events": events})
    )
    report = tmp_path / "report.json"
    assert main(["--traces", str(traces), "--json", str(report), "--seeds", "1"]) == 0
    rows = json.loads(report.read_text())
    assert [(one["trace"], one["costs"], one["notice"]) for one in rows] == [
        ("any_name", costs, notice) for costs in COST_SETTINGS for notice in (False, True)
    ]
    printed = capsys.readouterr().out
    assert "skipped MANIFEST.json: " in printed
    assert "skipped calm: 1 groups of 1 machines ended in it" in printed
