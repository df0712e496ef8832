"""Calls of the AWS APIs, and translation of their errors. Contains no decisions.

`AwsBatchClient` has the calls that groups need, `AwsAccountClient` those of account checks.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

import msgspec

from spotfit.core.errors import (
    ConfigError,
    MissingExtraError,
    ProvisionError,
    ProvisionPermissionError,
    QuotaError,
)
from spotfit.host import env, log, system
from spotfit.host.plugins import require_module

_DESCRIBE_LIMIT = 100  # job ids per DescribeJobs call, a limit of the API
# Name of a job definition that does not exist, for permission probes.
_NONEXISTENT_NAME = "spotfit-checkup"
# Codes differ between services: EC2 reports AuthFailure, IAM and STS InvalidClientTokenId, the
# services with JSON protocols UnrecognizedClientException.
_AUTHENTICATION_CODES = (
    "AuthFailure",
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "MissingAuthenticationToken",
)
_PERMISSION_CODES = ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation")
_QUOTA_CODES = ("ServiceQuotaExceededException", "LimitExceededException")
_CLIENT_ERROR_CODES = ("ClientException", "ValidationException")
# Returned when the daily number of different spot placement score queries is exceeded.
_SCORE_LIMIT_CODE = "MaxConfigLimitExceeded"
_MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_QUOTA_WORDS = ("limit", "quota", "exceed")


class AwsBatchClient:
    """The AWS Batch API in one region.

    Permanent errors are raised as `ProvisionError` or `ConfigError`, transient ones as botocore's.
    """

    def __init__(self, region: str, endpoint: str) -> None:
        self._batch = _client("batch", region, endpoint)
        self.region = str(self._batch.meta.region_name)

    def register_definition(self, definition: Mapping[str, Any]) -> str:
        """Return the ARN of the job definition, registering it if it does not exist."""
        # The name contains a digest of the content, so a definition of that name is the same.
        name = definition["jobDefinitionName"]
        with _translate_errors("register a job definition"):
            # Every registration would create a further revision of the definition.
            found = self._batch.describe_job_definitions(
                jobDefinitionName=name, status="ACTIVE", maxResults=1
            )["jobDefinitions"]
            if found:
                return str(found[0]["jobDefinitionArn"])
            return str(self._batch.register_job_definition(**definition)["jobDefinitionArn"])

    def submit_job(self, job: Mapping[str, Any]) -> str:
        """Submit a job and return its id. Not idempotent: every call creates a job."""
        with _translate_errors(f"submit to {job['jobQueue']}"):
            return str(self._batch.submit_job(**job)["jobId"])

    def list_jobs_by_name(self, queue: str, name: str) -> list[dict[str, Any]]:
        """Return the jobs of that name, oldest first, without children of array jobs.

        Batch lists a finished job for at least 24 hours.
        """
        with _translate_errors(f"list the jobs of {queue}"):
            # With a filter, jobs in all states are listed; otherwise only those that run.
            pages = self._batch.get_paginator("list_jobs").paginate(
                jobQueue=queue, filters=[{"name": "JOB_NAME", "values": [name]}]
            )
            listed = [job for page in pages for job in page["jobSummaryList"]]
        found = [job for job in listed if ":" not in job["jobId"]]
        # Creation times may be equal; with the id every process sorts the jobs alike.
        return sorted(found, key=lambda job: (job["createdAt"], job["jobId"]))

    def describe_jobs(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the descriptions of jobs by id. Deleted jobs are missing from the result."""
        jobs: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), _DESCRIBE_LIMIT):
            with _translate_errors("describe jobs"):
                page = self._batch.describe_jobs(jobs=list(ids[start : start + _DESCRIBE_LIMIT]))
            jobs.update({job["jobId"]: job for job in page["jobs"]})
        return jobs

    def terminate_job(self, job_id: str, reason: str) -> None:
        """Terminate a job in any state."""
        # Not cancel_job: it has no effect on a job that is running.
        with _translate_errors("terminate a job"):
            self._batch.terminate_job(jobId=job_id, reason=reason)

    def terminate_job_if_known(self, job_id: str, reason: str) -> None:
        """Terminate a job that reads do not show; no error if it does not exist."""
        try:
            self.terminate_job(job_id, reason)
        except ProvisionPermissionError:
            raise
        except ProvisionError:
            # The only parameters are the id and the reason.
            log.info("aws_batch.unknown_job_not_terminated", job=job_id)

    def find_queue(self, name: str) -> dict[str, Any] | None:
        """Return the description of a job queue, or None if it does not exist."""
        with _translate_errors("describe job queues"):
            found = self._batch.describe_job_queues(jobQueues=[name])["jobQueues"]
        return dict(found[0]) if found else None

    def environment_types(self, queue: str) -> frozenset[str]:
        """Return the types of the queue's compute environments, such as 'SPOT' and 'EC2'."""
        found = self.find_queue(queue) or {}
        names = [one["computeEnvironment"] for one in found.get("computeEnvironmentOrder", [])]
        environments = self.describe_compute_environments(names) if names else []
        return frozenset(
            str(one.get("computeResources", {}).get("type", "")) for one in environments
        )

    def permission_probes(self, queue: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield permissions, each with a call that needs it and has no effect.

        AWS checks permissions before parameters, so an error other than a denial proves permission.
        """
        batch = self._batch
        yield (
            "batch:RegisterJobDefinition",
            lambda: batch.register_job_definition(
                jobDefinitionName=_NONEXISTENT_NAME, type="container"
            ),
        )
        yield (
            "batch:SubmitJob",
            lambda: batch.submit_job(
                jobName=_NONEXISTENT_NAME, jobQueue=queue, jobDefinition=_NONEXISTENT_NAME
            ),
        )
        yield "batch:DescribeJobs", lambda: batch.describe_jobs(jobs=[str(uuid.UUID(int=0))])
        yield "batch:ListJobs", lambda: batch.list_jobs(jobQueue=queue, maxResults=1)
        yield (
            "batch:DescribeJobDefinitions",
            lambda: batch.describe_job_definitions(
                jobDefinitionName=_NONEXISTENT_NAME, maxResults=1
            ),
        )

    def describe_compute_environments(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the descriptions of the compute environments that exist."""
        with _translate_errors("describe compute environments"):
            response = self._batch.describe_compute_environments(computeEnvironments=list(names))
        return [dict(environment) for environment in response["computeEnvironments"]]


class AwsAccountClient:
    """IAM, CloudWatch Logs and ECR calls of account checks and machine output."""

    def __init__(self, region: str, endpoint: str) -> None:
        self._region, self._endpoint = region, endpoint

    def find_role(self, name: str) -> dict[str, Any] | None:
        """Return the role with its trust policy as plain data, or None if it does not exist."""
        with _translate_errors("read a role (iam:GetRole)"):
            # Inside of the translation: a missing role is an outcome, any other error is not.
            try:
                return dict(self._client("iam").get_role(RoleName=name)["Role"])
            except self._client("iam").exceptions.NoSuchEntityException:
                return None

    def list_denied_actions(
        self,
        principal_arn: str,
        actions: Sequence[str],
        resources: Sequence[str],
        context: Mapping[str, str],
    ) -> list[str]:
        """Return the actions that the policies of the user or role do not allow.

        https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html
        """
        entries = [
            {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
            for key, value in context.items()
        ]
        pages = self._client("iam").get_paginator("simulate_principal_policy")
        with _translate_errors("simulate a policy (iam:SimulatePrincipalPolicy)"):
            results = [
                result
                for page in pages.paginate(
                    PolicySourceArn=principal_arn,
                    ActionNames=list(actions),
                    ResourceArns=list(resources),
                    ContextEntries=entries,
                )
                for result in page["EvaluationResults"]
            ]
        # 'implicitDeny' or 'explicitDeny' otherwise. An action may be listed several times.
        denied = [
            result["EvalActionName"] for result in results if result["EvalDecision"] != "allowed"
        ]
        return list(dict.fromkeys(denied))

    def has_log_group(self, name: str) -> bool:
        """Return whether the CloudWatch log group exists."""
        with _translate_errors("list log groups (logs:DescribeLogGroups)"):
            response = self._client("logs").describe_log_groups(logGroupNamePrefix=name)
        # Exact: the API filters by prefix.
        return any(group["logGroupName"] == name for group in response["logGroups"])

    def read_log(self, group: str, stream: str, max_lines: int) -> list[str]:
        """Return the last lines of a log stream; empty if it does not exist (yet)."""
        logs = self._client("logs")
        with _translate_errors("read machine output (logs:GetLogEvents)"):
            try:
                response = logs.get_log_events(
                    logGroupName=group, logStreamName=stream, limit=max_lines, startFromHead=False
                )
            except logs.exceptions.ResourceNotFoundException:
                return []
        return [str(event["message"]) for event in response["events"]]

    def has_image(self, account: str, repository: str, image_id: Mapping[str, str]) -> bool:
        """Return whether the ECR repository has the image with that tag or digest."""
        registry = self._client("ecr")
        with _translate_errors("describe images (ecr:DescribeImages)"):
            try:
                registry.describe_images(
                    registryId=account, repositoryName=repository, imageIds=[dict(image_id)]
                )
            except (
                registry.exceptions.ImageNotFoundException,
                registry.exceptions.RepositoryNotFoundException,
            ):
                return False
        return True

    def vcpu_quota(self, code: str) -> tuple[str, float] | None:
        """Return name and value of a quota of EC2; None if the region does not have it."""
        quotas = self._client("service-quotas")
        names = {"ServiceCode": "ec2", "QuotaCode": code}
        with _translate_errors("read a quota (servicequotas:GetServiceQuota)"):
            try:
                quota = quotas.get_service_quota(**names)["Quota"]
            except quotas.exceptions.NoSuchResourceException:
                # An account that never changed the quota may have only the default value.
                try:
                    quota = quotas.get_aws_default_service_quota(**names)["Quota"]
                except quotas.exceptions.NoSuchResourceException:
                    return None
        return str(quota["QuotaName"]), float(quota["Value"])

    def describe_ec2(self, kind: str, **arguments: Any) -> list[dict[str, Any]]:
        """Return all pages of a description of EC2, such as 'security_groups'."""
        operation = f"describe_{kind}"
        key = "".join(word.capitalize() for word in kind.split("_"))
        action = f"ec2:{''.join(word.capitalize() for word in operation.split('_'))}"
        with _translate_errors(f"read the network of the machines ({action})"):
            pages = self._client("ec2").get_paginator(operation).paginate(**arguments)
            return [dict(one) for page in pages for one in page[key]]

    def launch_template(self, template: Mapping[str, str]) -> dict[str, Any]:
        """Return the data of the launch template that a compute environment refers to."""
        names = {"launchTemplateId": "LaunchTemplateId", "launchTemplateName": "LaunchTemplateName"}
        given = {names[key]: value for key, value in template.items() if key in names}
        version = template.get("version") or "$Default"
        with _translate_errors("read a launch template (ec2:DescribeLaunchTemplateVersions)"):
            found = self._client("ec2").describe_launch_template_versions(
                **given, Versions=[version]
            )["LaunchTemplateVersions"]
        return dict(found[0]["LaunchTemplateData"]) if found else {}

    def bucket_region(self, bucket: str) -> str:
        """Return the region of the bucket."""
        errors = require_module("botocore.exceptions", extra="aws")
        with _translate_errors("find the region of the bucket (s3:ListBucket)"):
            try:
                headers = self._client("s3").head_bucket(Bucket=bucket)["ResponseMetadata"]
            except errors.ClientError as error:
                # S3 names the region also if it denies access or wants another region.
                headers = error.response.get("ResponseMetadata", {})
                if "x-amz-bucket-region" not in headers.get("HTTPHeaders", {}):
                    raise
        return str(headers["HTTPHeaders"]["x-amz-bucket-region"])

    def image_platforms(
        self, account: str, repository: str, image_id: Mapping[str, str]
    ) -> list[str]:
        """Return the architectures of an image in ECR, such as 'amd64'; empty if not known.

        An index lists them; a single image has its architecture in its configuration.
        """
        registry = self._client("ecr")
        where = {"registryId": account, "repositoryName": repository}
        with _translate_errors("read an image (ecr:BatchGetImage)"):
            found = registry.batch_get_image(
                **where, imageIds=[dict(image_id)], acceptedMediaTypes=list(_MANIFEST_TYPES)
            )["images"]
        manifest = msgspec.json.decode(found[0]["imageManifest"]) if found else {}
        if "manifests" in manifest:
            platforms = [one.get("platform", {}) for one in manifest["manifests"]]
            # Attestations of the build are entries of an unknown platform.
            names = [str(one.get("architecture", "unknown")) for one in platforms]
            return [name for name in names if name != "unknown"]
        digest = manifest.get("config", {}).get("digest")
        if not digest:
            return []
        with _translate_errors("read an image (ecr:GetDownloadUrlForLayer)"):
            url = registry.get_download_url_for_layer(**where, layerDigest=digest)["downloadUrl"]
        session = require_module("botocore.httpsession", extra="aws").URLLib3Session(timeout=20)
        request = require_module("botocore.awsrequest", extra="aws").AWSRequest("GET", url)
        configuration = msgspec.json.decode(session.send(request.prepare()).content)
        return [str(configuration["architecture"])] if "architecture" in configuration else []

    def _client(self, service: str) -> Any:
        return _client(service, self._region, self._endpoint)


def probe_permission(call: Callable[[], Any], action: str) -> None:
    """Make a permission probe. Raises `ProvisionPermissionError` if the permission is missing."""
    try:
        with _translate_errors(action):
            call()
    except ProvisionPermissionError:
        raise
    except ProvisionError:
        return  # the parameters were rejected, hence the permission check had succeeded


def unreadable_answer_errors() -> tuple[type[Exception], ...]:
    """Return the errors that boto3 raises for a missing or malformed response of AWS."""
    errors = require_module("botocore.exceptions", extra="aws")
    parsers = require_module("botocore.parsers", extra="aws")
    return (errors.BotoCoreError, errors.ClientError, parsers.ResponseParserError)


def lowest_spot_price_usd(region: str, instance_types: Sequence[str], endpoint: str) -> float:
    """Return the lowest current spot price (USD per hour) of the instance types; inf if none."""
    entries = list_spot_prices(region, instance_types, endpoint)
    return min((float(entry["SpotPrice"]) for entry in entries), default=float("inf"))


def list_spot_prices(
    region: str, instance_types: Sequence[str], endpoint: str
) -> list[dict[str, Any]]:
    """Return the spot prices in force, as EC2 describes them: by instance type and zone."""
    now = datetime.fromtimestamp(system.wall_ms() / 1000, UTC)
    with _translate_errors("read spot prices (ec2:DescribeSpotPriceHistory)"):
        pages = _client("ec2", region, endpoint).get_paginator("describe_spot_price_history")
        return [
            dict(entry)
            for page in pages.paginate(
                InstanceTypes=list(instance_types),
                ProductDescriptions=["Linux/UNIX"],
                # Without a start the API returns the prices of the last 90 days. It also returns
                # the last change before the start: the price that is in force now.
                StartTime=now,
                EndTime=now,
            )
            for entry in page["SpotPriceHistory"]
        ]


def list_products(region: str, instance_type: str, endpoint: str) -> list[str]:
    """Return the entries of AWS's price list for that instance type with Linux, as JSON."""
    filters = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        # The others are the prices of capacity reservations.
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
    }
    with _translate_errors("read the price list (pricing:GetProducts)"):
        client = _client("pricing", _pricing_region(region), endpoint)
        pages = client.get_paginator("get_products").paginate(
            ServiceCode="AmazonEC2",
            Filters=[
                {"Type": "TERM_MATCH", "Field": field, "Value": value}
                for field, value in filters.items()
            ],
        )
        return [str(entry) for page in pages for entry in page["PriceList"]]


def _pricing_region(region: str) -> str:
    """Return the region with an endpoint of the Price List API that serves `region`.

    https://docs.aws.amazon.com/general/latest/gr/billing.html lists the endpoints.
    """
    if region.startswith("cn-"):
        return "cn-northwest-1"
    nearest = {"eu": "eu-central-1", "ap": "ap-south-1"}
    return nearest.get(region.partition("-")[0], "us-east-1")


def spot_placement_scores(
    regions: Sequence[str], instance_types: Sequence[str], node_count: int, endpoint: str
) -> dict[str, int]:
    """Return a score from 1 to 10 per region: the likelihood of getting `node_count` machines.

    Empty if EC2's daily limit of different queries is exceeded.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
    """
    errors = require_module("botocore.exceptions", extra="aws")
    pages = _client("ec2", regions[0], endpoint).get_paginator("get_spot_placement_scores")
    scores: dict[str, int] = {}
    with _translate_errors("read spot placement scores"):
        try:
            for page in pages.paginate(
                InstanceTypes=list(instance_types),
                # Number of instances, not of vCPUs or GiB.
                TargetCapacity=node_count,
                TargetCapacityUnitType="units",
                RegionNames=list(regions),
            ):
                scores |= {entry["Region"]: entry["Score"] for entry in page["SpotPlacementScores"]}
        except errors.ClientError as error:
            # The scores only order the queues, so the submission continues without them.
            if error.response.get("Error", {}).get("Code") != _SCORE_LIMIT_CODE:
                raise
            log.warning("aws_batch.placement_scores_unavailable", reason=str(error))
    return scores


def caller_arn(region: str, endpoint: str) -> str:
    """Return the ARN of the caller's AWS identity."""
    with _translate_errors("identify the caller"):
        return str(_client("sts", region, endpoint).get_caller_identity()["Arn"])


def configured_region() -> str:
    """Return the region of AWS_REGION, AWS_DEFAULT_REGION or the profile of this process; or ''.

    '' also if boto3 is not installed, which is reported once it is needed.
    """
    # boto3 reads only AWS_DEFAULT_REGION. The other AWS SDKs read AWS_REGION, which is documented:
    # https://docs.aws.amazon.com/sdkref/latest/guide/feature-region.html
    if region := env.lookup("AWS_REGION"):
        return region
    with contextlib.suppress(MissingExtraError):
        return str(require_module("boto3.session", extra="aws").Session().region_name or "")
    return env.lookup("AWS_DEFAULT_REGION") or ""


@cache
def _client(service: str, region: str, endpoint: str) -> Any:
    # A session of its own: boto3's default session is not thread-safe.
    session = require_module("boto3.session", extra="aws").Session()
    # Bounded: submit and observe run in the leader, which must not block for minutes.
    config = require_module("botocore.config", extra="aws").Config(
        connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 3}
    )
    errors = require_module("botocore.exceptions", extra="aws")
    try:
        return session.client(
            service,
            region_name=region or env.lookup("AWS_REGION") or None,
            endpoint_url=endpoint or None,
            config=config,
        )
    except errors.NoRegionError as error:
        raise ConfigError(
            "No AWS region is configured: neither AwsBatchOptions(region=…) nor AWS_REGION nor "
            "~/.aws/config sets one.",
            do="Set AwsBatchOptions(region=…), AWS_REGION, or a region in ~/.aws/config.",
        ) from error


