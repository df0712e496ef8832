"""Azure Batch on loopback for the real azure-batch, with Resource Manager and VM metadata.

Behaviour as documented below https://learn.microsoft.com/azure/batch/ (batch-spot-vms: preempted
nodes keep their ids, their tasks are requeued; batch-pool-node-error-checking: resize errors,
`unusable`; batch-automatic-scaling), in https://learn.microsoft.com/rest/api/batchservice/ (status
and error codes), the docstrings of the library, and for Scheduled Events in
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. Undocumented behaviour is
marked as such. Multi-instance tasks, schedules and mounts are not supported.

A machine of the datacenter runs one command, so a node has a machine only while it has a task: idle
nodes cost nothing.

States of a node:

    creating  | its machine has booted             | running
    running   | the task ended or was stopped      | idle
    running   | the machine was preempted          | unusable
    unusable  | `_UNUSABLE_DURATION_S` is over     | preempted (its task is requeued)
    idle, preempted | a task is assigned           | creating
"""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, ClassVar
from urllib.parse import urlencode

import msgspec

from spotfit.host import system
from spotfit.model.offer import Market
from spotfit_localsim.clouds import azure_prices, azure_requests
from spotfit_localsim.clouds.api import ClientAccess
from spotfit_localsim.clouds.azure_autoscale import FormulaError, evaluate
from spotfit_localsim.clouds.cloud_host import RECLAIMED, Datacenter, SimulatedMachine
from spotfit_localsim.clouds.http_server import (
    MalformedRequestError,
    WireRequest,
    WireResponse,
    drop_nulls,
)
from spotfit_localsim.clouds.injected_errors import ApiFaults

ACCOUNT = "spotfitsim"
_RESOURCE_GROUP = (
    "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/spotfit/providers"
)
ACCOUNT_ID = f"{_RESOURCE_GROUP}/Microsoft.Batch/batchAccounts/{ACCOUNT}"
IDENTITY_ID = f"{_RESOURCE_GROUP}/Microsoft.ManagedIdentity/userAssignedIdentities/agents"
SUBNET_ID = f"{_RESOURCE_GROUP}/Microsoft.Network/virtualNetworks/spotfit/subnets/nodes"
_PRICES_PATH = "/api/retail/prices"
_GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL of a terminated task; not documented."""
_UNUSABLE_DURATION_S = 0.3
"""How long a preempted node is reported as `unusable`, with its task as running."""
_RESCHEDULE_DELAY_S = 2.0
"""Time until a preempted node gets a machine; minutes to hours in the real service."""
_EVALUATION_INTERVAL_S, _SAMPLING_INTERVAL_S = 0.6, 0.3
"""Intervals of formula evaluations and of samples; at least 5 minutes and 30 s in the real service.
"""
_MAX_SAMPLES = 20
_PAGE_SIZE = 1000
_MAX_TASKS_PER_REQUEST = 100
_MAX_REQUEST_BYTES = 2**20
_NO_CAPACITY_ERRORS = {
    market: {
        "code": "AllocationFailed",
        "message": f"Desired number of {kind} nodes could not be allocated",
    }
    for market, kind in ((Market.SPOT, "low priority"), (Market.ON_DEMAND, "dedicated"))
}


class AzureBatchTask(msgspec.Struct):
    body: dict[str, Any]
    """The request."""
    created: str
    state_changed: str
    state: str = "active"
    previous_state: str = ""
    node: str = ""
    start_count: int = 0
    """Number of machines that were rented for it."""
    is_stop_requested: bool = False
    """Whether its termination was requested."""
    execution: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"retryCount": 0, "requeueCount": 0}
    )


class AzureBatchJob(msgspec.Struct):
    body: dict[str, Any]
    created: str
    state_changed: str
    tasks: dict[str, AzureBatchTask] = {}
    state: str = "active"
    end_info: dict[str, str] = {}

    @property
    def pool(self) -> str:
        return str(self.body["poolInfo"]["poolId"])


class AzureBatchNode(msgspec.Struct):
    id: str
    state: str = "creating"
    machine: int | None = None
    task: str = ""
    """'job/task' that it runs or will run."""
    market: Market = Market.SPOT
    """ON_DEMAND for a dedicated node."""
    state_since_s: float = 0.0


class AzureBatchPool(msgspec.Struct):
    body: dict[str, Any]
    """The pool in the format of the Batch API, also if it was created by Resource Manager."""
    created: str
    target_nodes: int = 0
    """Number of spot nodes."""
    target_dedicated_nodes: int = 0
    created_node_count: int = 0
    """Number of nodes created so far."""
    nodes: list[AzureBatchNode] = []
    resize_errors: list[dict[str, Any]] = []
    autoscale_run: dict[str, Any] = {}
    samples: list[float] = []
    preempted_samples: list[float] = []
    sampled_s: float = 0.0
    evaluated_s: float = 0.0
    is_deleting: bool = False

    def target(self, market: Market) -> int:
        return self.target_nodes if market is Market.SPOT else self.target_dedicated_nodes

    def nodes_of(self, market: Market) -> list[AzureBatchNode]:
        return [node for node in self.nodes if node.market is market]


class AzureBatchState(msgspec.Struct):
    pools: dict[str, AzureBatchPool] = {}
    jobs: dict[str, AzureBatchJob] = {}


class AzureApiError(Exception):
    """An error response; clients read its code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def reply(self) -> WireResponse:
        """Return the Batch format, with request id and time in the message."""
        # Clients show the message as it is, and support asks for the request id.
        text = f"{self}\nRequestId:{uuid.uuid4()}\nTime:{_now_text()}"
        error = {"code": self.code, "message": {"lang": "en-US", "value": text}}
        return WireResponse.json(error, self.status)

    def reply_as_management(self) -> WireResponse:
        """Return the Resource Manager format."""
        return WireResponse.json({"error": {"code": self.code, "message": str(self)}}, self.status)


