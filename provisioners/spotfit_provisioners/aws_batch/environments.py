"""What compute environments need from the account: quotas, network, architecture and GPU families.

Pure evaluation of descriptions of the AWS APIs; `checkup` reads them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spotfit.model.offer import Market

# vCPUs of running instances per region, by class of instance families: the codes of spot and of
# on-demand instances. https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
QUOTAS: Mapping[str, tuple[str, str]] = {
    "standard": ("L-34B43A08", "L-1216C47A"),
    "G and VT": ("L-3819A6DF", "L-DB2E81BA"),
    "P": ("L-7212CCBC", "L-417A185B"),  # of spot: P2, P3 and P4
    "P5": ("L-C4BD4855", "L-417A185B"),
    "Inf": ("L-B5D1601B", "L-1945791B"),
    "Trn": ("L-6B0D517C", "L-2C3B7624"),
    "DL": ("L-85EED4F7", "L-6E869C2A"),
    "F": ("L-88CF9481", "L-74FC7D96"),
    "X": ("L-E3A00192", "L-7295265B"),
}
_CLASS_BY_PREFIX: Mapping[str, str] = {
    **dict.fromkeys(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), "standard"),
    **dict.fromkeys(("g", "gr", "vt"), "G and VT"),
    "p": "P",
    "inf": "Inf",
    "trn": "Trn",
    "dl": "DL",
    "f": "F",
    "x": "X",
}
# Values of Batch that stand for families; all of them are standard ones.
_COLLECTIVE_TYPES = ("optimal", "default_x86_64", "default_arm64")

_GRAVITON = re.compile(r"a1|default_arm64|p6e-gb\d+|[a-z]+\d+[a-z]*g[a-z]*")
_NVIDIA = re.compile(r"(g|gr|p)\d.*")
_AMD_GPU = re.compile(r"g4ad")
# Maxwell, Pascal and Volta: CUDA 13 supports Turing and later GPUs.
# https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/
_BEFORE_TURING = re.compile(r"p2|p3|p3dn|g2|g3|g3s")

# What an instance of Batch, its ECS agent and ours connect to besides the bucket.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/vpc-endpoints.html
_NEEDED_ENDPOINTS = (
    "batch",
    "ecr.api",
    "ecr.dkr",
    "ecs",
    "ecs-agent",
    "ecs-telemetry",
    "logs",
    "s3",
)
_EPHEMERAL_PORTS = (32768, 60999)  # net.ipv4.ip_local_port_range of Linux


_MARKETS: Mapping[str, Market] = {"SPOT": Market.SPOT, "EC2": Market.ON_DEMAND}
"""By the type of a compute environment:
https://docs.aws.amazon.com/batch/latest/APIReference/API_ComputeResource.html."""


def market_of(types: Collection[str], declared: Market) -> Market | None:
    """Return the market of a queue whose compute environments have these types.

    None if they are on several, or of another type. `declared` if no environment can be read.
    """
    markets = {_MARKETS.get(one) for one in types} if types else {declared}
    return markets.pop() if len(markets) == 1 else None


def family(instance_type: str) -> str:
    """Return 'g5' for 'g5.xlarge' and for 'g5'."""
    return instance_type.partition(".")[0]


def quota_classes(instance_types: Iterable[str]) -> dict[str, list[str]]:
    """Return the instance types by class of `QUOTAS`; types of unknown classes under ''."""
    classes: dict[str, list[str]] = {}
    for instance_type in instance_types:
        prefix = re.match(r"[a-z]*", instance_type)
        name = _CLASS_BY_PREFIX.get(prefix[0] if prefix else "", "")
        if instance_type in _COLLECTIVE_TYPES:
            name = "standard"
        elif name == "P" and (generation := re.match(r"p(\d+)", instance_type)):
            # The quotas of spot instances of P6 are not documented there.
            name = {"5": "P5"}.get(generation[1], "P" if int(generation[1]) < 5 else "")
        classes.setdefault(name, []).append(instance_type)
    return classes


def architectures(instance_types: Iterable[str]) -> set[str]:
    """Return 'amd64' and 'arm64', as images name the architectures of these types."""
    return {"arm64" if _GRAVITON.fullmatch(family(one)) else "amd64" for one in instance_types}


def nvidia_families(instance_types: Iterable[str]) -> list[str]:
    """Return the families with GPUs of NVIDIA."""
    families = dict.fromkeys(map(family, instance_types))
    return [one for one in families if _NVIDIA.fullmatch(one) and not _AMD_GPU.fullmatch(one)]


