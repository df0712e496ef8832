"""AWS Batch on loopback for the real boto3, with CloudWatch Logs, spot prices, STS, IAM, ECR and
IMDSv2.

Behaviour as documented in https://docs.aws.amazon.com/batch/latest/userguide/job_states.html,
…/job_retries.html, …/job_env_vars.html, and in the service model of botocore.

States of a job without array, or of one child:

    SUBMITTED | the scheduler looks at it           | RUNNABLE
    RUNNABLE  | a machine is rented                 | STARTING
    STARTING  | the machine has booted              | RUNNING
    RUNNING   | exit code 0                         | SUCCEEDED
    RUNNING   | another end, and retries are left   | RUNNABLE
    RUNNING   | another end, or terminated          | FAILED
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote
from xml.sax.saxutils import escape

import msgspec

from spotfit.host import system
from spotfit.model.offer import Market
from spotfit_localsim.clouds import aws_prices, aws_requests
from spotfit_localsim.clouds.api import ClientAccess
from spotfit_localsim.clouds.aws_account import AwsAccountSurroundings
from spotfit_localsim.clouds.cloud_host import OUT_OF_MEMORY, Datacenter, SimulatedMachine
from spotfit_localsim.clouds.http_server import (
    MalformedRequestError,
    WireRequest,
    WireResponse,
    is_number,
)
from spotfit_localsim.clouds.injected_errors import ApiFaults

REGION, ACCOUNT = "sim-east-1", "000000000000"
ON_DEMAND_QUEUE = "on-demand"
"""Name of the queue with an environment of type EC2, and of this environment."""
CALLER = "sim"
"""The user name of every caller."""
MISSING_QUEUE: dict[str, Any] = {"state": "GONE"}
"""Value of `queue_overrides` for a queue that does not exist."""
LOG_GROUP = "/aws/batch/job"
_ECS_TASKS_PRINCIPAL = "ecs-tasks.amazonaws.com"
_PAGE_SIZE = 100
"""Default page size of list calls."""
LOG_DELAY_S = 5.0
"""Docker's awslogs driver sends lines every five seconds; the first lines create the stream."""
_GRACE_S = 30.0
"""Time between SIGTERM and SIGKILL of a terminated job."""
_TOKEN = "AQAEAsimulated=="  # noqa: S105  # not a secret: the service is simulated
_NO_CAPACITY_REASON = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - The job queue's compute environment cannot find "
    "enough capacity for its instance types"
)
_MISCONFIGURATION_REASON = (
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) is "
    "higher than that can be met by the CE(s) attached to the job queue."
)
"""AWS reports it for a while for valid jobs as well, while a compute environment scales up from
zero:
https://github.com/nextflow-io/nextflow/issues/7479.
"""
_EXIT_REASON = "Essential container in task exited"
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/stopped-task-error-codes.html
_OUT_OF_MEMORY_REASON = "OutOfMemoryError: Container killed due to memory usage"


class AwsBatchChildJob(msgspec.Struct):
    """One child of an array job, or the only child of a plain job."""

    status: str = "SUBMITTED"
    status_reason: str = ""
    machine: int | None = None
    attempts: list[dict[str, Any]] = []
    started_ms: int | None = None
    stopped_ms: int | None = None


class AwsBatchJob(msgspec.Struct):
    id: str
    name: str
    queue: str
    definition: str
    created_ms: int
    size: int
    """Array size; 0 for a plain job."""
    environment: dict[str, str]
    tags: dict[str, str]
    children: list[AwsBatchChildJob]
    termination_reason: str = ""
    retry_strategy: dict[str, Any] = {}
    """Overrides that of the definition."""
    propagates_tags: bool = False

    def child_id(self, index: int) -> str:
        return f"{self.id}:{index}" if self.size else self.id

    @property
    def status(self) -> str:
        """The status; an array is PENDING as long as a child has not ended."""
        if not self.size:
            return self.children[0].status
        # FAILED only after all children have ended, as documented for array jobs.
        states = {child.status for child in self.children}
        if states <= {"SUCCEEDED"}:
            return "SUCCEEDED"
        return "FAILED" if states <= {"SUCCEEDED", "FAILED"} else "PENDING"


class AwsBatchState(msgspec.Struct):
    definitions: dict[str, dict[str, Any]] = {}
    """Job definitions by ARN."""
    jobs: dict[str, AwsBatchJob] = {}


