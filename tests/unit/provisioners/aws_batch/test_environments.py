"""Evaluation of quotas, networks, architectures and GPU families."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.offer import Market
from spotfit_provisioners.aws_batch.environments import (
    _MARKETS,
    QUOTAS,
    architectures,
    families_without_cuda_13,
    is_open_between_members,
    market_of,
    nvidia_families,
    parse_ecr_image,
    quota_classes,
    route_problems,
)

SUBNET = {"SubnetId": "subnet-1", "CidrBlock": "10.0.1.0/24", "MapPublicIpOnLaunch": True}
SERVICES = ("batch", "ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "s3")


@pytest.mark.parametrize(
    ("instance_type", "name"),
    [
        ("c7i", "standard"),
        ("m7i.large", "standard"),
        ("im4gn.large", "standard"),
        ("optimal", "standard"),
        ("g5.xlarge", "G and VT"),
        ("gr6", "G and VT"),
        ("p4d.24xlarge", "P"),
        ("p5en.48xlarge", "P5"),
        ("p6-b200.48xlarge", ""),
        ("trn1", "Trn"),
        ("inf2", "Inf"),
        ("hpc7a", ""),
    ],
)
def test_instance_types_have_the_quota_of_their_class(instance_type: str, name: str) -> None:
    assert quota_classes([instance_type]) == {name: [instance_type]}
    assert name in {*QUOTAS, ""}


def test_architecture_follows_from_the_family() -> None:
    for family in ("c7g", "m6gd.large", "c7gn", "t4g", "g5g", "r8g", "im4gn", "is4gen", "a1"):
        assert architectures([family]) == {"arm64"}, family
    for family in ("c7i", "g5", "g4dn", "gr6f", "g6e.xlarge", "p5en", "m7i-flex", "optimal"):
        assert architectures([family]) == {"amd64"}, family


def test_gpu_families_before_turing_are_recognized() -> None:
    types = ["p3.2xlarge", "p3dn", "g3s", "g4dn", "g4ad", "g5", "p4d", "c7i", "p2"]
    assert families_without_cuda_13(types) == ["p3", "p3dn", "g3s", "p2"]
    assert nvidia_families(["g4ad", "g5.xlarge", "g5.2xlarge", "c7i"]) == ["g5"]


def group(**rule: Any) -> dict[str, Any]:
    return {"GroupId": "sg-1", "IpPermissions": [{"IpProtocol": "-1", **rule}]}


@pytest.mark.parametrize(
    ("groups", "is_open"),
    [
        ([group(UserIdGroupPairs=[{"GroupId": "sg-1"}])], True),
        ([group(UserIdGroupPairs=[{"GroupId": "sg-2"}])], False),
        ([group(UserIdGroupPairs=[{"GroupId": "sg-2"}]), {"GroupId": "sg-2"}], True),
        ([group(IpRanges=[{"CidrIp": "10.0.0.0/16"}])], True),
        ([group(IpRanges=[{"CidrIp": "10.0.1.0/25"}])], False),
        (
            [
                group(
                    IpProtocol="tcp",
                    FromPort=22,
                    ToPort=22,
                    UserIdGroupPairs=[{"GroupId": "sg-1"}],
                )
            ],
            False,
        ),
        (
            [
                group(
                    IpProtocol="tcp",
                    FromPort=1024,
                    ToPort=65535,
                    UserIdGroupPairs=[{"GroupId": "sg-1"}],
                )
            ],
            True,
        ),
        ([group(IpProtocol="udp", UserIdGroupPairs=[{"GroupId": "sg-1"}])], False),
        ([{"GroupId": "sg-1"}], False),
    ],
)
def test_machines_connect_if_a_rule_covers_members_and_ephemeral_ports(
    groups: list[dict[str, Any]], is_open: bool
) -> None:
    assert is_open_between_members(groups, [SUBNET]) is is_open


def table(*routes: dict[str, str], main: bool = True) -> dict[str, Any]:
    association = {"Main": True} if main else {"SubnetId": "subnet-1"}
    return {"Routes": list(routes), "Associations": [association]}


DEFAULT = {"DestinationCidrBlock": "0.0.0.0/0"}
S3_GATEWAY = {"DestinationPrefixListId": "pl-1", "GatewayId": "vpce-1"}


def endpoint(service: str) -> dict[str, str]:
    return {"ServiceName": f"com.amazonaws.eu-west-1.{service}", "State": "available"}


def test_public_subnet_reaches_aws() -> None:
    how, problems = route_problems(SUBNET, [table({**DEFAULT, "GatewayId": "igw-1"})], [])
    assert (how, problems) == ("through an internet gateway", [])


def test_machines_without_public_address_do_not_use_an_internet_gateway() -> None:
    subnet = {**SUBNET, "MapPublicIpOnLaunch": False}
    _, [problem] = route_problems(subnet, [table({**DEFAULT, "GatewayId": "igw-1"})], [])
    assert "does not give its machines public addresses" in problem


def test_traffic_of_the_bucket_through_a_nat_gateway_is_mentioned() -> None:
    nat = {**DEFAULT, "NatGatewayId": "nat-1"}
    assert "charges" in route_problems(SUBNET, [table(nat)], [])[0]
    assert "charges" not in route_problems(SUBNET, [table(nat, S3_GATEWAY)], [])[0]


def test_private_subnet_needs_all_endpoints() -> None:
    _, [problem] = route_problems(SUBNET, [table()], [endpoint("s3"), endpoint("ecr.api")])
    assert problem.endswith("no endpoint for batch, ecr.dkr, ecs, ecs-agent, ecs-telemetry, logs")
    assert not route_problems(SUBNET, [table()], [endpoint(one) for one in SERVICES])[1]
    interfaces = [endpoint(one) for one in SERVICES if one != "s3"]
    assert not route_problems(SUBNET, [table(S3_GATEWAY)], interfaces)[1]


def test_blackhole_routes_and_other_tables_do_not_count() -> None:
    dead = {**DEFAULT, "NatGatewayId": "nat-1", "State": "blackhole"}
    main = table({**DEFAULT, "GatewayId": "igw-1"})
    assert route_problems(SUBNET, [table(dead)], [])[1]
    assert route_problems(SUBNET, [main, table(main=False)], [])[1], "the explicit table applies"


@pytest.mark.parametrize(
    ("path", "repository", "image_id"),
    [
        ("a/b:1", "a/b", {"imageTag": "1"}),
        ("a", "a", {"imageTag": "latest"}),
        ("a:1@sha256:00", "a", {"imageDigest": "sha256:00"}),
    ],
)
def test_ecr_image_is_parsed(path: str, repository: str, image_id: dict[str, str]) -> None:
    image = f"123.dkr.ecr.eu-west-1.amazonaws.com/{path}"
    assert parse_ecr_image(image) == ("123", "eu-west-1", repository, image_id)
    assert parse_ecr_image(f"docker.io/{path}") is None


def test_markets_are_those_of_types_that_aws_knows() -> None:
    loaders = pytest.importorskip("botocore.loaders")
    model = loaders.Loader().load_service_model("batch", "service-2")
    assert set(_MARKETS) <= set(model["shapes"]["CRType"]["enum"])


@pytest.mark.parametrize(
    ("types", "market"),
    [
        ({"SPOT"}, Market.SPOT),
        ({"EC2"}, Market.ON_DEMAND),
        ({"SPOT", "EC2"}, None),
        ({"ECS_MANAGED_INSTANCES"}, None),
        (set(), Market.ON_DEMAND),
    ],
)
def test_market_of_a_queue(types: set[str], market: Market | None) -> None:
    assert market_of(types, Market.ON_DEMAND) is market
