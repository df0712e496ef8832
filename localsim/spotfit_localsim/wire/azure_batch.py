"""Azure Batch on loopback, for the real azure-batch, with what makes pools and VMs' metadata.

Behaviour as documented below https://learn.microsoft.com/azure/batch/ (batch-spot-vms: preempted
nodes keep their ids, their tasks are requeued; batch-pool-node-error-checking: resize errors,
`unusable`; batch-automatic-scaling), in https://learn.microsoft.com/rest/api/batchservice/ (status
and error codes), the docstrings of the library, and for Scheduled Events in
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. Where nothing is
documented it is said so. Multi-instance tasks, schedules, mounts and dedicated nodes are left out.

A machine of the site runs one command, so a node has one only while a task is meant for it: an idle
node costs nothing here.
"""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, ClassVar
from urllib.parse import urlencode

import msgspec

from spotfit.host import clocks
from spotfit_localsim.wire.api import Access
from spotfit_localsim.wire.azure_autoscale import FormulaError, evaluate
from spotfit_localsim.wire.http import Reply, Request
from spotfit_localsim.wire.site import RECLAIMED, Machine, Site
from spotfit_localsim.wire.trouble import Troubles

ACCOUNT = "spotfitsim"
_GROUP = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/spotfit/providers"
ACCOUNT_ID = f"{_GROUP}/Microsoft.Batch/batchAccounts/{ACCOUNT}"
IDENTITY = f"{_GROUP}/Microsoft.ManagedIdentity/userAssignedIdentities/agents"
_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL of a task that is ended: not documented."""
_UNUSABLE_S = 0.3
"""For how long a preempted node is told as `unusable`, and its task as running there."""
_ANEW_AFTER_S = 2.0
"""When the pool finds a machine for a preempted node: in truth a minute, or hours."""
_EVALUATE_S, _SAMPLE_S = 0.6, 0.3
"""Between two evaluations of a formula, two samples: in truth five minutes at least, and 30 s."""
_HISTORY = 20
_PAGE = 1000
_MOST_TASKS = 100
_LARGEST_BYTES = 2**20
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_CAPACITY = {
    "code": "AllocationFailed",
    "message": "Desired number of low priority nodes could not be allocated",
}


def _unexecuted() -> dict[str, Any]:
    return {"retryCount": 0, "requeueCount": 0}


class Task(msgspec.Struct):
    body: dict[str, Any]
    """As it was asked for."""
    created: str
    changed: str
    state: str = "active"
    node: str = ""
    starts: int = 0
    """How many machines were rented for it."""
    stopped: bool = False
    """Whether somebody asked for its end."""
    execution: dict[str, Any] = msgspec.field(default_factory=_unexecuted)


class Job(msgspec.Struct):
    body: dict[str, Any]
    created: str
    changed: str
    tasks: dict[str, Task] = {}
    state: str = "active"
    ended: dict[str, str] = {}

    @property
    def pool(self) -> str:
        return str(self.body["poolInfo"]["poolId"])


class Node(msgspec.Struct):
    id: str
    state: str = "creating"
    machine: int | None = None
    task: str = ""
    """'job/task' that it runs, or will."""
    since_s: float = 0.0


class Pool(msgspec.Struct):
    body: dict[str, Any]
    """In the words of Batch's own API, whoever made it."""
    created: str
    target: int = 0
    made: int = 0
    """How many nodes it has had."""
    nodes: list[Node] = []
    resize_errors: list[dict[str, Any]] = []
    run: dict[str, Any] = {}
    samples: list[float] = []
    sampled_s: float = 0.0
    evaluated_s: float = 0.0
    deleting: bool = False


class Memory(msgspec.Struct):
    pools: dict[str, Pool] = {}
    jobs: dict[str, Job] = {}


