"""Tests of the round coordinator."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.agent import report_matching as report_matching
from spotfit.agent.collectives import OutgoingFrame
from spotfit.core.errors import IntegrityError
from spotfit.model.leader_state import RoundProgress
from spotfit.protocol.worker_agent import (
    MAX_GATHERED_BYTES,
    AtGate,
    CheckpointCorrupt,
    CheckpointNamed,
    CollectiveWaiting,
    FilesReport,
    FromWorker,
    FunctionStarted,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    SaveCompleted,
    SaveFailed,
    WorkerRaised,
    WorkerReturned,
)
from tests.unit.agent.round_frames import (
    files_report,
    make_coordinator,
    metrics_report,
    raw,
    responses_of_type,
    send_frame,
    single_response,
)
from tests.unit.protocol.invalid_frames import INVALID_FRAMES


def test_the_end_of_a_validation_counts_as_progress() -> None:
    coordinator = make_coordinator()
    coordinator.set_validation_pending(is_pending=False, now=5.0)
    assert (coordinator.progress.progressed_at, coordinator.progress.is_validating) == (0.0, False)
    coordinator.set_validation_pending(is_pending=True, now=6.0)
    assert (coordinator.progress.progressed_at, coordinator.progress.is_validating) == (0.0, True)
    coordinator.set_validation_pending(is_pending=False, now=7.0)
    assert (coordinator.progress.progressed_at, coordinator.progress.is_validating) == (7.0, False)
    assert coordinator.opened_at == 0.0, "the start time of the round is kept"


def test_returned_ranks_are_recorded() -> None:
    coordinator = make_coordinator()
    assert send_frame(coordinator, 1, FunctionStarted()) == []
    assert send_frame(coordinator, 1, WorkerRaised(traceback_text="Traceback")) == []
    assert coordinator.returned_ranks == set()
    send_frame(coordinator, 1, WorkerReturned(report_count=0))
    assert coordinator.returned_ranks == {1}


@pytest.mark.parametrize("frame", INVALID_FRAMES.values(), ids=INVALID_FRAMES)
def test_an_invalid_frame_raises(frame: bytes) -> None:
    with pytest.raises(IntegrityError):
        make_coordinator().handle_frame(0, msgspec.Raw(frame), 0.0)


@pytest.mark.parametrize(
    "message",
    [
        RankZeroBroadcast(kind="report", seq=0),
        metrics_report(2**40),
        files_report(1),
        SaveFailed(report_index=0, reason="not made"),
    ],
)
def test_a_message_that_the_rank_cannot_send_raises(message: FromWorker) -> None:
    with pytest.raises(IntegrityError, match="invalid"):
        send_frame(make_coordinator(), 1, message)


@pytest.mark.parametrize(("rank", "name"), [(1, "made-0"), (0, "other")])
def test_an_upload_that_was_not_requested_raises(rank: int, name: str) -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 0, files_report(0))
    send_frame(coordinator, 1, metrics_report(0))
    with pytest.raises(IntegrityError, match=r"no upload of .* was requested"):
        send_frame(coordinator, rank, SaveCompleted(report_index=0, checkpoint_name=name))


def test_excluding_rank_0_is_ignored() -> None:
    coordinator = make_coordinator(3)
    coordinator.exclude_ranks(frozenset({0, 2}))
    send_frame(coordinator, 0, metrics_report(0))
    send_frame(coordinator, 1, metrics_report(0))
    assert not coordinator.reports.matched_reports


def test_excluding_a_rank_completes_waiting_collectives() -> None:
    coordinator = make_coordinator(3)
    send_frame(coordinator, 0, files_report(0, "c1"))
    send_frame(coordinator, 1, metrics_report(0))
    send_frame(coordinator, 0, RankZeroBroadcast(kind="preemption_info", seq=0, value=b"v"))
    send_frame(coordinator, 1, RankZeroBroadcast(kind="preemption_info", seq=0))
    send_frame(coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0))
    send_frame(coordinator, 1, RankZeroBroadcast(kind="barrier", seq=0))
    answers = coordinator.exclude_ranks(frozenset({2}))
    assert [rank for rank, _ in answers] == [0, 0, 1]
    assert isinstance(answers[0][1], CheckpointNamed)
    assert answers[0][1].ranks == (0,)
    assert {result for _, result in answers[1:]} == {
        RankZeroBroadcastResult(kind="preemption_info", seq=0, value=b"v")
    }


def test_every_frame_of_the_training_function_is_progress() -> None:
    coordinator = make_coordinator(now=5.0)
    assert coordinator.progress == RoundProgress(progress_counts=(0, 0), progressed_at=5.0)
    send_frame(coordinator, 0, FunctionStarted(), 6.0)
    send_frame(coordinator, 0, metrics_report(0), 7.0)
    send_frame(coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0), 8.0)
    send_frame(coordinator, 1, AtGate(phase="train"), 99.0)
    assert coordinator.progress == RoundProgress(
        progress_counts=(3, 0), progressed_at=8.0, running_ranks={0}
    )


def test_progress_contains_uploads_and_returned_ranks() -> None:
    coordinator = make_coordinator(1)
    send_frame(coordinator, 0, files_report(0, "c1"), 1.0)
    assert coordinator.progress.is_uploading
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c1"), 2.0)
    send_frame(coordinator, 0, WorkerReturned(report_count=1), 3.0)
    assert coordinator.progress == RoundProgress(
        progress_counts=(3,), progressed_at=3.0, returned_ranks={0}
    )


def test_a_broadcast_returns_the_value_of_rank_0() -> None:
    coordinator = make_coordinator()
    assert (
        send_frame(coordinator, 0, RankZeroBroadcast(kind="broadcast", seq=0, value=b"zero")) == []
    )
    answers = send_frame(coordinator, 1, RankZeroBroadcast(kind="broadcast", seq=0, value=b"one"))
    assert sorted(rank for rank, _ in answers if rank is not None) == [0, 1]
    assert {result for _, result in answers} == {
        RankZeroBroadcastResult(kind="broadcast", seq=0, value=b"zero")
    }


@pytest.mark.parametrize("world_size", [2, 1000])
def test_a_gather_returns_all_values_by_rank_in_one_frame_for_all(world_size: int) -> None:
    coordinator = make_coordinator(world_size)
    values = tuple(f"10.0.0.{rank}:8000".encode().ljust(300) for rank in range(world_size))

    def join(rank: int) -> list[OutgoingFrame]:
        request = RankZeroBroadcast(kind="peers", seq=0, value=values[rank], all_values=True)
        return send_frame(coordinator, rank, request)

    for rank in reversed(range(1, world_size)):
        assert join(rank) == []
    assert join(0) == [(None, RankZeroBroadcastResult(kind="peers", seq=0, values=values))]


def test_a_large_value_in_a_gather_is_invalid() -> None:
    large = b"x" * (MAX_GATHERED_BYTES + 1)
    request = RankZeroBroadcast(kind="peers", seq=0, value=large, all_values=True)
    with pytest.raises(IntegrityError, match="the limit of an all-gather is 4096"):
        send_frame(make_coordinator(), 0, request)


def test_collectives_are_distinguished_by_kind_and_number() -> None:
    coordinator = make_coordinator()
    assert send_frame(coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0)) == []
    assert send_frame(coordinator, 1, RankZeroBroadcast(kind="broadcast", seq=0)) == []
    assert send_frame(coordinator, 1, RankZeroBroadcast(kind="barrier", seq=1)) == []
    assert len(send_frame(coordinator, 1, RankZeroBroadcast(kind="barrier", seq=0))) == 2


def test_only_internal_collectives_exclude_ranks() -> None:
    coordinator = make_coordinator()
    coordinator.exclude_ranks(frozenset({1}))
    assert send_frame(coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0)) == []
    assert single_response(
        send_frame(coordinator, 0, RankZeroBroadcast(kind="preemption_info", seq=0, value=b"v"))
    ) == (
        0,
        RankZeroBroadcastResult(kind="preemption_info", seq=0, value=b"v"),
    )


def test_a_timeout_names_the_missing_ranks() -> None:
    coordinator = make_coordinator(3, collective_timeout_s=5.0)
    assert coordinator.next_timeout_check() is None
    send_frame(coordinator, 1, RankZeroBroadcast(kind="barrier", seq=4), now=10.0)
    assert coordinator.next_timeout_check() == 15.0
    assert coordinator.check_timeouts(14.9) == []
    assert coordinator.check_timeouts(15.0) == [
        (1, RankZeroBroadcastResult(kind="barrier", seq=4, missing_ranks=(0, 2)))
    ]
    assert coordinator.check_timeouts(99.0) == []


def test_without_a_timeout_a_collective_warns_and_waits() -> None:
    coordinator = make_coordinator(collective_warn_s=30.0)
    send_frame(coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0))
    assert coordinator.check_timeouts(29.0) == []
    assert coordinator.check_timeouts(1e9) == [
        (0, CollectiveWaiting(kind="barrier", missing_ranks=(1,), waited_s=1e9))
    ]
    assert coordinator.next_timeout_check() == 1e9 + 30.0


def test_a_files_report_times_out_like_a_collective() -> None:
    coordinator = make_coordinator(3, collective_timeout_s=9.0, collective_warn_s=4.0)
    send_frame(coordinator, 2, metrics_report(0))
    send_frame(coordinator, 0, files_report(0), now=10.0)
    assert coordinator.check_timeouts(14.0) == [
        (0, CollectiveWaiting(kind="report", missing_ranks=(1,), waited_s=4.0))
    ]
    assert coordinator.check_timeouts(19.0) == [
        (0, RankZeroBroadcastResult(kind="report", seq=0, missing_ranks=(1,)))
    ]
    assert send_frame(coordinator, 1, metrics_report(0)) == []
    assert [(one.report_index, one.checkpoint) for one in coordinator.reports.matched_reports] == [
        (0, None)
    ]


def test_excluded_ranks_are_not_listed_as_missing() -> None:
    coordinator = make_coordinator(3, collective_warn_s=4.0)
    coordinator.exclude_ranks(frozenset({2}))
    send_frame(coordinator, 0, RankZeroBroadcast(kind="preemption_info", seq=0))
    send_frame(coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0))
    assert coordinator.check_timeouts(4.0) == [
        (0, CollectiveWaiting(kind="preemption_info", missing_ranks=(1,), waited_s=4.0)),
        (0, CollectiveWaiting(kind="barrier", missing_ranks=(1, 2), waited_s=4.0)),
    ]


def test_a_deadlock_is_reported_immediately() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 0, metrics_report(0))
    assert (
        send_frame(coordinator, 0, FilesReport(report_index=1, metrics=raw(), blocks_training=True))
        == []
    )
    answers = send_frame(
        coordinator, 1, RankZeroBroadcast(kind="barrier", seq=0, blocks_training=True)
    )
    responses = {
        rank: (frame.kind, frame.missing_ranks)
        for rank, frame in responses_of_type(RankZeroBroadcastResult, answers)
    }
    assert responses == {0: ("report", (1,)), 1: ("barrier", (0,))}


def test_a_report_that_does_not_block_is_not_a_deadlock() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 0, metrics_report(0))
    assert (
        send_frame(
            coordinator, 1, FilesReport(report_index=0, metrics=raw(), blocks_training=True)
        )[0][0]
        == 1
    ), "the first response assigns the name"
    send_frame(coordinator, 1, RankZeroBroadcast(kind="barrier", seq=0, blocks_training=True))
    assert (
        len(
            send_frame(
                coordinator, 0, RankZeroBroadcast(kind="barrier", seq=0, blocks_training=True)
            )
        )
        == 2
    )


def test_a_return_aborts_the_collectives_that_need_the_rank() -> None:
    coordinator = make_coordinator(3)
    send_frame(coordinator, 0, FilesReport(report_index=0, metrics=raw(), blocks_training=True))
    send_frame(coordinator, 2, RankZeroBroadcast(kind="barrier", seq=0))
    answers = responses_of_type(
        RankZeroBroadcastResult, send_frame(coordinator, 1, WorkerReturned(report_count=0))
    )
    assert {rank for rank, _ in answers} == {0, 2}
    assert all("rank 1 returned" in frame.reason for _, frame in answers)


def test_a_rank_that_reported_before_its_return_is_not_missing() -> None:
    coordinator = make_coordinator(3)
    send_frame(coordinator, 1, metrics_report(0))
    send_frame(coordinator, 1, WorkerReturned(report_count=1))
    assert (
        send_frame(coordinator, 0, FilesReport(report_index=0, metrics=raw(), blocks_training=True))
        == []
    )
    assert single_response(send_frame(coordinator, 2, metrics_report(0)))[0] == 0, (
        "the first response assigns the name"
    )


def test_a_corrupt_checkpoint_is_recorded() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 1, CheckpointCorrupt(checkpoint_name="a"))
    assert coordinator.corrupt_checkpoints == {"a"}
