"""The files, the summary and the exit code of chaos runs."""

import json
from functools import partial
from pathlib import Path

import pytest

from spotfit.host import env
from spotfit_localsim.live.chaos_runs import (
    ChaosOutcome,
    LiveChaosSummary,
    LiveRun,
    argument_parser,
    environment_variables,
    run_from_command_line,
    run_seeds,
)
from spotfit_localsim.live.cloud_plans import CloudChaosPlan

PASSED = ChaosOutcome(["0.5 s  an event"], [], 1, 0, 2.0)
FAILED = ChaosOutcome([], ["a step was lost"], 0, 1, 2.0)


def test_directories_of_failed_runs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argument_parser("").parse_args(["--seeds", "2", "--folder", str(tmp_path / "f")])

    def run(seeds: range, folder: Path, outcome: ChaosOutcome) -> LiveChaosSummary:
        folder.mkdir(exist_ok=True)
        summary = LiveChaosSummary()
        for _ in seeds:
            summary.add(outcome)
        return summary

    assert run_from_command_line(options, partial(run, outcome=FAILED)) == 2
    assert options.folder.exists()
    assert json.loads(capsys.readouterr().out)["failed_runs"] == 2
    assert run_from_command_line(options, partial(run, outcome=PASSED)) == 0
    assert not options.folder.exists()


def test_an_outcome_is_printed_with_its_events_and_violations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {7: PASSED, 8: FAILED}
    summary = run_seeds(outcomes, tmp_path, lambda seed, _proxy_url: (outcomes[seed], "a job"))
    assert (summary.run_count, summary.failed_runs) == (2, 1)
    assert capsys.readouterr().out.splitlines() == [
        "seed 7: passed (a job)",
        "    0.5 s  an event",
        f"seed 8: FAILED, files are in {tmp_path / '8'} (a job, 1 too late)",
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
