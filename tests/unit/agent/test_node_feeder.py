"""NodeFeeder: starts feeders on machines for them, and reports their address to every leader."""

from __future__ import annotations

from typing import Any

from spotfit.agent.node_feeder import NodeFeeder
from spotfit.agent.ports import AgentMessageReceived
from spotfit.core.ids import Token
from spotfit.model.events import FitEnded, RankFailure
from spotfit.model.spec import FeederSpec, RunSpec
from spotfit.model.topology import FeederAddress
from spotfit.model.view import View
from spotfit.protocol.agent_leader import FeederReady, Join, NodeUnusable
from spotfit.testing.builders import RUN_ID, TOKEN, a_group, a_member, a_spec, a_view
from tests.unit.agent.simulated_cluster import Infrastructure

OWN = Token("t-f")
FEEDER = FeederAddress(address="10.0.0.1:4000", connections=2)
SPEC = a_spec(feeders=FeederSpec(min_nodes=1, max_nodes=1))
VIEW = a_view(spec=SPEC, groups={TOKEN: a_group(), OWN: a_group(token=OWN, nodes=1, role="feed")})


class FakeFeederNode:
    def __init__(self) -> None:
        self.started: list[RunSpec] = []
        self.is_running = False
        self.feeder: FeederAddress | None = None

    def start(self, spec: RunSpec) -> None:
        self.started.append(spec)
        self.is_running = True

    def stop(self) -> None:
        self.is_running, self.feeder = False, None


class Node:
    """The feeders of one node, connected to a fake leader."""

    def __init__(self, token: Token = OWN) -> None:
        infrastructure = Infrastructure()
        self._leader = infrastructure.open_transport(a_member(0))
        transport = infrastructure.open_transport(a_member(1))
        join = Join(run_id=RUN_ID, member=a_member(1), next_slot=0)
        transport.connect(a_member(0).coordinator_address, join)
        self._leader.drain_events()
        self.process = FakeFeederNode()
        self.feeder = NodeFeeder(token, transport, self.process)

    def reports(self) -> list[Any]:
        events = self._leader.drain_events()
        return [one.message for one in events if isinstance(one, AgentMessageReceived)]


def ended(view: View) -> View:
    return a_view(spec=view.spec, groups=view.groups, fit_end=FitEnded(outcome="finished"))


def test_the_feeders_are_started_once_on_a_machine_for_feeders() -> None:
    node = Node()
    node.feeder.apply_view(VIEW, 0.0)
    node.feeder.apply_view(VIEW, 1.0)
    assert node.process.started == [SPEC]


def test_no_feeders_are_started_on_a_machine_of_workers() -> None:
    node = Node(TOKEN)
    node.feeder.apply_view(VIEW, 0.0)
    assert not node.process.started


def test_the_feeders_are_stopped_when_the_fit_has_ended() -> None:
    node = Node()
    node.feeder.apply_view(VIEW, 0.0)
    node.feeder.apply_view(ended(VIEW), 1.0)
    assert not node.process.is_running
    node.feeder.apply_view(ended(VIEW), 100.0)
    assert len(node.process.started) == 1


def test_feeders_that_have_ended_are_started_again_after_growing_pauses() -> None:
    node, starts = Node(), []
    for now in range(60):
        count = len(node.process.started)
        node.feeder.apply_view(VIEW, float(now))
        if len(node.process.started) > count:
            starts.append(now)
        node.process.stop()
    assert starts == [0, 1, 3, 7, 15, 31]


def test_the_address_is_reported_once_to_each_leader() -> None:
    node = Node()
    node.feeder.apply_view(VIEW, 0.0)
    node.feeder.send_report(is_reconnected=True)
    assert node.reports() == []
    node.process.feeder = FEEDER
    for is_reconnected in (False, False, True):
        node.feeder.send_report(is_reconnected=is_reconnected)
    assert node.reports() == [FeederReady(feeder=FEEDER)] * 2


def test_the_end_of_the_feeders_is_reported() -> None:
    node = Node()
    node.feeder.apply_view(VIEW, 0.0)
    node.process.feeder = FEEDER
    node.feeder.send_report(is_reconnected=False)
    node.process.stop()
    node.feeder.send_report(is_reconnected=False)
    assert node.reports() == [FeederReady(feeder=FEEDER), FeederReady(feeder=None)]


def starts_and_ends(node: Node, starts: range) -> None:
    for start in starts:
        node.feeder.apply_view(VIEW, 100.0 * start)
        node.feeder.send_report(is_reconnected=False)
        node.process.stop()


def test_a_machine_whose_feeders_never_listen_is_reported_once_to_each_leader() -> None:
    node = Node()
    starts_and_ends(node, range(4))
    node.feeder.send_report(is_reconnected=False)
    assert node.reports() == []
    starts_and_ends(node, range(4, 5))
    for is_reconnected in (False, False, True):
        node.feeder.send_report(is_reconnected=is_reconnected)
    message = "its feeders ended 5 times before they had accepted connections for 300 s"
    unusable = NodeUnusable(failure=RankFailure(rank=0, kind="died", message=message))
    assert node.reports() == [unusable] * 2


def listens(node: Node, start: float, duration_s: float) -> None:
    """The feeders are started, listen for that time, and end."""
    node.feeder.apply_view(VIEW, start)
    node.process.feeder = FEEDER
    for now in (start, start + duration_s):
        node.feeder.apply_view(VIEW, now)
        node.feeder.send_report(is_reconnected=False)
    node.process.stop()


def unusable_reports(node: Node) -> int:
    return sum(isinstance(one, NodeUnusable) for one in node.reports())


def test_starts_are_counted_from_the_last_one_that_worked() -> None:
    node = Node()
    starts_and_ends(node, range(4))
    listens(node, 1000.0, 300.0)
    starts_and_ends(node, range(20, 24))
    node.feeder.send_report(is_reconnected=False)
    assert unusable_reports(node) == 0
    starts_and_ends(node, range(24, 25))
    node.feeder.send_report(is_reconnected=False)
    assert unusable_reports(node) == 1


def test_feeders_that_listen_for_a_short_time_count_as_failed() -> None:
    node = Node()
    for number in range(5):
        listens(node, 1000.0 * number, 299.0)
    assert unusable_reports(node) == 0
    listens(node, 5000.0, 0.0)
    assert unusable_reports(node) == 1, "also while the next start is in progress"
