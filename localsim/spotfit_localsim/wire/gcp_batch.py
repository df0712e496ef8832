"""Google Cloud Batch on loopback, for the real google-cloud-batch over REST, with what is around it
(rights, zones, service accounts, images), and VM metadata.

Behaviour as documented: https://docs.cloud.google.com/batch/docs/troubleshooting (what events say,
exit codes), …/batch/docs/automate-task-retries, …/batch/docs/reference/rest, the docstrings of the
library, and https://docs.cloud.google.com/compute/docs/metadata/querying-metadata. Where nothing is
documented it is said so. Script runnables are left out: they are about a VM's own system.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from spotfit.host import clocks
from spotfit_localsim.wire.api import Access
from spotfit_localsim.wire.http import Reply, Request
from spotfit_localsim.wire.site import LOST, RECLAIMED, Machine, Site
from spotfit_localsim.wire.trouble import Troubles

PROJECT, REGION, ZONE = "spotfit-sim", "sim-east1", "sim-east1-a"
NUMBER = "1234567890"
"""Of the project."""
AGENTS = f"agents@{PROJECT}.iam.gserviceaccount.com"
LOGS_LATE_S = 5.0
"""Between a line and its entry: not documented; the agent that sends them gathers them first."""
_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL of a task that is cancelled; not documented, that of a shutdown."""
_ANEW_AFTER_S = 2.0
"""For how long a task that will be tried again has no machine: in truth a minute or more."""
_LARGEST_BYTES = 2**20
_PREEMPTED, _SILENT = 50001, 50002
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
_OVER = ("FAILED", "SUCCEEDED", "UNEXECUTED")
_NO_CAPACITY = (
    "VM in Managed Instance Group meets error: Batch Error: code - "
    "CODE_GCE_ZONE_RESOURCE_POOL_EXHAUSTED, description - error count is 1, latest message "
    f"example: Instance creation failed: The zone 'projects/{PROJECT}/zones/{ZONE}' does not have "
    "enough resources available to fulfill the request."
)


class Task(msgspec.Struct):
    state: str = "PENDING"
    machine: int | None = None
    retries: int = 0
    not_before_s: float = 0.0
    events: list[dict[str, Any]] = []


class Job(msgspec.Struct):
    name: str
    uid: str
    request_id: str
    body: dict[str, Any]
    """As it was asked for."""
    created: str
    updated: str
    tasks: list[Task]
    state: str = "QUEUED"
    events: list[dict[str, Any]] = []
    deleted: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.body["taskGroups"][0]["taskSpec"])


class Memory(msgspec.Struct):
    jobs: dict[str, Job] = {}
    """By name."""
    operations: dict[str, dict[str, Any]] = {}


