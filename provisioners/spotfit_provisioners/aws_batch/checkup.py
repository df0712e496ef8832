"""Account checks of the AWS Batch backend.

Permissions are checked with IAM's policy simulation. If the caller may not use it, permission
probes are made instead: calls without effect, which AWS denies before it checks their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.provision.api import AccountCheck, CheckSkippedError, run_check, skip_if_denied
from spotfit_provisioners.aws_batch import environments
from spotfit_provisioners.aws_batch.client import (
    AwsAccountClient,
    AwsBatchClient,
    caller_arn,
    probe_permission,
    unreadable_answer_errors,
)
from spotfit_provisioners.aws_batch.environment_checkup import (
    EnvironmentChecks,
    check_architecture,
    check_bucket_region,
)
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.aws_batch.render import LOG_GROUP, QUEUE_TAG

# The service that assumes the roles of containers: Batch runs jobs as ECS tasks.
_ECS_TASKS_SERVICE = "ecs-tasks.amazonaws.com"
_REMEDY_QUEUE = (
    "Create a queue with infra/terraform/stacks/aws, or correct AwsBatchOptions(queues=…, "
    "on_demand_queues=…)."
)
_REMEDY_PERMISSIONS = (
    "Grant the permissions that infra/terraform/modules/aws_batch lists under 'controller'."
)
_REMEDY_BUCKET_PERMISSIONS = (
    "Grant the permissions that infra/terraform/modules/bucket_s3 lists under 'runs'."
)

_INSTANCES = {"SPOT": "spot instances", "EC2": "on-demand instances, at their full price"}
"""Types of compute environments that can run agents. A queue with environments of type SPOT and
then EC2 falls back to on-demand instances."""
_ON_DEMAND_INSTANCES = {"EC2": "on-demand instances, for groups that request them"}
"""As `_INSTANCES`, for `on_demand_queues`."""

_ORDER_PERMISSIONS = {
    "price": "ec2:DescribeSpotPriceHistory",
    "score": "ec2:GetSpotPlacementScores",
}

QueueResolver = Callable[[str], tuple[AwsBatchClient, str]]
"""Returns the client of a queue's region, and the queue's name without the region."""


@dataclass(frozen=True, slots=True)
class AwsRequiredPermissions:
    """IAM actions that a principal needs on each of the resources."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    context: Mapping[str, str] = field(default_factory=dict)
    do: str = _REMEDY_PERMISSIONS


@dataclass(frozen=True, slots=True)
class AwsPrincipal:
    """A parsed principal ARN such as 'arn:aws:sts::123:assumed-role/role-name/session'."""

    arn: str

    @property
    def partition(self) -> str:
        return self.arn.split(":")[1]

    @property
    def account(self) -> str:
        return self.arn.split(":")[4]

    @property
    def principal_type(self) -> str:
        """'user', 'assumed-role', 'role', 'federated-user' or 'root'."""
        return self.arn.split(":", 5)[5].partition("/")[0]

    @property
    def role_name(self) -> str:
        """The name of the role without its path."""
        parts = self.arn.split(":", 5)[5].split("/")
        return parts[1] if self.principal_type == "assumed-role" else parts[-1]


def check_account(
    options: AwsBatchOptions, storage: str, resolve_queue: QueueResolver
) -> Iterator[AccountCheck]:
    """Check credentials, queues, permissions, roles, logs and the image.

    Without valid credentials, only the queues are checked.
    """
    arns: list[str] = []

    def identify() -> str:
        arns.append(caller_arn(options.region, options.endpoint))
        return arns[-1]

    yield run_check("AWS credentials are valid", identify)
    for queue in options.queues:
        yield from _check_queue(queue, resolve_queue, _INSTANCES)
    for queue in options.on_demand_queues:
        yield from _check_queue(queue, resolve_queue, _ON_DEMAND_INSTANCES)
    if arns:
        yield from _check_machines(options, storage, resolve_queue)
        checks = _AwsAccountChecks(
            options, storage, resolve_queue=resolve_queue, principal=AwsPrincipal(arns[0])
        )
        yield from checks.run()


# --- queues -----------------------------------------------------------------------------------


