"""Each command calls the client and prints the result; errors are printed without traceback."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from spotfit.cli.main import app
from spotfit.client import run_handle, run_list
from spotfit.client.console import format_local_time, read_events
from spotfit.client.keyring import RunKeyring
from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError, RunNotFoundError
from spotfit.core.ids import AgentId, RunId
from spotfit.host import plugins, system
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupSubmitted,
    JournalEvent,
    RoundClosed,
    RoundOpened,
    TrainingFunctionStarted,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.store.factory import open_store
from spotfit.testing.builders import (
    RUN_ID,
    RUN_KEY,
    TOKEN,
    a_committed_checkpoint,
    a_member,
    a_round,
    a_spec,
    an_agent_id,
)
from tests.house.tree import ROOT
from tests.unit.client.bills import SPOT, UNPRICED, a_bill

LONG = "word " * 60


class RunDirectory:
    """The directory of a run, written as by its agents."""

    def __init__(self, path: Path) -> None:
        self.url = str(path / "runs" / "digits")
        path.mkdir(exist_ok=True)
        self.store = AuthenticatedStore(open_store(self.url), RUN_KEY)
        self.ledger = Ledger(self.store, RUN_ID, an_agent_id(0))

    def write(self, *events: JournalEvent) -> None:
        for event in events:
            self.ledger.append(event, after=self.ledger.catch_up())

    def write_output(self, agent: AgentId, *lines: dict[str, Any]) -> None:
        Ledger(self.store, RUN_ID, agent).publish_member(a_member(0, agent=agent))
        body = b"".join(encode(line) + b"\n" for line in lines)
        self.store.create(keys.logs(agent, 0), body)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run in its second round, with one checkpoint and one earlier failure."""
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", RUN_KEY.to_text())
    directory = RunDirectory(tmp_path)
    directory.write(
        FitStarted(spec=a_spec(storage_url=directory.url)),
        RoundOpened(round=a_round(1), reason="2 workers on 2 machines"),
        a_committed_checkpoint("checkpoint_[7]"),
        RoundClosed(round_number=1, cause=FailureCause.WORKER, reason="rank 1 died"),
        RoundOpened(round=a_round(2, checkpoint_name="checkpoint_[7]")),
    )
    return directory


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_status_prints_the_current_state(run: RunDirectory) -> None:
    shown = invoke("status", run.url).stdout.splitlines()
    assert shown == [
        f"run          digits  {run.url}",
        "state        running",
        "started      unknown",
        "round        2, 2 workers on 0 machines, starting: training function not called yet",
        "progress     no report yet",
        "checkpoints  1, latest checkpoint_[7]",
        "failures     worker: 1",
    ]


def test_status_prints_how_long_the_workers_took_to_start(run: RunDirectory) -> None:
    run.write(TrainingFunctionStarted(round_number=2, startup_s=38.0))
    row = "round        2, 2 workers on 0 machines, training function called after 38 s"
    assert row in invoke("status", run.url).stdout.splitlines()


def test_status_prints_the_reason_of_the_end(run: RunDirectory) -> None:
    run.write(FitEnded(outcome="failed", reason=f"[Rank 0] {LONG}"))
    [state] = [line for line in invoke("status", run.url).stdout.splitlines() if "state" in line]
    assert state == f"state        failed [Rank 0] {LONG}".rstrip(), (
        "the text is printed unchanged on one line"
    )


def test_events_prints_one_line_per_journal_entry(run: RunDirectory) -> None:
    shown = invoke("events", run.url).stdout.splitlines()
    assert [line.split("  ", 2)[-1] for line in (each.strip() for each in shown)] == [
        "run 'digits' started: 2 workers, provisioner 'local'",
        "round 1 started: 2 workers on 2 machines",
        "checkpoint checkpoint_[7] committed (0 B)",
        "round 1 ended: rank 1 died",
        "round 2 started: , from checkpoint_[7]",
    ]


