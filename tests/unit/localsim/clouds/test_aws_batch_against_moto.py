"""The simulated AWS Batch and moto's, an independent double, answer the same requests alike.

`DIFFERENCES` lists what differs, with the documentation that decides. An undocumented difference
fails; so does one that does not exist any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit_localsim.clouds.aws_batch import REGION
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import running_simulator

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto")
pytest.importorskip("botocore")
pytestmark = pytest.mark.real_time("a simulated cloud runs in real time")

_CONTAINER = {
    "image": "i",
    "command": ["sleep", "100"],
    "resourceRequirements": [
        {"type": "VCPU", "value": "1"},
        {"type": "MEMORY", "value": "2048"},
    ],
}
_DEFINITION = {
    "jobDefinitionName": "d",
    "type": "container",
    "containerProperties": _CONTAINER,
}
_JOB = {"jobName": "j", "jobQueue": "spot", "jobDefinition": "d"}
_FILTER = {"name": "JOB_NAME", "values": ["nothing*"]}


def _container(**changes: Any) -> dict[str, Any]:
    return {**_DEFINITION, "containerProperties": {**_CONTAINER, **changes}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "register": ("register_job_definition", _DEFINITION),
    "register_without_image": ("register_job_definition", _container(image="")),
    "register_without_memory": (
        "register_job_definition",
        _container(resourceRequirements=[{"type": "VCPU", "value": "1"}]),
    ),
    "register_without_cpus": (
        "register_job_definition",
        _container(resourceRequirements=[{"type": "MEMORY", "value": "2048"}]),
    ),
    "register_without_container": (
        "register_job_definition",
        {"jobDefinitionName": "d", "type": "container"},
    ),
    "register_bad_name": ("register_job_definition", {**_DEFINITION, "jobDefinitionName": "a b"}),
    "register_attempts": (
        "register_job_definition",
        {**_DEFINITION, "retryStrategy": {"attempts": 11}},
    ),
    "describe_definitions": ("describe_job_definitions", {"jobDefinitionName": "d"}),
    "describe_unknown_definition": ("describe_job_definitions", {"jobDefinitionName": "none"}),
    "submit": ("submit_job", _JOB),
    "submit_array": ("submit_job", {**_JOB, "arrayProperties": {"size": 2}}),
    "submit_array_of_one": ("submit_job", {**_JOB, "arrayProperties": {"size": 1}}),
    "submit_unknown_queue": ("submit_job", {**_JOB, "jobQueue": "none"}),
    "submit_unknown_definition": ("submit_job", {**_JOB, "jobDefinition": "none"}),
    "submit_bad_name": ("submit_job", {**_JOB, "jobName": "a.b"}),
    "submit_long_name": ("submit_job", {**_JOB, "jobName": "a" * 129}),
    "submit_short_timeout": ("submit_job", {**_JOB, "timeout": {"attemptDurationSeconds": 5}}),
    "submit_attempts": ("submit_job", {**_JOB, "retryStrategy": {"attempts": 11}}),
    "submit_share": ("submit_job", {**_JOB, "shareIdentifier": "a"}),
    "list": ("list_jobs", {"jobQueue": "spot"}),
    "list_filtered": ("list_jobs", {"jobQueue": "spot", "filters": [_FILTER]}),
    "list_unknown_queue": ("list_jobs", {"jobQueue": "none"}),
    "list_nothing": ("list_jobs", {}),
    "describe_unknown_job": ("describe_jobs", {"jobs": ["11111111-1111-4111-8111-111111111111"]}),
    "terminate_unknown_job": ("terminate_job", {"jobId": "none", "reason": "r"}),
    "cancel_unknown_job": ("cancel_job", {"jobId": "none", "reason": "r"}),
    "describe_queues": ("describe_job_queues", {"jobQueues": ["spot"]}),
    "describe_unknown_queue": ("describe_job_queues", {"jobQueues": ["none"]}),
}
_REGISTERED = "ClientException / jobDefinitionArn, jobDefinitionName, revision"
_SUBMITTED = "ClientException / jobArn, jobId, jobName"
# simulated / moto. The limits are those of the documentation in botocore's model of Batch.
DIFFERENCES = {
    "register_without_image": _REGISTERED,  # "Required."; moto accepts an empty text
    "register_without_container": _REGISTERED,  # "one of the following is required"
    "register_bad_name": _REGISTERED,  # letters, numbers, hyphens and underscores
    "register_attempts": _REGISTERED,  # "between 1 and 10 attempts"
    "submit_array_of_one": _SUBMITTED,  # "between 2 and 10,000"
    "submit_bad_name": _SUBMITTED,  # letters, numbers, hyphens and underscores
    "submit_long_name": _SUBMITTED,  # "up to 128 letters long"
    "submit_short_timeout": _SUBMITTED,  # "The minimum value for the timeout is 60 seconds"
    "submit_attempts": _SUBMITTED,  # "between 1 and 10 attempts"
    "submit_share": _SUBMITTED,  # "Don't specify this parameter" without fair share
    "list": "jobSummaryList: 0 / jobSummaryList: 1",  # without jobStatus "only RUNNING jobs"
    "list_nothing": "ClientException / jobSummaryList: 0",  # "specify only one of"
    # Not documented; the provisioner accepts both.
    "terminate_unknown_job": "ClientException / ",
    "cancel_unknown_job": "ClientException / ",
}


@contextlib.contextmanager
def moto_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "simulated")
    # Without Docker: jobs end at once.
    with moto.mock_aws(config={"batch": {"use_docker": False}}):
        role = boto3.client("iam", "us-east-1").create_role(
            RoleName="r", AssumeRolePolicyDocument="{}"
        )["Role"]["Arn"]
        batch = boto3.client("batch", "us-east-1")
        environment = batch.create_compute_environment(
            computeEnvironmentName="spot", type="UNMANAGED", state="ENABLED", serviceRole=role
        )["computeEnvironmentArn"]
        batch.create_job_queue(
            jobQueueName="spot",
            state="ENABLED",
            priority=1,
            computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
        )
        yield batch


def outcome(batch: Any, case: str) -> str:
    """Return the code of the error, or the sizes of the lists in the answer and its members."""
    from botocore.exceptions import ClientError, ParamValidationError

    operation, arguments = CASES[case]
    call: Callable[..., Any] = getattr(batch, operation)
    batch.register_job_definition(**_DEFINITION)
    try:
        answer = call(**arguments)
    except ParamValidationError:
        return "not sent"
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    answer.pop("ResponseMetadata")
    return ", ".join(
        f"{name}: {min(len(value), 1)}" if isinstance(value, list) else name
        for name, value in sorted(answer.items())
    )


def test_only_documented_differences_to_moto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SimOptions(cloud="aws_batch", boot_s=1000.0)
    with running_simulator(tmp_path, options) as sim:
        own = boto3.client(
            "batch",
            endpoint_url=sim.server.url,
            region_name=REGION,
            aws_access_key_id="x",
            aws_secret_access_key="y",
        )
        simulated = {case: outcome(own, case) for case in CASES}
    with moto_client(monkeypatch) as batch:
        independent = {case: outcome(batch, case) for case in CASES}
    found = {
        case: f"{simulated[case]} / {independent[case]}"
        for case in CASES
        if simulated[case] != independent[case]
    }
    shown = "\n".join(f'    "{case}": "{both}",' for case, both in found.items())
    assert found == DIFFERENCES, f"simulated / moto:\n{shown}"