@contextlib.contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    errors = require_module("botocore.exceptions", extra="aws")
    try:
        yield
    except (errors.NoCredentialsError, errors.PartialCredentialsError) as error:
        raise _unauthenticated_error(action, str(error)) from error
    except errors.ClientError as error:
        body = error.response.get("Error", {})
        translated = _to_provision_error(
            action, str(body.get("Code", "")), str(body.get("Message", ""))
        )
        # The caller treats an error of the library as transient, and repeats the operation.
        if translated is None:
            raise
        raise translated from error


def _to_provision_error(action: str, code: str, message: str) -> ProvisionError | None:
    """Translate a permanent error; return None for transient ones (throttling, server errors)."""
    if code in _AUTHENTICATION_CODES:
        return _unauthenticated_error(action, message)
    if code in _PERMISSION_CODES:
        return ProvisionPermissionError(
            f"AWS denied permission to {action}: {message}",
            do="Grant the caller the permissions that infra/terraform/modules/aws_batch lists "
            "under 'controller'.",
        )
    # AWS reports some exceeded limits as client errors, which only their message distinguishes.
    if code in _QUOTA_CODES or (
        code in _CLIENT_ERROR_CODES and any(w in message.lower() for w in _QUOTA_WORDS)
    ):
        return QuotaError(
            f"AWS quota exceeded while trying to {action}: {message}",
            do="Request a higher quota in Service Quotas, or use fewer or smaller machines.",
        )
    if code in _CLIENT_ERROR_CODES:
        return ProvisionError(
            f"AWS Batch rejected the request to {action}: {message}",
            do="Correct AwsBatchOptions; `spotfit doctor --provisioner aws_batch` checks them.",
        )
    return None


def _unauthenticated_error(action: str, message: str) -> ProvisionPermissionError:
    return ProvisionPermissionError(
        f"AWS authentication failed while trying to {action}: {message}",
        do="Run `aws sts get-caller-identity` to see the credentials in use. Set AWS_PROFILE where "
        "fit() is called; on the machines, set AwsBatchOptions(job_role=…).",
    )