class ComplaintError(Exception):
    """An answer that is an error, as Google's APIs give it: https://google.aip.dev/193."""

    def __init__(self, code: int, status: str, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.reason = reason

    def reply(self) -> Reply:
        told: dict[str, Any] = {"code": self.code, "message": str(self), "status": self.status}
        if self.reason:
            kind = "type.googleapis.com/google.rpc.ErrorInfo"
            told["details"] = [
                {"@type": kind, "reason": self.reason, "domain": "googleapis.com", "metadata": {}}
            ]
        return Reply.json({"error": told}, self.code)


class GcpBatchCloud:
    """One region of one project."""

    Memory: ClassVar = Memory

    def __init__(self, site: Site, troubles: Troubles) -> None:
        self.site = site
        self.troubles = troubles
        self.memory = Memory()
        self.images = {"worker": {"sim"}}
        """Tags of the packages in the repository 'spotfit'."""
        self.machine_types = {"g2-standard-8", "nvidia-l4"}
        """In the first zone only."""
        self.accounts = {AGENTS, f"{NUMBER}-compute@developer.gserviceaccount.com"}
        self.roles = {"roles/batch.agentReporter", "roles/batch.jobsEditor"}
        """Those of the agents."""

    @staticmethod
    def access(url: str) -> Access:
        return Access(
            {
                "endpoint": url,
                "project": PROJECT,
                "region": REGION,
                "image": "spotfit/worker:sim",
                "service_account": AGENTS,
            }
        )

    # --- requests ----------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        as_numbers = "enum-encoding=int" in request.query.get("$alt", "")
        try:
            self._refuse(request)
            told = self._answered(request)
        except ComplaintError as complaint:
            return complaint.reply()
        return Reply.json(_numbered(told) if as_numbers else told)

    def _answered(self, request: Request) -> Any:
        for method, pattern, verb in self._verbs:
            found = re.fullmatch(pattern, request.path)
            if found and method == request.method:
                self._check(_RIGHTS.get(verb.__name__, ""), request)
                return verb(self, request, **found.groupdict())
        raise _not_found(f"{request.method} {request.path}")

    def _refuse(self, request: Request) -> None:
        if self.troubles.strikes("throttled"):
            raise ComplaintError(
                429,
                "RESOURCE_EXHAUSTED",
                "Quota exceeded for quota metric 'Mutate requests' and limit 'Mutate requests per "
                "minute per region' of service 'batch.googleapis.com'.",
                "RATE_LIMIT_EXCEEDED",
            )
        if self.troubles.strikes("credentials"):
            raise ComplaintError(
                401,
                "UNAUTHENTICATED",
                "Request had invalid authentication credentials. Expected OAuth 2 access token, "
                "login cookie or other valid authentication credential.",
                "ACCESS_TOKEN_EXPIRED",
            )
        if self.troubles.strikes("permission"):
            raise _denied(request)

    def _check(self, right: str, request: Request) -> None:
        if right and self.troubles.forbids(right):
            raise _denied(request)

    def _create(self, request: Request, parent: str) -> Any:
        """The same request id is the same request; the same job id with another is refused."""
        request_id = request.query.get("requestId", "")
        for known in self.memory.jobs.values():
            if request_id and known.request_id == request_id:
                return self._told(known)
        if self.troubles.strikes("quota"):
            raise ComplaintError(
                429, "RESOURCE_EXHAUSTED", "Quota 'concurrent jobs' exceeded. Limit: 0 in region."
            )
        job_id = request.query.get("jobId") or f"j-{uuid.uuid4()}"
        name = f"{parent}/jobs/{job_id}"
        body = request.json()
        _check(job_id, body, size_bytes=len(request.body))
        if name in self.memory.jobs:
            raise ComplaintError(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")
        count = int(body["taskGroups"][0].get("taskCount", 1))
        job = Job(
            name,
            f"{job_id}-{uuid.uuid4().hex[:12]}",
            request_id,
            body,
            _stamp(),
            _stamp(),
            [Task() for _ in range(count)],
        )
        self.memory.jobs[name] = job
        return self._told(job)

    def _get(self, request: Request, name: str) -> Any:
        return self._told(self._job(name))

    def _list(self, request: Request, parent: str) -> Any:
        jobs = [job for job in self.memory.jobs.values() if job.name.startswith(f"{parent}/jobs/")]
        return _page(request, "jobs", [self._told(job) for job in jobs])

    def _cancel(self, request: Request, name: str) -> Any:
        """What is over cannot be cancelled; which error says so is not documented."""
        job = self._job(name)
        if job.state in (*_ENDED, "DELETION_IN_PROGRESS"):
            raise ComplaintError(400, "FAILED_PRECONDITION", f"Job {name} is {job.state}.")
        self._set(job, "CANCELLATION_IN_PROGRESS")
        return self._operation(name, "cancel")

    def _delete(self, request: Request, name: str) -> Any:
        job = self._job(name)
        job.deleted = True
        self._set(job, "DELETION_IN_PROGRESS")
        return self._operation(name, "delete")

    def _tasks(self, request: Request, name: str) -> Any:
        """A job that still waits for its turn may have none to show."""
        job = self._job(name)
        if job.state == "QUEUED":
            return {"tasks": []}
        return _page(request, "tasks", [self._task(job, n) for n in range(len(job.tasks))])

    def _get_task(self, request: Request, name: str, number: str) -> Any:
        job = self._job(name)
        if int(number) >= len(job.tasks):
            raise _not_found(request.path.removeprefix("/v1/"))
        return self._task(job, int(number))

    def _get_operation(self, request: Request, name: str) -> Any:
        if name not in self.memory.operations:
            raise _not_found(name)
        told = self.memory.operations[name]
        job = self.memory.jobs.get(told["metadata"]["target"])
        kind = "type.googleapis.com/google.protobuf.Empty"
        over = job is None or job.state in _ENDED
        return {**told, "done": True, "response": {"@type": kind}} if over else told

    # --- what stands around Batch ------------------------------------------------------------

    def _location(self, request: Request, region: str) -> Any:
        if region != REGION:
            raise _not_found(request.path.removeprefix("/v1/"))
        return {"name": request.path.removeprefix("/v1/"), "locationId": region}

    def _compute_region(self, request: Request, region: str) -> Any:
        if region != REGION:
            raise _not_found(request.path)
        base = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones"
        return {"name": region, "zones": [f"{base}/{zone}" for zone in (ZONE, f"{REGION}-b")]}

    def _compute_type(self, request: Request, zone: str, name: str) -> Any:
        if zone != ZONE or name not in self.machine_types:
            raise _not_found(request.path)
        return {"name": name, "zone": zone}

    def _project(self, request: Request, project: str) -> Any:
        return {"projectId": project, "projectNumber": NUMBER}

    def _test_project(self, request: Request, project: str) -> Any:
        """All that nobody has forbidden."""
        return self._tested(request.json()["permissions"])

    def _test_account(self, request: Request, email: str) -> Any:
        if email not in self.accounts:
            raise _not_found(f"serviceAccounts/{email}")
        return self._tested(request.json()["permissions"])

    def _tested(self, rights: list[str]) -> dict[str, Any]:
        """A list that is empty is left out, as everything is in Google's JSON."""
        held = [right for right in rights if not self.troubles.forbids(right)]
        return {"permissions": held} if held else {}

    def _policy(self, request: Request, project: str) -> Any:
        members = [f"serviceAccount:{email}" for email in self.accounts]
        return {"bindings": [{"role": role, "members": members} for role in sorted(self.roles)]}

    def _tag(self, request: Request, package: str, tag: str) -> Any:
        if tag not in self.images.get(package, ()):
            raise _not_found(request.path.removeprefix("/v1/"))
        return {"name": request.path.removeprefix("/v1/")}

    def _entries(self, request: Request) -> Any:
        """Cloud Logging, as far as filters name a job and one of its tasks; the newest first."""
        told = request.json()
        found = re.search(r'labels\.task_id:"(.+)-group0-(\d+)/"', told["filter"])
        job = next((j for j in self.memory.jobs.values() if found and j.uid == found[1]), None)
        if job is None or found is None or "logsPolicy" not in job.body:
            return {}
        entries = list(self._lines(job, int(found[2])))[::-1][: int(told.get("pageSize", 50))]
        return {"entries": entries} if entries else {}

    def _lines(self, job: Job, number: int) -> Iterator[dict[str, Any]]:
        prefix = f"{job.name}/{number}#"
        for machine in self.site.machines.values():
            if machine.task.startswith(prefix):
                tries = machine.task.rpartition("#")[2]
                labels = {
                    "job_uid": job.uid,
                    "task_id": f"task/{job.uid}-group0-{number}/{tries}/0",
                }
                for line in self.site.output(machine, late_s=LOGS_LATE_S).splitlines():
                    yield {"textPayload": line, "timestamp": _stamp(), "labels": labels}

    _P = r"/v1/projects/(?P<project>[^/:]+)"
    _REPOSITORY = r"/v1/projects/[^/]+/locations/[^/]+/repositories/spotfit"
    _JOB = r"/v1/(?P<name>projects/[^/]+/locations/[^/]+/jobs/[^/:]+)"
    _verbs: ClassVar[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
        ("POST", r"/v1/(?P<parent>projects/[^/]+/locations/[^/]+)/jobs", _create),
        ("GET", r"/v1/(?P<parent>projects/[^/]+/locations/[^/]+)/jobs", _list),
        ("GET", _JOB, _get),
        ("DELETE", _JOB, _delete),
        ("POST", _JOB + ":cancel", _cancel),
        ("GET", _JOB + "/taskGroups/group0/tasks", _tasks),
        ("GET", _JOB + r"/taskGroups/group0/tasks/(?P<number>\d+)", _get_task),
        ("GET", r"/v1/(?P<name>projects/[^/]+/locations/[^/]+/operations/[^/]+)", _get_operation),
        ("GET", r"/v1/projects/[^/]+/locations/(?P<region>[^/]+)", _location),
        ("GET", r"/compute/v1/projects/[^/]+/regions/(?P<region>[^/]+)", _compute_region),
        (
            "GET",
            r"/compute/v1/projects/[^/]+/zones/(?P<zone>[^/]+)/\w+Types/(?P<name>[^/]+)",
            _compute_type,
        ),
        ("GET", _P, _project),
        ("POST", _P + ":testIamPermissions", _test_project),
        ("POST", _P + ":getIamPolicy", _policy),
        (
            "POST",
            r"/v1/projects/-/serviceAccounts/(?P<email>[^/:]+):testIamPermissions",
            _test_account,
        ),
        ("POST", r"/v2/entries:list", _entries),
        ("GET", _REPOSITORY + r"/packages/(?P<package>.+)/tags/(?P<tag>[^/]+)", _tag),
    )

    def _job(self, name: str) -> Job:
        if name not in self.memory.jobs:
            raise _not_found(name)
        return self.memory.jobs[name]

    def _operation(self, target: str, verb: str) -> dict[str, Any]:
        name = f"{target.partition('/jobs/')[0]}/operations/operation-{uuid.uuid4()}"
        kind = "type.googleapis.com/google.cloud.batch.v1.OperationMetadata"
        metadata = {"@type": kind, "createTime": _stamp(), "target": target, "verb": verb}
        self.memory.operations[name] = {"name": name, "metadata": metadata}
        return self.memory.operations[name]

    # --- what is told of jobs ----------------------------------------------------------------

    def _told(self, job: Job) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for task in job.tasks:
            counts[task.state] = counts.get(task.state, 0) + 1
        (group,) = job.body["taskGroups"]
        return {
            **job.body,
            "name": job.name,
            "uid": job.uid,
            "taskGroups": [{**group, "name": f"{job.name}/taskGroups/group0"}],
            "status": {
                "state": job.state,
                "statusEvents": job.events,
                "taskGroups": {"group0": {"counts": {k: str(n) for k, n in counts.items()}}},
                "runDuration": "0s",
            },
            "createTime": job.created,
            "updateTime": job.updated,
        }

    def _task(self, job: Job, number: int) -> dict[str, Any]:
        """Its events in no order: https://github.com/nextflow-io/nextflow/issues/6779."""
        task = job.tasks[number]
        events = task.events[1:] + task.events[:1]
        return {
            "name": f"{job.name}/taskGroups/group0/tasks/{number}",
            "status": {"state": task.state, "statusEvents": events},
        }

    # --- as time goes by ---------------------------------------------------------------------

    def tick(self) -> None:
        for job in list(self.memory.jobs.values()):
            if job.deleted or job.state not in _ENDED:
                self._move(job)

    def _move(self, job: Job) -> None:
        ending = job.deleted or job.state == "CANCELLATION_IN_PROGRESS"
        for number, task in enumerate(job.tasks):
            if task.state not in _OVER:
                self._move_task(job, number, ending=ending)
        states = {task.state for task in job.tasks}
        if not states <= set(_OVER):
            if not ending and "RUNNING" in states:
                self._set(job, "RUNNING")
        elif job.deleted:
            del self.memory.jobs[job.name]
        elif ending:
            self._set(job, "CANCELLED")
        else:
            self._set(job, "SUCCEEDED" if states == {"SUCCEEDED"} else "FAILED")

    def _move_task(self, job: Job, number: int, *, ending: bool) -> None:
        task = job.tasks[number]
        machine = self.site.machines.get(task.machine) if task.machine is not None else None
        if machine is None:
            if ending:
                task.state = "UNEXECUTED"
            elif clocks.wall_ms() / 1000 >= task.not_before_s:
                self._place(job, number)
        elif not machine.standing:
            self._note_end(job, task, machine, ending=ending)
        elif ending:
            self.site.stop(machine, grace_s=_GRACE_S)
        elif machine.state == "up" and task.state != "RUNNING":
            _note(task, "RUNNING", f"on {_where(machine)}")

    def _place(self, job: Job, number: int) -> None:
        task = job.tasks[number]
        if job.state == "QUEUED":
            self._set(job, "SCHEDULED")
        machine = None
        if not self.troubles.now("capacity"):
            command, environment = _runs(job.spec)
            environment |= {
                "BATCH_TASK_INDEX": str(number),
                "BATCH_TASK_COUNT": str(len(job.tasks)),
                "BATCH_TASK_RETRY_ATTEMPT": str(task.retries),
            }
            machine = self.site.rent(f"{job.name}/{number}#{task.retries}", command, environment)
        if machine is not None:
            task.machine, task.state = machine.number, "ASSIGNED"
        elif not job.events or job.events[-1]["description"] != _NO_CAPACITY:
            job.events.append(_event(_NO_CAPACITY, kind="OPERATIONAL_INFO"))

    def _note_end(self, job: Job, task: Task, machine: Machine, *, ending: bool) -> None:
        code, why = _ended_with(machine)
        task.machine = None
        if code == 0:
            # No execution is told of one that went well; those of failures stay.
            _note(task, "SUCCEEDED", f"on {_where(machine)}")
            return
        _note(task, "FAILED", f"on {_where(machine)} due to {why} with exit code {code}.", code)
        if not ending and self._tries_again(job, task, code):
            task.retries += 1
            task.state = "PENDING"
            task.not_before_s = clocks.wall_ms() / 1000 + _ANEW_AFTER_S

    def _tries_again(self, job: Job, task: Task, code: int) -> bool:
        """All causes share one budget. With a policy, what it does not name gets its opposite."""
        spec = job.spec
        if task.retries >= spec.get("maxRetryCount", 0):
            return False
        for policy in spec.get("lifecyclePolicies", []):
            named = code in policy["actionCondition"]["exitCodes"]
            return named == (policy["action"] in (1, "RETRY_TASK"))
        return True

    def _set(self, job: Job, state: str) -> None:
        if job.state != state:
            said = f"Job state is set from {job.state} to {state} for job {job.name}."
            job.events.append(_event(said))
            job.state, job.updated = state, _stamp()

    # --- on a machine ------------------------------------------------------------------------

    def environment(self, machine: Machine) -> Mapping[str, str]:
        metadata = f"{self.site.host(machine)}:{machine.metadata_port}"
        return {
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            "SPOTFIT_SIGNAL_GRACE_S": f"{self.site.tide.options.notice_s:g}",
        }

    def metadata(self, machine: Machine, request: Request) -> Reply | None:
        """Nobody is told anything without the header that no browser sends."""
        google = {"metadata-flavor": "Google", "content-type": "application/text"}
        if request.headers.get("metadata-flavor") != "Google":
            return Reply(403, b"Missing required header: Metadata-Flavor", google)
        if request.path == "/":
            return Reply(200, b"computeMetadata/\n", google)
        path = request.path.removeprefix("/computeMetadata/v1/").rstrip("/")
        text = self._facts(machine).get(path)
        if text is None:
            return None
        etag = f"{_hash_of(text):016x}"
        held = _held_s(request) if request.query.get("last_etag", etag) == etag else 0.0
        if text.startswith("{"):
            google["content-type"] = "application/json"
        return Reply(200, text.encode(), {**google, "etag": etag}, hold_s=held)

    def _facts(self, machine: Machine) -> dict[str, str]:
        account = "instance/service-accounts"
        token = {"access_token": "simulated", "expires_in": 3599, "token_type": "Bearer"}
        told = {"aliases": ["default"], "email": AGENTS, "scopes": [_SCOPE]}
        return {
            "instance/id": str(machine.number),
            "instance/zone": f"projects/0/zones/{ZONE}",
            "instance/network-interfaces/0/ip": self.site.host(machine),
            "instance/preempted": "TRUE" if machine.notice_s is not None else "FALSE",
            "instance/maintenance-event": "NONE",
            "project/project-id": PROJECT,
            "universe/universe-domain": "googleapis.com",
            f"{account}/default": msgspec.json.encode(told).decode(),
            f"{account}/{AGENTS}": msgspec.json.encode(told).decode(),
            f"{account}/default/email": AGENTS,
            f"{account}/default/token": msgspec.json.encode(token).decode(),
            f"{account}/{AGENTS}/token": msgspec.json.encode(token).decode(),
        }


_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def _hash_of(text: str) -> int:
    """The same in every life of the simulator."""
    return int.from_bytes(uuid.uuid5(uuid.NAMESPACE_URL, text).bytes[:8])


def _held_s(request: Request) -> float:
    """How long the answer may be kept back for a change."""
    if request.query.get("wait_for_change") != "true":
        return 0.0
    return float(request.query.get("timeout_sec", 3600))


# --- what Google refuses --------------------------------------------------------------------------


def _check(job_id: str, body: dict[str, Any], *, size_bytes: int) -> None:
    wrong = _mistake(job_id, body, size_bytes=size_bytes)
    if wrong:
        raise ComplaintError(400, "INVALID_ARGUMENT", wrong)


def _mistake(job_id: str, body: dict[str, Any], *, size_bytes: int) -> str:
    groups = body.get("taskGroups", [])
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", job_id):
        return f"job_id {job_id!r} is invalid"
    if size_bytes > _LARGEST_BYTES:
        return "the job is larger than 1 MB"
    if len(groups) != 1:
        return "exactly one task group is supported"
    spec = groups[0]["taskSpec"]
    if not 0 <= spec.get("maxRetryCount", 0) <= 10:
        return "max_retry_count must be in [0, 10]"
    if len(spec.get("lifecyclePolicies", [])) > 1:
        return "only one lifecycle policy is supported"
    if not any("container" in runnable for runnable in spec["runnables"]):
        return "this simulator runs containers only"
    places = body.get("allocationPolicy", {}).get("location", {}).get("allowedLocations", [])
    foreign = [place for place in places if not _is_here(place)]
    return f"allowed locations {foreign} are not in {REGION}" if foreign else ""


def _is_here(place: str) -> bool:
    return place == f"regions/{REGION}" or place.startswith(f"zones/{REGION}-")


_RIGHTS = {
    "_create": "batch.jobs.create",
    "_get": "batch.jobs.get",
    "_list": "batch.jobs.list",
    "_cancel": "batch.jobs.delete",
    "_delete": "batch.jobs.delete",
    "_tasks": "batch.tasks.list",
    "_compute_region": "compute.regions.get",
    "_policy": "resourcemanager.projects.getIamPolicy",
    "_tag": "artifactregistry.tags.get",
    "_entries": "logging.logEntries.list",
}


def _denied(request: Request) -> ComplaintError:
    return ComplaintError(
        403,
        "PERMISSION_DENIED",
        f"Permission denied on resource '{request.path.removeprefix('/v1/')}' (or it may not "
        "exist).",
        "IAM_PERMISSION_DENIED",
    )


def _not_found(what: str) -> ComplaintError:
    return ComplaintError(404, "NOT_FOUND", f"Resource '{what}' was not found")


# --- tasks and their events -----------------------------------------------------------------------


def _runs(spec: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the container."""
    runnable = next(one for one in spec["runnables"] if "container" in one)
    container = runnable["container"]
    entrypoint = [container["entrypoint"]] if container.get("entrypoint") else []
    environment: dict[str, str] = {}
    for told in (spec, runnable):
        environment |= told.get("environment", {}).get("variables", {})
    return entrypoint + container.get("commands", []), environment


def _ended_with(machine: Machine) -> tuple[int, str]:
    if machine.exit_code is not None:
        return machine.exit_code, "task failure"
    if machine.why == RECLAIMED:
        return _PREEMPTED, "Spot VM preemption"
    if machine.why == LOST:
        return _SILENT, "Batch no longer receives VM updates"
    return 137, "task cancellation"


def _note(task: Task, state: str, said: str, code: int | None = None) -> None:
    event = _event(f"Task state is updated from {task.state} to {state} {said}")
    event["taskState"] = state
    if code is not None:
        event["taskExecution"] = {"exitCode": code}
    task.events.append(event)
    task.state = state


def _event(said: str, kind: str = "STATUS_CHANGED") -> dict[str, Any]:
    return {"type": kind, "description": said, "eventTime": _stamp()}


def _where(machine: Machine) -> str:
    return f"zones/{ZONE}/instances/{machine.number}"


def _stamp() -> str:
    return datetime.fromtimestamp(clocks.wall_ms() / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- JSON as Google writes it ---------------------------------------------------------------------

_JOB_STATES = (
    "STATE_UNSPECIFIED",
    "QUEUED",
    "SCHEDULED",
    "RUNNING",
    "SUCCEEDED",
    "FAILED",
    "DELETION_IN_PROGRESS",
    "CANCELLATION_IN_PROGRESS",
    "CANCELLED",
)
_TASK_STATES = (
    "STATE_UNSPECIFIED",
    "PENDING",
    "ASSIGNED",
    "RUNNING",
    "FAILED",
    "SUCCEEDED",
    "UNEXECUTED",
)


def _numbered(told: Any, states: tuple[str, ...] = _JOB_STATES) -> Any:
    """States as numbers: those of tasks where it is about tasks."""
    if isinstance(told, list):
        return [_numbered(one, states) for one in told]
    if not isinstance(told, dict):
        return told
    if "/tasks/" in told.get("name", ""):
        states = _TASK_STATES
    return {name: _number(name, told[name], states) for name in told}


def _number(name: str, value: Any, states: tuple[str, ...]) -> Any:
    if name == "taskState":
        return _TASK_STATES.index(value)
    return states.index(value) if name == "state" else _numbered(value, states)


def _page(request: Request, name: str, found: list[Any]) -> dict[str, Any]:
    start = int(request.query.get("pageToken") or 0)
    size = int(request.query.get("pageSize") or 100) or 100
    more = {"nextPageToken": str(start + size)} if start + size < len(found) else {}
    return {name: found[start : start + size], **more}
