"""Tests of the inspection of a machine."""

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


def test_a_report_lists_the_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_SCRATCH", str(tmp_path / "not-there-yet"))
    report = json.loads(selfcheck.format_report(selfcheck.inspect_node()))
    assert report["python"] == python_version()
    assert report["packages"]["msgspec"]
    assert report["user"] == os.getuid()
    assert report["scratch_bytes"] > 0
    assert report["problems"] == []


def test_every_problem_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_SCRATCH", "/proc/nothing-can-be-made-here")
    monkeypatch.setenv("SPOTFIT_PORT", "many")
    port, scratch = selfcheck.inspect_node().problems
    assert "'many'" in port
    assert "SPOTFIT_SCRATCH" in scratch


def test_a_port_in_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("SPOTFIT_PORT", str(taken.getsockname()[1]))
        (problem,) = selfcheck.inspect_node().problems
    assert "cannot listen" in problem


def test_the_size_is_that_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_DEVICES", "cuda:0,cuda:1")
    monkeypatch.setenv("SPOTFIT_INSTANCE", "i-1")
    size, report = selfcheck.measure_size(), selfcheck.inspect_node()
    assert size.gpus == 2
    assert 0 < size.memory_bytes <= size.machine_memory_bytes
    assert (report.cpus, report.memory_bytes, report.shared_memory_bytes, report.instance) == (
        size.cpus,
        size.memory_bytes,
        size.shared_memory_bytes,
        "i-1",
    )
