"""The calls to Azure, and its complaints in our words. Nothing is decided here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from spotfit.core.errors import ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.host import env
from spotfit.host.extras import need
from spotfit.provision.output import tail

_WITHIN_S = 20.0
_TASKS_AT_ONCE = 100
"""More are refused: https://learn.microsoft.com/rest/api/batchservice/task/add-collection."""
_MANAGEMENT_VERSION = "2024-07-01"
_OVER = ("JobBeingTerminated", "JobBeingDeleted", "JobCompleted", "JobNotActive")
_UNTOLD = ("TaskFilesUnavailable", "TaskFilesCleanedup", "OperationInvalidForCurrentState")
_LONGEST_TAIL_BYTES = 2**18
_NEVER_CURED = (400, 404, 405, 411, 413)
_WHO = ("AuthenticationFailed", "InvalidAuthenticationInfo", "InvalidAuthenticationTokenTenant")
_ROLES = "Grant the roles that docs/guides/azure_batch.md lists."


class BatchClient:
    """One Batch account, as far as groups need it. Raises our errors for what waiting does not
    cure, and the library's own for the rest; it never asks twice."""

    def __init__(self, endpoint: str) -> None:
        self._models = need("azure.batch.models", extra="azure")
        self._service = _service(endpoint)

    # --- pools -------------------------------------------------------------------------------

    def pool(self, pool_id: str) -> dict[str, Any] | None:
        """That pool, if there is one."""
        with _told_as_ours("look at a pool"):
            return _found(lambda: self._service.get_pool(pool_id))

    def nodes(self, pool_id: str) -> dict[str, dict[str, Any]]:
        """The nodes of that pool by their ids, those that were preempted included."""
        known: dict[str, dict[str, Any]] = {}
        with _told_as_ours("look at nodes"), _none_is_fine():
            for node in self._service.list_nodes(pool_id, select=["id", "state", "errors"]):
                known[node.id] = node.as_dict()
        return known

    # --- jobs --------------------------------------------------------------------------------

    def create(self, job: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> None:
        """Make that job and its tasks, and let it end with the last of them.

        All of it may be done again: what is there already stays as it is, and a job that is over
        gets no tasks any more.
        """
        job_id = job["id"]
        with _told_as_ours("create a job"), _refused_with("JobExists"):
            self._service.create_job(self._models.BatchJobCreateOptions(job))
        with _told_as_ours("create tasks"), _refused_with(*_OVER):
            for start in range(0, len(tasks), _TASKS_AT_ONCE):
                self._add(job_id, tasks[start : start + _TASKS_AT_ONCE])
            with_the_last = {"onAllTasksComplete": "terminatejob"}
            self._service.update_job(job_id, self._models.BatchJobUpdateOptions(with_the_last))

    def _add(self, job_id: str, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Not by `create_tasks` of the library, which never stops asking a server that fails."""
        asked = self._models.BatchTaskGroup({"value": list(tasks)})
        told = self._service.create_task_collection(job_id, asked)
        for result in told.result_values or []:
            error = result.error
            if result.status == "success" or (error and error.code == "TaskExists"):
                continue
            message = error.message.value if error and error.message else "it says nothing"
            if result.status == "servererror":
                raise OSError(f"Azure Batch could not add a task: {message}")
            raise ProvisionError(f"Azure Batch refused a task: {message}")

    def job(self, job_id: str) -> dict[str, Any] | None:
        """What is known of that job; None if nothing is."""
        with _told_as_ours("look at a job"):
            return _found(lambda: self._service.get_job(job_id))

    def tasks(self, job_id: str) -> dict[str, dict[str, Any]]:
        """What is known of the job's tasks, by their ids."""
        wanted = ["id", "state", "executionInfo", "nodeInfo"]
        known: dict[str, dict[str, Any]] = {}
        with _told_as_ours("look at tasks"), _none_is_fine():
            for task in self._service.list_tasks(job_id, select=wanted):
                known[task.id] = task.as_dict()
        return known

    def terminate(self, job_id: str) -> None:
        """End its tasks; a job that is over stays as it is. Does not wait for the end."""
        reason = {"terminateReason": "spotfit has let it go"}  # the library fails without one
        with _told_as_ours("let a job go"), _none_is_fine(), _refused_with(*_OVER):
            self._service.begin_terminate_job(job_id, reason)

    def printed(self, job_id: str, task_id: str, name: str, last: int) -> tuple[str, ...]:
        """The last lines of that file of a task; none where its node is gone, or has not begun."""
        text = ""
        with _told_as_ours("read what a machine printed"), _none_is_fine(), _refused_with(*_UNTOLD):
            size = int(self._service.get_task_file_properties(job_id, task_id, name).content_length)
            if size:
                first = max(0, size - _LONGEST_TAIL_BYTES)
                which = {"ocp_range": f"bytes={first}-{size - 1}"} if first else {}
                parts = self._service.download_task_file(job_id, task_id, name, **which)
                text = b"".join(parts).decode(errors="replace")
        return tail(text, last)

    def look_around(self) -> None:
        """Ask for the jobs there are: whether the account is there for us at all."""
        with _told_as_ours("list jobs"):
            next(iter(self._service.list_jobs(max_results=1)), None)


class Management:
    """Azure Resource Manager, as far as pools need it."""

    def __init__(self, url: str) -> None:
        self._pipeline = _management(url)

    def make(self, path: str, body: Mapping[str, Any]) -> None:
        """Make what is described there; what is there already stays as it is."""
        request = need("azure.core.rest", extra="azure").HttpRequest(
            "PUT",
            self._pipeline.format_url(path),
            params={"api-version": _MANAGEMENT_VERSION},
            headers={"If-None-Match": "*"},
            json=dict(body),
        )
        with _told_as_ours("make a pool"):
            answer = self._pipeline.send_request(request)
            if answer.status_code != 412:
                answer.raise_for_status()

    def get(self, path: str, version: str, what: str) -> dict[str, Any] | None:
        """What is at that path, or at the address that a page names; None if nothing is."""
        params = {} if "://" in path else {"api-version": version}
        request = need("azure.core.rest", extra="azure").HttpRequest(
            "GET", self._pipeline.format_url(path), params=params
        )
        with _told_as_ours(what):
            answer = self._pipeline.send_request(request)
            if answer.status_code == 404:
                return None
            answer.raise_for_status()
        return dict(answer.json())

    def listed(self, path: str, version: str, what: str) -> Iterator[dict[str, Any]]:
        """All that is listed there, page by page."""
        page = self.get(path, version, what) or {}
        while True:
            yield from page.get("value", [])
            if not (following := page.get("nextLink")):
                return
            page = self.get(following, version, what) or {}


@cache
def _service(endpoint: str) -> Any:
    if endpoint.startswith("http://"):
        nobody = need("azure.core.credentials", extra="azure").AzureNamedKeyCredential("nobody", "")
        policy = need("azure.core.pipeline.policies", extra="azure").SansIOHTTPPolicy()
        return _batch(endpoint, nobody, authentication_policy=policy)
    return _batch(endpoint, _credential())


def _batch(endpoint: str, credential: Any, **policies: Any) -> Any:
    """The library's client; its own patience would keep everybody waiting."""
    retry = need("azure.core.pipeline.policies", extra="azure").RetryPolicy.no_retries()
    return need("azure.batch", extra="azure").BatchClient(
        endpoint,
        credential,
        retry_policy=retry,
        connection_timeout=_WITHIN_S,
        read_timeout=_WITHIN_S,
        **policies,
    )


@cache
def _management(url: str) -> Any:
    policies = need("azure.core.pipeline.policies", extra="azure")
    who = []
    if not url.startswith("http://"):
        scope = f"{url.rstrip('/')}/.default"
        who.append(policies.BearerTokenCredentialPolicy(_credential(), scope))
    return need("azure.core", extra="azure").PipelineClient(
        url,
        policies=[policies.RetryPolicy.no_retries(), *who],
        connection_timeout=_WITHIN_S,
        read_timeout=_WITHIN_S,
    )


@cache
def _credential() -> Any:
    """Of whoever calls: environment, workload or managed identity, `az login`."""
    return need("azure.identity", extra="azure").DefaultAzureCredential()


def _found(call: Callable[[], Any]) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = []
    with _none_is_fine():
        found.append(call().as_dict())
    return found[0] if found else None


@contextlib.contextmanager
def _none_is_fine() -> Iterator[None]:
    with contextlib.suppress(need("azure.core.exceptions", extra="azure").ResourceNotFoundError):
        yield


@contextlib.contextmanager
def _refused_with(*codes: str) -> Iterator[None]:
    """Those refusals are no errors."""
    try:
        yield
    except need("azure.core.exceptions", extra="azure").HttpResponseError as wrong:
        if _code(wrong) not in codes:
            raise


@contextlib.contextmanager
def _told_as_ours(what: str) -> Iterator[None]:
    exceptions = need("azure.core.exceptions", extra="azure")
    try:
        yield
    except exceptions.HttpResponseError as wrong:
        if wrong.status_code is None:
            if env.lookup("AZ_BATCH_NODE_ID"):  # its identity service is busy: that passes
                raise
            raise _who(what, wrong.message) from None
        error = _translated(what, int(wrong.status_code), _code(wrong), _message(wrong))
        if error is None:
            raise
        raise error from wrong


def _code(wrong: Any) -> str:
    return str(getattr(wrong.error, "code", "") or "")


def _message(wrong: Any) -> str:
    """Without the request's id and time, which follow on lines of their own."""
    told = getattr(wrong.error, "message", "") or wrong.reason or wrong.message
    details = [str(one.message) for one in getattr(wrong.error, "details", []) if one.message]
    return " ".join([str(told).partition("\n")[0], *details])


def _translated(what: str, status: int, code: str, message: str) -> ProvisionError | None:
    """None for what may pass: conflicts, too many requests, and whatever is the server's fault."""
    if status == 401 or code in _WHO:
        return _who(what, message)
    if code.endswith(("QuotaReached", "QuotaExceeded")):
        return QuotaError(
            f"An Azure quota stands against this ({what}): {message}",
            do="Ask for a higher one under Batch accounts → Quotas, or end jobs that nobody needs.",
        )
    if status == 403:
        return ProvisionPermissionError(f"Azure does not allow us to {what}: {message}", do=_ROLES)
    if status in _NEVER_CURED:
        return ProvisionError(f"Azure Batch refused to {what}: {message}")
    return None


def _who(what: str, message: str) -> ProvisionPermissionError:
    return ProvisionPermissionError(
        f"Azure does not know who asks to {what}: {message}",
        do="Run `az login`, or give the machine a managed identity.",
    )
