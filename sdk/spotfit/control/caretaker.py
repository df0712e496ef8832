"""Whoever has no machine in the run but minds it: the laptop that called `fit()`, or a sweep.

A caretaker serves no hub. It asks for the first machines, and steps in when nobody who lives on a
machine is left: it sees lost groups through the backend, asks for new ones, and lets go what a
finished run left behind.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotfit.control.conductor import Conductor
from spotfit.control.scribe import Scribe
from spotfit.model.events import LeaderElected
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.policy.election import Sighting, claim, looked

_LOOK_S = 1.0
"""How often somebody who stands by looks whether he is needed."""


class Caretaker:
    """A step machine: `tick(now)` returns when to be woken, None when nothing is left to mind.

    Its own calls to the bucket are made at once: nobody talks to it who would have to wait.
    """

    def __init__(self, scribe: Scribe, conductor: Conductor, now: float) -> None:
        self._scribe = scribe
        self._ledger = ledger = scribe.ledger
        self._conductor = conductor
        self._watch = Watch(me=ledger.me, caretaker=True, led_since=now, turned_at=now)
        self._sighting = Sighting(lease_changed_at=now)
        self._lease = b""
        self._watched: str | None = None
        self._lease_at = now
        self._look_at = now
        self._ended_seen = False

    @property
    def view(self) -> View:
        """The run as far as it was read."""
        return self._scribe.view

    def tick(self, now: float) -> float | None:
        """Read on, step in if need be, and conduct while leading. Raises `StoreError`."""
        self._scribe.ask()
        self._scribe.go_on(now)
        view = self._scribe.view
        if view.spec is None:
            return now + 1.0
        if view.ended is not None and not self._ended_seen:
            self._ended_seen = True
            self._watch = replace(self._watch, turned_at=now)
            self._sighting = Sighting(lease_changed_at=now)
        if view.ended is not None and _all_let_go(view):
            return None
        if not view.leads(self._ledger.me):
            return self._stand_by(view, now)
        return self._conduct(view, now)

    def _stand_by(self, view: View, now: float) -> float | None:
        leader = view.leader.leader if view.leader else None
        if leader != self._watched or now >= self._look_at:  # what was seen was of the one before
            self._look_at = now + _LOOK_S
            self._look_at_the_lease(view, now)
            self._look_at_the_machines(view, now)
        claimed = claim(view, self._ledger.me, self._sighting, caretaker=True)
        if claimed is None or not claimed.due(now):
            return min(claimed.at, self._look_at) if claimed and now < claimed.at else self._look_at
        if not self._scribe.settled:
            return self._scribe.wake_at
        elected = LeaderElected(self._ledger.me, view.epoch + 1, None, claimed.why)
        self._scribe.write(elected, now)
        after = self._scribe.view
        return self._conduct(after, now) if after.leads(self._ledger.me) else now

    def _look_at_the_lease(self, view: View, now: float) -> None:
        leader = view.leader.leader if view.leader else None
        if leader != self._watched:
            self._watched, self._lease = leader, b""
            self._sighting = Sighting(lease_changed_at=now)
            self._look_at = now
        if leader is None:
            return
        lease = self._ledger.lease_of(leader)
        known = self._sighting if lease == self._lease else Sighting(lease_changed_at=now)
        self._sighting = looked(known, now, changed=lease != self._lease)
        self._lease = lease

    def _look_at_the_machines(self, view: View, now: float) -> None:
        """A leader that lives on a machine is gone when all machines are; no lease need tell us."""
        assert view.spec is not None
        if view.ended is not None or view.leader is None or view.leader.hub is None:
            return
        self._conductor.observe(now, every_s=view.spec.tempo.observe_s)
        if self._sighting.vanished_at is None and self._conductor.sees_nobody:
            self._sighting = replace(self._sighting, vanished_at=now)

    def _conduct(self, view: View, now: float) -> float | None:
        assert view.spec is not None
        if now >= self._lease_at:
            self._lease_at = now + view.spec.tempo.lease_s
            self._ledger.renew_lease()
        self._conductor.observe(now, every_s=view.spec.tempo.observe_s)
        again, until = True, now
        while again and self._scribe.settled and self._scribe.view.leads(self._ledger.me):
            self._watch = replace(
                self._watch,
                statuses=self._conductor.statuses,
                seen=self._conductor.seen,
                granted=self._conductor.granted,
                refused_at=self._conductor.refused_at,
                validator_refused_at=self._conductor.validator_refused_at,
            )
            again, wait = self._conductor.step(self._watch, now)
            until = wait.until
        if self._conductor.resting:
            return None
        if not self._scribe.settled:
            until = self._scribe.wake_at
        return max(now, min(until, self._lease_at, now + view.spec.tempo.poll_s))


def _all_let_go(view: View) -> bool:
    return all(group.let_go for group in view.groups.values())
