"""What AWS Batch needs in an account, looked at one by one, and how to mend what is wrong.

Rights are asked of IAM, which simulates its own policies; who may not ask makes calls that come to
nothing instead, for AWS looks at rights before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.provision.checkup import Finding, UnseenError, look, unseen_if_refused
from spotfit_provisioners.aws_batch.client import Account, BatchClient, caller, refuses, unanswered
from spotfit_provisioners.aws_batch.options import AwsBatchOptions

LOG_GROUP = "/aws/batch/job"
"""Where Batch lets containers write, unless a job definition says otherwise."""

_TASKS = "ecs-tasks.amazonaws.com"
"""Who takes on the roles of containers."""
_MAKE_ONE = "Make one with infra/terraform/stacks/aws, or correct AwsBatchOptions(queues=…)."
_GIVE = "Give it what infra/terraform/modules/aws_batch lists under 'controller'."
_GIVE_BUCKET = "Give it what infra/terraform/modules/bucket_s3 lists under 'runs'."

_ORDERS_BY = {"price": "ec2:DescribeSpotPriceHistory", "score": "ec2:GetSpotPlacementScores"}

At = Callable[[str], tuple[BatchClient, str]]
"""The client of a queue's region, and the queue's name there."""


@dataclass(frozen=True, slots=True)
class Need:
    """Rights that somebody must have on all of those resources."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    context: Mapping[str, str] = field(default_factory=dict)
    do: str = _GIVE


@dataclass(frozen=True, slots=True)
class Who:
    """An identity, taken apart: 'arn:aws:sts::123:assumed-role/us/me'."""

    arn: str

    @property
    def partition(self) -> str:
        return self.arn.split(":")[1]

    @property
    def account(self) -> str:
        return self.arn.split(":")[4]

    @property
    def kind(self) -> str:
        """'user', 'assumed-role', 'role', 'federated-user' or 'root'."""
        return self.arn.split(":", 5)[5].partition("/")[0]

    @property
    def role(self) -> str:
        """The name of the role, without its path."""
        words = self.arn.split(":", 5)[5].split("/")
        return words[1] if self.kind == "assumed-role" else words[-1]


def examine(options: AwsBatchOptions, storage: str, at: At) -> Iterator[Finding]:
    """Who we are, each queue and what stands behind it, rights, roles, logs and the image."""
    known: list[str] = []

    def ask() -> str:
        known.append(caller(options.region, options.endpoint))
        return known[-1]

    yield look("AWS knows who asks", ask)
    for queue in options.queues:
        yield from _queue(queue, at)
    if known:
        yield from _Examiner(options, storage, at, Who(known[0])).rest()


# --- queues -----------------------------------------------------------------------------------


def _queue(queue: str, at: At) -> Iterator[Finding]:
    names: list[str] = []
    yield look(f"the queue {queue} takes jobs", lambda: names.extend(_behind(queue, at)))
    for name in names:
        short = name.rpartition("/")[2]
        yield look(
            f"its environment {short} rents spot machines",
            lambda n=name: _environment(n, queue, at),  # type: ignore[misc]
        )


def _behind(queue: str, at: At) -> list[str]:
    """Its environments. Raises `ConfigError` for a queue that takes nothing."""
    client, name = at(queue)
    found = client.queue(name)
    if found is None:
        raise ConfigError(f"There is no queue {name!r} in {client.region}.", do=_MAKE_ONE)
    if found["state"] != "ENABLED" or found["status"] != "VALID":
        why = found.get("statusReason") or "no reason given"
        raise ConfigError(f"It is {found['state']} and {found['status']}: {why}.", do=_MAKE_ONE)
    return [one["computeEnvironment"] for one in found["computeEnvironmentOrder"]]


def _environment(name: str, queue: str, at: At) -> str:
    """What it rents. Raises `ConfigError` for what would keep jobs waiting, or cost too much."""
    found = at(queue)[0].environments([name])
    if not found:
        raise ConfigError("It is gone.", do=_MAKE_ONE)
    (one,) = found
    resources = one.get("computeResources", {})
    if wrong := list(_wrong_with(one, resources)):
        raise ConfigError(
            " ".join(what for what, _ in wrong), do=" ".join(remedy for _, remedy in wrong)
        )
    return f"up to {resources['maxvCpus']} vCPUs of {', '.join(resources['instanceTypes'])}"


