"""Rendering of AWS Batch requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupRequest
from spotfit.provision.launch import AgentExitCode, AgentLaunchSpec
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.aws_batch.render import (
    ARRAY_INDEX_VARIABLE,
    RETRY_RULES,
    child_job_ids,
    job_request,
    plan,
)
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"
OPTIONS = AwsBatchOptions(queues=("spot",), image="registry/spotfit:1")
LAUNCH = AgentLaunchSpec("s3://bucket/run", RunId("r" * 32), "secret", ("aws", "signal"), "torch")


def a_request(workers: int = 4, **resources: float) -> GroupRequest:
    return GroupRequest(
        token=Token("t-0123456789ab"),
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=resources,
        run_name="Digits 1",
    )


@pytest.mark.parametrize(
    ("name", "request_", "options"),
    [
        ("plain", a_request(1), OPTIONS),
        ("array", a_request(4, CPU=2.0), OPTIONS),
        (
            "gpus",
            a_request(8, GPU=1.0, CPU=6.0, memory=48 * 2**30),
            AwsBatchOptions(
                queues=("eu-west-1:spot", "us-east-1:spot"),
                image="registry/spotfit:1-cuda",
                workers_per_node=4,
                shared_memory_mib=32_768,
                job_role="arn:aws:iam::1:role/agent",
                execution_role="arn:aws:iam::1:role/pull",
                attempts=3,
                tags={"team": "vision"},
            ),
        ),
        # The usual line of Ray: ScalingConfig(num_workers=2, use_gpu=True).
        ("gpus_only", a_request(2, GPU=1.0), OPTIONS),
        (
            "gpus_only_full_instance",
            a_request(16, GPU=1.0),
            AwsBatchOptions(
                queues=("spot",),
                image="registry/spotfit:1",
                workers_per_node=8,
                instance_types=("p4d.24xlarge", "p5.48xlarge"),
            ),
        ),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: AwsBatchOptions
) -> None:
    golden.check_golden(plan(request_, options), GOLDEN / f"plan_{name}.json")


def test_job_matches_its_golden_file() -> None:
    planned = plan(a_request(4), OPTIONS)
    environment = LAUNCH.environment_for(
        planned.token, 0, planned.slots_per_node, node_index_variable=ARRAY_INDEX_VARIABLE
    )
    result = job_request(
        planned, queue="spot", definition="arn:1", environment=environment, share="x"
    )
    golden.check_golden(result, GOLDEN / "job_array.json")


def test_single_machine_is_not_an_array_job() -> None:
    """Batch rejects arrays of size one."""
    result = job_request(
        plan(a_request(1), OPTIONS), queue="q", definition="d", environment={}, share=""
    )
    assert "arrayProperties" not in result
    assert child_job_ids("j", 1) == ["j"]
    assert child_job_ids("j", 3) == ["j:0", "j:1", "j:2"]


def test_job_definition_name_depends_on_its_content() -> None:
    def name(request: GroupRequest, options: AwsBatchOptions = OPTIONS) -> str:
        return str(plan(request, options).body["definition"]["jobDefinitionName"])

    assert name(a_request(4)) == name(a_request(1)), (
        "the name does not depend on the number of workers"
    )
    others = {
        name(a_request(4, GPU=1.0)),
        name(a_request(4), AwsBatchOptions(queues=("q",), image="b")),
    }
    assert name(a_request(4)) not in others
    assert len(others) == 2


def test_only_lost_hosts_and_drained_agents_are_retried() -> None:
    assert [rule for rule in RETRY_RULES if rule["action"] == "RETRY"] == [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onExitCode": str(int(AgentExitCode.DRAINED)), "action": "RETRY"},
    ]
    assert RETRY_RULES[-1] == {"onExitCode": "*", "action": "EXIT"}, "no match would mean RETRY"
    assert len(RETRY_RULES) <= 5


@pytest.mark.parametrize(
    ("request_", "options", "expected"),
    [
        (a_request(), AwsBatchOptions(), "queues, image not set"),
        (a_request(4, TPU=1.0), OPTIONS, "does not support the resource TPU"),
        (a_request(10_001), OPTIONS, "allows at most 10000"),
        (
            a_request(1, GPU=1.0, memory=1792 * 2**20),
            OPTIONS,
            "AWS Batch would kill a machine with 1 GPU worker at its memory limit of 1792 MiB",
        ),
        (
            a_request(1, CPU=1.0),
            AwsBatchOptions(queues=("q",), image="i", shared_memory_mib=4096),
            "size of 4096 MiB exceeds the memory limit of 1792 MiB",
        ),
        (
            a_request(8, GPU=1.0),
            AwsBatchOptions(
                queues=("q",), image="i", workers_per_node=8, instance_types=("g5.12xlarge",)
            ),
            "have at most 4",
        ),
    ],
)
def test_unsupported_requests_are_rejected(
    request_: GroupRequest, options: AwsBatchOptions, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(request_, options)


def container(**options: Any) -> dict[str, Any]:
    body = plan(a_request(), AwsBatchOptions(queues=("spot",), image="i", **options)).body
    properties: dict[str, Any] = body["definition"]["containerProperties"]
    return properties


def test_containers_get_the_efa_devices_and_unlimited_locked_memory() -> None:
    """https://docs.aws.amazon.com/batch/latest/userguide/efa.html."""
    properties = container(efa_devices=2)
    first, second = properties["linuxParameters"]["devices"]
    assert first == {
        "hostPath": "/dev/infiniband/uverbs0",
        "containerPath": "/dev/infiniband/uverbs0",
        "permissions": ["READ", "WRITE", "MKNOD"],
    }
    assert second["hostPath"] == "/dev/infiniband/uverbs1"
    assert properties["ulimits"] == [{"name": "memlock", "softLimit": -1, "hardLimit": -1}]
    assert "devices" not in container()["linuxParameters"]


