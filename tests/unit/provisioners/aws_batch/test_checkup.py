"""Checks of an AWS account, by boto3 against a simulated account."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from spotfit.provision.api import AccountCheck, CheckSkippedError
from spotfit_localsim.clouds.aws_batch import ACCOUNT, MISSING_QUEUE, AwsBatchCloud
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator, running_simulator
from spotfit_provisioners.aws_batch import checkup
from spotfit_provisioners.aws_batch import client as calls
from spotfit_provisioners.aws_batch import provisioner as verbs
from spotfit_provisioners.aws_batch.checkup import AwsPrincipal
from spotfit_provisioners.aws_batch.provisioner import AwsBatchProvisioner

pytest.importorskip("boto3")
from botocore.exceptions import EndpointConnectionError
from botocore.parsers import ResponseParserError

pytestmark = pytest.mark.real_time("a simulated cloud uses real time")

AGENTS = f"arn:aws:iam::{ACCOUNT}:role/agents"
EXECUTION = f"arn:aws:iam::{ACCOUNT}:role/execution"
IMAGE = f"{ACCOUNT}.dkr.ecr.sim-east-1.amazonaws.com/worker"
BUCKET = "s3://bucket/runs"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """Shared, because creating boto3 clients is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "something")
        for cache in (calls._client, verbs._client_for_region):
            cache.cache_clear()
        options = SimOptions(cloud="aws_batch", boot_s=0.0)
        with running_simulator(tmp_path_factory.mktemp("cloud"), options) as simulator:
            yield simulator


@pytest.fixture
def sim(cloud: Simulator) -> Simulator:
    """Restore the initial state."""
    cloud.cloud.__init__(cloud.datacenter, cloud.faults)  # type: ignore[misc]
    cloud.faults.deny_permissions([])
    return cloud


def open_provisioner(sim: Simulator, **options: Any) -> AwsBatchProvisioner:
    access = AwsBatchCloud.client_access(sim.server.url)
    sound: dict[str, Any] = {
        "job_role": AGENTS,
        "execution_role": EXECUTION,
        "image": f"{IMAGE}:sim",
    }
    sound["on_demand_queues"] = ()
    return AwsBatchProvisioner.with_options(**{**access.options, **sound, **options})


def run_checks(sim: Simulator, storage: str = BUCKET, **options: Any) -> dict[str, AccountCheck]:
    return {one.name: one for one in open_provisioner(sim, **options).check_account(storage)}


def failed_checks(findings: dict[str, AccountCheck]) -> dict[str, AccountCheck]:
    return {what: one for what, one in findings.items() if not one.passed}


def test_sound_account_passes_all_checks(sim: Simulator) -> None:
    findings = run_checks(sim)
    assert not failed_checks(findings)
    # The name of the image does not tell its version of CUDA.
    assert [what for what, one in findings.items() if not one.conclusive] == [
        "machines of spot can run the image"
    ]
    assert list(findings) == [
        "AWS credentials are valid",
        "job queue spot accepts jobs",
        "compute environment spot can run jobs",
        "the quota of spot allows a machine",
        "machines of spot can connect to each other",
        "machines of spot reach AWS",
        "machines of spot can run the image",
        "the bucket is in the region of the queues",
        "the image is built for the processors of the machines",
        "the caller may rent machines",
        "the agents' role can be assumed",
        "agents may rent machines",
        "agents may use s3://bucket/runs",
        "the execution role can be assumed",
        "machine output is stored",
        "the image exists",
    ]
    assert findings["AWS credentials are valid"].detail.endswith(":user/sim")
    assert "will be created" in findings["machine output is stored"].detail


