"""The simulated AWS Batch reproduces documented and observed deviations of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds import aws_batch as module_under_test
from spotfit_localsim.clouds.aws_batch import _TOKEN, REGION
from spotfit_localsim.clouds.http_server import WireRequest
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

boto3 = pytest.importorskip("boto3")
pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path, SimOptions(cloud="aws_batch", boot_s=0.0)) as simulator:
        yield simulator


def client(sim: Simulator, service: str = "batch") -> Any:
    return boto3.client(
        service,
        endpoint_url=sim.server.url,
        region_name=REGION,
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )


def register(sim: Simulator, command: str) -> str:
    response = client(sim).register_job_definition(
        jobDefinitionName="d",
        type="container",
        containerProperties={
            "image": "i",
            "command": ["/bin/sh", "-c", command],
            "resourceRequirements": [
                {"type": "VCPU", "value": "1"},
                {"type": "MEMORY", "value": "2048"},
            ],
        },
    )
    return str(response["jobDefinitionArn"])


def submit(sim: Simulator, command: str = "exec sleep 100", **more: Any) -> str:
    names = {"jobName": "job", "jobQueue": "spot", "jobDefinition": register(sim, command)}
    return str(client(sim).submit_job(**{**names, **more})["jobId"])


def until(sim: Simulator, job: str, status: str) -> dict[str, Any]:
    clock, batch = SystemClock(), client(sim)
    deadline_s = clock.now() + 20
    while True:
        (found,) = batch.describe_jobs(jobs=[job])["jobs"]
        if found["status"] == status:
            return dict(found)
        assert clock.now() < deadline_s, found
        clock.wait(0.02)


def test_parent_of_an_array_job_is_pending_while_its_children_run(sim: Simulator) -> None:
    job = submit(sim, arrayProperties={"size": 2})
    until(sim, f"{job}:1", "RUNNING")
    parent = until(sim, job, "PENDING")
    assert parent["arrayProperties"]["size"] == 2


def test_child_job_gets_its_index_and_its_log_is_readable_after_a_delay(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "LOG_DELAY_S", 1_000_000.0)
    job = submit(sim, "echo I am $AWS_BATCH_JOB_ARRAY_INDEX", arrayProperties={"size": 2})
    ended = until(sim, f"{job}:1", "SUCCEEDED")
    stream = ended["attempts"][0]["container"]["logStreamName"]
    logs = client(sim, "logs")
    which = {"logGroupName": "/aws/batch/job", "logStreamName": stream}
    with pytest.raises(logs.exceptions.ResourceNotFoundException):
        logs.get_log_events(**which)
    monkeypatch.setattr(module_under_test, "LOG_DELAY_S", 0.0)
    assert [one["message"] for one in logs.get_log_events(**which)["events"]] == ["I am 1"]


def test_reads_do_not_show_a_submitted_job_before_the_lag_is_over(tmp_path: Path) -> None:
    clock = SystemClock()
    options = SimOptions(cloud="aws_batch", boot_s=0.0, lag_s=1_000_000.0)
    with running_simulator(tmp_path, options) as sim:
        batch, job = client(sim), submit(sim)
        assert batch.describe_jobs(jobs=[job])["jobs"] == []
        by_name = {"name": "JOB_NAME", "values": ["job"]}
        assert batch.list_jobs(jobQueue="spot", filters=[by_name])["jobSummaryList"] == []
        deadline_s = clock.now() + 20
        while not sim.datacenter.active_machines():
            assert clock.now() < deadline_s, "a write takes effect at once"
            clock.wait(0.02)
        batch.terminate_job(jobId=job, reason="x")


@pytest.mark.parametrize(
    ("chosen", "variables"), [({}, set()), ({"sets_region": True}, {"AWS_REGION"})]
)
def test_machines_have_the_region_only_if_chosen(
    tmp_path: Path, chosen: dict[str, Any], variables: set[str]
) -> None:
    """ECS agents before 1.104.0 set none: https://github.com/aws/amazon-ecs-agent/pull/4946."""
    options = SimOptions(cloud="aws_batch", boot_s=0.0, **chosen)
    with running_simulator(tmp_path, options) as sim:
        job = submit(sim)
        until(sim, job, "RUNNING")
        (machine,) = sim.datacenter.active_machines()
        environment = sim.cloud.task_environment(machine)
        assert {name for name in environment if "REGION" in name} == variables


