"""Random worlds by the thousand: seeds that break something are found, told and counted."""

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from spotfit.testing.builders import ManualClock
from spotfit_localsim.live.chaos import LiveChaosSummary
from spotfit_localsim.virtual import chaos
from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.workload import Workload


def test_passed_runs_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--virtual", "3", "--seed-start", "40"]) == 0
    said = capsys.readouterr().out
    assert "seeds 40..42: 3 runs, 0 failed" in said
    assert "elections" in said


def test_failed_run_logs_its_timeline_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Scenario(
        "endless", workload=Workload(steps=10**6), faults_duration_s=5.0, completion_timeout_s=30.0
    )
    monkeypatch.setattr(chaos, "random_scenario", lambda _: endless)
    said: list[str] = []
    tally = chaos.run_seeds(2, 7, said.append, ManualClock())
    assert tally.failed_seeds == [7, 8]
    assert said[0].startswith("endless, seed 7: the run did not end")
    assert said[-1] == "failed seeds: [7, 8]"


def test_exception_in_the_simulator_fails_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "random_scenario", lambda _: 1 / 0)
    tally = chaos.VirtualChaosSummary()
    assert "ZeroDivisionError" in (chaos.run_seed(5, tally) or "")
    assert tally.failed_seeds == [5]


def test_without_work_there_is_nothing_to_do() -> None:
    assert chaos.main([]) == 0


@pytest.mark.parametrize("failed", [0, 1])
def test_failed_live_runs_are_kept(
    failed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played: list[int] = []

    def run(seeds: Sequence[int], *, folder: Path, plan_for: object) -> LiveChaosSummary:
        played.extend(seeds)
        for seed in seeds[:failed]:
            (folder / str(seed)).write_text("what went wrong")
        return LiveChaosSummary(len(seeds), failed_runs=failed)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("spotfit_localsim.live.chaos"), "run", run)
    assert chaos.main(["--live", "1", "--seed-start", "7"]) == failed
    assert played == [7]
    assert len(list(tmp_path.glob("spotfit-chaos-*/7"))) == failed
    assert len(list(tmp_path.iterdir())) == failed, "nothing is left where all held"


def test_failed_virtual_run_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live = importlib.import_module("spotfit_localsim.live.chaos")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(live, "run", lambda _seeds, *, folder, plan_for: LiveChaosSummary())
    monkeypatch.setattr(chaos, "random_scenario", lambda _: 1 / 0)
    assert chaos.main(["--virtual", "1", "--live", "1"]) == 1
