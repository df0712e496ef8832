"""Batches of random simulations: failed seeds are detected, logged and counted."""

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from spotfit.model.spec import CostSpec
from spotfit.testing.builders import ManualClock
from spotfit_localsim.live.chaos_runs import LiveChaosSummary
from spotfit_localsim.virtual import chaos
from spotfit_localsim.virtual.cost_invariants import CostBounds
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.scenario_library import plain
from spotfit_localsim.virtual.workload import Workload


def test_passed_runs_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--virtual", "3", "--seed-start", "40"]) == 0
    output = capsys.readouterr().out
    assert "seeds 40..42: 3 runs, 0 failed" in output
    assert "elections" in output


def test_failed_run_logs_its_timeline_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Scenario(
        "endless", workload=Workload(steps=10**6), faults_duration_s=5.0, completion_timeout_s=30.0
    )
    monkeypatch.setattr(chaos, "random_scenario", lambda _: endless)
    messages: list[str] = []
    summary = chaos.run_seeds(2, 7, messages.append, ManualClock())
    assert summary.failed_seeds == [7, 8]
    assert messages[0].startswith("endless, seed 7: the run did not end")
    assert messages[-1] == "failed seeds: [7, 8]"


def test_exception_in_the_simulator_fails_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "random_scenario", lambda _: 1 / 0)
    summary = chaos.VirtualChaosSummary()
    assert "ZeroDivisionError" in (chaos.run_seed(5, summary) or "")
    assert summary.failed_seeds == [5]


def test_without_seeds_the_command_succeeds() -> None:
    assert chaos.main([]) == 0


@pytest.mark.parametrize("failed", [0, 1])
def test_failed_live_runs_are_kept(
    failed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_seeds: list[int] = []

    def run(seeds: Sequence[int], *, folder: Path, plan_for: object) -> LiveChaosSummary:
        started_seeds.extend(seeds)
        for seed in seeds[:failed]:
            (folder / str(seed)).write_text("violation")
        return LiveChaosSummary(len(seeds), failed_runs=failed)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("spotfit_localsim.live.chaos"), "run", run)
    assert chaos.main(["--live", "1", "--seed-start", "7"]) == failed
    assert started_seeds == [7]
    assert len(list(tmp_path.glob("spotfit-chaos-*/7"))) == failed
    assert len(list(tmp_path.iterdir())) == failed, "folders of successful runs are removed"


def test_failed_virtual_run_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live = importlib.import_module("spotfit_localsim.live.chaos")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(live, "run", lambda _seeds, *, folder, plan_for: LiveChaosSummary())
    monkeypatch.setitem(chaos.SCENARIO_FACTORIES, "storms", lambda _: 1 / 0)
    assert chaos.main(["--virtual", "1", "--live", "1"]) == 1


def test_deadlines_that_are_guaranteed_are_counted() -> None:
    limits = CostBounds(arrival_s=60.0, changeover_s=60.0, set_size=2)
    cost = CostSpec(deadline_ms=wall_ms(300.0), uses_on_demand=True, training_time_s=30.0)
    summary = chaos.VirtualChaosSummary()
    guaranteed = replace(plain, cost=cost, cost_limits=limits)
    impossible = replace(guaranteed, cost=structs.replace(cost, training_time_s=290.0))
    assert chaos.run_seed(1, summary, lambda _: guaranteed) is None
    assert chaos.run_seed(1, summary, lambda _: impossible) is None
    assert summary.totals["guaranteed deadlines"] == 1


@pytest.mark.parametrize("name", ["deadlines", "budgets"])
def test_scenarios_of_the_command_are_chosen_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    started: list[str] = []

    def stop(scenario: Scenario, _seed: int) -> None:
        started.append(scenario.name)
        raise RuntimeError("not simulated")

    monkeypatch.setattr(chaos, "SimWorld", stop)
    assert chaos.main(["--virtual", "1", "--seed-start", "3", "--scenarios", name]) == 1
    assert started == [f"{name.removesuffix('s')} 3"]
