"""Watch: what the leader sees beyond the journal. Soft: a successor sees it anew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import RankFailure, ValidationAsked
from spotfit.model.group import GroupStatus
from spotfit.model.holding import Part
from spotfit.model.wire import Assessed
from spotfit.model.world import Member, Notice


class Seat(msgspec.Struct, frozen=True):
    """A connected agent."""

    member: Member
    since: float
    """When it joined, by the leader's clock."""
    heard: float
    """When it was last heard."""
    running: int | None = None
    """The round whose workers still live there."""
    notice: Notice | None = None
    warm: bool = True
    """Whether workers would start there without importing anything first."""
    unable: RankFailure | None = None
    """Why no worker can ever be started there."""
    entered: int = -1
    """The last round that agent entered; it enters none up to that one any more."""
    carrying: int | None = None
    """The round whose checkpoints are still being uploaded there, though its workers are gone."""
    held: tuple[Part, ...] = ()
    """What lay in its memory when its last workers were gone."""


class Copy(msgspec.Struct, frozen=True):
    """What lies with another machine of what a rank has saved last."""

    step: int
    vault: str
    told_at: float


class Ready(msgspec.Struct, frozen=True):
    """A checkpoint whose files are all in the bucket, waiting for its entry."""

    name: str
    round: int
    report: int
    metrics: dict[str, Any]
    ranks: tuple[int, ...]
    size_bytes: int = 0
    validation: ValidationAsked | None = None
    snapshot: bool = False
    """Whether a Checkpointer can go on from it."""
    step: int | None = None
    """Of a snapshot: how many steps were done."""
    why: str = ""
    """Why a Checkpointer saved it just then."""
    at: str = ""
    """The folder where a user has put its files, if one has."""
    taken_at: float | None = None
    """Of a snapshot: when the last rank had taken its part, by the leader's own clock; None where
    that is not known."""


class Progress(msgspec.Struct, frozen=True):
    """How far the ranks of a round have come, as far as they say so."""

    steps: tuple[int, ...]
    """By rank, how often it has reported, met the others or saved."""
    moved_at: float
    """When any rank did so last; by the leader's own clock."""
    running: AbstractSet[int] = frozenset()
    """Whose function was called."""
    returned: AbstractSet[int] = frozenset()
    uploading: bool = False
    """Whether files of a checkpoint are on their way."""
    validating: bool = False
    """Whether a checkpoint is still to be validated: the function may be waiting for that."""


class Trouble(msgspec.Struct, frozen=True):
    """Something of the user's beside the workers raised: that ends the run."""

    why: str
    told: str
    """Its traceback."""
    pickle_key: str | None = None
    """Where the sealed pickle of what it raised lies, if it could be pickled."""


class Watch(msgspec.Struct, frozen=True):
    """The leader's picture of the present, as far as the journal does not hold it.

    All times are by the leader's own clock.
    """

    me: AgentId
    caretaker: bool = False
    """No hub: this leader can order and release machines but sees no agent."""
    ends_itself: bool = True
    """Whether a machine ends, and costs no more, when its agent does."""
    led_since: float = 0.0
    seats: dict[AgentId, Seat] = {}
    gone: dict[AgentId, float] = {}
    """Agents whose connection was lost and that did not come back, since when."""
    broken: AbstractSet[AgentId] = frozenset()
    """Agents whose connection was lost since the round was opened, back or not."""
    noticed_at: Mapping[AgentId, float] = {}
    """When the leader first heard of each agent's notice, whether that is still here or not."""
    known: Mapping[tuple[Token, int], AgentId] = {}
    """Who was last connected from each machine that ever was."""
    stopped: bool = True
    """Whether no worker of the open round lives on a machine that is connected."""
    running: AbstractSet[int] = frozenset()
    """Ranks of the open round whose function was called."""
    returned: AbstractSet[int] = frozenset()
    """Ranks of the open round whose function came back."""
    returned_at: float | None = None
    """When the last of them did."""
    saving: AbstractSet[int] = frozenset()
    """Ranks that still bring files of the open round's next checkpoint."""
    failures: dict[int, RankFailure] = {}
    """Ranks of the open round that failed."""
    doomed_since: float | None = None
    """When the first failure or loss in the open round was seen."""
    unsaved: str = ""
    """Why the last report with files of the open round is no checkpoint; '' where it is one, or may
    be yet."""
    settled: bool = True
    """Whether every report of the open round was matched, and the callbacks have heard all."""
    trouble: Trouble | None = None
    """What a callback raised, if one did."""
    ready: tuple[Ready, ...] = ()
    surveyed: bool = True
    """Whether the bucket was searched for complete checkpoints since the last round ended."""
    statuses: dict[Token, GroupStatus] = {}
    seen: Mapping[Token, float] = {}
    """As of when each status is surely true: backends may say for a while that all is well."""
    granted: dict[Token, float] = {}
    """When each group was first seen to be granted."""
    refused_at: float | None = None
    turned_at: float = 0.0
    """When the open round was opened, the last one closed, or the fit ended."""
    committed_at: float | None = None
    """When the last checkpoint was committed."""
    taken_at: float | None = None
    """Of the last snapshot that was committed, when it was taken; None of what a user saves."""
    replaced_at: float | None = None
    """Since when the group knows that the next round could open at once."""
    copies: Mapping[int, Copy] = {}
    """By rank of the open round, what another machine has of it."""
    unsaved_s: float = math.inf
    """How long the last round had worked without a commit when it closed; a successor knows not."""
    metrics: dict[str, Any] | None = None
    """The last metrics of rank 0."""
    result_key: str | None = None
    validation_at: float = 0.0
    """When a validation was asked for while none was due, begun or ended, or lost its machine."""
    assessed: Assessed | None = None
    """What came of the validation under way."""
    validator_refused_at: float | None = None
    """When a machine for validations was last refused, or died at birth."""
