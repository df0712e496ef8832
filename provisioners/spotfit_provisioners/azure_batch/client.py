"""Calls of the Azure APIs, and translation of their errors. Contains no decisions.

`AzureBatchClient` is a Batch account, `AzureResourceManagerClient` creates pools and reads
resources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import env
from spotfit.host.plugins import require_module
from spotfit.provision.api import last_lines

_REQUEST_TIMEOUT_S = 20.0
# A limit of the API: https://learn.microsoft.com/rest/api/batchservice/task/add-collection
_TASKS_PER_REQUEST = 100
# Older versions are announced to be retired: https://github.com/Azure/Batch/issues/140
_MANAGEMENT_VERSION = "2025-06-01"
# Answers to a change of a job that has ended, or ends: the intended state is reached already.
_JOB_ENDED_CODES = ("JobBeingTerminated", "JobBeingDeleted", "JobCompleted", "JobNotActive")
# The node was removed, the files were deleted after their retention time, or the task waits.
_NO_FILE_CODES = ("TaskFilesUnavailable", "TaskFilesCleanedup", "OperationInvalidForCurrentState")
_MAX_TAIL_BYTES = 2**18  # enough for the last lines without downloading a whole log
# Not 409 (conflicts with a concurrent change), 408, 429 and 5xx, which a repetition may resolve.
_PERMANENT_STATUSES = (400, 404, 405, 411, 413)
_AUTHENTICATION_CODES = (
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
    "InvalidAuthenticationTokenTenant",
)
_RETAIL_PRICES_URL = "https://prices.azure.com"
_MAX_PRICE_PAGES = 20  # of one VM size in one region there is one page
_REMEDY_ROLES = "Grant the roles that docs/guides/azure_batch.md lists."


class AzureBatchClient:
    """The API of one Batch account. Requests are not retried.

    Permanent errors are raised as `ProvisionError`, transient ones as the library's.
    """

    def __init__(self, endpoint: str) -> None:
        self._models = require_module("azure.batch.models", extra="azure")
        self._service = _batch_service(endpoint)

    # --- pools -------------------------------------------------------------------------------

    def find_pool(self, pool_id: str) -> dict[str, Any] | None:
        """Return the description of the pool, or None if it does not exist."""
        with _translate_errors("read a pool"):
            return _none_if_missing(lambda: self._service.get_pool(pool_id))

    def list_nodes(self, pool_id: str) -> dict[str, dict[str, Any]]:
        """Return the nodes of the pool by id, including preempted ones."""
        nodes: dict[str, dict[str, Any]] = {}
        with _translate_errors("list nodes"), _ignore_missing():
            for node in self._service.list_nodes(pool_id, select=["id", "state", "errors"]):
                nodes[node.id] = node.as_dict()
        return nodes

    # --- jobs --------------------------------------------------------------------------------

    def create_job(self, job: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> None:
        """Create the job and its tasks, and let the job end with its last task. Idempotent.

        A job that has ended gets no new tasks.
        """
        job_id = job["id"]
        with _translate_errors("create a job"), _ignore_codes("JobExists"):
            self._service.create_job(self._models.BatchJobCreateOptions(job))
        with _translate_errors("create tasks"), _ignore_codes(*_JOB_ENDED_CODES):
            for start in range(0, len(tasks), _TASKS_PER_REQUEST):
                self._add_tasks(job_id, tasks[start : start + _TASKS_PER_REQUEST])
            # Only now: a job with this action and without tasks ends at once.
            end_with_tasks = {"onAllTasksComplete": "terminatejob"}
            self._service.update_job(job_id, self._models.BatchJobUpdateOptions(end_with_tasks))

    def _add_tasks(self, job_id: str, tasks: Sequence[Mapping[str, Any]]) -> None:
        # Not the library's create_tasks, which retries without end if the server fails.
        group = self._models.BatchTaskGroup({"value": list(tasks)})
        response = self._service.create_task_collection(job_id, group)
        for result in response.result_values or []:
            error = result.error
            if result.status == "success" or (error and error.code == "TaskExists"):
                continue
            message = error.message.value if error and error.message else "no reason given"
            # The request as a whole succeeds, so the library raises no error for a single task.
            if result.status == "servererror":
                raise OSError(f"Azure Batch could not add a task to the job {job_id}: {message}")
            raise ProvisionError(
                f"Azure Batch rejected a task of the job {job_id}: {message}",
                do="Correct AzureBatchOptions; `spotfit doctor --provisioner azure_batch` checks "
                "them.",
            )

    def find_job(self, job_id: str) -> dict[str, Any] | None:
        """Return the description of the job, or None if it does not exist."""
        with _translate_errors("read a job"):
            return _none_if_missing(lambda: self._service.get_job(job_id))

    def list_tasks(self, job_id: str) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the job's tasks by id."""
        fields = ["id", "state", "previousState", "executionInfo", "nodeInfo"]
        tasks: dict[str, dict[str, Any]] = {}
        with _translate_errors("list tasks"), _ignore_missing():
            for task in self._service.list_tasks(job_id, select=fields):
                tasks[task.id] = task.as_dict()
        return tasks

    def terminate_job(self, job_id: str) -> None:
        """Request termination of the job. No effect on a job that has ended."""
        reason = {"terminateReason": "released by spotfit"}  # the library fails without a reason
        with (
            _translate_errors("terminate a job"),
            _ignore_missing(),
            _ignore_codes(*_JOB_ENDED_CODES),
        ):
            self._service.begin_terminate_job(job_id, reason)

    def read_task_file(
        self, job_id: str, task_id: str, name: str, max_lines: int
    ) -> tuple[str, ...]:
        """Return the last lines of a task's file; empty if the node is missing or not started."""
        text = ""
        with (
            _translate_errors("read machine output"),
            _ignore_missing(),
            _ignore_codes(*_NO_FILE_CODES),
        ):
            size = int(self._service.get_task_file_properties(job_id, task_id, name).content_length)
            # The last bytes of the file; an empty one has no valid range.
            if size:
                first = max(0, size - _MAX_TAIL_BYTES)
                tail = {"ocp_range": f"bytes={first}-{size - 1}"} if first else {}
                parts = self._service.download_task_file(job_id, task_id, name, **tail)
                text = b"".join(parts).decode(errors="replace")
        return last_lines(text, max_lines)

    def check_access(self) -> None:
        """List one job. Raises an error if the account is missing or denies access."""
        with _translate_errors("list jobs"):
            next(iter(self._service.list_jobs(max_results=1)), None)


