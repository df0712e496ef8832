"""How long the next round waits for uploads of the last one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.model.events import FailureCause, RoundClosed
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.spec import RunTiming
from spotfit.model.topology import SnapshotId, SnapshotShard
from spotfit.policy.scheduler import wait_for_uploads
from spotfit.testing.builders import (
    a_leader_state,
    a_member,
    a_member_status,
    a_round,
    a_spec,
    a_training,
    a_view,
    member_statuses,
)

TOO_MANY = {FailureCause.WORKER: 1}
CLOSED = a_view(last_round=a_round(3), spec=a_spec(timing=RunTiming(upload_timeout_s=600.0)))


def closed_round_state(
    uploading_round: int | None = 3, *, uncommitted_work_s: float = 30.0, **fields: Any
) -> LeaderState:
    """Round 3 was closed at 100, and a1 is still uploading its checkpoint."""
    defaults: dict[str, Any] = {
        "phase": NoRound(since=100.0, uncommitted_work_s=uncommitted_work_s),
        "members": member_statuses(
            a_member_status(0), a_member_status(1, uploading_round=uploading_round)
        ),
    }
    return a_leader_state(**{**defaults, **fields})


def test_an_upload_is_awaited_as_long_as_the_work_it_saves() -> None:
    wait = wait_for_uploads(CLOSED, closed_round_state(), 129.9)
    assert wait is not None
    assert wait.until == 130.0
    assert "1 nodes are still uploading" in wait.reason
    assert wait_for_uploads(CLOSED, closed_round_state(), 130.0) is None


def test_uploads_are_not_awaited_if_memory_has_the_snapshot() -> None:
    alone = a_view(last_round=a_round(3, members=[a_member(1)]), spec=CLOSED.spec)
    held = (SnapshotShard(snapshot_id=SnapshotId(round=3, step=9), rank=0, world_size=1),)
    state = closed_round_state(
        members=member_statuses(a_member_status(1, uploading_round=3, snapshot_shards=held))
    )
    assert wait_for_uploads(alone, state, 100.0) is None
    assert (
        wait_for_uploads(
            alone,
            closed_round_state(members=member_statuses(a_member_status(1, uploading_round=3))),
            100.0,
        )
        is not None
    )


def test_a_failed_run_waits_for_all_uploads() -> None:
    """No round follows that could resume from memory."""
    alone = a_view(last_round=a_round(3, members=[a_member(1)]), spec=CLOSED.spec)
    failed = replace(
        alone,
        last_round_closed=RoundClosed(round_number=3, cause=FailureCause.WORKER, reason="bug"),
        failure_counts=TOO_MANY,
    )
    held = (SnapshotShard(snapshot_id=SnapshotId(round=3, step=9), rank=0, world_size=1),)
    state = closed_round_state(
        uncommitted_work_s=0.1,
        members=member_statuses(a_member_status(1, uploading_round=3, snapshot_shards=held)),
    )
    wait = wait_for_uploads(failed, state, 120.0)
    assert wait is not None
    assert wait.until == 700.0
    assert wait_for_uploads(failed, state, 700.0) is None
    assert (
        wait_for_uploads(
            failed, closed_round_state(members=member_statuses(a_member_status(1))), 100.0
        )
        is None
    )


def test_the_wait_is_bounded_by_the_upload_timeout() -> None:
    wait = wait_for_uploads(CLOSED, closed_round_state(uncommitted_work_s=math.inf), 100.0)
    assert wait is not None
    assert wait.until == 700.0


@pytest.mark.parametrize("uploading_round", [None, 2])
def test_uploads_of_earlier_rounds_are_not_awaited(uploading_round: int | None) -> None:
    assert wait_for_uploads(CLOSED, closed_round_state(uploading_round), 100.0) is None


def test_nothing_is_awaited_while_a_round_is_open_or_before_the_first() -> None:
    assert (
        wait_for_uploads(
            a_view(round=a_round(3)), replace(closed_round_state(), phase=a_training()), 100.0
        )
        is None
    )
    assert wait_for_uploads(a_view(), closed_round_state(), 100.0) is None


def test_a_node_with_stopping_workers_may_still_report_uploads() -> None:
    ending = closed_round_state(
        members=member_statuses(a_member_status(0), a_member_status(1, running_round=3))
    )
    wait = wait_for_uploads(CLOSED, ending, 100.0)
    assert wait is not None
    assert wait.until == 100.0 + RunTiming().stop_timeout_s
    assert wait_for_uploads(CLOSED, ending, wait.until) is None
