"""This agent's tie to whoever leads, and what it knows of the leader's health."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from spotfit.agent.ports import HubLost, Net
from spotfit.control.errands import Errands
from spotfit.core.ids import AgentId
from spotfit.ledger.run import Ledger
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit.model.wire import Beat, Join
from spotfit.policy.election import Sighting, looked

_REDIAL_S = 0.5


class Uplink:
    """One connection to the leader's hub: dialled, greeted, watched, and called twice when lost.

    A connection that breaks tells little; a second call that nobody answers tells that the
    leader is gone.
    """

    def __init__(self, net: Net, ledger: Ledger, errands: Errands) -> None:
        self._net = net
        self._ledger = ledger
        self._errands = errands
        self.hub: str | None = None
        """Where it goes, while it stands."""
        self._heard_at = 0.0
        self._answered = False
        """Whether the hub ever spoke over this connection: even a frozen machine lets one dial."""
        self._beat_at = 0.0
        self._dial_at = float("-inf")
        self._called_twice: str | None = None
        self._leader: AgentId | None = None
        self._lease = b""
        self._reading = False
        """Whether the lease is being read."""
        self._sighting: Sighting | None = None

    def sighting(self, now: float) -> Sighting:
        """What is known of the leader's life."""
        return self._sighting or Sighting(lease_changed_at=now)

    def forget(self) -> None:
        """An election is over: whatever was seen was of the leader before."""
        self._sighting, self._called_twice = None, None

    # --- the connection ----------------------------------------------------------------------

    def heard(self, now: float) -> None:
        """The hub said something."""
        self._heard_at = now
        self._answered = True
        self._called_twice = None

    def rejected(self, now: float) -> None:
        """The hub at the other end does not lead."""
        self._net.hang_up()
        self.hub = None
        self._dial_at = now + _REDIAL_S

    def drop(self) -> None:
        """Let the connection go; the next look dials anew."""
        self._net.hang_up()
        self.hub = None
        self._dial_at = float("-inf")

    def lose(self, lost: HubLost, now: float) -> bool:
        """The net says a connection is gone; whether that was ours."""
        if lost.address != self.hub:
            return False
        self.hub = None
        second = self._called_twice == lost.address
        vanished_at = now if lost.vanished and second else self.sighting(now).vanished_at
        self._sighting = replace(self.sighting(now), vanished_at=vanished_at, in_touch=False)
        if lost.vanished:
            self._called_twice = lost.address
        else:
            self._dial_at = now + _REDIAL_S
        return True

    def reach(self, view: View, join: Join, tempo: Tempo, now: float) -> bool:
        """Dial whoever leads, unless that is done or hopeless; whether it was dialled."""
        hub = view.leader.hub if view.leader else None
        if hub is None or self.hub == hub or now < self._dial_at or self._hopeless(hub):
            return False
        self.hub = hub
        self._heard_at, self._answered = now, False
        self._beat_at = now + tempo.beat_s
        self._net.dial(hub, join)
        return True

    def breathe(self, tempo: Tempo, now: float, *, leading: bool) -> bool:
        """Greet the hub when it is time; whether it was given up because it is silent."""
        if now < self._beat_at:
            return False
        self._beat_at = now + tempo.beat_s
        if self.hub is None:
            return False
        self._net.send_up(Beat())
        if leading or now - self._heard_at <= tempo.silent_s:
            return False
        self._net.hang_up()
        self.hub = None
        self._sighting = replace(self.sighting(now), in_touch=False)
        return True

    @property
    def wake_at(self) -> float:
        """When to be looked at again."""
        return self._beat_at

    def _hopeless(self, hub: str) -> bool:
        """Once the second call found nobody listening, only an election helps."""
        gone = self._sighting is not None and self._sighting.vanished_at is not None
        return gone and self._called_twice == hub

    # --- the lease ---------------------------------------------------------------------------

    def watch(self, view: View, tempo: Tempo, now: float, *, read_lease: bool) -> None:
        """Look at the leader's lease, unless the wire already says that it is well."""
        leader = view.leader
        if leader is None:
            return
        if leader.leader != self._leader:
            self._leader, self._lease, self._reading = leader.leader, b"", False
            self._sighting, self._called_twice = Sighting(lease_changed_at=now), None
        tied = self.hub is not None and self.hub == leader.hub and self._answered
        if tied and now - self._heard_at < tempo.silent_s:
            self._sighting = Sighting(lease_changed_at=now, in_touch=True)
        elif read_lease or self._reading:
            self._read_lease(leader.leader, now)

    def _read_lease(self, leader: AgentId, now: float) -> None:
        """Start to, or take what was read; a bucket that fails says nothing of the leader."""
        read = partial(self._ledger.lease_of, leader)
        done = self._errands.run(f"lease of {leader}", read)
        self._reading = done is None
        if done is not None and done.error is None:
            self._sighting = looked(self.sighting(now), now, changed=done.value != self._lease)
            self._lease = done.value
