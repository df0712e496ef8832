"""Calls of the Google Cloud APIs, and translation of their errors. Contains no decisions.

`GcpBatchClient` uses the Batch library, `GcpRestClient` plain REST for the other services.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlencode

import msgspec

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host.plugins import require_module

_REQUEST_TIMEOUT_S = 20.0
_SKU_PAGE_SIZE = 5000  # the largest one that the API allows
_PAGE_SIZE = 500  # the library reads further pages itself
# The scope of all Google Cloud APIs; the roles of the identity limit what it may do.
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_RATE_LIMIT_REASON = "RATE_LIMIT_EXCEEDED"
_API_DISABLED_REASON = "SERVICE_DISABLED"
# Part of the message if the caller may not use the agents' service account; its status is not 403.
_SERVICE_ACCOUNT_DENIED = "act as the specified service account"


class GcpBatchClient:
    """The Google Cloud Batch API in one region of a project. Requests are not retried.

    Permanent errors are raised as `ProvisionError` or `ConfigError`, transient ones as the
    library's.
    """

    def __init__(self, project: str, region: str, endpoint: str) -> None:
        self._types = require_module("google.cloud.batch_v1", extra="gcp")
        self._service, default_project = _batch_service(endpoint)
        self.project = project or default_project
        if not self.project:
            raise ConfigError(
                "No Google Cloud project is configured, and the credentials have no project.",
                do="Set GcpBatchOptions(project=…), or GOOGLE_CLOUD_PROJECT.",
            )
        self.region = region
        self._jobs = f"projects/{self.project}/locations/{region}/jobs"

    def create_job(self, job_id: str, job: Mapping[str, Any], *, request_id: str) -> None:
        """Create the job. No error if a job with that id exists."""
        request = self._types.CreateJobRequest(
            parent=self._jobs.removesuffix("/jobs"),
            job_id=job_id,
            job=self._types.Job.from_json(msgspec.json.encode(job)),
            request_id=request_id,
        )
        try:
            with _translate_errors(f"create a job in {self.region}"):
                # retry=None everywhere: the library's retries would block the leader for minutes.
                self._service.create_job(request, retry=None, timeout=_REQUEST_TIMEOUT_S)
        except require_module("google.api_core.exceptions", extra="gcp").Conflict:
            # A conflict is also reported while a deleted job of that id is being removed.
            if self.find_job(job_id) is None:
                raise

    def find_job(self, job_id: str) -> dict[str, Any] | None:
        """Return the description of the job, or None if it does not exist."""
        name = f"{self._jobs}/{job_id}"
        with _translate_errors("read a job"):
            try:
                found = self._service.get_job(name=name, retry=None, timeout=_REQUEST_TIMEOUT_S)
            except require_module("google.api_core.exceptions", extra="gcp").NotFound:
                return None
        return dict(self._types.Job.to_dict(found, use_integers_for_enums=False))

    def list_tasks(self, job_id: str) -> dict[int, dict[str, Any]]:
        """Return the descriptions of the job's tasks by index."""
        tasks: dict[int, dict[str, Any]] = {}
        request = self._types.ListTasksRequest(
            parent=f"{self._jobs}/{job_id}/taskGroups/group0", page_size=_PAGE_SIZE
        )
        with _translate_errors("list tasks"), _ignore_missing():
            for task in self._service.list_tasks(request, retry=None, timeout=_REQUEST_TIMEOUT_S):
                body = self._types.Task.to_dict(task, use_integers_for_enums=False)
                tasks[int(body["name"].rpartition("/")[2])] = body
        return tasks

    def cancel_job(self, job_id: str) -> None:
        """Stop the job's tasks and release its machines. No effect on a job that has ended."""
        request = self._types.CancelJobRequest(name=f"{self._jobs}/{job_id}")
        # Batch answers with a bad request (FAILED_PRECONDITION) if the job has ended.
        ended = require_module("google.api_core.exceptions", extra="gcp").BadRequest
        with _translate_errors("cancel a job"), _ignore_missing(), contextlib.suppress(ended):
            self._service.cancel_job(request, retry=None, timeout=_REQUEST_TIMEOUT_S)

    def check_access(self) -> None:
        """List one job. Raises an error if the API is disabled or the caller is not permitted."""
        request = self._types.ListJobsRequest(parent=self._jobs.removesuffix("/jobs"), page_size=1)
        with _translate_errors(f"list jobs in {self.region}"):
            next(
                iter(self._service.list_jobs(request, retry=None, timeout=_REQUEST_TIMEOUT_S)), None
            )


