"""Groups of machines: requested (`GroupRequest`), planned, granted and observed (`GroupStatus`).

`Software` describes what the machines will run, as far as it is known before they boot.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from spotfit.core.ids import Token
from spotfit.model.offer import Offer

Role = Literal["train", "validate", "feed"]
"""What a group's machines execute: workers of the run's rounds, checkpoint validations, or feeders
that transform datasets."""


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for machines that hold `num_workers` workers. Idempotent on the token."""

    # The leader chooses it before the request, so that a repeated submit cannot rent twice.
    token: Token
    num_workers: int
    total_workers: int
    """`max_workers` of the run; a backend sizes its nodes by it, also for partial requests."""
    resources_per_worker: dict[str, float] = {}
    run_url: str = ""
    run_name: str = ""
    run_id: str = ""
    """With `run_name` in the tags of what is rented; '' for requests that rent nothing."""
    role: Role = "train"
    network: str = ""
    """`GroupHandle.network` of the machines of the run that stand; '' if any network may be used.
    A backend places all machines of the request there: others could not connect to the leader."""
    refused_networks: tuple[str, ...] = ()
    """Networks that had no machine since the last round was opened, the latest one last."""
    offer: Offer | None = None
    """The offer to rent; None if the backend chooses among its offers, as its options say."""
    time_limit_s: int | None = None
    """After this time the backend ends the machines by itself, a second line of defence if their
    agents do not respond; None for never."""


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend requests from its cloud: `num_nodes` machines of `slots_per_node` workers.

    `body` is the request in the cloud's own format. A plan is written to the journal and must not
    contain secrets.
    """

    token: Token
    provisioner: str
    num_nodes: int
    slots_per_node: int
    body: dict[str, Any] = {}


# Written to the journal: a new leader observes and releases groups of the previous one with it.
class GroupHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which a backend finds a group from any process."""

    token: Token
    provisioner: str
    name: str
    detail: dict[str, Any] = {}
    network: str = ""
    """The region or infrastructure of its machines, in the backend's terms, if the backend may use
    several whose machines cannot connect to each other; else ''."""
    offer: str = ""
    """The name of the offer that its machines are rented under; '' if the backend has no offers."""


class NodeState(enum.StrEnum):
    """The state of a machine as its backend reports it.

    state     | meaning                                      | next
    ----------|----------------------------------------------|-------------------------
    WAITING   | requested, queued or booting                 | RUNNING, REFUSED, FAILED
    RUNNING   | the machine runs                             | GONE, FAILED
    GONE      | terminated, preempted or released            | -
    FAILED    | ended with an error                          | -
    REFUSED   | was granted but never provided               | -
    """

    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"
    FAILED = "failed"
    REFUSED = "refused"
    """A new request may succeed, for example in another zone."""


class Unreachable(enum.StrEnum):
    """What a machine could not reach, so that its agent has never joined."""

    STORAGE = "storage"
    """The storage does not answer: there is no route to it, or it is unavailable."""
    ACCESS = "access"
    """The storage refuses: another region, no such bucket, no credentials or no permission."""
    RUN = "run"
    """The storage that the machine opens has no journal of the run."""
    LEADER = "leader"
    """The leader, which renews its lease meanwhile, does not answer."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a group. `reason` is the backend's own text."""

    state: NodeState
    reason: str = ""
    is_last_attempt: bool = False
    """Whether a backend that restarts lost machines has used up the restarts of this one."""
    exit_code: int | None = None
    """Exit code of the agent of a terminated machine, if the backend reports it."""
    out_of_memory: bool = False
    """Whether it was killed because its processes exceeded the memory limit of its container."""
    started_at_ms: int | None = None
    """From when on the provider bills the machine, by the provider's clock in milliseconds since
    1970; None if it is not billed yet, or the backend does not report it. Of the last attempt."""
    ended_at_ms: int | None = None
    """Until when the provider bills it; None while it runs, or if the backend does not report
    it."""
    attempt: int | None = None
    """Number of the attempt of these times, from 1; None if the backend does not report it. Only
    for backends that restart machines."""
    is_known: bool = True
    """False for a GONE machine of which the backend has no record: it may have ended long ago, or
    reads do not show it yet, see `Traits.read_lag_s`."""

    # WAITING is not terminated, also not after RUNNING: the backend has requeued the machine.
    @property
    def is_terminated(self) -> bool:
        """Whether the machine has ended permanently: it is GONE, FAILED or REFUSED.

        False while the backend may still start it, also after a restart by the backend.
        """
        return self.state in (NodeState.GONE, NodeState.FAILED, NodeState.REFUSED)


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of each node of a group. `refusal`: why no capacity is available at present."""

    nodes: tuple[NodeStatus, ...]
    refusal: str = ""

    @property
    def is_terminated(self) -> bool:
        """Whether all machines of the group have ended permanently; True if `nodes` is empty."""
        return all(node.is_terminated for node in self.nodes)


def find_node_status(
    group_statuses: Mapping[Token, GroupStatus], token: Token, node: int
) -> NodeStatus | None:
    """Return the status of the machine `node` of that group; None if it is not reported yet."""
    group_status = group_statuses.get(token)
    if group_status is None or node >= len(group_status.nodes):
        return None
    return group_status.nodes[node]


def missing_group_status(
    num_nodes: int, reason: str = "the backend has no record of it"
) -> GroupStatus:
    """Return the status of a group that the backend has no record of: `num_nodes` GONE machines.

    They are not `is_known`, so that a group that was submitted a moment ago counts as waiting.
    For implementations of `Provisioner.observe`. `reason` is shown as the reason of each loss,
    such as "Slurm does not know the job".
    """
    return GroupStatus(
        nodes=tuple(
            NodeStatus(state=NodeState.GONE, reason=reason, is_known=False)
            for _ in range(num_nodes)
        )
    )


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Python and packages of machines that have not booted yet.

    Unknown values are compared on the machine instead, before any user code is loaded there.
    """

    python: str = ""
    """Version such as '3.12' or '3.12.4'; '' if unknown."""
    implementation: str = "cpython"
    packages: dict[str, str] = {}
    """Version by distribution name. A distribution that is not listed may or may not be
    installed."""
    is_callers: bool = False
    """Whether the machines run in the Python environment that called `fit()`."""


UNKNOWN_SOFTWARE = Software()