def _wrong_with(one: Mapping[str, Any], resources: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if one["state"] != "ENABLED":
        yield "It is disabled.", "`aws batch update-compute-environment --state ENABLED`."
    if one["status"] != "VALID":
        why = one.get("statusReason") or "no reason given"
        yield (
            f"It is {one['status']}: {why}.",
            "Mend its roles, subnets or launch template; an INVALID environment starts nothing.",
        )
    if (kind := resources.get("type", one.get("type"))) != "SPOT":
        yield (
            f"It is of type {kind}.",
            "On-demand machines cost several times as much; use environments of type SPOT.",
        )
    if not resources.get("maxvCpus"):
        yield "It may have 0 vCPUs.", "Raise its maxvCpus."


# --- rights, roles, logs and the image --------------------------------------------------------


class _Examiner:
    """What there is to look at once it is known who asks."""

    def __init__(self, options: AwsBatchOptions, storage: str, at: At, who: Who) -> None:
        self._options = options
        self._at = at
        self._who = who
        self._bucket = storage if storage.startswith("s3://") else ""
        self._account = Account(options.region, options.endpoint)

    def rest(self) -> Iterator[Finding]:
        yield from self._ours()
        yield from self._agents()
        if self._options.execution_role:
            arn = self._options.execution_role
            yield look("the execution role can be taken on", lambda: self._trusted(arn))
        yield look("what machines print is kept", self._logs)
        yield look("the image is there", self._image)

    def _ours(self) -> Iterator[Finding]:
        """What whoever asks may do; by trying, where IAM does not tell."""
        told = look("we may rent machines", lambda: self._allowed(self._own_arn(), self._needs()))
        if told.seen or not told.well:
            yield told
            return
        for queue in self._options.queues[:1]:
            client, name = self._at(queue)
            for right, call in client.try_rights(name):
                yield look(f"we have {right}", lambda c=call, r=right: _tried(c, r))  # type: ignore[misc]

    def _agents(self) -> Iterator[Finding]:
        """Agents rent replacements, and live in the bucket."""
        arn = self._options.job_role
        if not arn:
            why = "no job_role given: agents have the role of their instance"
            yield Finding("agents may do what they must", well=True, found=why, seen=False)
            return
        yield look("the agents' role can be taken on", lambda: self._trusted(arn))
        yield look("agents may rent machines", lambda: self._allowed(arn, self._needs()))
        if self._bucket:
            what = f"agents may use {self._bucket}"
            yield look(what, lambda: self._allowed(arn, [*self._bucket_needs()]))

    def _own_arn(self) -> str:
        """As IAM wants it: a role, not a session of it. Its path is known to IAM only."""
        if self._who.kind != "assumed-role":
            return self._who.arn
        plain = f"arn:{self._who.partition}:iam::{self._who.account}:role/{self._who.role}"
        try:
            found = self._account.role(self._who.role)
        except ProvisionPermissionError:
            return plain
        return str(found["Arn"]) if found else plain

    def _allowed(self, arn: str, needs: Sequence[Need]) -> str:
        """How many rights it has. Raises `ProvisionPermissionError` naming all that it lacks."""
        who = Who(arn)
        if who.kind in ("root", "federated-user"):
            raise UnseenError(f"IAM does not tell what a {who.kind} may do")
        if lacking := [(action, need.do) for need in needs for action in self._denied(arn, need)]:
            raise ProvisionPermissionError(
                f"{arn} lacks {', '.join(action for action, _ in lacking)}.",
                do=" ".join(dict.fromkeys(do for _, do in lacking)),
            )
        return f"{sum(len(need.actions) for need in needs)} rights of {who.role}"

    def _denied(self, arn: str, need: Need) -> list[str]:
        """Which of its actions are refused. Raises `UnseenError` where IAM gives no answer."""
        try:
            with unseen_if_refused():
                return self._account.denied(arn, need.actions, need.resources, need.context)
        except unanswered() as trouble:
            raise UnseenError(f"IAM does not tell: {str(trouble).splitlines()[0]}") from trouble

    def _needs(self) -> list[Need]:
        return [*self._batch_needs(), *self._pass_needs(), self._log_need()]

    def _batch_needs(self) -> Iterator[Need]:
        client, name = self._at(self._options.queues[0])
        here = f"arn:{self._who.partition}:batch:{client.region}:{self._who.account}"
        queue = name if name.startswith("arn:") else f"{here}:job-queue/{name}"
        definition, job = f"{here}:job-definition/spotfit-0", f"{here}:job/0"
        yield Need(("batch:SubmitJob",), (queue, definition))
        yield Need(("batch:RegisterJobDefinition",), (definition,))
        yield Need(("batch:TagResource", "batch:TerminateJob"), (job,))
        looks = ("DescribeJobDefinitions", "DescribeJobQueues", "DescribeJobs", "ListJobs")
        yield Need(tuple(f"batch:{one}" for one in looks), ("*",))
        if right := _ORDERS_BY.get(self._options.order):
            yield Need((right,), ("*",))

    def _pass_needs(self) -> Iterator[Need]:
        roles = (self._options.job_role, self._options.execution_role)
        passed = tuple(filter(None, roles))
        if passed:
            yield Need(("iam:PassRole",), passed, {"iam:PassedToService": _TASKS})

    def _log_need(self) -> Need:
        client, _ = self._at(self._options.queues[0])
        where = f"arn:{self._who.partition}:logs:{client.region}:{self._who.account}"
        return Need(("logs:GetLogEvents",), (f"{where}:log-group:{LOG_GROUP}:log-stream:x",))

    def _bucket_needs(self) -> Iterator[Need]:
        url = urlsplit(self._bucket)
        bucket = f"arn:{self._who.partition}:s3:::{url.netloc}"
        prefix = "/".join(filter(None, (bucket, url.path.strip("/"))))
        objects = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
        yield Need(("s3:ListBucket",), (bucket,), do=_GIVE_BUCKET)
        actions = tuple(f"s3:{one}" for one in objects)
        yield Need(actions, (f"{prefix}/x",), do=_GIVE_BUCKET)

    def _trusted(self, arn: str) -> str:
        """Raises `ConfigError` for a role that is not there, or that containers may not have."""
        with unseen_if_refused():
            found = self._account.role(Who(arn).role)
        if found is None:
            raise ConfigError(f"There is no role {arn}.", do="Correct it, or apply the stack.")
        if not _trusts(found["AssumeRolePolicyDocument"], _TASKS):
            raise ConfigError(
                f"{arn} does not let {_TASKS} take it on.",
                do=f"Allow sts:AssumeRole to the service {_TASKS} in its trust policy.",
            )
        return f"{Who(arn).role}, by {_TASKS}"

    def _logs(self) -> str:
        with unseen_if_refused():
            there = self._account.has_log_group(LOG_GROUP)
        return LOG_GROUP if there else f"{LOG_GROUP} will be made with the first job"

    def _image(self) -> str:
        """Looks into Amazon's own registry only. Raises `ConfigError` for an image not there."""
        image = self._options.image
        host, _, path = image.partition("/")
        words = host.split(".")
        if words[1:3] != ["dkr", "ecr"]:
            raise UnseenError(f"{image} is in no registry of Amazon's")
        repository, which = _taken_apart(path)
        with unseen_if_refused():
            there = Account(words[3], self._options.endpoint).has_image(words[0], repository, which)
        if not there:
            raise ConfigError(
                f"The registry has no {image}.",
                do="worker_image/bake.sh makes and pushes one; or correct the name.",
            )
        return image


def _tried(call: Callable[[], Any], right: str) -> str:
    refuses(call, f"do what needs {right}")
    return "a call that comes to nothing was not refused"


def _trusts(policy: Mapping[str, Any], service: str) -> bool:
    """Whether it lets that service take the role on."""
    statements = policy.get("Statement", [])
    for one in statements if isinstance(statements, list) else [statements]:
        who = one.get("Principal", {})
        services = who.get("Service", []) if isinstance(who, Mapping) else []
        named = [services] if isinstance(services, str) else services
        if one.get("Effect") == "Allow" and service in named:
            return True
    return False


def _taken_apart(path: str) -> tuple[str, dict[str, str]]:
    """Repository, and which of its images, in the registry's words."""
    repository, _, digest = path.partition("@")
    if digest:
        return repository.partition(":")[0], {"imageDigest": digest}
    repository, _, tag = path.partition(":")
    return repository, {"imageTag": tag or "latest"}
