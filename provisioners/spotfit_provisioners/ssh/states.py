"""What hosts say, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import Exit

RUNNING, OVER, UNKNOWN = "running", "over", "unknown"
STATES: Mapping[str, NodeState] = {
    RUNNING: NodeState.RUNNING,
    OVER: NodeState.GONE,
    UNKNOWN: NodeState.GONE,
}
"""Of an agent: all that `render.look` prints first."""

FREE, BUSY, CLOSED, OCCUPIED = "free", "busy", "closed", "occupied"
WHY_NOT: Mapping[str, str] = {
    FREE: "",
    BUSY: "an agent is at work there",
    CLOSED: "somebody has closed it",
    OCCUPIED: "free_if fails there",
}
"""Of a host: all that `render.survey` prints first, and why none can be started there."""

ENDS: Mapping[int, NodeState] = {
    Exit.DONE: NodeState.GONE,
    Exit.DRAINED: NodeState.GONE,
    Exit.GIVEN_UP: NodeState.GONE,
    Exit.REFUSED: NodeState.FAILED,
    Exit.CRASHED: NodeState.FAILED,
}
"""By an agent's own exit codes. Others are those of a shell that could not start it."""
_BY_SIGNAL = 128


@dataclass(frozen=True, slots=True)
class Survey:
    """A host, before anything is asked of it."""

    state: str
    last: int | None = None
    """How the agent ended that was there last, if it said so."""
    numbers: tuple[int, ...] = ()
    """Machines of the group in question that this host knows already."""

    @property
    def well(self) -> bool:
        """Whether nothing is known against it: the last agent did not fail."""
        return self.last is None or end(self.last).state == NodeState.GONE


def survey(told: str) -> Survey:
    """What `render.survey` has printed: a state, a code or '-', and numbers."""
    state, last, *numbers = told.split()
    return Survey(state, None if last == "-" else int(last), tuple(map(int, numbers)))


def node(told: str) -> NodeStatus:
    """One machine, from what `render.look` has printed."""
    saying, _, code = told.partition(" ")
    state = STATES[saying]
    if saying == RUNNING:
        return NodeStatus(state)
    if saying == UNKNOWN:
        return NodeStatus(state, "its host knows nothing of it")
    if not code:
        return NodeStatus(state, "killed, or its host was started anew")
    return end(int(code))


def end(code: int) -> NodeStatus:
    """An agent that left this code."""
    # By a signal: somebody wanted the host for themselves, or its memory was full.
    if code > _BY_SIGNAL:
        return NodeStatus(NodeState.GONE, f"ended by signal {code - _BY_SIGNAL}")
    state = ENDS.get(code, NodeState.FAILED)
    return NodeStatus(state, "its agent has ended" if code == 0 else f"exit code {code}")
