"""Account checks of the machines: quotas, firewall, routes, regions, and the image's architecture.

They read more of the account than runs need. Without a permission the check is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ConfigError, QuotaError
from spotfit.core.ids import Token
from spotfit.core.units import format_count
from spotfit.model.group import GroupRequest
from spotfit.provision.api import AccountCheck, CheckSkippedError, run_check, skip_if_denied
from spotfit_provisioners.aws_batch import environments, render
from spotfit_provisioners.aws_batch.client import AwsAccountClient, unreadable_answer_errors
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.job_fields import images

_REMEDY_REGION = (
    "Use a bucket and queues of one region; traffic between regions is slow and billed."
)


@contextmanager
def _optional_read() -> Iterator[None]:
    """Turn a failure to read into a skipped check: it does not prove that something is missing."""
    try:
        with skip_if_denied():
            yield
    except unreadable_answer_errors() as error:
        raise CheckSkippedError(f"AWS could not be asked: {str(error).splitlines()[0]}") from error


class EnvironmentChecks:
    """Checks of one compute environment of a queue in `region`."""

    def __init__(
        self,
        options: AwsBatchOptions,
        region: str,
        environment: Mapping[str, Any],
        *,
        is_optional: bool = False,
    ) -> None:
        """`is_optional`: only groups that request on-demand machines need the environment."""
        self._is_optional = is_optional
        self._options = options
        self._account = AwsAccountClient(region, options.endpoint)
        self._region = region
        self._name = str(environment["computeEnvironmentName"])
        self._resources: Mapping[str, Any] = environment.get("computeResources", {})
        self._types: list[str] = list(self._resources.get("instanceTypes", []))
        self._network: list[dict[str, Any]] = []

    def run(self) -> Iterator[AccountCheck]:
        checks: Mapping[str, Callable[[], str]] = {
            "the quota of {} allows a machine": self._check_quota,
            "machines of {} can connect to each other": self._check_security_groups,
            "machines of {} reach AWS": self._check_routes,
            "machines of {} can run the image": self._check_families,
        }
        for title, check in checks.items():
            yield run_check(title.format(self._name), check)

    def _check_quota(self) -> str:
        """Raise `QuotaError` if no family has enough vCPUs for one machine."""
        is_spot = self._resources.get("type") == "SPOT"
        request = GroupRequest(token=Token("t-checkup"), num_workers=1, total_workers=1)
        container = render.plan(request, self._options).body["definition"]["containerProperties"]
        needs = {one["type"]: one["value"] for one in container["resourceRequirements"]}
        needed = float(needs["VCPU"])
        limits: dict[str, float] = {}
        classes = environments.quota_classes(self._types)
        for name in sorted(set(classes) - {""}):
            code = environments.QUOTAS[name][0 if is_spot else 1]
            with _optional_read():
                found = self._account.vcpu_quota(code)
            if found is not None:
                limits[f"'{found[0]}' ({code})"] = found[1]
        if not limits:
            raise CheckSkippedError(
                f"no quota is known for {', '.join(self._types) or 'its instance types'}"
            )
        text = "; ".join(f"{name}: {value:g} vCPUs" for name, value in limits.items())
        if "" not in classes and all(value < needed for value in limits.values()):
            if self._is_optional:
                raise CheckSkippedError(f"too small for on-demand machines: {text}")
            raise QuotaError(
                f"The quota of EC2 in {self._region} is too small for one machine of {self._name}, "
                f"which has at least {needed:g} vCPUs: {text}. New accounts have almost none.",
                do="Request a higher value of this quota in the console of Service Quotas, service "
                "Amazon EC2, for the same region; it takes hours to days.",
            )
        return text

    def _check_security_groups(self) -> str:
        """Raise `ConfigError` if the firewall of the machines rejects connections among them."""
        with _optional_read():
            ids = self._security_group_ids()
            groups = self._account.describe_ec2("security_groups", GroupIds=ids)
            subnets = self._account.describe_ec2("subnets", SubnetIds=self._subnet_ids())
        if not environments.is_open_between_members(groups, subnets):
            raise ConfigError(
                f"The security groups {', '.join(ids)} of {self._name} do not accept TCP "
                "connections from their own members, so agents cannot reach each other.",
                do="`aws ec2 authorize-security-group-ingress --group-id "
                f"{ids[0]} --protocol all --source-group {ids[0]}`.",
            )
        return ", ".join(ids)

    def _security_group_ids(self) -> list[str]:
        """Return the groups of the environment, or those of its launch template."""
        if ids := list(self._resources.get("securityGroupIds") or []):
            return ids
        if template := self._resources.get("launchTemplate"):
            data = self._account.launch_template(template)
            nested = [one.get("Groups", []) for one in data.get("NetworkInterfaces", [])]
            ids = [*data.get("SecurityGroupIds", []), *(one for group in nested for one in group)]
        if not ids:
            raise CheckSkippedError(f"the security groups of {self._name} are not known")
        return list(dict.fromkeys(ids))

    def _subnet_ids(self) -> list[str]:
        if ids := list(self._resources.get("subnets") or []):
            return ids
        raise CheckSkippedError(f"the subnets of {self._name} are not known")

    def _check_routes(self) -> str:
        """Raise `ConfigError` if a subnet reaches neither the registry nor the bucket."""
        with _optional_read():
            subnets = self._account.describe_ec2("subnets", SubnetIds=self._subnet_ids())
            networks = sorted({subnet["VpcId"] for subnet in subnets})
            of_network = [{"Name": "vpc-id", "Values": networks}]
            tables = self._account.describe_ec2("route_tables", Filters=of_network)
            endpoints = self._account.describe_ec2("vpc_endpoints", Filters=of_network)
        found = [environments.route_problems(subnet, tables, endpoints) for subnet in subnets]
        if problems := [problem for _, of_subnet in found for problem in of_subnet]:
            raise ConfigError(
                f"Machines of {self._name} cannot reach the bucket, the registry or AWS Batch: "
                f"{'; '.join(problems)}.",
                do="Add a NAT gateway or the endpoints, or use subnets that assign public "
                "addresses. s3_endpoint of infra/terraform/stacks/aws creates that of S3.",
            )
        return (
            f"{format_count(len(subnets), 'subnet')} {'; '.join(sorted({how for how, _ in found}))}"
        )

    def _check_families(self) -> str:
        """Raise `ConfigError` for GPUs that the CUDA version of a worker image does not support."""
        # Tags of worker_image/bake.sh end with the kind of the image.
        if images.is_cpu_image(self._options.image):
            return "the image uses no GPUs"
        if not images.is_cuda_image(self._options.image):
            raise CheckSkippedError("the name of the image does not tell its version of CUDA")
        if old := environments.families_without_cuda_13(self._types):
            raise ConfigError(
                f"{self._name} contains {', '.join(old)}, whose GPUs CUDA 13 does not support; "
                "the worker image is built with it.",
                do="Remove these families, or build an image with CUDA 12: "
                "worker_image/README.md shows how.",
            )
        gpus = environments.nvidia_families(self._types)
        if not gpus:
            raise CheckSkippedError(
                "no family has GPUs of NVIDIA: workers with use_gpu=True would wait indefinitely"
            )
        return f"CUDA 13 supports {', '.join(gpus)}"

    def check_architecture(self, platforms: list[str]) -> None:
        """Raise `ConfigError` if the image cannot run on the processors of the environment."""
        missing = sorted(environments.architectures(self._types) - set(platforms))
        if missing:
            raise ConfigError(
                f"The image is built for {', '.join(platforms)}, but {self._name} has machines "
                f"with {', '.join(missing)}, on which it would end with 'exec format error'.",
                do="Build the image with worker_image/bake.sh, which builds for linux/amd64, or "
                "choose instance types of the other architecture.",
            )


def check_architecture(options: AwsBatchOptions, checks: list[EnvironmentChecks]) -> str:
    """Raise `ConfigError` if the image cannot run on the processors of a compute environment."""
    parsed = environments.parse_ecr_image(options.image)
    if parsed is None:
        raise CheckSkippedError(f"{options.image} is not in Amazon ECR")
    account, region, repository, image_id = parsed
    with _optional_read():
        client = AwsAccountClient(region, options.endpoint)
        platforms = client.image_platforms(account, repository, image_id)
    if not platforms:
        raise CheckSkippedError("the image does not name its architecture")
    for one in checks:
        one.check_architecture(platforms)
    return ", ".join(platforms)


def check_bucket_region(options: AwsBatchOptions, storage: str, regions: list[str]) -> str:
    """Raise `ConfigError` if no queue is in the region of the bucket."""
    with _optional_read():
        client = AwsAccountClient(options.region or regions[0], options.endpoint)
        found = client.bucket_region(urlsplit(storage).netloc)
    if found not in regions:
        raise ConfigError(
            f"The bucket of {storage} is in {found}, but the queues are in {', '.join(regions)}.",
            do=_REMEDY_REGION,
        )
    if others := [region for region in regions if region != found]:
        return f"{found}; machines in {', '.join(others)} use it across regions, which is billed"
    return found
