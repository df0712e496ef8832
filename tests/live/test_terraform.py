"""infra/terraform/stacks/aws, applied and destroyed against moto; its output is a profile.

Needs terraform and the AWS provider: where its registry is out of reach, terraform's own variable
`TF_CLI_ARGS_init=-plugin-dir=FOLDER` names a folder of providers. Takes five minutes, most of which
the provider waits between polls.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupHandle, GroupRequest
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.profile import parse_options, resolve_options
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.aws_batch.provisioner import AwsBatchProvisioner
from tests.house.hcl import NEEDS_TERRAFORM, TERRAFORM, skip_without_provider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    NEEDS_TERRAFORM,
    pytest.mark.real_time("terraform is a separate program"),
]

REGION, BUCKET, RUN = "eu-west-1", "runs-of-a-test", "s3://runs-of-a-test/runs/digits"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
A_SERVER = """
import sys
from moto.core.config import default_user_config
from moto.server import ThreadedMotoServer
default_user_config["batch"] = {"use_docker": False}
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[str]:
    """AWS on loopback, with AWS's managed policies."""
    with subprocess.Popen(
        [sys.executable, "-c", A_SERVER],
        env={**os.environ, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{_port(server.stdout)}"
        server.kill()


@pytest.fixture(scope="module")
def environment(cloud: str) -> Iterator[dict[str, str]]:
    result = {
        "AWS_ENDPOINT_URL": cloud,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
        "CHECKPOINT_DISABLE": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, text in result.items():
            patch.setenv(name, text)
        yield {**os.environ}


@pytest.fixture(scope="module")
def stack(
    environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The applied stack; it is destroyed at the end and must leave no resource."""
    copy = tmp_path_factory.mktemp("infra") / "terraform"
    shutil.copytree(TERRAFORM, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    folder = copy / "stacks" / "aws"
    (folder / "override.tf").write_text('provider "aws" {\n  s3_use_path_style = true\n}\n')
    (folder / "terraform.tfvars.json").write_text(json.dumps(_variables()))
    skip_without_provider(_terraform(folder, "init", "-input=false", check=False))
    _terraform(folder, "apply", "-auto-approve", "-input=false")
    yield folder
    _terraform(folder, "destroy", "-auto-approve", "-input=false")
    assert json.loads((folder / "terraform.tfstate").read_text())["resources"] == []


@pytest.fixture
def profile(stack: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of terraform, in the file that `fit()` reads."""
    file = stack / "spotfit.json"
    file.write_text(_terraform(stack, "output", "-json").stdout)
    monkeypatch.setenv("SPOTFIT_CONFIG", str(file))
    return file


def test_second_terraform_plan_has_no_changes(stack: Path) -> None:
    _terraform(stack, "plan", "-detailed-exitcode", "-input=false")


def test_terraform_output_is_a_usable_profile(profile: Path) -> None:
    options = resolve_options("aws_batch", {})
    result = json.loads(profile.read_text())["aws_batch"]["value"]
    parsed = parse_options(AwsBatchOptions, result)
    assert (parsed.queues, parsed.on_demand_queues) == (("spotfit-spot",), ("spotfit-on-demand",))
    provisioner = AwsBatchProvisioner.with_options(**options)
    plan = provisioner.plan(
        GroupRequest(token=Token("t-terraform"), num_workers=2, total_workers=2, run_name="digits")
    )
    launch = AgentLaunchSpec(RUN, RunId("r-1"), "a secret")
    handle = provisioner.submit(plan, launch)
    assert provisioner.submit(plan, launch) == handle
    assert isinstance(handle, GroupHandle)
    first, second = provisioner.observe(handle).nodes
    assert "twice" not in first.reason + second.reason, "child jobs of an array are not listed"
    provisioner.cancel(handle)


def test_doctor_passes_and_the_bucket_denies_http(
    profile: Path, environment: Mapping[str, str]
) -> None:
    _push(AwsBatchOptions(**resolve_options("aws_batch", {})).image)
    command = [sys.executable, "-m", "spotfit.cli", "doctor", "--storage", f"s3://{BUCKET}/runs"]
    done = subprocess.run(
        command,
        env={**environment, "SPOTFIT_CONFIG": str(profile)},
        capture_output=True,
        text=True,
        check=False,
    )
    bad = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    assert len(bad) == 3, done.stdout + done.stderr
    for line in bad[:2]:  # of both compute environments
        assert "reach AWS" in line, "the default network of moto has no internet gateway"
    assert f"s3://{BUCKET}/runs is writable" in bad[2], (
        "moto serves HTTP, which the bucket policy denies"
    )
    passed = [line for line in done.stdout.splitlines() if line.startswith("✓")]
    for what in (
        "job queue spotfit-spot accepts jobs",
        "job queue spotfit-on-demand accepts jobs",
        "can run jobs",
        "can connect to each other",
        "the bucket is in the region of the queues",
        "the image exists",
    ):
        assert any(what in line for line in passed), done.stdout


def _push(image: str) -> None:
    """Store the manifest of an image, as `docker push` does."""
    import boto3

    repository, _, tag = image.partition("/")[2].partition(":")
    config = {"digest": "sha256:0", "mediaType": "application/vnd.docker.container.image.v1+json"}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": []}
    boto3.client("ecr").put_image(
        repositoryName=repository, imageTag=tag, imageManifest=json.dumps(manifest)
    )


def test_agents_have_controller_and_bucket_permissions(stack: Path) -> None:
    import boto3

    role = json.loads(_terraform(stack, "output", "-json").stdout)["aws_batch"]["value"]["job_role"]
    iam = boto3.client("iam")
    attached = iam.list_attached_role_policies(RoleName=role.rpartition("/")[2])["AttachedPolicies"]
    assert len(attached) == 2
    statements = [one for policy in attached for one in _statements(iam, policy["PolicyArn"])]
    by_action = {action: one for one in statements for action in _listed(one["Action"])}
    for action, source in (("TerminateJob", "ResourceTag"), ("TagResource", "RequestTag")):
        ((operator, condition),) = by_action[f"batch:{action}"]["Condition"].items()
        assert operator == "StringEquals"
        ((key, queues),) = condition.items()
        assert key == f"aws:{source}/spotfit:queue"
        assert sorted(queues) == ["spotfit-on-demand", "spotfit-spot"]
    allowed = set(by_action)
    assert {"batch:SubmitJob", "batch:TerminateJob", "s3:PutObject", "iam:PassRole"} <= allowed
    assert not [action for action in allowed if "*" in action]


def _variables() -> dict[str, Any]:
    import boto3

    role = boto3.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")
    secret = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:spotfit/digits-AbCdEf"
    return {
        "region": REGION,
        "bucket": BUCKET,
        "deletable": True,
        "service_role": role["Role"]["Arn"],  # moto knows no role of Batch's own
        "sweeper_image": "registry.example.com/spotfit:0.1",
        "swept_runs": {"digits": {"url": RUN, "key_secret_arn": secret}},
    }


def _terraform(
    folder: Path, command: str, *arguments: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    color = () if command == "output" else ("-no-color",)
    done = subprocess.run(
        ["terraform", command, *color, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


def _port(lines: Any) -> int:
    return next(int(line) for line in lines if line.strip().isdecimal())


def _statements(iam: Any, arn: str) -> list[dict[str, Any]]:
    version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
    document = iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]
    statements: list[dict[str, Any]] = document["Statement"]
    return statements


def _listed(actions: str | list[str]) -> list[str]:
    return [actions] if isinstance(actions, str) else actions
