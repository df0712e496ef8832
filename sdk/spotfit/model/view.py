"""`View`: the state of a run, folded from the first `next_slot` entries of its journal.

A journal without a `FitStarted` entry has only a `JournalView`, which lacks the spec.

Readers that have folded the same number of entries have equal views. `model.fold` updates it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    LeaderElected,
    RoundClosed,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.failure_model import LifetimeHistogram
from spotfit.model.group import GroupHandle, GroupPlan, Role
from spotfit.model.reporting import ReportedCheckpointStatus
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Notice, Round

# A dropped checkpoint is kept in the view until its files are deleted, which a new leader may have
# to do. 64 is far more than one leader leaves undone, and limits the size of the view.
MAX_DROPPED_CHECKPOINTS = 64


class MachineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of machines requested under one token.

    state    | condition                              | next
    ---------|----------------------------------------|-----------------
    pending  | no `handle`, no `refusal`              | granted, refused
    granted  | `handle` is set                        | released
    refused  | `refusal` is set                       | - (closed)
    released | `is_released`                          | - (closed)
    """

    plan: GroupPlan
    handle: GroupHandle | None = None
    refusal: str | None = None
    is_released: bool = False
    lost_nodes: frozenset[int] = frozenset()
    role: Role = "train"

    @property
    def is_pending(self) -> bool:
        """Whether the request was planned, and the journal has neither a grant nor a refusal of it.

        The leader then submits it to the backend, possibly again: submitting is idempotent.
        """
        return self.handle is None and self.refusal is None

    @property
    def is_closed(self) -> bool:
        """Whether the group was released or refused, and thus cannot cause further cost."""
        return self.is_released or self.refusal is not None

    def is_node_active(self, node: int) -> bool:
        """Whether the machine with that index in the group is not known to have ended.

        `node` counts from 0. True also before the machine has booted or was granted; False for an
        index outside of the plan, and for all machines of a closed group.
        """
        if self.is_closed or node in self.lost_nodes:
            return False
        return 0 <= node < self.plan.num_nodes

    @property
    def active_nodes(self) -> tuple[int, ...]:
        """The indices from 0 of all machines that may still run, see `is_node_active`.

        Empty for a closed group.
        """
        if self.is_closed:
            return ()
        return tuple(node for node in range(self.plan.num_nodes) if node not in self.lost_nodes)


