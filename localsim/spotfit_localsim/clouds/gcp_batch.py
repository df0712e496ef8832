"""Google Cloud Batch on loopback for the real google-cloud-batch over REST, with VM metadata and
the services around it (IAM, zones, service accounts, images, logs).

Behaviour as documented: https://docs.cloud.google.com/batch/docs/troubleshooting (events and exit
codes), …/batch/docs/automate-task-retries, …/batch/docs/reference/rest, the docstrings of the
library, and https://docs.cloud.google.com/compute/docs/metadata/querying-metadata. Undocumented
behaviour is marked as such. Script runnables are not supported.

States of a task:

    PENDING  | a machine is rented            | ASSIGNED
    ASSIGNED | the machine has booted         | RUNNING
    RUNNING  | exit code 0                    | SUCCEEDED
    RUNNING  | another end, retries are left  | PENDING
    RUNNING  | another end                    | FAILED
    PENDING  | the job is cancelled or deleted | UNEXECUTED
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from spotfit.host import system
from spotfit.model.offer import Market
from spotfit_localsim.clouds import gcp_prices, gcp_requests
from spotfit_localsim.clouds.api import ClientAccess
from spotfit_localsim.clouds.cloud_host import LOST, RECLAIMED, Datacenter, SimulatedMachine
from spotfit_localsim.clouds.http_server import (
    MalformedRequestError,
    WireRequest,
    WireResponse,
    is_number,
)
from spotfit_localsim.clouds.injected_errors import ApiFaults

PROJECT, REGION, ZONE = "spotfit-sim", "sim-east1", "sim-east1-a"
PROJECT_NUMBER = "1234567890"
"""Number of the project."""
BILLING_API = "cloudbilling.googleapis.com"
"""A denied permission of this name means that the API is disabled in the project."""
AGENT_SERVICE_ACCOUNT = f"agents@{PROJECT}.iam.gserviceaccount.com"
LOG_DELAY_S = 5.0
"""Delay of log entries; not documented: the logging agent sends lines in batches."""
_GRACE_S = 30.0
"""Time between SIGTERM and SIGKILL of a cancelled task; not documented, that of a VM shutdown."""
_RESCHEDULE_DELAY_S = 2.0
"""Delay before a retried task gets a machine; a minute or more in the real service."""
_PREEMPTED_EXIT_CODE, _UNREACHABLE_EXIT_CODE = 50001, 50002
_ENDED_JOB_STATES = ("SUCCEEDED", "FAILED", "CANCELLED")
_ENDED_TASK_STATES = ("FAILED", "SUCCEEDED", "UNEXECUTED")
_NO_CAPACITY_MESSAGE = (
    "VM in Managed Instance Group meets error: Batch Error: code - "
    "CODE_GCE_ZONE_RESOURCE_POOL_EXHAUSTED, description - error count is 1, latest message "
    f"example: Instance creation failed: The zone 'projects/{PROJECT}/zones/{ZONE}' does not have "
    "enough resources available to fulfill the request."
)


class GcpBatchTask(msgspec.Struct):
    state: str = "PENDING"
    machine: int | None = None
    retries: int = 0
    not_before_s: float = 0.0
    events: list[dict[str, Any]] = []


class GcpBatchJob(msgspec.Struct):
    name: str
    uid: str
    request_id: str
    body: dict[str, Any]
    """The request."""
    created: str
    updated: str
    tasks: list[GcpBatchTask]
    state: str = "QUEUED"
    events: list[dict[str, Any]] = []
    is_deleting: bool = False

    def count_startable_tasks(self) -> int:
        """Return how many more tasks may run in parallel."""
        limit = int(self.body["taskGroups"][0].get("parallelism", gcp_requests.MAX_PARALLEL_TASKS))
        return limit - sum(one.state in ("ASSIGNED", "RUNNING") for one in self.tasks)

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.body["taskGroups"][0]["taskSpec"])

    @property
    def instance(self) -> dict[str, Any]:
        """The policy or template of its VMs."""
        return dict((self.body.get("allocationPolicy", {}).get("instances") or [{}])[0])

    @property
    def zone(self) -> str:
        """The first allowed zone, in which all VMs are created here."""
        location = self.body.get("allocationPolicy", {}).get("location", {})
        allowed = [one.rpartition("/") for one in location.get("allowedLocations", [])]
        return next((name for kind, _, name in allowed if kind == "zones"), ZONE)


class GcpBatchState(msgspec.Struct):
    jobs: dict[str, GcpBatchJob] = {}
    """Jobs by name."""
    operations: dict[str, dict[str, Any]] = {}


class GoogleApiError(Exception):
    """An error response as in https://google.aip.dev/193."""

    def __init__(
        self,
        code: int,
        status: str,
        message: str,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.reason = reason
        self.metadata = metadata or {}

    def reply(self) -> WireResponse:
        error: dict[str, Any] = {"code": self.code, "message": str(self), "status": self.status}
        if self.reason:
            kind = "type.googleapis.com/google.rpc.ErrorInfo"
            error["details"] = [
                {
                    "@type": kind,
                    "reason": self.reason,
                    "domain": "googleapis.com",
                    "metadata": self.metadata,
                }
            ]
        return WireResponse.json({"error": error}, self.code)


class GcpBatchCloud:
    """One region of one project."""

    State: ClassVar = GcpBatchState

    def __init__(self, datacenter: Datacenter, faults: ApiFaults) -> None:
        self.datacenter = datacenter
        self.faults = faults
        self.state = GcpBatchState()
        self.images = {"worker": {"sim"}}
        """Tags of the packages in the repository 'spotfit'."""
        self.machine_types = {"g2-standard-8", "nvidia-l4"}
        """Machine types of the first zone; other zones have none."""
        self.service_accounts = {
            AGENT_SERVICE_ACCOUNT,
            f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com",
        }
        self.roles = {"roles/batch.agentReporter", "roles/batch.jobsEditor"}
        """Roles of the service accounts."""
        self.region_quotas = {"CPUS": 24.0, "PREEMPTIBLE_CPUS": 0.0, "NVIDIA_L4_GPUS": 0.0}
        self.region_quotas["PREEMPTIBLE_NVIDIA_L4_GPUS"] = 4.0
        self.project_quotas = {"GPUS_ALL_REGIONS": 4.0}
        self.firewall_rules: list[dict[str, Any]] = [
            {
                "name": "default-allow-internal",
                "direction": "INGRESS",
                "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}],
                "sourceRanges": ["10.128.0.0/9"],
            }
        ]
        self.bucket_location = REGION.upper()
        self.standard_templates: set[str] = set()
        """Instance templates with the provisioning model STANDARD; others have SPOT."""

    @staticmethod
    def client_access(url: str) -> ClientAccess:
        return ClientAccess(
            {
                "endpoint": url,
                "project": PROJECT,
                "region": REGION,
                "image": "spotfit/worker:sim",
                "service_account": AGENT_SERVICE_ACCOUNT,
            }
        )

    # --- requests ----------------------------------------------------------------------------

    def answer_request(self, request: WireRequest) -> WireResponse:
        # The REST transport of the library asks for numbers, curl and gcloud for names.
        as_numbers = "enum-encoding=int" in request.query.get("$alt", "")
        try:
            self._raise_fault(request)
            content = self._dispatch(request)
        except MalformedRequestError as malformed:
            return GoogleApiError(400, "INVALID_ARGUMENT", str(malformed)).reply()
        except GoogleApiError as complaint:
            return complaint.reply()
        return WireResponse.json(_with_numeric_states(content) if as_numbers else content)

    def is_lagging_read(self, request: WireRequest) -> bool:
        return request.method == "GET" and "/jobs" in request.path

    def _dispatch(self, request: WireRequest) -> Any:
        for method, pattern, operation in self._operations:
            match = re.fullmatch(pattern, request.path)
            if match and method == request.method:
                permission = _PERMISSIONS.get(operation.__name__, "")
                if permission and self.faults.is_denied(permission):
                    raise _permission_denied_error(request)
                return operation(self, request, **match.groupdict())
        raise _not_found_error(f"{request.method} {request.path}")

    def _raise_fault(self, request: WireRequest) -> None:
        if self.faults.take("throttled"):
            raise GoogleApiError(
                429,
                "RESOURCE_EXHAUSTED",
                "Quota exceeded for quota metric 'Mutate requests' and limit 'Mutate requests per "
                "minute per region' of service 'batch.googleapis.com'.",
                "RATE_LIMIT_EXCEEDED",
            )
        if self.faults.take("credentials"):
            raise GoogleApiError(
                401,
                "UNAUTHENTICATED",
                "Request had invalid authentication credentials. Expected OAuth 2 access token, "
                "login cookie or other valid authentication credential.",
                "ACCESS_TOKEN_EXPIRED",
            )
        if self.faults.take("permission"):
            raise _permission_denied_error(request)

    def _create(self, request: WireRequest, parent: str) -> Any:
        """Create a job: idempotent by request id; an existing job id with another request id is
        refused."""
        request_id = request.query.get("requestId", "")
        for known in self.state.jobs.values():
            # A retry of the library repeats the request id.
            if request_id and known.request_id == request_id:
                return self._render_job(known)
        if self.faults.take("quota"):
            raise GoogleApiError(
                429, "RESOURCE_EXHAUSTED", "Quota 'concurrent jobs' exceeded. Limit: 0 in region."
            )
        job_id = request.query.get("jobId") or f"j-{uuid.uuid4()}"
        name = f"{parent}/jobs/{job_id}"
        try:
            body = gcp_requests.to_canonical_job(request.json())
            gcp_requests.check_job(
                job_id, request_id, body, region=REGION, size_bytes=len(request.body)
            )
        except gcp_requests.InvalidJobError as invalid:
            raise GoogleApiError(400, "INVALID_ARGUMENT", str(invalid)) from invalid
        if name in self.state.jobs:
            raise GoogleApiError(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")
        count = int(body["taskGroups"][0].get("taskCount", 1))
        job = GcpBatchJob(
            name=name,
            uid=f"{job_id}-{uuid.uuid4().hex[:12]}",
            request_id=request_id,
            body=body,
            created=_now_text(),
            updated=_now_text(),
            tasks=[GcpBatchTask() for _ in range(count)],
        )
        self.state.jobs[name] = job
        return self._render_job(job)

    def _get(self, request: WireRequest, name: str) -> Any:
        return self._render_job(self._find_job(name))

    def _list(self, request: WireRequest, parent: str) -> Any:
        jobs = [job for job in self.state.jobs.values() if job.name.startswith(f"{parent}/jobs/")]
        return _paginate(request, "jobs", [self._render_job(job) for job in jobs])

    def _cancel(self, request: WireRequest, name: str) -> Any:
        """Cancel a job. The error for an ended job is not documented."""
        job = self._find_job(name)
        if job.state in (*_ENDED_JOB_STATES, "DELETION_IN_PROGRESS"):
            raise GoogleApiError(400, "FAILED_PRECONDITION", f"Job {name} is {job.state}.")
        self._set_state(job, "CANCELLATION_IN_PROGRESS")
        return self._create_operation(name, "cancel")

    def _delete(self, request: WireRequest, name: str) -> Any:
        job = self._find_job(name)
        job.is_deleting = True
        self._set_state(job, "DELETION_IN_PROGRESS")
        return self._create_operation(name, "delete")

    def _tasks(self, request: WireRequest, name: str) -> Any:
        """List the tasks; a queued job may have none yet."""
        job = self._find_job(name)
        if job.state == "QUEUED":
            return {"tasks": []}
        return _paginate(
            request, "tasks", [self._render_task(job, n) for n in range(len(job.tasks))]
        )

    def _get_task(self, request: WireRequest, name: str, number: str) -> Any:
        job = self._find_job(name)
        if not is_number(number) or int(number) >= len(job.tasks):
            raise _not_found_error(request.path.removeprefix("/v1/"))
        return self._render_task(job, int(number))

    def _get_operation(self, request: WireRequest, name: str) -> Any:
        if name not in self.state.operations:
            raise _not_found_error(name)
        operation = self.state.operations[name]
        job = self.state.jobs.get(operation["metadata"]["target"])
        kind = "type.googleapis.com/google.protobuf.Empty"
        # The job of a finished deletion does not exist any more.
        is_done = job is None or job.state in _ENDED_JOB_STATES
        return {**operation, "done": True, "response": {"@type": kind}} if is_done else operation

    # --- services around Batch ---------------------------------------------------------------

    def _get_location(self, request: WireRequest, region: str) -> Any:
        if region != REGION:
            raise _not_found_error(request.path.removeprefix("/v1/"))
        return {"name": request.path.removeprefix("/v1/"), "locationId": region}

    def _compute_region(self, request: WireRequest, region: str) -> Any:
        if region != REGION:
            raise _not_found_error(request.path)
        base = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones"
        zones = [f"{base}/{zone}" for zone in (ZONE, f"{REGION}-b")]
        return {"name": region, "zones": zones, "quotas": _quotas(self.region_quotas)}

    def _compute_project(self, request: WireRequest) -> Any:
        return {"name": PROJECT, "quotas": _quotas(self.project_quotas)}

    def _list_subnetworks(self, request: WireRequest) -> Any:
        base = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}"
        network = {"network": f"{base}/global/networks/default", "ipCidrRange": "10.128.0.0/20"}
        return {"items": [{"name": "default", "privateIpGoogleAccess": False, **network}]}

    def _list_firewalls(self, request: WireRequest) -> Any:
        network = (
            f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/global/networks/default"
        )
        return {"items": [{"network": network, **rule} for rule in self.firewall_rules]}

    def _get_bucket(self, request: WireRequest) -> Any:
        return {"location": self.bucket_location}

    def _get_compute_type(self, request: WireRequest, zone: str, name: str) -> Any:
        if zone != ZONE or name not in self.machine_types:
            raise _not_found_error(request.path)
        return {"name": name, "zone": zone}

    def _list_skus(self, request: WireRequest) -> Any:
        """List the SKUs of Compute Engine, four per page, to test the pagination of clients."""
        if self.faults.is_denied(BILLING_API):
            raise GoogleApiError(
                403,
                "PERMISSION_DENIED",
                f"Cloud Billing API has not been used in project {PROJECT_NUMBER} before or it is "
                "disabled.",
                "SERVICE_DISABLED",
                {"service": BILLING_API, "consumer": f"projects/{PROJECT_NUMBER}"},
            )
        if problem := gcp_prices.find_query_violation(request.query):
            raise GoogleApiError(400, "INVALID_ARGUMENT", problem)
        if request.integer("pageSize", gcp_prices.MAX_PAGE_SIZE) > gcp_prices.MAX_PAGE_SIZE:
            raise GoogleApiError(400, "INVALID_ARGUMENT", "Page size must be at most 5000.")
        market = self.datacenter.market
        zone = market.prices.zones(REGION, ZONE)[0]
        skus = gcp_prices.list_skus(
            REGION,
            spot_usd=market.spot_price_at(zone, system.wall_ms() / 1000),
            on_demand_usd=market.prices.on_demand_usd(REGION),
        )
        first = request.integer("pageToken", 0)
        following = str(first + 4) if first + 4 < len(skus) else ""
        return {"skus": skus[first : first + 4], "nextPageToken": following}

    def _get_project(self, request: WireRequest, project: str) -> Any:
        return {"projectId": project, "projectNumber": PROJECT_NUMBER}

    def _test_permissions(
        self, request: WireRequest, email: str | None = None, project: str | None = None
    ) -> Any:
        """Return the permissions on a service account or on the project that are not denied."""
        if email is not None and email not in self.service_accounts:
            raise _not_found_error(f"serviceAccounts/{email}")
        requested = request.json().get("permissions", [])
        if not isinstance(requested, list) or not all(isinstance(one, str) for one in requested):
            raise GoogleApiError(400, "INVALID_ARGUMENT", "permissions must be texts.")
        granted = [permission for permission in requested if not self.faults.is_denied(permission)]
        # Empty lists are omitted, as in all of Google's JSON.
        return {"permissions": granted} if granted else {}

    def _policy(self, request: WireRequest, project: str) -> Any:
        members = [f"serviceAccount:{email}" for email in self.service_accounts]
        return {"bindings": [{"role": role, "members": members} for role in sorted(self.roles)]}

    def _tag(self, request: WireRequest, package: str, tag: str) -> Any:
        if tag not in self.images.get(package, ()):
            raise _not_found_error(request.path.removeprefix("/v1/"))
        return {"name": request.path.removeprefix("/v1/")}

    def _entries(self, request: WireRequest) -> Any:
        """Cloud Logging for filters that name a task of a job; newest entries first."""
        query = request.json()
        # Only this form of filter is used by spotfit.
        match = re.search(r'labels\.task_id:"(.+)-group0-(\d+)/"', str(query.get("filter")))
        job = next((j for j in self.state.jobs.values() if match and j.uid == match[1]), None)
        if job is None or match is None or "logsPolicy" not in job.body:
            return {}
        entries = []
        for machine in self.datacenter.machines.values():
            task, _, attempt = machine.task.rpartition("#")
            if task != f"{job.name}/{match[2]}":
                continue
            # The label contains the attempt: lines of all attempts have one prefix.
            task_id = f"task/{job.uid}-group0-{match[2]}/{attempt}/0"
            labels = {"job_uid": job.uid, "task_id": task_id}
            for line in self.datacenter.output(machine, delay_s=LOG_DELAY_S).splitlines():
                entries.append({"textPayload": line, "timestamp": _now_text(), "labels": labels})
        size = query.get("pageSize", 50)
        if not isinstance(size, int) or not 1 <= size <= 1000:
            raise GoogleApiError(400, "INVALID_ARGUMENT", "page_size must be in [1, 1000]")
        page = entries[::-1][:size]
        return {"entries": page} if page else {}

    _P = r"/v1/projects/(?P<project>[^/:]+)"
    _REPOSITORY = r"/v1/projects/[^/]+/locations/[^/]+/repositories/spotfit"
    _JOB = r"/v1/(?P<name>projects/[^/]+/locations/[^/]+/jobs/[^/:]+)"
    _operations: ClassVar[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
        ("POST", r"/v1/(?P<parent>projects/[^/]+/locations/[^/]+)/jobs", _create),
        ("GET", r"/v1/(?P<parent>projects/[^/]+/locations/[^/]+)/jobs", _list),
        ("GET", _JOB, _get),
        ("DELETE", _JOB, _delete),
        ("POST", _JOB + ":cancel", _cancel),
        ("GET", _JOB + "/taskGroups/group0/tasks", _tasks),
        ("GET", _JOB + r"/taskGroups/group0/tasks/(?P<number>\d+)", _get_task),
        ("GET", r"/v1/(?P<name>projects/[^/]+/locations/[^/]+/operations/[^/]+)", _get_operation),
        ("GET", r"/v1/projects/[^/]+/locations/(?P<region>[^/]+)", _get_location),
        ("GET", r"/compute/v1/projects/[^/]+/regions/(?P<region>[^/]+)", _compute_region),
        ("GET", r"/compute/v1/projects/[^/]+", _compute_project),
        ("GET", r"/compute/v1/projects/[^/]+/regions/[^/]+/subnetworks", _list_subnetworks),
        ("GET", r"/compute/v1/projects/[^/]+/global/firewalls", _list_firewalls),
        ("GET", r"/storage/v1/b/[^/]+", _get_bucket),
        ("GET", rf"/v1/services/{gcp_prices.SERVICE}/skus", _list_skus),
        (
            "GET",
            r"/compute/v1/projects/[^/]+/zones/(?P<zone>[^/]+)/\w+Types/(?P<name>[^/]+)",
            _get_compute_type,
        ),
        ("GET", _P, _get_project),
        ("POST", _P + ":testIamPermissions", _test_permissions),
        ("POST", _P + ":getIamPolicy", _policy),
        (
            "POST",
            r"/v1/projects/-/serviceAccounts/(?P<email>[^/:]+):testIamPermissions",
            _test_permissions,
        ),
        ("POST", r"/v2/entries:list", _entries),
        ("GET", _REPOSITORY + r"/packages/(?P<package>.+)/tags/(?P<tag>[^/]+)", _tag),
    )

    def _find_job(self, name: str) -> GcpBatchJob:
        if name not in self.state.jobs:
            raise _not_found_error(name)
        return self.state.jobs[name]

    def _create_operation(self, target: str, verb: str) -> dict[str, Any]:
        name = f"{target.partition('/jobs/')[0]}/operations/operation-{uuid.uuid4()}"
        kind = "type.googleapis.com/google.cloud.batch.v1.OperationMetadata"
        metadata = {"@type": kind, "createTime": _now_text(), "target": target, "verb": verb}
        self.state.operations[name] = {"name": name, "metadata": metadata}
        return self.state.operations[name]

    # --- rendering ---------------------------------------------------------------------------

    def _render_job(self, job: GcpBatchJob) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for task in job.tasks:
            counts[task.state] = counts.get(task.state, 0) + 1
        # A job has exactly one group, which the service names.
        (group,) = job.body["taskGroups"]
        return {
            **job.body,
            "name": job.name,
            "uid": job.uid,
            "taskGroups": [{**group, "name": f"{job.name}/taskGroups/group0"}],
            "status": {
                "state": job.state,
                "statusEvents": job.events,
                # Proto3 JSON writes 64-bit integers as strings.
                "taskGroups": {"group0": {"counts": {k: str(n) for k, n in counts.items()}}},
                "runDuration": "0s",
            },
            "createTime": job.created,
            "updateTime": job.updated,
        }

    def _render_task(self, job: GcpBatchJob, number: int) -> dict[str, Any]:
        """Events are not in order: https://github.com/nextflow-io/nextflow/issues/6779."""
        task = job.tasks[number]
        # Rotated always: a client that relies on the order fails in every test.
        events = task.events[1:] + task.events[:1]
        return {
            "name": f"{job.name}/taskGroups/group0/tasks/{number}",
            "status": {"state": task.state, "statusEvents": events},
        }

    # --- tick --------------------------------------------------------------------------------

    def tick(self) -> None:
        # A copy: deleted jobs are removed in the loop.
        for job in list(self.state.jobs.values()):
            if not job.is_deleting and job.state in _ENDED_JOB_STATES:
                continue
            ending = job.is_deleting or job.state == "CANCELLATION_IN_PROGRESS"
            startable = job.count_startable_tasks()
            for number, task in enumerate(job.tasks):
                if task.state in _ENDED_TASK_STATES:
                    continue
                self._advance_task(job, number, is_ending=ending, may_start=startable > 0)
                startable -= task.state == "ASSIGNED" and task.machine is not None
            states = {task.state for task in job.tasks}
            if not states <= set(_ENDED_TASK_STATES):
                if not ending and "RUNNING" in states:
                    self._set_state(job, "RUNNING")
            elif job.is_deleting:
                # Only now: a deleted job is listed until its tasks have ended.
                del self.state.jobs[job.name]
            elif ending:
                self._set_state(job, "CANCELLED")
            else:
                self._set_state(job, "SUCCEEDED" if states == {"SUCCEEDED"} else "FAILED")

    def _advance_task(
        self, job: GcpBatchJob, number: int, *, is_ending: bool, may_start: bool
    ) -> None:
        task = job.tasks[number]
        machine = self.datacenter.machines.get(task.machine) if task.machine is not None else None
        if machine is None:
            if is_ending:
                task.state = "UNEXECUTED"
            elif system.wall_ms() / 1000 >= task.not_before_s and may_start:
                self._start_task(job, number)
        elif not machine.is_active:
            self._record_end(job, task, machine, is_ending=is_ending)
        elif is_ending:
            self.datacenter.stop(machine, grace_s=_GRACE_S)
        elif machine.state == "up" and task.state != "RUNNING":
            place = f"on {_instance_path(job, machine)}"
            _record_state_change(task, "RUNNING", place, at_s=machine.started_at_s)

    def _start_task(self, job: GcpBatchJob, number: int) -> None:
        task = job.tasks[number]
        if job.state == "QUEUED":
            self._set_state(job, "SCHEDULED")
        machine = None
        if not self.faults.is_active("capacity"):
            runnable = next(one for one in job.spec["runnables"] if "container" in one)
            container = runnable["container"]
            entrypoint = [container["entrypoint"]] if container.get("entrypoint") else []
            environment: dict[str, str] = {}
            # The environment of a runnable overrides that of its task.
            for scope in (job.spec, runnable):
                environment |= scope.get("environment", {}).get("variables", {})
            environment |= {
                "BATCH_TASK_INDEX": str(number),
                "BATCH_TASK_COUNT": str(len(job.tasks)),
                "BATCH_TASK_RETRY_ATTEMPT": str(task.retries),
            }
            machine = self.datacenter.rent(
                f"{job.name}/{number}#{task.retries}",
                entrypoint + container.get("commands", []),
                environment,
                market=self._market(job),
            )
        if machine is not None:
            task.machine, task.state = machine.number, "ASSIGNED"
        # Reported once, not at every attempt to rent a machine.
        elif not job.events or job.events[-1]["description"] != _NO_CAPACITY_MESSAGE:
            job.events.append(_render_event(_NO_CAPACITY_MESSAGE, kind="OPERATIONAL_INFO"))

    def _market(self, job: GcpBatchJob) -> Market:
        template = job.instance.get("instanceTemplate")
        if template is not None:
            return Market.ON_DEMAND if template in self.standard_templates else Market.SPOT
        # Standard VMs are the default of Compute Engine.
        model = job.instance.get("policy", {}).get("provisioningModel", "STANDARD")
        return Market.SPOT if model in ("SPOT", "PREEMPTIBLE") else Market.ON_DEMAND

    def _record_end(
        self, job: GcpBatchJob, task: GcpBatchTask, machine: SimulatedMachine, *, is_ending: bool
    ) -> None:
        # The documented reserved exit codes, and that of SIGKILL.
        if machine.exit_code is not None:
            code, cause = machine.exit_code, "task failure"
        elif machine.end_reason == RECLAIMED:
            code, cause = _PREEMPTED_EXIT_CODE, "Spot VM preemption"
        elif machine.end_reason == LOST:
            code, cause = _UNREACHABLE_EXIT_CODE, "Batch no longer receives VM updates"
        else:
            code, cause = 137, "task cancellation"
        task.machine = None
        place, at_s = f"on {_instance_path(job, machine)}", machine.ended_at_s
        if code == 0:
            # A success has no taskExecution; those of earlier failures remain.
            _record_state_change(task, "SUCCEEDED", place, at_s=at_s)
            return
        detail = f"{place} due to {cause} with exit code {code}."
        _record_state_change(task, "FAILED", detail, code, at_s=at_s)
        if not is_ending and self._should_retry(job, task, code):
            task.retries += 1
            task.state = "PENDING"
            # The next attempt gets another VM, which takes time to create.
            task.not_before_s = system.wall_ms() / 1000 + _RESCHEDULE_DELAY_S

    def _should_retry(self, job: GcpBatchJob, task: GcpBatchTask, code: int) -> bool:
        """Decide a retry: all causes share one budget, and a lifecycle policy inverts for other
        exit codes."""
        spec = job.spec
        # Also for preemptions: only exit codes select retries, not causes.
        if task.retries >= spec.get("maxRetryCount", 0):
            return False
        for policy in spec.get("lifecyclePolicies", []):
            # RETRY_TASK for other codes than named means no retry, FAIL_TASK means a retry.
            named = code in policy["actionCondition"]["exitCodes"]
            return named == (policy["action"] in (1, "RETRY_TASK"))
        return True

    def _set_state(self, job: GcpBatchJob, state: str) -> None:
        if job.state != state:
            description = f"Job state is set from {job.state} to {state} for job {job.name}."
            job.events.append(_render_event(description))
            job.state, job.updated = state, _now_text()

    # --- on a machine ------------------------------------------------------------------------

    def task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        metadata = f"{self.datacenter.host(machine)}:{machine.metadata_port}"
        return {
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            # A real VM gets 30 s between the ACPI signal and its end.
            "SPOTFIT_SIGNAL_GRACE_S": f"{self.datacenter.market.options.notice_s:g}",
        }

    def answer_metadata(
        self, machine: SimulatedMachine, request: WireRequest
    ) -> WireResponse | None:
        """Answer only with the header `Metadata-Flavor`, as the real service."""
        google = {"metadata-flavor": "Google", "content-type": "application/text"}
        # Protects the real service against forwarded requests.
        if request.headers.get("metadata-flavor") != "Google":
            return WireResponse(403, b"Missing required header: Metadata-Flavor", google)
        if request.path == "/":
            return WireResponse(200, b"computeMetadata/\n", google)
        path = request.path.removeprefix("/computeMetadata/v1/").rstrip("/")
        text = self._metadata_entries(machine).get(path)
        if text is None:
            return None
        # Not `hash`: the ETag must not change between processes.
        etag = uuid.uuid5(uuid.NAMESPACE_URL, text).hex[:16]
        # The answer may wait for a change of the value that the client has.
        waits = request.query.get("wait_for_change") == "true"
        is_unchanged = request.query.get("last_etag", etag) == etag
        hold_s = float(request.query.get("timeout_sec", 3600)) if waits and is_unchanged else 0.0
        # Directories and objects are JSON, values are text.
        if text.startswith("{"):
            google["content-type"] = "application/json"
        return WireResponse(200, text.encode(), {**google, "etag": etag}, hold_s=hold_s)

    def _metadata_entries(self, machine: SimulatedMachine) -> dict[str, str]:
        account = "instance/service-accounts"
        token = {"access_token": "simulated", "expires_in": 3599, "token_type": "Bearer"}
        job = self.state.jobs.get(machine.task.rpartition("/")[0])
        zone = ZONE if job is None else job.zone
        is_spot = "TRUE" if machine.market is Market.SPOT else "FALSE"
        account_info = {"aliases": ["default"], "email": AGENT_SERVICE_ACCOUNT, "scopes": [_SCOPE]}
        return {
            "instance/id": str(machine.number),
            "instance/zone": f"projects/0/zones/{zone}",
            # https://docs.cloud.google.com/compute/docs/metadata/predefined-metadata-keys
            "instance/scheduling/preemptible": is_spot,
            "instance/network-interfaces/0/ip": self.datacenter.host(machine),
            "instance/preempted": "TRUE" if machine.noticed_at_s is not None else "FALSE",
            "instance/maintenance-event": "NONE",
            # google-auth reads these before it asks for a token.
            "project/project-id": PROJECT,
            "universe/universe-domain": "googleapis.com",
            f"{account}/default": msgspec.json.encode(account_info).decode(),
            f"{account}/{AGENT_SERVICE_ACCOUNT}": msgspec.json.encode(account_info).decode(),
            f"{account}/default/email": AGENT_SERVICE_ACCOUNT,
            f"{account}/default/token": msgspec.json.encode(token).decode(),
            f"{account}/{AGENT_SERVICE_ACCOUNT}/token": msgspec.json.encode(token).decode(),
        }


_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


# --- validation and errors ------------------------------------------------------------------------


_PERMISSIONS = {
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


def _permission_denied_error(request: WireRequest) -> GoogleApiError:
    return GoogleApiError(
        403,
        "PERMISSION_DENIED",
        f"Permission denied on resource '{request.path.removeprefix('/v1/')}' (or it may not "
        "exist).",
        "IAM_PERMISSION_DENIED",
    )


def _not_found_error(what: str) -> GoogleApiError:
    return GoogleApiError(404, "NOT_FOUND", f"Resource '{what}' was not found")


# --- tasks and their events -----------------------------------------------------------------------


def _record_state_change(
    task: GcpBatchTask,
    state: str,
    detail: str,
    code: int | None = None,
    *,
    at_s: float | None = None,
) -> None:
    description = f"Task state is updated from {task.state} to {state} {detail}"
    event = {**_render_event(description), **({"eventTime": _to_text(at_s)} if at_s else {})}
    event["taskState"] = state
    if code is not None:
        event["taskExecution"] = {"exitCode": code}
    task.events.append(event)
    task.state = state


def _render_event(description: str, kind: str = "STATUS_CHANGED") -> dict[str, Any]:
    return {"type": kind, "description": description, "eventTime": _now_text()}


def _instance_path(job: GcpBatchJob, machine: SimulatedMachine) -> str:
    return f"zones/{job.zone}/instances/{machine.number}"


def _now_text() -> str:
    return _to_text(system.wall_ms() / 1000)


def _to_text(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


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


def _with_numeric_states(content: Any, states: tuple[str, ...] = _JOB_STATES) -> Any:
    """Replace state names by enum numbers, as for `$alt=json;enum-encoding=int`."""
    if isinstance(content, list):
        return [_with_numeric_states(one, states) for one in content]
    if not isinstance(content, dict):
        return content
    if "/tasks/" in content.get("name", ""):
        states = _TASK_STATES
    by_field = {"state": states, "taskState": _TASK_STATES}
    return {
        name: by_field[name].index(value)
        if name in by_field
        else _with_numeric_states(value, states)
        for name, value in content.items()
    }


def _paginate(request: WireRequest, name: str, items: list[Any]) -> dict[str, Any]:
    start = request.integer("pageToken", 0)
    size = request.integer("pageSize", 100) or 100
    more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
    return {name: items[start : start + size], **more}


def _quotas(limits: dict[str, float]) -> list[dict[str, Any]]:
    return [{"metric": name, "limit": limit, "usage": 0.0} for name, limit in limits.items()]
