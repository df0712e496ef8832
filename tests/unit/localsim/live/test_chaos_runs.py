"""The files, the summary and the exit code of chaos runs."""

import json
from pathlib import Path

import pytest

from spotfit.host import env
from spotfit_localsim.live.chaos_runs import (
    ChaosOutcome,
    LiveChaosSummary,
    LiveRun,
    environment_variables,
    print_outcome,
    print_summary,
)
from spotfit_localsim.live.cloud_plans import CloudChaosPlan

PASSED = ChaosOutcome(["0.5 s  an event"], [], 1, 0, 2.0)
FAILED = ChaosOutcome([], ["a step was lost"], 0, 1, 2.0)


def test_directories_of_failed_runs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = LiveChaosSummary()
    summary.add(FAILED)
    assert print_summary(summary, tmp_path) == 1
    assert tmp_path.exists()
    assert json.loads(capsys.readouterr().out)["failed_runs"] == 1
    assert print_summary(LiveChaosSummary(), tmp_path) == 0
    assert not tmp_path.exists()


def test_an_outcome_is_printed_with_its_events_and_violations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_outcome(7, PASSED, "a job", tmp_path)
    print_outcome(8, FAILED, "a job", tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "seed 7: passed (a job)",
        "    0.5 s  an event",
        f"seed 8: FAILED, files are in {tmp_path / '8'} (a job)",
        "    a step was lost",
    ]


def test_temporary_files_of_a_run_are_leftovers(tmp_path: Path) -> None:
    run = LiveRun(CloudChaosPlan(1, "aws_batch", 2), tmp_path / "run", "http://127.0.0.1:1")
    assert run.find_leftovers(timeout_s=0.0) == []
    leftover = tmp_path / "run" / "tmp" / "file"
    leftover.touch()
    assert run.find_leftovers(timeout_s=0.0) == [str(leftover)]


def test_environment_variables_are_restored() -> None:
    before = env.copy_environment()
    with environment_variables({"SPOTFIT_HOME": "/nowhere"}):
        assert env.copy_environment() == {"SPOTFIT_HOME": "/nowhere"}
    assert env.copy_environment() == before
