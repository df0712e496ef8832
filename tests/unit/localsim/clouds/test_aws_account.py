"""The surroundings of the simulated machines, as botocore parses them."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit_localsim.clouds.aws_account import AwsAccountSurroundings

pytest.importorskip("botocore")
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.parsers import create_parser


def parse(operation: str, surroundings: AwsAccountSurroundings) -> Any:
    """Return the response as boto3 would return it."""
    model = ServiceModel(Loader().load_service_model("ec2", "service-2"))
    text = surroundings.describe(operation)
    assert text is not None
    response = {"status_code": 200, "headers": {}, "body": text.encode()}
    return create_parser("ec2").parse(response, model.operation_model(operation).output_shape)


def test_descriptions_have_the_format_of_ec2() -> None:
    sound = AwsAccountSurroundings()
    [group] = parse("DescribeSecurityGroups", sound)["SecurityGroups"]
    assert group["IpPermissions"][0]["UserIdGroupPairs"] == [{"GroupId": "sg-1"}]
    [subnet] = parse("DescribeSubnets", sound)["Subnets"]
    assert (subnet["CidrBlock"], subnet["MapPublicIpOnLaunch"]) == ("10.0.0.0/24", True)
    [table] = parse("DescribeRouteTables", sound)["RouteTables"]
    assert table["Routes"][0]["GatewayId"] == "igw-1"
    assert table["Associations"] == [{"Main": True}]
    assert parse("DescribeVpcEndpoints", sound)["VpcEndpoints"] == []
    assert sound.describe("RunInstances") is None


def test_faults_of_the_surroundings_are_visible() -> None:
    closed = AwsAccountSurroundings(accepts_own_members=False, has_public_addresses=False)
    [group] = parse("DescribeSecurityGroups", closed)["SecurityGroups"]
    assert not group["IpPermissions"]
    [subnet] = parse("DescribeSubnets", closed)["Subnets"]
    assert subnet["MapPublicIpOnLaunch"] is False


def test_index_of_an_image_has_the_attestation_of_its_build() -> None:
    manifests = AwsAccountSurroundings(image_architecture="arm64").image_index()["manifests"]
    assert [one["platform"]["architecture"] for one in manifests] == ["arm64", "unknown"]