def _check_queue(
    queue: str, resolve_queue: QueueResolver, instances: Mapping[str, str] = _INSTANCES
) -> Iterator[AccountCheck]:
    """Check a queue whose environments may have the types that `instances` names."""
    names: list[str] = []

    def list_environments() -> None:
        client, name = resolve_queue(queue)
        found = client.find_queue(name)
        if found is None:
            raise ConfigError(
                f"The job queue {name!r} does not exist in {client.region}.", do=_REMEDY_QUEUE
            )
        if found["state"] != "ENABLED" or found["status"] != "VALID":
            reason = found.get("statusReason") or "no reason given"
            raise ConfigError(
                f"The job queue {name!r} is {found['state']} and {found['status']}: {reason}.",
                do=_REMEDY_QUEUE,
            )
        names.extend(entry["computeEnvironment"] for entry in found["computeEnvironmentOrder"])

    yield run_check(f"job queue {queue} accepts jobs", list_environments)
    for name in names:  # none if the queue accepts no jobs
        short = name.rpartition("/")[2]
        yield run_check(
            f"compute environment {short} can run jobs",
            lambda n=name: _check_environment(n, queue, resolve_queue, instances),  # type: ignore[misc]
        )


def _check_environment(
    name: str, queue: str, resolve_queue: QueueResolver, instances: Mapping[str, str]
) -> str:
    """Raise `ConfigError` if jobs would wait indefinitely. Return what the instances are."""
    found = resolve_queue(queue)[0].describe_compute_environments([name])
    if not found:
        raise ConfigError(
            f"The job queue {queue} uses the compute environment {name}, which does not exist.",
            do=_REMEDY_QUEUE,
        )
    (environment,) = found
    resources = environment.get("computeResources", {})
    problems: dict[str, str] = {}  # each with its remedy
    if environment["state"] != "ENABLED":
        problems["It is disabled."] = "`aws batch update-compute-environment --state ENABLED`."
    if environment["status"] != "VALID":
        reason = environment.get("statusReason") or "no reason given"
        problems[f"Its status is {environment['status']}: {reason}."] = (
            "Correct its roles, subnets or launch template; an INVALID environment starts no "
            "instances."
        )
    # An unmanaged environment has no computeResources, only the type 'UNMANAGED'.
    kind = str(resources.get("type", environment.get("type")))
    if kind not in instances:
        problems[f"Its type is {kind}."] = (
            "Use environments of type SPOT, or EC2 as a fallback."
            if "SPOT" in instances
            else "Use environments of type EC2 for the queues of on_demand_queues."
        )
    if not resources.get("maxvCpus"):
        problems["Its limit is 0 vCPUs."] = "Raise its maxvCpus."
    if problems:
        raise ConfigError(
            f"The compute environment {name} cannot run jobs of the queue {queue}. "
            f"{' '.join(problems)}",
            do=" ".join(problems.values()),
        )
    types = ", ".join(resources["instanceTypes"])
    return f"{instances[kind]}: up to {resources['maxvCpus']} vCPUs of {types}"


def _check_machines(
    options: AwsBatchOptions, storage: str, resolve_queue: QueueResolver
) -> Iterator[AccountCheck]:
    """Check quotas, network, regions and image of the compute environments that can be read."""
    regions: list[str] = []
    found: dict[tuple[str, str], EnvironmentChecks] = {}

    def read() -> None:
        for queue in (*options.queues, *options.on_demand_queues):
            client, name = resolve_queue(queue)
            order = (client.find_queue(name) or {}).get("computeEnvironmentOrder", [])
            regions.append(client.region)
            for one in client.describe_compute_environments(
                [entry["computeEnvironment"] for entry in order]
            ):
                if one.get("computeResources", {}).get("type") in _INSTANCES:
                    key = (client.region, one["computeEnvironmentName"])
                    # Two queues may share an environment.
                    is_optional = queue in options.on_demand_queues
                    checks = EnvironmentChecks(options, client.region, one, is_optional=is_optional)
                    found.setdefault(key, checks)

    # What cannot be read has been reported by the checks of the queues.
    run_check("", read)
    for checks in found.values():
        yield from checks.run()
    if storage.startswith("s3://") and regions:
        yield run_check(
            "the bucket is in the region of the queues",
            lambda: check_bucket_region(options, storage, list(dict.fromkeys(regions))),
        )
    yield run_check(
        "the image is built for the processors of the machines",
        lambda: check_architecture(options, list(found.values())),
    )


# --- rights, roles, logs and the image --------------------------------------------------------