class ComplaintError(Exception):
    """An answer that is an error; its code is what clients read."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def reply(self) -> Reply:
        """With an id and the time in the message, on lines of their own."""
        text = f"{self}\nRequestId:{uuid.uuid4()}\nTime:{_stamp()}"
        told = {"code": self.code, "message": {"lang": "en-US", "value": text}}
        return Reply.json(told, self.status)

    def by_management(self) -> Reply:
        """As Resource Manager gives it."""
        return Reply.json({"error": {"code": self.code, "message": str(self)}}, self.status)


class AzureBatchCloud:
    """One Batch account."""

    Memory: ClassVar = Memory

    def __init__(self, site: Site, troubles: Troubles) -> None:
        self.site = site
        self.troubles = troubles
        self.memory = Memory()
        self.account: dict[str, Any] = {
            "accountEndpoint": f"{ACCOUNT}.sim.batch.azure.com",
            "provisioningState": "Succeeded",
            "poolAllocationMode": "BatchService",
            "lowPriorityCoreQuota": 100,
            "poolQuota": 100,
            "activeJobAndJobScheduleQuota": 300,
        }
        """What Resource Manager tells of it."""
        self.identities = {IDENTITY: "11111111-1111-1111-1111-111111111111"}
        """Their client ids."""

    @staticmethod
    def access(url: str) -> Access:
        return Access(
            {
                "endpoint": url,
                "management": url,
                "account_id": ACCOUNT_ID,
                "identity": IDENTITY,
                "vm_size": "Standard_D4s_v5",
                "image": "spotfit/worker:sim",
            }
        )

    # --- requests ----------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        by_management = request.path.startswith("/subscriptions/")
        try:
            self._refuse(request)
            return self._answered(request)
        except ComplaintError as complaint:
            return complaint.by_management() if by_management else complaint.reply()

    def _answered(self, request: Request) -> Reply:
        asked = "GET" if request.method == "HEAD" else request.method
        for method, pattern, verb in self._verbs:
            found = re.fullmatch(pattern, request.path)
            if found and method == asked:
                self._check(_RIGHTS.get(verb.__name__, ""))
                told = verb(self, request, **found.groupdict())
                return told if isinstance(told, Reply) else _as_odata(told, request)
        raise ComplaintError(400, "InvalidUri", f"{request.method} {request.path} is nothing")

    def _refuse(self, request: Request) -> None:
        if "api-version" not in request.query:
            raise ComplaintError(400, "MissingRequiredQueryParameter", "api-version is missing")
        if self.troubles.strikes("throttled"):
            raise ComplaintError(503, "ServerBusy", "The server is busy. Please retry.")
        if self.troubles.strikes("credentials"):
            raise ComplaintError(
                403,
                "AuthenticationFailed",
                "Server failed to authenticate the request. Make sure the value of Authorization "
                "header is formed correctly including the signature.",
            )
        if self.troubles.strikes("permission"):
            raise ComplaintError(
                403,
                "InsufficientAccountPermissions",
                "The account being accessed does not have sufficient permissions to execute this "
                "operation.",
            )

    def _check(self, right: str) -> None:
        if right and self.troubles.forbids(right):
            raise ComplaintError(
                403, "AuthorizationFailed", f"The client may not perform action '{right}'."
            )

    # --- pools -------------------------------------------------------------------------------

    def _manage_pool(self, request: Request, pool_id: str) -> Any:
        """Resource Manager makes pools, too, and only it gives them identities."""
        if pool_id in self.memory.pools and request.headers.get("if-none-match") == "*":
            raise ComplaintError(412, "PreconditionFailed", "The pool already exists.")
        told = request.json()
        self._add_pool(_as_batch_says(pool_id, told))
        return Reply.json({"id": request.path, "name": pool_id, **told})

    def _manage_account(self, request: Request) -> Any:
        return Reply.json(
            {"id": ACCOUNT_ID, "name": ACCOUNT, "location": "sim", "properties": self.account}
        )

    def _manage_sizes(self, request: Request) -> Any:
        """In two pages."""
        if request.query.get("page") != "2":
            query = urlencode({**request.query, "page": "2"})
            following = f"http://{request.headers['host']}{request.path}?{query}"
            return Reply.json({"value": [_size("Standard_D2s_v5", 2)], "nextLink": following})
        return Reply.json({"value": [_size("Standard_D4s_v5", 4)]})

    def _manage_identity(self, request: Request) -> Any:
        if request.path not in self.identities:
            raise ComplaintError(404, "ResourceNotFound", f"{request.path} was not found.")
        told = {"clientId": self.identities[request.path]}
        return Reply.json({"id": request.path, "properties": told})

    def _manage_rights(self, request: Request) -> Any:
        """One role that gives everything but what somebody has forbidden."""
        forbidden = sorted(self.troubles.forbidden())
        role = {
            "actions": ["*"],
            "notActions": forbidden,
            "dataActions": ["Microsoft.Batch/*"],
            "notDataActions": forbidden,
        }
        return Reply.json({"value": [role]})

    def _create_pool(self, request: Request) -> Any:
        body = request.json()
        if body["id"] in self.memory.pools:
            raise ComplaintError(409, "PoolExists", "The specified pool already exists.")
        self._add_pool(body)
        return Reply(201)

    def _add_pool(self, body: dict[str, Any]) -> None:
        if self.troubles.strikes("quota"):
            raise ComplaintError(409, "PoolQuotaReached", "Pool quota for the account is reached.")
        _check_id(body["id"])
        pool = Pool(body, _stamp(), int(body.get("targetLowPriorityNodes") or 0))
        if body.get("enableAutoScale"):
            self._evaluate(pool, strictly=True)
        self.memory.pools[body["id"]] = pool

    def _get_pool(self, request: Request, pool_id: str) -> Any:
        return self._told_pool(self._pool(pool_id))

    def _list_pools(self, request: Request) -> Any:
        return [self._told_pool(pool) for pool in self.memory.pools.values()]

    def _delete_pool(self, request: Request, pool_id: str) -> Any:
        self._pool(pool_id).deleting = True
        return Reply(202)

    def _resize_pool(self, request: Request, pool_id: str) -> Any:
        pool = self._pool(pool_id)
        if pool.body.get("enableAutoScale"):
            raise ComplaintError(409, "OperationNotValidOnPool", "It scales automatically.")
        pool.target = int(request.json().get("targetLowPriorityNodes") or 0)
        return Reply(202)

    def _scale_pool(self, request: Request, pool_id: str) -> Any:
        pool = self._pool(pool_id)
        pool.body |= {"enableAutoScale": True, **request.json()}
        self._evaluate(pool, strictly=True)
        return Reply(200)

    def _list_nodes(self, request: Request, pool_id: str) -> Any:
        pool = self._pool(pool_id)
        return [self._told_node(pool, node) for node in pool.nodes]

    def _get_node(self, request: Request, pool_id: str, node_id: str) -> Any:
        pool = self._pool(pool_id)
        for node in pool.nodes:
            if node.id == node_id:
                return self._told_node(pool, node)
        raise ComplaintError(404, "NodeNotFound", "The specified node does not exist.")

    def _pool(self, pool_id: str) -> Pool:
        if pool_id not in self.memory.pools:
            raise ComplaintError(404, "PoolNotFound", "The specified pool does not exist.")
        return self.memory.pools[pool_id]

    def _told_pool(self, pool: Pool) -> dict[str, Any]:
        growing = any(node.state in ("creating", "starting") for node in pool.nodes)
        return {
            "vmSize": "",
            "taskSlotsPerNode": 1,
            **pool.body,
            "creationTime": pool.created,
            "state": "deleting" if pool.deleting else "active",
            "allocationState": "resizing" if growing else "steady",
            "currentDedicatedNodes": 0,
            "currentLowPriorityNodes": len(pool.nodes),
            "targetDedicatedNodes": 0,
            "targetLowPriorityNodes": pool.target,
            **({"resizeErrors": pool.resize_errors} if pool.resize_errors else {}),
            **({"autoScaleRun": pool.run} if pool.run else {}),
        }

    def _told_node(self, pool: Pool, node: Node) -> dict[str, Any]:
        return {
            "id": node.id,
            "state": node.state,
            "schedulingState": "enabled",
            "isDedicated": False,
            "vmSize": pool.body.get("vmSize", ""),
            "runningTasksCount": int(node.state == "running"),
        }

    # --- jobs --------------------------------------------------------------------------------

    def _create_job(self, request: Request) -> Any:
        """A pool that is not there is no mistake: tasks wait until it is."""
        body = request.json()
        _check_id(body["id"])
        if body["id"] in self.memory.jobs:
            raise ComplaintError(409, "JobExists", "The specified job already exists.")
        if self.troubles.strikes("quota"):
            raise ComplaintError(
                409,
                "ActiveJobAndScheduleQuotaReached",
                "Active job and job schedule quota for the account has been reached.",
            )
        pool = self.memory.pools.get(body["poolInfo"]["poolId"])
        if pool is not None and pool.deleting:
            raise ComplaintError(409, "PoolBeingDeleted", "The pool is marked for deletion.")
        self.memory.jobs[body["id"]] = Job(body, _stamp(), _stamp())
        return Reply(201)

    def _get_job(self, request: Request, job_id: str) -> Any:
        return _told_job(self._job(job_id))

    def _list_jobs(self, request: Request) -> Any:
        return [_told_job(job) for job in self.memory.jobs.values()]

    def _update_job(self, request: Request, job_id: str) -> Any:
        self._open_job(job_id).body |= request.json()
        return Reply(200)

    def _terminate_job(self, request: Request, job_id: str) -> Any:
        told = request.json().get("terminateReason", "UserTerminate")
        self._end(self._open_job(job_id), told)
        return Reply(202)

    def _delete_job(self, request: Request, job_id: str) -> Any:
        _set(self._job(job_id), "deleting")
        return Reply(202)

    def _job(self, job_id: str) -> Job:
        if job_id not in self.memory.jobs:
            raise ComplaintError(404, "JobNotFound", "The specified job does not exist.")
        return self.memory.jobs[job_id]

    def _open_job(self, job_id: str) -> Job:
        job = self._job(job_id)
        if job.state != "active":
            code, why = _CLOSED[job.state]
            raise ComplaintError(409, code, why)
        return job

    # --- tasks -------------------------------------------------------------------------------

    def _create_task(self, request: Request, job_id: str) -> Any:
        job, body = self._open_job(job_id), request.json()
        if body["id"] in job.tasks:
            raise ComplaintError(409, "TaskExists", "The specified task already exists.")
        self._add_task(job, body)
        return Reply(201)

    def _create_tasks(self, request: Request, job_id: str) -> Any:
        """Each of them is judged alone: that one is there already is the answer for it alone."""
        job, bodies = self._open_job(job_id), request.json()["value"]
        if len(request.body) > _LARGEST_BYTES:
            raise ComplaintError(413, "RequestBodyTooLarge", "The request body is too large.")
        if len(bodies) > _MOST_TASKS:
            raise ComplaintError(400, "InvalidRequestBody", "More than 100 tasks are too many.")
        return {"value": [self._added(job, body) for body in bodies]}

    def _added(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        told = {"taskId": body["id"], "status": "success"}
        if body["id"] not in job.tasks:
            self._add_task(job, body)
            return told
        message = {"lang": "en-US", "value": "The specified task already exists."}
        return {
            **told,
            "status": "clienterror",
            "error": {"code": "TaskExists", "message": message},
        }

    def _add_task(self, job: Job, body: dict[str, Any]) -> None:
        _check_id(body["id"])
        if "multiInstanceSettings" in body:
            raise ComplaintError(400, "UnsupportedProperty", "no multi-instance tasks here")
        job.tasks[body["id"]] = Task(body, _stamp(), _stamp())

    def _get_task(self, request: Request, job_id: str, task_id: str) -> Any:
        return self._told_task(self._job(job_id), self._task(job_id, task_id))

    def _list_tasks(self, request: Request, job_id: str) -> Any:
        job = self._job(job_id)
        return [self._told_task(job, task) for task in job.tasks.values()]

    def _terminate_task(self, request: Request, job_id: str, task_id: str) -> Any:
        task = self._task(job_id, task_id)
        if task.state == "completed":
            raise ComplaintError(409, "TaskCompleted", "The specified task is completed.")
        self._stop(job_id, task)
        if not task.stopped and task.state == "active":
            _complete(task, None)
        return Reply(204)

    def _output(self, request: Request, job_id: str, task_id: str) -> Any:
        """From the node itself, at once, and only as long as that is there."""
        task = self._task(job_id, task_id)
        machine = self.site.of(f"{job_id}/{task_id}#{task.starts}")
        if machine is None or machine.why == RECLAIMED:
            raise ComplaintError(404, "FileNotFound", "The specified file does not exist.")
        body = self.site.output(machine).encode()
        told = {"content-type": "application/octet-stream"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("ocp-range", "")):
            return Reply(200, body[int(found[1]) : int(found[2]) + 1], told)
        return Reply(200, body, told)

    def _no_output(self, request: Request, job_id: str, task_id: str) -> Any:
        """Machines here write all they print to stdout."""
        self._output(request, job_id, task_id)
        return Reply(200, b"", {"content-type": "application/octet-stream"})

    def _task(self, job_id: str, task_id: str) -> Task:
        job = self._job(job_id)
        if task_id not in job.tasks:
            raise ComplaintError(404, "TaskNotFound", "The specified task does not exist.")
        return job.tasks[task_id]

    def _told_task(self, job: Job, task: Task) -> dict[str, Any]:
        where = {"nodeInfo": {"poolId": job.pool, "nodeId": task.node}} if task.node else {}
        return {
            **task.body,
            "creationTime": task.created,
            "state": task.state,
            "stateTransitionTime": task.changed,
            "executionInfo": task.execution,
            **where,
        }

    _P, _J = r"/pools/(?P<pool_id>[^/]+)", r"/jobs/(?P<job_id>[^/]+)"
    _T = _J + r"/tasks/(?P<task_id>[^/]+)"
    _verbs: ClassVar[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
        ("PUT", ACCOUNT_ID + _P, _manage_pool),
        ("GET", ACCOUNT_ID, _manage_account),
        ("GET", r"/subscriptions/.*/locations/\w+/virtualMachineSkus", _manage_sizes),
        (
            "GET",
            _GROUP + r"/Microsoft.ManagedIdentity/userAssignedIdentities/\w+",
            _manage_identity,
        ),
        ("GET", r"/subscriptions/.*/providers/Microsoft.Authorization/permissions", _manage_rights),
        ("POST", "/pools", _create_pool),
        ("GET", "/pools", _list_pools),
        ("GET", _P, _get_pool),
        ("DELETE", _P, _delete_pool),
        ("POST", _P + "/resize", _resize_pool),
        ("POST", _P + "/enableautoscale", _scale_pool),
        ("GET", _P + "/nodes", _list_nodes),
        ("GET", _P + r"/nodes/(?P<node_id>[^/]+)", _get_node),
        ("POST", "/jobs", _create_job),
        ("GET", "/jobs", _list_jobs),
        ("GET", _J, _get_job),
        ("PATCH", _J, _update_job),
        ("DELETE", _J, _delete_job),
        ("POST", _J + "/terminate", _terminate_job),
        ("POST", _J + "/tasks", _create_task),
        ("POST", _J + "/addtaskcollection", _create_tasks),
        ("GET", _J + "/tasks", _list_tasks),
        ("GET", _T, _get_task),
        ("POST", _T + "/terminate", _terminate_task),
        ("GET", _T + "/files/stdout.txt", _output),
        ("GET", _T + "/files/stderr.txt", _no_output),
    )

    # --- as time goes by ---------------------------------------------------------------------

    def tick(self) -> None:
        pools = list(self.memory.pools.values())
        for pool in pools:
            for node in pool.nodes:
                self._follow(node)
        for job in list(self.memory.jobs.values()):
            self._move(job)
        for pool in pools:
            self._scale(pool)
            self._assign(pool)
            self._shrink(pool)

    def _follow(self, node: Node) -> None:
        machine = self.site.machines.get(node.machine) if node.machine is not None else None
        if machine is None:
            if node.state == "unusable" and _now_s() >= node.since_s + _UNUSABLE_S:
                self._requeue(node)
        elif machine.state == "up":
            self._note_start(node)
        elif machine.state == "over":
            self._note_end(node, machine)

    def _note_start(self, node: Node) -> None:
        task = self._task_of(node)
        node.state = "running"
        if task is not None and task.state == "active":
            _set(task, "running")
            task.node = node.id
            task.execution["startTime"] = _stamp()

    def _note_end(self, node: Node, machine: Machine) -> None:
        """Only what ends by itself has a code. Where the market took the machine, Batch sees no
        more at first than a node that does not answer."""
        task, node.machine = self._task_of(node), None
        stopped = task is None or task.stopped
        if machine.exit_code is None and not stopped:
            node.state, node.since_s = "unusable", _now_s()
            return
        node.state, node.task = "idle", ""
        if task is not None:
            _complete(task, None if stopped else machine.exit_code)

    def _requeue(self, node: Node) -> None:
        """Counted nowhere: requeueCount is of users' requests, retryCount of exit codes."""
        task = self._task_of(node)
        node.state, node.task = "preempted", ""
        if task is not None and task.state == "running":
            _set(task, "active")
            task.node = ""

    def _move(self, job: Job) -> None:
        if job.state in ("terminating", "deleting"):
            for task in job.tasks.values():
                self._stop(job.body["id"], task)
            if any(task.state == "running" for task in job.tasks.values()):
                return
            if job.state == "deleting":
                del self.memory.jobs[job.body["id"]]
                return
            _set(job, "completed")
            job.ended["endTime"] = _stamp()
        elif job.state == "active" and _has_run_out(job):
            self._end(job, "AllTasksComplete")

    def _end(self, job: Job, why: str) -> None:
        """Tasks that wait stay as they are; they are never started any more."""
        _set(job, "terminating")
        job.ended["terminateReason"] = why

    def _stop(self, job_id: str, task: Task) -> None:
        machine = self.site.of(f"{job_id}/{task.body['id']}#{task.starts}")
        if machine is not None and machine.standing:
            task.stopped = True
            self.site.stop(machine, grace_s=_GRACE_S)
        elif task.state == "running" and not self._is_ending(job_id, task):
            _complete(task, None)

    def _is_ending(self, job_id: str, task: Task) -> bool:
        """Whether its node has yet to notice that its machine is over."""
        key = f"{job_id}/{task.body['id']}"
        pools = self.memory.pools.values()
        return any(n.task == key and n.machine is not None for p in pools for n in p.nodes)

    def _task_of(self, node: Node) -> Task | None:
        job_id, _, task_id = node.task.partition("/")
        job = self.memory.jobs.get(job_id)
        return job.tasks.get(task_id) if job is not None else None

    # --- how many nodes ----------------------------------------------------------------------

    def _scale(self, pool: Pool) -> None:
        now = _now_s()
        if pool.deleting:
            pool.target = 0
        elif pool.body.get("enableAutoScale"):
            if now >= pool.sampled_s + _SAMPLE_S:
                pool.sampled_s = now
                pool.samples = [*pool.samples, float(self._pending(pool))][-_HISTORY:]
            if now >= pool.evaluated_s + _EVALUATE_S:
                self._evaluate(pool)

    def _evaluate(self, pool: Pool, *, strictly: bool = False) -> None:
        """A formula that fails changes nothing; one that cannot be read is refused at once."""
        pool.evaluated_s = _now_s()
        try:
            told = evaluate(pool.body["autoScaleFormula"], {"$PendingTasks": pool.samples})
        except FormulaError as wrong:
            if strictly:
                raise ComplaintError(400, "AutoScalingFormulaSyntaxError", str(wrong)) from None
            error = {"code": "AutoScalingFormulaEvaluationError", "message": str(wrong)}
            pool.run = {"timestamp": _stamp(), "error": error}
            return
        pool.target = int(told.get("$TargetLowPriorityNodes", pool.target))
        pool.run = {
            "timestamp": _stamp(),
            "results": ";".join(f"{name}={value}" for name, value in told.items()),
        }

    def _pending(self, pool: Pool) -> int:
        jobs = [job for job in self.memory.jobs.values() if job.pool == pool.body["id"]]
        tasks = [task for job in jobs if job.state == "active" for task in job.tasks.values()]
        return sum(task.state in ("active", "running") for task in tasks)

    def _assign(self, pool: Pool) -> None:
        """A node for each task that waits, the older jobs first."""
        if pool.deleting:
            return
        for key, task in self._waiting(pool):
            node = self._free(pool)
            if node is None:
                return
            machine = None
            if not self.troubles.now("capacity"):
                task.starts += 1
                command, environment = _runs(task.body)
                machine = self.site.rent(f"{key}#{task.starts}", command, environment)
            if machine is None:
                pool.resize_errors = [_NO_CAPACITY]
                return
            pool.resize_errors = []
            if node not in pool.nodes:
                pool.nodes.append(node)
                pool.made += 1
            node.machine, node.task = machine.number, key
            node.state = "idle" if node.state == "idle" else "creating"

    def _waiting(self, pool: Pool) -> Iterator[tuple[str, Task]]:
        meant = {node.task for one in self.memory.pools.values() for node in one.nodes}
        for job_id, job in self.memory.jobs.items():
            if job.pool == pool.body["id"] and job.state == "active":
                for task_id, task in job.tasks.items():
                    key = f"{job_id}/{task_id}"
                    if task.state == "active" and key not in meant:
                        yield key, task

    def _free(self, pool: Pool) -> Node | None:
        """An idle node, or one that was preempted long enough ago, or a new one."""
        for node in pool.nodes:
            if node.state == "idle" and node.machine is None:
                return node
        for node in pool.nodes:
            if node.state == "preempted" and _now_s() >= node.since_s + _ANEW_AFTER_S:
                return node
        if len(pool.nodes) < pool.target:
            return Node(f"tvmps_{uuid.uuid5(uuid.NAMESPACE_URL, pool.created).hex}_{pool.made}_p")
        return None

    def _shrink(self, pool: Pool) -> None:
        """Tasks are let be (`taskcompletion`); who goes is not documented: here who does least."""
        spare = len(pool.nodes) - pool.target
        for state in ("idle", "preempted"):
            for node in [one for one in pool.nodes if one.state == state and one.machine is None]:
                if spare > 0:
                    pool.nodes.remove(node)
                    spare -= 1
        if pool.deleting and not pool.nodes:
            del self.memory.pools[pool.body["id"]]

    # --- on a machine ------------------------------------------------------------------------

    def environment(self, machine: Machine) -> Mapping[str, str]:
        """https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables"""
        job_id, _, task_id = machine.task.partition("#")[0].partition("/")
        pool_id, node_id = self._place(machine)
        return {
            "AZ_BATCH_ACCOUNT_NAME": ACCOUNT,
            "AZ_BATCH_POOL_ID": pool_id,
            "AZ_BATCH_NODE_ID": node_id,
            "AZ_BATCH_NODE_IS_DEDICATED": "false",
            "AZ_BATCH_JOB_ID": job_id,
            "AZ_BATCH_TASK_ID": task_id,
            "AZURE_POD_IDENTITY_AUTHORITY_HOST": self._metadata_url(machine),
        }

    def metadata(self, machine: Machine, request: Request) -> Reply | None:
        """Nobody is told anything without the header that no browser sends."""
        if request.headers.get("metadata", "").lower() != "true":
            why = "Bad request. Required metadata header not specified"
            return Reply.json({"error": why}, 400)
        if request.path == "/metadata/scheduledevents":
            return self._events(request)
        if request.path == "/metadata/instance/compute/name":
            return Reply(200, _vm_name(machine).encode(), {"content-type": "text/plain"})
        if request.path == "/metadata/instance":
            return Reply.json({"compute": {"name": _vm_name(machine), "location": "sim"}})
        if request.path == "/metadata/identity/oauth2/token":
            return _token(request)
        return None

    def _events(self, request: Request) -> Reply:
        """Those of all VMs: each has to look for its own name. Whoever acknowledges one has it at
        once. That the first answer takes up to two minutes is left out."""
        going = [one for one in self.site.standing() if one.notice_s is not None]
        if request.method == "POST":
            begun = {told["EventId"] for told in request.json()["StartRequests"]}
            for machine in going:
                if _event_id(machine) in begun:
                    machine.ends_s = _now_s()
            return Reply(200)
        told = {"DocumentIncarnation": len(going), "Events": [_event(one) for one in going]}
        return Reply.json(told)

    def _place(self, machine: Machine) -> tuple[str, str]:
        for pool_id, pool in self.memory.pools.items():
            for node in pool.nodes:
                if node.machine == machine.number:
                    return pool_id, node.id
        return "", ""

    def _metadata_url(self, machine: Machine) -> str:
        return f"http://{self.site.host(machine)}:{machine.metadata_port}"


