"""The calls to Google, and its complaints in our words. Nothing is decided here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host.extras import need

_WITHIN_S = 20.0
_PAGE = 500
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_RATE = "RATE_LIMIT_EXCEEDED"
_NOT_ENABLED = "SERVICE_DISABLED"
_MAY_NOT_BE = "act as the specified service account"


class BatchClient:
    """Google Cloud Batch in one region of a project, as far as groups need it. Raises our errors
    for what waiting does not cure, and the library's own for the rest; it never asks twice."""

    def __init__(self, project: str, region: str, endpoint: str) -> None:
        self._types = need("google.cloud.batch_v1", extra="gcp")
        self._service, of_credentials = _service(endpoint)
        self.project = project or of_credentials
        if not self.project:
            raise ConfigError(
                "Google needs a project, and the credentials name none.",
                do="Set GcpBatchOptions(project=…), or GOOGLE_CLOUD_PROJECT.",
            )
        self.region = region
        self._jobs = f"projects/{self.project}/locations/{region}/jobs"

    def create(self, job_id: str, job: Mapping[str, Any], *, request_id: str) -> None:
        """Make that job; one of the same id is the same job."""
        request = self._types.CreateJobRequest(
            parent=self._jobs.removesuffix("/jobs"),
            job_id=job_id,
            job=self._types.Job.from_json(msgspec.json.encode(job)),
            request_id=request_id,
        )
        try:
            with _told_as_ours(f"create a job in {self.region}"):
                self._service.create_job(request, retry=None, timeout=_WITHIN_S)
        except need("google.api_core.exceptions", extra="gcp").Conflict:
            if self.job(job_id) is None:
                raise

    def job(self, job_id: str) -> dict[str, Any] | None:
        """What is known of that job; None if nothing is."""
        name = f"{self._jobs}/{job_id}"
        with _told_as_ours("look at a job"):
            try:
                found = self._service.get_job(name=name, retry=None, timeout=_WITHIN_S)
            except need("google.api_core.exceptions", extra="gcp").NotFound:
                return None
        return dict(self._types.Job.to_dict(found, use_integers_for_enums=False))

    def tasks(self, job_id: str) -> dict[int, dict[str, Any]]:
        """What is known of the job's tasks, by their numbers."""
        known: dict[int, dict[str, Any]] = {}
        request = self._types.ListTasksRequest(
            parent=f"{self._jobs}/{job_id}/taskGroups/group0", page_size=_PAGE
        )
        with _told_as_ours("look at tasks"), _none_is_fine():
            for task in self._service.list_tasks(request, retry=None, timeout=_WITHIN_S):
                told = self._types.Task.to_dict(task, use_integers_for_enums=False)
                known[int(told["name"].rpartition("/")[2])] = told
        return known

    def cancel(self, job_id: str) -> None:
        """Stop its tasks and give its machines back; a job that is over stays as it is."""
        request = self._types.CancelJobRequest(name=f"{self._jobs}/{job_id}")
        over = need("google.api_core.exceptions", extra="gcp").BadRequest
        with _told_as_ours("let a job go"), _none_is_fine(), contextlib.suppress(over):
            self._service.cancel_job(request, retry=None, timeout=_WITHIN_S)

    def look_around(self) -> None:
        """Ask for the jobs there are: whether the API is there for us at all."""
        request = self._types.ListJobsRequest(parent=self._jobs.removesuffix("/jobs"), page_size=1)
        with _told_as_ours(f"list jobs in {self.region}"):
            next(iter(self._service.list_jobs(request, retry=None, timeout=_WITHIN_S)), None)


