"""Crash points exist in production code, and each injected crash happens in one process."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.host import env
from spotfit_localsim.live import crash_points
from spotfit_localsim.live.crash_points import CHAOS_DIR_ENV, CRASH_POINTS, InjectedCrash


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a chaos run; crash points of this process are disarmed afterwards."""
    monkeypatch.setenv(CHAOS_DIR_ENV, str(tmp_path))
    monkeypatch.setattr(crash_points, "_armed_processes", set())
    plain = {
        crash_point.target: crash_points.resolve_target(crash_point)
        for crash_point in CRASH_POINTS.values()
    }
    before = {target: owner.__dict__[name] for target, (owner, name) in plain.items()}
    yield tmp_path
    for target, (owner, name) in plain.items():
        setattr(owner, name, before[target])


@pytest.mark.parametrize("crash_point", CRASH_POINTS)
def test_every_crash_point_names_an_existing_method(crash_point: str) -> None:
    owner, name = crash_points.resolve_target(CRASH_POINTS[crash_point])
    assert callable(getattr(owner, name))


def test_disk_full_is_raised_at_the_second_call(folder: Path) -> None:
    crash_points.write_injected_crashes((InjectedCrash("segment_create", 2, "disk_full"),), folder)
    crash_points.arm("worker")
    ShmSegment.create(folder / "a", 10).close()
    with pytest.raises(OSError, match="No space left") as raised:
        ShmSegment.create(folder / "b", 10)
    assert raised.value.errno == errno.ENOSPC
    ShmSegment.create(folder / "c", 10).close()
    ((_, description),) = crash_points.triggered_crashes(folder)
    assert description == f"disk_full at segment_create: pid {os.getpid()}"


def test_crash_point_kills_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    crash_points.write_injected_crashes((InjectedCrash("snapshot_started"),), folder)
    crash_points.arm("agent")
    ShmSegment.create(folder / "a", 10).invalidate()
    assert killed == [], "it is armed in workers only"
    crash_points.arm("worker")
    ShmSegment.create(folder / "b", 10).invalidate()
    assert killed == [(os.getpid(), signal.SIGKILL)]
    monkeypatch.setattr(crash_points, "_armed_processes", set())
    crash_points.arm("worker")  # as another process would
    ShmSegment.create(folder / "c", 10).invalidate()
    assert len(killed) == 1


def test_processes_outside_chaos_runs_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHAOS_DIR_ENV, raising=False)
    before = ShmSegment.invalidate
    crash_points.arm("worker")
    assert ShmSegment.invalidate is before
    assert env.lookup(CHAOS_DIR_ENV) is None
