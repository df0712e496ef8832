"""Behavior of the Google Cloud Batch provisioner beyond the conformance suite."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.clouds import gcp_batch as cloud
from spotfit_localsim.clouds.cloud_host import SimulatedMachine
from spotfit_localsim.clouds.gcp_batch import GcpBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.gcp_batch import client as calls
from spotfit_provisioners.gcp_batch import provisioner as provisioner_module
from spotfit_provisioners.gcp_batch.provisioner import GcpBatchProvisioner
from tests.unit.provisioners.waiting import until

pytest.importorskip("google.cloud.batch_v1")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

REQUEST = GroupRequest(token=Token("t-0123456789ab"), num_workers=1, total_workers=1)


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
    with running_simulator(tmp_path, SimOptions(cloud="gcp_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (calls._batch_service, provisioner_module._client_for_region):
        cache.cache_clear()


def open_provisioner(sim: Simulator, **options: Any) -> GcpBatchProvisioner:
    access = GcpBatchCloud.client_access(sim.server.url)
    return GcpBatchProvisioner.with_options(**{**access.options, **options})


def submit_running(provisioner: GcpBatchProvisioner, tmp_path: Path, command: str) -> GroupHandle:
    """Submit a group whose machine runs `command` instead of an agent."""
    plan = provisioner.plan(REQUEST)
    container = plan.body["taskGroups"][0]["taskSpec"]["runnables"][-1]["container"]
    container |= {"entrypoint": "/bin/sh", "commands": ["-c", command]}
    handle = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    return handle


def test_concurrent_submissions_get_the_same_job(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim)
    got: list[GroupHandle] = []

    def submit() -> None:
        got.append(submit_running(provisioner, tmp_path, "exec sleep 100"))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] == got[1]
    assert len(sim.cloud.state.jobs) == 1


@pytest.mark.parametrize("notice", [False, True])
def test_agent_of_a_lost_vm_is_restarted_up_to_the_limit(
    sim: Simulator, tmp_path: Path, notice: bool
) -> None:
    sim.market.options = SimOptions(cloud="gcp_batch", notice_s=0.1)
    provisioner = open_provisioner(sim, max_retries=2)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    for lost in range(1, 4):
        until(lambda count=lost: len(sim.datacenter.machines) == count and _active_machines(sim))  # type: ignore[misc]
        _reclaim(sim, notice=notice)
    until(lambda: provisioner.observe(handle).is_terminated)
    (node,) = provisioner.observe(handle).nodes
    assert node.state == NodeState.GONE
    assert "preempted" in node.reason
    assert _count_failed_executions(sim) == 3


@pytest.mark.parametrize(("code", "tries"), [(85, 3), (75, 1), (70, 1), (0, 1)])
def test_only_drained_agents_are_retried(
    sim: Simulator, tmp_path: Path, code: int, tries: int
) -> None:
    provisioner = open_provisioner(sim, max_retries=2)
    handle = submit_running(provisioner, tmp_path, f"exit {code}")
    until(lambda: provisioner.observe(handle).is_terminated)
    assert len(sim.datacenter.machines) == tries
    state = provisioner.observe(handle).nodes[0].state
    assert state == (NodeState.FAILED if code == 70 else NodeState.GONE)


def test_success_after_a_preemption_is_success(sim: Simulator, tmp_path: Path) -> None:
    """The earlier exit code 50001 remains in the events."""
    provisioner = open_provisioner(sim)
    before = tmp_path / "before"
    command = f"test -e {before} && exit; touch {before}; exec sleep 100"
    handle = submit_running(provisioner, tmp_path, command)
    until(before.exists)
    _reclaim(sim, notice=False)
    until(lambda: provisioner.observe(handle).is_terminated)
    (node,) = provisioner.observe(handle).nodes
    assert (node.state, node.reason) == (NodeState.GONE, "")
    assert _count_failed_executions(sim) == 1


def test_missing_capacity_is_reported_until_it_returns(sim: Simulator, tmp_path: Path) -> None:
    sim.faults.inject("capacity", 1)
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "exec sleep 100")
    until(lambda: "ZONE_RESOURCE_POOL_EXHAUSTED" in provisioner.observe(handle).refusal)
    assert provisioner.observe(handle).nodes[0].state == NodeState.WAITING
    sim.faults.inject("capacity", 0)
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)
    assert not provisioner.observe(handle).refusal


def test_output_of_each_try_is_read_when_available(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
    provisioner = open_provisioner(sim, max_retries=1)
    handle = submit_running(
        provisioner, tmp_path, "echo no module; echo try $BATCH_TASK_RETRY_ATTEMPT; exit 85"
    )
    until(lambda: provisioner.observe(handle).is_terminated)
    assert provisioner.fetch_machine_output(handle, 0, max_lines=10) == []
    monkeypatch.setattr(cloud, "LOG_DELAY_S", 0.0)
    first, second = provisioner.fetch_machine_output(handle, 0, max_lines=10)
    assert "labels.task_id:" in first.source
    assert (first.lines, second.lines) == (("no module", "try 0"), ("no module", "try 1"))
    [last] = provisioner.fetch_machine_output(handle, 0, max_lines=1)
    assert last.lines == ("try 1",)
    assert not open_provisioner(sim, cloud_logging=False).traits.keeps_output


def _active_machines(sim: Simulator) -> list[SimulatedMachine]:
    with sim._lock:
        return [machine for machine in sim.datacenter.active_machines() if machine.state == "up"]


def _reclaim(sim: Simulator, *, notice: bool) -> None:
    """Under the lock of the simulator, which runs concurrently."""
    with sim._lock:
        sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=notice)


def _count_failed_executions(sim: Simulator) -> int:
    """Return the number of failed executions of the task."""
    (job,) = sim.cloud.state.jobs.values()
    return sum("taskExecution" in event for event in job.tasks[0].events)


def test_a_missing_client_library_is_reported_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.batch_v1", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        GcpBatchProvisioner.with_options(project="p", region="r", image="i").open_client()
