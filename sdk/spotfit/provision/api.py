"""The `Provisioner` protocol that every backend implements, and the `Traits` that it declares.

State of a group, as a caller sees it (`NodeState` per node; backends map their own states to it):

    state     | event                                   | next
    ----------|-----------------------------------------|---------------------------
    (none)    | submit returns a GroupHandle            | WAITING
    (none)    | submit returns a Refusal                | (none); may be submitted again
    WAITING   | the machine starts                      | RUNNING
    WAITING   | the backend reports that it cannot come | REFUSED
    RUNNING   | preemption or exit with success         | GONE
    RUNNING   | the agent exits with an error           | FAILED
    any       | cancel                                  | GONE
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from spotfit.model.failure_model import MarketPrior
from spotfit.model.group import (
    UNKNOWN_SOFTWARE,
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    Software,
)
from spotfit.provision.launch import AgentLaunchSpec


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities and timings of a backend. Policies read them instead of testing its type."""

    spot: bool = True
    """The backend may preempt machines."""
    max_nodes: int = 10_000
    """Largest number of machines in one group."""
    notice_s: float = 0.0
    """Time between a preemption notice and the end of the machine, in seconds."""
    mean_lifetime_s: float = MarketPrior().mean_lifetime_s
    """Prior of the mean time until a preemption. Has the weight of one preemption that the run
    observed itself."""
    requeues_itself: bool = False
    """The backend restarts the agent of a lost machine without a new `submit`."""
    releases_on_agent_exit: bool = True
    """A machine is no longer billed after its agent has exited."""
    observe_interval_s: float = 10.0
    """Minimum time between two useful calls of `observe`, in seconds."""
    status_lag_s: float = 60.0
    """How long the backend may still report RUNNING after a machine has terminated."""
    notice_sources: tuple[str, ...] = ("signal",)
    """Names of the preemption notice sources that agents on its machines watch."""
    keeps_output: bool = False
    """The backend implements `spotfit.provision.machine_output.MachineOutputReader`."""
    software: Software = UNKNOWN_SOFTWARE
    """Python and package versions on its machines, as far as known in advance. `fit()` raises if a
    function pickled by the caller could not be loaded there."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The backend has no capacity or quota at present. An expected outcome, hence not an error."""

    reason: str
    is_final: bool = False
    """The same request will be refused later as well."""


class Provisioner(Protocol):
    """A backend that rents groups of machines.

    `plan` is pure. `submit`, `observe` and `cancel` are idempotent and may be called from any
    process. The entry point names the class, which has `with_options(**options)` as constructor.
    """

    @property
    def name(self) -> str:
        """The name of the entry point."""

    @property
    def traits(self) -> Traits: ...

    def plan(self, request: GroupRequest) -> GroupPlan:
        """Translate a request into the backend's API fields, without network or clock.

        Returns the same plan for the same request. Raises `ConfigError`.
        """

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Request the machines. A second call with the same token returns the first group.

        `launch` holds the environment of every agent. Its secrets may be sent only in the
        backend's launch request, and must not be written anywhere else.
        """

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """Return the state of every node. The nodes of an unknown group are GONE."""

    def cancel(self, handle: GroupHandle) -> None:
        """Request termination without waiting for it. No error for a group that has ended."""


def prewarm(
    provisioner: Provisioner, plan: GroupPlan, framework: str
) -> AbstractContextManager[object]:
    """Return a context in which machines for `plan` may already import `framework`.

    Optional: a backend implements `prewarm(plan, framework)` only if a machine is free of charge
    before it is submitted. `submit` uses prewarmed machines; leaving the context ends the others.
    """
    # Not a part of the protocol, so that backends without it need no empty method (decision 0033).
    method = getattr(provisioner, "prewarm", None)
    return nullcontext() if method is None else method(plan, framework)
