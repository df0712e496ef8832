"""May I lead? Judged by my own clock only; the journal's next slot decides among those who may."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from spotfit.core.ids import AgentId
from spotfit.model.view import View

LEFTOVERS_S = 4.0
"""After the end: a leader that has not renewed its lease for so long lets nothing go any more."""
_OFTEN_S = 2.0
"""Looks at a lease that are no further apart have missed nothing."""
_STAGGER_S = 0.1
_MAX_STAGGER_S = 3.0


class Sighting(msgspec.Struct, frozen=True):
    """What one agent has seen of the leader; all times by its own clock."""

    lease_changed_at: float
    """When the leader's lease was last seen to change (or first looked at).

    Moved on by `looked` for as long as nobody could look: what nobody watched stood still for no
    known time."""
    vanished_at: float | None = None
    """When nobody was found listening at the leader's hub any more; for a caretaker, who does not
    call there, when the backend knew of no machine any more."""
    in_touch: bool = False
    """Whether the connection to the leader's hub stands."""
    looked_at: float | None = None
    """When the lease was last read, if it was."""


class Claim(msgspec.Struct, frozen=True):
    """Reason to take the lead, from when on, and whether the leader before is lost."""

    at: float
    why: str
    lost: AgentId | None = None
    looked_at: float = float("inf")
    """When the lease was last read, for a claim that rests on it: it must have been seen to stand
    still for so long, not only have been left alone."""

    def due(self, now: float) -> bool:
        """Whether the lead may be taken now."""
        return now >= self.at and self.looked_at >= self.at


def looked(sighting: Sighting, now: float, *, changed: bool) -> Sighting:
    """After the lease was read. A bucket that could not be reached for a while has hidden the
    leader's life from us, and kept it from renewing its lease, too: that time does not count."""
    since = now if sighting.looked_at is None else sighting.looked_at
    unwatched_s = max(0.0, now - since - _OFTEN_S)
    changed_at = now if changed else min(now, sighting.lease_changed_at + unwatched_s)
    return replace(sighting, lease_changed_at=changed_at, in_touch=False, looked_at=now)


def claim(view: View, me: AgentId, sighting: Sighting, *, caretaker: bool = False) -> Claim | None:
    """When and why `me` may try to lead; None while the leader is well."""
    if view.spec is None or view.leads(me):
        return None
    if view.ended is not None:
        return _claim_leftovers(view, sighting) if caretaker else None
    if view.leader is None or (view.leader.hub is None and not caretaker):
        return Claim(float("-inf"), "nobody leads who lives on a machine")
    if sighting.in_touch:
        return None
    if sighting.vanished_at is not None and caretaker:
        return Claim(sighting.vanished_at, "no machine is left")
    if sighting.vanished_at is not None:
        why = "nobody listens at the leader's hub"
        return Claim(sighting.vanished_at + _turn_s(view, me), why, view.leader.leader)
    patience = view.spec.tempo.lease_patience_s
    why = f"the leader's lease has not changed for {patience:.0f} s"
    return _claim_for_a_lease(sighting, patience + _turn_s(view, me), why)


def _claim_leftovers(view: View, sighting: Sighting) -> Claim | None:
    """After the end a caretaker lets go what a dead leader left behind."""
    left = any(not group.let_go for group in view.groups.values())
    if not left:
        return None
    return _claim_for_a_lease(sighting, LEFTOVERS_S, "machines are left to be let go")


def _claim_for_a_lease(sighting: Sighting, patience_s: float, why: str) -> Claim:
    looked_at = float("-inf") if sighting.looked_at is None else sighting.looked_at
    return Claim(sighting.lease_changed_at + patience_s, why, looked_at=looked_at)


def _turn_s(view: View, me: AgentId) -> float:
    """Members of the last round first, in the order of their places, so that few try at once."""
    places = view.last_round.places if view.last_round else ()
    leader = view.leader.leader if view.leader else None
    order = [place.agent for place in places if place.agent != leader]
    turn = order.index(me) if me in order else len(order)
    return min(turn * _STAGGER_S, _MAX_STAGGER_S)
