"""Tests of collectives: results, warnings, timeouts and deadlocks."""

from __future__ import annotations

from typing import Any

from spotfit.agent.collectives import CollectiveKey, Collectives, OutgoingFrame
from spotfit.protocol.worker_agent import LEAVE_GROUP, CollectiveWaiting, RankZeroBroadcastResult

BARRIER, BROADCAST = CollectiveKey("barrier", 0), CollectiveKey("broadcast", 0)


class ThreeRanks:
    """Three ranks; those that have not joined a collective are missing."""

    def __init__(self, **options: Any) -> None:
        self.waits = Collectives(3, **{"timeout_s": None, "warn_s": 60.0, **options})
        self.returned: set[int] = set()

    def missing(self, key: CollectiveKey) -> set[int]:
        return {0, 1, 2} - self.waits.joined_ranks(key)

    def join(self, rank: int, key: CollectiveKey, now: float = 0.0) -> None:
        self.waits.join(rank, key, now, value=b"%d" % rank, is_blocking=True)

    def check_timeouts(self, now: float) -> list[OutgoingFrame]:
        return self.waits.check_timeouts(now, self.missing)

    def abort_deadlocked(self) -> dict[int | None, Any]:
        return dict(self.waits.abort_deadlocked(self.returned, self.missing))


def test_ranks_that_leave_wait_without_a_timeout() -> None:
    group = ThreeRanks(timeout_s=10.0)
    group.join(0, CollectiveKey(LEAVE_GROUP, 0))
    assert group.check_timeouts(20.0) == []
    assert group.waits.next_timeout_check() == 60.0, "only the warning"


def test_joined_ranks_are_known_until_the_collective_closes() -> None:
    group = ThreeRanks()
    group.join(2, BARRIER)
    group.join(0, BARRIER)
    assert group.waits.joined_ranks(BARRIER) == {0, 2}
    assert group.waits.joined_ranks(BROADCAST) == set()
    assert group.waits.close(BARRIER) == {0: b"0", 2: b"2"}
    assert (group.waits.joined_ranks(BARRIER), dict(group.waits.close(BARRIER))) == (set(), {})


# --- time ----------------------------------------------------------------------------------------


def test_the_lowest_waiting_rank_receives_the_warnings() -> None:
    group = ThreeRanks(warn_s=10.0)
    group.join(2, BARRIER, now=100.0)
    group.join(1, BARRIER, now=105.0)
    assert group.waits.next_timeout_check() == 110.0
    assert group.check_timeouts(109.9) == []
    assert group.check_timeouts(110.0) == [
        (1, CollectiveWaiting(kind="barrier", missing_ranks=(0,), waited_s=10.0))
    ]
    assert group.check_timeouts(111.0) == []
    assert group.waits.next_timeout_check() == 120.0
    assert group.check_timeouts(120.0) == [
        (1, CollectiveWaiting(kind="barrier", missing_ranks=(0,), waited_s=20.0))
    ]


def test_a_timeout_aborts_for_all_waiting_ranks() -> None:
    group = ThreeRanks(timeout_s=5.0)
    group.join(1, BARRIER, now=10.0)
    group.join(2, BARRIER, now=14.0)
    assert group.waits.next_timeout_check() == 15.0
    assert group.check_timeouts(14.9) == []
    result = RankZeroBroadcastResult(kind="barrier", seq=0, missing_ranks=(0,))
    assert group.check_timeouts(15.0) == [(1, result), (2, result)]
    assert group.check_timeouts(99.0) == []
    assert group.waits.next_timeout_check() is None


# --- deadlocks -----------------------------------------------------------------------------------


def test_a_collective_is_not_aborted_while_a_rank_may_join() -> None:
    group = ThreeRanks()
    group.join(0, BARRIER)
    group.join(1, BROADCAST)
    assert group.abort_deadlocked() == {}


def test_a_deadlock_lists_the_ranks_by_collective() -> None:
    group = ThreeRanks()
    group.join(0, BARRIER)
    group.join(2, BARRIER)
    group.join(1, BROADCAST)
    responses = group.abort_deadlocked()
    assert responses.keys() == {0, 1, 2}
    assert (responses[0].kind, responses[0].missing_ranks, responses[1].missing_ranks) == (
        "barrier",
        (1,),
        (0, 2),
    )
    assert responses[0].reason == (
        "deadlock: ranks wait in different collectives: "
        "ranks 0, 2 in barrier (number 1), rank 1 in broadcast (number 1)"
    )


def test_a_deadlock_in_one_kind_is_listed_by_number() -> None:
    group = ThreeRanks()
    group.join(0, CollectiveKey("barrier", 1))
    group.join(1, BARRIER)
    group.join(2, BARRIER)
    assert "rank 0 in barrier (number 2)" in group.abort_deadlocked()[2].reason


def test_a_join_that_does_not_block_is_not_a_deadlock() -> None:
    group = ThreeRanks()
    group.join(0, BARRIER)
    group.join(1, BARRIER)
    group.waits.join(2, BROADCAST, 0.0, is_blocking=False)
    assert group.abort_deadlocked() == {}


def test_an_answered_rank_is_not_blocked() -> None:
    group = ThreeRanks()
    for rank in (0, 1, 2):
        group.join(rank, BARRIER)
    group.waits.close(BARRIER)
    group.join(0, BROADCAST)
    assert group.abort_deadlocked() == {}


def test_a_collective_that_needs_a_returned_rank_is_aborted() -> None:
    group = ThreeRanks()
    group.returned = {1}
    group.join(0, BARRIER)
    responses = group.abort_deadlocked()
    assert responses.keys() == {0}
    assert responses[0].reason == "rank 1 returned from the training function without calling it"
    group.join(2, BARRIER)
    assert group.abort_deadlocked().keys() == {2}


def test_a_deadlock_of_the_remaining_ranks_is_reported() -> None:
    group = ThreeRanks()
    group.returned = {2}
    group.waits.join(0, CollectiveKey("report", 0), 0.0, is_blocking=True)
    group.waits.join(1, CollectiveKey("report", 1), 0.0, is_blocking=True)
    responses = group.waits.abort_deadlocked({2}, lambda key: {1 - key.seq})
    assert [rank for rank, _ in responses] == [0, 1]


def test_long_lists_of_ranks_are_abbreviated() -> None:
    many = Collectives(1000, timeout_s=None, warn_s=60.0)
    for rank in range(999):
        many.join(rank, BARRIER, 0.0, is_blocking=True)
    many.join(999, BROADCAST, 0.0, is_blocking=True)
    responses = many.abort_deadlocked(
        set(), lambda key: {999} if key == BARRIER else set(range(999))
    )
    why = dict(responses)[0].reason  # type: ignore[union-attr]
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 991 more in barrier" in why
