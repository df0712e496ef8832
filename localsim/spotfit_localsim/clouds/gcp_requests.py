"""Validation of Google Cloud Batch jobs: the protobuf of the client library, and documented limits.

Sources: https://docs.cloud.google.com/batch/quotas, the docstrings of google.cloud.batch_v1, and
https://docs.cloud.google.com/compute/docs/labeling-resources for labels.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from spotfit.host.plugins import require_module

_JOB_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_MAX_LABELS = 64
_MAX_REQUEST_BYTES = 2**20
_MAX_TASKS, MAX_PARALLEL_TASKS = 100_000, 5_000


class InvalidJobError(Exception):
    """The service would reject the job."""


def to_canonical_job(body: Any) -> dict[str, Any]:
    """Return the job as the service writes it. Raises `InvalidJobError` if it is not a job."""
    job = require_module("google.cloud.batch_v1", extra="gcp").Job
    json_format = require_module("google.protobuf.json_format", extra="gcp")
    try:
        message = json_format.ParseDict(body, job.pb(job()))
    # ValueError and TypeError: wrong types at the top level.
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        raise InvalidJobError(f"Invalid JSON payload received. {error}") from error
    return dict(json_format.MessageToDict(message))


def check_job(
    job_id: str, request_id: str, job: Mapping[str, Any], *, region: str, size_bytes: int
) -> None:
    """Raise `InvalidJobError` for the first documented limit that a canonical job exceeds."""
    if problem := next(_limit_violations(job_id, request_id, job, region, size_bytes), ""):
        raise InvalidJobError(problem)


def _limit_violations(
    job_id: str, request_id: str, job: Mapping[str, Any], region: str, size_bytes: int
) -> Iterator[str]:
    if not _JOB_ID.fullmatch(job_id):
        yield f"job_id {job_id!r} is invalid"
    if request_id and not _is_nonzero_uuid(request_id):
        yield f"request_id {request_id!r} is not a valid UUID"
    if size_bytes > _MAX_REQUEST_BYTES:
        yield "the job is larger than 1 MB"
    if not 0 <= int(job.get("priority", 0)) < 100:
        yield "priority must be in [0, 100)"
    yield from _label_violations(job.get("labels", {}))
    allocation = job.get("allocationPolicy", {})
    yield from _label_violations(allocation.get("labels", {}))
    groups = job.get("taskGroups", [])
    if len(groups) != 1:
        yield "exactly one task group is supported"
        return
    yield from _group_violations(groups[0])
    if len(allocation.get("instances", [])) > 1:
        yield "only one instance policy is supported"
    locations = allocation.get("location", {}).get("allowedLocations", [])
    own = (f"regions/{region}", f"zones/{region}-")
    foreign = [one for one in locations if one != own[0] and not one.startswith(own[1])]
    if foreign:
        yield f"allowed locations {foreign} are not in {region}"


def _group_violations(group: Mapping[str, Any]) -> Iterator[str]:
    if not 1 <= int(group.get("taskCount", 1)) <= _MAX_TASKS:
        yield f"task_count must be in [1, {_MAX_TASKS}]"
    if not 1 <= int(group.get("parallelism", 1)) <= MAX_PARALLEL_TASKS:
        yield f"parallelism must be in [1, {MAX_PARALLEL_TASKS}]"
    spec = group.get("taskSpec", {})
    if not 0 <= spec.get("maxRetryCount", 0) <= 10:
        yield "max_retry_count must be in [0, 10]"
    policies = spec.get("lifecyclePolicies", [])
    if len(policies) > 1:
        yield "only one lifecycle policy is supported"
    if any(not one.get("actionCondition", {}).get("exitCodes") for one in policies):
        yield "a lifecycle policy requires exit codes"
    if any("action" not in one for one in policies):
        yield "a lifecycle policy requires an action"
    runnables = spec.get("runnables", [])
    if not runnables:
        yield "task_spec.runnables must not be empty"
    # A runnable is exactly one of these: the `oneof` of the protobuf forbids two.
    if any(not {"container", "script", "barrier"} & set(one) for one in runnables):
        yield "a runnable requires a container, a script or a barrier"
    containers = [one["container"] for one in runnables if "container" in one]
    if not containers:
        yield "this simulator runs containers only"
    if any(not one.get("imageUri") for one in containers):
        yield "a container requires an image_uri"


def _label_violations(labels: Mapping[str, str]) -> Iterator[str]:
    if len(labels) > _MAX_LABELS:
        yield f"at most {_MAX_LABELS} labels are allowed"
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            yield f"label {name}={value} is invalid"
        if name.startswith(("goog-", "google-")):
            yield f"label {name} is reserved"


def _is_nonzero_uuid(text: str) -> bool:
    try:
        return uuid.UUID(text).int != 0
    except ValueError:
        return False
