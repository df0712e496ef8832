"""`Roster`: the agents that are connected to the leader, and what each of them is doing."""

from __future__ import annotations

import re

from msgspec.structs import replace

from spotfit.agent.ports import AgentTransport
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import RankFailure
from spotfit.model.leader_state import MemberStatus
from spotfit.model.topology import FeederAddress, NodeAssignment, Notice, SnapshotShard
from spotfit.protocol.agent_leader import ConnectionHeartbeat, FromLeader, Join

_ADDRESS = re.compile(r"[^\s/:]{1,300}|[^\s/]{1,300}:[0-9]{1,5}")  # without a port in a simulation


class Roster:
    """The status of each connected agent (member), for one term of leadership.

    The dictionaries are public and not copied: a heartbeat of 1,000 agents must stay cheap. Times
    are event-loop seconds of the leader. Methods that change one status raise `KeyError` if the
    agent is not a member, except where noted.
    """

    def __init__(self, agent_id: AgentId, transport: AgentTransport) -> None:
        self._agent_id = agent_id
        self._transport = transport
        self.members: dict[AgentId, MemberStatus] = {}
        self.disconnected_since: dict[AgentId, float] = {}
        """Agents whose connection was lost and that have not reconnected, with the time; without
        those of machines that are recorded as lost."""
        self.disconnected_in_round: set[AgentId] = set()
        """Agents whose connection was lost since the round was opened, reconnected or not."""
        self.noticed_at: dict[AgentId, float] = {}
        """When each agent's current preemption notice arrived; a repetition does not change it."""
        self._notices: dict[AgentId, Notice] = {}
        self.last_agent_by_node: dict[tuple[Token, int], AgentId] = {}
        """The last agent that joined from each machine (group token and node index)."""
        self.loss_recorded_at: dict[Token, float] = {}
        """When the loss of a machine was last recorded in the journal, by group token."""
        self.agent_lost_at: dict[Token, float] = {}
        """The same for machines whose agents had joined."""
        self._lost: set[AgentId] = set()
        """Agents of machines that are recorded as lost; some exit only then."""
        self.feeding_since: dict[AgentId, float] = {}
        """When the feeders of each agent first accepted connections."""

    def join(self, agent: AgentId, join: Join, now: float) -> None:
        """Add an agent that has connected to the leader, with the state that its `Join` reports.

        Replaces an earlier status of the agent. A notice that it repeats keeps its first arrival
        time.
        """
        if join.notice is not None:
            self._store_notice(agent, join.notice, now)
        self.members[agent] = MemberStatus(
            member=join.member,
            joined_at=now,
            last_heard_at=now,
            running_round=join.running_round,
            notice=join.notice,
            is_warm=join.is_warm,
            node_failure=replace(join.node_failure, rank=0) if join.node_failure else None,
            last_entered_round=join.last_entered_round,
            uploading_round=join.uploading_round,
            snapshot_shards=_valid_shards(join.snapshot_shards),
        )
        self.disconnected_since.pop(agent, None)
        self.last_agent_by_node[join.member.token, join.member.node] = agent

    def mark_disconnected(self, agent: AgentId, now: float) -> bool:
        """Record that an agent's connection was lost at `now`, and remove it from `members`.

        Returns False, without any effect, if it was not a member.
        """
        if self.members.pop(agent, None) is None:
            return False
        if agent not in self._lost:
            self.disconnected_since[agent] = now
        # Kept when the agent rejoins: frames of its workers may have been lost meanwhile.
        self.disconnected_in_round.add(agent)
        return True

    def forget(self, token: Token, node: int, agent: AgentId | None, *, now: float) -> None:
        """Remove a machine (group token, node index) and its `agent`, declared lost at `now`.

        The machine is removed from `last_agent_by_node` if `agent` was the last to join from it, or
        is None: then the last one is lost with it. The lost agent is removed from
        `disconnected_since`, also if it disconnects later. Unknown ones are ignored.
        """
        # Not a copy of the dictionary per decision: `LeaderState` holds this one.
        self.loss_recorded_at = {**self.loss_recorded_at, token: now}
        if agent is not None:
            self.agent_lost_at = {**self.agent_lost_at, token: now}
        last = self.last_agent_by_node.get((token, node))
        # Another agent may have joined from the same machine since, after a restart.
        if agent is None or last == agent:
            self.last_agent_by_node.pop((token, node), None)
        if (lost := agent or last) is not None:
            self._lost.add(lost)
            self.disconnected_since.pop(lost, None)

    def touch(self, agent: AgentId, now: float) -> MemberStatus | None:
        """Record that a message of the agent arrived at `now`.

        Returns its updated status, or None, without any effect, if it is not a member.
        """
        status = self.members.get(agent)
        if status is not None:
            status = self.members[agent] = replace(status, last_heard_at=now)
        return status

    def assign_round(self, assignments: tuple[NodeAssignment, ...], round_number: int) -> None:
        """Record that the agents of a new round run workers, until they report `WorkersStopped`.

        `disconnected_in_round` is reset to the agents of the round that are not connected.
        """
        self.disconnected_in_round.clear()
        for assignment in assignments:
            if assignment.agent in self.members:
                self.members[assignment.agent] = replace(
                    self.members[assignment.agent], running_round=round_number
                )
            else:
                self.disconnected_in_round.add(assignment.agent)

    def mark_stopped(
        self,
        agent: AgentId,
        round_number: int,
        *,
        is_uploading: bool = False,
        snapshot_shards: tuple[SnapshotShard, ...] = (),
    ) -> None:
        """Record that an agent has no workers of that round or an older one (`WorkersStopped`).

        `is_uploading`: whether uploads of the round continue. `snapshot_shards`: all complete
        shards in the node's memory; they replace those known. A newer round that the agent runs is
        not ended.
        """
        status = self.members[agent]
        # A late message about an older round must not end the current one.
        is_older = status.running_round is not None and round_number < status.running_round
        self.members[agent] = replace(
            status,
            running_round=status.running_round if is_older else None,
            last_entered_round=max(status.last_entered_round, round_number),
            uploading_round=round_number if is_uploading else status.uploading_round,
            snapshot_shards=_valid_shards(snapshot_shards),
        )

    def mark_uploads_drained(self, agent: AgentId, round_number: int) -> None:
        """Record that an agent has completed its uploads of that round (`UploadsDrained`).

        Ignored if its uploads are of another round.
        """
        # A late message about an earlier round says nothing about the uploads of the last one.
        if self.members[agent].uploading_round == round_number:
            self.members[agent] = replace(self.members[agent], uploading_round=None)

    def can_enter(self, assignment: NodeAssignment, round_number: int) -> bool:
        """Whether the assignment's agent is connected and has not entered or aborted that round.

        An agent enters a round at most once.
        """
        status = self.members.get(assignment.agent)
        # Ranks that a node has started once have joined collectives: it never enters again.
        return status is not None and status.last_entered_round < round_number

    def record_notice(self, agent: AgentId, notice: Notice, now: float) -> None:
        """Record the preemption notice that a member has sent, in place of an earlier one.

        A notice equal to the earlier one keeps its arrival time in `noticed_at`.
        """
        self._store_notice(agent, notice, now)
        self.members[agent] = replace(self.members[agent], notice=notice)

    def _store_notice(self, agent: AgentId, notice: Notice, now: float) -> None:
        # Every `Join` repeats the notice, but its deadline counts from the first time.
        if self._notices.get(agent) != notice:
            self._notices[agent] = notice
            self.noticed_at[agent] = now

    def mark_unusable(self, agent: AgentId, failure: RankFailure) -> None:
        """Record the permanent error because of which the agent's node can start no worker."""
        # It has no rank: the policies expect the one of `NodeUnusable`.
        self.members[agent] = replace(self.members[agent], node_failure=replace(failure, rank=0))

    def record_feeder(self, agent: AgentId, feeder: FeederAddress | None, now: float) -> None:
        """Record where the feeders of a member accept connections at `now`; None if they do not.

        An impossible address counts as none: workers use it without checking it.
        """
        is_valid = feeder is not None and _ADDRESS.fullmatch(feeder.address) is not None
        self.members[agent] = replace(self.members[agent], feeder=feeder if is_valid else None)
        if is_valid:
            self.feeding_since.setdefault(agent, now)

    def mark_warm(self, agent: AgentId) -> None:
        """Record that the agent's fork server has imported everything that workers need."""
        self.members[agent] = replace(self.members[agent], is_warm=True)

    def find_unresponsive(self, timeout_s: float, now: float) -> list[AgentId]:
        """Return the members from which no message arrived for more than `timeout_s` seconds.

        This method does not remove them; the leader disconnects them. Its own agent is never among
        them.
        """
        return [
            agent
            for agent, status in self.members.items()
            # The leader's messages to itself are in memory and carry no heartbeats.
            if agent != self._agent_id and now - status.last_heard_at > timeout_s
        ]

    def are_all_stopped(self, assignments: tuple[NodeAssignment, ...]) -> bool:
        """Whether each agent of these assignments is disconnected or has no workers at all."""
        # A disconnected agent stops its workers by itself: it has lost its leader.
        statuses = (self.members.get(assignment.agent) for assignment in assignments)
        return all(status is None or status.running_round is None for status in statuses)

    def broadcast(self, message: FromLeader) -> None:
        """Send a message to all members, the leader's own agent included; does not block."""
        for agent in self.members:
            self._transport.send_to_agent(agent, message)

    def send_heartbeats(self) -> None:
        """Send a `ConnectionHeartbeat` to all members; called at the heartbeat interval."""
        self.broadcast(ConnectionHeartbeat())


def find_invalid_field(join: Join) -> str:
    """Return which field of a `Join` is impossible, and its value; '' if there is none.

    The policies and the other agents use these fields without checking them.
    """
    member = join.member
    if member.slots < 0 or member.node < 0:
        return f"slots={member.slots}, node={member.node}"
    for address in (member.coordinator_address, member.peer_store_address):
        if address and not _ADDRESS.fullmatch(address):
            return f"the address {address[:100]!r}"
    rounds = (join.running_round, join.uploading_round, join.last_entered_round + 1, join.next_slot)
    if any(number is not None and number < 0 for number in rounds):
        return f"a negative round or slot among {rounds}"
    return ""


def _valid_shards(shards: tuple[SnapshotShard, ...]) -> tuple[SnapshotShard, ...]:
    return tuple(shard for shard in shards if 0 <= shard.rank < shard.world_size)
