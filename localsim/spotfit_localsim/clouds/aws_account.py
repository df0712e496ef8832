"""What surrounds the machines of the simulated AWS account: network, quotas, image and bucket.

Read only by the checks of `spotfit doctor`. Formats of EC2's query protocol, Service Quotas, ECR
and S3 are those of botocore's models.
"""

from __future__ import annotations

from typing import Any

import msgspec


class AwsAccountSurroundings(msgspec.Struct):
    """Each value is one that passes the checks."""

    vcpu_quota: float = 256.0
    """vCPUs of every quota of running instances."""
    accepts_own_members: bool = True
    """The security group accepts connections from its members."""
    has_public_addresses: bool = True
    """The subnet assigns public addresses to machines."""
    image_architecture: str = "amd64"
    bucket_region: str = "sim-east-1"

    def describe(self, action: str) -> str | None:
        """Return the response of an action of EC2 as XML; None if it is none of these."""
        own = "<groups><item><groupId>sg-1</groupId></item></groups>"
        rule = f"<item><ipProtocol>-1</ipProtocol>{own}</item>" if self.accepts_own_members else ""
        route = (
            "<item><destinationCidrBlock>0.0.0.0/0</destinationCidrBlock><gatewayId>igw-1"
            "</gatewayId><state>active</state></item>"
        )
        items = {
            "DescribeSecurityGroups": (
                "securityGroupInfo",
                f"<groupId>sg-1</groupId><vpcId>vpc-1</vpcId><ipPermissions>{rule}</ipPermissions>",
            ),
            "DescribeSubnets": (
                "subnetSet",
                "<subnetId>subnet-1</subnetId><vpcId>vpc-1</vpcId><cidrBlock>10.0.0.0/24</cidrBlock>"
                f"<mapPublicIpOnLaunch>{str(self.has_public_addresses).lower()}"
                "</mapPublicIpOnLaunch>",
            ),
            "DescribeRouteTables": (
                "routeTableSet",
                f"<routeTableId>rtb-1</routeTableId><routeSet>{route}</routeSet><associationSet>"
                "<item><main>true</main></item></associationSet>",
            ),
            "DescribeVpcEndpoints": ("vpcEndpointSet", ""),
        }
        if action not in items:
            return None
        name, item = items[action]
        listed = f"<item>{item}</item>" if item else ""
        return f"<{action}Response><{name}>{listed}</{name}></{action}Response>"

    def quota(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a quota of Service Quotas."""
        code = body["QuotaCode"]
        return {
            "Quota": {"QuotaCode": code, "QuotaName": f"vCPUs {code}", "Value": self.vcpu_quota}
        }

    def image_index(self) -> dict[str, Any]:
        """Return the index of a multi-platform image, with the attestation of its build."""
        platform = {"architecture": self.image_architecture, "os": "linux"}
        unknown = {"architecture": "unknown", "os": "unknown"}
        return {
            "schemaVersion": 2,
            "manifests": [{"platform": platform}, {"platform": unknown}],
        }
