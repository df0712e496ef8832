"""Tests of report matching: reports, checkpoint names, uploads, and lost ranks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.agent import report_matching as report_matching
from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.checkpoint.manifest import combine_digests
from spotfit.core.errors import IntegrityError
from spotfit.model.events import ValidationRequest
from spotfit.model.reporting import SaveAtEnd
from spotfit.protocol.worker_agent import (
    AwaitReports,
    CheckpointNamed,
    DiscardSnapshotAtEnd,
    FilesReport,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    ReportsSettled,
    SaveCompleted,
    SaveFailed,
    UploadFailed,
    WorkerReturned,
)
from tests.unit.agent.round_frames import (
    files_report,
    make_coordinator,
    metrics_report,
    raw,
    rejection_reasons,
    responses_of_type,
    send_frame,
    single_response,
    snapshot_report,
)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (
            {1: ValidationRequest(fn_kwargs={"a": 1}), 2: None},
            ValidationRequest(fn_kwargs={"a": 1}),
        ),
        ({2: ValidationRequest(), 1: None}, None),
    ],
)
def test_the_lowest_rank_with_files_decides_about_validation(
    requests: dict[int, ValidationRequest | None], expected: ValidationRequest | None
) -> None:
    coordinator = make_coordinator(3)
    send_frame(coordinator, 0, metrics_report(0))
    for rank, request in requests.items():
        send_frame(
            coordinator, rank, FilesReport(report_index=0, metrics=raw(), validation=request)
        )
    for rank in (2, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1)
        )
    (ready,) = coordinator.reports.ready_checkpoints
    assert (ready.ranks, ready.validation) == ((1, 2), expected)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [((0.5, 0.25), 0.25), ((0.0, 0.5), 0.0), ((0.5, 0.0), 0.0), ((None, 0.5), 0.5)],
)
def test_the_progress_of_a_checkpoint_is_that_of_the_rank_that_has_done_least(
    progress: tuple[float | None, float | None], expected: float | None
) -> None:
    coordinator = make_coordinator()
    for rank, share in enumerate(progress):
        send_frame(coordinator, rank, replace(files_report(0), progress=share))
    for rank in (0, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1)
        )
    (ready,) = coordinator.reports.ready_checkpoints
    assert ready.progress == expected


def test_a_report_counts_once_all_ranks_have_made_it() -> None:
    coordinator = make_coordinator()
    assert send_frame(coordinator, 1, metrics_report(0, loss=9)) == []
    assert (list(coordinator.reports.matched_reports), coordinator.reports.latest_metrics) == (
        [],
        None,
    )
    assert send_frame(coordinator, 0, metrics_report(0, loss=1)) == []
    assert [(one.report_index, one.checkpoint) for one in coordinator.reports.matched_reports] == [
        (0, None)
    ]
    assert coordinator.reports.latest_metrics == {"loss": 1}, "the metrics of rank 0 are stored"


def test_reports_of_a_fast_rank_are_matched_later() -> None:
    coordinator = make_coordinator()
    for n in range(5):
        send_frame(coordinator, 0, metrics_report(n, step=n))
    assert coordinator.reports.latest_metrics is None
    for n in range(3):
        send_frame(coordinator, 1, metrics_report(n))
    assert [one.report_index for one in coordinator.reports.matched_reports] == [0, 1, 2]
    assert coordinator.reports.latest_metrics == {"step": 2}


def test_ranks_that_made_fewer_reports_are_named() -> None:
    coordinator = make_coordinator(3)
    assert coordinator.reports.missing_reports == ""
    for rank, count in ((0, 3), (1, 1), (2, 3)):
        for n in range(count):
            send_frame(coordinator, rank, metrics_report(n))
    assert coordinator.reports.missing_reports == (
        "only 1 of 3 reports were made by all ranks; others are missing from rank 1"
    )
    for n in (1, 2):
        send_frame(coordinator, 1, metrics_report(n))
    assert coordinator.reports.missing_reports == ""


def test_of_many_ranks_without_reports_eight_are_named() -> None:
    coordinator = make_coordinator(64)
    send_frame(coordinator, 0, metrics_report(0))
    assert coordinator.reports.missing_reports.endswith(
        "others are missing from ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more"
    )


def test_metrics_of_all_ranks_are_stored_only_for_callbacks() -> None:
    for keep_all, expected in ((True, [{"r": 0}, {"r": 1}]), (False, [{"r": 0}])):
        coordinator = make_coordinator(keep_all_metrics=keep_all)
        send_frame(coordinator, 1, metrics_report(0, r=1))
        send_frame(coordinator, 0, metrics_report(0, r=0))
        assert [
            msgspec.json.decode(one)
            for one in coordinator.reports.matched_reports[0].metrics_by_rank
        ] == expected


def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_matching, "MAX_REPORT_BACKLOG", 3)
    coordinator = make_coordinator()
    for n in range(10):
        send_frame(coordinator, 0, metrics_report(n, step=n))
    for n in range(10):
        send_frame(coordinator, 1, metrics_report(n))
    assert [one.report_index for one in coordinator.reports.matched_reports] == list(range(10)), (
        "no report is lost, only old metrics"
    )
    assert [
        msgspec.json.decode(one.metrics_by_rank[0]) for one in coordinator.reports.matched_reports
    ] == [
        *[{}] * 7,
        *[{"step": n} for n in (7, 8, 9)],
    ]


def test_a_checkpoint_gets_its_name_when_all_have_reported() -> None:
    coordinator = make_coordinator()
    assert send_frame(coordinator, 0, files_report(0, loss=1)) == []
    rank, named = single_response(send_frame(coordinator, 1, metrics_report(0)))
    assert (rank, named) == (
        0,
        CheckpointNamed(report_index=0, checkpoint_name="made-0", ranks=(0,), metrics=raw(loss=1)),
    )
    assert not coordinator.reports.is_settled


def test_rank_0_chooses_the_name_even_without_files() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 1, files_report(0, "custom", loss=9))
    rank, named = single_response(send_frame(coordinator, 0, metrics_report(0, "best", loss=1)))
    assert (rank, named.checkpoint_name, named.ranks) == (1, "best", (1,))
    assert msgspec.json.decode(named.metrics) == {"loss": 1}


def assign_names(coordinator: RoundCoordinator, *names: str) -> list[CheckpointNamed]:
    """Return the names assigned to the files reports of a single rank."""
    answers = [
        answer
        for n, name in enumerate(names)
        for answer in send_frame(coordinator, 0, files_report(n, name))
    ]
    return [named for _, named in responses_of_type(CheckpointNamed, answers)]


def test_a_checkpoint_dropped_in_this_round_is_not_a_parent() -> None:
    """Its files are being deleted, although its manifest may still exist."""
    gone: dict[str, str] = {}
    coordinator = make_coordinator(world_size=1, latest_checkpoint_named=gone.get)
    send_frame(coordinator, 0, files_report(0, "last"))
    gone["last"] = ""
    _, named = single_response(send_frame(coordinator, 0, files_report(1, "last")))
    assert (named.checkpoint_name, named.parent) == ("last@3-1", "")


def test_a_reused_name_gets_a_suffix_and_the_earlier_one_as_parent() -> None:
    coordinator = make_coordinator(world_size=1)
    names = assign_names(coordinator, "last", "other", "last", "last")
    assert [one.checkpoint_name for one in names] == ["last", "other", "last@3-2", "last@3-3"]
    assert [one.parent for one in names] == ["", "", "last", "last@3-2"]
    assert [one.is_generated for one in coordinator.reports.assigned_names] == [
        False,
        False,
        True,
        True,
    ]
    assert coordinator.reports.parent_checkpoints == {"last", "last@3-2"}, (
        "they are protected until the snapshot that may share their files is saved"
    )


def test_a_name_of_earlier_rounds_is_not_reused() -> None:
    before: dict[str, str | None] = {"last": "last@2-7", "dropped": ""}
    coordinator = make_coordinator(
        world_size=1, latest_checkpoint_named=lambda name: before.get(name)
    )
    names = assign_names(coordinator, "last", "dropped", "new")
    assert [one.checkpoint_name for one in names] == ["last@3-0", "dropped@3-1", "new"]
    assert [one.parent for one in names] == ["last@2-7", "", ""]


def test_a_requested_name_equal_to_an_assigned_one_gets_a_suffix() -> None:
    names = assign_names(make_coordinator(world_size=1), "last", "last", "last@3-1")
    assert [one.checkpoint_name for one in names] == ["last", "last@3-1", "last@3-1@3-2"]


def test_a_checkpoint_is_ready_after_all_ranks_uploaded() -> None:
    coordinator = make_coordinator(3)
    send_frame(coordinator, 0, files_report(0, "c", loss=1))
    send_frame(coordinator, 1, metrics_report(0))
    assert [rank for rank, _ in send_frame(coordinator, 2, files_report(0))] == [0, 2]
    send_frame(coordinator, 2, SaveCompleted(report_index=0, checkpoint_name="c", size_bytes=10))
    assert coordinator.reports.ready_checkpoints == []
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c", size_bytes=5))
    ready = coordinator.reports.ready_checkpoints[0]
    assert (ready.name, ready.round, ready.report_index, ready.ranks, ready.size_bytes) == (
        "c",
        3,
        0,
        (0, 2),
        15,
    )
    assert ready.metrics == {"loss": 1}
    assert coordinator.reports.matched_reports[0].checkpoint == "c"


def test_the_custom_folder_is_that_of_the_first_rank() -> None:
    coordinator = make_coordinator(3)
    send_frame(coordinator, 0, metrics_report(0))
    for rank in (2, 1):
        send_frame(coordinator, rank, files_report(0))
    for rank in (1, 2):
        send_frame(
            coordinator,
            rank,
            SaveCompleted(
                report_index=0,
                checkpoint_name="made-0",
                size_bytes=1,
                custom_folder=f"custom/{rank}",
            ),
        )
    assert [(one.ranks, one.custom_folder) for one in coordinator.reports.ready_checkpoints] == [
        ((1, 2), "custom/1")
    ]


def test_checkpoints_are_ready_in_the_order_of_their_reports() -> None:
    coordinator = make_coordinator()
    for n in (0, 1):
        send_frame(coordinator, n, files_report(n, f"c{n}"))
        send_frame(coordinator, 1 - n, metrics_report(n, f"c{n}"))
    # rank 0 saves the older, rank 1 the newer
    send_frame(coordinator, 1, SaveCompleted(report_index=1, checkpoint_name="c1"))
    assert coordinator.reports.ready_checkpoints == [], (
        "the next round starts from the last committed checkpoint"
    )
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c0"))
    assert [one.name for one in coordinator.reports.ready_checkpoints] == ["c0", "c1"]


def test_a_report_being_saved_delays_later_ones() -> None:
    coordinator = make_coordinator(1)
    send_frame(coordinator, 0, metrics_report(0))
    send_frame(coordinator, 0, files_report(1, "c"))
    send_frame(coordinator, 0, metrics_report(2))
    assert [one.report_index for one in coordinator.reports.matched_reports] == [0]
    send_frame(coordinator, 0, SaveCompleted(report_index=1, checkpoint_name="c"))
    assert [(one.report_index, one.checkpoint) for one in coordinator.reports.matched_reports] == [
        (0, None),
        (1, "c"),
        (2, None),
    ]


def test_a_name_is_uncommitted_until_its_entry_is_written() -> None:
    coordinator = make_coordinator(1)
    send_frame(coordinator, 0, files_report(0, "c0"))
    send_frame(coordinator, 0, files_report(1, "c1"))
    assert coordinator.reports.uncommitted_names == {"c0", "c1"}
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c0"))
    assert coordinator.reports.uncommitted_names == {"c0", "c1"}, "its entry is not written yet"
    coordinator.reports.ready_checkpoints.clear()
    assert coordinator.reports.uncommitted_names == {"c1"}


def test_an_unexpected_upload_is_ignored() -> None:
    coordinator = make_coordinator()
    assert send_frame(coordinator, 0, SaveCompleted(report_index=7, checkpoint_name="x")) == []
    assert coordinator.reports.ready_checkpoints == []


def test_a_matcher_is_settled_once_reports_are_delivered_saved_and_committed() -> None:
    coordinator = make_coordinator(1)
    settled = [coordinator.reports.is_settled]
    send_frame(coordinator, 0, files_report(0))
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="made-0"))
    settled.append(coordinator.reports.is_settled)
    coordinator.reports.ready_checkpoints.clear()
    settled.append(coordinator.reports.is_settled)
    coordinator.reports.matched_reports.clear()
    settled.append(coordinator.reports.is_settled)
    assert settled == [True, False, False, True]


LEAVES = frozenset({2})


def test_an_excluded_rank_is_optional() -> None:
    coordinator = make_coordinator(3)
    assert coordinator.exclude_ranks(LEAVES) == []
    send_frame(coordinator, 1, metrics_report(0))
    assert not coordinator.reports.matched_reports
    send_frame(coordinator, 0, metrics_report(0))
    assert len(coordinator.reports.matched_reports) == 1


def test_reports_of_disconnected_ranks_are_ignored() -> None:
    coordinator = make_coordinator(2)
    send_frame(coordinator, 0, files_report(0, "c0"))
    coordinator.mark_disconnected([1])  # frames of rank 1 for report 0 may be lost
    assert (
        send_frame(coordinator, 1, files_report(1, "c1"))
        == send_frame(coordinator, 0, files_report(1, "c1"))
        == []
    )
    send_frame(coordinator, 1, WorkerReturned(report_count=2))
    assert not coordinator.reports.matched_reports
    assert not coordinator.reports.uncommitted_names
    assert coordinator.returned_ranks == set()


def test_uploads_of_disconnected_ranks_count() -> None:
    coordinator = make_coordinator(2)
    send_frame(coordinator, 0, files_report(0, "c0"))
    send_frame(coordinator, 1, files_report(0, "c0"))
    coordinator.mark_disconnected([1])
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1))
    send_frame(coordinator, 1, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1))
    assert [one.name for one in coordinator.reports.ready_checkpoints] == ["c0"]


def test_parts_of_different_steps_abandon_the_checkpoint() -> None:
    coordinator = make_coordinator(2)
    send_frame(coordinator, 0, files_report(0, "c0"))
    send_frame(coordinator, 1, files_report(0, "c0"))
    send_frame(
        coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1, step=4)
    )
    answers = send_frame(
        coordinator, 1, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1, step=5)
    )
    assert [rank for rank, _ in responses_of_type(UploadFailed, answers)] == [0, 1]
    assert not coordinator.reports.ready_checkpoints


def test_a_snapshot_waits_for_excluded_ranks() -> None:
    """Other reports and checkpoints of the user may complete without excluded ranks."""
    coordinator = make_coordinator(3)
    coordinator.exclude_ranks(LEAVES)
    assert [
        *send_frame(coordinator, 0, snapshot_report(0, "c0")),
        *send_frame(coordinator, 1, snapshot_report(0)),
    ] == []
    named = responses_of_type(CheckpointNamed, send_frame(coordinator, 2, snapshot_report(0)))
    assert [(rank, one.checkpoint_name, one.ranks) for rank, one in named] == [
        (rank, "c0", (0, 1, 2)) for rank in (0, 1, 2)
    ]


@pytest.mark.parametrize("order", ["returns", "is cut off"])
def test_a_snapshot_without_all_parts_is_rejected(order: str) -> None:
    coordinator = make_coordinator(3)
    coordinator.exclude_ranks(LEAVES)
    send_frame(coordinator, 0, snapshot_report(0, "c0"))
    send_frame(coordinator, 1, snapshot_report(0))
    answers = (
        send_frame(coordinator, 2, WorkerReturned(report_count=0))
        if order == "returns"
        else coordinator.mark_disconnected(LEAVES)
    )
    assert rejection_reasons(answers) == dict.fromkeys(
        (0, 1), "ranks [2] left without their part of the snapshot"
    )
    assert [report.checkpoint for report in coordinator.reports.matched_reports] == [None]
    assert not coordinator.reports.assigned_names
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1))
    send_frame(coordinator, 1, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1))
    assert not coordinator.reports.ready_checkpoints


def lose_rank_2(coordinator: RoundCoordinator, order: str) -> list[OutgoingFrame]:
    """Exclude rank 2 and break its connection, in the given order."""
    if order == "excluded first":
        return [*coordinator.exclude_ranks(LEAVES), *coordinator.mark_disconnected(LEAVES)]
    return [*coordinator.mark_disconnected(LEAVES), *coordinator.exclude_ranks(LEAVES)]


@pytest.mark.parametrize("order", ["excluded first", "disconnected first"])
@pytest.mark.parametrize(
    "report",
    [
        FilesReport(report_index=0, metrics=raw()),
        FilesReport(report_index=0, metrics=raw(), incremental=True),
    ],
)
def test_a_lost_part_does_not_delay_later_saves(order: str, report: FilesReport) -> None:
    coordinator = make_coordinator(3)
    for rank in range(3):
        send_frame(coordinator, rank, report)
    for rank in (0, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1)
        )
    failures = responses_of_type(UploadFailed, lose_rank_2(coordinator, order))
    assert {rank: one.reason for rank, one in failures} == dict.fromkeys(
        (0, 1, 2), "ranks [2] left before their part was saved"
    )
    assert coordinator.reports.abandoned_checkpoints == {"made-0"}
    for frame in (
        files_report(1, "c1"),
        SaveCompleted(report_index=1, checkpoint_name="c1", size_bytes=1),
    ):
        for rank in (0, 1):
            send_frame(coordinator, rank, frame)
    send_frame(
        coordinator, 2, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1)
    )
    assert [one.name for one in coordinator.reports.ready_checkpoints] == ["c1"]
    assert [failures.checkpoint for failures in coordinator.reports.matched_reports] == [None, "c1"]


@pytest.mark.parametrize("order", ["excluded first", "disconnected first"])
def test_a_part_uploaded_before_the_loss_counts(order: str) -> None:
    coordinator = make_coordinator(3)
    for rank in range(3):
        send_frame(coordinator, rank, files_report(0, "c0"))
    send_frame(coordinator, 2, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1))
    assert lose_rank_2(coordinator, order) == []
    for rank in (0, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1)
        )
    assert [one.ranks for one in coordinator.reports.ready_checkpoints] == [(0, 1, 2)]


def test_a_rank_lost_before_the_name_was_assigned_is_optional() -> None:
    coordinator = make_coordinator(3)
    coordinator.exclude_ranks(LEAVES)
    for rank in (2, 1):
        send_frame(coordinator, rank, files_report(0))
    coordinator.mark_disconnected(LEAVES)
    named = responses_of_type(CheckpointNamed, send_frame(coordinator, 0, files_report(0, "c0")))
    assert [(rank, one.ranks) for rank, one in named] == [(0, (0, 1)), (1, (0, 1))]
    for rank in (0, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1)
        )
    assert [one.ranks for one in coordinator.reports.ready_checkpoints] == [(0, 1)]


def test_a_late_report_of_an_excluded_rank_is_answered() -> None:
    coordinator = make_coordinator(3, keep_all_metrics=True)
    coordinator.exclude_ranks(LEAVES)
    for rank in (0, 1):
        send_frame(coordinator, rank, metrics_report(0))
        send_frame(coordinator, rank, files_report(1, "c1"))
        send_frame(coordinator, rank, RankZeroBroadcast(kind="preemption_info", seq=0, value=b"v"))
    late = RankZeroBroadcastResult(kind="preemption_info", seq=0, value=b"v")
    assert send_frame(coordinator, 2, RankZeroBroadcast(kind="preemption_info", seq=0)) == [
        (2, late)
    ]
    assert send_frame(coordinator, 2, metrics_report(0)) == []
    to, named = single_response(send_frame(coordinator, 2, files_report(1)))
    assert (to, named.report_index, named.checkpoint_name) == (2, 1, "")
    assert coordinator.reports.uploading_ranks == {0, 1}, "its upload is not awaited"
    send_frame(coordinator, 0, files_report(2, "c2"))
    send_frame(coordinator, 2, files_report(2, "c2"))
    answers = send_frame(coordinator, 1, metrics_report(2))
    assert [rank for rank, _ in answers] == [0, 2], "but an upload that completes in time counts"


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_reports_in_any_order_are_delivered_once_and_in_order(
    world_size: int, reports: int, data: st.DataObject
) -> None:
    coordinator = make_coordinator(world_size, keep_all_metrics=True)
    with_files = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5))))
    made = [0] * world_size
    while sum(made) < world_size * reports:
        rank = data.draw(st.sampled_from([r for r in range(world_size) if made[r] < reports]))
        n, made[rank] = made[rank], made[rank] + 1
        frame = (
            files_report(n, r=rank, step=n)
            if (rank, n) in with_files
            else metrics_report(n, r=rank, step=n)
        )
        for to, answer in send_frame(coordinator, rank, frame):
            assert isinstance(answer, CheckpointNamed)
            assert to in answer.ranks
            assert to is not None
            send_frame(
                coordinator,
                to,
                SaveCompleted(
                    report_index=answer.report_index, checkpoint_name=answer.checkpoint_name
                ),
            )
    assert [one.report_index for one in coordinator.reports.matched_reports] == list(range(reports))
    for one in coordinator.reports.matched_reports:
        expected = [{"r": rank, "step": one.report_index} for rank in range(world_size)]
        assert [msgspec.json.decode(body) for body in one.metrics_by_rank] == expected
    with_checkpoint = [
        n for n in range(reports) if any((r, n) in with_files for r in range(world_size))
    ]
    assert [
        ready.report_index for ready in coordinator.reports.ready_checkpoints
    ] == with_checkpoint


def test_a_checkpoint_with_a_failed_part_is_abandoned() -> None:
    coordinator = make_coordinator()
    for n in (0, 1):
        for rank in (0, 1):
            send_frame(coordinator, rank, files_report(n, f"c{n}"))
    for rank in (0, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=1, checkpoint_name="c1", size_bytes=5)
        )
    send_frame(coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=5))
    assert not coordinator.reports.ready_checkpoints
    answers = send_frame(coordinator, 1, SaveFailed(report_index=0, reason="the disk is full"))
    assert answers == [
        (rank, UploadFailed(report_index=0, reason="rank 1: the disk is full")) for rank in (0, 1)
    ]
    assert [one.name for one in coordinator.reports.ready_checkpoints] == ["c1"]
    assert [report.checkpoint for report in coordinator.reports.matched_reports] == [None, "c1"]
    assert coordinator.reports.abandoned_checkpoints == {"c0"}


def test_a_part_that_fails_before_the_match_abandons_the_checkpoint() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 1, files_report(0))
    assert send_frame(coordinator, 1, SaveFailed(report_index=0, reason="why")) == []
    answers = send_frame(coordinator, 0, files_report(0, "c"))
    assert rejection_reasons(answers) == dict.fromkeys((0, 1), "rank 1: why")
    assert not coordinator.reports.uncommitted_names


def test_the_last_save_error_names_the_reason() -> None:
    coordinator = make_coordinator(world_size=1)
    for n in range(4):
        send_frame(coordinator, 0, files_report(n, f"c{n}"))
    assert coordinator.reports.last_save_error == "", "the save may still succeed"
    for frame in (
        SaveFailed(report_index=2, reason="no"),
        SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=1),
        SaveFailed(report_index=1, reason="late"),
    ):
        send_frame(coordinator, 0, frame)
        assert coordinator.reports.last_save_error == "rank 0: no", (
            "errors of earlier saves are ignored"
        )
    send_frame(coordinator, 0, SaveCompleted(report_index=3, checkpoint_name="c3", size_bytes=1))
    assert coordinator.reports.last_save_error == ""


def test_a_snapshot_without_metrics_keeps_the_latest_metrics() -> None:
    coordinator = make_coordinator(world_size=1)
    send_frame(coordinator, 0, metrics_report(0, loss=0.5))
    send_frame(
        coordinator,
        0,
        msgspec.structs.replace(
            files_report(1, "s"), incremental=True, reason="an epoch has ended"
        ),
    )
    send_frame(coordinator, 0, SaveCompleted(report_index=1, checkpoint_name="s", size_bytes=5))
    assert coordinator.reports.latest_metrics == {"loss": 0.5}
    send_frame(coordinator, 0, files_report(2, "named"))
    send_frame(coordinator, 0, SaveCompleted(report_index=2, checkpoint_name="named", size_bytes=5))
    matched = [
        (one.name, one.is_snapshot, one.reason) for one in coordinator.reports.ready_checkpoints
    ]
    assert matched == [("s", True, "an epoch has ended"), ("named", False, "")]
    assert coordinator.reports.latest_metrics == {}


def test_a_snapshot_gets_a_parent_that_is_protected_during_the_upload() -> None:
    latest = ["a"]
    coordinator = make_coordinator(parent_snapshot=lambda: latest[0])
    sharing = msgspec.structs.replace(files_report(0, "b"), incremental=True)
    answers = [answer for rank in (0, 1) for answer in send_frame(coordinator, rank, sharing)]
    assert {named.parent for _, named in responses_of_type(CheckpointNamed, answers)} == {"a"}
    latest[0] = "x"
    assert coordinator.reports.parent_checkpoints == {"a"}
    for rank in (0, 1):
        send_frame(
            coordinator, rank, SaveCompleted(report_index=0, checkpoint_name="b", size_bytes=5)
        )
    assert coordinator.reports.parent_checkpoints == set()
    answers = [
        answer
        for rank in (0, 1)
        for answer in send_frame(coordinator, rank, files_report(1, "plain"))
    ]
    assert {named.parent for _, named in responses_of_type(CheckpointNamed, answers)} == {""}


def test_a_ready_snapshot_has_its_step() -> None:
    coordinator = make_coordinator(1)
    send_frame(coordinator, 0, FilesReport(report_index=0, metrics=raw(), incremental=True))
    send_frame(
        coordinator,
        0,
        SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=7, step=120),
    )
    assert [(one.is_snapshot, one.step) for one in coordinator.reports.ready_checkpoints] == [
        (True, 120)
    ]


def test_only_snapshots_have_the_time_at_which_they_were_taken() -> None:
    coordinator = make_coordinator(2)
    for n, shares in enumerate((True, False)):
        for rank in (0, 1):
            send_frame(
                coordinator,
                rank,
                FilesReport(report_index=n, metrics=raw(), incremental=shares),
                10.0 * n + rank,
            )
    for n in (0, 1):
        for rank in (0, 1):
            send_frame(
                coordinator,
                rank,
                SaveCompleted(report_index=n, checkpoint_name=f"made-{n}", size_bytes=7, step=120),
                50.0,
            )
    assert [one.snapshot_taken_at for one in coordinator.reports.ready_checkpoints] == [1.0, None]


def test_a_rank_without_files_waits_for_the_commit_of_its_report() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 1, metrics_report(0))
    send_frame(coordinator, 1, AwaitReports(report_count=1))
    assert coordinator.reports.answer_waiting() == [], "rank 0 has not reported"
    send_frame(coordinator, 0, files_report(0))
    assert coordinator.reports.answer_waiting() == [], "rank 0 uploads"
    send_frame(
        coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1)
    )
    assert coordinator.reports.answer_waiting() == [], "not committed"
    coordinator.reports.remove_committed(0)
    assert coordinator.reports.answer_waiting() == [(1, ReportsSettled(report_count=1))]
    assert coordinator.reports.answer_waiting() == [], "once"


def test_a_failed_checkpoint_is_not_waited_for() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 1, metrics_report(0))
    send_frame(coordinator, 0, files_report(0))
    send_frame(coordinator, 1, AwaitReports(report_count=1))
    send_frame(coordinator, 0, SaveFailed(report_index=0, reason="no space"))
    assert coordinator.reports.answer_waiting() == [(1, ReportsSettled(report_count=1))]


def test_reports_that_a_returned_rank_did_not_make_are_not_waited_for() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 0, metrics_report(0))
    send_frame(coordinator, 0, AwaitReports(report_count=1))
    assert coordinator.reports.answer_waiting() == []
    send_frame(coordinator, 1, WorkerReturned(report_count=0))
    assert coordinator.reports.answer_waiting() == [(0, ReportsSettled(report_count=1))]


def test_a_checkpoint_of_a_rank_that_returned_is_waited_for() -> None:
    coordinator = make_coordinator()
    send_frame(coordinator, 0, files_report(0))
    send_frame(coordinator, 1, metrics_report(0))
    send_frame(coordinator, 0, metrics_report(1))
    send_frame(coordinator, 1, WorkerReturned(report_count=1))
    send_frame(coordinator, 0, AwaitReports(report_count=2))
    assert coordinator.reports.answer_waiting() == []
    send_frame(
        coordinator, 0, SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=1)
    )
    coordinator.reports.remove_committed(0)
    assert coordinator.reports.answer_waiting() == [(0, ReportsSettled(report_count=2))]


AN_END = SaveAtEnd(
    step=7,
    saved_step=4,
    save_number=2,
    has_snapshot=True,
    metrics=raw(loss=0.5),
)


def return_all(coordinator: RoundCoordinator, *ends: SaveAtEnd | None) -> list[list[OutgoingFrame]]:
    """Let the ranks return in order; return the answers to each."""
    return [
        send_frame(coordinator, rank, WorkerReturned(report_count=0, save_at_end=end), 5.0)
        for rank, end in enumerate(ends)
    ]


def test_snapshots_at_the_end_are_named_once_all_ranks_have_returned() -> None:
    coordinator = make_coordinator(2)
    for rank in (0, 1):
        send_frame(coordinator, rank, metrics_report(0, loss=9.0))
    first, last = return_all(coordinator, AN_END, AN_END)
    assert first == []
    named = CheckpointNamed(
        report_index=1, checkpoint_name="made-1", ranks=(0, 1), metrics=raw(loss=0.5), at_end=True
    )
    assert last == [(0, named), (1, named)]
    assert coordinator.reports.is_saving_at_end


def test_a_save_at_the_end_becomes_ready_without_changing_the_latest_metrics() -> None:
    coordinator = make_coordinator(2)
    for rank in (0, 1):
        send_frame(coordinator, rank, metrics_report(0, loss=9.0))
    return_all(coordinator, AN_END, AN_END)
    for rank in (0, 1):
        done = SaveCompleted(report_index=1, checkpoint_name="made-1", size_bytes=8, step=7)
        send_frame(coordinator, rank, done)
    (ready,) = coordinator.reports.ready_checkpoints
    assert (ready.report_index, ready.step, ready.is_snapshot) == (1, 7, True)
    assert ready.metrics == {"loss": 0.5}
    assert coordinator.reports.latest_metrics == {"loss": 9.0}
    assert not coordinator.reports.is_saving_at_end
    assert coordinator.reports.last_save_error == ""


def test_a_save_at_the_end_follows_reports_that_not_all_ranks_have_made() -> None:
    coordinator = make_coordinator(2)
    for number in range(3):
        send_frame(coordinator, 0, metrics_report(number))
    return_all(coordinator, AN_END, AN_END)
    for rank in (0, 1):
        done = SaveCompleted(report_index=0, checkpoint_name="made-0", size_bytes=8, step=7)
        send_frame(coordinator, rank, done)
    assert [ready.name for ready in coordinator.reports.ready_checkpoints] == ["made-0"]
    assert "only 0 of 3 reports" in coordinator.reports.missing_reports


def test_snapshots_of_different_steps_are_discarded_and_the_steps_are_unsaved() -> None:
    coordinator = make_coordinator(2)
    *_, last = return_all(coordinator, AN_END, replace(AN_END, step=8))
    assert last == [(0, DiscardSnapshotAtEnd()), (1, DiscardSnapshotAtEnd())]
    assert "rank 0 ended at step 7, rank 1 at step 8" in coordinator.reports.last_save_error
    assert coordinator.reports.is_settled


def test_files_reported_after_the_last_step_discard_the_snapshots_silently() -> None:
    coordinator = make_coordinator(2)
    newer = replace(AN_END, has_snapshot=False, has_newer_files=True)
    *_, last = return_all(coordinator, newer, AN_END)
    assert last == [(1, DiscardSnapshotAtEnd())]
    assert coordinator.reports.last_save_error == ""


def test_an_upload_at_the_end_that_fails_leaves_the_steps_unsaved() -> None:
    coordinator = make_coordinator(2)
    return_all(coordinator, AN_END, AN_END)
    send_frame(coordinator, 1, SaveFailed(report_index=0, reason="no bucket"))
    assert coordinator.reports.last_save_error == "rank 1: no bucket"
    assert not coordinator.reports.is_saving_at_end


def test_a_rank_that_waits_for_reports_does_not_wait_for_the_save_at_the_end() -> None:
    coordinator = make_coordinator(2)
    send_frame(coordinator, 0, metrics_report(0))
    send_frame(coordinator, 0, AwaitReports(report_count=1))
    send_frame(coordinator, 1, WorkerReturned(report_count=0, save_at_end=AN_END))
    assert coordinator.reports.answer_waiting() == [(0, ReportsSettled(report_count=1))]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_ready_checkpoint_has_the_digest_of_all_manifests(is_known: bool) -> None:
    coordinator = make_coordinator()
    for rank in (0, 1):
        send_frame(coordinator, rank, files_report(0))
    digests = {0: "0" * 64, 1: "1" * 64 if is_known else ""}
    for rank in (1, 0):
        saved = SaveCompleted(
            report_index=0, checkpoint_name="made-0", manifest_digest=digests[rank]
        )
        send_frame(coordinator, rank, saved)
    [ready] = coordinator.reports.ready_checkpoints
    assert ready.manifests_digest == combine_digests(digests)
    assert bool(ready.manifests_digest) == is_known


def test_a_rank_whose_report_was_lost_with_its_connection_may_fail_to_save_it() -> None:
    coordinator = make_coordinator(2)
    coordinator.mark_disconnected([1])
    send_frame(coordinator, 1, files_report(0))
    assert send_frame(coordinator, 1, SaveFailed(report_index=0, reason="no memory")) == []


def test_a_rank_returns_once() -> None:
    """A second save at the end would wait for snapshots that no agent has."""
    coordinator = make_coordinator(2)
    return_all(coordinator, AN_END, AN_END)
    with pytest.raises(IntegrityError, match="has returned before"):
        send_frame(coordinator, 1, WorkerReturned(report_count=0, save_at_end=AN_END))
    assert coordinator.reports.uncommitted_names == {"made-0"}
