"""Random worlds by the thousand: seeds that break something are found, told and counted."""

import pytest

from spotfit.testing.clock import ManualClock
from spotfit_localsim import chaos
from spotfit_localsim.crew import SimCrew


def test_good_worlds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--virtual", "3", "--seed-start", "40"]) == 0
    said = capsys.readouterr().out
    assert "seeds 40..42: 3 worlds, 0 broken" in said
    assert "elections" in said


def test_a_broken_world_tells_its_story_and_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimCrew, "start", lambda *_: None)
    said: list[str] = []
    tally = chaos.virtual(2, 7, said.append, ManualClock())
    assert tally.broken == [7, 8]
    assert said[0].startswith("storm 7, seed 7: ")
    assert said[-1] == "broken seeds: [7, 8]"


def test_a_simulation_that_breaks_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "random_storm", lambda _: 1 / 0)
    tally = chaos.Tally()
    assert "ZeroDivisionError" in (chaos.live_through(5, tally) or "")
    assert tally.broken == [5]


def test_without_work_there_is_nothing_to_do() -> None:
    assert chaos.main([]) == 0
