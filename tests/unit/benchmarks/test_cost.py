"""The cost benchmark: one row per setting, sets of zones."""

import json
from pathlib import Path

import pytest

from benchmarks.cost import CostRow, Score, comparison, main, zones_rows
from spotfit_localsim.virtual.recorded_market import MarketRecording


def test_zones_of_different_recordings_are_not_combined() -> None:
    zones = [
        MarketRecording(name, 3600.0, (1,) * 52, 1, spot_usd=1.0, on_demand_usd=3.0)
        for name in ("v100_us-east-1a", "v100_us-east-1b", "h100_us-east1-a")
    ]
    rows = list(zones_rows(zones))
    assert {row.recordings for row in rows} == {("v100_us-east-1a", "v100_us-east-1b")}
    assert all(row.policies["spotfit"].mean < 1.01 for row in rows)


def test_a_folder_of_recordings_becomes_one_row_per_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [1] * 40 + [0] * 4 + [1] * 8
    document = {"id": "zone", "kind": "availability", "gap_seconds": 3600, "data": data}
    (tmp_path / "zone.json").write_text(json.dumps(document))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "MANIFEST.json").write_text("[]")
    assert main(["--traces", str(tmp_path), "--json", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out").read_text())
    assert len(rows) == 9, "three changeover times, three prices, one deadline that it covers"
    assert set(rows[0]["policies"]) == {"spotfit", "uniform progress", "greedy"}
    assert all(row["policies"]["spotfit"]["late"] == 0 for row in rows)
    assert "other.json is skipped" in capsys.readouterr().out


def test_more_starts_are_more_jobs_of_one_market(tmp_path: Path) -> None:
    document = {"id": "zone", "kind": "availability", "gap_seconds": 3600, "data": [1] * 59}
    (tmp_path / "zone.json").write_text(json.dumps(document))
    out = tmp_path / "out"
    arguments = ["--traces", str(tmp_path), "--json", str(out), "--only", "one", "--starts", "8"]
    assert main(arguments) == 0
    rows = json.loads(out.read_text())
    assert {row["market"] for row in rows} == {"one zone"}
    assert {row["policies"]["spotfit"]["jobs"] for row in rows} == {8}


def test_one_start_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--starts", "1"])
    assert "--starts must be at least 2" in capsys.readouterr().err


def test_comparison_counts_the_settings_in_which_a_policy_is_cheaper() -> None:
    rows = [
        CostRow("several zones", ("a", "b"), 0.1, 60.0, None, {"spotfit": ours, "greedy": greedy})
        for ours, greedy in (
            (Score(1.02, 1.1, 0, 6), Score(1.01, 1.1, 0, 6)),
            (Score(1.02, 1.1, 0, 6), Score(1.05, 1.1, 0, 6)),
        )
    ]
    assert comparison(rows) == (
        "several zones: greedy is cheaper than spotfit in 1 of 2 settings, by 0.0100 at most"
    )
