"""`NodeNotice`: the preemption notice of one node, from all of its sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spotfit.agent.ports import NoticeSource
from spotfit.host import log
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit.protocol.agent_leader import NoticeReceived, PreemptionRiskReported

# Some sources recompute the deadline at each poll; smaller changes are rounding errors.
_MIN_DEADLINE_CHANGE_S = 1.0


class NodeNotice:
    """The notice with the earliest deadline, and the risks that were reported to the leader."""

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._sources = sources
        self.notice: Notice | None = None
        self.deadline = float("inf")
        """When the machine ends, by the clock of this agent; infinity if that is unknown."""
        self._forwarded_risks: list[PreemptionRisk] = []

    def poll(
        self, now: float, *, is_connected: bool
    ) -> Iterator[NoticeReceived | PreemptionRiskReported]:
        """Yield what the leader does not know yet; a risk only while connected to it.

        A notice without a connection is not repeated: the next `Join` contains it.
        """
        for source in self._sources:
            notice = source.poll(now)
            if isinstance(notice, PreemptionRisk):
                # Once: its only effect is that workers save earlier.
                if is_connected and notice not in self._forwarded_risks:
                    self._forwarded_risks.append(notice)
                    log.info("notice.preemption_risk", reason=notice.reason)
                    yield PreemptionRiskReported(reason=notice.reason)
            elif notice is not None:
                left_s = float("inf") if notice.seconds_left is None else notice.seconds_left
                # A later notice counts if it is more urgent, as when SIGTERM follows a drain.
                if self.notice is None or now + left_s < self.deadline - _MIN_DEADLINE_CHANGE_S:
                    self.notice = notice
                    self.deadline = min(self.deadline, now + left_s)
                    yield NoticeReceived(notice=notice)
