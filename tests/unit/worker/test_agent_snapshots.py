"""AgentSnapshotChannel: submitted snapshots, their status, and states to resume from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.checkpoint.reader import MemoryShardReader, SavedState, describe_saved_state
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.snapshot_channel import IN_MEMORY_NAME
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.core.ids import RunId
from spotfit.ledger.journal import Journal
from spotfit.model.topology import SnapshotId
from spotfit.protocol.agent_peer import REPLICATION_BYTES_PER_S
from spotfit.protocol.worker_agent import (
    CommitConfirmed,
    FilesReport,
    PreemptionUpdate,
    RankZeroBroadcastResult,
    RolledBack,
    SaveFailed,
    SnapshotReport,
    Uploaded,
    UploadFailed,
)
from spotfit.security.run_key import RunKey
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import a_spec
from spotfit.worker.agent_snapshots import AgentSnapshotChannel
from spotfit.worker.session import Session
from tests.unit.checkpoint.snapshots import upload_test_snapshot, write_segment
from tests.unit.worker.agent_end import FakeAgentConnection, make_start


@pytest.fixture
def agent() -> Iterator[FakeAgentConnection]:
    with contextlib.closing(FakeAgentConnection()) as agent:
        yield agent


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def session(agent: FakeAgentConnection, store: MemoryStore) -> Session:
    return Session(
        make_start(segment_dir="/memory", scratch_dir="/scratch"), agent.connection, store
    )


@pytest.fixture
def snapshots(session: Session) -> AgentSnapshotChannel:
    return session.snapshot_channel


def test_submit_sends_a_report_without_waiting(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    assert snapshots.submit({"loss": 1.5}, Path("/memory/x"), "asked for") == 0
    (report,) = agent.receive_of_type(SnapshotReport)
    assert report == SnapshotReport(
        report_index=0,
        metrics=msgspec.Raw(b'{"loss":1.5}'),
        segment="/memory/x",
        reason="asked for",
    )
    assert snapshots.status_of(0) == "submitted"


def test_snapshots_have_the_last_progress(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    snapshots.submit({}, Path("/memory/x"))
    snapshots.record_progress(0.5)
    for _ in range(2):
        snapshots.submit({}, Path("/memory/x"))
    reports = agent.receive_of_type(SnapshotReport)
    assert [one.progress for one in reports] == [None, 0.5, 0.5]


def test_a_snapshot_at_the_end_is_no_report(
    snapshots: AgentSnapshotChannel, session: Session, agent: FakeAgentConnection
) -> None:
    snapshots.submit({}, Path("/memory/x"))
    snapshots.submit_at_end(b'{"loss":1.5}', Path("/memory/y"), step=7)
    assert session.report_count == 1
    (_, last) = agent.receive_of_type(SnapshotReport)
    assert (last.at_end, last.segment, last.step) == (True, "/memory/y", 7)


def test_the_status_follows_the_messages_of_the_agent(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    for _ in range(2):
        snapshots.submit({}, Path("/memory/x"))
    agent.name_report(0, "a")
    agent.send(Uploaded(report_index=0, checkpoint_name="a"))
    assert snapshots.wait_for_upload(0) == "uploaded"
    agent.send(
        CommitConfirmed(checkpoint_name="a", metrics={}),
        UploadFailed(report_index=1, reason="Traceback\n  the bucket is gone"),
    )
    assert snapshots.status_of(0) == "committed"
    assert snapshots.wait_for_upload(1) == "failed"


def test_a_snapshot_lost_by_another_rank_stays_lost(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    snapshots.submit({}, Path("/memory/x"))
    agent.name_report(0, "a")
    agent.send(
        UploadFailed(report_index=0, reason="rank 1: the disk is full"),
        Uploaded(report_index=0, checkpoint_name="a"),
    )
    assert snapshots.status_of(0) == "failed"


@pytest.mark.parametrize(
    "word",
    [
        RankZeroBroadcastResult(kind="report", seq=0, missing_ranks=(1,)),
        RankZeroBroadcastResult(kind="report", seq=0, reason="rank 1 has returned"),
    ],
)
def test_a_rejected_report_is_a_lost_snapshot(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection, word: RankZeroBroadcastResult
) -> None:
    snapshots.submit({}, Path("/memory/x"))
    agent.send(word)
    assert snapshots.wait_for_upload(0) == "failed"


def test_a_skipped_snapshot_takes_part_in_the_report(
    snapshots: AgentSnapshotChannel, session: Session, agent: FakeAgentConnection
) -> None:
    snapshots.skip({"loss": 2.0}, "no room")
    files, unsaved = agent.receive()
    assert isinstance(files, FilesReport)
    assert unsaved == SaveFailed(report_index=0, reason="no room")
    assert session.report_count == 1
    session.wait_for_uploads()


def test_wait_for_uploads_waits_for_snapshots(
    snapshots: AgentSnapshotChannel, session: Session, agent: FakeAgentConnection
) -> None:
    snapshots.submit({}, Path("/memory/x"))
    agent.send(Uploaded(report_index=0, checkpoint_name="a"))
    session.wait_for_uploads()
    assert snapshots.status_of(0) == "uploaded"


def test_messages_about_other_reports_are_not_consumed(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    assert not snapshots.on_message(Uploaded(report_index=5, checkpoint_name="x"))
    assert not snapshots.on_message(CommitConfirmed(checkpoint_name="x", metrics={}))


def test_segments_are_in_shared_memory_or_on_disk(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    memory, disk = snapshots.segment_dirs
    names = [snapshots.new_segment_path(memory).name for _ in range(2)]
    assert names == ["1-0-1.segment", "1-0-2.segment"]
    assert disk == Path("/scratch/segments")
    assert Session(
        make_start(scratch_dir="/s"), agent.connection, MemoryStore()
    ).snapshot_channel.segment_dirs == [Path("/s/segments")]


def test_the_ranks_of_a_node_share_the_replication_bandwidth(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    def bytes_per_s(**fields: Any) -> float:
        return (
            Session(make_start(**fields), agent.connection, store)
            .snapshot_channel.outlook()
            .peer_bytes_per_s
        )

    assert bytes_per_s(replica_target="a:9", local_world_size=1) == REPLICATION_BYTES_PER_S
    assert bytes_per_s(replica_target="a:9", local_world_size=8) == REPLICATION_BYTES_PER_S / 8
    assert bytes_per_s(local_world_size=8) == 0.0


def test_a_completely_preempted_group_has_no_peer(
    agent: FakeAgentConnection, store: MemoryStore
) -> None:
    session = Session(make_start(replica_target="a:9", world_size=2), agent.connection, store)
    agent.send(PreemptionUpdate(deadline_ms=0, node_to_ranks={"node-1": (1,)}))
    assert session.wait_for_preemption(5.0)
    assert session.snapshot_channel.outlook().peer_bytes_per_s > 0
    agent.send(PreemptionUpdate(deadline_ms=0, node_to_ranks={"node-0": (0,), "node-1": (1,)}))
    session.wait_for(lambda: session.outlook().peer_bytes_per_s == 0.0 or None)
    assert session.snapshot_channel.outlook().peer_bytes_per_s == 0.0


def test_checkpoints_to_resume_from(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    upload_test_snapshot(store, tmp_path, "b", [b"x"])
    snapshots = Session(
        make_start(checkpoint="b", has_snapshots=True), agent.connection, store
    ).snapshot_channel
    assert snapshots.initial_checkpoint == "b"
    assert snapshots.has_snapshots
    assert not Session(
        make_start(checkpoint="b"), agent.connection, store
    ).snapshot_channel.has_snapshots
    saved = snapshots.open_checkpoint("b")
    assert saved is not None
    assert saved.indices[0].step == 5


def test_earlier_checkpoints_are_ordered_latest_first(
    agent: FakeAgentConnection, monkeypatch: pytest.MonkeyPatch, store: MemoryStore
) -> None:
    from spotfit.testing.builders import a_committed_checkpoint, a_view

    view = a_view(checkpoints=tuple(a_committed_checkpoint(name) for name in ("a", "b", "c", "d")))
    monkeypatch.setattr(Journal, "catch_up", lambda _: view)
    snapshots = Session(make_start(checkpoint="c"), agent.connection, store).snapshot_channel
    assert list(snapshots.earlier_checkpoints()) == ["b", "a"]


def test_the_in_memory_snapshot_of_the_round_is_opened(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    paths = [
        str(write_segment(tmp_path / f"{n}", [b"x"], rank=n, world_size=2, step=9))
        for n in range(2)
    ]
    report = make_start(memory_snapshot=SnapshotId(round=3, step=9), local_segments=tuple(paths))
    saved = Session(report, agent.connection, store).snapshot_channel.open_in_memory()
    assert saved is not None
    assert [index.step for index in saved.indices] == [9, 9]
    assert Session(make_start(), agent.connection, store).snapshot_channel.open_in_memory() is None
    torn = make_start(memory_snapshot=SnapshotId(round=3, step=9), local_segments=(paths[0],))
    with pytest.raises(IntegrityError, match="is incomplete"):
        Session(torn, agent.connection, store).snapshot_channel.open_in_memory()
    later = write_segment(tmp_path / "later", [b"x"], rank=1, world_size=2, step=9, save=2)
    mixed = make_start(
        memory_snapshot=SnapshotId(round=3, step=9), local_segments=(paths[0], str(later))
    )
    with pytest.raises(IntegrityError, match="2 saves"):
        Session(mixed, agent.connection, store).snapshot_channel.open_in_memory()
    lost = make_start(memory_snapshot=SnapshotId(round=3, step=9))
    with pytest.raises(IntegrityError):
        Session(lost, agent.connection, store).snapshot_channel.open_in_memory()


def test_roll_back_covers_all_reports(
    snapshots: AgentSnapshotChannel, agent: FakeAgentConnection
) -> None:
    snapshots.submit({}, Path("/memory/x"))
    snapshots.skip({}, "there is no room")
    snapshots.roll_back()
    assert agent.receive_of_type(RolledBack) == [RolledBack(before_report_index=2)]


def test_reopening_an_in_memory_state_reads_no_indices(
    agent: FakeAgentConnection, store: MemoryStore, tmp_path: Path
) -> None:
    paths = [
        write_segment(tmp_path / f"{n}", [b"x"], rank=n, world_size=2, step=9) for n in range(2)
    ]
    opened = describe_saved_state(
        SavedState([MemoryShardReader(ShmSegment.open(path)) for path in paths], IN_MEMORY_NAME)
    )
    begins = make_start(
        memory_snapshot=SnapshotId(round=3, step=9),
        local_segments=(str(paths[0]), ""),
        peer_store_addresses=("", "127.0.0.1:1"),
        secret=RunKey(bytes(32), RunId("r")).to_text(),
    )
    saved = Session(begins, agent.connection, store).snapshot_channel.reopen(opened)
    assert (saved.name, [index.rank for index in saved.indices]) == (IN_MEMORY_NAME, [0, 1])
    assert [saved.readers[rank].is_in_memory for rank in (0, 1)] == [True, False]
    with pytest.raises(IntegrityError, match=r"127\.0\.0\.1:1"):
        saved.readers[1].fetch(saved.readers[1].index.chunks[0])


@pytest.mark.parametrize(("workers", "resizes"), [((2, 2), False), ((1, 2), True)])
def test_a_group_with_a_range_of_sizes_allows_resize(
    agent: FakeAgentConnection, store: MemoryStore, workers: tuple[int, int], *, resizes: bool
) -> None:
    least, most = workers
    spec = msgspec.Raw(encode(a_spec(min_workers=least, max_workers=most, is_elastic=True)))
    assert (
        Session(make_start(spec=spec), agent.connection, store)
        .snapshot_channel.outlook()
        .allows_resize
        is resizes
    )
