"""One simulated run, told on the command line."""

import json
from pathlib import Path

import pytest

from spotfit_localsim.virtual import cli


def test_a_story_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plain", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("plain, seed 3: finished")
    assert "0 steps repeated" in said


def test_a_storm_comes_from_its_seed() -> None:
    assert cli.find_scenario("storm", 4).name == "storm 4"


def test_an_unknown_scenario_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["spot_strom"]) == 2
    assert "Did you mean 'spot_storm'?" in capsys.readouterr().err


def test_capacity_may_move_as_it_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "zone.json"
    told = {"id": "zone", "kind": "availability", "gap_seconds": 60, "data": [8, 8, 0, 8]}
    trace.write_text(json.dumps(told))
    assert cli.main(["plain", "--trace", str(trace), "--over", "90"]) == 0
    assert "plain on zone" in capsys.readouterr().out
