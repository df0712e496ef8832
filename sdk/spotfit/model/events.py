"""What happened, in the past tense: everything a journal may hold.

Add events, or fields with defaults; never change the meaning of one that was ever written.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.spec import RunSpec
from spotfit.model.world import Notice, Round


class Blame(enum.StrEnum):
    """Why a round ended; each of the first three has its own budget, the others cost nothing.

    NETWORK is a broken connection: whose it is if the machine is lost with it, `NodeLost` says.
    """

    WORKER = "worker"
    PLATFORM = "platform"
    PREEMPTION = "preemption"
    NETWORK = "network"
    RESIZE = "resize"
    SUCCESSION = "succession"


class RankFailure(msgspec.Struct, frozen=True):
    """How one rank failed. `pickle_key` holds its original exception, sealed."""

    rank: int
    kind: Literal["raised", "died", "lost", "timeout"]
    told: str
    pickle_key: str | None = None
    blame: Blame | None = None
    """Whose fault it was, where its machine knows; else `kind` tells."""
    final: bool = False
    """Whether another try would end the same way."""


class Taken(msgspec.Struct, frozen=True):
    """Machines of a round that were reclaimed, with the ranks they held."""

    nodes: dict[str, tuple[int, ...]]
    deadline_ms: int = 0
    """When the first of them was to go, as their notices said; 0 where nobody knew."""
    timed_out: bool = False
    """Whether workers were still running when the notices' time was over."""


class FitStarted(msgspec.Struct, frozen=True, tag="fit_started"):
    """A `fit()` took this name; earlier fits of it are history, their checkpoints stay."""

    spec: RunSpec


class LeaderElected(msgspec.Struct, frozen=True, tag="leader_elected"):
    """From here on only `leader` may write decisions, until the next election."""

    leader: AgentId
    epoch: int
    hub: str | None = None
    """host:port of its hub; a caretaker has none, and any agent may take over from it."""
    why: str = ""
    lost: AgentId | None = None
    """The leader before, where the successor saw it vanish."""


class Intended(msgspec.Struct, frozen=True, tag="intended"):
    """The leader is about to ask for machines. Whoever leads next will finish it."""

    request: GroupRequest
    plan: GroupPlan
    why: str = ""


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """The backend took the request."""

    token: Token
    handle: GroupHandle


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The backend will not serve the request; `final` means that asking again is pointless."""

    token: Token
    why: str
    final: bool = False


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    """One machine of a group is gone for good."""

    token: Token
    node: int
    agent: AgentId | None
    why: str
    blame: Blame | None = None
    """PREEMPTION where it was taken away, PLATFORM where it runs and its agent is not heard; the
    round that broke off with it is charged to that, if nobody knew when it was closed. Without an
    agent, PREEMPTION is a market's that promised a machine and does not give it."""
    comes_back: bool = False
    """Only that agent is lost: its backend has brought the machine back with another."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The group was let go (and others with it); nothing of it is paid for any more."""

    token: Token
    others: tuple[Token, ...] = ()


class Noticed(msgspec.Struct, frozen=True, tag="noticed"):
    """A machine announced its end."""

    agent: AgentId
    notice: Notice


class RoundOpened(msgspec.Struct, frozen=True, tag="round_opened"):
    """Everyone named takes its place and starts its workers."""

    round: Round
    why: str = ""


class RoundClosed(msgspec.Struct, frozen=True, tag="round_closed"):
    """The round is over; all its workers are to go."""

    number: int
    blame: Blame
    why: str
    failures: tuple[RankFailure, ...] = ()
    taken: Taken | None = None
    lived_s: float | None = None
    """How long it was open, by the clock of the leader who had opened it; None: another closed
    it."""
    safe: bool = False
    """Whether machines that left had given all they had saved to others."""


class ValidationAsked(msgspec.Struct, frozen=True):
    """A checkpoint is to be validated: as the trainer says, or with a say of its own."""

    kwargs: dict[str, Any] | None = None
    """What goes on top of the trainer's. None: all is as the trainer says, the timeout too."""
    timeout_s: float | None = None


