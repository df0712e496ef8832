"""Behavior of the Azure Batch provisioner beyond the conformance suite."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import MissingExtraError, ProvisionError
from spotfit.core.ids import Token
from spotfit.host.system import new_run_id
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.provision.api import Refusal
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.clouds import azure_batch as cloud
from spotfit_localsim.clouds.azure_batch import AzureBatchCloud
from spotfit_localsim.clouds.cloud_host import SimulatedMachine
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.azure_batch import client as calls
from spotfit_provisioners.azure_batch import provisioner as provisioner_module
from spotfit_provisioners.azure_batch.provisioner import AzureBatchProvisioner
from tests.unit.provisioners.waiting import until

pytest.importorskip("azure.batch")
pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

TOKEN = Token("t-0123456789ab")
AGENT = "python -m spotfit.agent"


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setattr(cloud, "_RESCHEDULE_DELAY_S", 0.0)
    monkeypatch.setattr(cloud, "_EVALUATION_INTERVAL_S", 0.04)
    monkeypatch.setattr(cloud, "_SAMPLING_INTERVAL_S", 0.02)
    with running_simulator(tmp_path, SimOptions(cloud="azure_batch", boot_s=0.0)) as simulator:
        yield simulator
    for cache in (
        calls._batch_service,
        calls._management_pipeline,
        provisioner_module._client_for_endpoint,
    ):
        cache.cache_clear()


def open_provisioner(sim: Simulator, **options: Any) -> AzureBatchProvisioner:
    access = AzureBatchCloud.client_access(sim.server.url)
    return AzureBatchProvisioner.with_options(**{**access.options, **options})


def submit_running(
    provisioner: AzureBatchProvisioner,
    tmp_path: Path,
    command: str,
    *,
    token: Token = TOKEN,
    workers: int = 1,
) -> GroupHandle:
    """Submit a group whose machines run `command` instead of an agent."""
    plan = provisioner.plan(GroupRequest(token=token, num_workers=workers, total_workers=workers))
    task = plan.body["task"]
    task["commandLine"] = task["commandLine"].replace(AGENT, command)
    handle = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(handle, GroupHandle)
    return handle


def test_concurrent_submissions_get_the_same_job(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim)
    got: list[GroupHandle] = []

    def submit() -> None:
        got.append(submit_running(provisioner, tmp_path, "sleep 100", workers=2))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] == got[1]
    memory = sim.cloud.state
    assert (len(memory.jobs), len(memory.pools)) == (1, 1)
    assert [len(job.tasks) for job in memory.jobs.values()] == [2]


@pytest.mark.parametrize("notice", [False, True])
def test_repeatedly_preempted_node_is_the_same_machine(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: bool
) -> None:
    """There is no limit: a requeued task has not failed."""
    monkeypatch.setattr(cloud, "_UNUSABLE_DURATION_S", 0.0)
    sim.market.options = SimOptions(cloud="azure_batch", notice_s=0.05, boot_s=0.0)
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "sleep 100")
    for lost in range(1, 13):
        until(lambda count=lost: len(sim.datacenter.machines) == count and _active_machines(sim))  # type: ignore[misc]
        _reclaim(sim, notice=notice)
    until(lambda: len(sim.datacenter.machines) == 13)
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)
    (pool,) = sim.cloud.state.pools.values()
    assert len(pool.nodes) == pool.created_node_count == 1


def test_unusable_node_is_not_lost(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "_UNUSABLE_DURATION_S", 1e6)
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "sleep 100")
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)
    _reclaim(sim, notice=False)
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.WAITING)
    assert provisioner.observe(handle).nodes[0].reason == "its node is unusable"
    monkeypatch.setattr(cloud, "_UNUSABLE_DURATION_S", 0.0)
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)


@pytest.mark.parametrize(
    ("code", "state"),
    [(75, NodeState.GONE), (70, NodeState.FAILED), (64, NodeState.FAILED), (0, NodeState.GONE)],
)
def test_ended_agent_is_not_retried(
    sim: Simulator, tmp_path: Path, code: int, state: NodeState
) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, f"(exit {code})")
    until(lambda: provisioner.observe(handle).is_terminated)
    assert provisioner.observe(handle).nodes[0].state == state
    assert len(sim.datacenter.machines) == 1
    until(lambda: provisioner._client().find_job(handle.name)["state"] == "completed")  # type: ignore[index]


def test_drained_agent_waits_for_its_machine_and_restarts(sim: Simulator, tmp_path: Path) -> None:
    """Batch requeues only tasks that still run when their node is lost."""
    provisioner = open_provisioner(sim)
    before = tmp_path / "before"
    command = f"(test -e {before} && exit 75; touch {before}; exit 85)"
    handle = submit_running(provisioner, tmp_path, command)
    until(before.exists)
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)
    _reclaim(sim, notice=False)
    until(lambda: provisioner.observe(handle).is_terminated)
    (node,) = provisioner.observe(handle).nodes
    assert node.state == NodeState.GONE
    assert "exit code 75" in node.reason
    assert len(sim.datacenter.machines) == 2


def test_groups_share_one_pool_that_scales_to_zero(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim)
    first = submit_running(provisioner, tmp_path, "sleep 100", token=Token("t-1"), workers=2)
    second = submit_running(provisioner, tmp_path, "sleep 100", token=Token("t-2"))
    until(lambda: len(_active_machines(sim)) == 3)
    (pool,) = sim.cloud.state.pools.values()
    assert len(pool.nodes) == 3
    provisioner.cancel(first)
    until(lambda: len(pool.nodes) == pool.target_nodes == 1)
    assert provisioner.observe(second).nodes[0].state == NodeState.RUNNING
    provisioner.cancel(second)
    until(lambda: len(pool.nodes) == pool.target_nodes == 0)


def test_group_released_before_allocation_gets_no_machines(sim: Simulator, tmp_path: Path) -> None:
    """Azure leaves its tasks `active`, but they are not executed."""
    sim.faults.inject("capacity", 1)
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "sleep 100")
    provisioner.cancel(handle)
    until(lambda: provisioner.observe(handle).is_terminated)
    sim.faults.inject("capacity", 0)
    until(lambda: provisioner._client().find_job(handle.name)["state"] == "completed")  # type: ignore[index]
    assert provisioner._client().list_tasks(handle.name)["0"]["state"] == "active"
    assert not sim.datacenter.machines


def test_missing_capacity_is_reported_until_it_returns(sim: Simulator, tmp_path: Path) -> None:
    sim.faults.inject("capacity", 1)
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "sleep 100")
    until(lambda: "AllocationFailed" in provisioner.observe(handle).refusal)
    assert provisioner.observe(handle).nodes[0].state == NodeState.WAITING
    sim.faults.inject("capacity", 0)
    until(lambda: provisioner.observe(handle).nodes[0].state == NodeState.RUNNING)
    assert not provisioner.observe(handle).refusal


def test_directories_are_shared_only_if_containers_may_mount_them(sim: Simulator) -> None:
    assert open_provisioner(sim).traits.shared_directories == "never"
    mounting = open_provisioner(sim, container_options=("--volume=/mnt/share:/data",))
    assert mounting.traits.shared_directories == "possibly"


def test_missing_pool_that_cannot_be_created_is_reported(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim, pool="spot", account_id="")
    with pytest.raises(ProvisionError, match="pool 'spot' does not exist"):
        submit_running(provisioner, tmp_path, "sleep 100")
    assert not sim.cloud.state.jobs


def test_pool_under_deletion_is_retried(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "sleep 100")
    until(lambda: _active_machines(sim))
    (pool,) = sim.cloud.state.pools.values()
    pool.is_deleting = True
    plan = provisioner.plan(GroupRequest(token=Token("t-2"), num_workers=1, total_workers=1))
    answer = provisioner.submit(plan, AgentLaunchSpec(str(tmp_path), new_run_id(), "secret"))
    assert isinstance(answer, Refusal)
    assert "being deleted" in answer.reason
    provisioner.cancel(handle)


def test_output_of_a_task_is_read_while_its_node_exists(sim: Simulator, tmp_path: Path) -> None:
    provisioner = open_provisioner(sim)
    handle = submit_running(provisioner, tmp_path, "printf no_module\\\\nat_all\\\\n; sleep 100")
    until(lambda: provisioner.fetch_machine_output(handle, 0, max_lines=1))
    [output] = provisioner.fetch_machine_output(handle, 0, max_lines=1)
    assert output.source.endswith("/0/stdout.txt")
    assert output.lines == ("at_all",)
    sim.faults.inject("capacity", 1_000_000)
    _reclaim(sim, notice=False)
    assert provisioner.fetch_machine_output(handle, 0, max_lines=1) == []
    provisioner.cancel(handle)


def _active_machines(sim: Simulator) -> list[SimulatedMachine]:
    with sim._lock:
        return [machine for machine in sim.datacenter.active_machines() if machine.state == "up"]


def _reclaim(sim: Simulator, *, notice: bool) -> None:
    """Under the lock of the simulator, which runs concurrently."""
    with sim._lock:
        sim.datacenter.reclaim(next(sim.datacenter.active_machines()), notice=notice)


def test_a_missing_client_library_is_reported_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "azure.batch.models", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        AzureBatchProvisioner.with_options(
            endpoint="https://a.westeurope.batch.azure.com", image="i"
        ).open_client()
