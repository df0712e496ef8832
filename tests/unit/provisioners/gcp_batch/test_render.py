"""Rendering of Google Cloud Batch requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest
from spotfit.provision.launch import AgentExitCode, AgentLaunchSpec
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.gcp_batch.render import (
    RETRIED_EXIT_CODES,
    TASK_INDEX_VARIABLE,
    job_id,
    job_request,
    max_nodes,
    plan,
    request_id,
)
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"
TOKEN = Token("t-0123456789ab")
OPTIONS = GcpBatchOptions(region="us-central1", image="registry/spotfit:1")
GPUS = GcpBatchOptions(
    region="us-central1",
    zones=("us-central1-a", "us-central1-c"),
    image="registry/spotfit:1-cuda",
    service_account="agents@p.iam.gserviceaccount.com",
    machine_type="n1-standard-32",
    accelerator="nvidia-tesla-t4",
    boot_disk_gb=200,
    network="global/networks/training",
    subnetwork="regions/us-central1/subnetworks/training",
    external_ip=False,
    workers_per_node=4,
    shared_memory_mib=32_768,
    max_retries=3,
    cloud_logging=False,
    labels={"team": "vision"},
)
TEMPLATE = GcpBatchOptions(
    region="us-central1",
    image="registry/spotfit:1",
    instance_template="early-notice",
    notice_s=120.0,
)
LAUNCH = AgentLaunchSpec("gs://bucket/run", RunId("r" * 32), "secret", ("gcp", "signal"), "torch")


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
        ("plain", a_request(1), OPTIONS),
        ("several", a_request(4, CPU=2.0), OPTIONS),
        ("gpus", a_request(8, GPU=1.0, CPU=6.0, memory=24 * 2**30), GPUS),
        ("template", a_request(2), TEMPLATE),
        # The usual line of Ray: ScalingConfig(num_workers=2, use_gpu=True).
        (
            "gpus_only",
            a_request(2, GPU=1.0),
            GcpBatchOptions(region="r", image="i", accelerator="nvidia-tesla-t4"),
        ),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: GcpBatchOptions
) -> None:
    golden.check_golden(plan(request_, options), GOLDEN / f"plan_{name}.json")


def test_request_fits_the_machine_type_that_the_user_has_chosen() -> None:
    """Batch never starts a task that needs more than its machine has."""
    options = GcpBatchOptions(region="r", image="i", machine_type="n1-standard-2", accelerator="t4")
    (group,) = plan(a_request(1, GPU=1.0), options).body["taskGroups"]
    needs = group["taskSpec"]["computeResource"]
    assert needs == {"cpuMilli": "1000", "memoryMib": "3072"}


def test_job_matches_its_golden_file_and_googles_types() -> None:
    planned = plan(a_request(8, GPU=1.0), GPUS)
    result = job_request(
        planned,
        LAUNCH.environment_for(
            TOKEN, 0, planned.slots_per_node, node_index_variable=TASK_INDEX_VARIABLE
        ),
    )
    golden.check_golden(result, GOLDEN / "job_gpus.json")
    batch = pytest.importorskip("google.cloud.batch_v1")
    read = batch.Job.from_json(msgspec.json.encode(result))
    (group,) = read.task_groups
    assert group.task_count == group.parallelism == 2
    assert group.task_count_per_node == 1
    model = read.allocation_policy.instances[0].policy.provisioning_model
    assert model == batch.AllocationPolicy.ProvisioningModel.SPOT


def test_template_settings_are_in_the_environment_of_agents() -> None:
    planned = plan(a_request(2), TEMPLATE)
    (group,) = job_request(planned, {"A": "b"})["taskGroups"]
    result = group["taskSpec"]["environment"]["variables"]
    assert result == {"A": "b", "SPOTFIT_SIGNAL_GRACE_S": "150"}


def test_equal_tokens_render_equal_jobs_and_requests() -> None:
    assert job_id(TOKEN) == "t-0123456789ab"
    assert request_id(TOKEN) == request_id(TOKEN) != request_id(Token("t-1"))


def test_only_lost_hosts_and_drained_agents_are_retried() -> None:
    """Exit codes that RETRY_TASK does not name fail the task, unlike with AWS Batch."""
    assert {50001, 50002, int(AgentExitCode.DRAINED)} <= set(RETRIED_EXIT_CODES)
    assert not set(RETRIED_EXIT_CODES) & {
        1,
        50000,
        50005,
        *(set(AgentExitCode) - {AgentExitCode.DRAINED}),
    }


def test_limit_of_machines_is_lower_for_one_zone() -> None:
    one_zone = GcpBatchOptions(region="us-central1", zones=("us-central1-a",), image="i")
    assert (max_nodes(one_zone), max_nodes(OPTIONS)) == (2_000, 4_000)


@pytest.mark.parametrize(
    ("request_", "options", "expected"),
    [
        (a_request(), GcpBatchOptions(), "region, image not set"),
        (a_request(4, TPU=1.0), OPTIONS, "does not support the resource TPU"),
        (a_request(4, GPU=1.0), OPTIONS, "no GPU type is set"),
        (a_request(4_001), OPTIONS, "allows at most 4000"),
    ],
)
def test_unsupported_requests_are_rejected(
    request_: GroupRequest, options: GcpBatchOptions, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(request_, options)


def test_vms_run_the_image_for_which_firewall_and_drivers_are_set_up() -> None:
    """Values of `AllocationPolicy.Disk.image` are listed in its documentation."""
    [instance] = plan(a_request(), OPTIONS).body["allocationPolicy"]["instances"]
    assert instance["policy"]["bootDisk"] == {"image": "batch-cos"}
    batch_v1 = pytest.importorskip("google.cloud.batch_v1")
    assert "batch-cos" in str(batch_v1.AllocationPolicy.Disk.__doc__)
    chosen = plan(a_request(), replace(OPTIONS, boot_image=""))
    assert "bootDisk" not in chosen.body["allocationPolicy"]["instances"][0]["policy"]


def test_boot_disk_has_space_for_a_cuda_image() -> None:
    options = replace(GPUS, boot_disk_gb=0)
    [instance] = plan(a_request(4, GPU=1.0), options).body["allocationPolicy"]["instances"]
    assert instance["policy"]["bootDisk"]["sizeGb"] == "100"


def test_jobs_and_vms_have_labels_for_costs() -> None:
    options = replace(OPTIONS, user="Jane.Doe", cost_project="Vision 2")
    body = plan(a_request(), options).body
    expected = {
        "spotfit-run": "digits-1",
        "spotfit-user": "jane-doe",
        "spotfit-project": "vision-2",
    }
    assert body["allocationPolicy"]["labels"] == expected
    assert body["labels"] == {**expected, "spotfit-token": "t-0123456789ab"}


def test_a_time_limit_is_the_run_duration_of_the_task() -> None:
    planned = plan(structs.replace(a_request(2), time_limit_s=7200), OPTIONS)
    golden.check_golden(planned, GOLDEN / "plan_time_limit.json")
    batch = pytest.importorskip("google.cloud.batch_v1")
    [group] = planned.body["taskGroups"]
    spec = batch.TaskSpec.from_json(msgspec.json.encode(group["taskSpec"]))
    assert spec.max_run_duration.total_seconds() == 7200.0
