"""LocalSnapshotChannel: a snapshot is committed as soon as it is submitted."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.worker.local_session import LocalSession, LocalSnapshotChannel
from tests.unit.checkpoint.snapshots import random_bytes, write_segment


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LocalSession]:
    session = LocalSession("run")
    yield session
    shutil.rmtree(session.snapshot_channel.segment_dirs[0].parent)


def submit(snapshots: LocalSnapshotChannel, tmp_path: Path, n: int) -> int:
    return snapshots.submit({"n": n}, write_segment(tmp_path / f"{n}", [random_bytes(n, 50)]))


def test_a_submitted_snapshot_is_committed_and_can_be_opened(
    session: LocalSession, tmp_path: Path
) -> None:
    snapshots = session.snapshot_channel
    assert snapshots.initial_checkpoint is None
    assert [submit(snapshots, tmp_path, n) for n in (0, 1)] == [0, 1]
    assert session.metrics == {"n": 1}
    assert snapshots.has_snapshots
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.path.endswith("checkpoint_000001")
    saved = snapshots.open_checkpoint(snapshots.initial_checkpoint or "")
    assert saved is not None
    assert bytes(saved.readers[0].fetch(saved.indices[0].chunks[0])) == random_bytes(1, 50)
    assert (snapshots.status_of(0), snapshots.wait_for_upload(1)) == ("committed", "committed")
    assert snapshots.broadcast_bytes("checkpoint", b"own") == b"own"


def test_a_skipped_snapshot_is_not_committed(session: LocalSession) -> None:
    session.snapshot_channel.skip({}, "out of memory")
    assert session.snapshot_channel.initial_checkpoint is None
    assert not session.snapshot_channel.has_snapshots


def test_segments_are_deleted_at_exit_and_checkpoints_are_kept(tmp_path: Path) -> None:
    session = LocalSession("run")
    [segments] = session.snapshot_channel.segment_dirs
    segments.mkdir()
    own, of_peer = session.snapshot_channel.new_segment_path(segments), segments / "1-1.segment"
    for path in (own, of_peer):
        path.write_bytes(b"a snapshot")
    submit(session.snapshot_channel, tmp_path, 0)
    checkpoint = session.latest_checkpoint()
    del session
    gc.collect()
    assert [path.name for path in segments.iterdir()] == [of_peer.name]
    assert checkpoint is not None
    assert [index.rank for index in checkpoint.open_snapshot().indices] == [0]
    shutil.rmtree(segments.parent)
