"""The command line: each command asks the client and shows the answer; errors are sentences."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from spotfit.cli.main import app
from spotfit.client.keyring import Keyring
from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError, LedgerError, RunNotFoundError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.events import Blame, Event, FitEnded, FitStarted, RoundClosed, RoundOpened
from spotfit.store.opening import open_store
from spotfit.testing.builders import RUN, a_commit, a_member, a_round, a_spec, an_agent

LONG = "word " * 60


class Folder:
    """A run's folder, written as its agents would."""

    def __init__(self, path: Path) -> None:
        self.url = str(path / "runs" / "digits")
        path.mkdir(exist_ok=True)
        self.store = open_store(self.url)
        self.ledger = Ledger(self.store, RUN, an_agent(0))

    def write(self, *events: Event) -> None:
        for event in events:
            self.ledger.append(event, after=self.ledger.catch_up())

    def say(self, agent: AgentId, *lines: dict[str, Any]) -> None:
        Ledger(self.store, RUN, agent).offer(a_member(0, agent=agent))
        body = b"".join(encode(line) + b"\n" for line in lines)
        self.store.create(keys.logs(agent, 0), body)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A run in its second round, with one checkpoint and one failure behind it."""
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    folder = Folder(tmp_path)
    folder.write(
        FitStarted(a_spec(storage_url=folder.url)),
        RoundOpened(a_round(1), "2 workers on 2 machines"),
        a_commit("checkpoint_[7]"),
        RoundClosed(1, Blame.WORKER, "rank 1 died"),
        RoundOpened(a_round(2, checkpoint="checkpoint_[7]")),
    )
    return folder


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_status_shows_a_run_at_a_glance(run: Folder) -> None:
    shown = called("status", run.url).stdout.splitlines()
    assert shown == [
        f"run          digits  {run.url}",
        "state        running",
        "round        2, 2 workers on 0 machines",
        "checkpoints  1, latest checkpoint_[7]",
        "failures     worker: 1",
    ]


def test_status_tells_why_a_run_ended(run: Folder) -> None:
    run.write(FitEnded("failed", f"[Rank 0] {LONG}"))
    [state] = [line for line in called("status", run.url).stdout.splitlines() if "state" in line]
    assert state == f"state        failed [Rank 0] {LONG}".rstrip(), "in one line, as it is"


def test_the_story_is_told_entry_by_entry(run: Folder) -> None:
    story = called("story", run.url).stdout.splitlines()
    assert [line.split("  ", 2)[-1] for line in (one.strip() for one in story)] == [
        "run 'digits' starts: 2 workers on 'local'",
        "round 1: 2 workers on 2 machines",
        "checkpoint checkpoint_[7] committed (0 B)",
        "round 1 is over: rank 1 died",
        "round 2: , from checkpoint_[7]",
    ]


def test_logs_are_printed_as_they_were_written(run: Folder) -> None:
    run.say(
        an_agent(0),
        {"rank": 0, "round": 1, "text": "loss [bold]1.0[/bold]"},
        {"rank": 1, "round": 1, "text": LONG},
        {"end": True},
    )
    shown = called("logs", run.url).stdout.splitlines()
    assert shown == ["(rank 0) loss [bold]1.0[/bold]", f"(rank 1) {LONG}"]


def test_follow_returns_when_the_run_has_ended(run: Folder) -> None:
    run.write(FitEnded("finished"))
    for agent in (an_agent(0), an_agent(1)):
        run.say(agent, {"rank": 0, "round": 2, "text": f"by {agent}"}, {"end": True})
    shown = called("follow", run.url)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == ["(rank 0) by a0", "(rank 0) by a1"]


def test_cancel_asks_the_run_to_end(run: Folder) -> None:
    assert "asked to end" in called("cancel", run.url).stdout
    assert run.ledger.catch_up().cancelled == "spotfit cancel"


def test_sweep_needs_the_key_of_the_run(run: Folder) -> None:
    assert isinstance(called("sweep", run.url, "--for-s", "0").exception, LedgerError)
    Keyring().make(RUN)
    assert "goes on, led by nobody" in called("sweep", run.url, "--for-s", "0").stdout


def test_sweep_of_a_run_that_left_nothing_behind_is_done_at_once(run: Folder) -> None:
    Keyring().make(RUN)
    run.write(FitEnded("finished"))
    shown = called("sweep", run.url, "--for-s", "60").stdout
    assert "The run is finished; nothing is left behind." in shown


def test_doctor_tries_the_bucket_and_the_provisioner(tmp_path: Path) -> None:
    shown = called("doctor", "--storage", str(tmp_path / "bucket")).stdout
    assert "✓ the provisioner 'local'" in shown
    assert "exactly one winner" in shown
    assert isinstance(called("doctor", "--provisioner", "locla").exception, ConfigError)


def test_doctor_takes_a_provisioner_as_fit_does() -> None:
    shown = called("doctor", "--provisioner", "local?nodes=2").stdout
    assert "nodes=2" in shown
    assert isinstance(called("doctor", "--provisioner", "local?nodez=2").exception, ConfigError)


def test_doctor_says_how_to_mend_what_is_wrong_and_fails() -> None:
    told = called("doctor", "--provisioner", "plain?nodes=2")
    assert isinstance(told.exception, ConfigError)
    told = called("doctor", "--provisioner", "aws_batch")
    assert told.exit_code == 1
    assert "✗ its options make a plan" in told.stdout
    assert "What to do:" in told.stdout


@pytest.mark.parametrize("command", ["status", "story", "logs", "cancel", "sweep", "follow"])
def test_where_no_run_is_every_command_says_so(tmp_path: Path, command: str) -> None:
    assert isinstance(called(command, str(tmp_path)).exception, RunNotFoundError)


def test_without_a_command_there_is_help() -> None:
    shown = called().output
    for command in ("status", "story", "logs", "follow", "cancel", "sweep", "doctor"):
        assert command in shown


def test_an_error_is_a_sentence_and_a_remedy_and_exit_code_2(tmp_path: Path) -> None:
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
    assert second.startswith("What to do: Give the folder of one run")