class AzureBatchCloud:
    """One Batch account."""

    State: ClassVar = AzureBatchState

    def __init__(self, datacenter: Datacenter, faults: ApiFaults) -> None:
        self.datacenter = datacenter
        self.faults = faults
        self.state = AzureBatchState()
        self.account: dict[str, Any] = {
            "accountEndpoint": f"{ACCOUNT}.sim.batch.azure.com",
            "provisioningState": "Succeeded",
            "poolAllocationMode": "BatchService",
            "lowPriorityCoreQuota": 100,
            "dedicatedCoreQuota": 100,
            "poolQuota": 100,
            "activeJobAndJobScheduleQuota": 300,
        }
        """Properties of the account in Resource Manager."""
        self.identities = {IDENTITY_ID: "11111111-1111-1111-1111-111111111111"}
        """Client ids of the managed identities."""

    @staticmethod
    def client_access(url: str) -> ClientAccess:
        return ClientAccess(
            {
                "endpoint": url,
                "management_endpoint": url,
                "account_id": ACCOUNT_ID,
                "identity": IDENTITY_ID,
                "vm_size": "Standard_D4s_v5",
                "image": "spotfit/worker:sim",
                # Nodes of all pools can connect to each other.
                "subnet": SUBNET_ID,
            }
        )

    # --- requests ----------------------------------------------------------------------------

    def answer_request(self, request: WireRequest) -> WireResponse:
        # Both APIs have one host here; only Resource Manager has paths below a subscription.
        by_management = request.path.startswith("/subscriptions/")
        try:
            self._raise_fault(request)
            return self._dispatch(request)
        except MalformedRequestError as malformed:
            complaint = AzureApiError(400, "InvalidRequestBody", str(malformed))
        except AzureApiError as refused:
            complaint = refused
        return complaint.reply_as_management() if by_management else complaint.reply()

    def is_lagging_read(self, request: WireRequest) -> bool:
        # Not pools, whose names are chosen by the client.
        is_of_batch = request.path.startswith("/jobs") or request.path.endswith("/nodes")
        return request.method == "GET" and is_of_batch

    def _dispatch(self, request: WireRequest) -> WireResponse:
        requested_method = "GET" if request.method == "HEAD" else request.method
        for method, pattern, operation in self._operations:
            match = re.fullmatch(pattern, request.path)
            if not match or method != requested_method:
                continue
            permission = _PERMISSIONS.get(operation.__name__, "")
            if permission and self.faults.is_denied(permission):
                raise AzureApiError(
                    403, "AuthorizationFailed", f"The client may not perform action '{permission}'."
                )
            content = operation(self, request, **match.groupdict())
            if isinstance(content, WireResponse):
                return content
            return _to_odata_response(content, request)
        raise AzureApiError(400, "InvalidUri", f"{request.method} {request.path} is not simulated")

    def _raise_fault(self, request: WireRequest) -> None:
        if "api-version" not in request.query and request.path != _PRICES_PATH:
            raise AzureApiError(400, "MissingRequiredQueryParameter", "api-version is missing")
        # Before authentication: an overloaded front end refuses without checking.
        if self.faults.take("throttled"):
            raise AzureApiError(503, "ServerBusy", "The server is busy. Please retry.")
        if self.faults.take("credentials"):
            raise AzureApiError(
                403,
                "AuthenticationFailed",
                "Server failed to authenticate the request. Make sure the value of Authorization "
                "header is formed correctly including the signature.",
            )
        if self.faults.take("permission"):
            raise AzureApiError(
                403,
                "InsufficientAccountPermissions",
                "The account being accessed does not have sufficient permissions to execute this "
                "operation.",
            )

    # --- pools -------------------------------------------------------------------------------

    def _manage_pool(self, request: WireRequest, pool_id: str) -> Any:
        """Create a pool by Resource Manager, which alone can give it identities."""
        # Without the header the operation would update the pool.
        if pool_id in self.state.pools and request.headers.get("if-none-match") == "*":
            raise AzureApiError(412, "PreconditionFailed", "The pool already exists.")
        resource = request.json()
        try:
            pool = _to_batch_pool(pool_id, resource)
        # The client library has no models of Resource Manager.
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AzureApiError(400, "InvalidRequestBody", f"Invalid pool: {error}") from error
        # Batch's own model of a pool has no identity.
        _check_model("BatchPoolCreateOptions", {k: v for k, v in pool.items() if k != "identity"})
        self._add_pool(pool)
        return WireResponse.json({"id": request.path, "name": pool_id, **resource})

    def _manage_account(self, request: WireRequest) -> Any:
        return WireResponse.json(
            {
                "id": ACCOUNT_ID,
                "name": ACCOUNT,
                "location": azure_prices.REGION,
                "properties": self.account,
            }
        )

    def _manage_sizes(self, request: WireRequest) -> Any:
        """List VM sizes in two pages."""
        if request.query.get("page") != "2":
            query = urlencode({**request.query, "page": "2"})
            # Two pages, so that a client that reads only the first one fails in tests.
            following = f"http://{request.headers['host']}{request.path}?{query}"
            return WireResponse.json(
                {"value": [_render_vm_size("Standard_D2s_v5", 2)], "nextLink": following}
            )
        return WireResponse.json({"value": [_render_vm_size("Standard_D4s_v5", 4)]})

    def _list_prices(self, request: WireRequest) -> Any:
        """List retail prices in pages; the link has the address that the client used."""
        try:
            wanted = azure_prices.parse_filter(request.query.get("$filter", ""))
        except ValueError as error:
            raise AzureApiError(400, "BadRequest", str(error)) from error
        market = self.datacenter.market
        zone = market.prices.zones(azure_prices.REGION, azure_prices.REGION)[0]
        items = azure_prices.list_items(
            wanted,
            spot_usd=market.spot_price_at(zone, _now_s()),
            on_demand_usd=market.prices.on_demand_usd(azure_prices.REGION),
        )
        first = request.integer("$skip", 0)
        last = first + azure_prices.PAGE_SIZE
        query = urlencode({**request.query, "$skip": str(last)})
        address = f"http://{request.headers.get('host', '')}{request.path}?{query}"
        shown = items[first:last]
        return WireResponse.json(
            {
                "BillingCurrency": "USD",
                "CustomerEntityId": "Default",
                "CustomerEntityType": "Retail",
                "Items": shown,
                "NextPageLink": address if last < len(items) else None,
                "Count": len(shown),
            }
        )

    def _manage_identity(self, request: WireRequest) -> Any:
        if request.path not in self.identities:
            raise AzureApiError(404, "ResourceNotFound", f"{request.path} was not found.")
        properties = {"clientId": self.identities[request.path]}
        return WireResponse.json({"id": request.path, "properties": properties})

    def _manage_rights(self, request: WireRequest) -> Any:
        """Return one role that allows everything except the denied permissions."""
        denied = sorted(self.faults.denied_permissions())
        role = {
            "actions": ["*"],
            "notActions": denied,
            "dataActions": ["Microsoft.Batch/*"],
            "notDataActions": denied,
        }
        return WireResponse.json({"value": [role]})

    def _create_pool(self, request: WireRequest) -> Any:
        body = _check_model("BatchPoolCreateOptions", request.json())
        # Other than by Resource Manager, which replaces an existing pool.
        if body["id"] in self.state.pools:
            raise AzureApiError(409, "PoolExists", "The specified pool already exists.")
        self._add_pool(body)
        return WireResponse(201)

    def _add_pool(self, body: dict[str, Any]) -> None:
        if self.faults.take("quota"):
            raise AzureApiError(409, "PoolQuotaReached", "Pool quota for the account is reached.")
        _refuse(azure_requests.find_limit_violation(body))
        # The target may be null in the request of the client library.
        pool = AzureBatchPool(
            body,
            _now_text(),
            target_nodes=int(body.get("targetLowPriorityNodes") or 0),
            target_dedicated_nodes=int(body.get("targetDedicatedNodes") or 0),
        )
        if body.get("enableAutoScale"):
            self._evaluate(pool, is_strict=True)
        self.state.pools[body["id"]] = pool

    def _get_pool(self, request: WireRequest, pool_id: str) -> Any:
        return self._render_pool(self._find_pool(pool_id))

    def _list_pools(self, request: WireRequest) -> Any:
        return [self._render_pool(pool) for pool in self.state.pools.values()]

    def _delete_pool(self, request: WireRequest, pool_id: str) -> Any:
        # Asynchronous: the pool is listed until its last node is removed.
        self._find_pool(pool_id).is_deleting = True
        return WireResponse(202)

    def _resize_pool(self, request: WireRequest, pool_id: str) -> Any:
        pool = self._find_pool(pool_id)
        if pool.body.get("enableAutoScale"):
            # Automatic scaling must be disabled first.
            raise AzureApiError(409, "OperationNotValidOnPool", "It scales automatically.")
        body = _check_model("BatchPoolResizeOptions", request.json())
        pool.target_nodes = int(body.get("targetLowPriorityNodes") or 0)
        pool.target_dedicated_nodes = int(body.get("targetDedicatedNodes") or 0)
        return WireResponse(202)

    def _scale_pool(self, request: WireRequest, pool_id: str) -> Any:
        pool = self._find_pool(pool_id)
        body = _check_model("BatchPoolEnableAutoScaleOptions", request.json())
        pool.body |= {"enableAutoScale": True, **body}
        self._evaluate(pool, is_strict=True)
        return WireResponse(200)

    def _read_nodes(self, request: WireRequest, pool_id: str, node_id: str | None = None) -> Any:
        pool = self._find_pool(pool_id)
        nodes = [
            {
                "id": node.id,
                "state": node.state,
                "schedulingState": "enabled",
                "isDedicated": node.market is Market.ON_DEMAND,
                "vmSize": pool.body.get("vmSize", ""),
                "runningTasksCount": int(node.state == "running"),
            }
            for node in pool.nodes
        ]
        if node_id is None:
            return nodes
        for node in nodes:
            if node["id"] == node_id:
                return node
        raise AzureApiError(404, "NodeNotFound", "The specified node does not exist.")

    def _find_pool(self, pool_id: str) -> AzureBatchPool:
        if pool_id not in self.state.pools:
            raise AzureApiError(404, "PoolNotFound", "The specified pool does not exist.")
        return self.state.pools[pool_id]

    def _render_pool(self, pool: AzureBatchPool) -> dict[str, Any]:
        # The pool resizes while a node has not booted.
        growing = any(node.state in ("creating", "starting") for node in pool.nodes)
        return {
            "vmSize": "",
            "taskSlotsPerNode": 1,
            **pool.body,
            "creationTime": pool.created,
            "state": "deleting" if pool.is_deleting else "active",
            "allocationState": "resizing" if growing else "steady",
            "currentDedicatedNodes": len(pool.nodes_of(Market.ON_DEMAND)),
            "currentLowPriorityNodes": len(pool.nodes_of(Market.SPOT)),
            "targetDedicatedNodes": pool.target_dedicated_nodes,
            "targetLowPriorityNodes": pool.target_nodes,
            **({"resizeErrors": pool.resize_errors} if pool.resize_errors else {}),
            **({"autoScaleRun": pool.autoscale_run} if pool.autoscale_run else {}),
        }

    # --- jobs --------------------------------------------------------------------------------

    def _create_job(self, request: WireRequest) -> Any:
        """Create a job. A missing pool is not an error: tasks wait for it."""
        body = _check_model("BatchJobCreateOptions", request.json())
        _refuse(azure_requests.find_limit_violation(body))
        if not body["poolInfo"].get("poolId"):
            raise AzureApiError(400, "MissingRequiredProperty", "poolInfo.poolId is required.")
        if body["id"] in self.state.jobs:
            raise AzureApiError(409, "JobExists", "The specified job already exists.")
        if self.faults.take("quota"):
            raise AzureApiError(
                409,
                "ActiveJobAndScheduleQuotaReached",
                "Active job and job schedule quota for the account has been reached.",
            )
        pool = self.state.pools.get(body["poolInfo"]["poolId"])
        if pool is not None and pool.is_deleting:
            raise AzureApiError(409, "PoolBeingDeleted", "The pool is marked for deletion.")
        self.state.jobs[body["id"]] = AzureBatchJob(body, _now_text(), _now_text())
        return WireResponse(201)

    def _get_job(self, request: WireRequest, job_id: str) -> Any:
        return _render_job(self._find_job(job_id))

    def _list_jobs(self, request: WireRequest) -> Any:
        return [_render_job(job) for job in self.state.jobs.values()]

    def _update_job(self, request: WireRequest, job_id: str) -> Any:
        job = self._find_active_job(job_id)
        job.body |= _check_model("BatchJobUpdateOptions", request.json())
        return WireResponse(200)

    def _terminate_job(self, request: WireRequest, job_id: str) -> Any:
        # The client library has no public model of this body.
        reason = request.json().get("terminateReason") or "UserTerminate"
        if not isinstance(reason, str):
            raise AzureApiError(400, "InvalidRequestBody", "terminateReason must be a text.")
        self._terminate_active_job(self._find_active_job(job_id), reason)
        return WireResponse(202)

    def _delete_job(self, request: WireRequest, job_id: str) -> Any:
        _set_state(self._find_job(job_id), "deleting")
        return WireResponse(202)

    def _find_job(self, job_id: str) -> AzureBatchJob:
        if job_id not in self.state.jobs:
            raise AzureApiError(404, "JobNotFound", "The specified job does not exist.")
        return self.state.jobs[job_id]

    def _find_active_job(self, job_id: str) -> AzureBatchJob:
        job = self._find_job(job_id)
        if job.state != "active":
            # Clients distinguish a job that ended by itself from one that is being deleted.
            code, why = _INACTIVE_JOB_ERRORS[job.state]
            raise AzureApiError(409, code, why)
        return job

    # --- tasks -------------------------------------------------------------------------------

    def _create_task(self, request: WireRequest, job_id: str) -> Any:
        job = self._find_active_job(job_id)
        body = _check_model("BatchTaskCreateOptions", request.json())
        if body["id"] in job.tasks:
            raise AzureApiError(409, "TaskExists", "The specified task already exists.")
        self._add_task(job, body)
        return WireResponse(201)

    def _create_tasks(self, request: WireRequest, job_id: str) -> Any:
        """Create several tasks; each has a result of its own, such as TaskExists."""
        job = self._find_active_job(job_id)
        bodies = _check_model("BatchTaskGroup", request.json())["value"]
        # Documented limits of "Add Task Collection".
        if len(request.body) > _MAX_REQUEST_BYTES:
            raise AzureApiError(413, "RequestBodyTooLarge", "The request body is too large.")
        if len(bodies) > _MAX_TASKS_PER_REQUEST:
            raise AzureApiError(
                400, "InvalidRequestBody", "At most 100 tasks can be added at once."
            )
        message = {"lang": "en-US", "value": "The specified task already exists."}
        exists = {"status": "clienterror", "error": {"code": "TaskExists", "message": message}}
        results: list[dict[str, Any]] = []
        for body in bodies:
            _refuse(azure_requests.find_limit_violation(body))
        for body in bodies:
            result: dict[str, Any] = {"taskId": body["id"], "status": "success"}
            if body["id"] in job.tasks:
                result |= exists
            else:
                self._add_task(job, body)
            results.append(result)
        return {"value": results}

    def _add_task(self, job: AzureBatchJob, body: dict[str, Any]) -> None:
        _refuse(azure_requests.find_limit_violation(body))
        # spotfit starts one task per machine; an error is better than a task that never runs.
        if "multiInstanceSettings" in body:
            raise AzureApiError(
                400, "UnsupportedProperty", "multi-instance tasks are not simulated"
            )
        job.tasks[body["id"]] = AzureBatchTask(body, _now_text(), _now_text())

    def _read_tasks(self, request: WireRequest, job_id: str, task_id: str | None = None) -> Any:
        job = self._find_job(job_id)
        if task_id is not None:
            return self._render_task(job, self._find_task(job_id, task_id))
        return [self._render_task(job, task) for task in job.tasks.values()]

    def _terminate_task(self, request: WireRequest, job_id: str, task_id: str) -> Any:
        task = self._find_task(job_id, task_id)
        if task.state == "completed":
            raise AzureApiError(409, "TaskCompleted", "The specified task is completed.")
        self._stop_task(job_id, task)
        # A task without a machine ends at once.
        if not task.is_stop_requested and task.state == "active":
            _complete_task(task, None)
        return WireResponse(204)

    def _get_output(self, request: WireRequest, job_id: str, task_id: str) -> Any:
        """Return stdout from the node, without delay, while the node exists."""
        task = self._find_task(job_id, task_id)
        machine = self.datacenter.find_machine(f"{job_id}/{task_id}#{task.start_count}")
        if machine is None or machine.end_reason == RECLAIMED:
            raise AzureApiError(404, "FileNotFound", "The specified file does not exist.")
        body = self.datacenter.output(machine).encode()
        headers = {"content-type": "application/octet-stream"}
        # The client library reads files in ranges.
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("ocp-range", "")):
            return WireResponse(200, body[int(match[1]) : int(match[2]) + 1], headers)
        return WireResponse(200, body, headers)

    def _get_empty_output(self, request: WireRequest, job_id: str, task_id: str) -> Any:
        """Return an empty stderr: machines write everything to stdout."""
        self._get_output(request, job_id, task_id)
        return WireResponse(200, b"", {"content-type": "application/octet-stream"})

    def _find_task(self, job_id: str, task_id: str) -> AzureBatchTask:
        job = self._find_job(job_id)
        if task_id not in job.tasks:
            raise AzureApiError(404, "TaskNotFound", "The specified task does not exist.")
        return job.tasks[task_id]

    def _render_task(self, job: AzureBatchJob, task: AzureBatchTask) -> dict[str, Any]:
        # Unknown until the task has started.
        where = {"nodeInfo": {"poolId": job.pool, "nodeId": task.node}} if task.node else {}
        execution = dict(task.execution)
        # As BatchTaskExecutionInfo of azure-batch documents.
        if task.state not in ("running", "completed"):
            execution.pop("startTime", None)
        return {
            **task.body,
            "creationTime": task.created,
            "state": task.state,
            "stateTransitionTime": task.state_changed,
            **({"previousState": task.previous_state} if task.previous_state else {}),
            "executionInfo": execution,
            **where,
        }

    _P, _J = r"/pools/(?P<pool_id>[^/]+)", r"/jobs/(?P<job_id>[^/]+)"
    _T = _J + r"/tasks/(?P<task_id>[^/]+)"
    _operations: ClassVar[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
        ("PUT", ACCOUNT_ID + _P, _manage_pool),
        ("GET", ACCOUNT_ID, _manage_account),
        ("GET", r"/subscriptions/.*/locations/\w+/virtualMachineSkus", _manage_sizes),
        (
            "GET",
            _RESOURCE_GROUP + r"/Microsoft.ManagedIdentity/userAssignedIdentities/\w+",
            _manage_identity,
        ),
        ("GET", r"/subscriptions/.*/providers/Microsoft.Authorization/permissions", _manage_rights),
        ("GET", _PRICES_PATH, _list_prices),
        ("POST", "/pools", _create_pool),
        ("GET", "/pools", _list_pools),
        ("GET", _P, _get_pool),
        ("DELETE", _P, _delete_pool),
        ("POST", _P + "/resize", _resize_pool),
        ("POST", _P + "/enableautoscale", _scale_pool),
        ("GET", _P + "/nodes", _read_nodes),
        ("GET", _P + r"/nodes/(?P<node_id>[^/]+)", _read_nodes),
        ("POST", "/jobs", _create_job),
        ("GET", "/jobs", _list_jobs),
        ("GET", _J, _get_job),
        ("PATCH", _J, _update_job),
        ("DELETE", _J, _delete_job),
        ("POST", _J + "/terminate", _terminate_job),
        ("POST", _J + "/tasks", _create_task),
        ("POST", _J + "/addtaskcollection", _create_tasks),
        ("GET", _J + "/tasks", _read_tasks),
        ("GET", _T, _read_tasks),
        ("POST", _T + "/terminate", _terminate_task),
        ("GET", _T + "/files/stdout.txt", _get_output),
        ("GET", _T + "/files/stderr.txt", _get_empty_output),
    )

    # --- tick --------------------------------------------------------------------------------

    def tick(self) -> None:
        # A copy: a pool without nodes may be removed below.
        pools = list(self.state.pools.values())
        for pool in pools:
            for node in pool.nodes:
                self._update_node(node)
        # After the nodes: a task whose machine ended may complete its job in the same tick.
        for job in list(self.state.jobs.values()):
            self._advance_job(job)
        for pool in pools:
            self._update_target(pool)
            self._assign_nodes(pool)
            self._remove_spare_nodes(pool)

    def _update_node(self, node: AzureBatchNode) -> None:
        machine = self.datacenter.machines.get(node.machine) if node.machine is not None else None
        job_id, _, task_id = node.task.partition("/")
        job = self.state.jobs.get(job_id)
        task = job.tasks.get(task_id) if job is not None else None
        if machine is None:
            if node.state == "unusable" and _now_s() >= node.state_since_s + _UNUSABLE_DURATION_S:
                node.state, node.task = "preempted", ""
                # The task is requeued; neither requeueCount nor retryCount counts it.
                if task is not None and task.state == "running":
                    _set_state(task, "active")
                    task.node = ""
        elif machine.state == "up":
            node.state = "running"
            if task is not None and task.state == "active":
                _set_state(task, "running")
                task.node = node.id
                task.execution["startTime"] = _to_text(machine.started_at_s)
        elif machine.state == "over":
            node.machine = None
            stopped = task is None or task.is_stop_requested
            if machine.exit_code is None and not stopped:
                # A preempted machine first appears as an unresponsive node.
                node.state, node.state_since_s = "unusable", _now_s()
                return
            node.state, node.task = "idle", ""
            if task is not None:
                code = None if stopped else machine.exit_code
                _complete_task(task, code, ended_at_s=machine.ended_at_s)

    def _advance_job(self, job: AzureBatchJob) -> None:
        if job.state in ("terminating", "deleting"):
            for task in job.tasks.values():
                self._stop_task(job.body["id"], task)
            if any(task.state == "running" for task in job.tasks.values()):
                return
            # A deleted job disappears only after its last task has stopped.
            if job.state == "deleting":
                del self.state.jobs[job.body["id"]]
                return
            _set_state(job, "completed")
            job.end_info["endTime"] = _now_text()
        elif (
            job.state == "active"
            and job.body.get("onAllTasksComplete") == "terminatejob"
            # A job without tasks terminates as well.
            and all(task.state == "completed" for task in job.tasks.values())
        ):
            self._terminate_active_job(job, "AllTasksComplete")

    def _terminate_active_job(self, job: AzureBatchJob, reason: str) -> None:
        """Terminate the job; waiting tasks keep their state but never start."""
        _set_state(job, "terminating")
        job.end_info["terminateReason"] = reason

    def _stop_task(self, job_id: str, task: AzureBatchTask) -> None:
        machine = self.datacenter.find_machine(f"{job_id}/{task.body['id']}#{task.start_count}")
        if machine is not None and machine.is_active:
            # The end of its machine is then recorded as requested, not as a preemption.
            task.is_stop_requested = True
            self.datacenter.stop(machine, grace_s=_GRACE_S)
        elif task.state == "running":
            # Unless its node has not yet processed the end of its machine, which completes it.
            key = f"{job_id}/{task.body['id']}"
            nodes = [node for pool in self.state.pools.values() for node in pool.nodes]
            if not any(node.task == key and node.machine is not None for node in nodes):
                _complete_task(task, None)

    # --- autoscaling -------------------------------------------------------------------------

    def _update_target(self, pool: AzureBatchPool) -> None:
        now = _now_s()
        if pool.is_deleting:
            pool.target_nodes = pool.target_dedicated_nodes = 0
        elif pool.body.get("enableAutoScale"):
            if now >= pool.sampled_s + _SAMPLING_INTERVAL_S:
                pool.sampled_s = now
                jobs = [job for job in self.state.jobs.values() if job.pool == pool.body["id"]]
                active_jobs = [job for job in jobs if job.state == "active"]
                tasks = [task for job in active_jobs for task in job.tasks.values()]
                pending = sum(task.state in ("active", "running") for task in tasks)
                pool.samples = [*pool.samples, float(pending)][-_MAX_SAMPLES:]
                preempted = sum(node.state == "preempted" for node in pool.nodes)
                pool.preempted_samples = [*pool.preempted_samples, float(preempted)][-_MAX_SAMPLES:]
            if now >= pool.evaluated_s + _EVALUATION_INTERVAL_S:
                self._evaluate(pool)

    def _evaluate(self, pool: AzureBatchPool, *, is_strict: bool = False) -> None:
        """Evaluate the formula; a failure changes nothing, or raises if `is_strict`."""
        pool.evaluated_s = _now_s()
        try:
            metrics = {
                "$PendingTasks": pool.samples,
                "$PreemptedNodeCount": pool.preempted_samples,
            }
            results = evaluate(pool.body.get("autoScaleFormula") or "", metrics)
        except FormulaError as failure:
            if is_strict:
                raise AzureApiError(400, "AutoScalingFormulaSyntaxError", str(failure)) from None
            error = {"code": "AutoScalingFormulaEvaluationError", "message": str(failure)}
            pool.autoscale_run = {"timestamp": _now_text(), "error": error}
            return
        pool.target_nodes = int(results.get("$TargetLowPriorityNodes", pool.target_nodes))
        pool.target_dedicated_nodes = int(
            results.get("$TargetDedicatedNodes", pool.target_dedicated_nodes)
        )
        pool.autoscale_run = {
            "timestamp": _now_text(),
            "results": ";".join(f"{name}={value}" for name, value in results.items()),
        }

    def _assign_nodes(self, pool: AzureBatchPool) -> None:
        """Assign a node to each waiting task, older jobs first."""
        if pool.is_deleting:
            return
        for key, task in self._unassigned_tasks(pool):
            node = self._find_free_node(pool)
            if node is None:
                return
            machine = None
            if not self.faults.is_active("capacity"):
                task.start_count += 1
                settings = task.body.get("environmentSettings", [])
                machine = self.datacenter.rent(
                    f"{key}#{task.start_count}",
                    shlex.split(task.body["commandLine"]),
                    {one["name"]: one.get("value", "") for one in settings},
                    market=node.market,
                )
            if machine is None:
                pool.resize_errors = [_NO_CAPACITY_ERRORS[node.market]]
                return
            # A later success clears the error, as in the real service.
            pool.resize_errors = []
            # A new node is added only when there is a machine for it.
            if node not in pool.nodes:
                pool.nodes.append(node)
                pool.created_node_count += 1
            node.machine, node.task = machine.number, key
            # An idle VM is up already; its next task starts without a boot.
            node.state = "idle" if node.state == "idle" else "creating"

    def _unassigned_tasks(self, pool: AzureBatchPool) -> Iterator[tuple[str, AzureBatchTask]]:
        # Also of other pools: a task has one node.
        assigned = {node.task for other in self.state.pools.values() for node in other.nodes}
        for job_id, job in self.state.jobs.items():
            if job.pool == pool.body["id"] and job.state == "active":
                for task_id, task in job.tasks.items():
                    key = f"{job_id}/{task_id}"
                    if task.state == "active" and key not in assigned:
                        yield key, task

    def _find_free_node(self, pool: AzureBatchPool) -> AzureBatchNode | None:
        """Return an idle node, a node preempted long enough ago, or a new node; None if there is
        none."""
        for node in pool.nodes:
            if node.state == "idle" and node.machine is None:
                return node
        for node in pool.nodes:
            if node.state == "preempted" and _now_s() >= node.state_since_s + _RESCHEDULE_DELAY_S:
                return node
        for market in (Market.ON_DEMAND, Market.SPOT):
            if len(pool.nodes_of(market)) < pool.target(market):
                # Stable: clients compare the ids of nodes between requests.
                pool_uid = uuid.uuid5(uuid.NAMESPACE_URL, pool.created).hex
                kind = "p" if market is Market.SPOT else "d"
                return AzureBatchNode(
                    f"tvmps_{pool_uid}_{pool.created_node_count}_{kind}", market=market
                )
        return None

    def _remove_spare_nodes(self, pool: AzureBatchPool) -> None:
        """Remove spare nodes without tasks (`taskcompletion`). The real order is not documented."""
        # Nodes with tasks are never removed, so the pool may be larger than its target for a while.
        for market in Market:
            spare = len(pool.nodes_of(market)) - pool.target(market)
            for state in ("idle", "preempted"):
                for node in pool.nodes_of(market):
                    if spare > 0 and node.state == state and node.machine is None:
                        pool.nodes.remove(node)
                        spare -= 1
        if pool.is_deleting and not pool.nodes:
            del self.state.pools[pool.body["id"]]

    # --- on a machine ------------------------------------------------------------------------

    def task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        """https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables"""
        job_id, _, task_id = machine.task.partition("#")[0].partition("/")
        pool_id, node_id = next(
            (
                (pool_id, node.id)
                for pool_id, pool in self.state.pools.items()
                for node in pool.nodes
                if node.machine == machine.number
            ),
            ("", ""),
        )
        metadata_url = f"http://{self.datacenter.host(machine)}:{machine.metadata_port}"
        return {
            "AZ_BATCH_ACCOUNT_NAME": ACCOUNT,
            "AZ_BATCH_POOL_ID": pool_id,
            "AZ_BATCH_NODE_ID": node_id,
            "AZ_BATCH_NODE_IS_DEDICATED": str(machine.market is Market.ON_DEMAND).lower(),
            "AZ_BATCH_JOB_ID": job_id,
            "AZ_BATCH_TASK_ID": task_id,
            "AZURE_POD_IDENTITY_AUTHORITY_HOST": metadata_url,
        }

    def answer_metadata(
        self, machine: SimulatedMachine, request: WireRequest
    ) -> WireResponse | None:
        """Answer only with the header `Metadata`, as the real service."""
        # Protects the real service against forwarded requests.
        if request.headers.get("metadata", "").lower() != "true":
            message = "Bad request. Required metadata header not specified"
            return WireResponse.json({"error": message}, 400)
        if request.path == "/metadata/scheduledevents":
            return self._answer_scheduled_events(request)
        if request.path == "/metadata/instance/compute/name":
            return WireResponse(200, _vm_name(machine).encode(), {"content-type": "text/plain"})
        if request.path == "/metadata/instance":
            return WireResponse.json({"compute": {"name": _vm_name(machine), "location": "sim"}})
        if request.path == "/metadata/identity/oauth2/token":
            token = {
                "access_token": "simulated",
                "client_id": request.query.get("client_id", ""),
                "expires_in": "3599",
                "expires_on": str(int(_now_s()) + 3599),
                "resource": request.query.get("resource", ""),
                "token_type": "Bearer",
            }
            return WireResponse.json(token)
        return None

    def _answer_scheduled_events(self, request: WireRequest) -> WireResponse:
        """Return the events of all VMs; a client looks for its own name. An acknowledged event
        starts at once. The delay of the first answer (up to two minutes) is not simulated.
        """
        noticed = [one for one in self.datacenter.active_machines() if one.noticed_at_s is not None]
        if request.method == "POST":
            acknowledged = {content["EventId"] for content in request.json()["StartRequests"]}
            for machine in noticed:
                if _event_id(machine) in acknowledged:
                    # The acknowledgement means that the VM is ready to be preempted.
                    machine.kill_due_s = _now_s()
            return WireResponse(200)
        events = [
            {
                "EventId": _event_id(one),
                "EventStatus": "Scheduled",
                "EventType": "Preempt",
                "ResourceType": "VirtualMachine",
                "Resources": [_vm_name(one)],
                "NotBefore": format_datetime(
                    datetime.fromtimestamp(one.kill_due_s or 0.0, UTC), usegmt=True
                ),
                "Description": "",
                "EventSource": "Platform",
                # The duration is unknown: the VM does not return.
                "DurationInSeconds": -1,
            }
            for one in noticed
        ]
        return WireResponse.json({"DocumentIncarnation": len(noticed), "Events": events})


