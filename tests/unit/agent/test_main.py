"""Tests of the agent's command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotfit.agent.__main__ import main
from spotfit.provision.launch import AgentExitCode


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")


def test_check_of_a_usable_machine_returns_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTFIT_SCRATCH", str(tmp_path))
    assert main(["--check"]) == AgentExitCode.DONE
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_check_of_an_unusable_machine_lists_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTFIT_PORT", "many")
    assert main(["--check"]) == AgentExitCode.NODE_UNUSABLE
    assert "'many'" in json.loads(capsys.readouterr().out)["problems"][0]


def test_an_unknown_argument_returns_node_unusable() -> None:
    assert main(["--chek"]) == AgentExitCode.NODE_UNUSABLE
