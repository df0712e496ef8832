"""The agent's command: what it is told by its environment, and what it says of its machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotfit.agent.__main__ import main
from spotfit.provision.launch import Exit


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")


def test_a_machine_that_will_do_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTFIT_SCRATCH", str(tmp_path))
    assert main(["--check"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["complaints"] == []


def test_a_machine_that_will_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTFIT_PORT", "many")
    assert main(["--check"]) == Exit.REFUSED
    assert "'many'" in json.loads(capsys.readouterr().out)["complaints"][0]


def test_a_word_that_is_none_starts_no_agent() -> None:
    assert main(["--chek"]) == Exit.REFUSED
