"""The simulated node memory stores and removes the same snapshots as production."""

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

SAVED_STATE = SimSavedState(9, "link")


class ManualEnvironment:
    """Scheduled callbacks run when the test calls `run_pending`."""

    def __init__(self) -> None:
        self.is_disconnected = False
        self.pending: list[Callable[[], None]] = []

    def now(self) -> float:
        return 0.0

    def schedule_after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.pending.append(callback)

    def draw_replication_s(self) -> float:
        return 1.0

    def is_reachable(self, sender: str, receiver: str) -> bool:
        return not self.is_disconnected

    def run_pending(self) -> None:
        pending, self.pending = self.pending, []
        for callback in pending:
            callback()


@pytest.fixture
def environment() -> ManualEnvironment:
    return ManualEnvironment()


@pytest.fixture
def memories(environment: ManualEnvironment) -> Iterator[dict[str, SimNodeMemory]]:
    memories: dict[str, SimNodeMemory] = {}
    for name in ("a", "b"):
        SimNodeMemory(name, environment, memories)
    yield memories
    for memory in list(memories.values()):
        memory.close()


def of_rank(rank: int, **fields: object) -> StartWorker:
    return make_start(round=3, rank=rank, world_size=2, **fields)


def save_snapshot(memory: SimNodeMemory, rank: int, state: SimSavedState = SAVED_STATE) -> None:
    """Save a snapshot on this node and queue its replica for the other node."""
    segment = memory.create_segment(f"3-{rank}-{state.step}")
    fill_segment(segment, of_rank(rank), state)
    assert memory.snapshots.replicate is not None
    peer = "b" if memory.name == "a" else "a"
    memory.snapshots.replicate(make_pending_replica(segment.path, peer, report=state.step))


def held_ranks(memory: SimNodeMemory, step: int = 9) -> list[int]:
    return [part.rank for part in memory.snapshots.scan_shards() if part.snapshot_id.step == step]


def test_replica_is_stored_on_the_peer(
    environment: ManualEnvironment, memories: dict[str, SimNodeMemory]
) -> None:
    save_snapshot(memories["a"], 0)
    assert (held_ranks(memories["a"]), held_ranks(memories["b"])) == ([0], [])
    environment.run_pending()
    assert held_ranks(memories["b"]) == [0]


def test_replica_is_not_stored_while_disconnected_or_after_close(
    environment: ManualEnvironment, memories: dict[str, SimNodeMemory]
) -> None:
    save_snapshot(memories["a"], 0)
    environment.is_disconnected = True
    environment.run_pending()
    assert held_ranks(memories["b"]) == []
    environment.is_disconnected = False
    save_snapshot(memories["a"], 0, SimSavedState(12, "link"))
    memories["a"].close()
    environment.run_pending()
    assert held_ranks(memories["b"], 12) == []


def test_state_is_read_from_local_and_peer_memory(
    environment: ManualEnvironment, memories: dict[str, SimNodeMemory]
) -> None:
    save_snapshot(memories["a"], 0)
    save_snapshot(memories["b"], 1)
    for memory in memories.values():
        memory.snapshots.scan_shards()
    path = memories["a"].snapshots.find_shard(
        SnapshotShard(snapshot_id=SnapshotId(round=3, step=9), rank=0, world_size=2)
    )
    start = replace(
        of_rank(0),
        memory_snapshot=SnapshotId(round=3, step=9),
        local_segments=(str(path), ""),
        peer_store_addresses=("", "b"),
    )
    state_bytes = read_memory_state(start, memories["a"], memories, lambda _: True)
    assert decode_saved_state(state_bytes) == SAVED_STATE
    with pytest.raises(IntegrityError, match="cannot read the shard of rank 1"):
        read_memory_state(start, memories["a"], memories, lambda _: False)
