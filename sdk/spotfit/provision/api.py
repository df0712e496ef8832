"""The waist: what a cloud must be able to do. Clouds on one side, everything else on the other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from spotfit.model.cadence import Market
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus
from spotfit.model.software import UNKNOWN, Software
from spotfit.provision.launch import Launch


@dataclass(frozen=True, slots=True)
class Traits:
    """What this backend is like. Policies read it; nobody asks `isinstance`."""

    spot: bool = True
    gang: bool = False
    """All machines of a group or none."""
    max_nodes: int = 10_000
    notice_s: float = 0.0
    """How long before a machine goes its notice comes."""
    life_s: float = Market().life_s
    """How long a machine is left to its user, on average: a first guess, which counts as much as
    one reclaim that a run has seen itself."""
    requeues_itself: bool = False
    """Brings a lost machine's agent back without us."""
    ends_itself: bool = True
    """A machine whose agent has ended is not paid any more."""
    observe_s: float = 10.0
    """How often looking at a group is worth its while."""
    told_late_s: float = 60.0
    """For how long after a machine is gone the backend may still say that it runs."""
    notices: tuple[str, ...] = ("signal",)
    """Which notice sources its machines should watch."""
    keeps_output: bool = False
    """Can tell what a machine printed before its agent spoke: `spotfit.provision.output`."""
    runs: Software = UNKNOWN
    """What its machines will run, as far as that is known before one is rented: `fit()` refuses to
    start where a function pickled by its caller could not be loaded there."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The market or the quota gives nothing: expected, hence a value.

    `final`: waiting is pointless.
    """

    why: str
    final: bool = False


class Provisioner(Protocol):
    """Four verbs. `plan` is pure; the other three may be repeated at will, from any process.

    Its class, which the entry point names, makes one from plain options: `with_options(**options)`.
    """

    @property
    def name(self) -> str:
        """As the entry point calls it."""
        ...

    @property
    def traits(self) -> Traits: ...

    def plan(self, request: GroupRequest) -> GroupPlan:
        """Translate. No network, no clock; same request, same plan. Raises `ConfigError`."""
        ...

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Ask the cloud. A second call with the same token returns the first group.

        `launch` gives every machine its command and environment; the secrets in it may go to the
        cloud's own launch request and nowhere else.
        """
        ...

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """Look. A group nobody remembers is GONE, not an error."""
        ...

    def cancel(self, handle: GroupHandle) -> None:
        """Let go, and return at once. Of a group already gone, too."""
        ...


def warming(
    provisioner: Provisioner, plan: GroupPlan, framework: str
) -> AbstractContextManager[object]:
    """While this is open, machines like the plan's may already be importing `framework`.

    Advice, and optional: a backend has a method `warming(plan, framework)` only where a machine
    costs nothing before it is asked for. `submit` takes what is warm; on leaving, the rest goes.
    """
    method = getattr(provisioner, "warming", None)
    return nullcontext() if method is None else method(plan, framework)
