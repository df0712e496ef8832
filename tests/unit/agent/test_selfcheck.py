"""What a machine could do for a run, told without one."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from spotfit.agent import selfcheck
from spotfit.host.machine import python_version


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_HOST", "127.0.0.1")


def test_a_machine_that_will_do_says_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_SCRATCH", str(tmp_path / "not-there-yet"))
    told = json.loads(selfcheck.told(selfcheck.report()))
    assert told["python"] == python_version()
    assert told["packages"]["msgspec"]
    assert told["user"] == os.getuid()
    assert told["scratch_bytes"] > 0
    assert told["complaints"] == []


def test_every_complaint_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_SCRATCH", "/proc/nothing-can-be-made-here")
    monkeypatch.setenv("SPOTFIT_PORT", "many")
    port, scratch = selfcheck.report().complaints
    assert "'many'" in port
    assert "SPOTFIT_SCRATCH" in scratch


def test_an_address_nobody_could_call_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("SPOTFIT_PORT", str(taken.getsockname()[1]))
        (complaint,) = selfcheck.report().complaints
    assert "cannot listen" in complaint
