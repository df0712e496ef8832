"""Members, rounds and rank assignments, and the preemption notices of nodes.

A `Member` is an agent that offers worker slots. A `Round` assigns consecutive world ranks to the
nodes of some members (`NodeAssignment`). `Ranks` is the position of one worker process.

Identifiers of training-state snapshots and of the shard that each rank saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from spotfit.core.ids import AgentId, Token
from spotfit.core.units import format_bytes, format_count

# --- Identifiers of training-state snapshots ------------------------------------------------------


class SnapshotId(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The training state of the whole group after `step` of `round`.

    Ordered by round, then step: a later round resumed from one snapshot and thereby discarded every
    other snapshot of earlier rounds, even one with a higher step.
    """

    round: int
    step: int


class SnapshotShard(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The part of a snapshot that one rank saved."""

    snapshot_id: SnapshotId
    rank: int
    world_size: int
    """World size of the round that saved it, which is the number of shards of a complete
    snapshot."""


class MachineSize(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of an agent's machine may use, for messages."""

    cpus: int
    memory_bytes: int
    """The limit of the container if it has one; 0: unknown."""
    machine_memory_bytes: int = 0
    """Memory of the whole machine; 0: unknown."""
    shared_memory_bytes: int = 0
    """Size of /dev/shm."""
    gpus: int = 0

    def __str__(self) -> str:
        """For example "4 CPUs, 15.4 GiB memory, 7.0 GiB /dev/shm, 1 GPU"."""
        memory = f"{format_bytes(self.memory_bytes)} memory"
        if 0 < self.memory_bytes < self.machine_memory_bytes:
            memory += f" (limit of the container; {format_bytes(self.machine_memory_bytes)} in all)"
        parts = [
            format_count(self.cpus, "CPU"),
            memory if self.memory_bytes else "unknown memory",
            f"{format_bytes(self.shared_memory_bytes)} /dev/shm",
            format_count(self.gpus, "GPU") if self.gpus else "no GPU",
        ]
        return ", ".join(parts)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's offer to take part in rounds: its addresses and worker slots."""

    agent: AgentId
    host: str
    """Address at which workers of other nodes reach this node."""
    coordinator_address: str
    """host:port of its round coordinator, which it serves while it is the leader."""
    slots: int
    """Number of workers the node can run."""
    token: Token
    node: int
    """Index of its machine within the group `token`."""
    devices: tuple[str, ...] = ()
    python: str = ""
    pid: int = 0
    peer_store_address: str = ""
    """host:port of its peer snapshot server; '' if it stores no replicas of peers."""
    instance: str = ""
    """Id of the instance that the machine is, or is a container of; '' if unknown."""
    size: MachineSize | None = None

    def assign(self, *, node_rank: int, first_rank: int, num_workers: int) -> NodeAssignment:
        """Return the assignment of `num_workers` world ranks from `first_rank` on to this node.

        `node_rank` is the node's position in the round, from 0. The caller ensures that
        `num_workers` does not exceed `slots`.
        """
        return NodeAssignment(
            agent=self.agent,
            node_rank=node_rank,
            first_rank=first_rank,
            num_workers=num_workers,
            host=self.host,
            token=self.token,
            node=self.node,
            peer_store_address=self.peer_store_address,
            instance=self.instance,
        )


class FeederAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the feeders of a machine accept connections of workers."""

    address: str
    """host:port."""
    connections: int = 1
    """Number of processes, each of which can serve a connection at the same time."""


class StandbyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent stores about itself while it stands by in another network than the leader's."""

    member: Member
    renewal: int
    """Counts the reports of the agent: a growing number shows that it is alive."""
    is_warm: bool
    """Whether its workers could start without delay."""
    has_notice: bool = False
    """Whether its machine has a preemption notice."""
    failure: str = ""
    """Why the node can never start a worker; '' if it can."""


class NodeAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The node of one agent in a round: `num_workers` consecutive ranks from `first_rank`."""

    agent: AgentId
    node_rank: int
    first_rank: int
    num_workers: int
    host: str
    token: Token
    node: int
    """Index of its machine within the group `token`."""
    peer_store_address: str = ""
    """host:port of its peer snapshot server; '' if there is none."""
    instance: str = ""
    """Id of the instance that the machine is, or is a container of; '' if unknown."""

    def shares_instance(self, other: NodeAssignment) -> bool:
        """Whether both machines are containers of one instance, which is lost as a whole."""
        return bool(self.instance) and self.instance == other.instance

    @property
    def ranks(self) -> range:
        """The world ranks of the node's workers, in the order of their local ranks."""
        return range(self.first_rank, self.first_rank + self.num_workers)

    @property
    def machine_name(self) -> str:
        """The machine's name in messages and in `PreemptedNodes`: "<group token>/<node index>"."""
        return f"{self.token}/{self.node}"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of the worker group, called "attempt" in Ray. Any loss ends the round; the
    next one has the next number."""

    number: int
    assignments: tuple[NodeAssignment, ...]
    checkpoint_name: str | None = None
    """The committed checkpoint from which the ranks resume; None: they start from scratch."""
    memory_snapshot: SnapshotId | None = None
    """A newer snapshot in the memory of these nodes, used instead of the checkpoint. The checkpoint
    remains the fallback if a shard is corrupt."""
    # In the entry, so that all nodes read from the same sources without asking the leader.
    shard_holders: tuple[tuple[AgentId, ...], ...] = ()
    """The agents that hold each shard of `memory_snapshot`, by the rank that saved it."""

    @property
    def world_size(self) -> int:
        """The number of workers of the round, on all of its nodes."""
        return sum(assignment.num_workers for assignment in self.assignments)

    def assignment_of(self, agent: AgentId) -> NodeAssignment | None:
        """Return the assignment of that agent's node, or None if it takes no part in the round."""
        return next((one for one in self.assignments if one.agent == agent), None)

    def assignment_for_rank(self, rank: int) -> NodeAssignment:
        """Return the assignment of the node that runs that world rank.

        `rank` must be less than `world_size`; `StopIteration` is raised otherwise.
        """
        return next(assignment for assignment in self.assignments if rank in assignment.ranks)


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A preemption notice: the machine will be terminated."""

    reason: str
    seconds_left: float | None = None
    """Seconds until the termination when the notice was received; None if not announced."""
    deadline_ms: int = 0
    """The deadline in milliseconds since 1970 by the cloud's clock, for display only; 0:
    unknown."""


class PreemptionRisk(msgspec.Struct, frozen=True, kw_only=True):
    """A cloud's warning that the machine has an elevated risk of preemption (not a notice).

    It triggers one early save. Most machines with a warning are never preempted.
    """

    reason: str


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one worker process; the defaults describe a single process."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


# A dataclass with the field names of Ray Train: it is passed to user code and pickled in errors.
@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes of the round with a preemption notice, and the world ranks on each of them."""

    deadline_ms: int | None
    """The earliest deadline in milliseconds since 1970; None if unknown."""
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The ids of nodes with a preemption notice, sorted, such as "<group token>/0"."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The world ranks on all nodes with a preemption notice, sorted, each once."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})
