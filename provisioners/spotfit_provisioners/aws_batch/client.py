"""The calls to AWS, and its complaints in our words. Nothing is decided here."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import clocks, log
from spotfit.host.extras import need

_PAGE = 100
_NOTHING = "spotfit-checkup"
"""A job definition that is not there."""
_NO_CREDENTIALS = (
    "AuthFailure",
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "MissingAuthenticationToken",
)
_NO_PERMISSION = ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation")
_QUOTA = ("ServiceQuotaExceededException", "LimitExceededException")
_CLIENT_MISTAKE = ("ClientException", "ValidationException")
_ASKED_ENOUGH = "MaxConfigLimitExceeded"
"""Of spot placement scores: so many different questions are answered in a day, and no more."""
_TOO_MANY = ("limit", "quota", "exceed")


class BatchClient:
    """AWS Batch in one region, as far as groups need it. Raises our errors for what waiting does
    not cure, and the library's own for the rest."""

    def __init__(self, region: str, endpoint: str) -> None:
        self._batch = _client("batch", region, endpoint)
        self.region = str(self._batch.meta.region_name)

    def register(self, definition: Mapping[str, Any]) -> str:
        """The ARN of that definition; one of the same name is the same, for names are contents."""
        name = definition["jobDefinitionName"]
        with _told_as_ours("register a job definition"):
            found = self._batch.describe_job_definitions(
                jobDefinitionName=name, status="ACTIVE", maxResults=1
            )["jobDefinitions"]
            if found:
                return str(found[0]["jobDefinitionArn"])
            return str(self._batch.register_job_definition(**definition)["jobDefinitionArn"])

    def submit(self, job: Mapping[str, Any]) -> str:
        """The new job's id."""
        with _told_as_ours(f"submit to {job['jobQueue']}"):
            return str(self._batch.submit_job(**job)["jobId"])

    def named(self, queue: str, name: str) -> list[dict[str, Any]]:
        """Every job of that queue and name, the oldest first; Batch remembers them for days.

        Children of an array bear its name, and are no jobs of their own.
        """
        with _told_as_ours(f"list the jobs of {queue}"):
            pages = self._batch.get_paginator("list_jobs").paginate(
                jobQueue=queue, filters=[{"name": "JOB_NAME", "values": [name]}]
            )
            listed = [job for page in pages for job in page["jobSummaryList"]]
        found = [job for job in listed if ":" not in job["jobId"]]
        return sorted(found, key=lambda job: (job["createdAt"], job["jobId"]))

    def describe(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What is known of those jobs, by id; a job that is forgotten is missing."""
        known: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), _PAGE):
            with _told_as_ours("look at jobs"):
                told = self._batch.describe_jobs(jobs=list(ids[start : start + _PAGE]))
            known.update({job["jobId"]: job for job in told["jobs"]})
        return known

    def terminate(self, job_id: str, reason: str) -> None:
        """End it, whatever state it is in. (`cancel_job` does nothing to one that runs.)"""
        with _told_as_ours("let a job go"):
            self._batch.terminate_job(jobId=job_id, reason=reason)

    def queue(self, name: str) -> dict[str, Any] | None:
        """That queue, if there is one."""
        with _told_as_ours("look at job queues"):
            found = self._batch.describe_job_queues(jobQueues=[name])["jobQueues"]
        return dict(found[0]) if found else None

    def try_rights(self, queue: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Calls that come to nothing, by the rights they need: AWS looks at those first."""
        batch = self._batch
        yield (
            "batch:RegisterJobDefinition",
            lambda: batch.register_job_definition(jobDefinitionName=_NOTHING, type="container"),
        )
        yield (
            "batch:SubmitJob",
            lambda: batch.submit_job(jobName=_NOTHING, jobQueue=queue, jobDefinition=_NOTHING),
        )
        yield (
            "batch:TerminateJob",
            lambda: batch.terminate_job(jobId=str(uuid.UUID(int=0)), reason=_NOTHING),
        )
        yield "batch:DescribeJobs", lambda: batch.describe_jobs(jobs=[str(uuid.UUID(int=0))])
        yield "batch:ListJobs", lambda: batch.list_jobs(jobQueue=queue, maxResults=1)
        yield (
            "batch:DescribeJobDefinitions",
            lambda: batch.describe_job_definitions(jobDefinitionName=_NOTHING, maxResults=1),
        )

    def environments(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Those compute environments."""
        with _told_as_ours("look at compute environments"):
            told = self._batch.describe_compute_environments(computeEnvironments=list(names))
        return [dict(one) for one in told["computeEnvironments"]]


class Account:
    """What a check-up asks beside Batch: roles and their rights, logs, images."""

    def __init__(self, region: str, endpoint: str) -> None:
        self._region, self._endpoint = region, endpoint

    def role(self, name: str) -> dict[str, Any] | None:
        """That role, its trust policy as plain data; None if there is none of the name."""
        with _told_as_ours("look at a role (iam:GetRole)"):
            try:
                return dict(self._client("iam").get_role(RoleName=name)["Role"])
            except self._client("iam").exceptions.NoSuchEntityException:
                return None

    def denied(
        self,
        who: str,
        actions: Sequence[str],
        resources: Sequence[str],
        context: Mapping[str, str],
    ) -> list[str]:
        """Which of these the policies of that user or role do not allow, as far as IAM can tell:
        https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html."""
        entries = [
            {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
            for key, value in context.items()
        ]
        pages = self._client("iam").get_paginator("simulate_principal_policy")
        with _told_as_ours("ask IAM what somebody may do (iam:SimulatePrincipalPolicy)"):
            results = [
                result
                for page in pages.paginate(
                    PolicySourceArn=who,
                    ActionNames=list(actions),
                    ResourceArns=list(resources),
                    ContextEntries=entries,
                )
                for result in page["EvaluationResults"]
            ]
        refused = [one["EvalActionName"] for one in results if one["EvalDecision"] != "allowed"]
        return list(dict.fromkeys(refused))

    def has_log_group(self, name: str) -> bool:
        """Whether CloudWatch has it."""
        with _told_as_ours("look for a log group (logs:DescribeLogGroups)"):
            told = self._client("logs").describe_log_groups(logGroupNamePrefix=name)
        return any(group["logGroupName"] == name for group in told["logGroups"])

    def printed(self, group: str, stream: str, last: int) -> list[str]:
        """The last lines there; none where the stream is not there, or not yet."""
        logs = self._client("logs")
        with _told_as_ours("read what a machine printed (logs:GetLogEvents)"):
            try:
                told = logs.get_log_events(
                    logGroupName=group, logStreamName=stream, limit=last, startFromHead=False
                )
            except logs.exceptions.ResourceNotFoundException:
                return []
        return [str(event["message"]) for event in told["events"]]

    def has_image(self, account: str, repository: str, which: Mapping[str, str]) -> bool:
        """Whether the registry has it, by its tag or its digest."""
        registry = self._client("ecr")
        with _told_as_ours("look at images (ecr:DescribeImages)"):
            try:
                registry.describe_images(
                    registryId=account, repositoryName=repository, imageIds=[dict(which)]
                )
            except (
                registry.exceptions.ImageNotFoundException,
                registry.exceptions.RepositoryNotFoundException,
            ):
                return False
        return True

    def _client(self, service: str) -> Any:
        return _client(service, self._region, self._endpoint)


def refuses(call: Callable[[], Any], what: str) -> None:
    """Make a call that comes to nothing. Raises `ProvisionPermissionError` where we may not."""
    try:
        with _told_as_ours(what):
            call()
    except ProvisionPermissionError:
        raise
    except ProvisionError:
        return  # it was looked at, hence it was allowed


def unanswered() -> tuple[type[Exception], ...]:
    """What boto3 raises where AWS gave no answer, or none that can be read: it may pass."""
    errors = need("botocore.exceptions", extra="aws")
    parsers = need("botocore.parsers", extra="aws")
    return (errors.BotoCoreError, errors.ClientError, parsers.ResponseParserError)


def cheapest_usd_per_hour(region: str, instance_types: Sequence[str], endpoint: str) -> float:
    """The lowest present spot price of those instance types in the region; inf without any."""
    now = datetime.fromtimestamp(clocks.wall_ms() / 1000, UTC)
    with _told_as_ours("look at spot prices"):
        pages = _client("ec2", region, endpoint).get_paginator("describe_spot_price_history")
        prices = [
            float(one["SpotPrice"])
            for page in pages.paginate(
                InstanceTypes=list(instance_types),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=now,  # without it, the prices of the last 90 days are told
                EndTime=now,
            )
            for one in page["SpotPriceHistory"]
        ]
    return min(prices, default=float("inf"))


def placement_scores(
    regions: Sequence[str], instance_types: Sequence[str], machines: int, endpoint: str
) -> dict[str, int]:
    """How likely each region is to have so many spot machines of those types, from 1 to 10.

    Nothing where EC2 tells none just now: it takes few different questions a day.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
    """
    errors = need("botocore.exceptions", extra="aws")
    pages = _client("ec2", regions[0], endpoint).get_paginator("get_spot_placement_scores")
    scores: dict[str, int] = {}
    with _told_as_ours("ask for spot placement scores"):
        try:
            for page in pages.paginate(
                InstanceTypes=list(instance_types),
                TargetCapacity=machines,
                TargetCapacityUnitType="units",
                RegionNames=list(regions),
            ):
                scores |= {one["Region"]: one["Score"] for one in page["SpotPlacementScores"]}
        except errors.ClientError as refused:
            if refused.response.get("Error", {}).get("Code") != _ASKED_ENOUGH:
                raise
            log.warning("aws_batch.no_scores", why=str(refused))
    return scores


def caller(region: str, endpoint: str) -> str:
    """Who we are to AWS."""
    with _told_as_ours("ask who we are"):
        return str(_client("sts", region, endpoint).get_caller_identity()["Arn"])


@cache
def _client(service: str, region: str, endpoint: str) -> Any:
    session = need("boto3.session", extra="aws").Session()
    config = need("botocore.config", extra="aws").Config(
        connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 3}
    )
    errors = need("botocore.exceptions", extra="aws")
    try:
        return session.client(
            service, region_name=region or None, endpoint_url=endpoint or None, config=config
        )
    except errors.NoRegionError as none:
        raise ConfigError(
            "AWS needs a region, and none is configured.",
            do="Set AwsBatchOptions(region=…), AWS_REGION, or a region in ~/.aws/config.",
        ) from none


@contextlib.contextmanager
def _told_as_ours(what: str) -> Iterator[None]:
    errors = need("botocore.exceptions", extra="aws")
    try:
        yield
    except (errors.NoCredentialsError, errors.PartialCredentialsError) as none:
        raise _who(what, str(none)) from none
    except errors.ClientError as wrong:
        told = wrong.response.get("Error", {})
        error = _translated(what, str(told.get("Code", "")), str(told.get("Message", "")))
        if error is None:
            raise
        raise error from wrong


def _translated(what: str, code: str, message: str) -> ProvisionError | None:
    """None for what may pass: throttling, and whatever is the server's fault."""
    if code in _NO_CREDENTIALS:
        return _who(what, message)
    if code in _NO_PERMISSION:
        return ProvisionPermissionError(
            f"AWS does not allow us to {what}: {message}",
            do="Give the role what infra/terraform/modules/aws_batch lists under 'controller'.",
        )
    if code in _QUOTA or (code in _CLIENT_MISTAKE and any(w in message.lower() for w in _TOO_MANY)):
        return QuotaError(
            f"An AWS quota stands against this ({what}): {message}",
            do="Ask for a higher one in Service Quotas, or use fewer or smaller machines.",
        )
    if code in _CLIENT_MISTAKE:
        return ProvisionError(f"AWS Batch refused to {what}: {message}")
    return None


def _who(what: str, message: str) -> ProvisionPermissionError:
    return ProvisionPermissionError(
        f"AWS does not know who asks to {what}: {message}",
        do="Run `aws sts get-caller-identity`; set a profile, or give the job a role.",
    )
