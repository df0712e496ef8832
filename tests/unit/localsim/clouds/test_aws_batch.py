"""AWS Batch on loopback, where it is odd in the way AWS is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.host.system import SystemClock
from spotfit_localsim.clouds import aws_batch as wire
from spotfit_localsim.clouds.aws_batch import _TOKEN, REGION
from spotfit_localsim.clouds.http_server import WireRequest
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator

boto3 = pytest.importorskip("boto3")
pytestmark = pytest.mark.real_time("a simulated cloud lives in real time")


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


def submit(sim: Simulator, command: str = "exec sleep 100", **more: Any) -> str:
    batch = client(sim)
    definition = batch.register_job_definition(
        jobDefinitionName="d",
        type="container",
        containerProperties={"image": "i", "command": ["/bin/sh", "-c", command]},
    )["jobDefinitionArn"]
    told = batch.submit_job(jobName="job", jobQueue="spot", jobDefinition=definition, **more)
    return str(told["jobId"])


def until(sim: Simulator, job: str, status: str) -> dict[str, Any]:
    clock, batch = SystemClock(), client(sim)
    give_up_at = clock.now() + 20
    while True:
        (found,) = batch.describe_jobs(jobs=[job])["jobs"]
        if found["status"] == status:
            return dict(found)
        assert clock.now() < give_up_at, found
        clock.wait(0.02)


def test_the_parent_of_an_array_is_pending_while_its_children_run(sim: Simulator) -> None:
    job = submit(sim, arrayProperties={"size": 2})
    until(sim, f"{job}:1", "RUNNING")
    parent = until(sim, job, "PENDING")
    assert parent["arrayProperties"]["size"] == 2


def test_a_child_knows_its_number_and_what_it_prints_can_be_read_later(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "LOG_DELAY_S", 1_000_000.0)
    job = submit(sim, "echo I am $AWS_BATCH_JOB_ARRAY_INDEX", arrayProperties={"size": 2})
    ended = until(sim, f"{job}:1", "SUCCEEDED")
    stream = ended["attempts"][0]["container"]["logStreamName"]
    logs = client(sim, "logs")
    which = {"logGroupName": "/aws/batch/job", "logStreamName": stream}
    with pytest.raises(logs.exceptions.ResourceNotFoundException):
        logs.get_log_events(**which)
    monkeypatch.setattr(wire, "LOG_DELAY_S", 0.0)
    assert [one["message"] for one in logs.get_log_events(**which)["events"]] == ["I am 1"]


def test_to_cancel_what_runs_does_nothing_and_says_that_all_is_well(sim: Simulator) -> None:
    job = submit(sim)
    until(sim, job, "RUNNING")
    client(sim).cancel_job(jobId=job, reason="x")
    assert until(sim, job, "RUNNING")
    client(sim).terminate_job(jobId=job, reason="enough")
    assert until(sim, job, "FAILED")["statusReason"] == "enough"


@pytest.mark.parametrize(
    "more",
    [
        {"arrayProperties": {"size": 1}},
        {"containerOverrides": {"environment": [{"name": "AWS_BATCH_X", "value": "1"}]}},
    ],
)
def test_what_aws_refuses_is_refused(sim: Simulator, more: dict[str, Any]) -> None:
    batch = client(sim)
    with pytest.raises(batch.exceptions.ClientException):
        submit(sim, **more)


def test_without_a_token_the_metadata_service_tells_nothing(sim: Simulator) -> None:
    submit(sim)
    clock = SystemClock()
    while not (
        up := [machine for machine in sim.datacenter.active_machines() if machine.state == "up"]
    ):
        clock.wait(0.02)

    def ask(path: str, method: str = "GET", **headers: str) -> int:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        reply = sim.cloud.answer_metadata(up[0], WireRequest(method, path, {}, named, b""))
        return reply.status if reply else 404

    action = "/latest/meta-data/spot/instance-action"
    assert ask(action) == 401
    assert ask("/latest/api/token", "PUT") == 400
    assert ask(action, x_aws_ec2_metadata_token=_TOKEN) == 404
    advice = "/latest/meta-data/events/recommendations/rebalance"
    assert ask(advice, x_aws_ec2_metadata_token=_TOKEN) == 404
    sim.datacenter.advise(up[0])
    assert ask(advice, x_aws_ec2_metadata_token=_TOKEN) == 200
    assert ask(action, x_aws_ec2_metadata_token=_TOKEN) == 404
    sim.datacenter.reclaim(up[0], notice=True)
    assert ask(action, x_aws_ec2_metadata_token=_TOKEN) == 200
