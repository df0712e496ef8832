"""Nodes are taken away by plan: when, which, with or without a word, and what it leaves."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotfit.agent.notices.local_sources import FileNoticeSource
from spotfit.core.codec import encode
from spotfit.ledger import keys
from spotfit.model.group import NodeState
from spotfit.store.local import MemoryStore
from spotfit_localsim.live.preemption import (
    PlannedReclaim,
    Reclaimer,
    ReclaimSchedule,
    ReportedStepSource,
    at_random,
    at_step,
    at_time,
    scheduled_reclaims,
)
from spotfit_localsim.random_streams import SeededStreams
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.state_dir import LocalNode
from tests.unit.localsim.live.stand_in import LocalCloudHarness, wait_for_exit


@dataclass
class Told:
    """A run that is as far as it is told."""

    reported_step: int = 0

    def current_step(self) -> int:
        return self.reported_step


@dataclass
class Market(Reclaimer):
    """Notes what it would do to two nodes."""

    standing: list[LocalNode]
    did: list[tuple[str, int]] = field(default_factory=list)
    seconds_left: list[float] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)

    def running_nodes(self) -> list[LocalNode]:
        return self.standing

    def notify(self, node: LocalNode, *, seconds_left: float, reason: str = "") -> None:
        self.did.append(("notify", node.number))
        self.seconds_left.append(seconds_left)

    def kill(self, node: LocalNode, *, reason: str = "") -> None:
        self.did.append(("kill", node.number))

    def set_capacity(self, nodes: int | None) -> None:
        self.limits.append(nodes)


def carried_out(
    local_cloud: LocalCloudHarness, *plan: PlannedReclaim
) -> tuple[ReclaimSchedule, Market, Told]:
    group = local_cloud.root.group(local_cloud.launch.run_id, "a")  # type: ignore[arg-type]  # ids are text
    market, progress = Market([group.node(0), group.node(1)]), Told()
    stream = SeededStreams(1).stream("nodes")
    return (
        ReclaimSchedule(market, progress, list(plan), stream, started_at=100.0, notice_s=10.0),
        market,
        progress,
    )


def waits(reclamation: ReclaimSchedule) -> bool:
    return not reclamation.is_done


def test_reclaim_happens_at_its_step(local_cloud: LocalCloudHarness) -> None:
    reclamation, market, progress = carried_out(
        local_cloud, at_step(20, node=1), at_step(60, node=0)
    )
    progress.reported_step = 19
    reclamation.tick(100.0)
    assert market.did == []
    progress.reported_step = 21
    reclamation.tick(100.1)
    assert market.did == [("kill", 1)]
    assert waits(reclamation)
    progress.reported_step = 60
    reclamation.tick(100.2)
    assert not waits(reclamation)
    assert [(struck.node, struck.step, struck.notice) for struck in reclamation.completed] == [
        (1, 21, False),
        (0, 60, False),
    ]


def test_reclaim_happens_at_its_time(local_cloud: LocalCloudHarness) -> None:
    reclamation, market, _ = carried_out(local_cloud, at_time(5.0, node=0))
    reclamation.tick(104.9)
    assert market.did == []
    reclamation.tick(105.0)
    assert market.did == [("kill", 0)]


def test_notified_node_is_killed_at_the_deadline(local_cloud: LocalCloudHarness) -> None:
    reclamation, market, _ = carried_out(local_cloud, at_time(0.0, node=0, notice_s=8.0))
    reclamation.tick(100.0)
    assert market.did == [("notify", 0)]
    assert waits(reclamation)
    reclamation.tick(107.9)
    assert len(market.did) == 1
    reclamation.tick(108.0)
    assert market.did[1] == ("kill", 0)
    assert not waits(reclamation)


def test_notice_defaults_to_the_options_of_the_cloud(
    local_cloud: LocalCloudHarness,
) -> None:
    reclamation, market, _ = carried_out(local_cloud, at_time(0.0, node=0, notice=True))
    reclamation.notice_s = 3.0
    reclamation.tick(100.0)
    assert (market.did, market.seconds_left) == ([("notify", 0)], [3.0])
    reclamation.tick(102.9)
    assert len(market.did) == 1
    reclamation.tick(103.0)
    assert market.did[1] == ("kill", 0)


def test_notice_time_comes_from_the_options(tmp_path: Path) -> None:
    options = LocalOptions(root=str(tmp_path / "root"), notice_s=7.0)
    with scheduled_reclaims(str(tmp_path / "runs" / "n"), [], options=options) as reclamation:
        assert reclamation.notice_s == 7.0


def test_capacity_outage_refuses_nodes(local_cloud: LocalCloudHarness) -> None:
    reclamation, market, _ = carried_out(local_cloud, at_time(0.0, capacity_outage_s=3.0))
    reclamation.tick(100.0)
    assert market.limits == [0]
    assert waits(reclamation)
    reclamation.tick(103.0)
    assert market.limits == [0, None]
    assert not waits(reclamation)
    reclamation.restore_capacity()
    assert market.limits == [0, None]


def test_capacity_outage_ends_with_the_context(local_cloud: LocalCloudHarness) -> None:
    reclamation, market, _ = carried_out(local_cloud, at_time(0.0, capacity_outage_s=3.0))
    reclamation.tick(100.0)
    reclamation.restore_capacity()
    assert market.limits == [0, None]


def test_reclaim_without_a_running_node_waits(local_cloud: LocalCloudHarness) -> None:
    reclamation, market, _ = carried_out(local_cloud, at_time(0.0))
    market.standing, standing = [], market.standing
    reclamation.tick(100.0)
    assert waits(reclamation)
    market.standing = standing
    reclamation.tick(101.0)
    assert len(market.did) == 1


def test_same_seed_selects_the_same_nodes() -> None:
    plan = at_random(7, per_minute=30.0, duration_s=60.0)
    assert plan == at_random(7, per_minute=30.0, duration_s=60.0)
    assert plan != at_random(8, per_minute=30.0, duration_s=60.0)
    assert 10 < len(plan) < 60
    assert {strike.notice for strike in plan} == {True, False}
    assert {strike.notice_s for strike in plan} == {None}, "as the cloud's options say"
    silent = at_random(7, per_minute=9, duration_s=60, notice_probability=0, notice_s=4.0)
    assert not any(strike.notice for strike in silent)


def test_current_step_is_the_highest_reported_step() -> None:
    store = MemoryStore()
    progress = ReportedStepSource(store)
    assert progress.current_step() == 0
    for n, steps in enumerate([[1, 2], [2, 3]]):
        lines = [
            json.dumps({"round": n, "report_index": 0, "metrics": {"step": step}}) for step in steps
        ]
        store.put(keys.reports("a", n), "\n".join(lines).encode())  # type: ignore[arg-type]  # text
    assert ReportedStepSource(store).current_step() == 3


def test_without_steps_reports_are_counted() -> None:
    store = MemoryStore()
    store.put(keys.reports("a", 0), encode({"metrics": {"loss": 1.0}}))  # type: ignore[arg-type]  # text
    assert ReportedStepSource(store).current_step() == 1


def test_agent_reads_the_notice(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 4)
    up = local_cloud.next_agent()
    reclaimer = Reclaimer(local_cloud.root, local_cloud.launch.run_id)
    (node,) = [node for node in reclaimer.running_nodes() if node.number == up.message["node"]]
    reclaimer.notify(node, seconds_left=12.0, reason="the price went up")
    source = FileNoticeSource(lambda: None, Path(up.message["environment"]["SPOTFIT_NOTICE_FILE"]))
    notice = source.poll(0.0)
    assert notice is not None
    assert (notice.reason, notice.seconds_left) == ("the price went up", 12.0)
    assert node not in reclaimer.running_nodes()
    local_cloud.provisioner.cancel(handle)


def test_killed_node_reports_its_reason(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 2)
    up = local_cloud.next_agent()
    reclaimer = Reclaimer(local_cloud.root)
    (node,) = reclaimer.running_nodes()
    reclaimer.kill(node, reason="the price went up")
    wait_for_exit(up.machine.pid)
    wait_for_exit(up.message["worker"])
    (status,) = local_cloud.observe(handle).nodes
    assert (status.state, status.reason) == (NodeState.GONE, "the price went up")
    assert reclaimer.running_nodes() == []
    reclaimer.kill(node)  # again: nothing happens


@pytest.mark.parametrize("run", ["other"])
def test_other_runs_are_not_reclaimed(local_cloud: LocalCloudHarness, run: str) -> None:
    local_cloud.submit("a", 2)
    local_cloud.next_agent()
    assert Reclaimer(local_cloud.root, run).running_nodes() == []  # type: ignore[arg-type]  # ids are text
    assert len(Reclaimer(local_cloud.root, local_cloud.launch.run_id).running_nodes()) == 1


def test_zero_capacity_refuses_a_group(local_cloud: LocalCloudHarness) -> None:
    Reclaimer(local_cloud.root).set_capacity(0)
    with pytest.raises(AssertionError):
        local_cloud.submit("a", 2)
    Reclaimer(local_cloud.root).set_capacity(None)
    local_cloud.submit("a", 2)
