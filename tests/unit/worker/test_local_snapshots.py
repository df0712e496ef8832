"""In local mode a snapshot is a checkpoint at once."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.worker.local import LocalSession
from spotfit.worker.local_snapshots import LocalSnapshots
from tests.unit.checkpoint.snapshots import bytes_of, filled


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LocalSession]:
    session = LocalSession("run")
    yield session
    shutil.rmtree(session.snapshots.folders[0].parent)


def given(snapshots: LocalSnapshots, tmp_path: Path, n: int) -> int:
    return snapshots.give({"n": n}, filled(tmp_path / f"{n}", [bytes_of(n, 50)]))


def test_it_is_reported_and_can_be_gone_on_from(session: LocalSession, tmp_path: Path) -> None:
    snapshots = session.snapshots
    assert snapshots.begun_from is None
    assert [given(snapshots, tmp_path, n) for n in (0, 1)] == [0, 1]
    assert session.metrics == {"n": 1}
    assert snapshots.has_snapshots
    checkpoint = session.checkpoint()
    assert checkpoint is not None
    assert checkpoint.path.endswith("checkpoint_000001")
    saved = snapshots.open(snapshots.begun_from or "")
    assert saved is not None
    assert bytes(saved.parts[0].fetch(saved.indices[0].chunks[0])) == bytes_of(1, 50)
    assert (snapshots.fate(0), snapshots.wait(1)) == ("committed", "committed")
    assert snapshots.agreed("checkpoint", b"mine") == b"mine"


def test_without_room_there_is_none(session: LocalSession) -> None:
    session.snapshots.withhold({}, "no room")
    assert session.snapshots.begun_from is None
    assert not session.snapshots.has_snapshots


def test_its_memory_goes_with_the_process_and_the_checkpoint_stays(tmp_path: Path) -> None:
    session = LocalSession("run")
    [segments] = session.snapshots.folders
    segments.mkdir()
    mine, of_a_peer = session.snapshots.path_for(segments), segments / "1-1.segment"
    for path in (mine, of_a_peer):
        path.write_bytes(b"a snapshot")
    given(session.snapshots, tmp_path, 0)
    checkpoint = session.checkpoint()
    del session
    gc.collect()
    assert [path.name for path in segments.iterdir()] == [of_a_peer.name]
    assert checkpoint is not None
    assert [index.rank for index in checkpoint.snapshot().indices] == [0]
    shutil.rmtree(segments.parent)