class AwsApiError(Exception):
    """An error response in the formats of AWS."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    def reply(self, *, xml: bool) -> WireResponse:
        """Return XML (STS, IAM, EC2), or JSON with the code in a header and in the body."""
        if not xml:
            body = {"message": str(self), "__type": self.code}
            return WireResponse.json(body, self.status, x_amzn_ErrorType=self.code)
        error = f"<Error><Code>{self.code}</Code><Message>{escape(str(self))}</Message></Error>"
        # EC2 has a list of errors, STS and IAM have one: the response contains both forms.
        ec2_errors = f"<Errors>{error}</Errors>"
        return _xml_response(f"<Response>{ec2_errors}{error}</Response>", self.status)


class AwsBatchCloud:
    """One region with the queues `queues`."""

    State: ClassVar = AwsBatchState

    def __init__(self, datacenter: Datacenter, faults: ApiFaults) -> None:
        self.datacenter = datacenter
        self.faults = faults
        self.state = AwsBatchState()
        self._blocked_queues: set[str] = set()
        """Queues in which a job waits since the start of this tick."""
        self.queues = {"spot", "other", "east", "west", ON_DEMAND_QUEUE}
        """Names of the queues that exist. All but the last have an environment of type SPOT."""
        self.queue_overrides: dict[str, dict[str, Any]] = {}
        """Fields that differ from those of a valid queue, by name: {'state': 'DISABLED'}."""
        self.compute_environment_overrides: dict[str, dict[str, Any]] = {}
        """Fields that differ from those of a valid compute environment."""
        self.roles: dict[str, str] = {
            "agents": _ECS_TASKS_PRINCIPAL,
            "execution": _ECS_TASKS_PRINCIPAL,
        }
        """The principal that each role trusts."""
        self.surroundings = AwsAccountSurroundings()
        """What `spotfit doctor` reads about the machines."""
        self.images: set[str] = {"worker:sim"}
        """Images in the registry, as repository:tag."""
        self.placement_scores: dict[str, int] = {}
        """Placement scores by region."""
        self.has_exhausted_scores = False
        """Whether the daily limit of placement score configurations is exceeded."""

    @staticmethod
    def client_access(url: str) -> ClientAccess:
        return ClientAccess(
            {
                "endpoint": url,
                "region": REGION,
                "queues": ("spot",),
                "on_demand_queues": (ON_DEMAND_QUEUE,),
                "image": "spotfit/worker:sim",
                "instance_types": ("g5.xlarge",),
                "pending_timeout_s": 0.0,
            },
            {"AWS_ACCESS_KEY_ID": "simulated", "AWS_SECRET_ACCESS_KEY": "simulated"},
        )

    # --- requests ----------------------------------------------------------------------------

    def answer_request(self, request: WireRequest) -> WireResponse:
        # Three protocols on one port: JSON with a target header, query (XML), and REST-JSON of
        # Batch.
        target = request.headers.get("x-amz-target", "")
        try:
            self._raise_fault()
            if request.method == "HEAD":  # HeadBucket of S3
                region = self.surroundings.bucket_region
                return WireResponse(200, b"", {"x-amz-bucket-region": region})
            # The signature of the request names the region: there is one endpoint for all.
            _, _, scope = request.headers.get("authorization", "").partition("Credential=")
            words = scope.partition(",")[0].split("/")
            region = words[2] if len(words) > 2 else REGION
            if target:
                return self._answer_targeted(target, request.json(), region)
            if request.path == "/":
                return self._answer_query(_parse_query(request.body), region)
            return self._answer_batch(request)
        except MalformedRequestError as malformed:
            # The code of the JSON protocols of AWS for a body that cannot be parsed.
            return AwsApiError("SerializationException", str(malformed)).reply(xml=False)
        except AwsApiError as complaint:
            return complaint.reply(xml=request.path == "/" and not target)

    def _answer_batch(self, request: WireRequest) -> WireResponse:
        name = request.path.removeprefix("/v1/")
        self._check_permission(f"batch:{_ACTION_NAMES.get(name, name)}")
        if name not in self._operations:
            return AwsApiError("ClientException", "This call is not simulated.").reply(xml=False)
        body = request.json()
        _refuse(aws_requests.find_model_violation("batch", _ACTION_NAMES[name], body))
        return WireResponse.json(self._operations[name](self, body))

    def is_lagging_read(self, request: WireRequest) -> bool:
        return request.path in ("/v1/listjobs", "/v1/describejobs")

    def _answer_targeted(self, target: str, body: dict[str, Any], region: str) -> WireResponse:
        """Answer services that name the action in the header x-amz-target."""
        service, _, action = target.partition(".")
        self._check_permission(f"{_TARGET_SERVICES.get(service, service)}:{action}")
        if action not in _TARGET_ACTIONS.get(service, ()):
            raise AwsApiError("UnknownOperationException", f"{target} is not simulated")
        model = _TARGET_MODELS.get(service, _TARGET_SERVICES[service])
        if problem := aws_requests.find_model_violation(model, action, body):
            raise AwsApiError("InvalidParameterException", problem)
        if action == "GetLogEvents":
            return self._get_log_events(body)
        if action == "GetProducts":
            return self._get_products(body, region)
        if action == "DescribeLogGroups":
            # Batch creates the log group with the first job.
            name = body.get("logGroupNamePrefix", "")
            exists = self.state.jobs and LOG_GROUP.startswith(name)
            return _json_response({"logGroups": [{"logGroupName": LOG_GROUP}] if exists else []})
        if action == "DescribeImages":
            images = body.get("imageIds") or [{}]
            name = f"{body['repositoryName']}:{images[0].get('imageTag')}"
            if name in self.images:
                return _json_response(
                    {"imageDetails": [{"repositoryName": body["repositoryName"]}]}
                )
            message = f"The image {name} does not exist within the registry"
            return _json_response({"__type": "ImageNotFoundException", "message": message}, 400)
        if action == "BatchGetImage":
            manifest = msgspec.json.encode(self.surroundings.image_index()).decode()
            return _json_response({"images": [{"imageManifest": manifest}], "failures": []})
        return _json_response(self.surroundings.quota(body))

    def _check_permission(self, permission: str) -> None:
        if self.faults.is_denied(permission, CALLER):
            raise AwsApiError(
                "AccessDeniedException",
                f"User: {_iam_arn('user', CALLER)} is not authorized to perform: {permission}",
                403,
            )

    def _raise_fault(self) -> None:
        # 429 is retried by botocore, 403 is not.
        if self.faults.take("throttled"):
            raise AwsApiError("TooManyRequestsException", "Too Many Requests", 429)
        if self.faults.take("credentials"):
            raise AwsApiError(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
                403,
            )
        if self.faults.take("permission"):
            raise AwsApiError(
                "AccessDeniedException",
                "User: arn:aws:iam::000000000000:user/x is not authorized to perform: this",
                403,
            )

    def _register(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["jobDefinitionName"]
        _refuse(aws_requests.find_definition_violation(body))
        # Registering an equal definition again gives a new revision, as in the real service.
        revision = 1 + sum(one["jobDefinitionName"] == name for one in self._definitions())
        arn = f"{_batch_arn('job-definition')}/{name}:{revision}"
        self.state.definitions[arn] = {
            **body,
            "jobDefinitionArn": arn,
            "revision": revision,
            "status": "ACTIVE",
        }
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def _describe_definitions(self, body: dict[str, Any]) -> dict[str, Any]:
        name, arns = body.get("jobDefinitionName"), body.get("jobDefinitions", [])
        found = [
            one
            for one in self._definitions()
            if one["jobDefinitionName"] == name or one["jobDefinitionArn"] in arns
        ]
        shown, more = _paginate(found, body)
        return {"jobDefinitions": shown, **more}

    def _definitions(self) -> list[dict[str, Any]]:
        return list(self.state.definitions.values())

    def _submit(self, body: dict[str, Any]) -> dict[str, Any]:
        # Tags in a request that creates a resource need a permission of their own:
        # https://docs.aws.amazon.com/batch/latest/userguide/iam-actions-tagging.html
        if body.get("tags"):
            self._check_permission("batch:TagResource")
        if self.faults.take("quota"):
            raise AwsApiError(
                "ClientException", "You have exceeded your limit of jobs in the SUBMITTED state."
            )
        queue = self._find_queue(body["jobQueue"])
        is_fair_share = "schedulingPolicyArn" in self.queue_overrides.get(queue, {})
        _refuse(aws_requests.find_job_violation(body, is_fair_share=is_fair_share))
        definition = self._find_definition(body["jobDefinition"])
        size = body.get("arrayProperties", {}).get("size", 0)
        pairs = body.get("containerOverrides", {}).get("environment", [])
        environment = {pair["name"]: pair.get("value", "") for pair in pairs if "name" in pair}
        job = AwsBatchJob(
            id=str(uuid.uuid4()),
            name=body["jobName"],
            queue=queue,
            definition=definition,
            created_ms=system.wall_ms(),
            size=size,
            environment=environment,
            tags=body.get("tags", {}),
            children=[AwsBatchChildJob() for _ in range(size or 1)],
            retry_strategy=body.get("retryStrategy", {}),
            propagates_tags=body.get("propagateTags", False),
        )
        self.state.jobs[job.id] = job
        return {"jobId": job.id, "jobName": job.name, "jobArn": f"{_batch_arn('job')}/{job.id}"}

    def _list(self, body: dict[str, Any]) -> dict[str, Any]:
        """List jobs: by default RUNNING ones; with a filter, of all states and newest first.

        The page is cut before the filter is applied, so a page may be empty and not the last one,
        as in other AWS APIs.
        """
        filters = body.get("filters", [])
        if ("arrayJobId" in body) + ("jobQueue" in body) != 1:
            raise AwsApiError("ClientException", "Specify one of jobQueue and arrayJobId.")
        if len(filters) > 1 or any({"name", "values"} - set(one) for one in filters):
            raise AwsApiError("ClientException", "Specify one filter with a name and values.")
        if body.get("arrayJobId"):
            job = self._find_job(body["arrayJobId"])
            status = body.get("jobStatus", "RUNNING")
            indices = [n for n, kid in enumerate(job.children) if kid.status == status]
            shown, more = _paginate(indices, body)
            return {"jobSummaryList": [self._summary(job, n) for n in shown], **more}
        # Children are listed by the id of their array only.
        queue = self._find_queue(body["jobQueue"])
        queued = [job for job in self.state.jobs.values() if job.queue == queue]
        jobs, more = _paginate(queued[::-1] if filters else queued, body)
        if filters:
            found = [job for job in jobs if _matches_filter(job, filters[0])]
        else:
            found = [job for job in jobs if job.status == body.get("jobStatus", "RUNNING")]
        return {"jobSummaryList": [self._summary(job, None) for job in found], **more}

    def _summary(self, job: AwsBatchJob, index: int | None) -> dict[str, Any]:
        job_fields = self._render_job(job, index)
        summary = {name: value for name, value in job_fields.items() if name in _SUMMARY_MEMBERS}
        if "container" in summary:
            container = summary["container"]
            names = ("exitCode", "reason")
            summary["container"] = {name: container[name] for name in names if name in container}
        return summary

    def _describe(self, body: dict[str, Any]) -> dict[str, Any]:
        if len(body["jobs"]) > 100:
            raise AwsApiError("ClientException", "At most 100 jobs can be described at once.")
        found = []
        for requested in body["jobs"]:
            # <array id>:<index> names a child; unknown ids are left out.
            job_id, _, index = requested.partition(":")
            job = self.state.jobs.get(job_id)
            if job is None:
                continue
            if ":" not in requested:
                found.append(self._render_job(job, None))
            elif is_number(index) and int(index) < job.size:
                found.append(self._render_job(job, int(index)))
        return {"jobs": found}

    def _terminate(self, body: dict[str, Any]) -> dict[str, Any]:
        job = self._find_job(body["jobId"].partition(":")[0])
        if not body.get("reason"):
            raise AwsApiError("ClientException", "A reason is required.")
        # The first reason remains: the call is idempotent.
        job.termination_reason = job.termination_reason or body["reason"]
        return {}

    def _cancel(self, body: dict[str, Any]) -> dict[str, Any]:
        """Cancel a job that has not started; for other jobs it succeeds without an effect."""
        job = self._find_job(body["jobId"].partition(":")[0])
        # A job that has started must be terminated instead.
        if all(kid.machine is None for kid in job.children):
            job.termination_reason = body["reason"]
        return {}

    def _describe_queues(self, body: dict[str, Any]) -> dict[str, Any]:
        names = [name.rpartition("/")[2] for name in body.get("jobQueues") or sorted(self.queues)]
        return {"jobQueues": [self._render_queue(name) for name in names if self._has_queue(name)]}

    def _render_queue(self, name: str) -> dict[str, Any]:
        environment = ON_DEMAND_QUEUE if name == ON_DEMAND_QUEUE else "spot"
        arn = f"{_batch_arn('compute-environment')}/{environment}"
        return {
            "jobQueueName": name,
            "jobQueueArn": f"{_batch_arn('job-queue')}/{name}",
            "state": "ENABLED",
            "status": "VALID",
            "priority": 1,
            "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": arn}],
        } | self.queue_overrides.get(name, {})

    def _describe_environments(self, body: dict[str, Any]) -> dict[str, Any]:
        # Names and ARNs are accepted.
        names = [name.rpartition("/")[2] for name in body.get("computeEnvironments") or ["spot"]]
        return {"computeEnvironments": [self._render_environment(name) for name in names]}

    def _render_environment(self, name: str) -> dict[str, Any]:
        is_spot = name != ON_DEMAND_QUEUE
        strategy = "SPOT_PRICE_CAPACITY_OPTIMIZED" if is_spot else "BEST_FIT_PROGRESSIVE"
        return {
            "computeEnvironmentName": name,
            "computeEnvironmentArn": f"{_batch_arn('compute-environment')}/{name}",
            "type": "MANAGED",
            "state": "ENABLED",
            "status": "VALID",
            "computeResources": {
                "type": "SPOT" if is_spot else "EC2",
                "minvCpus": 0,
                "maxvCpus": 256,
                "instanceTypes": ["g5.xlarge"],
                "subnets": ["subnet-1"],
                "securityGroupIds": ["sg-1"],
                "allocationStrategy": strategy,
            },
        } | self.compute_environment_overrides.get(name, {})

    def _markets(self, queue: str) -> Iterator[tuple[str, Market]]:
        """Yield the compute environments of a queue in their order, with their markets."""
        order = self._render_queue(queue)["computeEnvironmentOrder"]
        for entry in sorted(order, key=lambda one: one["order"]):
            name = entry["computeEnvironment"].rpartition("/")[2]
            resources = self._render_environment(name).get("computeResources", {})
            yield name, Market.ON_DEMAND if resources.get("type") == "EC2" else Market.SPOT

    _operations: ClassVar[dict[str, Callable[[AwsBatchCloud, dict[str, Any]], dict[str, Any]]]] = {
        "registerjobdefinition": _register,
        "describejobdefinitions": _describe_definitions,
        "submitjob": _submit,
        "listjobs": _list,
        "describejobs": _describe,
        "terminatejob": _terminate,
        "canceljob": _cancel,
        "describejobqueues": _describe_queues,
        "describecomputeenvironments": _describe_environments,
    }

    def _has_queue(self, name: str) -> bool:
        known = self.queues | set(self.queue_overrides)
        return name in known and self.queue_overrides.get(name) != MISSING_QUEUE

    def _find_queue(self, name_or_arn: str) -> str:
        """Return the name of a queue. The message is that of the service:
        https://github.com/Netflix/metaflow/issues/65.
        """
        name = name_or_arn.removeprefix(f"{_batch_arn('job-queue')}/").rpartition("/")[2]
        if not self._has_queue(name):
            raise AwsApiError("ClientException", f"JobQueue {name_or_arn} not found.")
        return name

    def _find_definition(self, name_or_arn: str) -> str:
        """Return the ARN of a definition; without a revision, of the latest one.

        The message is that of the service:
        https://github.com/aws-samples/aws-genomics-workflows/issues/84.
        """
        name, _, revision = name_or_arn.rpartition("/")[2].partition(":")
        revisions = {
            str(one["revision"]): str(one["jobDefinitionArn"])
            for one in self._definitions()
            if one["jobDefinitionName"] == name
        }
        arn = revisions.get(revision or str(len(revisions)))
        if arn is None:
            raise AwsApiError(
                "ClientException",
                f"JobDefinition name {name_or_arn} does not exist or is not in ACTIVE status",
            )
        return arn

    def _find_job(self, job_id: str) -> AwsBatchJob:
        if job_id not in self.state.jobs:
            raise AwsApiError("ClientException", f"Job {job_id} does not exist.", 404)
        return self.state.jobs[job_id]

    def _get_log_events(self, body: dict[str, Any]) -> WireResponse:
        for machine in self.datacenter.machines.values():
            lines = self.datacenter.output(machine, delay_s=LOG_DELAY_S).splitlines()
            # The stream exists only after the first lines.
            if lines and body["logStreamName"] == _log_stream_name(machine):
                now, limit = system.wall_ms(), int(body.get("limit", 10_000))
                # Without startFromHead the newest lines are returned.
                chosen = lines[:limit] if body.get("startFromHead") else lines[-limit:]
                events = [{"timestamp": now, "ingestionTime": now, "message": x} for x in chosen]
                return _json_response(
                    # Clients stop when a token repeats.
                    {"events": events, "nextForwardToken": "f", "nextBackwardToken": "b"}
                )
        message = "The specified log stream does not exist."
        return _json_response({"__type": "ResourceNotFoundException", "message": message}, 400)

    def _answer_query(self, arguments: Mapping[str, list[str]], region: str) -> WireResponse:
        action = arguments.get("Action", [""])[0]
        required = _REQUIRED_ARGUMENTS.get(action)
        if required is not None and required not in arguments:
            raise AwsApiError("ValidationError", f"{required} is required.")
        token = arguments.get("NextToken", ["0"])[0]
        if not is_number(token):
            raise AwsApiError("InvalidNextToken", f"The token {token} is not valid.")
        self._check_permission(f"{_ACTION_SERVICES.get(action, 'sts')}:{action}")
        if action == "GetRole":
            return self._get_role(arguments["RoleName"][0])
        if action == "SimulatePrincipalPolicy":
            return self._simulate_policy(arguments)
        if action == "GetCallerIdentity":
            return _xml_response(
                f"<GetCallerIdentityResponse><GetCallerIdentityResult><Account>{ACCOUNT}</Account>"
                f"<UserId>sim</UserId><Arn>{_iam_arn('user', CALLER)}</Arn>"
                "</GetCallerIdentityResult></GetCallerIdentityResponse>"
            )
        if action == "DescribeSpotPriceHistory":
            return self._describe_spot_prices(arguments, region)
        if action == "GetSpotPlacementScores":
            return self._get_placement_scores(arguments)
        if description := self.surroundings.describe(action):
            return _xml_response(description)
        raise AwsApiError("InvalidAction", f"{action} is not simulated")

    def _describe_spot_prices(
        self, arguments: Mapping[str, list[str]], region: str
    ) -> WireResponse:
        """Return one price per page, to test the pagination of clients."""
        request = aws_prices.to_spot_price_request(arguments)
        violation = aws_requests.find_model_violation("ec2", "DescribeSpotPriceHistory", request)
        if violation:
            raise AwsApiError("InvalidParameterValue", violation)
        market = self.datacenter.market
        try:
            items = aws_prices.spot_price_items(
                request, market, region, now_s=system.wall_ms() / 1000
            )
        except ValueError as error:
            raise AwsApiError("InvalidParameterValue", str(error)) from error
        # The token is the index of the next price.
        first = int(arguments.get("NextToken", ["0"])[0])
        next_token = f"<nextToken>{first + 1}</nextToken>" if first + 1 < len(items) else ""
        listed = "".join(f"<item>{item}</item>" for item in items[first : first + 1])
        return _xml_response(
            "<DescribeSpotPriceHistoryResponse><spotPriceHistorySet>"
            f"{listed}</spotPriceHistorySet>{next_token}</DescribeSpotPriceHistoryResponse>"
        )

    def _get_products(self, body: dict[str, Any], region: str) -> WireResponse:
        """Return two products per page, to test the pagination of clients."""
        if region not in aws_prices.PRICING_REGIONS:
            # There is no endpoint: a client cannot resolve its name.
            raise AwsApiError("UnrecognizedClientException", f"no endpoint in {region}", 403)
        if body["ServiceCode"] != "AmazonEC2":
            raise AwsApiError("InvalidParameterException", "Only AmazonEC2 is simulated.")
        if any(one["Type"] != "TERM_MATCH" for one in body.get("Filters", [])):
            raise AwsApiError("InvalidParameterException", "Only TERM_MATCH is simulated.")
        token = body.get("NextToken", "0")
        if not is_number(token):
            raise AwsApiError("InvalidNextTokenException", f"The token {token} is not valid.")
        market = self.datacenter.market
        entries = aws_prices.product_entries(body, market, now_s=system.wall_ms() / 1000)
        first = int(token)
        more = {"NextToken": str(first + 2)} if first + 2 < len(entries) else {}
        return _json_response(
            {"FormatVersion": "aws_v1", "PriceList": entries[first : first + 2], **more}
        )

    def _get_placement_scores(self, arguments: Mapping[str, list[str]]) -> WireResponse:
        """Return scores of the regions that have one."""
        if self.has_exhausted_scores:
            raise AwsApiError(
                "MaxConfigLimitExceeded",
                "You have exceeded your maximum allowed Spot placement configurations. You can "
                "retry configurations that you used within the last 24 hours, or wait for 24 hours "
                "before specifying a new configuration.",
            )
        items = "".join(
            f"<item><region>{region}</region><score>{self.placement_scores[region]}</score></item>"
            for region in _numbered_values(arguments, "RegionName")
            if region in self.placement_scores
        )
        return _xml_response(
            "<GetSpotPlacementScoresResponse><spotPlacementScoreSet>"
            f"{items}</spotPlacementScoreSet></GetSpotPlacementScoresResponse>"
        )

    def _get_role(self, name: str) -> WireResponse:
        if name not in self.roles:
            raise AwsApiError("NoSuchEntity", f"The role with name {name} cannot be found.", 404)
        principal = {"Service": self.roles[name]}
        statement = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"}
        # IAM returns the policy document URL-encoded.
        trust = quote(msgspec.json.encode({"Version": "2012-10-17", "Statement": [statement]}))
        return _xml_response(
            f"<GetRoleResponse><GetRoleResult><Role><RoleName>{name}</RoleName><Path>/</Path>"
            f"<RoleId>AROASIM{name.upper()}</RoleId><Arn>{_iam_arn('role', name)}</Arn>"
            "<CreateDate>2026-01-01T00:00:00Z</CreateDate>"
            f"<AssumeRolePolicyDocument>{trust}</AssumeRolePolicyDocument>"
            "</Role></GetRoleResult></GetRoleResponse>"
        )

    def _simulate_policy(self, arguments: Mapping[str, list[str]]) -> WireResponse:
        """Allow each action on each resource unless it is denied."""
        principal = arguments["PolicySourceArn"][0].rpartition("/")[2]
        if principal != CALLER and principal not in self.roles:
            raise AwsApiError(
                "NoSuchEntity", f"{arguments['PolicySourceArn'][0]} cannot be found", 404
            )
        members = "".join(
            f"<member><EvalActionName>{action}</EvalActionName>"
            f"<EvalResourceName>{escape(resource)}</EvalResourceName><EvalDecision>"
            f"{'implicitDeny' if self.faults.is_denied(action, principal) else 'allowed'}"
            "</EvalDecision></member>"
            for action in _member_values(arguments, "ActionNames")
            # An omitted resource means all, as documented.
            for resource in _member_values(arguments, "ResourceArns") or ["*"]
        )
        return _xml_response(
            "<SimulatePrincipalPolicyResponse><SimulatePrincipalPolicyResult><IsTruncated>false"
            f"</IsTruncated><EvaluationResults>{members}</EvaluationResults>"
            "</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"
        )

    # --- rendering ---------------------------------------------------------------------------

    def _render_job(self, job: AwsBatchJob, index: int | None) -> dict[str, Any]:
        child = job.children[index or 0] if index is not None or not job.size else None
        fields: dict[str, Any] = {
            "jobArn": f"{_batch_arn('job')}/{job.id}",
            # Children have the id of the array with their index: <id>:<n>.
            "jobId": job.id if index is None else job.child_id(index),
            "jobName": job.name,
            "jobQueue": f"{_batch_arn('job-queue')}/{job.queue}",
            "jobDefinition": job.definition,
            "createdAt": job.created_ms,
            "startedAt": child.started_ms or 0 if child else 0,
            "status": job.status if child is None else child.status,
            "tags": job.tags,
            "propagateTags": job.propagates_tags,
            "dependsOn": [],
            "retryStrategy": self._retry_strategy(job),
        }
        if job.termination_reason:
            fields["isTerminated"] = True
        if child is None:
            # The summary contains every state, also those without children.
            summary = dict.fromkeys(_STATES, 0)
            for one in job.children:
                summary[one.status] += 1
            return fields | {"arrayProperties": {"size": job.size, "statusSummary": summary}}
        if job.size:
            fields["arrayProperties"] = {"index": index}
        environment = [{"name": name, "value": text} for name, text in job.environment.items()]
        if child.stopped_ms:
            fields["stoppedAt"] = child.stopped_ms
        last = child.attempts[-1]["container"] if child.attempts else {}
        machine = self.datacenter.machines.get(child.machine) if child.machine is not None else None
        stream = {}
        if machine and child.status == "RUNNING":
            stream["logStreamName"] = _log_stream_name(machine)
        return fields | {
            "statusReason": child.status_reason,
            "attempts": child.attempts,
            "container": {**last, **stream, "environment": environment},
        }

    # --- tick --------------------------------------------------------------------------------

    def tick(self) -> None:
        self._blocked_queues.clear()
        for job in self.state.jobs.values():
            for index, child in enumerate(job.children):
                if child.status in ("SUCCEEDED", "FAILED"):
                    continue
                machine = None
                if child.machine is not None:
                    machine = self.datacenter.machines.get(child.machine)
                if machine is None and job.termination_reason:
                    self._fail(child, job.termination_reason)
                elif machine is None:
                    self._start_child(job, index, child)
                elif not machine.is_active:
                    self._record_end(job, child, machine)
                elif job.termination_reason:
                    self.datacenter.stop(machine, grace_s=_GRACE_S)
                elif machine.state == "up" and child.status != "RUNNING":
                    child.status, child.started_ms = "RUNNING", _to_ms(machine.started_at_s)

    def _start_child(self, job: AwsBatchJob, index: int, child: AwsBatchChildJob) -> None:
        child.status = "RUNNABLE"
        machine = None
        # A reason is given only for the job at the head of a queue:
        # https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html
        is_head = job.queue not in self._blocked_queues
        # Checked first: AWS reports it although there is capacity.
        if self.faults.is_active("misconfiguration"):
            self._blocked_queues.add(job.queue)
            child.status_reason = _MISCONFIGURATION_REASON if is_head else ""
            return
        if not self.faults.is_active("capacity"):
            machine = self._rent(job, index, child)
        # Reported until a machine is rented; the client decides when to stop waiting.
        child.status_reason = "" if machine or not is_head else _NO_CAPACITY_REASON
        if machine is not None:
            child.machine, child.status = machine.number, "STARTING"
        else:
            self._blocked_queues.add(job.queue)

    def _rent(
        self, job: AwsBatchJob, index: int, child: AwsBatchChildJob
    ) -> SimulatedMachine | None:
        """Rent a machine in the first environment of the queue that has capacity."""
        environment = job.environment | {
            "AWS_BATCH_JOB_ID": job.child_id(index),
            "AWS_BATCH_JOB_ATTEMPT": str(len(child.attempts) + 1),
            "AWS_BATCH_JQ_NAME": job.queue,
        }
        if job.size:
            environment["AWS_BATCH_JOB_ARRAY_INDEX"] = str(index)
            environment["AWS_BATCH_JOB_ARRAY_SIZE"] = str(job.size)
        needs = self._resource_requirements(job)
        for name, market in self._markets(job.queue):
            machine = self.datacenter.rent(
                f"{job.child_id(index)}#{len(child.attempts)}",
                self.state.definitions[job.definition]["containerProperties"]["command"],
                environment | {"AWS_BATCH_CE_NAME": name},
                market=market,
                memory_limit_mib=needs.get("MEMORY"),
                gpus=needs.get("GPU", 0),
            )
            if machine is not None:
                return machine
        return None

    def _resource_requirements(self, job: AwsBatchJob) -> dict[str, int]:
        container = self.state.definitions[job.definition]["containerProperties"]
        return {
            one["type"]: int(float(one["value"]))
            for one in container.get("resourceRequirements", [])
        }

    def _record_end(
        self, job: AwsBatchJob, child: AwsBatchChildJob, machine: SimulatedMachine
    ) -> None:
        now = _to_ms(machine.ended_at_s)
        container: dict[str, Any] = {"logStreamName": _log_stream_name(machine)}
        if machine.exit_code is None and machine.end_reason != "stopped":
            # The documented reason of a lost host; the container has no exit code then.
            reason = f"Host EC2 (instance {_instance_id(machine)}) terminated."
        else:
            reason = _EXIT_REASON
            # 128 + SIGKILL, for a job that was terminated.
            container["exitCode"] = 137 if machine.exit_code is None else machine.exit_code
        if machine.end_reason == OUT_OF_MEMORY:
            container["reason"] = _OUT_OF_MEMORY_REASON
        child.attempts.append(
            {
                "container": container,
                # Missing if the container was never started.
                **({"startedAt": _to_ms(machine.started_at_s)} if machine.started_at_s else {}),
                "stoppedAt": now,
                "statusReason": reason,
            }
        )
        # The machine is over; a retry rents another one.
        child.machine = None
        if job.termination_reason:
            self._fail(child, job.termination_reason, at_ms=now)
        elif container.get("exitCode") == 0:
            child.status, child.status_reason, child.stopped_ms = "SUCCEEDED", _EXIT_REASON, now
        elif self._should_retry(job, child, reason, container.get("exitCode")):
            child.status, child.status_reason = "RUNNABLE", ""
        else:
            self._fail(child, reason, at_ms=now)

    def _fail(self, child: AwsBatchChildJob, reason: str, *, at_ms: int | None = None) -> None:
        child.status, child.status_reason = "FAILED", reason
        child.stopped_ms = at_ms or system.wall_ms()

    def _should_retry(
        self, job: AwsBatchJob, child: AwsBatchChildJob, reason: str, code: int | None
    ) -> bool:
        strategy = self._retry_strategy(job)
        # Lost hosts count as attempts as well.
        if len(child.attempts) >= strategy["attempts"]:
            return False
        values = {
            "onStatusReason": reason,
            "onReason": "",
            "onExitCode": "" if code is None else str(code),
        }
        for rule in strategy.get("evaluateOnExit", []):
            conditions = [(values[name], rule[name]) for name in values if name in rule]
            # A pattern is literal, with an optional '*' at its end.
            if all(_matches_pattern(text, pattern) for text, pattern in conditions):
                return str(rule["action"]).upper() == "RETRY"
        return True

    def _retry_strategy(self, job: AwsBatchJob) -> dict[str, Any]:
        strategy = job.retry_strategy or self.state.definitions[job.definition].get("retryStrategy")
        return {"attempts": 1, "evaluateOnExit": [], **(strategy or {})}

    # --- on a machine ------------------------------------------------------------------------

    def task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        return {
            **({"AWS_REGION": REGION} if self.datacenter.sets_region else {}),
            # This process may have disabled it for its own clients.
            "AWS_EC2_METADATA_DISABLED": "false",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": (
                f"http://{self.datacenter.host(machine)}:{machine.metadata_port}"
            ),
        }

    def answer_metadata(
        self, machine: SimulatedMachine, request: WireRequest
    ) -> WireResponse | None:
        """Answer as IMDSv2, which requires a session token."""
        if request.path == "/latest/api/token":
            ttl = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            # A PUT and a header: requests that were forged or forwarded have neither.
            if request.method != "PUT" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21_600:
                return WireResponse(400)
            return WireResponse(200, _TOKEN.encode())
        if request.headers.get("x-aws-ec2-metadata-token") != _TOKEN:
            return WireResponse(401)
        entries = {
            "instance-id": _instance_id(machine),
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-metadata.html
            "instance-life-cycle": "spot" if machine.market is Market.SPOT else "on-demand",
            "local-ipv4": self.datacenter.host(machine),
        }
        # The paths of events do not exist (404) before the event.
        if machine.advised_at_s is not None:
            recommendation = f'{{"noticeTime": "{_format_timestamp(machine.advised_at_s)}"}}'
            entries["events/recommendations/rebalance"] = recommendation
        if machine.noticed_at_s is not None and machine.kill_due_s is not None:
            at = _format_timestamp(machine.kill_due_s)
            entries["spot/instance-action"] = f'{{"action": "terminate", "time": "{at}"}}'
            entries["spot/termination-time"] = at
        text = entries.get(request.path.removeprefix("/latest/meta-data/"))
        return None if text is None else WireResponse(200, text.encode())


_STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED")


def _paginate(items: Sequence[Any], body: Mapping[str, Any]) -> tuple[list[Any], dict[str, str]]:
    """Return one page and, if more follow, the token of the next page."""
    token = body.get("nextToken") or "0"
    size = body.get("maxResults", _PAGE_SIZE)
    if not is_number(token) or not 1 <= size <= _MAX_PAGE_SIZE:
        raise AwsApiError("ClientException", "nextToken or maxResults is not valid.")
    first = int(token)
    end = first + size
    return list(items[first:end]), {"nextToken": str(end)} if end < len(items) else {}


def _numbered_values(arguments: Mapping[str, list[str]], name: str) -> list[str]:
    """Return the list of a query protocol request: `name.1`, `name.2`, …"""
    numbered = {int(key.rpartition(".")[2]): key for key in arguments if key.startswith(f"{name}.")}
    return [arguments[numbered[number]][0] for number in sorted(numbered)]


_ACTION_NAMES = {
    "registerjobdefinition": "RegisterJobDefinition",
    "describejobdefinitions": "DescribeJobDefinitions",
    "submitjob": "SubmitJob",
    "listjobs": "ListJobs",
    "describejobs": "DescribeJobs",
    "terminatejob": "TerminateJob",
    "canceljob": "CancelJob",
    "describejobqueues": "DescribeJobQueues",
    "describecomputeenvironments": "DescribeComputeEnvironments",
}
_SUMMARY_MEMBERS = [
    "jobArn",
    "jobId",
    "jobName",
    "createdAt",
    "status",
    "statusReason",
    "startedAt",
    "stoppedAt",
    "container",
    "arrayProperties",
    "jobDefinition",
]
"""Members of JobSummary in botocore's model."""
_MAX_PAGE_SIZE = 1000
_REQUIRED_ARGUMENTS = {"GetRole": "RoleName", "SimulatePrincipalPolicy": "PolicySourceArn"}
_TARGET_ACTIONS = {
    "Logs_20140328": ("GetLogEvents", "DescribeLogGroups"),
    "AmazonEC2ContainerRegistry_V20150921": ("DescribeImages", "BatchGetImage"),
    "ServiceQuotasV20190624": ("GetServiceQuota",),
    "AWSPriceListService": ("GetProducts",),
}
_TARGET_MODELS = {"ServiceQuotasV20190624": "service-quotas"}
_TARGET_SERVICES = {
    "Logs_20140328": "logs",
    "AmazonEC2ContainerRegistry_V20150921": "ecr",
    "ServiceQuotasV20190624": "servicequotas",
    "AWSPriceListService": "pricing",
}
_ACTION_SERVICES = {
    "GetRole": "iam",
    "SimulatePrincipalPolicy": "iam",
    "DescribeSpotPriceHistory": "ec2",
    "GetSpotPlacementScores": "ec2",
    "DescribeSecurityGroups": "ec2",
    "DescribeSubnets": "ec2",
    "DescribeRouteTables": "ec2",
    "DescribeVpcEndpoints": "ec2",
}