def families_without_cuda_13(instance_types: Iterable[str]) -> list[str]:
    """Return the families with GPUs that CUDA 13 does not support."""
    return [one for one in nvidia_families(instance_types) if _BEFORE_TURING.fullmatch(one)]


def is_open_between_members(
    groups: Sequence[Mapping[str, Any]], subnets: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether machines in all `groups` accept TCP from each other on ephemeral ports.

    `groups` and `subnets` are descriptions of EC2.
    """
    own_ids = {group["GroupId"] for group in groups}
    blocks = [ipaddress.ip_network(subnet["CidrBlock"]) for subnet in subnets]
    rules = [rule for group in groups for rule in group.get("IpPermissions", [])]
    open_rules = [rule for rule in rules if _covers_ephemeral_ports(rule)]
    if any(
        pair.get("GroupId") in own_ids
        for rule in open_rules
        for pair in rule.get("UserIdGroupPairs", [])
    ):
        return True
    sources = [
        ipaddress.ip_network(entry["CidrIp"])
        for rule in open_rules
        for entry in rule.get("IpRanges", [])
    ]
    return bool(blocks) and all(
        any(block.subnet_of(source) for source in sources)  # type: ignore[arg-type]  # IPv4
        for block in blocks
    )


def _covers_ephemeral_ports(rule: Mapping[str, Any]) -> bool:
    if rule["IpProtocol"] == "-1":
        return True
    first, last = _EPHEMERAL_PORTS
    from_port, to_port = int(rule.get("FromPort", 65536)), int(rule.get("ToPort", -1))
    return rule["IpProtocol"] == "tcp" and from_port <= first and to_port >= last


def route_problems(
    subnet: Mapping[str, Any],
    route_tables: Sequence[Mapping[str, Any]],
    endpoints: Sequence[Mapping[str, Any]],
) -> tuple[str, list[str]]:
    """Return how machines in the subnet reach AWS, and why they do not; no problems if they do.

    `route_tables` and `endpoints` are those of the subnet's network, as EC2 describes them.
    """
    table = _route_table(subnet["SubnetId"], route_tables)
    routes = [one for one in table.get("Routes", []) if one.get("State") != "blackhole"]
    has_s3_gateway = any(
        str(route.get("GatewayId", "")).startswith("vpce-") for route in routes
    )  # gateway endpoints are routes; those of DynamoDB are not distinguished
    default = next((r for r in routes if r.get("DestinationCidrBlock") == "0.0.0.0/0"), None)
    if default is None:
        services = set(_endpoint_services(endpoints)) | ({"s3"} if has_s3_gateway else set())
        missing = [name for name in _NEEDED_ENDPOINTS if name not in services]
        return "through endpoints", [
            f"{subnet['SubnetId']} has no route to the internet, and its network has no endpoint "
            f"for {', '.join(missing)}"
        ] if missing else []
    if str(default.get("GatewayId", "")).startswith("igw-"):
        problems = (
            []
            if subnet.get("MapPublicIpOnLaunch")
            else [
                f"{subnet['SubnetId']} has a route through an internet gateway, but does not give "
                "its machines public addresses"
            ]
        )
        return "through an internet gateway", problems
    if default.get("NatGatewayId") and not has_s3_gateway:
        return "through a NAT gateway, which charges for the traffic of the bucket as well", []
    return "through a NAT gateway or another router", []


def _route_table(subnet_id: str, tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the table of the subnet; without an explicit one, the main table of its network."""
    associations = [(one, table) for table in tables for one in table.get("Associations", [])]
    explicit = [table for one, table in associations if one.get("SubnetId") == subnet_id]
    main = [table for one, table in associations if one.get("Main")]
    return next(iter([*explicit, *main]), {})


def _endpoint_services(endpoints: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for endpoint in endpoints:
        if endpoint.get("State", "available") == "available":
            yield str(endpoint["ServiceName"]).split(".", 3)[3]  # com.amazonaws.<region>.<service>


def parse_ecr_image(image: str) -> tuple[str, str, str, dict[str, str]] | None:
    """Return account, region, repository and image id of an image in Amazon ECR; None for others.

    Names are '<account>.dkr.ecr.<region>.amazonaws.com/repository:tag' or '…@digest'.
    """
    host, _, path = image.partition("/")
    labels = host.split(".")
    if labels[1:3] != ["dkr", "ecr"]:
        return None
    repository, _, digest = path.partition("@")
    if digest:  # a digest overrides a tag
        return labels[0], labels[3], repository.partition(":")[0], {"imageDigest": digest}
    repository, _, tag = path.partition(":")
    return labels[0], labels[3], repository, {"imageTag": tag or "latest"}
