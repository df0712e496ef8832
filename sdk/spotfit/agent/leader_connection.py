"""`LeaderConnection`: the connection to the leader, and observations of the leader's health.

| state        | event                                         | next                             |
|--------------|-----------------------------------------------|----------------------------------|
| disconnected | `connect` with a known leader                 | connected                        |
| connected    | lost, closed by the peer (1st)                | disconnected, reconnects at once |
| connected    | lost, closed by the peer (2nd, same address)  | disconnected, leader vanished    |
| connected    | the same, but it was elected again since      | disconnected, reconnects later   |
| connected    | lost by a timeout, or no message for too long | disconnected, reconnects later   |
| connected    | `JoinRejected`: the peer is not the leader    | disconnected, reconnects later   |

Without a connection the leader's lease in the bucket is the only sign that the leader is alive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from spotfit.agent.ports import AgentTransport, LeaderDisconnected
from spotfit.control.background_calls import BackgroundCalls
from spotfit.core.ids import AgentId
from spotfit.ledger.journal import Ledger
from spotfit.model.spec import RunTiming
from spotfit.model.view import View
from spotfit.policy.election import LeaderObservation, after_lease_read
from spotfit.protocol.agent_leader import ConnectionHeartbeat, Join, NodeWarm

# Two attempts a second: short against an election, and harmless to a leader that restarts.
_RECONNECT_DELAY_S = 0.5
_MIN_ATTEMPTS = 2


class _Term(NamedTuple):
    """A term of a leader."""

    agent: AgentId | None
    epoch: int


@dataclass
class _Dial:
    """The attempts to connect to one leader."""

    leader: _Term
    started_at: float
    address: str = ""
    attempts: int = 0
    last_error: str = ""


class LeaderConnection:
    """At most one connection of this agent, to the leader that the journal names.

    A single lost connection proves nothing. Only if the leader's host also refuses the second
    attempt is the leader considered to have vanished. `now` and returned times are event-loop
    seconds of this agent.
    """

    def __init__(
        self, transport: AgentTransport, ledger: Ledger, background_calls: BackgroundCalls
    ) -> None:
        self._transport = transport
        self._ledger = ledger
        self._background_calls = background_calls
        self.address: str | None = None
        """The leader's address while connected or connecting; otherwise None."""
        self._last_message_at = 0.0
        self._has_response = False
        """Whether a message arrived: the kernel of a frozen machine accepts connections, too."""
        self._heartbeat_at = 0.0
        self._has_reported_warm = False
        """Whether the `Join` or a `NodeWarm` on this connection reported a warm node."""
        self._connect_at = float("-inf")
        self._retried_address: str | None = None
        self._observed_leader: AgentId | None = None
        self._lease = 0
        self._is_reading_lease = False
        self._observation: LeaderObservation | None = None
        self._has_joined = False
        """Whether a leader on another machine has ever answered."""
        self._dial = _Dial(_Term(None, 0), started_at=math.inf)
        self._lease_renewed_at = float("-inf")
        self._vanished_epochs: dict[AgentId, int] = {}
        """The term in which each leader was last considered to have vanished."""

    def leader_observation(self, now: float) -> LeaderObservation:
        """Return what this agent has observed of the leader's health, the input of an election.

        Before the first observation the lease counts as changed at `now`.
        """
        return self._observation or LeaderObservation(lease_changed_at=now)

    def reset_observation(self) -> None:
        """Discard all observations, because they are about the previous leader.

        Called when this agent claims the leadership. The connection stays open.
        """
        self._observation, self._retried_address = None, None

    # --- the connection ----------------------------------------------------------------------

    def on_message(self, now: float) -> None:
        """Record that the leader sent a message at `now`: the connection is healthy."""
        self._last_message_at = now
        self._has_response = True
        self._retried_address = None
        # A message of this agent to itself as the leader shows nothing about the network.
        self._has_joined = self._has_joined or self.address != self._transport.address

    def on_rejected(self, now: float) -> None:
        """Disconnect from a peer that has answered `JoinRejected`: it is not the leader of the run.

        `connect` retries 0.5 s after `now`.
        """
        self.disconnect()
        # The journal of this agent or of the peer is outdated, and is read before the next attempt.
        self._connect_at = now + _RECONNECT_DELAY_S

    def disconnect(self) -> None:
        """Disconnect without an event; the next call of `connect` reconnects at once.

        Called by an agent that becomes the leader, which then connects to itself.
        """
        self._transport.disconnect()
        self.address = None
        self._connect_at = float("-inf")

    def on_disconnected(self, lost: LeaderDisconnected, now: float) -> bool:
        """Record a lost connection. Returns False if it was not the current one (no effect).

        The next `connect` retries at once if the peer closed the connection, else after 0.5 s. The
        second loss in a row that the peer of the same address reports marks the leader as vanished.
        """
        # The event of a connection that was closed here may arrive after the next one is opened.
        if lost.address != self.address:
            return False
        self.address = None
        observation = self.leader_observation(now)
        self._dial.last_error = lost.reason
        is_second_attempt = self._retried_address == lost.address
        has_vanished = lost.closed_by_peer and is_second_attempt and not self._refuses_while_alive
        leader, epoch = self._dial.leader
        if has_vanished and leader is not None:
            self._vanished_epochs[leader] = epoch
        self._observation = replace(
            observation,
            vanished_at=now if has_vanished else observation.vanished_at,
            is_connected=False,
        )
        # A reset may come from a middlebox: try once more at once. After a timeout, wait.
        if lost.closed_by_peer and (has_vanished or not is_second_attempt):
            self._retried_address = lost.address
        else:
            self._connect_at = now + _RECONNECT_DELAY_S
        return True

    def connect(self, view: View, join: Join, timing: RunTiming, now: float) -> bool:
        """Start a connection to the leader of `view` and send `join`; called at each tick.

        Returns True if a connection was started, which is not established yet. Returns False if one
        to this leader exists, if no agent leads, if a retry is not due, or if only an election
        helps because the leader has vanished.
        """
        address = view.leader.coordinator_address if view.leader else None
        if address is None or self.address == address or now < self._connect_at:
            return False
        has_vanished = self._observation is not None and self._observation.vanished_at is not None
        # Its host refused two connections in a row: only an election helps.
        if has_vanished and self._retried_address == address:
            return False
        assert view.leader is not None
        if self._dial.leader != (leader := _Term(view.leader.leader, view.leader.epoch)):
            self._dial = _Dial(leader, started_at=now, address=address)
        self._dial.attempts += 1
        self.address = address
        self._last_message_at, self._has_response = now, False
        self._heartbeat_at = now + timing.heartbeat_interval_s
        self._has_reported_warm = join.is_warm
        self._transport.connect(address, join)
        return True

    def report_warm(self) -> None:
        """Report to the leader that the fork server of this node has imported everything.

        Sent once per connection, and not if `join` has reported it; no effect while disconnected.
        """
        if self.address is not None and not self._has_reported_warm:
            self._has_reported_warm = True
            self._transport.send_to_leader(NodeWarm())

    def check_heartbeat(self, timing: RunTiming, now: float, *, is_leading: bool) -> bool:
        """Send a heartbeat if one is due; close the connection if the leader is silent too long.

        Returns True only in the second case: no message for `timing.heartbeat_timeout_s`. The
        caller then stops the workers. `is_leading`: this agent is the leader, and its own messages
        cannot be lost.
        """
        if now < self._heartbeat_at:
            return False
        self._heartbeat_at = now + timing.heartbeat_interval_s
        if self.address is None:
            return False
        self._transport.send_to_leader(ConnectionHeartbeat())
        # A leader talks to itself in memory, where no message can be lost.
        if is_leading or now - self._last_message_at <= timing.heartbeat_timeout_s:
            return False
        self._transport.disconnect()
        self.address = None
        self._observation = replace(self.leader_observation(now), is_connected=False)
        return True

    @property
    def wake_at(self) -> float:
        """Event-loop time in seconds at which `check_heartbeat` must be called again."""
        return self._heartbeat_at

    @property
    def _refuses_while_alive(self) -> bool:
        """Whether the leader was elected again after its port had appeared to be closed.

        A firewall that answers for it, with RST or ICMP, would otherwise cause endless elections.
        """
        leader, epoch = self._dial.leader
        return leader is not None and self._vanished_epochs.get(leader, epoch) < epoch

    def unreachable_leader(self, timing: RunTiming, now: float) -> str:
        """Return why this machine cannot join: its network; '' if that is not certain.

        A sentence if no leader has ever answered this agent, and the present one did not answer
        for `timing.reach_timeout_s`, at least two attempts long, and has renewed its lease
        meanwhile. A leader that was lost renews no lease.
        """
        dial, renewed_ago_s = self._dial, now - self._lease_renewed_at
        is_late = now - dial.started_at >= timing.reach_timeout_s and dial.attempts >= _MIN_ATTEMPTS
        is_alive = (
            dial.started_at < self._lease_renewed_at and renewed_ago_s < timing.lease_timeout_s
        )
        own = self._transport.address
        if self._has_joined or not is_late or not is_alive or dial.address == own:
            return ""
        error = dial.last_error or "no answer"
        return (
            f"the agent at {own} did not reach the leader at {dial.address} by TCP in "
            f"{dial.attempts} attempts within {timing.reach_timeout_s:.0f} s ({error}), although "
            "the leader renewed its lease in the storage"
        )

    # --- the lease ---------------------------------------------------------------------------

    def observe_leader(
        self, view: View, timing: RunTiming, now: float, *, read_lease: bool
    ) -> None:
        """Update the observation: from the connection if it is healthy, else from the lease.

        Called at each tick by an agent that does not lead. The lease is read, in the background,
        only if `read_lease` is set or a read is in progress; a failed read changes nothing.
        """
        leader = view.leader
        if leader is None:
            return
        # Every leader has a lease object of its own, whose timeout starts with the election.
        if leader.leader != self._observed_leader:
            self._observed_leader, self._lease, self._is_reading_lease = leader.leader, 0, False
            self._observation, self._retried_address = LeaderObservation(lease_changed_at=now), None
        is_established = (
            self.address is not None
            and self.address == leader.coordinator_address
            and self._has_response
        )
        # A healthy connection is proof enough, and spares a request to the bucket.
        if is_established and now - self._last_message_at < timing.heartbeat_timeout_s:
            self._observation = LeaderObservation(lease_changed_at=now, is_connected=True)
        elif read_lease or self._is_reading_lease:
            read = partial(self._ledger.read_lease, leader.leader)
            result = self._background_calls.run(f"lease of {leader.leader}", read)
            self._is_reading_lease = result is None
            # A read that failed says nothing about the leader: the bucket may be unavailable.
            if result is not None and result.error is None:
                # A counter, because clocks of two machines are never compared.
                has_changed = result.value > self._lease
                self._observation = after_lease_read(
                    self.leader_observation(now), now, has_changed=has_changed
                )
                # The first value that is read may be old.
                if has_changed and self._lease:
                    self._lease_renewed_at = now
                self._lease = max(self._lease, result.value)
