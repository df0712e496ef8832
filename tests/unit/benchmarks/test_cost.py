"""The cost benchmark: one row per setting, sets of zones."""

import json
from pathlib import Path

import pytest

from benchmarks.cost import main, zones_rows
from spotfit_localsim.virtual.recorded_market import MarketRecording


def test_zones_of_different_recordings_are_not_combined() -> None:
    zones = [
        MarketRecording(name, 3600.0, (1,) * 52, 1, spot_usd=1.0, on_demand_usd=3.0)
        for name in ("aws_v100_1_a", "aws_v100_1_b", "gcp_h100_1_a")
    ]
    rows = list(zones_rows(zones))
    assert {row.recordings for row in rows} == {("aws_v100_1_a", "aws_v100_1_b")}
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
