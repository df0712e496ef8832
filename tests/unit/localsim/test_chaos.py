"""Random worlds by the thousand: seeds that break something are found, told and counted."""

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from spotfit.testing.clock import ManualClock
from spotfit_localsim import chaos
from spotfit_localsim.live.chaos import Tally
from spotfit_localsim.scenario import Scenario
from spotfit_localsim.workload import Workload


def test_good_worlds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--virtual", "3", "--seed-start", "40"]) == 0
    said = capsys.readouterr().out
    assert "seeds 40..42: 3 worlds, 0 broken" in said
    assert "elections" in said


def test_a_broken_world_tells_its_story_and_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Scenario("endless", load=Workload(steps=10**6), storm_s=5.0, patience_s=30.0)
    monkeypatch.setattr(chaos, "random_storm", lambda _: endless)
    said: list[str] = []
    tally = chaos.virtual(2, 7, said.append, ManualClock())
    assert tally.broken == [7, 8]
    assert said[0].startswith("endless, seed 7: the run did not end")
    assert said[-1] == "broken seeds: [7, 8]"


def test_a_simulation_that_breaks_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "random_storm", lambda _: 1 / 0)
    tally = chaos.Tally()
    assert "ZeroDivisionError" in (chaos.live_through(5, tally) or "")
    assert tally.broken == [5]


def test_without_work_there_is_nothing_to_do() -> None:
    assert chaos.main([]) == 0


@pytest.mark.parametrize("failed", [0, 1])
def test_live_seeds_are_played_and_what_went_wrong_is_kept(
    failed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played: list[int] = []

    def run(seeds: Sequence[int], *, folder: Path, teller: object) -> Tally:
        played.extend(seeds)
        for seed in seeds[:failed]:
            (folder / str(seed)).write_text("what went wrong")
        return Tally(len(seeds), wrong=failed)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("spotfit_localsim.live.chaos"), "run", run)
    assert chaos.main(["--live", "1", "--seed-start", "7"]) == failed
    assert played == [7]
    assert len(list(tmp_path.glob("spotfit-chaos-*/7"))) == failed
    assert len(list(tmp_path.iterdir())) == failed, "nothing is left where all held"


def test_a_broken_virtual_world_is_not_forgotten_over_live_ones_that_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live = importlib.import_module("spotfit_localsim.live.chaos")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(live, "run", lambda _seeds, *, folder, teller: Tally())
    monkeypatch.setattr(chaos, "random_storm", lambda _: 1 / 0)
    assert chaos.main(["--virtual", "1", "--live", "1"]) == 1