def test_all_failed_checks_are_reported_together(sim: Simulator) -> None:
    sim.cloud.compute_environment_overrides["spot"] = {  # type: ignore[attr-defined]
        "state": "DISABLED",
        "status": "INVALID",
        "statusReason": "CLIENT_ERROR - subnet-1 does not exist",
        "computeResources": {"type": "FARGATE_SPOT", "maxvCpus": 0, "instanceTypes": ["g5.xlarge"]},
    }
    sim.cloud.roles["agents"] = "ec2.amazonaws.com"  # type: ignore[attr-defined]
    sim.faults.deny_permissions(
        ["batch:TerminateJob", "agents s3:PutObject", "agents s3:DeleteObject"]
    )
    result = failed_checks(run_checks(sim, image=f"{IMAGE}:other", execution_role=f"{EXECUTION}-2"))
    environment = result.pop("compute environment spot can run jobs")
    for what in (
        "disabled",
        "INVALID: CLIENT_ERROR - subnet-1",
        "type is FARGATE_SPOT",
        "is 0 vCPUs",
    ):
        assert what in environment.detail
    assert {what: one.detail for what, one in result.items()} == {
        "the caller may rent machines": (
            f"The IAM principal arn:aws:iam::{ACCOUNT}:user/sim lacks batch:TerminateJob."
        ),
        "the agents' role can be assumed": (
            f"The trust policy of {AGENTS} does not allow ecs-tasks.amazonaws.com."
        ),
        "agents may rent machines": f"The IAM principal {AGENTS} lacks batch:TerminateJob.",
        "agents may use s3://bucket/runs": f"The IAM principal {AGENTS} lacks s3:PutObject, "
        "s3:DeleteObject.",
        "the execution role can be assumed": f"The IAM role {EXECUTION}-2 does not exist.",
        "the image exists": (
            f"AwsBatchOptions(image={IMAGE + ':other'!r}): the registry does not contain this "
            "image."
        ),
    }
    assert all(one.do for one in result.values())


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        (MISSING_QUEUE, "The job queue 'spot' does not exist in sim-east-1."),
        (
            {"state": "DISABLED", "statusReason": "by hand"},
            "The job queue 'spot' is DISABLED and VALID: by hand.",
        ),
    ],
)
def test_disabled_queue_is_reported_with_all_other_checks(
    sim: Simulator, queue: dict[str, Any], expected: str
) -> None:
    sim.cloud.queue_overrides["spot"] = queue  # type: ignore[attr-defined]
    findings = run_checks(sim)
    assert [one.detail for one in failed_checks(findings).values()] == [expected]
    assert "agents may rent machines" in findings


def test_missing_compute_environment_is_reported(sim: Simulator) -> None:
    calls_ = open_provisioner(sim)
    [finding] = [
        one
        for one in checkup._check_queue("spot", lambda _: (NoEnvironments(calls_), "spot"))  # type: ignore[arg-type,return-value]
        if not one.passed
    ]
    assert finding.detail.startswith("The job queue spot uses the compute environment arn:")
    assert finding.detail.endswith(":compute-environment/spot, which does not exist.")


class NoEnvironments:
    """A region with a queue whose compute environment is missing."""

    def __init__(self, provisioner: AwsBatchProvisioner) -> None:
        self._client, _ = provisioner._resolve_queue("spot")

    def find_queue(self, name: str) -> Any:
        return self._client.find_queue(name)

    def describe_compute_environments(self, _: Any) -> list[Any]:
        return []


def test_permissions_are_probed_by_calls_without_effect(sim: Simulator) -> None:
    sim.faults.deny_permissions(["iam:SimulatePrincipalPolicy", "iam:GetRole", "batch:SubmitJob"])
    findings = run_checks(sim)
    assert list(failed_checks(findings)) == ["the caller has batch:SubmitJob"]
    tried = [one for what, one in findings.items() if what.startswith("the caller has ")]
    assert len(tried) == 6
    unseen = {what for what, one in findings.items() if not one.conclusive}
    assert {"agents may rent machines", "the agents' role can be assumed"} <= unseen
    assert not sim.cloud.state.jobs
    assert not sim.cloud.state.definitions


