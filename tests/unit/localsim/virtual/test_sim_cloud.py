"""The simulated cloud: idempotent submission, capacity, notices and lost responses."""

from collections.abc import Callable
from typing import Any

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.model.topology import Notice
from spotfit.provision.api import Refusal
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.market import SimMarket, SimMarketConfig
from spotfit_localsim.virtual.sim_cloud import (
    NonIdempotentProvisioner,
    SimCloud,
    SimCloudProvisioner,
    SimInstance,
)
from tests.unit.localsim.sim_harness import SimHarness

LAUNCH = AgentLaunchSpec("sim://run", RunId("r"), "secret")


class RecordingObserver:
    """Records which instances booted and terminated."""

    def __init__(self) -> None:
        self.booted: list[str] = []
        self.terminated: list[tuple[str, bool]] = []

    def on_instance_booted(self, instance: SimInstance) -> None:
        self.booted.append(instance.name)

    def on_instance_terminated(self, instance: SimInstance, *, closes_connections: bool) -> None:
        self.terminated.append((instance.name, closes_connections))


class CloudHarness:
    """A simulated cloud with a client."""

    def __init__(
        self, kind: type[SimCloudProvisioner] = SimCloudProvisioner, /, **market: Any
    ) -> None:
        self.sim = SimHarness()
        self.market = SimMarket(SimMarketConfig(**market), self.sim.rng.stream("market"))
        self.cloud = SimCloud(self.sim.engine, self.market, self.sim.record_message)
        self.observer = self.cloud.observer = RecordingObserver()
        self.kind = kind

    def run_jobs(self, *jobs: Callable[[SimCloudProvisioner], Any]) -> list[Any]:
        """Call the provisioner from a process."""
        process = self.sim.process()
        client = self.kind(self.cloud, self.market, process, slots=2)
        return self.sim.run_jobs(process, *(lambda job=job: job(client) for job in jobs))

    def submit(self) -> Any:
        return self.run_jobs(lambda client: client.submit(plan_of(client, "t1", 4), LAUNCH))[0]

    def advance(self, seconds: float) -> None:
        self.sim.engine.schedule_at(self.sim.engine.now + seconds, lambda: None)
        self.sim.engine.run(until=self.sim.engine.now + seconds)


def plan_of(client: SimCloudProvisioner, token: str, workers: int) -> Any:
    return client.plan(GroupRequest(token=Token(token), num_workers=workers, total_workers=8))


def test_repeated_submit_creates_one_group() -> None:
    harness = CloudHarness()
    assert harness.submit() == harness.submit()
    assert sorted(harness.observer.booted) == ["t1.0", "t1.1"]
    assert harness.cloud.groups.keys() == {"t1"}


def test_non_idempotent_provisioner_creates_two_groups() -> None:
    harness = CloudHarness(NonIdempotentProvisioner)
    harness.submit()
    harness.submit()
    assert len(harness.observer.booted) == 4


def test_instance_is_waiting_then_running_then_gone() -> None:
    harness = CloudHarness(boot_s=(10.0, 10.0), status_lag_s=(2.0, 2.0))
    process = harness.sim.process()
    client = SimCloudProvisioner(harness.cloud, harness.market, process, slots=2)
    handle = GroupHandle(token=Token("t1"), provisioner="sim", name="sim-t1", detail={"nodes": 1})
    harness.cloud.request(plan_of(client, "t1", 2), LAUNCH)
    states = []
    for now in (5.0, 11.0, 12.0):
        harness.advance(now - harness.sim.engine.now)
        states.append(harness.cloud.status(handle.token, 1).nodes[0].state)
        if now == 11.0:
            harness.cloud.release(handle.token)
    harness.advance(3.0)
    states.append(harness.cloud.status(handle.token, 1).nodes[0].state)
    assert states == [NodeState.WAITING, NodeState.RUNNING, NodeState.RUNNING, NodeState.GONE]
    assert harness.observer.terminated == [("t1.0", True)]
    assert harness.cloud.machine_seconds == pytest.approx(11.05)


def test_unknown_group_is_terminated() -> None:
    harness = CloudHarness()
    handle = GroupHandle(
        token=Token("never"), provisioner="sim", name="sim-never", detail={"nodes": 2}
    )
    status = harness.run_jobs(
        lambda client: client.observe(handle), lambda client: client.cancel(handle)
    )
    assert status[0].is_terminated
    assert status[1] is None


def test_lost_response_has_its_effect() -> None:
    harness = CloudHarness(lost_response_probability=1.0)
    assert isinstance(harness.submit(), ConnectionError)
    assert sorted(harness.observer.booted) == ["t1.0", "t1.1"]


def test_refused_request_creates_no_group() -> None:
    harness = CloudHarness(rejects_when_full=True, capacity=CapacityTrace("none", ((0.0, 1),)))
    assert isinstance(harness.submit(), Refusal)
    assert not harness.cloud.groups


def test_instances_follow_the_capacity() -> None:
    capacity_trace = CapacityTrace("trace", ((0.0, 1), (100.0, 2), (200.0, 0)))
    harness = CloudHarness(capacity=capacity_trace, boot_s=(1.0, 1.0))
    process = harness.sim.process()
    client = SimCloudProvisioner(harness.cloud, harness.market, process, slots=2)
    harness.cloud.request(plan_of(client, "t1", 4), LAUNCH)
    harness.advance(50.0)
    assert len(harness.observer.booted) == 1
    assert harness.cloud.status(Token("t1"), 2).refusal == "waiting for capacity"
    harness.advance(100.0)
    assert len(harness.observer.booted) == 2
    harness.advance(100.0)
    assert len(harness.observer.terminated) == 2


def test_notice_precedes_termination() -> None:
    harness = CloudHarness(notice_s=30.0)
    harness.submit()
    instance = harness.cloud.running_instances()[0]
    harness.cloud.reclaim(instance, with_notice=True)
    assert isinstance(instance.notice, Notice)
    assert instance.notice.seconds_left == 30.0
    harness.advance(29.0)
    assert instance in harness.cloud.running_instances()
    harness.advance(2.0)
    assert instance not in harness.cloud.running_instances()
    assert harness.observer.terminated == [(instance.name, True)]


def test_failed_boot_starts_no_agent() -> None:
    harness = CloudHarness(boot_failure_probability=1.0)
    harness.submit()
    assert harness.observer.booted == []
    assert len(harness.cloud.running_instances()) == 2


@pytest.mark.parametrize("reports_times", [True, False])
def test_billing_times_are_reported_with_the_status(reports_times: bool) -> None:
    harness = CloudHarness(
        boot_s=(10.0, 10.0), status_lag_s=(2.0, 2.0), reports_times=reports_times
    )
    client = SimCloudProvisioner(harness.cloud, harness.market, harness.sim.process(), slots=2)
    harness.cloud.request(plan_of(client, "t1", 2), LAUNCH)
    statuses = []
    for after_s in (5.0, 10.0, 4.0):
        harness.advance(after_s)
        statuses.append(harness.cloud.status(Token("t1"), 1).nodes[0])
        harness.cloud.release(Token("t1")) if after_s == 10.0 else None
    expected = [(wall_ms(0.0), None)] * 2 + [(wall_ms(0.0), wall_ms(15.05))]
    times = [(one.started_at_ms, one.ended_at_ms) for one in statuses]
    assert times == (expected if reports_times else [(None, None)] * 3)
    billed_s = 15.05 if reports_times else 5.05
    book = harness.cloud.books()[Token("t1")]
    assert (round(book.billed_s, 3), book.machines) == (billed_s, 1)