def test_events_have_the_local_date_and_time(run: RunDirectory) -> None:
    first, *_ = read_events(run.store)
    shown = invoke("events", run.url).stdout.splitlines()[0]
    assert shown.split("  ")[-2] == format_local_time(first.written_at_ms)


def test_logs_prints_output_unchanged(run: RunDirectory) -> None:
    run.write_output(
        an_agent_id(0),
        {"rank": 0, "round": 1, "text": "loss [bold]1.0[/bold]"},
        {"rank": 1, "round": 1, "text": LONG},
        {"end": True},
    )
    shown = invoke("logs", run.url).stdout.splitlines()
    assert shown == ["(rank 0) loss [bold]1.0[/bold]", f"(rank 1) {LONG}"]


def test_logs_are_filtered_by_rank_and_time(run: RunDirectory) -> None:
    now_ms = system.wall_ms()
    run.write_output(
        an_agent_id(0),
        {"rank": 0, "t": now_ms - 3_600_000, "text": "old"},
        {"rank": 0, "t": now_ms - 1000, "text": "new"},
        {"rank": 1, "t": now_ms - 1000, "text": "other"},
    )
    assert invoke("logs", run.url, "--rank", "0").stdout == "(rank 0) old\n(rank 0) new\n"
    assert invoke("logs", run.url, "--since", "10m").stdout == "(rank 0) new\n(rank 1) other\n"


def test_logs_prints_only_the_last_lines_with_tail(run: RunDirectory) -> None:
    lines = [{"rank": 0, "t": n, "text": str(n)} for n in range(5)]
    run.write_output(an_agent_id(0), *lines)
    assert invoke("logs", run.url, "--tail", "2").stdout == "(rank 0) 3\n(rank 0) 4\n"
    refused = invoke("logs", run.url, "--tail", "2", "--follow").exception
    assert isinstance(refused, ConfigError)


@pytest.mark.parametrize(
    "options", [("--rank", "0"), ("--since", "10m"), ("--tail", "5"), ("--follow",), ("-f",)]
)
def test_options_for_the_output_of_workers_are_rejected_with_machine(
    run: RunDirectory, options: tuple[str, ...]
) -> None:
    failed = invoke("logs", run.url, "--machine", "all", *options)
    assert isinstance(failed.exception, ConfigError)
    assert "--machine" in failed.exception.message


