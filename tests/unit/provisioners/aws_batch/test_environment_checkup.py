"""Checks of the machines, by boto3 against moto and against botocore's models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.provision.api import AccountCheck
from spotfit_provisioners.aws_batch import client as calls
from spotfit_provisioners.aws_batch.client import AwsAccountClient
from spotfit_provisioners.aws_batch.environment_checkup import (
    EnvironmentChecks,
    check_architecture,
    check_bucket_region,
)
from spotfit_provisioners.aws_batch.options import AwsBatchOptions

pytest.importorskip("boto3")
pytest.importorskip("moto")
import boto3
import moto
from botocore.stub import Stubber

REGION = "eu-west-1"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/worker:0.1-py3.11-torch2.13.0-cuda"


@pytest.fixture(scope="module", autouse=True)
def ec2() -> Iterator[Any]:
    """Shared, because creating boto3 clients is slow; tests use resources of their own."""
    with pytest.MonkeyPatch.context() as patch, moto.mock_aws():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        calls._client.cache_clear()
        yield boto3.client("ec2", REGION)
    calls._client.cache_clear()


def run_checks(**resources: Any) -> dict[str, AccountCheck]:
    environment = {
        "computeEnvironmentName": "spot",
        "computeResources": {"type": "SPOT", "instanceTypes": ["g5"], **resources},
    }
    checks = EnvironmentChecks(make_options(), REGION, environment)
    return {one.name: one for one in checks.run()}


def make_options(**fields: Any) -> AwsBatchOptions:
    return AwsBatchOptions(queues=("spot",), **{"image": IMAGE, "region": REGION, **fields})


@pytest.fixture
def network(ec2: Any) -> dict[str, str]:
    """A network with one private subnet, without any route to the internet."""
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="agents", Description="x", VpcId=vpc)["GroupId"]
    return {"vpc": vpc, "subnet": subnet, "group": group}


def test_security_group_without_own_members_is_reported(ec2: Any, network: dict[str, str]) -> None:
    where = {"securityGroupIds": [network["group"]], "subnets": [network["subnet"]]}
    what = "machines of spot can connect to each other"
    finding = run_checks(**where)[what]
    assert not finding.passed
    assert f"--group-id {network['group']}" in finding.do
    ec2.authorize_security_group_ingress(
        GroupId=network["group"],
        IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": network["group"]}]}],
    )
    assert run_checks(**where)[what].passed


def test_security_groups_of_a_launch_template_are_checked(
    ec2: Any, network: dict[str, str]
) -> None:
    """With network adapters for EFA, the groups are part of the launch template."""
    template = ec2.create_launch_template(
        LaunchTemplateName="machine",
        LaunchTemplateData={
            "NetworkInterfaces": [{"DeviceIndex": 0, "Groups": [network["group"]]}]
        },
    )["LaunchTemplate"]["LaunchTemplateId"]
    finding = run_checks(
        launchTemplate={"launchTemplateId": template, "version": "$Latest"},
        subnets=[network["subnet"]],
    )["machines of spot can connect to each other"]
    assert not finding.passed
    assert network["group"] in finding.detail


def test_private_subnet_without_routes_is_reported(ec2: Any, network: dict[str, str]) -> None:
    where = {"securityGroupIds": [network["group"]], "subnets": [network["subnet"]]}
    finding = run_checks(**where)["machines of spot reach AWS"]
    assert not finding.passed
    assert "has no route to the internet" in finding.detail
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=network["vpc"])
    [table] = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [network["vpc"]]}])[
        "RouteTables"
    ]
    ec2.create_route(
        RouteTableId=table["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        GatewayId=gateway,
    )
    assert "public addresses" in run_checks(**where)["machines of spot reach AWS"].detail
    ec2.modify_subnet_attribute(SubnetId=network["subnet"], MapPublicIpOnLaunch={"Value": True})
    assert run_checks(**where)["machines of spot reach AWS"].passed


def test_gateway_endpoint_of_s3_is_found(ec2: Any, network: dict[str, str]) -> None:
    ec2.create_vpc_endpoint(
        VpcId=network["vpc"],
        ServiceName=f"com.amazonaws.{REGION}.s3",
        VpcEndpointType="Gateway",
    )
    detail = run_checks(subnets=[network["subnet"]])["machines of spot reach AWS"].detail
    assert "ecr.dkr" in detail
    assert ", s3" not in detail


def test_unknown_network_is_inconclusive() -> None:
    findings = run_checks()
    for what in ("machines of spot can connect to each other", "machines of spot reach AWS"):
        assert (findings[what].passed, findings[what].conclusive) == (True, False)


@pytest.mark.parametrize(
    "code", ["AccessDeniedException", "UnauthorizedOperation", "InternalFailure"]
)
def test_quota_that_may_not_be_read_is_inconclusive(ec2: Any, code: str) -> None:
    with Stubber(calls._client("service-quotas", REGION, "")) as stub:
        stub.add_client_error("get_service_quota", code)
        finding = run_checks()["the quota of spot allows a machine"]
    assert (finding.passed, finding.conclusive) == (True, False)


@pytest.mark.parametrize(
    ("kind", "code", "name"),
    [
        ("SPOT", "L-3819A6DF", "All G and VT Spot Instance Requests"),
        ("EC2", "L-DB2E81BA", "Running On-Demand G and VT instances"),
    ],
)
def test_account_without_quota_is_reported(kind: str, code: str, name: str) -> None:
    """The default of new accounts is 0: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html."""
    quota = {"QuotaCode": code, "QuotaName": name, "Value": 0.0}
    expected = {"ServiceCode": "ec2", "QuotaCode": code}
    with Stubber(calls._client("service-quotas", REGION, "")) as stub:
        stub.add_response("get_service_quota", {"Quota": quota}, expected)
        finding = run_checks(type=kind)["the quota of spot allows a machine"]
        stub.assert_no_pending_responses()
    assert not finding.passed
    assert f"'{name}' ({code}): 0 vCPUs" in finding.detail
    assert "Service Quotas" in finding.do


def test_default_quota_is_read_if_the_account_has_no_value_of_its_own() -> None:
    quota = {"QuotaName": "All Standard Spot Instance Requests", "Value": 5.0}
    with Stubber(calls._client("service-quotas", REGION, "")) as stub:
        stub.add_client_error("get_service_quota", "NoSuchResourceException")
        stub.add_response("get_aws_default_service_quota", {"Quota": quota})
        finding = run_checks(instanceTypes=["c7i", "m7i"])["the quota of spot allows a machine"]
    assert finding.passed
    assert "5 vCPUs" in finding.detail


def test_gpus_before_turing_are_reported_for_a_cuda_image() -> None:
    what = "machines of spot can run the image"
    finding = run_checks(instanceTypes=["p3.2xlarge", "g5"])[what]
    assert not finding.passed
    assert "p3" in finding.detail
    assert "g5" not in finding.detail
    assert run_checks(instanceTypes=["g4dn", "g5"])[what].passed
    assert "would wait indefinitely" in run_checks(instanceTypes=["c7i"])[what].detail


def test_bucket_in_another_region_is_reported() -> None:
    boto3.client("s3", "us-west-2").create_bucket(
        Bucket="runs", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    with pytest.raises(ConfigError, match="is in us-west-2, but the queues are in eu-west-1"):
        check_bucket_region(make_options(), "s3://runs/a", [REGION])
    detail = check_bucket_region(make_options(), "s3://runs/a", ["us-west-2", REGION])
    assert "across regions" in detail


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_index_of_an_image_names_its_architecture(architecture: str) -> None:
    platforms = [
        {"platform": {"architecture": name, "os": "linux"}, "digest": "sha256:0", "size": 1}
        for name in (architecture, "unknown")
    ]
    registry = boto3.client("ecr", REGION)
    registry.create_repository(repositoryName=architecture)
    registry.put_image(
        repositoryName=architecture,
        imageTag=IMAGE.rpartition(":")[2],
        imageManifest=json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.index.v1+json",
                "manifests": platforms,
            }
        ),
    )
    environment = {
        "computeEnvironmentName": "spot",
        "computeResources": {"type": "SPOT", "instanceTypes": ["g5"]},
    }
    options = make_options(image=IMAGE.replace("/worker:", f"/{architecture}:"))
    checks = [EnvironmentChecks(options, REGION, environment)]
    if architecture == "amd64":
        assert check_architecture(options, checks) == "amd64"
    else:
        with pytest.raises(ConfigError, match="exec format error"):
            check_architecture(options, checks)


def test_architecture_of_a_single_image_is_in_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from botocore.httpsession import URLLib3Session

    class Response:
        content = b'{"architecture": "arm64", "os": "linux"}'

    sent: list[str] = []

    def send(_: Any, request: Any) -> Response:
        sent.append(request.url)
        return Response()

    manifest = {"schemaVersion": 2, "config": {"digest": f"sha256:{'0' * 64}"}, "layers": []}
    registry = calls._client("ecr", REGION, "")
    with Stubber(registry) as stub:
        stub.add_response("batch_get_image", {"images": [{"imageManifest": json.dumps(manifest)}]})
        stub.add_response(
            "get_download_url_for_layer",
            {"downloadUrl": "https://layers.example.com/x?signature=1"},
            {
                "registryId": "123456789012",
                "repositoryName": "worker",
                "layerDigest": manifest["config"]["digest"],  # type: ignore[index]
            },
        )
        monkeypatch.setattr(URLLib3Session, "send", send)
        client = AwsAccountClient(REGION, "")
        assert client.image_platforms("123456789012", "worker", {"imageTag": "1"}) == ["arm64"]
    assert sent == ["https://layers.example.com/x?signature=1"]
