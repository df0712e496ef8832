"""Machines as asked for, planned, handed out and observed."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from spotfit.core.ids import Token

Role = Literal["train", "validate"]
"""What machines are for: workers of the run's rounds, or validations of its checkpoints."""


class GroupRequest(msgspec.Struct, frozen=True):
    """So many workers' worth of machines, please. The token makes asking twice asking once."""

    token: Token
    workers: int
    of: int
    """How many workers the whole run wants; a backend cuts its nodes to this."""
    resources_per_worker: dict[str, float] = {}
    run_url: str = ""
    run_name: str = ""
    role: Role = "train"


class GroupPlan(msgspec.Struct, frozen=True):
    """What a backend will ask its cloud for: `nodes` machines with `slots` workers each.

    `body` is the cloud's own request. Neither holds a secret: plans go into the journal.
    """

    token: Token
    backend: str
    nodes: int
    slots: int
    body: dict[str, Any] = {}


class GroupHandle(msgspec.Struct, frozen=True):
    """How a backend finds a group again, from any process."""

    token: Token
    backend: str
    name: str
    detail: dict[str, Any] = {}


class NodeState(enum.StrEnum):
    """The life of a machine, as far as its backend knows."""

    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"
    FAILED = "failed"
    REFUSED = "refused"
    """Promised and not given; another place may have one, so it is worth asking anew."""


class NodeStatus(msgspec.Struct, frozen=True):
    """One machine of a group; `reason` in the backend's own words."""

    state: NodeState
    reason: str = ""
    last: bool = False
    """Its backend, which brings lost machines back, will not do so with this one once more."""

    @property
    def over(self) -> bool:
        """Whether this machine will not come (back)."""
        return self.state in (NodeState.GONE, NodeState.FAILED, NodeState.REFUSED)


class GroupStatus(msgspec.Struct, frozen=True):
    """A group, node by node. `refusal` tells why the market gives nothing at present."""

    nodes: tuple[NodeStatus, ...]
    refusal: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of the group is left."""
        return all(node.over for node in self.nodes)


def gone(nodes: int, reason: str = "nobody remembers it") -> GroupStatus:
    """The status of a group that no longer exists."""
    return GroupStatus(tuple(NodeStatus(NodeState.GONE, reason) for _ in range(nodes)))