_RIGHTS = {
    "_manage_account": "Microsoft.Batch/batchAccounts/read",
    "_manage_identity": "Microsoft.ManagedIdentity/userAssignedIdentities/read",
    "_manage_pool": "Microsoft.Batch/batchAccounts/pools/write",
    "_manage_rights": "Microsoft.Authorization/permissions/read",
    "_manage_sizes": "Microsoft.Batch/locations/virtualMachineSkus/read",
    "_get_pool": "Microsoft.Batch/batchAccounts/pools/read",
    "_create_job": "Microsoft.Batch/batchAccounts/jobs/write",
    "_list_jobs": "Microsoft.Batch/batchAccounts/jobs/read",
}
_CLOSED = {
    "terminating": ("JobBeingTerminated", "The specified job is being terminated."),
    "completed": ("JobCompleted", "The specified job is already in a completed state."),
    "deleting": ("JobBeingDeleted", "The specified job has been marked for deletion."),
}


# --- what Azure says ------------------------------------------------------------------------------


def _check_id(text: str) -> None:
    if not _ID.fullmatch(text):
        raise ComplaintError(400, "InvalidPropertyValue", f"{text!r} cannot be an id.")


def _as_batch_says(pool_id: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """What Resource Manager was told, in the words of Batch's own API."""
    properties = told["properties"]
    scale = properties["scaleSettings"].get("autoScale", {})
    fixed = properties["scaleSettings"].get("fixedScale", {})
    who = told.get("identity", {})
    named = [{"resourceId": name} for name in who.get("userAssignedIdentities", {})]
    return {
        "id": pool_id,
        "vmSize": properties["vmSize"],
        **properties["deploymentConfiguration"],
        "enableAutoScale": bool(scale),
        "autoScaleFormula": scale.get("formula", ""),
        "autoScaleEvaluationInterval": scale.get("evaluationInterval", "PT15M"),
        "targetLowPriorityNodes": fixed.get("targetLowPriorityNodes", 0),
        "enableInterNodeCommunication": properties.get("interNodeCommunication") == "Enabled",
        "taskSlotsPerNode": properties.get("taskSlotsPerNode", 1),
        **({"identity": {"type": who["type"], "userAssignedIdentities": named}} if who else {}),
    }


def _size(name: str, cores: int) -> dict[str, Any]:
    return {"name": name, "capabilities": [{"name": "vCPUs", "value": str(cores)}]}


def _told_job(job: Job) -> dict[str, Any]:
    return {
        **job.body,
        "creationTime": job.created,
        "state": job.state,
        "stateTransitionTime": job.changed,
        "executionInfo": {"startTime": job.created, "poolId": job.pool, **job.ended},
    }


def _has_run_out(job: Job) -> bool:
    """A job without tasks has none left to run."""
    ends = job.body.get("onAllTasksComplete") == "terminatejob"
    return ends and all(task.state == "completed" for task in job.tasks.values())


def _as_odata(told: Any, request: Request) -> Reply:
    """One thing, or a page of many; only what was selected."""
    if not isinstance(told, list):
        return _odata(_selected(told, request))
    chosen = [_selected(one, request) for one in told if _passes(one, request)]
    start = int(request.query.get("$skiptoken", 0))
    size = int(request.query.get("maxresults", _PAGE))
    page: dict[str, Any] = {"value": chosen[start : start + size]}
    if start + size < len(chosen):
        query = urlencode({**request.query, "$skiptoken": start + size})
        page["odata.nextLink"] = f"http://{request.headers['host']}{request.path}?{query}"
    return _odata(page)


def _odata(told: Any) -> Reply:
    kind = "application/json; odata=minimalmetadata"
    return Reply(200, msgspec.json.encode(told), {"content-type": kind})


def _selected(told: dict[str, Any], request: Request) -> dict[str, Any]:
    wanted = request.query.get("$select", "")
    return {k: v for k, v in told.items() if k in wanted.split(",")} if wanted else told


def _passes(told: Mapping[str, Any], request: Request) -> bool:
    """`$filter`, as far as it is about states."""
    text = request.query.get("$filter", "")
    if not text:
        return True
    found = re.fullmatch(r"state (eq|ne) '(\w+)'", text)
    if not found:
        raise ComplaintError(400, "InvalidQueryParameterValue", f"$filter={text} is too much here")
    return bool((told["state"] == found[2]) == (found[1] == "eq"))


# --- tasks ----------------------------------------------------------------------------------------


def _runs(body: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, str]]:
    settings = body.get("environmentSettings", [])
    told = {one["name"]: one.get("value", "") for one in settings}
    return shlex.split(body["commandLine"]), told


