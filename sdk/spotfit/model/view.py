"""View: the run as the journal tells it. Two who have read equally far hold equal views."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.cadence import Endings
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    FitEnded,
    LeaderElected,
    RoundClosed,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import GroupHandle, GroupPlan, Role
from spotfit.model.reporting import ReportedCheckpointStatus
from spotfit.model.spec import RunSpec
from spotfit.model.world import Notice, Round

DROPPED = 64
"""How many dropped checkpoints a view remembers: their deletion may be left to a successor."""


class Group(msgspec.Struct, frozen=True):
    """Machines asked for under one token, and what became of them."""

    plan: GroupPlan
    handle: GroupHandle | None = None
    refused: str | None = None
    released: bool = False
    lost: frozenset[int] = frozenset()
    role: Role = "train"

    @property
    def pending(self) -> bool:
        """Whether the intent was written and its outcome was not."""
        return self.handle is None and self.refused is None

    @property
    def let_go(self) -> bool:
        """Whether nothing of it can cost anything any more."""
        return self.released or self.refused is not None

    def stands(self, node: int) -> bool:
        """Whether that machine is here or still to come."""
        alive = not self.released and self.refused is None and node not in self.lost
        return alive and 0 <= node < self.plan.nodes

    @property
    def standing(self) -> tuple[int, ...]:
        """The machines that are here or still to come."""
        if self.released or self.refused is not None:
            return ()
        return tuple(node for node in range(self.plan.nodes) if node not in self.lost)


class View(msgspec.Struct, frozen=True):
    """All there is to know from the first `next_slot` entries."""

    next_slot: int = 0
    run_id: RunId | None = None
    spec: RunSpec | None = None
    fits: int = 0
    leader: LeaderElected | None = None
    """Who leads this fit; None before its first election."""
    epoch: int = 0
    """How many elections there were, in all fits."""
    groups: dict[Token, Group] = {}
    round: Round | None = None
    """The round that is open, if one is."""
    last_round: Round | None = None
    last_closed: RoundClosed | None = None
    failures: dict[Blame, int] = {}
    fruitless: int = 0
    """Rounds in a row that failed without a commit."""
    refusals: int = 0
    """Refusals since the last group that was granted."""
    last_refusal: str | None = None
    final_refusal: str | None = None
    stillborn: int = 0
    """Machines lost in a row whose agent never had a place in a round."""
    notices: dict[AgentId, Notice] = {}
    noticed_slots: dict[AgentId, int] = {}
    """In which slot each was first noticed: what was committed after it is safe from it."""
    lost_agents: frozenset[AgentId] = frozenset()
    """Given up since the last round was opened, or at work beside it; of older ones no machine
    stands any more."""
    outages: frozenset[AgentId] = frozenset()
    """Those of them whose machines ran on, said their backend."""
    checkpoints: tuple[CheckpointCommitted, ...] = ()
    """Committed and not dropped, in the order of their commits."""
    dropped: tuple[str, ...] = ()
    """The last checkpoints that were dropped and not committed again; `DROPPED` at most."""
    latest_committed_slot: int = -1
    round_slot: int = -1
    """Where the last round was opened."""
    unvalidated: tuple[CheckpointCommitted, ...] = ()
    """Those that are to be validated, and are not yet, in the order of their commits."""
    verdicts: dict[str, ValidationEnded] = {}
    """How validations ended, by the marks of checkpoints that are still kept."""
    validation: ValidationBegun | None = None
    """The one under way."""
    attempts: int = 0
    """How many validations were begun, in all fits."""
    tries: int = 0
    """How often the one under way, or to be begun again, was begun."""
    validator_refusals: int = 0
    """Machines for validations in a row that were refused or died at birth."""
    no_validators: str | None = None
    """Why asking for a machine for validations is pointless."""
    training_ended: FitEnded | None = None
    """How the fit will end once nothing is left to validate."""
    endings: Endings = Endings()
    """How groups have ended, in all fits."""
    group_age_s: float = 0.0
    """How old the group was when the open round was opened: since the last loss."""
    round_age_s: float = 0.0
    """How long the open round had been open at its last commit."""
    cancelled: str | None = None
    ended: FitEnded | None = None

    @property
    def active(self) -> bool:
        """Whether a fit is going on."""
        return self.spec is not None and self.ended is None

    @property
    def latest_checkpoint(self) -> CheckpointCommitted | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def last_called(self, name: str) -> str | None:
        """The last of the checkpoints that users know by that name; '' where it was dropped, and
        None for a name that is new."""
        found = [one.name for one in self.checkpoints if name in (one.name, one.called)]
        if found:
            return found[-1]
        return "" if name in self.dropped else None

    def status_of(self, kept: CheckpointCommitted) -> ReportedCheckpointStatus:
        """How far that checkpoint has come."""
        if kept.validation is None:
            return ReportedCheckpointStatus.COMMITTED
        if kept.mark not in self.verdicts:
            return ReportedCheckpointStatus.PENDING_VALIDATION
        return _STATUSES[self.verdicts[kept.mark].status]

    def leads(self, agent: AgentId) -> bool:
        """Whether that agent may write decisions after this view."""
        return self.leader is not None and self.leader.leader == agent

    def metrics_of(self, name: str) -> dict[str, Any] | None:
        """The metrics committed with that checkpoint."""
        return next((kept.metrics for kept in self.checkpoints if kept.name == name), None)


_STATUSES = {
    "validated": ReportedCheckpointStatus.VALIDATED,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
}
