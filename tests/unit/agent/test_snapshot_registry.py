"""SnapshotRegistry: submitted snapshots, uploads, replicas and deletion."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.snapshot_registry import SnapshotRegistry
from spotfit.checkpoint.node_sharing import RING_SUFFIX
from spotfit.checkpoint.replication import PendingReplica
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.writer import decode_upload_job
from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.model.topology import SnapshotId, SnapshotShard
from spotfit.protocol.worker_agent import CheckpointNamed, SnapshotReport, StartWorker
from tests.unit.agent.pending_replicas import make_pending_replica
from tests.unit.checkpoint.snapshots import write_segment
from tests.unit.worker.agent_end import make_start as a_start

_METRICS = msgspec.Raw(b'{"loss":1.5}')


def start(round_number: int) -> StartWorker:
    return replace(a_start(), round=round_number)


def test_a_named_snapshot_is_uploaded(tmp_path: Path) -> None:
    snapshots = SnapshotRegistry(str(tmp_path))
    assert snapshots.prepare_start(start(3)).segment_dir == str(tmp_path)
    snapshots.add(
        1,
        SnapshotReport(
            report_index=0, metrics=_METRICS, segment="/shm/3-0-1.segment", reason="asked for"
        ),
    )
    assert (
        snapshots.make_upload(
            0, CheckpointNamed(report_index=0, checkpoint_name="c", ranks=(0, 1), metrics=_METRICS)
        )
        is None
    ), "the snapshot has no report of this rank"
    upload = snapshots.make_upload(
        1,
        CheckpointNamed(
            report_index=0, checkpoint_name="c", ranks=(0, 1), metrics=_METRICS, parent="base"
        ),
    )
    assert upload is not None
    assert upload.is_snapshot
    assert (
        upload.round,
        upload.rank,
        upload.request.report_index,
        upload.request.checkpoint_name,
    ) == (
        3,
        1,
        0,
        "c",
    )
    job = decode_upload_job(upload.request.upload_job)
    assert job is not None
    assert (job.segment_path, job.parent) == ("/shm/3-0-1.segment", "base")
    manifest = job.manifest
    assert (
        manifest.name,
        manifest.round,
        manifest.report_index,
        manifest.rank,
        manifest.ranks,
    ) == (
        "c",
        3,
        0,
        1,
        (0, 1),
    )
    assert manifest.metrics == {"loss": 1.5}
    assert manifest.reason == "asked for", "the reason is in the manifest"
    assert (
        snapshots.make_upload(
            1, CheckpointNamed(report_index=0, checkpoint_name="c", ranks=(0, 1), metrics=_METRICS)
        )
        is None
    ), "the upload is in progress"


def test_a_snapshot_without_a_name_is_not_uploaded(tmp_path: Path) -> None:
    snapshots = SnapshotRegistry(str(tmp_path))
    snapshots.prepare_start(start(1))
    snapshots.add(0, SnapshotReport(report_index=0, metrics=_METRICS, segment="/shm/1-0-1.segment"))
    snapshots.add(0, SnapshotReport(report_index=1, metrics=_METRICS, segment="/shm/1-0-2.segment"))
    assert (
        snapshots.make_upload(
            0, CheckpointNamed(report_index=0, checkpoint_name="", ranks=(), metrics=_METRICS)
        )
        is None
    )
    snapshots.forget(0, 1)
    assert (
        snapshots.make_upload(
            0, CheckpointNamed(report_index=1, checkpoint_name="c", ranks=(0,), metrics=_METRICS)
        )
        is None
    )


def test_segments_of_earlier_rounds_are_deleted_once_a_snapshot_is_named(tmp_path: Path) -> None:
    old, new = tmp_path / "1-0-0-1.segment", tmp_path / "11-0-0-1.segment"
    old.touch()
    new.touch()
    snapshots = SnapshotRegistry(str(tmp_path))
    snapshots.prepare_start(start(11))
    assert old.exists(), "it may be the only state to resume from"
    snapshots.add(0, SnapshotReport(report_index=0, metrics=_METRICS, segment=str(new)))
    assert old.exists(), "another rank may have died before it submitted its shard"
    snapshots.make_upload(
        0, CheckpointNamed(report_index=0, checkpoint_name="c", ranks=(0,), metrics=_METRICS)
    )
    assert not old.exists()
    assert new.exists()


def test_shared_rings_of_earlier_rounds_are_deleted_at_the_start(
    tmp_path: Path,
) -> None:
    rings = [tmp_path / f"{name}{RING_SUFFIX}" for name in ("1-0-1", "11-0-1")]
    segment = tmp_path / "1-0-2.segment"
    for path in (*rings, segment):
        path.touch()
    snapshots = SnapshotRegistry(str(tmp_path))
    for _ in range(2):
        snapshots.prepare_start(start(11))
        assert [path.exists() for path in rings] == [False, True]
    snapshots.prepare_start(start(12))
    assert not rings[1].exists()
    assert segment.exists()
    assert snapshots.scan_shards() == ()


def test_complete_segments_are_passed_to_the_next_round(tmp_path: Path) -> None:
    snapshots = SnapshotRegistry(str(tmp_path))
    snapshots.prepare_start(start(3))
    newer = [
        write_segment(tmp_path / f"3-{n}-1-1.segment", [b"x"], rank=n, world_size=2, step=9)
        for n in (0, 1)
    ]
    write_segment(tmp_path / "3-0-0-1.segment", [b"x"], rank=0, world_size=2, step=6)
    with ShmSegment.create(tmp_path / "3-1-0-1.segment", 10):
        pass  # its writer died before it was complete
    newest = SnapshotId(round=3, step=9)
    assert snapshots.scan_shards() == (
        SnapshotShard(snapshot_id=SnapshotId(round=3, step=6), rank=0, world_size=2),
        SnapshotShard(snapshot_id=newest, rank=0, world_size=2),
        SnapshotShard(snapshot_id=newest, rank=1, world_size=2),
    )
    message = snapshots.prepare_start(
        replace(start(4), memory_snapshot=newest, peer_store_addresses=("", ""))
    )
    assert message.local_segments == tuple(map(str, newer))
    message = snapshots.prepare_start(
        replace(start(4), memory_snapshot=newest, peer_store_addresses=("", "10.0.0.2:7"))
    )
    assert message.local_segments == (str(newer[0]), "")
    assert (
        snapshots.find_shard(SnapshotShard(snapshot_id=newest, rank=1, world_size=2)) == newer[1]
    ), "a peer can read it"
    assert snapshots.prepare_start(start(4)).local_segments == (), (
        "the next round starts from a checkpoint"
    )


def test_segments_on_disk_are_found(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    snapshots = SnapshotRegistry(str(memory))
    snapshots.prepare_start(start(3))
    path = write_segment(disk / "3-0-0-1.segment", [b"x"], step=9)
    snapshots.add(0, SnapshotReport(report_index=0, metrics=_METRICS, segment=str(path)))
    assert snapshots.scan_shards() == (
        SnapshotShard(snapshot_id=SnapshotId(round=3, step=9), rank=0, world_size=1),
    )


def test_a_snapshot_report_survives_encoding() -> None:
    message = SnapshotReport(report_index=4, metrics=_METRICS, segment="/shm/3-0-1.segment")
    assert decoder(SnapshotReport).decode(msgspec.json.encode(message)) == message


def test_a_new_replication_target_gets_the_latest_replicas(tmp_path: Path) -> None:
    sent: list[PendingReplica] = []
    snapshots = SnapshotRegistry(str(tmp_path))
    snapshots.replicate = sent.append
    for rank in (2, 3):
        snapshots.prepare_start(
            replace(
                start(3), rank=rank, local_rank=rank - 2, local_world_size=2, replica_target="a:9"
            )
        )
    paths = [write_segment(tmp_path / f"3-{rank}-1.segment", [b"x"], rank=rank) for rank in (2, 3)]
    for rank, path in zip((2, 3), paths, strict=True):
        snapshots.add(rank, SnapshotReport(report_index=7, metrics=_METRICS, segment=str(path)))
        snapshots.make_upload(
            rank,
            CheckpointNamed(report_index=7, checkpoint_name="c", ranks=(2, 3), metrics=_METRICS),
        )
    snapshots.set_replication_target("b:9")
    first, second = (make_pending_replica(path, "a:9", report=7, ranks=(2, 3)) for path in paths)
    assert sent == [first, second, first._replace(target="b:9"), second._replace(target="b:9")]
    snapshots.set_replication_target("")
    snapshots.add(2, SnapshotReport(report_index=8, metrics=_METRICS, segment=str(paths[0])))
    snapshots.make_upload(
        2, CheckpointNamed(report_index=8, checkpoint_name="d", ranks=(2, 3), metrics=_METRICS)
    )
    assert len(sent) == 4, "there is no other target"


def test_rolled_back_snapshots_are_deleted_and_not_replicated(tmp_path: Path) -> None:
    sent: list[PendingReplica] = []
    snapshots = SnapshotRegistry(str(tmp_path))
    snapshots.replicate = sent.append
    snapshots.prepare_start(replace(start(3), replica_target="a:9"))
    earlier = write_segment(tmp_path / "2-0-1.segment", [b"x"], step=30)
    segments = [
        write_segment(tmp_path / f"3-{rank}-1.segment", [b"x"], rank=rank) for rank in (0, 1)
    ]
    snapshots.add(0, SnapshotReport(report_index=7, metrics=_METRICS, segment=str(segments[0])))
    snapshots.make_upload(
        0, CheckpointNamed(report_index=7, checkpoint_name="c", ranks=(0,), metrics=_METRICS)
    )
    assert not earlier.exists()
    write_segment(earlier, [b"x"], step=30)
    snapshots.roll_back(8)
    assert not earlier.exists(), "the snapshot that the round resumed from is deleted, too"
    assert all(path.exists() for path in segments), (
        "each rank deletes its segments; one may belong to a later save"
    )
    sent.clear()
    snapshots.set_replication_target("b:9")
    assert sent == []


@pytest.mark.parametrize("last", [0, 1])
def test_of_two_saves_of_one_step_the_later_one_is_used(tmp_path: Path, last: int) -> None:
    """For example one at the last batch of an epoch and one after its evaluation."""
    snapshots = SnapshotRegistry(str(tmp_path))
    places = [
        write_segment(tmp_path / f"3-0-{slot + 1}.segment", [b"x"], save=2 if slot == last else 1)
        for slot in (0, 1)
    ]
    (manifest,) = snapshots.scan_shards()
    assert snapshots.find_shard(manifest) == places[last]


@pytest.mark.parametrize(
    "segment", ["/shm/x", "3-0-1.segment", "/shm/2-0-1.segment", "/sh\0m/3-0-1.segment", ""]
)
def test_a_path_that_is_not_of_a_segment_of_the_round_is_rejected(
    tmp_path: Path, segment: str
) -> None:
    snapshots = SnapshotRegistry(str(tmp_path))
    snapshots.prepare_start(start(3))
    with pytest.raises(IntegrityError, match=r"'snapshot_report' is invalid"):
        snapshots.add(0, SnapshotReport(report_index=0, metrics=_METRICS, segment=segment))


@pytest.mark.parametrize(
    ("name", "body"),
    [("notes.segment", b"text"), ("3-0-1.segment", b"SHORT"), ("4-1.segment", b"")],
)
def test_a_file_that_is_no_segment_is_not_a_shard(tmp_path: Path, name: str, body: bytes) -> None:
    (tmp_path / name).write_bytes(body)
    assert SnapshotRegistry(str(tmp_path)).scan_shards() == ()


def test_a_segment_of_an_impossible_rank_is_not_a_shard(tmp_path: Path) -> None:
    write_segment(tmp_path / "3-0-1.segment", [b"x"], rank=5, world_size=2, step=9)
    assert SnapshotRegistry(str(tmp_path)).scan_shards() == ()


AT_END = CheckpointNamed(
    report_index=5, checkpoint_name="c", ranks=(0, 1), metrics=_METRICS, at_end=True
)


def registry_with_snapshot_at_end(folder: Path) -> SnapshotRegistry:
    """Return a registry in which rank 0 has returned with a snapshot of step 7."""
    snapshots = SnapshotRegistry(str(folder))
    snapshots.prepare_start(start(3))
    segment = write_segment(folder / "3-0-1.segment", [b"12345678"], step=7)
    snapshots.add(
        0, SnapshotReport(report_index=2, metrics=_METRICS, segment=str(segment), at_end=True)
    )
    return snapshots


def test_a_snapshot_at_the_end_is_uploaded_under_the_number_of_the_leader(tmp_path: Path) -> None:
    snapshots = registry_with_snapshot_at_end(tmp_path)
    upload = snapshots.make_upload(0, AT_END)
    assert upload is not None
    assert upload.request.report_index == 5
    assert [one.snapshot_id.step for one in snapshots.scan_shards()] == [7]


def test_a_snapshot_at_the_end_that_was_not_named_is_no_state_to_resume_from(
    tmp_path: Path,
) -> None:
    snapshots = registry_with_snapshot_at_end(tmp_path)
    assert snapshots.scan_shards() == ()
    assert list(tmp_path.glob("*.segment")) == []


def test_a_discarded_snapshot_at_the_end_is_deleted(tmp_path: Path) -> None:
    snapshots = registry_with_snapshot_at_end(tmp_path)
    snapshots.discard_at_end(0)
    assert list(tmp_path.glob("*.segment")) == []
    assert snapshots.make_upload(0, AT_END) is None
