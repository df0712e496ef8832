"""Parsing of the scripts' output, and mapping of agent states and exit codes to `NodeState`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import AgentExitCode, describe_exit_code

RUNNING, OVER, UNKNOWN = "running", "over", "unknown"
STATES: Mapping[str, NodeState] = {
    RUNNING: NodeState.RUNNING,
    OVER: NodeState.GONE,
    UNKNOWN: NodeState.GONE,
}
"""States of an agent: the first word printed by `render.machine_status_script`."""

FREE, BUSY, CLOSED, OCCUPIED = "free", "busy", "closed", "occupied"
REFUSAL_REASONS: Mapping[str, str] = {
    FREE: "",
    BUSY: "another agent runs on it",
    CLOSED: "it is closed",
    OCCUPIED: "availability_command fails",
}
"""States of a host (the first word printed by `render.host_status_script`), and why no agent can be
started in that state."""

EXIT_STATES: Mapping[int, NodeState] = {
    AgentExitCode.DONE: NodeState.GONE,
    AgentExitCode.DRAINED: NodeState.GONE,
    AgentExitCode.RELEASED: NodeState.GONE,
    AgentExitCode.NODE_UNUSABLE: NodeState.FAILED,
    AgentExitCode.RUN_NOT_FOUND: NodeState.FAILED,
    AgentExitCode.LEADER_UNREACHABLE: NodeState.FAILED,
    AgentExitCode.STORAGE_UNREACHABLE: NodeState.FAILED,
    AgentExitCode.STORAGE_REFUSED: NodeState.FAILED,
    AgentExitCode.CRASHED: NodeState.FAILED,
}
"""States by the agent's exit codes. Other codes are those of a shell that could not start it."""
_SIGNAL_CODE_BASE = 128  # a shell reports the end by signal n as exit code 128 + n


@dataclass(frozen=True, slots=True)
class SshHostStatus:
    """The status of a host before submission."""

    state: str
    last_exit_code: int | None = None
    """Exit code of the last agent, if known."""
    known_nodes: tuple[int, ...] = ()
    """Indexes of the machines of the group that the host has already."""

    @property
    def is_healthy(self) -> bool:
        """Whether the last agent did not fail."""
        return (
            self.last_exit_code is None or exit_status(self.last_exit_code).state == NodeState.GONE
        )


def parse_host_status(output: str) -> SshHostStatus:
    """Parse the output of `render.host_status_script`: a state, a code or '-', and indexes."""
    state, last, *numbers = output.split()
    return SshHostStatus(state, None if last == "-" else int(last), tuple(map(int, numbers)))


def parse_node_status(output: str) -> NodeStatus:
    """Parse the output of `render.machine_status_script`."""
    first, *times = output.splitlines()
    agent_state, _, code = first.partition(" ")
    started_at_ms, ended_at_ms, *_ = [*(int(time) * 1000 for time in times), None, None]
    return replace(
        _node_status(agent_state, code),
        started_at_ms=started_at_ms,
        # The exit code is written before the last process has ended.
        ended_at_ms=ended_at_ms if agent_state == OVER else None,
    )


def _node_status(agent_state: str, code: str) -> NodeStatus:
    state = STATES[agent_state]
    if agent_state == RUNNING:
        return NodeStatus(state=state)
    if agent_state == UNKNOWN:
        return NodeStatus(state=state, reason="its host does not know it")
    # The supervising shell had no time to write the code.
    if not code:
        return NodeStatus(state=state, reason="killed, or its host was rebooted")
    return exit_status(int(code))


def exit_status(exit_code: int) -> NodeStatus:
    """Return the status for an exit code of the agent."""
    # A signal is not a failure: a user of the host killed the agent, or memory was exhausted.
    if exit_code > _SIGNAL_CODE_BASE:
        return NodeStatus(
            state=NodeState.GONE, reason=f"ended by signal {exit_code - _SIGNAL_CODE_BASE}"
        )
    state = EXIT_STATES.get(exit_code, NodeState.FAILED)
    return NodeStatus(
        state=state,
        reason="its agent has exited" if exit_code == 0 else describe_exit_code(exit_code),
        exit_code=exit_code,
    )