def test_cancelling_a_running_job_has_no_effect_and_raises_no_error(sim: Simulator) -> None:
    job = submit(sim)
    until(sim, job, "RUNNING")
    client(sim).cancel_job(jobId=job, reason="x")
    assert until(sim, job, "RUNNING")
    client(sim).terminate_job(jobId=job, reason="stop")
    assert until(sim, job, "FAILED")["statusReason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"arrayProperties": {"size": 1}},
        {"containerOverrides": {"environment": [{"name": "AWS_BATCH_X", "value": "1"}]}},
    ],
)
def test_invalid_job_is_rejected(sim: Simulator, fields: dict[str, Any]) -> None:
    batch = client(sim)
    with pytest.raises(batch.exceptions.ClientException):
        submit(sim, **fields)


def test_metadata_service_requires_a_session_token(sim: Simulator) -> None:
    submit(sim)
    clock = SystemClock()
    while not (
        up := [machine for machine in sim.datacenter.active_machines() if machine.state == "up"]
    ):
        clock.wait(0.02)

    def get_status(path: str, method: str = "GET", **headers: str) -> int:
        header_fields = {name.replace("_", "-"): text for name, text in headers.items()}
        reply = sim.cloud.answer_metadata(up[0], WireRequest(method, path, {}, header_fields, b""))
        return reply.status if reply else 404

    action = "/latest/meta-data/spot/instance-action"
    assert get_status(action) == 401
    assert get_status("/latest/api/token", "PUT") == 400
    assert get_status(action, x_aws_ec2_metadata_token=_TOKEN) == 404
    advice = "/latest/meta-data/events/recommendations/rebalance"
    assert get_status(advice, x_aws_ec2_metadata_token=_TOKEN) == 404
    sim.datacenter.advise(up[0])
    assert get_status(advice, x_aws_ec2_metadata_token=_TOKEN) == 200
    assert get_status(action, x_aws_ec2_metadata_token=_TOKEN) == 404
    sim.datacenter.reclaim(up[0], notice=True)
    assert get_status(action, x_aws_ec2_metadata_token=_TOKEN) == 200


def listed(sim: Simulator, name: str) -> list[str]:
    pages = client(sim).get_paginator("list_jobs")
    found = pages.paginate(jobQueue="spot", filters=[{"name": "JOB_NAME", "values": [name]}])
    return [job["jobId"] for page in found for job in page["jobSummaryList"]]


def test_name_filter_ignores_case_allows_an_asterisk_and_lists_the_newest_first(
    sim: Simulator,
) -> None:
    """As the documentation of `filters` in botocore's model says."""
    first, second = submit(sim, jobName="Test1"), submit(sim, jobName="test1")
    third = submit(sim, jobName="Test10")
    assert listed(sim, "TEST1") == [second, first]
    assert listed(sim, "test1*") == [third, second, first]
    assert listed(sim, "test") == []


@pytest.mark.parametrize("name", ["d", "d:2", "arn:aws:batch:{r}:000000000000:job-definition/d"])
def test_definition_is_found_by_name_and_without_revision_the_latest(
    sim: Simulator, name: str
) -> None:
    submit(sim)
    latest = register(sim, "exit 0")
    batch = client(sim)
    requested = name.format(r=REGION)
    job = batch.submit_job(jobName="j", jobQueue="spot", jobDefinition=requested)["jobId"]
    assert batch.describe_jobs(jobs=[job])["jobs"][0]["jobDefinition"] == latest
    with pytest.raises(batch.exceptions.ClientException, match="not in ACTIVE status"):
        batch.submit_job(jobName="j", jobQueue="spot", jobDefinition="d:3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"jobName": "a.b"}, "Job name should match valid pattern"),
        ({"jobName": "a" * 129}, "Job name should match valid pattern"),
        ({"jobQueue": "none"}, "JobQueue none not found"),
        ({"arrayProperties": {"size": 10_001}}, "Array size"),
        ({"retryStrategy": {"attempts": 11}}, "attempts must be between 1 and 10"),
        ({"shareIdentifier": "a"}, "no scheduling policy"),
        ({"timeout": {"attemptDurationSeconds": 59}}, "at least 60 seconds"),
        (
            {"retryStrategy": {"attempts": 1, "evaluateOnExit": [{"action": "EXIT"}] * 6}},
            "at most 5",
        ),
        (
            {
                "retryStrategy": {
                    "attempts": 1,
                    "evaluateOnExit": [{"onStatusReason": "Host*EC2", "action": "EXIT"}],
                }
            },
            "should match valid pattern",
        ),
    ],
)
def test_documented_limits_of_jobs_are_enforced(
    sim: Simulator, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(client(sim).exceptions.ClientException, match=message):
        submit(sim, **fields)


def test_container_without_image_is_rejected(sim: Simulator) -> None:
    batch = client(sim)
    with pytest.raises(batch.exceptions.ClientException, match="image is required"):
        batch.register_job_definition(
            jobDefinitionName="d", type="container", containerProperties={"command": ["true"]}
        )
