"""AWS Batch on loopback, for the real boto3, with what stands around it: CloudWatch Logs, spot
prices, STS, IAM, ECR, and IMDSv2.

Behaviour as documented: https://docs.aws.amazon.com/batch/latest/userguide/job_states.html,
…/job_retries.html, …/job_env_vars.html, and the service's model in botocore.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote
from xml.sax.saxutils import escape

import msgspec

from spotfit.host import clocks
from spotfit_localsim.wire.api import Access
from spotfit_localsim.wire.http import Reply, Request
from spotfit_localsim.wire.site import Machine, Site
from spotfit_localsim.wire.trouble import Troubles

REGION, ACCOUNT = "sim-east-1", "000000000000"
CALLER = "sim"
"""The user that asks, whatever its keys are."""
GONE: dict[str, Any] = {"state": "GONE"}
"""Of a queue: there is none."""
LOG_GROUP = "/aws/batch/job"
_TASKS = "ecs-tasks.amazonaws.com"
_PAGE = 100
"""Results of a call that lists, where nothing else is asked for."""
LOGS_LATE_S = 5.0
"""Docker's driver sends its lines every five seconds; a stream is made with its first ones."""
_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL of a job that is terminated."""
_TOKEN = "AQAEAsimulated=="  # noqa: S105  # of a metadata service that guards nothing
_NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - The job queue's compute environment cannot find "
    "enough capacity for its instance types"
)
_MISCONFIGURED = (
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) is "
    "higher than that can be met by the CE(s) attached to the job queue."
)
"""Told for a while of jobs that will run, too, while an environment grows from nothing:
https://github.com/nextflow-io/nextflow/issues/7479."""
_EXITED = "Essential container in task exited"


class Kid(msgspec.Struct):
    """One child of an array, or the only one of a plain job."""

    status: str = "SUBMITTED"
    reason: str = ""
    machine: int | None = None
    attempts: list[dict[str, Any]] = []
    started_ms: int | None = None
    stopped_ms: int | None = None


class Job(msgspec.Struct):
    id: str
    name: str
    queue: str
    definition: str
    created_ms: int
    size: int
    """Of the array; 0 for a plain job."""
    environment: dict[str, str]
    tags: dict[str, str]
    kids: list[Kid]
    terminated: str = ""

    def kid_id(self, index: int) -> str:
        return f"{self.id}:{index}" if self.size else self.id

    @property
    def status(self) -> str:
        """A parent is PENDING for as long as any child is under way."""
        if not self.size:
            return self.kids[0].status
        states = {kid.status for kid in self.kids}
        if states <= {"SUCCEEDED"}:
            return "SUCCEEDED"
        return "FAILED" if states <= {"SUCCEEDED", "FAILED"} else "PENDING"


class Memory(msgspec.Struct):
    definitions: dict[str, dict[str, Any]] = {}
    """By ARN."""
    jobs: dict[str, Job] = {}


