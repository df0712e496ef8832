"""Tests of the notice of a node, from several sources."""

from __future__ import annotations

from spotfit.agent.notices.sources import NodeNotice
from spotfit.model.topology import Notice, PreemptionRisk
from spotfit.protocol.agent_leader import NoticeReceived, PreemptionRiskReported

RISK = PreemptionRisk(reason="elevated risk")


class FakeSource:
    """A source that returns the notice that the test sets."""

    def __init__(self) -> None:
        self.current: Notice | PreemptionRisk | None = None

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        return self.current


def test_a_notice_sets_the_deadline_and_is_reported_once() -> None:
    source = FakeSource()
    node_notice = NodeNotice([FakeSource(), source])
    assert list(node_notice.poll(10.0, is_connected=False)) == []
    source.current = notice = Notice(reason="drain", seconds_left=120.0)
    assert list(node_notice.poll(10.0, is_connected=False)) == [NoticeReceived(notice=notice)]
    assert (node_notice.notice, node_notice.deadline) == (notice, 130.0)
    assert list(node_notice.poll(10.5, is_connected=True)) == []


def test_a_notice_without_a_deadline_is_replaced_by_one_with_a_deadline() -> None:
    first, second = FakeSource(), FakeSource()
    node_notice = NodeNotice([first, second])
    first.current = Notice(reason="taint")
    assert len(list(node_notice.poll(10.0, is_connected=True))) == 1
    assert node_notice.deadline == float("inf")
    second.current = Notice(reason="SIGTERM", seconds_left=30.0)
    assert len(list(node_notice.poll(11.0, is_connected=True))) == 1
    assert (node_notice.notice, node_notice.deadline) == (second.current, 41.0)


def test_a_later_deadline_does_not_replace_a_notice() -> None:
    source = FakeSource()
    node_notice = NodeNotice([source])
    source.current = notice = Notice(reason="drain", seconds_left=30.0)
    assert list(node_notice.poll(10.0, is_connected=True))
    source.current = Notice(reason="drain", seconds_left=29.5)  # at 12 s: a later end
    assert list(node_notice.poll(12.0, is_connected=True)) == []
    assert (node_notice.notice, node_notice.deadline) == (notice, 40.0)


def test_a_risk_is_reported_once_and_only_while_connected() -> None:
    source = FakeSource()
    node_notice = NodeNotice([source])
    source.current = RISK
    assert list(node_notice.poll(10.0, is_connected=False)) == []
    reports = [PreemptionRiskReported(reason="elevated risk")]
    assert list(node_notice.poll(11.0, is_connected=True)) == reports
    assert list(node_notice.poll(12.0, is_connected=True)) == []