class JournalView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a journal after its first `next_slot` entries.

    It is a `View` from the first `FitStarted` on; before, the journal is normally empty.
    """

    next_slot: int = 0
    run_id: RunId | None = None
    fit_count: int = 0
    leader: LeaderElected | None = None
    """The current leader; None before the first election of the fit."""
    epoch: int = 0
    """Number of elections in all fits."""
    groups: dict[Token, MachineGroup] = {}
    round: Round | None = None
    """The open round, if any."""
    last_round: Round | None = None
    last_round_closed: RoundClosed | None = None
    # For the complete fit: a commit does not reset them (`FailureLimits`).
    failure_counts: dict[FailureCause, int] = {}
    rounds_without_progress: int = 0
    """Consecutive rounds that failed without a commit."""
    refusals: int = 0
    """Refused requests since the last granted group."""
    last_refusal: str | None = None
    final_refusal: str | None = None
    """The reason of a refusal after which further requests are pointless, such as a quota of 0."""
    boot_failures: int = 0
    """Consecutive machines lost before their agent took part in a round."""
    notices: dict[AgentId, Notice] = {}
    notice_slots: dict[AgentId, int] = {}
    """The slot of each agent's first notice: a later commit was saved with knowledge of it."""
    lost_agents: frozenset[AgentId] = frozenset()
    """Agents lost since the last round was opened, and older ones that are still referenced."""
    platform_outages: frozenset[AgentId] = frozenset()
    """Lost agents whose machines still run according to the backend."""
    checkpoints: tuple[CheckpointCommitted, ...] = ()
    """Committed checkpoints that are not dropped, in commit order."""
    dropped_checkpoints: tuple[str, ...] = ()
    """Names of the last dropped checkpoints; at most `MAX_DROPPED_CHECKPOINTS`."""
    # Slots, not times: they order the events of several leaders without comparing clocks.
    latest_committed_slot: int = -1
    """The slot of the last `CheckpointCommitted`; -1 if there is none."""
    round_opened_slot: int = -1
    """The slot of the last `RoundOpened`; -1 if there is none."""
    unvalidated_checkpoints: tuple[CheckpointCommitted, ...] = ()
    """Checkpoints whose validation is pending, in commit order."""
    validation_results: dict[str, ValidationEnded] = {}
    """Validation results by checkpoint uid, for checkpoints that are not dropped."""
    current_validation: ValidationStarted | None = None
    """The validation that is running, or whose attempt was lost."""
    validation_attempts: int = 0
    """Number of validations started in all fits."""
    current_validation_tries: int = 0
    """Number of attempts of the current validation."""
    # Counted apart from `refusals`: a run whose workers have machines must not slow down, or end,
    # because none is available for validations.
    validator_refusals: int = 0
    """Consecutive machines for validations that were refused or failed while booting."""
    final_validator_refusal: str | None = None
    """`final_refusal` of machines for validations."""
    pending_fit_end: FitEnded | None = None
    """The outcome of the training, recorded once all validations are finished."""
    lifetimes: LifetimeHistogram = LifetimeHistogram()
    """Observed group lifetimes in all fits."""
    group_age_s: float = 0.0
    """Age of the group when the open round was opened, counted from the last loss."""
    round_age_s: float = 0.0
    """Age of the open round at its last commit."""
    cancel_reason: str | None = None
    fit_end: FitEnded | None = None

    @property
    def is_active(self) -> bool:
        """Whether a fit was started and has not ended; always False before the first `FitStarted`.

        Machines may still have to be released after the fit has ended.
        """
        return False

    @property
    def latest_checkpoint(self) -> CheckpointCommitted | None:
        """The last committed checkpoint that is not dropped, of any fit; None if there is none.

        The next round resumes from it.
        """
        return self.checkpoints[-1] if self.checkpoints else None

    def latest_checkpoint_named(self, name: str) -> str | None:
        """Return the unique name of the latest checkpoint under `name`, a unique or requested name.

        Returns '' if it was dropped and None if the name was never used, as far as the view knows:
        it contains only the last `MAX_DROPPED_CHECKPOINTS` dropped names. A requested name is the
        one that user code passed to `report`, before a suffix "@<round>-<index>" made it unique.
        """
        # Without `num_to_keep` a requested name has at most one checkpoint, otherwise several
        # (docs/decisions/0043); the last one is meant.
        names = [one.name for one in self.checkpoints if name in (one.name, one.requested_name)]
        if names:
            return names[-1]
        return "" if name in self.dropped_checkpoints else None

    def status_of(self, checkpoint: CheckpointCommitted) -> ReportedCheckpointStatus:
        """Return the validation status of a checkpoint of this view, for user code.

        `COMMITTED` if it was reported without validation.
        """
        if checkpoint.validation is None:
            return ReportedCheckpointStatus.COMMITTED
        if checkpoint.uid not in self.validation_results:
            return ReportedCheckpointStatus.PENDING_VALIDATION
        return _VALIDATION_STATUSES[self.validation_results[checkpoint.uid].status]

    def is_leader(self, agent: AgentId) -> bool:
        """Whether that agent, or driver, may append the next decision after this view.

        True until the journal has the election of another process, also if the lease has expired.
        """
        return self.leader is not None and self.leader.leader == agent

    def metrics_of(self, name: str) -> dict[str, Any] | None:
        """Return the metrics of the checkpoint with that unique name; None if it does not exist.

        In JSON form: pass them to `metrics_from_json` before user code sees them.
        """
        return next((one.metrics for one in self.checkpoints if one.name == name), None)


class View(JournalView, frozen=True, kw_only=True):
    """The state of a run: the view of a journal in which a fit was started."""

    # `fold` returns this type after the first `FitStarted`, so that a reader checks once, when it
    # opens the run, whether there is one.

    run_id: RunId
    spec: RunSpec

    @property
    def is_active(self) -> bool:
        """Whether the last fit has not ended; True also while only validations are pending."""
        return self.fit_end is None


_VALIDATION_STATUSES = {
    "validated": ReportedCheckpointStatus.VALIDATED,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
}