def test_unavailable_iam_is_inconclusive(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unparsable answers, as of some AWS emulators, are inconclusive as well."""
    parse_error = "Unable to parse response, invalid XML received:\n<!doctype html>"
    for error in (ResponseParserError(parse_error), EndpointConnectionError(endpoint_url="iam")):
        monkeypatch.setattr(calls.AwsAccountClient, "list_denied_actions", Mock(side_effect=error))
        findings = run_checks(sim)
        assert not failed_checks(findings)
        result = findings["agents may rent machines"]
        assert (result.conclusive, result.detail.count("\n")) == (False, 0)
        assert sum(what.startswith("the caller has ") for what in findings) == 6, (
            "each permission is simulated"
        )


def test_missing_credentials_are_reported_with_checks_that_need_none(
    sim: Simulator,
) -> None:
    sim.faults.inject("credentials", 1)
    findings = list(open_provisioner(sim).check_account())
    assert [one.passed for one in findings] == [False, True, True]
    assert "get-caller-identity" in findings[0].do


def test_denied_descriptions_are_inconclusive(sim: Simulator) -> None:
    sim.faults.deny_permissions(["logs:DescribeLogGroups", "ecr:DescribeImages"])
    findings = run_checks(sim, storage="gs://elsewhere", job_role="", execution_role="")
    assert not failed_checks(findings)
    assert {what for what, one in findings.items() if not one.conclusive} == {
        "agents have the required permissions",
        "machine output is stored",
        "the image exists",
        "machines of spot can run the image",
    }
    assert not run_checks(sim, image="docker.io/spotfit:1")["the image exists"].conclusive


@pytest.mark.parametrize(
    ("arn", "kind", "role"),
    [
        ("arn:aws:iam::1:user/team/me", "user", "me"),
        ("arn:aws:sts::1:assumed-role/Admin/me@example.com", "assumed-role", "Admin"),
        ("arn:aws:iam::1:role/aws-reserved/sso/Admin", "role", "Admin"),
        ("arn:aws:iam::1:root", "root", "root"),
    ],
)
def test_principal_arn_is_parsed(arn: str, kind: str, role: str) -> None:
    principal = AwsPrincipal(arn)
    assert (
        principal.partition,
        principal.account,
        principal.principal_type,
        principal.role_name,
    ) == (
        "aws",
        "1",
        kind,
        role,
    )


def test_simulated_principal_of_sessions_and_root(sim: Simulator) -> None:
    options = open_provisioner(sim).options
    session = AwsPrincipal(f"arn:aws:sts::{ACCOUNT}:assumed-role/agents/me")
    assert (
        checkup._AwsAccountChecks(
            options, "", open_provisioner(sim)._resolve_queue, session
        )._own_principal_arn()
        == AGENTS
    )
    root = f"arn:aws:iam::{ACCOUNT}:root"
    checks = checkup._AwsAccountChecks(
        options, "", open_provisioner(sim)._resolve_queue, AwsPrincipal(root)
    )
    with pytest.raises(CheckSkippedError, match="IAM cannot simulate a root"):
        checks._require_permissions(root, checks._required_permissions())


@pytest.mark.parametrize(
    ("policy", "is_allowed"),
    [
        ({"Statement": {"Effect": "Allow", "Principal": {"Service": "s"}}}, True),
        ({"Statement": [{"Effect": "Allow", "Principal": {"Service": ["x", "s"]}}]}, True),
        ({"Statement": [{"Effect": "Deny", "Principal": {"Service": "s"}}]}, False),
        ({"Statement": [{"Effect": "Allow", "Principal": "*"}]}, False),
        ({}, False),
    ],
)
def test_trust_policy_is_checked(policy: dict[str, Any], is_allowed: bool) -> None:
    assert checkup._allows_service(policy, "s") is is_allowed


def test_on_demand_environment_is_described_as_a_fallback(sim: Simulator) -> None:
    """A queue with environments of type SPOT and EC2 is AWS's own way to fall back."""
    sim.cloud.compute_environment_overrides["spot"] = {  # type: ignore[attr-defined]
        "computeResources": {"type": "EC2", "maxvCpus": 64, "instanceTypes": ["g5.xlarge"]},
    }
    findings = run_checks(sim)
    assert not failed_checks(findings)
    detail = findings["compute environment spot can run jobs"].detail
    assert detail == "on-demand instances, at their full price: up to 64 vCPUs of g5.xlarge"


def test_queue_of_on_demand_machines_is_checked(sim: Simulator) -> None:
    findings = run_checks(sim, on_demand_queues=("on-demand",))
    assert not failed_checks(findings)
    detail = findings["compute environment on-demand can run jobs"].detail
    assert detail.startswith("on-demand instances, for groups that request them")
    assert findings["machines of on-demand reach AWS"].conclusive
    findings = run_checks(sim, on_demand_queues=("other",))
    (wrong,) = failed_checks(findings).values()
    assert "Its type is SPOT" in wrong.detail
    assert "on_demand_queues" in wrong.do


def test_quota_of_on_demand_machines_is_no_condition_of_spot_runs(sim: Simulator) -> None:
    sim.cloud.surroundings.vcpu_quota = 0.0  # type: ignore[attr-defined]
    findings = run_checks(sim, on_demand_queues=("on-demand",))
    assert list(failed_checks(findings)) == ["the quota of spot allows a machine"]
    quota = findings["the quota of on-demand allows a machine"]
    assert not quota.conclusive
    assert "too small for on-demand machines" in quota.detail


def test_surroundings_of_machines_are_checked_together(sim: Simulator) -> None:
    surroundings = sim.cloud.surroundings  # type: ignore[attr-defined]
    surroundings.vcpu_quota = 0.0
    surroundings.accepts_own_members = False
    surroundings.has_public_addresses = False
    surroundings.image_architecture = "arm64"
    surroundings.bucket_region = "us-east-1"
    result = failed_checks(run_checks(sim))
    assert {what: one.detail.partition(",")[0] for what, one in result.items()} == {
        "the quota of spot allows a machine": "The quota of EC2 in sim-east-1 is too small for one "
        "machine of spot",
        "machines of spot can connect to each other": "The security groups sg-1 of spot do not "
        "accept TCP connections from their own members",
        "machines of spot reach AWS": "Machines of spot cannot reach the bucket",
        "the bucket is in the region of the queues": "The bucket of s3://bucket/runs is in "
        "us-east-1",
        "the image is built for the processors of the machines": "The image is built for arm64",
    }
    assert all(one.do for one in result.values())


def test_surroundings_that_may_not_be_read_are_inconclusive(sim: Simulator) -> None:
    denied = ("SecurityGroups", "Subnets", "RouteTables", "VpcEndpoints")
    sim.faults.deny_permissions(
        [
            *(f"ec2:Describe{kind}" for kind in denied),
            "servicequotas:GetServiceQuota",
            "ecr:BatchGetImage",
        ]
    )
    findings = run_checks(sim)
    assert not failed_checks(findings)
    assert {what for what, one in findings.items() if not one.conclusive} == {
        "the quota of spot allows a machine",
        "machines of spot can connect to each other",
        "machines of spot reach AWS",
        "machines of spot can run the image",
        "the image is built for the processors of the machines",
    }


def test_missing_log_group_of_the_user_is_reported(sim: Simulator) -> None:
    """Batch creates only its own log group; jobs with another one fail to start."""
    [(what, finding)] = failed_checks(run_checks(sim, log_group="/spotfit/mine")).items()
    assert what == "machine output is stored"
    assert "create-log-group" in finding.do


def test_simulated_termination_has_the_tag_of_the_queue(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policies of infra/terraform permit to terminate only jobs with this tag."""
    contexts: dict[str, list[Any]] = {}

    def record(_: Any, __: str, *, actions: Any, resources: Any, context: Any) -> list[str]:
        for action in actions:
            contexts.setdefault(action, []).append(context)
        return []

    monkeypatch.setattr(calls.AwsAccountClient, "list_denied_actions", record)
    run_checks(sim, on_demand_queues=("on-demand",))
    for action, key in (
        ("batch:TerminateJob", "aws:ResourceTag/spotfit:queue"),
        ("batch:TagResource", "aws:RequestTag/spotfit:queue"),
    ):
        assert {one[key] for one in contexts[action]} == {"spot", "on-demand"}