class AzureResourceManagerClient:
    """The Azure Resource Manager API."""

    def __init__(self, url: str) -> None:
        self._pipeline = _management_pipeline(url)

    def create_if_absent(self, path: str, body: Mapping[str, Any]) -> None:
        """Create the resource unless it exists."""
        request = require_module("azure.core.rest", extra="azure").HttpRequest(
            "PUT",
            self._pipeline.format_url(path),
            params={"api-version": _MANAGEMENT_VERSION},
            # Two agents may submit at once: the second request must not replace the pool.
            headers={"If-None-Match": "*"},
            json=dict(body),
        )
        with _translate_errors("create a pool"):
            response = self._pipeline.send_request(request)
            if response.status_code != 412:  # precondition failed: the resource exists
                response.raise_for_status()

    def get(self, path: str, version: str, action: str) -> dict[str, Any] | None:
        """Return the resource at `path` (or the page at a URL), or None if it does not exist."""
        # The URL of a further page contains its parameters already.
        params = {} if "://" in path else {"api-version": version}
        request = require_module("azure.core.rest", extra="azure").HttpRequest(
            "GET", self._pipeline.format_url(path), params=params
        )
        with _translate_errors(action):
            response = self._pipeline.send_request(request)
            if response.status_code == 404:
                return None
            response.raise_for_status()
        return dict(response.json())

    def list_resources(self, path: str, version: str, action: str) -> Iterator[dict[str, Any]]:
        """Yield the resources of all pages."""
        page = self.get(path, version, action) or {}
        while True:
            yield from page.get("value", [])
            if not (next_link := page.get("nextLink")):
                return
            page = self.get(next_link, version, action) or {}


class AzureRetailPricesClient:
    """The Azure Retail Prices API, which needs no authentication."""

    def __init__(self, batch_endpoint: str) -> None:
        """`batch_endpoint` is that of the Batch account; that of a simulator has prices, too."""
        is_simulator = batch_endpoint.startswith("http://")
        self._url = batch_endpoint.rstrip("/") if is_simulator else _RETAIL_PRICES_URL
        self._pipeline = _anonymous_pipeline(self._url)

    def list_items(self, price_filter: str, version: str) -> Iterator[dict[str, Any]]:
        """Yield the items of all pages for an OData filter."""
        request_type = require_module("azure.core.rest", extra="azure").HttpRequest
        request = request_type(
            "GET",
            f"{self._url}/api/retail/prices",
            params={"api-version": version, "$filter": price_filter},
        )
        for _ in range(_MAX_PRICE_PAGES):
            with _translate_errors("read prices"):
                response = self._pipeline.send_request(request)
                response.raise_for_status()
            page = response.json()
            yield from page["Items"]
            if not (following := page.get("NextPageLink")):
                return
            request = request_type("GET", self._check_link(following))
        raise ProvisionError(
            f"Azure's list of prices has more than {_MAX_PRICE_PAGES} pages for {price_filter}.",
            do="Set the option prices.",
        )

    def _check_link(self, link: str) -> str:
        """Return the link to a page. Raises `ProvisionError` if it leads to another server."""
        # The links of Azure contain the port 443, which requests leave out.
        own, other = urlsplit(self._url), urlsplit(link)
        if (own.scheme, own.hostname) != (other.scheme, other.hostname):
            raise ProvisionError(
                f"Azure's list of prices continues on another server: {link}.",
                do="Set the option prices.",
            )
        return link


@cache
def _anonymous_pipeline(url: str) -> Any:
    policies = require_module("azure.core.pipeline.policies", extra="azure")
    return require_module("azure.core", extra="azure").PipelineClient(
        url,
        policies=[policies.RetryPolicy.no_retries()],
        connection_timeout=_REQUEST_TIMEOUT_S,
        read_timeout=_REQUEST_TIMEOUT_S,
    )