class _AwsAccountChecks:
    """Checks that need the caller's identity."""

    def __init__(
        self,
        options: AwsBatchOptions,
        storage: str,
        resolve_queue: QueueResolver,
        principal: AwsPrincipal,
    ) -> None:
        self._options = options
        self._resolve_queue = resolve_queue
        self._principal = principal
        self._bucket = storage if storage.startswith("s3://") else ""
        self._account = AwsAccountClient(options.region, options.endpoint)

    def run(self) -> Iterator[AccountCheck]:
        yield from self._check_own_permissions()
        yield from self._check_agents()
        if self._options.execution_role:
            arn = self._options.execution_role
            yield run_check(
                "the execution role can be assumed", lambda: self._check_trust_policy(arn)
            )
        yield run_check("machine output is stored", self._check_log_group)
        yield run_check("the image exists", self._check_image)

    def _check_own_permissions(self) -> Iterator[AccountCheck]:
        """Simulate the caller's policies; make permission probes if that is inconclusive."""
        simulated = run_check(
            "the caller may rent machines",
            lambda: self._require_permissions(
                self._own_principal_arn(), self._required_permissions()
            ),
        )
        if simulated.conclusive or not simulated.passed:
            yield simulated
            return
        yield AccountCheck(
            "the caller has batch:TerminateJob",
            passed=True,
            detail="a policy may permit it only for jobs with the tag of their queue, so a job "
            "that does not exist cannot show it",
            conclusive=False,
        )
        # One queue as an example: a policy that permits only some queues is not detected.
        for queue in self._options.queues[:1]:
            client, name = self._resolve_queue(queue)
            for permission, call in client.permission_probes(name):
                yield run_check(
                    f"the caller has {permission}",
                    lambda c=call, p=permission: _run_probe(c, p),  # type: ignore[misc]
                )

    def _check_agents(self) -> Iterator[AccountCheck]:
        """Check the agents' role: agents rent replacements and use the bucket."""
        arn = self._options.job_role
        if not arn:
            yield AccountCheck(
                "agents have the required permissions",
                passed=True,
                detail="no job_role is set: agents have the role of their instance",
                conclusive=False,
            )
            return
        yield run_check("the agents' role can be assumed", lambda: self._check_trust_policy(arn))
        yield run_check(
            "agents may rent machines",
            lambda: self._require_permissions(arn, self._required_permissions()),
        )
        if self._bucket:
            what = f"agents may use {self._bucket}"
            yield run_check(
                what, lambda: self._require_permissions(arn, self._bucket_permissions())
            )

    def _own_principal_arn(self) -> str:
        """Return the caller's ARN; of an assumed role the ARN of the role, not of the session."""
        principal = self._principal
        if principal.principal_type != "assumed-role":
            return principal.arn
        # The ARN of a session omits the path of its role, which only IAM knows.
        plain = f"arn:{principal.partition}:iam::{principal.account}:role/{principal.role_name}"
        try:
            found = self._account.find_role(principal.role_name)
        except ProvisionPermissionError:
            return plain
        return str(found["Arn"]) if found else plain

    def _require_permissions(self, arn: str, needed: Iterable[AwsRequiredPermissions]) -> str:
        """Raise `ProvisionPermissionError` naming all missing permissions."""
        principal, required = AwsPrincipal(arn), tuple(needed)
        if principal.principal_type in ("root", "federated-user"):
            raise CheckSkippedError(f"IAM cannot simulate a {principal.principal_type}")
        if denied := [
            (action, permissions.do)
            for permissions in required
            for action in self._list_denied_actions(arn, permissions)
        ]:
            raise ProvisionPermissionError(
                f"The IAM principal {arn} lacks {', '.join(action for action, _ in denied)}.",
                do=" ".join(dict.fromkeys(do for _, do in denied)),
            )
        count = len({action for permissions in required for action in permissions.actions})
        return f"{count} permissions of {principal.role_name}"

    def _list_denied_actions(self, arn: str, permissions: AwsRequiredPermissions) -> list[str]:
        """Return the denied actions. Raises `CheckSkippedError` if IAM does not answer."""
        try:
            with skip_if_denied():
                return self._account.list_denied_actions(
                    arn,
                    actions=permissions.actions,
                    resources=permissions.resources,
                    context=permissions.context,
                )
        except unreadable_answer_errors() as error:
            raise CheckSkippedError(
                f"IAM could not be asked for the permissions of {arn}: {str(error).splitlines()[0]}"
            ) from error

    def _queue_permissions(self, queue: str) -> Iterator[AwsRequiredPermissions]:
        client, name = self._resolve_queue(queue)
        partition, place = self._principal.partition, f"{client.region}:{self._principal.account}"
        prefix = f"arn:{partition}:batch:{place}"
        arn = name if name.startswith("arn:") else f"{prefix}:job-queue/{name}"
        # Examples of names: policies may restrict actions to definitions of this prefix.
        definition, job = f"{prefix}:job-definition/spotfit-0", f"{prefix}:job/0"
        yield AwsRequiredPermissions(("batch:SubmitJob",), (arn, definition))
        yield AwsRequiredPermissions(("batch:RegisterJobDefinition",), (definition,))
        # The policies of infra/terraform permit both only with the tag of the queue.
        queue_name = arn.rpartition("/")[2]
        tags = {f"aws:{source}/{QUEUE_TAG}": queue_name for source in ("RequestTag", "ResourceTag")}
        yield AwsRequiredPermissions(("batch:TagResource", "batch:TerminateJob"), (job,), tags)

    def _required_permissions(self) -> Iterator[AwsRequiredPermissions]:
        # One queue of each kind as an example.
        for queue in (*self._options.queues[:1], *self._options.on_demand_queues[:1]):
            yield from self._queue_permissions(queue)
        # These actions support no resource-level permissions.
        reads = ("DescribeJobDefinitions", "DescribeJobQueues", "DescribeJobs", "ListJobs")
        yield AwsRequiredPermissions(tuple(f"batch:{action}" for action in reads), ("*",))
        if permission := _ORDER_PERMISSIONS.get(self._options.queue_order):
            yield AwsRequiredPermissions((permission,), ("*",))
        # Registering a definition that names a role passes the role to ECS.
        roles = (self._options.job_role, self._options.execution_role)
        if passed := tuple(filter(None, roles)):
            service = {"iam:PassedToService": _ECS_TASKS_SERVICE}
            yield AwsRequiredPermissions(("iam:PassRole",), passed, service)
        client, _ = self._resolve_queue(self._options.queues[0])
        place = f"{client.region}:{self._principal.account}"
        partition = self._principal.partition
        stream = f"arn:{partition}:logs:{place}:log-group:{self._options.log_group}:log-stream:x"
        yield AwsRequiredPermissions(("logs:GetLogEvents",), (stream,))

    def _bucket_permissions(self) -> Iterator[AwsRequiredPermissions]:
        url = urlsplit(self._bucket)
        bucket = f"arn:{self._principal.partition}:s3:::{url.netloc}"
        prefix = "/".join(filter(None, (bucket, url.path.strip("/"))))
        # Listing is a permission on the bucket, the others are permissions on its objects.
        objects = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
        yield AwsRequiredPermissions(("s3:ListBucket",), (bucket,), do=_REMEDY_BUCKET_PERMISSIONS)
        actions = tuple(f"s3:{action}" for action in objects)
        yield AwsRequiredPermissions(actions, (f"{prefix}/x",), do=_REMEDY_BUCKET_PERMISSIONS)

    def _check_trust_policy(self, arn: str) -> str:
        """Raise `ConfigError` if the role is missing, or containers may not assume it."""
        with skip_if_denied():
            found = self._account.find_role(AwsPrincipal(arn).role_name)
        if found is None:
            raise ConfigError(
                f"The IAM role {arn} does not exist.",
                do="Correct AwsBatchOptions(job_role=…, execution_role=…), or create the role with "
                "infra/terraform/stacks/aws.",
            )
        if not _allows_service(found["AssumeRolePolicyDocument"], _ECS_TASKS_SERVICE):
            raise ConfigError(
                f"The trust policy of {arn} does not allow {_ECS_TASKS_SERVICE}.",
                do=f"Allow sts:AssumeRole to the service {_ECS_TASKS_SERVICE} in its trust policy.",
            )
        return f"{AwsPrincipal(arn).role_name}, by {_ECS_TASKS_SERVICE}"

    def _check_log_group(self) -> str:
        group = self._options.log_group
        with skip_if_denied():
            exists = self._account.has_log_group(group)
        if exists:
            return group
        # Batch creates only its own group; jobs of others would fail to start.
        if group != LOG_GROUP:
            raise ConfigError(
                f"AwsBatchOptions(log_group={group!r}): the log group does not exist.",
                do="`aws logs create-log-group`, or apply infra/terraform/stacks/aws.",
            )
        return f"{group} will be created with the first job"

    def _check_image(self) -> str:
        """Raise `ConfigError` if the image is missing. Checks only images in Amazon ECR."""
        image = self._options.image
        parsed = environments.parse_ecr_image(image)
        if parsed is None:
            raise CheckSkippedError(f"{image} is not in Amazon ECR")
        account, region, repository, image_id = parsed
        with skip_if_denied():
            exists = AwsAccountClient(region, self._options.endpoint).has_image(
                account, repository, image_id
            )
        if not exists:
            raise ConfigError(
                f"AwsBatchOptions(image={image!r}): the registry does not contain this image.",
                do="Build and push it with worker_image/bake.sh, or correct the name.",
            )
        return image


def _run_probe(call: Callable[[], Any], permission: str) -> str:
    probe_permission(call, f"use {permission}")
    return "a call without effect was not denied"


def _allows_service(policy: Mapping[str, Any], service: str) -> bool:
    """Return whether the trust policy allows the service to assume the role."""
    # A policy may have one statement or service in place of a list, and '*' in place of principals.
    statements = policy.get("Statement", [])
    for statement in statements if isinstance(statements, list) else [statements]:
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, Mapping) else []
        allowed = [services] if isinstance(services, str) else services
        if statement.get("Effect") == "Allow" and service in allowed:
            return True
    return False
