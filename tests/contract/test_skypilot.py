"""SkyPilot through its SDK against its API server, with moto in place of AWS. `make sky-api`.

Machines are tested in tests/live/test_skypilot.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import InfrastructureError, ProvisionError
from spotfit.core.ids import Token
from spotfit.host import system
from spotfit.host.system import SystemClock
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, NodeState
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_provisioners.skypilot.provisioner import SkyPilotProvisioner
from tests.skypilot_server import requires_skypilot, run_skypilot_server_on_aws

pytestmark = [
    requires_skypilot,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # SkyPilot's dependencies define futures as well
]

_TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_skypilot_server_on_aws(tmp_path_factory.mktemp("sky")) as address:
        yield address


By = Callable[..., SkyPilotProvisioner]


@pytest.fixture
def by(server: str) -> By:
    def make(**options: Any) -> SkyPilotProvisioner:
        return SkyPilotProvisioner.with_options(
            **{"infra": ("aws/us-east-1",), "endpoint": server, **options}
        )

    return make


@pytest.fixture
def launch(tmp_path: Path) -> AgentLaunchSpec:
    return AgentLaunchSpec(str(tmp_path / "run"), system.new_run_id(), "the secret itself")


def a_plan(provisioner: SkyPilotProvisioner, workers: int = 1, **resources: float) -> GroupPlan:
    token = Token(f"t-{uuid.uuid4().hex[:12]}")
    return provisioner.plan(
        GroupRequest(
            token=token,
            num_workers=workers,
            total_workers=workers,
            resources_per_worker=resources,
            run_name="suite",
        )
    )


def granted(
    provisioner: SkyPilotProvisioner, plan: GroupPlan, launch: AgentLaunchSpec
) -> GroupHandle:
    handle = provisioner.submit(plan, launch)
    assert isinstance(handle, GroupHandle)
    return handle


def until(
    provisioner: SkyPilotProvisioner,
    handle: GroupHandle,
    condition: Callable[[GroupStatus], object],
) -> GroupStatus:
    clock = SystemClock()
    deadline = clock.now() + _TIMEOUT_S
    while not condition(status := provisioner.observe(handle)):
        assert clock.now() < deadline, f"it has not happened: {status}"
        clock.wait(1.0)
    return status


def test_doctor_finds_server_cloud_and_machine(by: By) -> None:
    checks = list(by().check_account())
    assert [check.passed for check in checks] == [True, True, True], checks
    _, clouds, _ = by(infra=("gcp",)).check_account()
    assert not clouds.passed
    assert "gcp" in clouds.detail


def test_machine_in_no_catalog_is_rejected(by: By, launch: AgentLaunchSpec) -> None:
    provisioner = by(accelerator="H100")
    with pytest.raises(ProvisionError, match="H100") as error_info:
        provisioner.submit(a_plan(provisioner, GPU=8.0), launch)
    assert "show-gpus" in error_info.value.do


def test_spot_gpus_are_found_in_either_infrastructure(by: By) -> None:
    provisioner = by(accelerator="V100", infra=("aws/us-east-1", "aws/us-west-2"), spot="preferred")
    plan = a_plan(provisioner, GPU=1.0)
    provisioner._client.check_catalog({**plan.body["task"], "name": "t"})


def test_concurrent_submissions_get_one_group_that_can_be_cancelled(
    by: By, launch: AgentLaunchSpec
) -> None:
    """Every launch at moto ends without capacity, which is reported as such."""
    provisioner = by()
    plan = a_plan(provisioner, 2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: granted(provisioner, plan, launch), range(2))
    assert first == second
    assert granted(provisioner, plan, launch) == first
    active_jobs = [
        job for job in provisioner._client.list_jobs(f"{plan.token}-") if not job.is_over
    ]
    names = [job.name for job in active_jobs if job.state != "CANCELLING"]
    assert sorted(names) == [f"{plan.token}-0", f"{plan.token}-1"]
    status = until(provisioner, first, lambda status: status.refusal)
    assert all(node.state == NodeState.WAITING for node in status.nodes)
    waiting_job = next(job.id for job in active_jobs if job.state != "CANCELLING")
    assert f"sky jobs logs {waiting_job}" not in output_sources(provisioner, first), (
        "the output belongs to its machine"
    )
    provisioner.cancel(first)
    until(provisioner, first, lambda status: status.is_terminated)
    assert f"sky jobs logs {waiting_job}" in output_sources(provisioner, first)
    provisioner.cancel(first)
    assert provisioner.observe(granted(provisioner, plan, launch)).is_terminated, (
        "the group is not submitted again"
    )


def output_sources(provisioner: SkyPilotProvisioner, handle: GroupHandle) -> list[str]:
    """Return where the output of the group's machines is stored."""
    return [
        output.source
        for node in range(2)
        for output in provisioner.fetch_machine_output(handle, node, max_lines=5)
    ]


def test_failed_cluster_has_its_reason_and_submission_is_idempotent(
    by: By, launch: AgentLaunchSpec
) -> None:
    provisioner = by(launch_mode="clusters")
    plan = a_plan(provisioner)
    handle = granted(provisioner, plan, launch)
    assert granted(provisioner, plan, launch) == handle
    status = until(provisioner, handle, lambda status: status.is_terminated)
    assert "FAILED" in status.refusal
    assert len(provisioner._client.list_launches(f"{plan.token}-0")) == 1
    provisioner.cancel(handle)


def test_unknown_group_is_gone(by: By) -> None:
    for via in ("jobs", "clusters"):
        provisioner = by(launch_mode=via)
        token = "t-0123456789ab"
        handle = GroupHandle(
            token=Token(token),
            provisioner="skypilot",
            name=token,
            detail={"nodes": 2, "launch_mode": via},
        )
        assert provisioner.observe(handle).is_terminated
        provisioner.cancel(handle)


def test_clusters_of_others_have_no_usage(by: By) -> None:
    assert by()._client.cluster_usage(["t-0123456789ab-0"]) == {}


def test_unresponsive_server_is_transient() -> None:
    """In a separate process, because SkyPilot caches the first address."""
    script = (
        "from spotfit_provisioners.skypilot.client import SkyPilotClient\n"
        "try: SkyPilotClient('http://127.0.0.1:1', request_timeout_s=60).list_jobs('t-')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    assert InfrastructureError.__name__ in _run(script, {})


def test_missing_server_names_the_command(tmp_path: Path) -> None:
    script = (
        "from spotfit_provisioners.skypilot.client import SkyPilotClient\n"
        "try: SkyPilotClient('', request_timeout_s=60).list_jobs('t-')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    output = _run(script, {"HOME": str(tmp_path), "SKYPILOT_API_SERVER_LOCAL_PORT": "1"})
    assert output.startswith(ProvisionError.__name__)
    assert "sky api start" in output


def _run(script: str, environment: dict[str, str]) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SKYPILOT_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout.strip()
