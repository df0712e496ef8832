"""`Roster`: the agents that are connected to the leader, and what each of them is doing."""

from __future__ import annotations

from msgspec.structs import replace

from spotfit.agent.ports import AgentTransport
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import RankFailure
from spotfit.model.leader_state import MemberStatus
from spotfit.model.topology import NodeAssignment, Notice, SnapshotShard
from spotfit.protocol.agent_leader import ConnectionHeartbeat, FromLeader, Join


class Roster:
    """The status of each connected agent, for one term of leadership.

    The dictionaries are public and not copied: a heartbeat of 1,000 agents must stay cheap.
    """

    def __init__(self, agent_id: AgentId, transport: AgentTransport) -> None:
        self._agent_id = agent_id
        self._transport = transport
        self.members: dict[AgentId, MemberStatus] = {}
        self.disconnected_since: dict[AgentId, float] = {}
        """Agents whose connection was lost and that have not reconnected, with the time."""
        self.disconnected_in_round: set[AgentId] = set()
        """Agents whose connection was lost since the round was opened, reconnected or not."""
        self.noticed_at: dict[AgentId, float] = {}
        """When each agent's current preemption notice arrived; a repetition does not change it."""
        self._notices: dict[AgentId, Notice] = {}
        self.last_agent_by_node: dict[tuple[Token, int], AgentId] = {}
        """The last agent that joined from each machine (group token and node index)."""

    def join(self, agent: AgentId, join: Join, now: float) -> None:
        """Add an agent that has opened a new connection."""
        if join.notice is not None:
            self._store_notice(agent, join.notice, now)
        self.members[agent] = MemberStatus(
            member=join.member,
            joined_at=now,
            last_heard_at=now,
            running_round=join.running_round,
            notice=join.notice,
            is_warm=join.is_warm,
            node_failure=join.node_failure,
            last_entered_round=join.last_entered_round,
            uploading_round=join.uploading_round,
            snapshot_shards=join.snapshot_shards,
        )
        self.disconnected_since.pop(agent, None)
        self.last_agent_by_node[join.member.token, join.member.node] = agent

    def mark_disconnected(self, agent: AgentId, now: float) -> bool:
        """Record the loss of an agent's connection. Returns False if it was not a member."""
        if self.members.pop(agent, None) is None:
            return False
        self.disconnected_since[agent] = now
        # Kept when the agent rejoins: frames of its workers may have been lost meanwhile.
        self.disconnected_in_round.add(agent)
        return True

    def forget(self, token: Token, node: int, agent: AgentId | None) -> None:
        """Remove a machine that was declared lost, or only that agent of it."""
        # Another agent may have joined from the same machine since, after a restart.
        if agent is None or self.last_agent_by_node.get((token, node)) == agent:
            self.last_agent_by_node.pop((token, node), None)
        if agent is not None:
            self.disconnected_since.pop(agent, None)

    def touch(self, agent: AgentId, now: float) -> MemberStatus | None:
        """Record that a message arrived. Returns the status, or None if it is not a member."""
        status = self.members.get(agent)
        if status is not None:
            status = self.members[agent] = replace(status, last_heard_at=now)
        return status

    def assign_round(self, assignments: tuple[NodeAssignment, ...], round_number: int) -> None:
        """Mark all agents of the round as running until they report `WorkersStopped`.

        Agents that are not connected any more count as disconnected in this round.
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
        """Record that an agent has no workers of that round or an older one."""
        status = self.members[agent]
        # A late message about an older round must not end the current one.
        is_older = status.running_round is not None and round_number < status.running_round
        self.members[agent] = replace(
            status,
            running_round=status.running_round if is_older else None,
            last_entered_round=max(status.last_entered_round, round_number),
            uploading_round=round_number if is_uploading else status.uploading_round,
            snapshot_shards=snapshot_shards,
        )

    def mark_uploads_drained(self, agent: AgentId, round_number: int) -> None:
        """Record that an agent has no uploads of that round in progress."""
        # A late message about an earlier round says nothing about the uploads of the last one.
        if self.members[agent].uploading_round == round_number:
            self.members[agent] = replace(self.members[agent], uploading_round=None)

    def can_enter(self, assignment: NodeAssignment, round_number: int) -> bool:
        """Whether the agent is connected and has neither entered nor aborted that round."""
        status = self.members.get(assignment.agent)
        # Ranks that a node has started once have joined collectives: it never enters again.
        return status is not None and status.last_entered_round < round_number

    def record_notice(self, agent: AgentId, notice: Notice, now: float) -> None:
        """Record a preemption notice, or an earlier deadline of a known one."""
        self._store_notice(agent, notice, now)
        self.members[agent] = replace(self.members[agent], notice=notice)

    def _store_notice(self, agent: AgentId, notice: Notice, now: float) -> None:
        # Every `Join` repeats the notice, but its deadline counts from the first time.
        if self._notices.get(agent) != notice:
            self._notices[agent] = notice
            self.noticed_at[agent] = now

    def mark_unusable(self, agent: AgentId, failure: RankFailure) -> None:
        """Record why no worker can be started on that node."""
        self.members[agent] = replace(self.members[agent], node_failure=failure)

    def mark_warm(self, agent: AgentId) -> None:
        """Record that the fork server of that node has imported everything."""
        self.members[agent] = replace(self.members[agent], is_warm=True)

    def find_unresponsive(self, timeout_s: float, now: float) -> list[AgentId]:
        """Return the other agents from which no message arrived for `timeout_s`."""
        return [
            agent
            for agent, status in self.members.items()
            # The leader's messages to itself are in memory and carry no heartbeats.
            if agent != self._agent_id and now - status.last_heard_at > timeout_s
        ]

    def are_all_stopped(self, assignments: tuple[NodeAssignment, ...]) -> bool:
        """Whether each of these agents is disconnected or has no workers."""
        # A disconnected agent stops its workers by itself: it has lost its leader.
        statuses = (self.members.get(assignment.agent) for assignment in assignments)
        return all(status is None or status.running_round is None for status in statuses)

    def broadcast(self, message: FromLeader) -> None:
        """Send to all connected agents."""
        for agent in self.members:
            self._transport.send_to_agent(agent, message)

    def send_heartbeats(self) -> None:
        """Send a heartbeat to all connected agents."""
        self.broadcast(ConnectionHeartbeat())
