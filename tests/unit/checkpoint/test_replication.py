"""Send order and retention of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.checkpoint.replication import (
    PendingReplica,
    ReplicaId,
    ReplicaStore,
    ReplicationQueue,
    is_outdated,
    replicas_to_delete,
)


def pending(report: int, rank: int, *, to: str = "a", round_: int = 3) -> PendingReplica:
    return PendingReplica(ReplicaId(round_, report, rank), Path(), (), (0, 1), to)


def queue_of(*queue: PendingReplica) -> ReplicationQueue:
    made = ReplicationQueue()
    for replica in queue:
        made.add(replica)
    return made


def pop_all(queue_of: ReplicationQueue) -> list[tuple[int, int]]:
    """Pop all queued replicas; returns their report and rank."""
    found = []
    while (replica := queue_of.pop()) is not None:
        found.append((replica.replica.report, replica.replica.rank))
    return found


def test_the_current_save_is_sent_completely() -> None:
    queue = queue_of(pending(0, 1), pending(0, 0))
    first = queue.pop()
    assert first is not None
    assert first.replica.rank == 0
    queue.add(pending(1, 0))
    queue.add(pending(1, 1))
    assert pop_all(queue) == [(0, 1), (1, 0), (1, 1)]


def test_a_late_replica_joins_its_current_save() -> None:
    queue = queue_of(pending(0, 0))
    queue.pop()
    queue.add(pending(1, 0))
    queue.add(pending(0, 1))
    assert pop_all(queue) == [(0, 1), (1, 0)]


def test_a_late_replica_does_not_replace_a_later_save() -> None:
    queue = queue_of(pending(0, 0))
    queue.pop()
    queue.add(pending(2, 0))
    queue.add(pending(1, 1))
    queue.add(pending(2, 1))
    assert pop_all(queue) == [(2, 0), (2, 1)]
    queue.add(pending(1, 1))
    assert pop_all(queue) == [], "the other shard of that save is missing"
    queue = queue_of(pending(2, 0), pending(1, 0, round_=4), pending(3, 1))
    assert pop_all(queue) == [(1, 0)], "a later round takes precedence"
    queue = queue_of(pending(0, 0))
    queue.pop()
    queue.add(pending(2, 0))
    queue.add(pending(1, 0, to="b"))
    assert pop_all(queue) == [(1, 0)], "replicas for the previous peer are dropped"


def test_of_the_waiting_saves_only_the_last_is_sent() -> None:
    queue = queue_of(pending(0, 0))
    queue.pop()
    for report in range(1, 40):
        for rank in (0, 1):
            queue.add(pending(report, rank))
    assert pop_all(queue) == [(39, 0), (39, 1)]


def test_the_rest_of_a_failed_save_is_dropped() -> None:
    queue = queue_of(pending(0, 0), pending(0, 1))
    lost = queue.pop()
    assert lost is not None
    queue.add(pending(1, 0))
    queue.mark_failed(lost)
    queue.add(pending(0, 2))
    assert pop_all(queue) == [(1, 0)]


def test_a_save_that_started_late_gives_way_to_a_new_one() -> None:
    """Its segments would be overwritten before all are sent, as those of the save before."""
    queue = queue_of(pending(0, 0), pending(0, 1))
    lost = queue.pop()
    assert lost is not None
    queue.add(pending(1, 0))
    queue.add(pending(1, 1))
    queue.mark_failed(lost)
    outdated = queue.pop()
    assert outdated is not None
    assert (outdated.replica.report, queue.is_abandoned(outdated)) == (1, False)
    queue.add(pending(2, 0))
    assert queue.is_abandoned(outdated)
    queue.mark_failed(outdated)
    queue.add(pending(2, 1))
    current = queue.pop()
    assert current is not None
    queue.add(pending(3, 0))
    assert (current.replica.report, queue.is_abandoned(current)) == (2, False)
    assert pop_all(queue) == [(2, 1), (3, 0)]


def test_a_save_that_started_late_does_not_give_way_to_an_earlier_one() -> None:
    queue = queue_of(pending(0, 0))
    lost = queue.pop()
    assert lost is not None
    queue.add(pending(2, 0))
    queue.add(pending(2, 1))
    queue.mark_failed(lost)
    outdated = queue.pop()
    assert outdated is not None
    queue.add(pending(1, 1))
    assert not queue.is_abandoned(outdated)
    assert pop_all(queue) == [(2, 1)]


def test_replicas_for_another_peer_replace_the_queue() -> None:
    queue = queue_of(pending(0, 0), pending(0, 1))
    failed = queue.pop()
    assert failed is not None
    for rank in (0, 1):
        queue.add(pending(0, rank, to="b"))
    queue.mark_failed(failed)
    found = [queue.pop(), queue.pop(), queue.pop()]
    assert [replica and (replica.target, replica.replica.rank) for replica in found] == [
        ("b", 0),
        ("b", 1),
        None,
    ]


@pytest.mark.parametrize(
    ("stored", "outdated"),
    [
        (ReplicaId(3, 9, 0), False),
        (ReplicaId(4, 0, 1), False),
        (ReplicaId(4, 9, 0), True),
        (ReplicaId(4, 7, 0), False),
        (ReplicaId(4, 9, 1), False),
        (ReplicaId(5, 0, 1), True),
    ],
)
def test_a_replica_is_outdated_by_later_ones(stored: ReplicaId, outdated: bool) -> None:
    assert is_outdated(ReplicaId(4, 8, 0), [stored]) is outdated


def test_the_last_complete_save_is_kept_until_a_later_one_is_complete() -> None:
    saves = [
        ReplicaId(3, report, rank) for report, rank in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    ]
    found = replicas_to_delete(ReplicaId(3, 4, 0), (0, 1), saves)
    assert list(found) == [ReplicaId(3, 1, 0), ReplicaId(3, 1, 1), ReplicaId(3, 3, 0)]


def test_replicas_of_other_machines_are_kept() -> None:
    stored = [ReplicaId(3, 1, 0), ReplicaId(3, 2, 0), ReplicaId(3, 1, 5), ReplicaId(2, 9, 5)]
    assert list(replicas_to_delete(ReplicaId(3, 3, 0), (0,), stored)) == [
        ReplicaId(3, 1, 0),
        ReplicaId(2, 9, 5),
    ]


def on(folder: Path, *copies: ReplicaId) -> ReplicaStore:
    folder.mkdir(exist_ok=True)
    for copy in copies:
        (folder / copy.file_name).touch()
    return ReplicaStore(folder)


def test_report_indices_are_compared_as_numbers(tmp_path: Path) -> None:
    store = on(tmp_path, *(ReplicaId(3, report, 0) for report in (9, 10, 11)))
    assert store.reserve(ReplicaId(3, 12, 0), (0,))
    assert list(store.replicas) == [ReplicaId(3, 11, 0)]
    assert not store.reserve(ReplicaId(2, 13, 0), (0,))


def test_roll_back_deletes_and_rejects_earlier_replicas(tmp_path: Path) -> None:
    stored = ReplicaId(2, 9, 0), ReplicaId(3, 4, 0), ReplicaId(3, 5, 1), ReplicaId(3, 6, 0)
    store = on(tmp_path / "copies", *stored)
    store.roll_back(ReplicaId(3, 6, 0))
    assert list(store.replicas) == [ReplicaId(3, 6, 0)], "it was saved after the roll-back point"
    incoming = tmp_path / "coming"
    incoming.touch()
    assert not store.reserve(ReplicaId(3, 5, 1), (0, 1))
    assert not store.put(incoming, ReplicaId(3, 5, 1)), "its transfer had started before"
    store.roll_back(ReplicaId(3, 0, 0))
    assert not store.put(incoming, ReplicaId(3, 5, 1)), (
        "an earlier roll-back does not lower the limit"
    )
    assert store.put(incoming, ReplicaId(3, 6, 1))
