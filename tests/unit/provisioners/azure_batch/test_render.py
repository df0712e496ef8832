"""Rendering of Azure Batch requests."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest
from spotfit.provision.launch import AgentLaunchSpec
from spotfit_localsim.clouds.azure_autoscale import evaluate
from spotfit_provisioners.azure_batch import render
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.azure_batch.render import (
    autoscale_formula,
    job_id,
    plan,
    pool_id,
    task_request,
)
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"
TOKEN = Token("t-0123456789ab")
ENDPOINT = "https://training.westeurope.batch.azure.com"
GROUP = "/subscriptions/0/resourceGroups/training/providers"
THERE = AzureBatchOptions(endpoint=ENDPOINT, image="registry/spotfit:1", pool="spot")
MADE = AzureBatchOptions(
    endpoint=ENDPOINT,
    image="training.azurecr.io/spotfit:1-cuda",
    registry="training.azurecr.io",
    account_id=f"{GROUP}/Microsoft.Batch/batchAccounts/training",
    identity=f"{GROUP}/Microsoft.ManagedIdentity/userAssignedIdentities/agents",
    identity_client_id="11111111-2222-3333-4444-555555555555",
    vm_size="Standard_NC64as_T4_v3",
    subnet=f"{GROUP}/Microsoft.Network/virtualNetworks/training/subnets/nodes",
    public_ip=False,
    max_nodes=20,
    workers_per_node=4,
    container_options=("--volume=/mnt/data:/data",),
    resource_files=("https://training.blob.core.windows.net/certificates/our%20ca.pem",),
    labels={"team": "vision"},
)
LAUNCH = AgentLaunchSpec(
    "az://runs/digits", RunId("r" * 32), "secret", ("azure", "signal"), "torch"
)


def a_request(workers: int = 4, **resources: float) -> GroupRequest:
    return GroupRequest(
        token=TOKEN,
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=resources,
        run_name="Digits 1",
    )


@pytest.mark.parametrize(
    ("name", "request_", "options"),
    [
        ("plain", a_request(1), THERE),
        ("several", a_request(4, CPU=2.0), THERE),
        ("gpus", a_request(8, GPU=1.0, CPU=6.0), MADE),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: AzureBatchOptions
) -> None:
    golden.check_golden(plan(request_, options), GOLDEN / f"plan_{name}.json")


def test_task_matches_its_golden_file_and_azures_types() -> None:
    planned = plan(a_request(8, GPU=1.0), MADE)
    result = task_request(planned, 1, LAUNCH.environment_for(TOKEN, 1, planned.slots_per_node))
    golden.check_golden(result, GOLDEN / "task_gpus.json")
    models = pytest.importorskip("azure.batch.models")
    read = models.BatchTaskCreateOptions(result)
    settings = {one.name: one.value for one in read.environment_settings}
    assert settings["SPOTFIT_NODE"] == "1"
    assert settings["AZURE_CLIENT_ID"] == MADE.identity_client_id
    assert read.constraints.max_task_retry_count == 0
    assert read.container_settings.registry.identity_reference.resource_id == MADE.identity
    job = models.BatchJobCreateOptions(planned.body["job"])
    assert job.pool_info.pool_id == pool_id(MADE)
    assert job.all_tasks_complete_mode == models.BatchAllTasksCompleteMode.NO_ACTION


def test_groups_with_equal_machines_share_a_pool() -> None:
    """Only nodes of one pool reach each other, and a replacement is another group."""
    names = {plan(a_request(n), MADE).body["job"]["poolInfo"]["poolId"] for n in (4, 8)}
    assert names == {pool_id(MADE)}
    assert pool_id(MADE) != pool_id(AzureBatchOptions(vm_size="Standard_D4s_v5"))
    assert pool_id(THERE) == "spot"
    assert job_id(TOKEN) == "t-0123456789ab"


@pytest.mark.parametrize(
    ("samples", "target"),
    [([], 3), ([0], 0), ([0, 0, 0, 0, 2], 2), ([2, 0, 0, 0], 2), ([9, 0, 0, 0, 0], 0), ([50], 20)],
)
def test_autoscale_formula_follows_the_number_of_tasks(
    samples: Sequence[float], target: int
) -> None:
    metrics = {"$PendingTasks": samples, "$PreemptedNodeCount": []}
    result = evaluate(autoscale_formula(20, initial_nodes=3), metrics)
    assert result["$TargetLowPriorityNodes"] == target
    assert result["$TargetDedicatedNodes"] == 0
    assert result["$NodeDeallocationOption"] == "taskcompletion"


@pytest.mark.parametrize(
    ("pending", "preempted", "target"), [(2, 0, 2), (2, 1, 3), (20, 2, 22), (0, 2, 0)]
)
def test_autoscale_formula_adds_a_node_for_each_preempted_one(
    pending: int, preempted: int, target: int
) -> None:
    """Preempted nodes stay in the pool, where they count against its target."""
    metrics = {"$PendingTasks": [pending] * 9, "$PreemptedNodeCount": [0, preempted]}
    result = evaluate(autoscale_formula(20), metrics)
    assert result["$TargetLowPriorityNodes"] == target


class Machine:
    """Execute the command of a task with an agent that exits with the given codes in turn."""

    def __init__(self, folder: Path, *codes: int) -> None:
        self._folder = folder
        (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        agent = folder / "python"
        agent.write_text(
            "#!/bin/sh\n"
            'trap "echo TERM >> signals; exit 85" TERM\n'
            "echo started >> starts\n"
            "code=$(sed -n $(wc -l < starts)p codes)\n"
            "[ $code != stay ] || while :; do sleep 0.01; done\n"
            "exit $code\n"
        )
        agent.chmod(0o755)

    def start(self) -> subprocess.Popen[bytes]:
        arguments = shlex.split(render.COMMAND_LINE.replace("sleep 120", "sleep 0.01"))
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(arguments, cwd=self._folder, env={**os.environ, "PATH": path})

    def lines(self, name: str) -> int:
        path = self._folder / name
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("codes", "ends_with"), [((0,), 0), ((75,), 75), ((70,), 70), ((85, 85, 75), 75)]
)
@pytest.mark.real_time("a shell waits for its children")
def test_only_a_drained_agent_is_restarted(
    tmp_path: Path, codes: tuple[int, ...], ends_with: int
) -> None:
    """Batch requeues only tasks that still run when their node is lost."""
    machine = Machine(tmp_path, *codes)
    assert machine.start().wait(30) == ends_with
    assert machine.lines("starts") == len(codes)


@pytest.mark.real_time("a shell waits for its children")
def test_terminated_task_ends_its_agent_without_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "codes").write_text("stay\n")
    shell = machine.start()
    while not machine.lines("starts"):
        assert shell.poll() is None
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(30) == 85
    assert (machine.lines("signals"), machine.lines("starts")) == (1, 1)


@pytest.mark.parametrize(
    ("request_", "options", "expected"),
    [
        (a_request(), AzureBatchOptions(pool="spot"), "endpoint, image not set"),
        (
            a_request(),
            AzureBatchOptions(endpoint=ENDPOINT, image="i"),
            "account_id, vm_size, identity not set",
        ),
        (a_request(4, TPU=1.0), THERE, "does not support the resource TPU"),
        (a_request(101), THERE, "allows at most 100"),
    ],
)
def test_unsupported_requests_are_rejected(
    request_: GroupRequest, options: AzureBatchOptions, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(request_, options)


def test_jobs_and_pools_have_metadata_for_costs() -> None:
    """A pool is shared by runs and users, so it has only the project and labels of the user."""
    options = replace(MADE, user="Jane", cost_project="Vision", labels={"team": "a"})
    body = plan(a_request(), options).body
    assert {entry["name"]: entry["value"] for entry in body["job"]["metadata"]} == {
        "team": "a",
        "spotfit-run": "digits-1",
        "spotfit-user": "jane",
        "spotfit-project": "vision",
    }
    assert body["pool"]["body"]["properties"]["metadata"] == [
        {"name": "team", "value": "a"},
        {"name": "spotfit-project", "value": "vision"},
    ]
    assert pool_id(options) == pool_id(replace(options, user="Joe"))
    assert pool_id(options) != pool_id(replace(options, cost_project="Other"))


def test_nodes_run_an_image_that_batch_supports_beyond_june_2027() -> None:
    """Support of Ubuntu 22.04 ends: https://github.com/Azure/Batch/issues/200."""
    configuration = plan(a_request(), MADE).body["pool"]["body"]["properties"][
        "deploymentConfiguration"
    ]["virtualMachineConfiguration"]
    assert configuration["imageReference"]["sku"] == "2404"
    assert configuration["nodeAgentSkuId"] == "batch.node.ubuntu 24.04"


def test_a_time_limit_is_the_wall_clock_time_of_the_task() -> None:
    planned = plan(structs.replace(a_request(2), time_limit_s=7200), THERE)
    golden.check_golden(planned, GOLDEN / "plan_time_limit.json")
    duration = planned.body["task"]["constraints"]["maxWallClockTime"]
    isodate = pytest.importorskip("isodate")
    assert isodate.parse_duration(duration).total_seconds() == 7200.0
