"""Behavior of the Slurm provisioner beyond the conformance suite, with a real controller."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from spotfit.core.ids import Token
from spotfit.host.system import new_run_id, wall_ms
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, NodeState
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_provisioners.slurm.provisioner import SlurmProvisioner
from tests.slurm_cluster import SlurmCluster, requires_slurm, run_slurm_cluster
from tests.unit.provisioners.waiting import until

pytestmark = [requires_slurm, pytest.mark.real_time("a real Slurm uses real time")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with run_slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def provisioner(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SlurmProvisioner:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return SlurmProvisioner.with_options(
        python=sys.executable, work_dir=str(tmp_path), output="%a.log", grace_s=5.0
    )


@pytest.fixture
def launch(tmp_path: Path) -> AgentLaunchSpec:
    return AgentLaunchSpec(str(tmp_path), new_run_id(), "the secret itself")


def a_plan(provisioner: SlurmProvisioner, token: str, command: str) -> GroupPlan:
    """Submit a group of two tasks that run `command` instead of an agent."""
    plan = provisioner.plan(GroupRequest(token=Token(token), num_workers=2, total_workers=2))
    script = f"#!/bin/bash\n{command}\n"
    return msgspec.structs.replace(plan, body={**plan.body, "script": script})


def submit_group(
    provisioner: SlurmProvisioner, plan: GroupPlan, launch: AgentLaunchSpec
) -> GroupHandle:
    handle = provisioner.submit(plan, launch)
    assert isinstance(handle, GroupHandle)
    return handle


def test_tasks_get_their_secret_and_index_and_have_times(
    cluster: SlurmCluster, provisioner: SlurmProvisioner, launch: AgentLaunchSpec, tmp_path: Path
) -> None:
    submitted_at_s = wall_ms() // 1000
    handle = submit_group(provisioner, a_plan(provisioner, "t-1", "env; exit 75"), launch)
    until(lambda: provisioner.observe(handle).is_terminated)
    (node, _) = provisioner.observe(handle).nodes
    assert node.started_at_ms is not None
    assert node.ended_at_ms is not None
    assert submitted_at_s * 1000 <= node.started_at_ms <= node.ended_at_ms <= wall_ms()
    result = (tmp_path / "1.log").read_text()
    assert "SPOTFIT_RUN_SECRET=the secret itself" in result
    assert "SLURM_ARRAY_TASK_ID=1" in result
    assert provisioner.observe(handle).nodes[0].reason == "FAILED, exit code 75"
    assert provisioner.observe(handle).nodes[0].state == NodeState.FAILED
    shown = cluster.run_command("scontrol", "show", "job", handle.name)
    assert "t-1" in shown
    assert "the secret itself" not in shown


def test_concurrent_submissions_get_one_group(
    cluster: SlurmCluster, provisioner: SlurmProvisioner, launch: AgentLaunchSpec
) -> None:
    plan = a_plan(provisioner, "t-2", "exec sleep 100")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: submit_group(provisioner, plan, launch), range(2))
    assert first == second
    until(lambda: len(cluster.running_jobs()) == 2)
    provisioner.cancel(first)
    until(lambda: provisioner.observe(first).is_terminated)
    assert not cluster.running_jobs()


def test_interrupted_submission_is_completed_by_the_next(
    provisioner: SlurmProvisioner, launch: AgentLaunchSpec
) -> None:
    plan = a_plan(provisioner, "t-3", "exit 0")
    held = provisioner._client.submit_held(plan.body["arguments"], plan.body["script"], {})
    handle = submit_group(provisioner, plan, launch)
    assert handle.name == str(held)
    until(lambda: provisioner.observe(handle).is_terminated)


def test_output_of_a_task_is_read_from_its_file(
    provisioner: SlurmProvisioner, launch: AgentLaunchSpec, tmp_path: Path
) -> None:
    handle = submit_group(provisioner, a_plan(provisioner, "t-4", "echo no module; exit 1"), launch)
    until(lambda: provisioner.observe(handle).is_terminated)
    [output] = provisioner.fetch_machine_output(handle, 1, max_lines=5)
    assert (output.source, output.lines) == (str(tmp_path / "1.log"), ("no module",))
    unknown_job = msgspec.structs.replace(handle, name="999999")
    assert provisioner.fetch_machine_output(unknown_job, 0, max_lines=5)[0].lines == ("no module",)
    other_work_dir = SlurmProvisioner.with_options(work_dir=str(tmp_path / "none"))
    assert (
        "missing on this machine"
        in other_work_dir.fetch_machine_output(unknown_job, 0, max_lines=5)[0].source
    )