def test_log_group_of_the_user_is_in_the_job_definition() -> None:
    logs = container(log_group="/spotfit/mine")["logConfiguration"]
    assert logs["logDriver"] == "awslogs"
    assert logs["options"]["awslogs-group"] == "/spotfit/mine"
    assert "logConfiguration" not in container()


@pytest.mark.parametrize("queue", ["spot", "arn:aws:batch:eu-west-1:1:job-queue/spot"])
def test_jobs_have_the_tag_of_their_queue_and_labels_for_costs(queue: str) -> None:
    options = AwsBatchOptions(
        queues=("spot",), image="i", user="Jane", cost_project="vision", tags={"team": "a"}
    )
    request = job_request(
        plan(a_request(), options), queue=queue, definition="d", environment={}, share=""
    )
    assert request["tags"] == {
        "team": "a",
        "spotfit:run": "digits-1",
        "spotfit:user": "jane",
        "spotfit:project": "vision",
        "spotfit:token": "t-0123456789ab",
        "spotfit:queue": "spot",
    }
    assert request["propagateTags"] is True


@pytest.mark.parametrize(
    "options",
    [{}, {"efa_devices": 4, "log_group": "/spotfit/x", "tags": {"a": "b"}, "user": "jane"}],
)
def test_requests_pass_the_validation_of_botocore(options: dict[str, Any]) -> None:
    loaders = pytest.importorskip("botocore.loaders")
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    model = ServiceModel(loaders.Loader().load_service_model("batch", "service-2"))
    planned = plan(a_request(8), AwsBatchOptions(queues=("spot",), image="i", **options))
    job = job_request(planned, queue="spot", definition="d", environment={"A": "b"}, share="s")
    for operation, arguments in (
        ("RegisterJobDefinition", planned.body["definition"]),
        ("SubmitJob", job),
    ):
        shape = model.operation_model(operation).input_shape
        report = ParamValidator().validate(arguments, shape)
        assert not report.has_errors(), report.generate_report()


def test_a_time_limit_is_the_timeout_of_each_attempt() -> None:
    planned = plan(replace(a_request(4), time_limit_s=7200), OPTIONS)
    result = job_request(planned, queue="spot", definition="arn:1", environment={}, share="")
    golden.check_golden(result, GOLDEN / "job_time_limit.json")
    definition = plan(a_request(4), OPTIONS).body["definition"]
    assert planned.body["definition"] == definition, "shared by the groups of a run"
    shortest = plan(replace(a_request(4), time_limit_s=5), OPTIONS)
    assert shortest.body["timeout"] == {"attemptDurationSeconds": 60}, "the least that AWS allows"


def test_a_time_limit_is_valid_for_botocore() -> None:
    session = pytest.importorskip("botocore.session").get_session()
    validate = pytest.importorskip("botocore.validate")
    planned = plan(replace(a_request(4), time_limit_s=7200), OPTIONS)
    result = job_request(planned, queue="spot", definition="arn:1", environment={}, share="")
    shape = session.get_service_model("batch").operation_model("SubmitJob").input_shape
    assert not validate.ParamValidator().validate(result, shape).has_errors()