class ComplaintError(Exception):
    """An answer that is an error, in AWS's own way."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    def reply(self, *, xml: bool) -> Reply:
        """STS, IAM and EC2 speak XML, the others JSON: with the code in a header or in the body."""
        if not xml:
            told = {"message": str(self), "__type": self.code}
            return Reply.json(told, self.status, x_amzn_ErrorType=self.code)
        error = f"<Error><Code>{self.code}</Code><Message>{escape(str(self))}</Message></Error>"
        of_ec2 = f"<Errors>{error}</Errors>"
        return _xml(f"<Response>{of_ec2}{error}</Response>", self.status)


class AwsBatchCloud:
    """One region with as many queues as anybody names."""

    Memory: ClassVar = Memory

    def __init__(self, site: Site, troubles: Troubles) -> None:
        self.site = site
        self.troubles = troubles
        self.memory = Memory()
        self.queues: dict[str, dict[str, Any]] = {}
        """What is different from a sound queue, by name: {'state': 'DISABLED'}."""
        self.environments: dict[str, dict[str, Any]] = {}
        """The same of compute environments."""
        self.roles: dict[str, str] = {"agents": _TASKS, "execution": _TASKS}
        """Whom each role lets take it on."""
        self.images: set[str] = {"worker:sim"}
        """What is in the registry, as repository:tag."""
        self.usd_per_hour: dict[str, str] = {}
        """Spot prices of a region that are not as elsewhere."""
        self.scores: dict[str, int] = {}
        """Of regions, where EC2 has one for them."""
        self.has_asked_enough = False
        """Whether EC2 tells no more scores today."""

    @staticmethod
    def access(url: str) -> Access:
        return Access(
            {
                "endpoint": url,
                "region": REGION,
                "queues": ("spot",),
                "image": "spotfit/worker:sim",
                "instance_types": ("g5.xlarge",),
                "dwell_s": 0.0,
            },
            {"AWS_ACCESS_KEY_ID": "simulated", "AWS_SECRET_ACCESS_KEY": "simulated"},
        )

    # --- requests ----------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        target = request.headers.get("x-amz-target", "")
        try:
            self._refuse()
            if target:
                return self._targeted(target, request.json())
            if request.path == "/":
                return self._query(parse_qs(request.body.decode()), _region_of(request))
            name = request.path.removeprefix("/v1/")
            self._check(f"batch:{_ACTIONS.get(name, name)}")
            verb = self._verbs.get(name, _unknown)
            return Reply.json(verb(self, request.json()))
        except ComplaintError as complaint:
            return complaint.reply(xml=request.path == "/" and not target)

    def _targeted(self, target: str, told: dict[str, Any]) -> Reply:
        """The services that say in a header what is asked of them."""
        service, _, action = target.partition(".")
        self._check(f"{_TARGETS.get(service, service)}:{action}")
        if action == "GetLogEvents":
            return self._logs(told)
        if action == "DescribeLogGroups":
            return self._log_groups(told)
        if action == "DescribeImages":
            return self._images(told)
        raise ComplaintError("UnknownOperationException", f"{target} is not simulated")

    def _check(self, right: str) -> None:
        if self.troubles.forbids(right, CALLER):
            raise ComplaintError(
                "AccessDeniedException",
                f"User: {_iam('user', CALLER)} is not authorized to perform: {right}",
                403,
            )

    def _refuse(self) -> None:
        if self.troubles.strikes("throttled"):
            raise ComplaintError("TooManyRequestsException", "Too Many Requests", 429)
        if self.troubles.strikes("credentials"):
            raise ComplaintError(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
                403,
            )
        if self.troubles.strikes("permission"):
            raise ComplaintError(
                "AccessDeniedException",
                "User: arn:aws:iam::000000000000:user/x is not authorized to perform: this",
                403,
            )

    def _register(self, told: dict[str, Any]) -> dict[str, Any]:
        name = told["jobDefinitionName"]
        if "containerProperties" not in told:
            raise ComplaintError("ClientException", "A container needs containerProperties.")
        revision = 1 + sum(one["jobDefinitionName"] == name for one in self._definitions())
        arn = f"{_arn('job-definition')}/{name}:{revision}"
        self.memory.definitions[arn] = {
            **told,
            "jobDefinitionArn": arn,
            "revision": revision,
            "status": "ACTIVE",
        }
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def _describe_definitions(self, told: dict[str, Any]) -> dict[str, Any]:
        name, arns = told.get("jobDefinitionName"), told.get("jobDefinitions", [])
        found = [
            one
            for one in self._definitions()
            if one["jobDefinitionName"] == name or one["jobDefinitionArn"] in arns
        ]
        shown, more = _page(found, told)
        return {"jobDefinitions": shown, **more}

    def _definitions(self) -> list[dict[str, Any]]:
        return list(self.memory.definitions.values())

    def _submit(self, told: dict[str, Any]) -> dict[str, Any]:
        if self.troubles.strikes("quota"):
            raise ComplaintError(
                "ClientException", "You have exceeded your limit of jobs in the SUBMITTED state."
            )
        if told["jobDefinition"] not in self.memory.definitions:
            raise ComplaintError(
                "ClientException", f"JobDefinition {told['jobDefinition']} does not exist."
            )
        size = told.get("arrayProperties", {}).get("size", 0)
        if size and not 2 <= size <= 10_000:
            raise ComplaintError("ClientException", "Array size must be between 2 and 10000.")
        given = told.get("containerOverrides", {}).get("environment", [])
        environment = {pair["name"]: pair["value"] for pair in given}
        if reserved := [name for name in environment if name.startswith("AWS_BATCH")]:
            raise ComplaintError("ClientException", f"Reserved names: {', '.join(reserved)}.")
        job = Job(
            str(uuid.uuid4()),
            told["jobName"],
            told["jobQueue"],
            told["jobDefinition"],
            clocks.wall_ms(),
            size,
            environment,
            told.get("tags", {}),
            [Kid() for _ in range(size or 1)],
        )
        self.memory.jobs[job.id] = job
        return {"jobId": job.id, "jobName": job.name, "jobArn": f"{_arn('job')}/{job.id}"}

    def _list(self, told: dict[str, Any]) -> dict[str, Any]:
        """Without a filter only RUNNING ones; a filter by name knows no states.

        A page is cut before it is filtered: as anywhere at AWS it may be empty, and not the last.
        """
        names = [name for one in told.get("filters", []) for name in one["values"]]
        if told.get("arrayJobId"):
            job = self._job(told["arrayJobId"])
            wanted = told.get("jobStatus", "RUNNING")
            kids = [n for n, kid in enumerate(job.kids) if kid.status == wanted]
            shown, more = _page(kids, told)
            return {"jobSummaryList": [self._told(job, n) for n in shown], **more}
        queued = [job for job in self.memory.jobs.values() if job.queue == told["jobQueue"]]
        jobs, more = _page(queued, told)
        if names:
            found = [job for job in jobs if job.name in names]
        else:
            found = [job for job in jobs if job.status == told.get("jobStatus", "RUNNING")]
        return {"jobSummaryList": [self._told(job, None) for job in found], **more}

    def _describe(self, told: dict[str, Any]) -> dict[str, Any]:
        if len(told["jobs"]) > 100:
            raise ComplaintError("ClientException", "At most 100 jobs can be described at once.")
        found = []
        for one in told["jobs"]:
            job_id, _, index = one.partition(":")
            job = self.memory.jobs.get(job_id)
            if job is not None and (not index or int(index) < job.size):
                found.append(self._told(job, int(index) if index else None))
        return {"jobs": found}

    def _terminate(self, told: dict[str, Any]) -> dict[str, Any]:
        job = self._job(told["jobId"].partition(":")[0])
        if not told.get("reason"):
            raise ComplaintError("ClientException", "A reason is required.")
        job.terminated = job.terminated or told["reason"]
        return {}

    def _cancel(self, told: dict[str, Any]) -> dict[str, Any]:
        """Does nothing to what is starting or running, and says that all is well."""
        job = self._job(told["jobId"].partition(":")[0])
        if all(kid.machine is None for kid in job.kids):
            job.terminated = told["reason"]
        return {}

    def _queues(self, told: dict[str, Any]) -> dict[str, Any]:
        names = [name.rpartition("/")[2] for name in told.get("jobQueues", ["spot"])]
        there = [name for name in names if self.queues.get(name, {}) != GONE]
        return {"jobQueues": [_queue(name) | self.queues.get(name, {}) for name in there]}

    def _environments(self, told: dict[str, Any]) -> dict[str, Any]:
        names = told.get("computeEnvironments") or ["spot"]
        short = [name.rpartition("/")[2] for name in names]
        found = [_environment(name) | self.environments.get(name, {}) for name in short]
        return {"computeEnvironments": found}

    _verbs: ClassVar[dict[str, Callable[[AwsBatchCloud, dict[str, Any]], dict[str, Any]]]] = {
        "registerjobdefinition": _register,
        "describejobdefinitions": _describe_definitions,
        "submitjob": _submit,
        "listjobs": _list,
        "describejobs": _describe,
        "terminatejob": _terminate,
        "canceljob": _cancel,
        "describejobqueues": _queues,
        "describecomputeenvironments": _environments,
    }

    def _job(self, job_id: str) -> Job:
        if job_id not in self.memory.jobs:
            raise ComplaintError("ClientException", f"Job {job_id} does not exist.", 404)
        return self.memory.jobs[job_id]

    def _logs(self, told: dict[str, Any]) -> Reply:
        for machine in self.site.machines.values():
            lines = self.site.output(machine, late_s=LOGS_LATE_S).splitlines()
            if lines and told["logStreamName"] == _stream(machine):
                now, last = clocks.wall_ms(), int(told.get("limit", 10_000))
                chosen = lines[:last] if told.get("startFromHead") else lines[-last:]
                events = [{"timestamp": now, "ingestionTime": now, "message": x} for x in chosen]
                return _aws_json(
                    {"events": events, "nextForwardToken": "f", "nextBackwardToken": "b"}
                )
        gone = "The specified log stream does not exist."
        return _aws_json({"__type": "ResourceNotFoundException", "message": gone}, 400)

    def _log_groups(self, told: dict[str, Any]) -> Reply:
        """Batch makes its group with the first job."""
        name = told.get("logGroupNamePrefix", "")
        there = self.memory.jobs and LOG_GROUP.startswith(name)
        return _aws_json({"logGroups": [{"logGroupName": LOG_GROUP}] if there else []})

    def _images(self, told: dict[str, Any]) -> Reply:
        name = f"{told['repositoryName']}:{told['imageIds'][0].get('imageTag')}"
        if name not in self.images:
            gone = f"The image {name} does not exist within the registry"
            return _aws_json({"__type": "ImageNotFoundException", "message": gone}, 400)
        return _aws_json({"imageDetails": [{"repositoryName": told["repositoryName"]}]})

    def _query(self, told: Mapping[str, list[str]], region: str) -> Reply:
        action = told.get("Action", [""])[0]
        self._check(f"{_SERVICES.get(action, 'sts')}:{action}")
        if action == "GetRole":
            return self._role(told["RoleName"][0])
        if action == "SimulatePrincipalPolicy":
            return self._simulate(told)
        if action == "GetCallerIdentity":
            return _xml(
                f"<GetCallerIdentityResponse><GetCallerIdentityResult><Account>{ACCOUNT}</Account>"
                f"<UserId>sim</UserId><Arn>{_iam('user', CALLER)}</Arn>"
                "</GetCallerIdentityResult></GetCallerIdentityResponse>"
            )
        if action == "DescribeSpotPriceHistory":
            return self._spot_prices(told, region)
        if action == "GetSpotPlacementScores":
            return self._scores(told)
        raise ComplaintError("InvalidAction", f"{action} is not simulated")

    def _spot_prices(self, told: Mapping[str, list[str]], region: str) -> Reply:
        """One on each page."""
        now = (self.usd_per_hour.get(region, _NOW_USD[0]), _NOW_USD[1])
        told_of = [now] if "StartTime" in told else [now, _ONCE_USD]
        kinds = _listed(told, "InstanceType")
        prices = [_price(kind, price, region) for kind in kinds for price in told_of]
        first = int(told.get("NextToken", ["0"])[0])
        more = f"<nextToken>{first + 1}</nextToken>" if first + 1 < len(prices) else ""
        items = "".join(f"<item>{price}</item>" for price in prices[first : first + 1])
        return _xml(
            "<DescribeSpotPriceHistoryResponse><spotPriceHistorySet>"
            f"{items}</spotPriceHistorySet>{more}</DescribeSpotPriceHistoryResponse>"
        )

    def _scores(self, told: Mapping[str, list[str]]) -> Reply:
        """Of those regions that have one."""
        if self.has_asked_enough:
            raise ComplaintError(
                "MaxConfigLimitExceeded",
                "You have exceeded your maximum allowed Spot placement configurations. You can "
                "retry configurations that you used within the last 24 hours, or wait for 24 hours "
                "before specifying a new configuration.",
            )
        items = "".join(
            f"<item><region>{region}</region><score>{self.scores[region]}</score></item>"
            for region in _listed(told, "RegionName")
            if region in self.scores
        )
        return _xml(
            "<GetSpotPlacementScoresResponse><spotPlacementScoreSet>"
            f"{items}</spotPlacementScoreSet></GetSpotPlacementScoresResponse>"
        )

    def _role(self, name: str) -> Reply:
        if name not in self.roles:
            raise ComplaintError("NoSuchEntity", f"The role with name {name} cannot be found.", 404)
        principal = {"Service": self.roles[name]}
        statement = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"}
        trust = quote(msgspec.json.encode({"Version": "2012-10-17", "Statement": [statement]}))
        return _xml(
            f"<GetRoleResponse><GetRoleResult><Role><RoleName>{name}</RoleName><Path>/</Path>"
            f"<RoleId>AROASIM{name.upper()}</RoleId><Arn>{_iam('role', name)}</Arn>"
            "<CreateDate>2026-01-01T00:00:00Z</CreateDate>"
            f"<AssumeRolePolicyDocument>{trust}</AssumeRolePolicyDocument>"
            "</Role></GetRoleResult></GetRoleResponse>"
        )

    def _simulate(self, told: Mapping[str, list[str]]) -> Reply:
        """Everything is allowed that nobody has forbidden, for each action on each resource."""
        who = told["PolicySourceArn"][0].rpartition("/")[2]
        if who != CALLER and who not in self.roles:
            raise ComplaintError("NoSuchEntity", f"{told['PolicySourceArn'][0]} is nobody", 404)
        members = "".join(
            f"<member><EvalActionName>{action}</EvalActionName>"
            f"<EvalResourceName>{escape(resource)}</EvalResourceName><EvalDecision>"
            f"{'implicitDeny' if self.troubles.forbids(action, who) else 'allowed'}"
            "</EvalDecision></member>"
            for action in _members(told, "ActionNames")
            for resource in _members(told, "ResourceArns") or ["*"]
        )
        return _xml(
            "<SimulatePrincipalPolicyResponse><SimulatePrincipalPolicyResult><IsTruncated>false"
            f"</IsTruncated><EvaluationResults>{members}</EvaluationResults>"
            "</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"
        )

    # --- what is told of jobs ----------------------------------------------------------------

    def _told(self, job: Job, index: int | None) -> dict[str, Any]:
        kid = job.kids[index or 0] if index is not None or not job.size else None
        told: dict[str, Any] = {
            "jobArn": f"{_arn('job')}/{job.id}",
            "jobId": job.id if index is None else job.kid_id(index),
            "jobName": job.name,
            "jobQueue": job.queue,
            "jobDefinition": job.definition,
            "createdAt": job.created_ms,
            "startedAt": kid.started_ms or 0 if kid else 0,
            "status": job.status if kid is None else kid.status,
            "tags": job.tags,
            "dependsOn": [],
            "retryStrategy": self._retries(job),
        }
        if job.terminated:
            told["isTerminated"] = True
        if kid is None:
            summary = dict.fromkeys(_STATES, 0)
            for one in job.kids:
                summary[one.status] += 1
            return told | {"arrayProperties": {"size": job.size, "statusSummary": summary}}
        if job.size:
            told["arrayProperties"] = {"index": index}
        ended = {"stoppedAt": kid.stopped_ms} if kid.stopped_ms else {}
        last = kid.attempts[-1]["container"] if kid.attempts else {}
        machine = self.site.machines.get(kid.machine) if kid.machine is not None else None
        stream = {"logStreamName": _stream(machine)} if machine and kid.status == "RUNNING" else {}
        return (
            told
            | ended
            | {
                "statusReason": kid.reason,
                "attempts": kid.attempts,
                "container": {**last, **stream, "environment": _pairs(job.environment)},
            }
        )

    # --- as time goes by ---------------------------------------------------------------------

    def tick(self) -> None:
        for job in self.memory.jobs.values():
            for index, kid in enumerate(job.kids):
                if kid.status not in ("SUCCEEDED", "FAILED"):
                    self._move(job, index, kid)

    def _move(self, job: Job, index: int, kid: Kid) -> None:
        machine = self.site.machines.get(kid.machine) if kid.machine is not None else None
        if machine is None:
            if job.terminated:
                self._fail(kid, job.terminated)
            else:
                self._place(job, index, kid)
        elif not machine.standing:
            self._note_end(job, kid, machine)
        elif job.terminated:
            self.site.stop(machine, grace_s=_GRACE_S)
        elif machine.state == "up" and kid.status != "RUNNING":
            kid.status, kid.started_ms = "RUNNING", clocks.wall_ms()

    def _place(self, job: Job, index: int, kid: Kid) -> None:
        kid.status = "RUNNABLE"
        definition = self.memory.definitions[job.definition]
        container = definition["containerProperties"]
        environment = {**job.environment, **self._batch_variables(job, index, kid)}
        machine = None
        if self.troubles.now("misconfiguration"):
            kid.reason = _MISCONFIGURED
            return
        if not self.troubles.now("capacity"):
            task = f"{job.kid_id(index)}#{len(kid.attempts)}"
            machine = self.site.rent(task, container["command"], environment)
        kid.reason = "" if machine else _NO_CAPACITY
        if machine is not None:
            kid.machine, kid.status = machine.number, "STARTING"

    def _batch_variables(self, job: Job, index: int, kid: Kid) -> dict[str, str]:
        array = {
            "AWS_BATCH_JOB_ARRAY_INDEX": str(index),
            "AWS_BATCH_JOB_ARRAY_SIZE": str(job.size),
        }
        return (array if job.size else {}) | {
            "AWS_BATCH_JOB_ID": job.kid_id(index),
            "AWS_BATCH_JOB_ATTEMPT": str(len(kid.attempts) + 1),
            "AWS_BATCH_JQ_NAME": job.queue,
            "AWS_BATCH_CE_NAME": "spot",
        }

    def _note_end(self, job: Job, kid: Kid, machine: Machine) -> None:
        now = clocks.wall_ms()
        container: dict[str, Any] = {"logStreamName": _stream(machine)}
        if machine.exit_code is None and machine.why != "stopped":
            reason = f"Host EC2 (instance {_instance(machine)}) terminated."
        else:
            reason = _EXITED
            container["exitCode"] = 137 if machine.exit_code is None else machine.exit_code
        kid.attempts.append(
            {
                "container": container,
                "startedAt": kid.started_ms or now,
                "stoppedAt": now,
                "statusReason": reason,
            }
        )
        kid.machine = None
        if job.terminated:
            self._fail(kid, job.terminated)
        elif container.get("exitCode") == 0:
            kid.status, kid.reason, kid.stopped_ms = "SUCCEEDED", _EXITED, now
        elif self._tries_again(job, kid, reason, container.get("exitCode")):
            kid.status, kid.reason = "RUNNABLE", ""
        else:
            self._fail(kid, reason)

    def _fail(self, kid: Kid, reason: str) -> None:
        kid.status, kid.reason, kid.stopped_ms = "FAILED", reason, clocks.wall_ms()

    def _tries_again(self, job: Job, kid: Kid, reason: str, code: int | None) -> bool:
        strategy = self._retries(job)
        if len(kid.attempts) >= strategy["attempts"]:
            return False
        told = {
            "onStatusReason": reason,
            "onReason": "",
            "onExitCode": "" if code is None else str(code),
        }
        for rule in strategy.get("evaluateOnExit", []):
            conditions = [(told[name], rule[name]) for name in told if name in rule]
            if all(_matches(text, pattern) for text, pattern in conditions):
                return str(rule["action"]).upper() == "RETRY"
        return True

    def _retries(self, job: Job) -> dict[str, Any]:
        strategy = self.memory.definitions[job.definition].get("retryStrategy")
        return dict(strategy or {"attempts": 1, "evaluateOnExit": []})

    # --- on a machine ------------------------------------------------------------------------

    def environment(self, machine: Machine) -> Mapping[str, str]:
        return {
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "false",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": (
                f"http://{self.site.host(machine)}:{machine.metadata_port}"
            ),
        }

    def metadata(self, machine: Machine, request: Request) -> Reply | None:
        """IMDSv2: without a token nobody is told anything."""
        if request.path == "/latest/api/token":
            lasting = request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if (
                request.method != "PUT"
                or not lasting.isdecimal()
                or not 1 <= int(lasting) <= 21_600
            ):
                return Reply(400)
            return Reply(200, _TOKEN.encode())
        if request.headers.get("x-aws-ec2-metadata-token") != _TOKEN:
            return Reply(401)
        told = dict(self._facts(machine))
        text = told.get(request.path.removeprefix("/latest/meta-data/"))
        return None if text is None else Reply(200, text.encode())

    def _facts(self, machine: Machine) -> Iterator[tuple[str, str]]:
        yield "instance-id", _instance(machine)
        yield "instance-life-cycle", "spot"
        yield "local-ipv4", self.site.host(machine)
        if machine.advised_s is not None:
            told = f'{{"noticeTime": "{_stamp(machine.advised_s)}"}}'
            yield "events/recommendations/rebalance", told
        if machine.notice_s is not None and machine.ends_s is not None:
            at = _stamp(machine.ends_s)
            yield "spot/instance-action", f'{{"action": "terminate", "time": "{at}"}}'
            yield "spot/termination-time", at


def _unknown(_cloud: AwsBatchCloud, _told: dict[str, Any]) -> dict[str, Any]:
    raise ComplaintError("ClientException", "This call is not simulated.")


_STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED")


def _page(all_: Sequence[Any], told: Mapping[str, Any]) -> tuple[list[Any], dict[str, str]]:
    """What is shown of them at a time, and the word for the next page if there is one."""
    first = int(told.get("nextToken") or 0)
    after = first + int(told.get("maxResults") or _PAGE)
    return list(all_[first:after]), {"nextToken": str(after)} if after < len(all_) else {}


def _listed(told: Mapping[str, list[str]], name: str) -> list[str]:
    """`name.1`, `name.2`, … as lists are written in a query."""
    numbered = {int(key.rpartition(".")[2]): key for key in told if key.startswith(f"{name}.")}
    return [told[numbered[number]][0] for number in sorted(numbered)]


def _region_of(request: Request) -> str:
    """Which region is meant, by what the request is signed for."""
    _, _, scope = request.headers.get("authorization", "").partition("Credential=")
    words = scope.partition(",")[0].split("/")
    return words[2] if len(words) > 2 else REGION


def _matches(text: str, pattern: str) -> bool:
    """Letter by letter, but for a star at the end."""
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


_ACTIONS = {
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
_TARGETS = {"Logs_20140328": "logs", "AmazonEC2ContainerRegistry_V20150921": "ecr"}
_SERVICES = {
    "GetRole": "iam",
    "SimulatePrincipalPolicy": "iam",
    "DescribeSpotPriceHistory": "ec2",
    "GetSpotPlacementScores": "ec2",
}


def _iam(kind: str, name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:{kind}/{name}"


def _members(told: Mapping[str, list[str]], name: str) -> list[str]:
    """A list as the query protocol writes it: Name.member.1, Name.member.2, …"""
    found = [key for key in told if key.startswith(f"{name}.member.")]
    return [told[key][0] for key in sorted(found, key=lambda key: int(key.rpartition(".")[2]))]


def _arn(kind: str) -> str:
    return f"arn:aws:batch:{REGION}:{ACCOUNT}:{kind}"


def _instance(machine: Machine) -> str:
    return f"i-{machine.number:017x}"


def _stream(machine: Machine) -> str:
    return f"spotfit/default/{machine.number:032x}"


def _stamp(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _pairs(environment: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": environment[name]} for name in environment]


def _queue(name: str) -> dict[str, Any]:
    order = [{"order": 1, "computeEnvironment": f"{_arn('compute-environment')}/spot"}]
    return {
        "jobQueueName": name,
        "jobQueueArn": f"{_arn('job-queue')}/{name}",
        "state": "ENABLED",
        "status": "VALID",
        "priority": 1,
        "computeEnvironmentOrder": order,
    }


def _environment(name: str) -> dict[str, Any]:
    return {
        "computeEnvironmentName": name.rpartition("/")[2],
        "computeEnvironmentArn": f"{_arn('compute-environment')}/spot",
        "type": "MANAGED",
        "state": "ENABLED",
        "status": "VALID",
        "computeResources": {
            "type": "SPOT",
            "minvCpus": 0,
            "maxvCpus": 256,
            "instanceTypes": ["g5.xlarge"],
            "subnets": ["subnet-1"],
            "allocationStrategy": "SPOT_PRICE_CAPACITY_OPTIMIZED",
        },
    }


_NOW_USD, _ONCE_USD = ("0.4321", "2026-01-01"), ("0.1234", "2025-12-01")
"""Prices and their days: the present one, and a lower one of a month ago."""


def _price(kind: str, told: tuple[str, str], region: str) -> str:
    price, day = told
    return (
        f"<instanceType>{escape(kind)}</instanceType><productDescription>Linux/UNIX"
        f"</productDescription><spotPrice>{price}</spotPrice>"
        f"<availabilityZone>{region}a</availabilityZone><timestamp>{day}T00:00:00Z</timestamp>"
    )


def _xml(body: str, status: int = 200) -> Reply:
    return Reply(status, f"<?xml version='1.0'?>{body}".encode(), {"content-type": "text/xml"})


def _aws_json(told: Any, status: int = 200) -> Reply:
    body = msgspec.json.encode(told)
    return Reply(status, body, {"content-type": "application/x-amz-json-1.1"})