def _refuse(problem: str) -> None:
    """Raise the error of Batch unless the problem is ''.

    Its form: https://github.com/fluidattacks/makes/issues/697.
    """
    if problem:
        text = f"Error executing request, Exception : {problem}, RequestId: {uuid.uuid4()}"
        raise AwsApiError("ClientException", text)


def _parse_query(body: bytes) -> dict[str, list[str]]:
    """Parse a form. Members of lists whose number is not one, such as 'Name.x', are left out."""
    try:
        arguments = parse_qs(body.decode())
    except ValueError as error:
        raise AwsApiError("MalformedQueryString", str(error)) from error
    listed = (
        "ActionNames.member.",
        "ResourceArns.member.",
        "InstanceType.",
        "ProductDescription.",
        "RegionName.",
    )
    return {
        name: values
        for name, values in arguments.items()
        if not name.startswith(listed) or is_number(name.rpartition(".")[2])
    }


def _matches_filter(job: AwsBatchJob, condition: Mapping[str, Any]) -> bool:
    """Apply a filter of ListJobs as the model of botocore documents it."""
    kind, values = condition["name"], condition["values"]
    if kind == "JOB_NAME":
        return any(_matches_pattern(job.name.lower(), value.lower()) for value in values)
    if kind == "JOB_DEFINITION":
        name = job.definition.rpartition("/")[2].partition(":")[0]
        return any(job.definition == one or _matches_pattern(name, one) for one in values)
    if kind in ("BEFORE_CREATED_AT", "AFTER_CREATED_AT") and all(map(is_number, values)):
        moments = [int(value) for value in values]
        is_before = kind == "BEFORE_CREATED_AT"
        return any((job.created_ms < at) if is_before else (job.created_ms > at) for at in moments)
    raise AwsApiError("ClientException", f"The filter {kind} with {values} is not valid.")


