"""Memory in a simulated world holds what production would, for as long as it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from spotfit.core.errors import IntegrityError
from spotfit.model.topology import SnapshotId, SnapshotShard
from spotfit.protocol.worker_agent import StartWorker
from spotfit_localsim.virtual.sim_snapshots import (
    SimNodeMemory,
    SimSavedState,
    decode_saved_state,
    fill_segment,
    read_memory_state,
)
from tests.unit.agent.pending_replicas import make_pending_replica
from tests.unit.worker.agent_end import make_start

KEPT = SimSavedState(9, "link")


class Ground:
    """Everything comes when it is called for."""

    def __init__(self) -> None:
        self.is_disconnected = False
        self.due: list[Callable[[], None]] = []

    def now(self) -> float:
        return 0.0

    def schedule_after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def draw_replication_s(self) -> float:
        return 1.0

    def is_reachable(self, sender: str, receiver: str) -> bool:
        return not self.is_disconnected

    def run_pending(self) -> None:
        due, self.due = self.due, []
        for then in due:
            then()


@pytest.fixture
def ground() -> Ground:
    return Ground()


@pytest.fixture
def others(ground: Ground) -> Iterator[dict[str, SimNodeMemory]]:
    others: dict[str, SimNodeMemory] = {}
    for name in ("a", "b"):
        SimNodeMemory(name, ground, others)
    yield others
    for memory in list(others.values()):
        memory.close()


def of_rank(rank: int, **given: object) -> StartWorker:
    return make_start(round=3, rank=rank, world_size=2, **given)


def saved(memory: SimNodeMemory, rank: int, kept: SimSavedState = KEPT) -> None:
    """By a worker of that machine, and sent to the other."""
    segment = memory.create_segment(f"3-{rank}-{kept.step}")
    fill_segment(segment, of_rank(rank), kept)
    assert memory.snapshots.replicate is not None
    to = "b" if memory.name == "a" else "a"
    memory.snapshots.replicate(make_pending_replica(segment.path, to, report=kept.step))


def held(memory: SimNodeMemory, step: int = 9) -> list[int]:
    return [part.rank for part in memory.snapshots.scan_shards() if part.snapshot_id.step == step]


def test_replica_is_stored_on_the_peer(ground: Ground, others: dict[str, SimNodeMemory]) -> None:
    saved(others["a"], 0)
    assert (held(others["a"]), held(others["b"])) == ([0], [])
    ground.run_pending()
    assert held(others["b"]) == [0]


def test_replica_is_not_stored_in_these_cases(
    ground: Ground, others: dict[str, SimNodeMemory]
) -> None:
    saved(others["a"], 0)
    ground.is_disconnected = True
    ground.run_pending()
    assert held(others["b"]) == []
    ground.is_disconnected = False
    saved(others["a"], 0, SimSavedState(12, "link"))
    others["a"].close()
    ground.run_pending()
    assert held(others["b"], 12) == []


def test_state_is_read_from_local_and_peer_memory(
    ground: Ground, others: dict[str, SimNodeMemory]
) -> None:
    saved(others["a"], 0)
    saved(others["b"], 1)
    for memory in others.values():
        memory.snapshots.scan_shards()
    path = others["a"].snapshots.find_shard(
        SnapshotShard(snapshot_id=SnapshotId(round=3, step=9), rank=0, world_size=2)
    )
    begins = replace(
        of_rank(0),
        memory_snapshot=SnapshotId(round=3, step=9),
        local_segments=(str(path), ""),
        peer_store_addresses=("", "b"),
    )
    whole = read_memory_state(begins, others["a"], others, lambda _: True)
    assert decode_saved_state(whole) == KEPT
    with pytest.raises(IntegrityError, match="cannot read the shard of rank 1"):
        read_memory_state(begins, others["a"], others, lambda _: False)
