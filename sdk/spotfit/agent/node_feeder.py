"""The feeders of this node, if its machine was rented for feeders.

| state    | event                                | next                                          |
|----------|--------------------------------------|-----------------------------------------------|
| idle     | the journal lists it as for feeders  | running: the sidecar is started               |
| running  | the feeders listen                   | running, and reported to the leader           |
| running  | connected to a new leader            | running, and reported again                   |
| running  | the sidecar has exited               | idle; started again after a growing pause     |
| running  | they have listened for five minutes  | running; earlier starts do not count any more |
| idle     | five starts in a row before that     | idle, and reported as unusable                |
| any      | the fit has ended                    | idle, the sidecar is killed                   |
"""

from __future__ import annotations

from spotfit.agent.ports import AgentTransport, FeederNode
from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.ids import Token
from spotfit.model.events import RankFailure
from spotfit.model.topology import FeederAddress
from spotfit.model.view import View
from spotfit.policy.feeder_schedule import MIN_WORK_S
from spotfit.protocol.agent_leader import FeederReady, NodeUnusable

_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
"""Pauses between two starts of the sidecar: an environment that cannot be set up stays so."""
_MAX_FAILED_STARTS = 5
"""The machine is not paid for any longer then; the pauses before are 15 s in total."""


class NodeFeeder:
    """Starts the feeders of this node, and reports their address. No method blocks."""

    def __init__(self, token: Token, net: AgentTransport, feeder_node: FeederNode) -> None:
        self._token = token
        self._net = net
        self._feeder_node = feeder_node
        self._starts = 0
        """Starts of the sidecar since the feeders have last worked."""
        self._listening_since: float | None = None
        self._start_at = float("-inf")
        self._reported: FeederAddress | None = None
        self._is_known_unusable = False
        """Whether it was reported to the present leader that no start has led to work."""

    def apply_view(self, view: View, now: float) -> None:
        """Start the feeders if this machine is for feeders; stop them once the fit has ended.

        Called at each tick; `now` is event-loop time in seconds.
        """
        if self._feeder_node.feeder is None:
            self._listening_since = None
        elif self._listening_since is None:
            self._listening_since = now
        elif now - self._listening_since >= MIN_WORK_S:
            self._starts = 0
        group = view.groups.get(self._token)
        is_feeder = group is not None and group.role == "feed" and view.fit_end is None
        if not is_feeder:
            if self._feeder_node.is_running:
                self._feeder_node.stop()
        elif not self._feeder_node.is_running and now >= self._start_at:
            self._start_at = now + exponential_backoff_s(
                self._starts, shortest_s=_MIN_PAUSE_S, longest_s=_MAX_PAUSE_S
            )
            self._starts += 1
            self._feeder_node.start(view.spec)

    def send_report(self, *, is_reconnected: bool) -> None:
        """Send the address of the feeders to the leader if it has changed or the leader is new.

        After five starts in a row of feeders that ended before they had listened for
        `feeder_schedule.MIN_WORK_S`, send that the node is unusable. Call it only while connected.
        `is_reconnected`: whether the connection is new.
        """
        feeder = self._feeder_node.feeder
        if is_reconnected:
            self._reported, self._is_known_unusable = None, False
        if feeder != self._reported:
            self._reported = feeder
            self._net.send_to_leader(FeederReady(feeder=feeder))
        # The next start may follow at once: the pauses count from the previous start.
        ended = self._starts - self._feeder_node.is_running
        if ended >= _MAX_FAILED_STARTS and not self._is_known_unusable:
            self._is_known_unusable = True
            message = (
                f"its feeders ended {ended} times before they had accepted connections for "
                f"{MIN_WORK_S:.0f} s"
            )
            failure = RankFailure(rank=0, kind="died", message=message)
            self._net.send_to_leader(NodeUnusable(failure=failure))

    def stop(self) -> None:
        """Kill the sidecar, if there is one. Harmless if repeated."""
        self._feeder_node.stop()
