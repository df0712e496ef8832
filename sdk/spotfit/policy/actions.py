"""The actions that `scheduler.next_action` can return; `control.reconciler` executes them."""

from __future__ import annotations

import msgspec

from spotfit.core.ids import Token
from spotfit.model.events import JournalEvent
from spotfit.model.group import Role
from spotfit.model.offer import Offer


class AppendEvent(msgspec.Struct, frozen=True):
    """Append the event to the journal, then decide again from the new view."""

    event: JournalEvent


class RequestMachines(msgspec.Struct, frozen=True):
    """Plan a group for that many workers, or one machine for validations or feeders, and append its
    `GroupPlanned`."""

    num_workers: int
    reason: str
    role: Role = "train"
    offer: Offer | None = None
    """The offer to rent; None if the backend chooses."""


class SubmitGroup(msgspec.Struct, frozen=True):
    """Submit a planned group to the backend and append the outcome."""

    token: Token


class ReleaseGroups(msgspec.Struct, frozen=True):
    """Cancel the groups at the backend and append `GroupsReleased`."""

    token: Token
    other_tokens: tuple[Token, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Do nothing until `until`, by the leader's clock, unless an event occurs before."""

    until: float
    reason: str


class Idle(msgspec.Struct, frozen=True):
    """The fit has ended, and nothing is left that this leader can release: it may exit."""

    reason: str = "the run has ended and all machines are released"


LeaderAction = AppendEvent | RequestMachines | SubmitGroup | ReleaseGroups | Wait | Idle