def _matches_pattern(text: str, pattern: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def _iam_arn(kind: str, name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:{kind}/{name}"


def _member_values(arguments: Mapping[str, list[str]], name: str) -> list[str]:
    """Return the list of a query protocol request: `name.member.1`, `name.member.2`, …"""
    # Numeric order: member.10 comes after member.9.
    keys = [key for key in arguments if key.startswith(f"{name}.member.")]
    return [arguments[key][0] for key in sorted(keys, key=lambda key: int(key.rpartition(".")[2]))]


def _batch_arn(kind: str) -> str:
    return f"arn:aws:batch:{REGION}:{ACCOUNT}:{kind}"


def _to_ms(moment_s: float | None) -> int:
    return system.wall_ms() if moment_s is None else int(1000 * moment_s)


def _instance_id(machine: SimulatedMachine) -> str:
    return f"i-{machine.number:017x}"


def _log_stream_name(machine: SimulatedMachine) -> str:
    return f"spotfit/default/{machine.number:032x}"


def _format_timestamp(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _xml_response(body: str, status: int = 200) -> WireResponse:
    return WireResponse(
        status, f"<?xml version='1.0'?>{body}".encode(), {"content-type": "text/xml"}
    )


def _json_response(content: Any, status: int = 200) -> WireResponse:
    body = msgspec.json.encode(content)
    return WireResponse(status, body, {"content-type": "application/x-amz-json-1.1"})