@pytest.mark.parametrize(
    "arguments",
    [("logs", "--rank", "-1"), ("logs", "--max-lines", "0"), ("sweep", "--duration-s", "-1")],
)
def test_negative_numbers_are_rejected(run: RunDirectory, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    failed = invoke(command, run.url, *options)
    assert failed.exit_code == 2
    assert "Invalid value" in failed.stderr


def test_metrics_as_table_and_as_json_at_once_are_rejected(run: RunDirectory) -> None:
    assert isinstance(invoke("metrics", run.url, "--csv", "--json").exception, ConfigError)


def test_a_run_without_reports_is_named(run: RunDirectory) -> None:
    assert invoke("metrics", run.url).stdout == "The run has no reports.\n"
    assert invoke("metrics", run.url, "--json").stdout == ""


def test_logs_with_timestamps_have_the_local_time(run: RunDirectory) -> None:
    run.write_output(an_agent_id(0), {"rank": 0, "t": 1_700_000_000_000, "text": "a"})
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    assert invoke("logs", run.url, "--timestamps").stdout == f"{when} (rank 0) a\n"


def test_metrics_prints_one_line_or_row_per_report(run: RunDirectory) -> None:
    reports = [
        {"round": 1, "report_index": 0, "t": 1500, "checkpoint": None, "metrics": {"loss": 1.5}},
        {
            "round": 1,
            "report_index": 1,
            "t": 2500,
            "checkpoint": "c1",
            "metrics": {"loss": {"__float__": "nan"}, "eval": {"acc": 0.5}},
        },
    ]
    body = b"".join(encode(report) + b"\n" for report in reports)
    run.store.put(keys.reports(an_agent_id(0), 0), body)
    assert invoke("metrics", run.url).stdout.splitlines() == [
        "round 1  report 0  loss=1.5",
        "round 1  report 1  eval={'acc': 0.5}, loss=nan  c1",
    ]
    assert invoke("metrics", run.url, "--csv").stdout.splitlines() == [
        "round,report_index,time,checkpoint,loss,eval/acc",
        "1,0,1.5,,1.5,",
        "1,1,2.5,c1,nan,0.5",
    ]


def test_follow_returns_at_the_end_of_the_run(run: RunDirectory) -> None:
    run.write(FitEnded(outcome="finished"))
    for agent in (an_agent_id(0), an_agent_id(1)):
        run.write_output(agent, {"rank": 0, "round": 2, "text": f"by {agent}"}, {"end": True})
    shown = invoke("follow", run.url)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == ["(rank 0) by a0", "(rank 0) by a1"]
    assert "run.summary: run 'digits' finished" in shown.stderr


def test_ls_prints_one_line_per_run(run: RunDirectory) -> None:
    root = run.url.removesuffix("/digits")
    header, line = invoke("ls", root).stdout.splitlines()
    assert header.split() == ["state", "started", "duration", "step", "cost", "run"]
    assert line.split() == ["running", "-", "-", "-", "-", run.url, "checkpoint_[7]"]


def test_cost_prints_a_line_per_run_and_the_sum(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "bill_of", lambda *_: a_bill(is_final=False))
    root = run.url.removesuffix("/digits")
    open_store(f"{root}/damaged").put(keys.entry(0), b"{")
    open_store(f"{root}/free").put("notes.txt", b"no run")
    shown = invoke("cost", run.url, root, f"{root}/free")
    assert shown.exit_code == 0
    header, line, damaged, *rest = shown.stdout.splitlines()
    assert header.split("  ")[0] == "state"
    assert line == (
        "running     $12.40      $12.55      $41.10      70 %    18.2 machine-hours  " + run.url
    )
    assert damaged.split()[:3] == ["unreadable", "-", "-"]
    assert "cannot be decoded" in damaged
    assert rest == [
        f"There are no runs below {root}/free.",
        "total of 2 runs: $12.40 (at most $12.55) so far; on demand $41.10, saved 70 %; "
        "18.2 machine-hours",
        "  aws_batch/us-east-1/on_demand: 2.0 machine-hours, $8.25",
        "  aws_batch/us-east-1/q/spot: 16.2 machine-hours, $4.15 (at most $4.30); on demand $32.85",
        "not included: 1 run that cannot be read",
    ]


def test_cost_as_json_ends_with_the_total(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "bill_of", lambda *_: a_bill())
    lines = invoke("cost", run.url, "--json").stdout.splitlines()
    one, total = (json.loads(line) for line in lines)
    assert (one["kind"], one["url"], one["cost"]["is_final"]) == ("run", run.url, True)
    assert (total["kind"], total["runs"], total["active"]) == ("total", 1, 1)
    assert one["cost"]["usd"] == total["cost"]["usd"] == 4.15 + 8.25


def test_status_prints_the_cost_by_offer(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_handle, "bill_of", lambda *_: a_bill(SPOT, UNPRICED))
    assert invoke("status", run.url).stdout.splitlines()[7:] == [
        "cost         $4.15 (at most $4.30) and 5.0 machine-hours of unknown price "
        "(slurm/h100/on_demand); 21.2 machine-hours",
        "             aws_batch/us-east-1/q/spot: 16.2 machine-hours, $4.15 (at most $4.30); "
        "on demand $32.85",
        "             slurm/h100/on_demand: 5.0 machine-hours, price unknown",
    ]


def test_ls_without_runs_prints_a_message(tmp_path: Path) -> None:
    assert invoke("ls", str(tmp_path)).stdout == f"There are no runs below {tmp_path}.\n"


def test_json_output_has_one_object_per_line(run: RunDirectory) -> None:
    def records(*arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in invoke(*arguments, "--json").stdout.splitlines()]

    report = {"round": 2, "report_index": 0, "checkpoint": None, "metrics": {"x": float("inf")}}
    run.store.put(keys.reports(an_agent_id(0), 0), encode(report) + b"\n")
    [status] = records("status", run.url)
    assert (status["state"], status["round"], status["failures"]) == ("running", 2, {"worker": 1})
    [listed] = records("ls", run.url.removesuffix("/digits"))
    assert (listed["name"], listed["latest_checkpoint"]) == ("digits", "checkpoint_[7]")
    assert [event["type"] for event in records("events", run.url)] == [
        "fit_started",
        "round_opened",
        "checkpoint_committed",
        "round_closed",
        "round_opened",
    ]
    assert [each["metrics"] for each in records("metrics", run.url)] == [{"x": None}]
    assert [each["name"] for each in records("checkpoints", "ls", run.url)] == ["checkpoint_[7]"]
    assert records("checkpoints", "show", run.url)[0]["metrics"] == {"loss": 1.0}


def test_a_plugin_adds_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = typer.Typer(help="Commands of a plugin.")

    @plugin.command()
    def greet() -> None:
        typer.echo("hello")

    @plugin.command()
    def other() -> None: ...

    monkeypatch.setattr(plugins, "names", lambda group: ("mine",) * (group == "spotfit.commands"))
    monkeypatch.setattr(plugins, "load", lambda _group, name: {"mine": plugin}[name])
    assert invoke("mine", "greet").stdout == "hello\n"
    assert "mine" in invoke("--help").stdout
    assert invoke("yours", "greet").exit_code == 2


def test_a_plugin_that_cannot_be_loaded_does_not_hide_the_other_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Help and completion would fail otherwise, on Windows because of `local`."""

    def fail(_group: str, name: str) -> None:
        raise ConfigError(f"The plugin {name!r} does not run here.", do="Run it elsewhere.")

    monkeypatch.setattr(plugins, "names", lambda _group: ("mine",))
    monkeypatch.setattr(plugins, "load", fail)
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert "status" in shown.stdout
    assert "does not run here" in shown.stdout
    for arguments in ((), ("kill", "--node", "1"), ("--help",)):
        failed = invoke("mine", *arguments)
        assert isinstance(failed.exception, ConfigError), arguments
        assert failed.exception.do == "Run it elsewhere."


def test_the_commands_of_the_local_backend_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["spotfit.commands"]["local"].partition(":")
    local = getattr(importlib.import_module(module), name)
    assert {command.callback.__name__ for command in local.registered_commands} == {
        *("list_nodes", "notice", "kill")
    }


def test_commands_are_completed_by_the_shell() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", "from spotfit.cli.main import app; app(prog_name='spotfit')"],
        env=os.environ
        | {
            "_SPOTFIT_COMPLETE": "complete_bash",
            "COMP_WORDS": "spotfit checkp",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.split() == ["checkpoints"]


def test_cancel_requests_the_end_of_the_run(run: RunDirectory) -> None:
    assert "Cancellation was requested" in invoke("cancel", run.url).stdout
    assert run.ledger.catch_up().cancel_reason == "spotfit cancel"


def test_cancelling_an_ended_run_is_reported(run: RunDirectory) -> None:
    run.write(FitEnded(outcome="failed"))
    assert "The run has ended already: failed." in invoke("cancel", run.url).stdout
    assert run.ledger.catch_up().cancel_reason is None


def test_the_version_is_printed() -> None:
    assert invoke("--version").stdout == f"spotfit {metadata.version('spotfit')}\n"


def test_sweep_without_the_run_key_is_refused(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = invoke("sweep", run.url, "--duration-s", "0").stdout
    assert "The run is active; leader: none." in shown
    monkeypatch.delenv("SPOTFIT_RUN_SECRET")
    assert isinstance(invoke("sweep", run.url, "--duration-s", "0").exception, ConfigError)


def test_status_without_the_run_key_states_that_nothing_is_verified(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "not verified: this machine does not have the run's key"
    assert note not in invoke("status", run.url).stdout
    monkeypatch.delenv("SPOTFIT_RUN_SECRET")
    assert note in invoke("status", run.url).stdout


def test_sweep_of_an_ended_run_without_machines_returns_at_once(run: RunDirectory) -> None:
    run.write(FitEnded(outcome="finished"))
    shown = invoke("sweep", run.url, "--duration-s", "60").stdout
    assert "The run is finished; its machines are released." in shown


def test_sweep_whose_time_ends_before_the_release_names_the_machines(run: RunDirectory) -> None:
    request = GroupRequest(token=TOKEN, num_workers=1, total_workers=1)
    plan = GroupPlan(token=TOKEN, provisioner="local", num_nodes=1, slots_per_node=1)
    run.write(GroupPlanned(request=request, plan=plan, reason="1 worker needs a machine"))
    handle = GroupHandle(token=TOKEN, provisioner="local", name="r/t", detail={"nodes": 1})
    run.write(GroupSubmitted(token=TOKEN, handle=handle))
    run.write(FitEnded(outcome="finished"))
    shown = invoke("sweep", run.url, "--duration-s", "0").stdout
    assert f"The run is finished; machines {TOKEN} are not released yet" in shown


def test_keys_of_runs_that_do_not_exist_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path))
    keyring, runs = RunKeyring(), tmp_path / "runs"
    for number, name in enumerate(("gone", "there")):
        keyring.create(RunId(f"{number}" * 32), url=str(runs / name))
    open_store(runs).put("there/model", b"")
    assert "deleted" not in invoke("keys", "--prune").stdout  # fit() may be starting
    monkeypatch.setattr(system, "wall_ms", lambda: (time.time() + 7200) * 1000)
    assert [line.split()[1] for line in invoke("keys").stdout.splitlines()] == ["unused", "used"]
    assert "deleted" in invoke("keys", "--prune").stdout
    assert [key.run_id for key in keyring.list_keys(now=time.time())] == [RunId("1" * 32)]


def test_doctor_checks_storage_and_provisioner(tmp_path: Path) -> None:
    shown = invoke("doctor", "--storage", str(tmp_path / "bucket")).stdout
    assert "✓ provisioner 'local'" in shown
    assert "its `create` is atomic" in shown
    assert isinstance(invoke("doctor", "--provisioner", "locla").exception, ConfigError)


def test_doctor_accepts_provisioner_options_in_the_name() -> None:
    shown = invoke("doctor", "--provisioner", "local?nodes=2").stdout
    assert "nodes=2" in shown
    assert isinstance(invoke("doctor", "--provisioner", "local?nodez=2").exception, ConfigError)


def test_doctor_prints_remedies_and_fails() -> None:
    shown = invoke("doctor", "--provisioner", "plain?nodes=2")
    assert isinstance(shown.exception, ConfigError)
    shown = invoke("doctor", "--provisioner", "aws_batch")
    assert shown.exit_code == 1
    assert "✗ the options are valid for one worker" in shown.stdout
    assert "What to do:" in shown.stdout


@pytest.mark.parametrize("command", ["status", "events", "logs", "cancel", "sweep", "follow"])
def test_every_command_reports_a_missing_run(tmp_path: Path, command: str) -> None:
    assert isinstance(invoke(command, str(tmp_path)).exception, RunNotFoundError)


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (("status",), "status [OPTIONS] {URL}"),
        (("ls",), "ls [OPTIONS] [STORAGE_PATH]"),
        (("checkpoints", "show"), "show [OPTIONS] {URL} [NAME]"),
        (("local", "kill"), "kill [OPTIONS] [RUN]"),
    ],
)
def test_help_names_arguments_as_the_guide_does(arguments: tuple[str, ...], usage: str) -> None:
    assert usage in invoke(*arguments, "--help").stdout


def test_without_a_command_help_is_printed() -> None:
    shown = invoke().output
    for command in ("status", "events", "logs", "follow", "cancel", "sweep", "doctor"):
        assert command in shown


def test_an_error_is_printed_with_remedy_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from spotfit.cli.main import main; main()",
            "status",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 2
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first == f"error: There is no run at {tmp_path}."
    assert second.startswith("What to do: Pass the directory of one run")