class GcpRestClient:
    """Other Google Cloud services for account checks and machine output: JSON over REST."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def get(self, service: str, path: str, action: str) -> dict[str, Any] | None:
        """Return the resource at `path`, or None if it does not exist."""
        return self._request("GET", service, path=path, action=action)

    def post(
        self, service: str, path: str, *, body: Mapping[str, Any], action: str
    ) -> dict[str, Any] | None:
        """Send a POST request; return the response, or None if the resource does not exist."""
        return self._request("POST", service, path=path, action=action, body=body)

    def read_task_logs(
        self, project: str, uid: str, task_index: int, max_lines: int
    ) -> dict[str, list[str]]:
        """Return the last lines of a task by retry number: '0' is the first attempt."""
        names = f'logName="projects/{project}/logs/batch_task_logs"'
        task = f'labels.job_uid="{uid}" AND labels.task_id:"{uid}-group0-{task_index}/"'
        query = {
            "resourceNames": [f"projects/{project}"],
            "filter": f"{names} AND {task}",
            # The newest lines of all attempts; reversed below.
            "orderBy": "timestamp desc",
            "pageSize": max_lines,
        }
        response = self.post(
            "logging", "/v2/entries:list", body=query, action="read machine output"
        )
        lines_by_retry: dict[str, list[str]] = {}
        for entry in reversed((response or {}).get("entries", [])):
            # The label is <job uid>-group0-<task>/<VM>/<retry>.
            parts = str(entry.get("labels", {}).get("task_id", "")).split("/")
            lines = lines_by_retry.setdefault(parts[2] if len(parts) > 2 else "0", [])
            lines += str(entry.get("textPayload", "")).splitlines()
        return lines_by_retry

    def list_skus(self, service_id: str) -> Iterator[dict[str, Any]]:
        """Yield the public prices of a service, such as Compute Engine, of all regions."""
        query = {
            "pageSize": str(_SKU_PAGE_SIZE),
            "currencyCode": "USD",
            # The complete answer has about 40 MB, most of it descriptions of units.
            "fields": "nextPageToken,skus(description,category,serviceRegions,pricingInfo)",
        }
        token = ""
        while True:
            page = urlencode({**query, **({"pageToken": token} if token else {})})
            path = f"/v1/services/{service_id}/skus?{page}"
            response = self.get("cloudbilling", path, "read prices") or {}
            yield from response.get("skus", [])
            token = response.get("nextPageToken", "")
            if not token:
                return

    def _request(
        self,
        method: str,
        service: str,
        *,
        path: str,
        action: str,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        is_simulator = self._endpoint.startswith("http://")
        # `endpoint` is that of Batch; the other services have addresses of their own.
        base = self._endpoint if is_simulator else f"https://{service}.googleapis.com"
        with _translate_errors(action):
            response = _rest_session(self._endpoint).request(
                method, base + path, json=body, timeout=_REQUEST_TIMEOUT_S
            )
            if response.status_code == 404:
                return None
            if response.status_code >= 400:
                raise require_module("google.api_core.exceptions", extra="gcp").from_http_response(
                    response
                )
        decoded: dict[str, Any] = msgspec.json.decode(response.content)
        return decoded


def unreadable_answer_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a missing or malformed response of a service that is read by REST."""
    return (
        require_module("google.api_core.exceptions", extra="gcp").GoogleAPICallError,
        require_module("google.auth.exceptions", extra="gcp").GoogleAuthError,
        require_module("requests", extra="gcp").RequestException,
        msgspec.DecodeError,
    )