def unreadable_answer_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a missing or malformed response of an API of Azure."""
    return (require_module("azure.core.exceptions", extra="azure").AzureError,)


@cache
def _batch_service(endpoint: str) -> Any:
    # A simulator without TLS: credentials must not be sent to it.
    if endpoint.startswith("http://"):
        anonymous = require_module("azure.core.credentials", extra="azure").AzureNamedKeyCredential(
            "anonymous", ""
        )
        policy = require_module("azure.core.pipeline.policies", extra="azure").SansIOHTTPPolicy()
        return _make_batch_client(endpoint, anonymous, authentication_policy=policy)
    return _make_batch_client(endpoint, _default_credential())


def _make_batch_client(endpoint: str, credential: Any, **policies: Any) -> Any:
    # Without the library's retries, which would block the leader for minutes.
    retry = require_module("azure.core.pipeline.policies", extra="azure").RetryPolicy.no_retries()
    return require_module("azure.batch", extra="azure").BatchClient(
        endpoint,
        credential,
        retry_policy=retry,
        connection_timeout=_REQUEST_TIMEOUT_S,
        read_timeout=_REQUEST_TIMEOUT_S,
        **policies,
    )


@cache
def _management_pipeline(url: str) -> Any:
    policies = require_module("azure.core.pipeline.policies", extra="azure")
    authentication = []
    # As above: no credentials to a simulator without TLS.
    if not url.startswith("http://"):
        scope = f"{url.rstrip('/')}/.default"
        authentication.append(policies.BearerTokenCredentialPolicy(_default_credential(), scope))
    return require_module("azure.core", extra="azure").PipelineClient(
        url,
        policies=[policies.RetryPolicy.no_retries(), *authentication],
        connection_timeout=_REQUEST_TIMEOUT_S,
        read_timeout=_REQUEST_TIMEOUT_S,
    )


@cache
def _default_credential() -> Any:
    # Tries the environment, workload identity, managed identity and `az login`, in that order.
    return require_module("azure.identity", extra="azure").DefaultAzureCredential()


def _none_if_missing(call: Callable[[], Any]) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = []
    with _ignore_missing():
        found.append(call().as_dict())
    return found[0] if found else None


@contextlib.contextmanager
def _ignore_missing() -> Iterator[None]:
    with contextlib.suppress(
        require_module("azure.core.exceptions", extra="azure").ResourceNotFoundError
    ):
        yield


@contextlib.contextmanager
def _ignore_codes(*codes: str) -> Iterator[None]:
    """Suppress responses with these error codes."""
    try:
        yield
    except require_module("azure.core.exceptions", extra="azure").HttpResponseError as error:
        if _error_code(error) not in codes:
            raise


@contextlib.contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    exceptions = require_module("azure.core.exceptions", extra="azure")
    try:
        yield
    except exceptions.HttpResponseError as error:
        if error.status_code is None:
            # Without a status, no token was obtained. On a Batch node that is transient: the
            # node's identity service may be busy.
            if env.lookup("AZ_BATCH_NODE_ID"):
                raise
            raise _unauthenticated_error(action, error.message) from None
        # The first line and the details; the other lines are the request's id and time.
        text = getattr(error.error, "message", "") or error.reason or error.message
        details = [
            str(detail.message) for detail in getattr(error.error, "details", []) if detail.message
        ]
        translated = _to_provision_error(
            action,
            status=int(error.status_code),
            code=_error_code(error),
            message=" ".join([str(text).partition("\n")[0], *details]),
        )
        if translated is None:
            raise
        raise translated from error


def _error_code(error: Any) -> str:
    # Without a body in the expected form, the library sets no error.
    return str(getattr(error.error, "code", "") or "")


def _to_provision_error(action: str, status: int, code: str, message: str) -> ProvisionError | None:
    """Translate a permanent error; return None for conflicts, rate limits and server errors."""
    if status == 401 or code in _AUTHENTICATION_CODES:
        return _unauthenticated_error(action, message)
    if code.endswith(("QuotaReached", "QuotaExceeded")):
        return QuotaError(
            f"An Azure quota is exceeded; failed to {action}: {message}",
            do="Request a higher quota under Batch accounts → Quotas, or end unused jobs.",
        )
    if status == 403:
        return ProvisionPermissionError(
            f"Azure denied permission to {action}: {message}", do=_REMEDY_ROLES
        )
    if status in _PERMANENT_STATUSES:
        return ProvisionError(
            f"Azure Batch rejected the request to {action}: {message}",
            do="Correct AzureBatchOptions; `spotfit doctor --provisioner azure_batch` checks them.",
        )
    return None


def _unauthenticated_error(action: str, message: str) -> ProvisionPermissionError:
    return ProvisionPermissionError(
        f"Azure authentication failed while trying to {action}: {message}",
        do="Run `az login` on the computer that calls fit(), or set AzureBatchOptions(identity=…) "
        "for the machines.",
    )
