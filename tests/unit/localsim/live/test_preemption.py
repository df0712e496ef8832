"""Planned reclaims: their time, node, notice and capacity outage."""

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
from tests.unit.localsim.live.local_cloud_harness import LocalCloudHarness, wait_for_exit


@dataclass
class ManualStepSource:
    """A run whose step is set by the test."""

    reported_step: int = 0

    def current_step(self) -> int:
        return self.reported_step


@dataclass
class RecordingReclaimer(Reclaimer):
    """Records its calls for two nodes instead of performing them."""

    nodes: list[LocalNode]
    calls: list[tuple[str, int]] = field(default_factory=list)
    seconds_left: list[float] = field(default_factory=list)
    capacities: list[int | None] = field(default_factory=list)

    def running_nodes(self) -> list[LocalNode]:
        return self.nodes

    def notify(self, node: LocalNode, *, seconds_left: float, reason: str = "") -> None:
        self.calls.append(("notify", node.number))
        self.seconds_left.append(seconds_left)

    def kill(self, node: LocalNode, *, reason: str = "") -> None:
        self.calls.append(("kill", node.number))

    def set_capacity(self, nodes: int | None) -> None:
        self.capacities.append(nodes)


def make_schedule(
    local_cloud: LocalCloudHarness, *plan: PlannedReclaim
) -> tuple[ReclaimSchedule, RecordingReclaimer, ManualStepSource]:
    group = local_cloud.root.group(local_cloud.launch.run_id, "a")  # type: ignore[arg-type]  # ids are text
    reclaimer, progress = RecordingReclaimer([group.node(0), group.node(1)]), ManualStepSource()
    stream = SeededStreams(1).stream("nodes")
    return (
        ReclaimSchedule(reclaimer, progress, list(plan), stream, started_at=100.0, notice_s=10.0),
        reclaimer,
        progress,
    )


def is_waiting(schedule: ReclaimSchedule) -> bool:
    return not schedule.is_done


def test_reclaim_happens_at_its_step(local_cloud: LocalCloudHarness) -> None:
    schedule, reclaimer, progress = make_schedule(
        local_cloud, at_step(20, node=1), at_step(60, node=0)
    )
    progress.reported_step = 19
    schedule.tick(100.0)
    assert reclaimer.calls == []
    progress.reported_step = 21
    schedule.tick(100.1)
    assert reclaimer.calls == [("kill", 1)]
    assert is_waiting(schedule)
    progress.reported_step = 60
    schedule.tick(100.2)
    assert not is_waiting(schedule)
    assert [(reclaim.node, reclaim.step, reclaim.notice) for reclaim in schedule.completed] == [
        (1, 21, False),
        (0, 60, False),
    ]


def test_reclaim_happens_at_its_time(local_cloud: LocalCloudHarness) -> None:
    schedule, reclaimer, _ = make_schedule(local_cloud, at_time(5.0, node=0))
    schedule.tick(104.9)
    assert reclaimer.calls == []
    schedule.tick(105.0)
    assert reclaimer.calls == [("kill", 0)]


def test_notified_node_is_killed_at_the_deadline(local_cloud: LocalCloudHarness) -> None:
    schedule, reclaimer, _ = make_schedule(local_cloud, at_time(0.0, node=0, notice_s=8.0))
    schedule.tick(100.0)
    assert reclaimer.calls == [("notify", 0)]
    assert is_waiting(schedule)
    schedule.tick(107.9)
    assert len(reclaimer.calls) == 1
    schedule.tick(108.0)
    assert reclaimer.calls[1] == ("kill", 0)
    assert not is_waiting(schedule)