@cache
def _rest_session(endpoint: str) -> Any:
    # A simulator without TLS: credentials must not be sent to it.
    if endpoint.startswith("http://"):
        return require_module("requests", extra="gcp").Session()
    credentials, _ = _default_credentials(endpoint)
    return require_module("google.auth.transport.requests", extra="gcp").AuthorizedSession(
        credentials
    )


@cache
def _batch_service(endpoint: str) -> tuple[Any, str]:
    """Return the library's client and the project of the credentials.

    Uses REST, because the threads of gRPC do not survive a fork.
    """
    options = require_module("google.api_core.client_options", extra="gcp").ClientOptions(
        api_endpoint=endpoint or None
    )
    credentials, project = _default_credentials(endpoint)
    batch = require_module("google.cloud.batch_v1", extra="gcp")
    client = batch.BatchServiceClient(
        credentials=credentials, transport="rest", client_options=options
    )
    return client, project


def _default_credentials(endpoint: str) -> tuple[Any, str]:
    """Return the caller's credentials; anonymous ones for an unencrypted endpoint."""
    if endpoint.startswith("http://"):
        return require_module("google.auth.credentials", extra="gcp").AnonymousCredentials(), ""
    with _translate_errors("use Google Cloud"):
        credentials, project = require_module("google.auth", extra="gcp").default(scopes=[_SCOPE])
    return credentials, project or ""


@contextlib.contextmanager
def _ignore_missing() -> Iterator[None]:
    with contextlib.suppress(require_module("google.api_core.exceptions", extra="gcp").NotFound):
        yield


@contextlib.contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    auth = require_module("google.auth.exceptions", extra="gcp")
    api = require_module("google.api_core.exceptions", extra="gcp")
    try:
        yield
    except (auth.DefaultCredentialsError, auth.RefreshError) as error:
        # The metadata server or token endpoint may be overloaded for a moment.
        if error.retryable:
            raise
        raise _unauthenticated_error(action, str(error)) from error
    except api.GoogleAPICallError as error:
        translated = _to_provision_error(
            action,
            code=int(error.code or 0),
            reason=error.reason or "",
            message=error.message,
            # Of the API that is disabled; other errors may have no metadata.
            service=(error.metadata or {}).get("service", "batch.googleapis.com"),
        )
        if translated is None:
            raise
        raise translated from error


def _to_provision_error(
    action: str, code: int, reason: str, message: str, service: str = "batch.googleapis.com"
) -> ProvisionError | None:
    """Translate a permanent error; return None for transient ones (rate limits, server errors)."""
    if code == 401:
        return _unauthenticated_error(action, message)
    if code == 403 or _SERVICE_ACCOUNT_DENIED in message:
        return ProvisionPermissionError(
            f"Google Cloud denied permission to {action}: {message}",
            do=f"Enable the API: `gcloud services enable {service}`."
            if reason == _API_DISABLED_REASON
            else "Grant the caller the roles that docs/guides/gcp_batch.md lists, or apply "
            "infra/terraform/stacks/gcp.",
        )
    # 429 is the code of exceeded quotas and of rate limits; only the latter are transient.
    if code == 429 and reason != _RATE_LIMIT_REASON and "per minute" not in message:
        return QuotaError(
            f"Google Cloud quota exceeded while trying to {action}: {message}",
            do="Request a higher quota under IAM & Admin → Quotas, or use fewer or smaller "
            "machines.",
        )
    if code in (400, 404, 412):
        return ProvisionError(
            f"Google Cloud Batch rejected the request to {action}: {message}",
            do="Correct GcpBatchOptions; `spotfit doctor --provisioner gcp_batch` checks them.",
        )
    return None


def _unauthenticated_error(action: str, message: str) -> ProvisionPermissionError:
    return ProvisionPermissionError(
        f"Google Cloud authentication failed while trying to {action}: {message}",
        do="Run `gcloud auth application-default login` on the computer that calls fit(), or set "
        "GcpBatchOptions(service_account=…) for the machines.",
    )