class Services:
    """Google's other services, as far as check-ups need them: JSON over REST, without libraries."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def get(self, service: str, path: str, what: str) -> dict[str, Any] | None:
        """What is at that path; None if nothing is."""
        return self._asked("GET", service, path, what)

    def post(
        self, service: str, path: str, body: Mapping[str, Any], what: str
    ) -> dict[str, Any] | None:
        """The same of a question with a body."""
        return self._asked("POST", service, path, what, body)

    def printed(self, project: str, uid: str, number: int, last: int) -> dict[str, list[str]]:
        """The last lines of a job's task, by how often it was tried before: '0', '1', …"""
        names = f'logName="projects/{project}/logs/batch_task_logs"'
        task = f'labels.job_uid="{uid}" AND labels.task_id:"{uid}-group0-{number}/"'
        asked = {
            "resourceNames": [f"projects/{project}"],
            "filter": f"{names} AND {task}",
            "orderBy": "timestamp desc",
            "pageSize": last,
        }
        told = self.post("logging", "/v2/entries:list", asked, "read what a machine printed")
        by_try: dict[str, list[str]] = {}
        for entry in reversed((told or {}).get("entries", [])):
            words = str(entry.get("labels", {}).get("task_id", "")).split("/")
            lines = by_try.setdefault(words[2] if len(words) > 2 else "0", [])
            lines += str(entry.get("textPayload", "")).splitlines()
        return by_try

    def _asked(
        self,
        method: str,
        service: str,
        path: str,
        what: str,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        of_ours = self._endpoint.startswith("http://")
        base = self._endpoint if of_ours else f"https://{service}.googleapis.com"
        with _told_as_ours(what):
            answer = _session(self._endpoint).request(
                method, base + path, json=body, timeout=_WITHIN_S
            )
            if answer.status_code == 404:
                return None
            if answer.status_code >= 400:
                raise need("google.api_core.exceptions", extra="gcp").from_http_response(answer)
        told: dict[str, Any] = msgspec.json.decode(answer.content)
        return told


@cache
def _session(endpoint: str) -> Any:
    if endpoint.startswith("http://"):
        return need("requests", extra="gcp").Session()
    credentials, _ = _credentials(endpoint)
    return need("google.auth.transport.requests", extra="gcp").AuthorizedSession(credentials)


@cache
def _service(endpoint: str) -> tuple[Any, str]:
    """The library's client, and the project of its credentials.

    Over REST: the threads of gRPC do not survive the forks of an agent.
    """
    options = need("google.api_core.client_options", extra="gcp").ClientOptions(
        api_endpoint=endpoint or None
    )
    credentials, project = _credentials(endpoint)
    batch = need("google.cloud.batch_v1", extra="gcp")
    client = batch.BatchServiceClient(
        credentials=credentials, transport="rest", client_options=options
    )
    return client, project


def _credentials(endpoint: str) -> tuple[Any, str]:
    """Those of whoever calls; none for a plain wire, where anybody might listen."""
    if endpoint.startswith("http://"):
        return need("google.auth.credentials", extra="gcp").AnonymousCredentials(), ""
    with _told_as_ours("use Google Cloud"):
        credentials, project = need("google.auth", extra="gcp").default(scopes=[_SCOPE])
    return credentials, project or ""


@contextlib.contextmanager
def _none_is_fine() -> Iterator[None]:
    with contextlib.suppress(need("google.api_core.exceptions", extra="gcp").NotFound):
        yield


@contextlib.contextmanager
def _told_as_ours(what: str) -> Iterator[None]:
    auth = need("google.auth.exceptions", extra="gcp")
    api = need("google.api_core.exceptions", extra="gcp")
    try:
        yield
    except (auth.DefaultCredentialsError, auth.RefreshError) as none:
        if none.retryable:
            raise
        raise _who(what, str(none)) from none
    except api.GoogleAPICallError as wrong:
        error = _translated(what, int(wrong.code or 0), wrong.reason or "", wrong.message)
        if error is None:
            raise
        raise error from wrong


def _translated(what: str, code: int, reason: str, message: str) -> ProvisionError | None:
    """None for what may pass: too many requests a minute, and whatever is the server's fault."""
    if code == 401:
        return _who(what, message)
    if code == 403 or _MAY_NOT_BE in message:
        return ProvisionPermissionError(
            f"Google does not allow us to {what}: {message}",
            do="gcloud services enable batch.googleapis.com"
            if reason == _NOT_ENABLED
            else "Grant the roles that docs/guides/gcp_batch.md lists, or apply "
            "infra/terraform/stacks/gcp.",
        )
    if code == 429 and reason != _RATE and "per minute" not in message:
        return QuotaError(
            f"A Google quota stands against this ({what}): {message}",
            do="Ask for a higher one under IAM & Admin → Quotas, or use fewer or smaller machines.",
        )
    if code in (400, 404, 412):
        return ProvisionError(f"Google Cloud Batch refused to {what}: {message}")
    return None


def _who(what: str, message: str) -> ProvisionPermissionError:
    return ProvisionPermissionError(
        f"Google does not know who asks to {what}: {message}",
        do="Run `gcloud auth application-default login`, or give the machine a service account.",
    )