def test_notice_defaults_to_the_options_of_the_cloud(
    local_cloud: LocalCloudHarness,
) -> None:
    schedule, reclaimer, _ = make_schedule(local_cloud, at_time(0.0, node=0, notice=True))
    schedule.notice_s = 3.0
    schedule.tick(100.0)
    assert (reclaimer.calls, reclaimer.seconds_left) == ([("notify", 0)], [3.0])
    schedule.tick(102.9)
    assert len(reclaimer.calls) == 1
    schedule.tick(103.0)
    assert reclaimer.calls[1] == ("kill", 0)


def test_notice_time_comes_from_the_options(tmp_path: Path) -> None:
    options = LocalOptions(root=str(tmp_path / "root"), notice_s=7.0)
    with scheduled_reclaims(str(tmp_path / "runs" / "n"), [], options=options) as schedule:
        assert schedule.notice_s == 7.0


def test_capacity_outage_refuses_nodes(local_cloud: LocalCloudHarness) -> None:
    schedule, reclaimer, _ = make_schedule(local_cloud, at_time(0.0, capacity_outage_s=3.0))
    schedule.tick(100.0)
    assert reclaimer.capacities == [0]
    assert is_waiting(schedule)
    schedule.tick(103.0)
    assert reclaimer.capacities == [0, None]
    assert not is_waiting(schedule)
    schedule.restore_capacity()
    assert reclaimer.capacities == [0, None]


def test_capacity_outage_ends_with_the_context(local_cloud: LocalCloudHarness) -> None:
    schedule, reclaimer, _ = make_schedule(local_cloud, at_time(0.0, capacity_outage_s=3.0))
    schedule.tick(100.0)
    schedule.restore_capacity()
    assert reclaimer.capacities == [0, None]


def test_reclaim_without_a_running_node_waits(local_cloud: LocalCloudHarness) -> None:
    schedule, reclaimer, _ = make_schedule(local_cloud, at_time(0.0))
    reclaimer.nodes, nodes = [], reclaimer.nodes
    schedule.tick(100.0)
    assert is_waiting(schedule)
    reclaimer.nodes = nodes
    schedule.tick(101.0)
    assert len(reclaimer.calls) == 1


def test_same_seed_selects_the_same_nodes() -> None:
    plan = at_random(7, per_minute=30.0, duration_s=60.0)
    assert plan == at_random(7, per_minute=30.0, duration_s=60.0)
    assert plan != at_random(8, per_minute=30.0, duration_s=60.0)
    assert 10 < len(plan) < 60
    assert {reclaim.notice for reclaim in plan} == {True, False}
    assert {reclaim.notice_s for reclaim in plan} == {None}, (
        "the default comes from the options of the cloud"
    )
    without_notice = at_random(7, per_minute=9, duration_s=60, notice_probability=0, notice_s=4.0)
    assert not any(reclaim.notice for reclaim in without_notice)


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
    agent = local_cloud.next_agent()
    reclaimer = Reclaimer(local_cloud.root, local_cloud.launch.run_id)
    (node,) = [node for node in reclaimer.running_nodes() if node.number == agent.message["node"]]
    reclaimer.notify(node, seconds_left=12.0, reason="the price increased")
    source = FileNoticeSource(
        lambda: None, Path(agent.message["environment"]["SPOTFIT_NOTICE_FILE"])
    )
    notice = source.poll(0.0)
    assert notice is not None
    assert (notice.reason, notice.seconds_left) == ("the price increased", 12.0)
    assert node not in reclaimer.running_nodes()
    local_cloud.provisioner.cancel(handle)


def test_killed_node_reports_its_reason(local_cloud: LocalCloudHarness) -> None:
    handle = local_cloud.submit("a", 2)
    agent = local_cloud.next_agent()
    reclaimer = Reclaimer(local_cloud.root)
    (node,) = reclaimer.running_nodes()
    reclaimer.kill(node, reason="the price increased")
    wait_for_exit(agent.machine.pid)
    wait_for_exit(agent.message["worker"])
    (status,) = local_cloud.observe(handle).nodes
    assert (status.state, status.reason) == (NodeState.GONE, "the price increased")
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
