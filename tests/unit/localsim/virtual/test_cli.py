"""The command that runs and prints one simulation."""

import json
from pathlib import Path

import pytest

from spotfit_localsim.virtual import cli


def test_timeline_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plain", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("plain, seed 3: finished")
    assert "0 steps repeated" in output


@pytest.mark.parametrize("kind", ["storm", "deadline", "budget", "network"])
def test_random_scenario_is_named_by_its_seed(kind: str) -> None:
    assert cli.find_scenario(kind, 4).name == f"{kind} 4"


def test_recorded_trace_for_a_scenario_with_offers_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["deadline", "--trace", str(tmp_path / "zone.json")]) == 2
    assert "has offers with capacities of their own" in capsys.readouterr().err


def test_unknown_scenario_is_rejected_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["spot_strom"]) == 2
    assert "Did you mean 'spot_storm'?" in capsys.readouterr().err


def test_capacity_follows_a_recorded_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "zone.json"
    trace_data = {"id": "zone", "kind": "availability", "gap_seconds": 60, "data": [8, 8, 0, 8]}
    trace.write_text(json.dumps(trace_data))
    assert cli.main(["plain", "--trace", str(trace), "--over", "90"]) == 0
    assert "plain on zone" in capsys.readouterr().out