def _complete(task: Task, code: int | None) -> None:
    """No code: it was ended by somebody's request."""
    _set(task, "completed")
    failure = None if code == 0 else _failure(code)
    task.execution |= {
        "endTime": _stamp(),
        "result": "success" if failure is None else "failure",
        **({} if code is None else {"exitCode": code}),
        **({} if failure is None else {"failureInfo": failure}),
    }


def _failure(code: int | None) -> dict[str, Any]:
    if code is None:
        why = "Task Was Ended by User Request"
        return {"category": "usererror", "code": "TaskEnded", "message": why}
    why = "The task exited with an exit code representing a failure"
    details = [{"name": "Message", "value": why}]
    told = {"category": "usererror", "code": "FailureExitCode", "message": why}
    return {**told, "details": details}


def _set(what: Job | Task, state: str) -> None:
    if what.state != state:
        what.state, what.changed = state, _stamp()


# --- metadata -------------------------------------------------------------------------------------


def _vm_name(machine: Machine) -> str:
    """No node id: how the two belong together is not documented."""
    return f"sim-azurebatch-vmss_{machine.number}"


def _event_id(machine: Machine) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{machine.number}/{machine.notice_s}")).upper()


def _event(machine: Machine) -> dict[str, Any]:
    begins = datetime.fromtimestamp(machine.ends_s or 0.0, UTC)
    return {
        "EventId": _event_id(machine),
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": [_vm_name(machine)],
        "NotBefore": format_datetime(begins, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def _token(request: Request) -> Reply:
    told = {
        "access_token": "simulated",
        "client_id": request.query.get("client_id", ""),
        "expires_in": "3599",
        "expires_on": str(int(_now_s()) + 3599),
        "resource": request.query.get("resource", ""),
        "token_type": "Bearer",
    }
    return Reply.json(told)


def _now_s() -> float:
    return clocks.wall_ms() / 1000


def _stamp() -> str:
    return datetime.fromtimestamp(_now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