_PERMISSIONS = {
    "_manage_account": "Microsoft.Batch/batchAccounts/read",
    "_manage_identity": "Microsoft.ManagedIdentity/userAssignedIdentities/read",
    "_manage_pool": "Microsoft.Batch/batchAccounts/pools/write",
    "_manage_rights": "Microsoft.Authorization/permissions/read",
    "_manage_sizes": "Microsoft.Batch/locations/virtualMachineSkus/read",
    "_get_pool": "Microsoft.Batch/batchAccounts/pools/read",
    "_create_job": "Microsoft.Batch/batchAccounts/jobs/write",
    "_list_jobs": "Microsoft.Batch/batchAccounts/jobs/read",
}
_INACTIVE_JOB_ERRORS = {
    "terminating": ("JobBeingTerminated", "The specified job is being terminated."),
    "completed": ("JobCompleted", "The specified job is already in a completed state."),
    "deleting": ("JobBeingDeleted", "The specified job has been marked for deletion."),
}


# --- formats --------------------------------------------------------------------------------------


def _check_model(model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body, or raise the error of the service for a violation of the library's model."""
    _refuse(azure_requests.find_model_violation(model, body))
    # The service reads null as absent.
    drop_nulls(body)
    return body


def _refuse(violation: azure_requests.ModelViolation | None) -> None:
    if violation is not None:
        message = f"{_VIOLATION_MESSAGES[violation.code]}\nReason: {violation.reason}"
        raise AzureApiError(400, violation.code, message)


_VIOLATION_MESSAGES = {
    "InvalidPropertyValue": "The value provided for one of the properties is not valid.",
    "InvalidRequestBody": "The specified Request Body is not syntactically valid.",
    "MissingRequiredProperty": "A required property was not specified in the request body.",
}


def _to_batch_pool(pool_id: str, resource: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Resource Manager pool to the format of the Batch API."""
    properties = resource["properties"]
    scale = properties["scaleSettings"].get("autoScale", {})
    fixed = properties["scaleSettings"].get("fixedScale", {})
    machine = dict(properties["deploymentConfiguration"]["virtualMachineConfiguration"])
    # The two APIs spell it differently.
    machine["nodeAgentSKUId"] = machine.pop("nodeAgentSkuId")
    # Resource Manager has the identities by name, the Batch API has a list.
    identity = resource.get("identity", {})
    identities = [{"resourceId": name} for name in identity.get("userAssignedIdentities", {})]
    return {
        "id": pool_id,
        "vmSize": properties["vmSize"],
        "virtualMachineConfiguration": machine,
        "enableAutoScale": bool(scale),
        "autoScaleFormula": scale.get("formula", ""),
        # 15 minutes is the default of the service.
        "autoScaleEvaluationInterval": scale.get("evaluationInterval", "PT15M"),
        "targetLowPriorityNodes": fixed.get("targetLowPriorityNodes", 0),
        "targetDedicatedNodes": fixed.get("targetDedicatedNodes", 0),
        "enableInterNodeCommunication": properties.get("interNodeCommunication") == "Enabled",
        "taskSlotsPerNode": properties.get("taskSlotsPerNode", 1),
        **(
            {"identity": {"type": identity["type"], "userAssignedIdentities": identities}}
            if identity
            else {}
        ),
    }


def _render_vm_size(name: str, cores: int) -> dict[str, Any]:
    return {"name": name, "capabilities": [{"name": "vCPUs", "value": str(cores)}]}


def _render_job(job: AzureBatchJob) -> dict[str, Any]:
    return {
        **job.body,
        "creationTime": job.created,
        "state": job.state,
        "stateTransitionTime": job.state_changed,
        "executionInfo": {"startTime": job.created, "poolId": job.pool, **job.end_info},
    }


def _to_odata_response(content: Any, request: WireRequest) -> WireResponse:
    """Return one object or a page of a list, with the selected fields."""
    if not isinstance(content, list):
        return _odata_response(_select_fields(content, request))
    selected = [_select_fields(one, request) for one in content if _matches_filter(one, request)]
    # The token is opaque to clients; here it is an index.
    start, size = request.integer("$skiptoken", 0), request.integer("maxresults", _PAGE_SIZE)
    if not 1 <= size <= _PAGE_SIZE:
        raise AzureApiError(400, "OutOfRangeQueryParameterValue", "maxresults is out of range.")
    page: dict[str, Any] = {"value": selected[start : start + size]}
    if start + size < len(selected):
        query = urlencode({**request.query, "$skiptoken": start + size})
        # An absolute URL: clients follow it without change.
        page["odata.nextLink"] = f"http://{request.headers['host']}{request.path}?{query}"
    return _odata_response(page)


def _odata_response(content: Any) -> WireResponse:
    kind = "application/json; odata=minimalmetadata"
    return WireResponse(200, msgspec.json.encode(content), {"content-type": kind})


def _select_fields(item: dict[str, Any], request: WireRequest) -> dict[str, Any]:
    selected = request.query.get("$select", "")
    return {k: v for k, v in item.items() if k in selected.split(",")} if selected else item


def _matches_filter(item: Mapping[str, Any], request: WireRequest) -> bool:
    """Apply `$filter`; only comparisons of the state are supported."""
    text = request.query.get("$filter", "")
    if not text:
        return True
    match = re.fullmatch(r"state (eq|ne) '(\w+)'", text)
    if not match:
        raise AzureApiError(400, "InvalidQueryParameterValue", f"$filter={text} is not simulated")
    return bool((item["state"] == match[2]) == (match[1] == "eq"))


# --- tasks ----------------------------------------------------------------------------------------


def _complete_task(
    task: AzureBatchTask, code: int | None, *, ended_at_s: float | None = None
) -> None:
    """Complete the task; `code` is None if it was terminated by a request."""
    _set_state(task, "completed")
    end_time = _to_text(ended_at_s)
    task.execution |= {"endTime": end_time, "result": "success" if code == 0 else "failure"}
    if code is None:
        message = "Task Was Ended by User Request"
        failure = {"category": "usererror", "code": "TaskEnded", "message": message}
        task.execution["failureInfo"] = failure
        return
    task.execution["exitCode"] = code
    if code != 0:
        message = "The task exited with an exit code representing a failure"
        details = [{"name": "Message", "value": message}]
        info = {"category": "usererror", "code": "FailureExitCode", "message": message}
        task.execution["failureInfo"] = {**info, "details": details}


def _set_state(item: AzureBatchJob | AzureBatchTask, state: str) -> None:
    if item.state != state:
        if isinstance(item, AzureBatchTask):
            item.previous_state = item.state
        item.state, item.state_changed = state, _now_text()


# --- metadata -------------------------------------------------------------------------------------


def _vm_name(machine: SimulatedMachine) -> str:
    """Return the VM name. It does not contain the node id: the relation is not documented."""
    return f"sim-azurebatch-vmss_{machine.number}"


def _event_id(machine: SimulatedMachine) -> str:
    # Stable for one event: clients acknowledge it by this id.
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{machine.number}/{machine.noticed_at_s}")).upper()


def _now_s() -> float:
    return system.wall_ms() / 1000


def _now_text() -> str:
    return _to_text(None)


def _to_text(moment_s: float | None) -> str:
    moment_s = _now_s() if moment_s is None else moment_s
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
