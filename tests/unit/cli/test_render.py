"""Texts are printed without interpreting markup; only metrics are truncated."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
from msgspec import structs

from spotfit.cli import render
from spotfit.client.deadline_status import DeadlineStatus
from spotfit.client.metrics_history import ReportedMetrics, ReportedProgress
from spotfit.client.run_handle import RunStatus
from spotfit.client.run_list import ListedRun
from spotfit.client.stored_checkpoints import CheckpointInfo
from spotfit.core.errors import ConfigError
from spotfit.host import system
from tests.unit.client.bills import LOCAL, SPOT, UNPRICED, a_bill

EMPTY = RunStatus("digits", "waiting", None, 0, 0, (), {})


def test_a_waiting_run_is_printed_with_empty_rows(capsys: pytest.CaptureFixture[str]) -> None:
    render.status(EMPTY, "s3://bucket/digits")
    assert capsys.readouterr().out.splitlines() == [
        "run          digits  s3://bucket/digits",
        "state        waiting",
        "started      unknown",
        "round        -, 0 workers on 0 machines",
        "progress     no report yet",
        "checkpoints  0",
        "failures     none",
    ]


def test_the_reason_of_the_latest_save_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    why = "500 steps since the last save [of 9]"
    run = replace(EMPTY, checkpoints=("a", "b"), save_reason=why)
    render.status(run, "s3://bucket/digits")
    lines = capsys.readouterr().out.splitlines()
    assert lines[5:7] == ["checkpoints  2, latest b", f"             saved: {why}"]


def test_the_reason_why_no_feeders_are_requested_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = "3 machines in a row could not start feeders"
    render.status(replace(EMPTY, feeders_stopped=why), "s3://bucket/digits")
    assert capsys.readouterr().out.splitlines()[-1] == f"feeders      no further machines: {why}"


@pytest.mark.parametrize(
    ("deadline", "shown"),
    [
        (DeadlineStatus(1_700_000_600_000, 60.0), ", in 10.0 min, 60 s of slack"),
        (DeadlineStatus(1_700_000_600_000, -60.0), ", in 10.0 min, 60 s late"),
        (DeadlineStatus(1_699_999_400_000), ", 10.0 min ago, slack unknown"),
        (DeadlineStatus(1_700_000_600_000, 7200.0, is_final=True), ", met 2.0 h early"),
        (DeadlineStatus(1_700_000_600_000, -19.0, is_final=True), ", missed by 19 s"),
        (DeadlineStatus(1_700_000_600_000, is_final=True), ""),
    ],
)
def test_the_deadline_is_printed_with_its_slack(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    deadline: DeadlineStatus,
    shown: str,
) -> None:
    monkeypatch.setattr(system, "wall_ms", lambda: 1_700_000_000_000)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(deadline.at_ms / 1000))
    render.status(replace(EMPTY, deadline=replace(deadline, risks=("late [a]",))), "s3://b/digits")
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"deadline     {at}{shown}",
        "             late [a]",
    ]


def test_start_duration_and_progress_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(
        EMPTY,
        started_at_ms=1_700_000_000_000,
        ended_at_ms=1_700_000_090_000,
        progress=ReportedProgress(step=120, steps_per_s=3.1234, metrics={"loss": 0.5}),
    )
    render.status(run, "s3://bucket/digits")
    lines = capsys.readouterr().out.splitlines()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    assert lines[2] == f"started      {when}, took 90 s"
    assert lines[4] == "progress     step 120, 3.12 steps/s, loss=0.5"
    running = replace(run, ended_at_ms=0, started_at_ms=system.wall_ms() - 7_300_000)
    render.status(running, "s3://bucket/digits")
    assert capsys.readouterr().out.splitlines()[2].endswith(", running for 2.0 h")


def test_an_error_is_printed_unchanged_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.error(
        ConfigError("[Rank 0,3 Error Snippet]:\nit failed", do="pip install 'spotfit[s3]'")
    )
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "error: [Rank 0,3 Error Snippet]:",
        "it failed",
        "What to do: pip install 'spotfit[s3]'",
    ]


def test_an_error_without_remedy_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    render.error(ConfigError("it failed"))
    assert capsys.readouterr().err == "error: it failed\n"


def test_long_lines_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    render.lines(["x" * 500, "[red]no colour[/red]"])
    render.success("y" * 500)
    assert capsys.readouterr().out.splitlines() == [
        "x" * 500,
        "[red]no colour[/red]",
        f"✓ {'y' * 500}",
    ]


def test_long_metrics_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    one = CheckpointInfo("a", 0, {"note": "x" * 300, "loss": 0.123456789012345678, "n" * 50: 1}, 5)
    render.checkpoints([one])
    render.checkpoint(one)
    listed, *shown = capsys.readouterr().out.splitlines()
    assert listed.endswith(f"note={'x' * 39}…, loss={one.metrics['loss']}, {'n' * 39}…=1")
    assert shown[2] == f"metrics      note={'x' * 39}…, loss={one.metrics['loss']}, {'n' * 39}…=1"


def test_the_list_of_runs_has_their_cost(capsys: pytest.CaptureFixture[str]) -> None:
    costs = [a_bill(), a_bill(SPOT, UNPRICED), a_bill(LOCAL)]
    listed = [
        ListedRun(name="a", url="/a", state="finished", provisioner=provisioner, cost=cost)
        for cost, provisioner in zip(costs, ("aws_batch", "slurm", "local"), strict=True)
    ]
    render.runs(listed, "/")
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["state", "started", "duration", "step", "cost", "run"]
    assert [row.split()[4] for row in rows] == ["$12.40", "unknown", "-"]


HOSTILE = "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1A\r"


def test_control_characters_are_printed_by_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(
        EMPTY,
        name=HOSTILE,
        reason=HOSTILE,
        checkpoints=(HOSTILE,),
        save_reason=HOSTILE,
        feeders_stopped=HOSTILE,
        progress=ReportedProgress(step=1, metrics={HOSTILE: HOSTILE}),
        cost=a_bill(structs.replace(UNPRICED, offer=HOSTILE)),
    )
    render.status(run, HOSTILE)
    report = ReportedMetrics(1, 0, HOSTILE, {HOSTILE: HOSTILE})
    render.metrics([report])
    render.metrics_as_csv([report])
    render.lines([HOSTILE])
    render.success(HOSTILE)
    render.error(ConfigError(HOSTILE, do=HOSTILE))
    output = "".join(capsys.readouterr())
    assert "red" in output
    assert not set(output) & {"\x1b", "\x07", "\x9b", "\r"}


def test_lines_keep_their_colours_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    render.lines([HOSTILE])
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\n"
