"""Mines lie where they are said to, and one process steps on each."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.checkpoint.segment import Segment
from spotfit.host import env
from spotfit_localsim.live import mines
from spotfit_localsim.live.mines import MARK, MOMENTS, Mine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a story; what is mined in this process is swept afterwards."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(mines, "_laid", set())
    plain = {moment.place: mines.place_of(moment) for moment in MOMENTS.values()}
    before = {place: owner.__dict__[name] for place, (owner, name) in plain.items()}
    yield tmp_path
    for place, (owner, name) in plain.items():
        setattr(owner, name, before[place])


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_moment_is_somewhere(moment: str) -> None:
    owner, name = mines.place_of(MOMENTS[moment])
    assert callable(getattr(owner, name))


def test_there_is_no_room_the_second_time(folder: Path) -> None:
    mines.put((Mine("a segment is made", 2, "is full"),), folder)
    mines.lay("worker")
    Segment.create(folder / "a", 10).close()
    with pytest.raises(OSError, match="No space left") as full:
        Segment.create(folder / "b", 10)
    assert full.value.errno == errno.ENOSPC
    Segment.create(folder / "c", 10).close()
    ((_, told),) = mines.sprung(folder)
    assert told == f"is full when a segment is made: {os.getpid()}"


def test_only_one_process_dies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *told: killed.append(told))
    mines.put((Mine("a snapshot begins"),), folder)
    mines.lay("agent")
    Segment.create(folder / "a", 10).begin()
    assert killed == [], "it lies where workers come by"
    mines.lay("worker")
    Segment.create(folder / "b", 10).begin()
    assert killed == [(os.getpid(), signal.SIGKILL)]
    monkeypatch.setattr(mines, "_laid", set())
    mines.lay("worker")  # as another process would
    Segment.create(folder / "c", 10).begin()
    assert len(killed) == 1


def test_nobody_else_is_in_danger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    before = Segment.begin
    mines.lay("worker")
    assert Segment.begin is before
    assert env.lookup(MARK) is None