class CheckpointCommitted(msgspec.Struct, frozen=True, tag="checkpoint_committed"):
    """This entry *is* the checkpoint; without it the files are debris."""

    name: str
    round: int
    report: int
    """Which report of the round (from 0) it came with."""
    metrics: dict[str, Any]
    ranks: tuple[int, ...]
    """Whose manifests list its files."""
    size_bytes: int = 0
    validation: ValidationAsked | None = None
    """Until it is validated, nobody may drop it."""
    age_s: float | None = None
    """How long its round had been open, by its leader's clock; None: it was over."""
    snapshot: bool = False
    """Whether a Checkpointer can go on from it."""
    step: int | None = None
    """Of a snapshot: how many steps were done. None in entries of a time when nobody said so."""
    why: str = ""
    """Why it was saved just then, of what a Checkpointer saved; empty for a report of files."""
    at: str = ""
    """The folder below the run's root where a user has put its files. Empty: the one of its name,
    or an entry of a time when nobody said so."""

    @property
    def folder(self) -> str:
        """Where its files lie, below the run's root."""
        return self.at or self.name

    @property
    def mark(self) -> str:
        """What tells it from others, also from those of the same name."""
        return f"{self.round}-{self.report}"

    @property
    def called(self) -> str:
        """The name its user chose: where that was used before, the mark was put behind it."""
        return self.name.removesuffix(f"@{self.mark}")


class CheckpointDropped(msgspec.Struct, frozen=True, tag="checkpoint_dropped"):
    """Nobody may use it any more; its files are deleted after this entry."""

    name: str
    why: str


class ValidationBegun(msgspec.Struct, frozen=True, tag="validation_begun"):
    """That agent validates that checkpoint now, in a process of its own; nobody else does."""

    name: str
    mark: str
    """Which checkpoint of that name."""
    attempt: int
    """Counts all validations of the run that were ever begun."""
    agent: AgentId
    token: Token
    node: int
    """Its machine."""
    why: str = ""


class ValidationEnded(msgspec.Struct, frozen=True, tag="validation_ended"):
    """That checkpoint is not validated again; `metrics` now belong to it."""

    name: str
    mark: str
    status: Literal["validated", "failed", "timeout"]
    metrics: dict[str, Any] = {}
    why: str = ""


class CancelRequested(msgspec.Struct, frozen=True, tag="cancel_requested"):
    """Somebody wants the run to end."""

    why: str


class FitEnded(msgspec.Struct, frozen=True, tag="fit_ended"):
    """The last decision of a fit. Machines are let go after it."""

    outcome: Literal["finished", "failed", "cancelled"]
    why: str = ""
    blame: Blame | None = None
    failures: tuple[RankFailure, ...] = ()
    metrics: dict[str, Any] | None = None
    """The last metrics reported by rank 0, with or without a checkpoint."""
    result_key: str | None = None
    """Where what rank 0 returned lies, sealed."""
    taken: Taken | None = None
    """The machines whose loss was one too many, where it ended for that."""
    unsaved: str = ""
    """Why the last save of the training came to no checkpoint; '' where it did."""


class TrainingEnded(msgspec.Struct, frozen=True, tag="training_ended"):
    """No round will follow. The fit ends like this once nothing is left to validate."""

    ended: FitEnded


Event = (
    FitStarted
    | LeaderElected
    | Intended
    | Submitted
    | Refused
    | NodeLost
    | Released
    | Noticed
    | RoundOpened
    | RoundClosed
    | CheckpointCommitted
    | CheckpointDropped
    | ValidationBegun
    | ValidationEnded
    | TrainingEnded
    | CancelRequested
    | FitEnded
)


class Entry(msgspec.Struct, frozen=True):
    """One slot of the journal. `at_ms` is for people; nothing is ever judged by it."""

    run_id: RunId
    by: AgentId
    event: Event
    at_ms: int = 0
    format: int = 1
