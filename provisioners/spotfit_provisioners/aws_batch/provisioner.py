"""The four verbs on AWS Batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from spotfit.host import clocks, log
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said
from spotfit_provisioners.aws_batch import checkup, render, states
from spotfit_provisioners.aws_batch.checkup import LOG_GROUP
from spotfit_provisioners.aws_batch.client import (
    Account,
    BatchClient,
    cheapest_usd_per_hour,
    placement_scores,
)
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.kit import images

_FORGOTTEN = NodeStatus(NodeState.GONE, "AWS Batch does not remember it")
_LET_GO = "spotfit has let it go"


class AwsBatchProvisioner:
    """A group is one job: an array of children, each filling a spot instance of its own."""

    name = render.BACKEND
    Options: ClassVar = AwsBatchOptions

    def __init__(self, options: AwsBatchOptions) -> None:
        self.options = options
        self._passed_over: set[tuple[str, str]] = set()
        """Queues, by region and name, that kept a group waiting since one last got its machines."""
        self._waiting: set[str] = set()
        """Tokens of groups that were seen to wait: what runs already tells nothing of a queue."""

    @classmethod
    def with_options(cls, **options: Any) -> AwsBatchProvisioner:
        """From the fields of `AwsBatchOptions`."""
        return cls(AwsBatchOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.MAX_NODES,
            notice_s=120.0,
            requeues_itself=self.options.attempts > 1,
            observe_s=10.0,
            notices=("aws", "signal"),
            keeps_output=True,
            runs=images.software(self.options.image),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Look for a job of that name first; if two asked at the same time, the older job stays."""
        found = self._found(plan)
        if found is not None:
            return found
        queues = self._ordered(plan.body["queues"], plan.nodes)
        queue = next((one for one in queues if not self._is_passed_over(one)), queues[-1])
        client, name = self._at(queue)
        environment = launch.environment(
            plan.token,
            0,
            plan.slots,
            node_from=render.ARRAY_INDEX if plan.nodes > 1 else "",
        )
        definition = client.register(plan.body["definition"])
        client.submit(
            render.job(
                plan,
                queue=name,
                definition=definition,
                environment=environment,
                share=self.options.share,
            )
        )
        self._keep_the_oldest(plan.token, queues)
        return self._found(plan) or Refusal("AWS Batch took the job and forgot it")

    def observe(self, handle: GroupHandle) -> GroupStatus:
        client = _client_of(handle.detail["region"], self.options.endpoint)
        nodes = int(handle.detail["nodes"])
        ids = render.children(handle.name, nodes)
        known = client.describe(ids)
        told = [known.get(one) for one in ids]
        if not any(told) and nodes > 1:  # an array is expanded a moment after it was submitted
            parent = client.describe([handle.name]).get(handle.name)
            told = [parent] * nodes if parent is not None else told
        statuses = tuple(states.status(job) if job else _FORGOTTEN for job in told)
        jobs = [job for job in told if job]
        refusal = self._refusal(jobs)
        if all(one.state is NodeState.WAITING for one in statuses):
            self._waiting.add(handle.token)
            if refusal and self._has_lasted(jobs):
                return self._waited_in_vain(handle, statuses, refusal)
            return GroupStatus(statuses, refusal)
        came = any(one.state is NodeState.RUNNING for one in statuses)
        if came and handle.token in self._waiting:
            self._passed_over.clear()
        self._waiting.discard(handle.token)
        return GroupStatus(statuses, refusal)

    def _waited_in_vain(
        self, handle: GroupHandle, waiting: tuple[NodeStatus, ...], why: str
    ) -> GroupStatus:
        """Where another queue was not tried yet, the group is given up, and that one asked next;
        the last of them is where it stays, for a queue gives as soon as it can."""
        self._passed_over.add((handle.detail["region"], handle.detail["queue"]))
        left = [queue for queue in self.options.queues if not self._is_passed_over(queue)]
        if not left:
            return GroupStatus(waiting, why)
        told = f"{handle.detail['queue']} has none ({why}); {left[0]} is asked next"
        return GroupStatus(tuple(NodeStatus(NodeState.REFUSED, told) for _ in waiting), why)

    def _has_lasted(self, jobs: list[dict[str, Any]]) -> bool:
        now_ms = clocks.wall_ms()
        return any(states.waited_s(job, now_ms=now_ms) >= self.options.dwell_s for job in jobs)

    def _is_passed_over(self, queue: str) -> bool:
        client, name = self._at(queue)
        return (client.region, name) in self._passed_over

    def cancel(self, handle: GroupHandle) -> None:
        """Terminating an array terminates its children; a job that is over stays as it is."""
        client = _client_of(handle.detail["region"], self.options.endpoint)
        job = client.describe([handle.name]).get(handle.name)
        if job is not None and job["status"] not in ("SUCCEEDED", "FAILED"):
            client.terminate(handle.name, _LET_GO)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """Attempt by attempt, from CloudWatch, which is some seconds late."""
        region = handle.detail["region"]
        job_id = render.children(handle.name, int(handle.detail["nodes"]))[node]
        job = _client_of(region, self.options.endpoint).describe([job_id]).get(job_id)
        account = Account(region, self.options.endpoint)
        return [
            Said(
                f"attempt {number}, {LOG_GROUP} {stream}",
                tuple(account.printed(LOG_GROUP, stream, last)),
            )
            for number, stream in enumerate(states.streams(job or {}), 1)
        ]

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """Who we are, each queue and what stands behind it, rights, roles, logs and the image."""
        yield from checkup.examine(self.options, storage, self._at)

    # --- queues ------------------------------------------------------------------------------

    def _ordered(self, queues: list[str], machines: int) -> list[str]:
        """The most promising first, by the region of each."""
        types, endpoint = self.options.instance_types, self.options.endpoint
        regions = {queue: self._at(queue)[0].region for queue in queues}
        wanted = list(dict.fromkeys(regions.values()))
        if self.options.order == "given" or len(wanted) == 1:
            return queues
        if self.options.order == "price":
            prices = {one: cheapest_usd_per_hour(one, types, endpoint) for one in wanted}
            return sorted(queues, key=lambda queue: prices[regions[queue]])
        scores = placement_scores(wanted, types, machines, endpoint)
        return sorted(queues, key=lambda queue: -scores.get(regions[queue], 0))

    def _at(self, queue: str) -> tuple[BatchClient, str]:
        """The client of a queue's region, and the queue's name there."""
        region, name = _parts(queue)
        return _client_of(region or self.options.region, self.options.endpoint), name

    def _found(self, plan: GroupPlan) -> GroupHandle | None:
        for queue in plan.body["queues"]:
            client, name = self._at(queue)
            jobs = client.named(name, plan.token)
            if jobs:
                detail = {"nodes": plan.nodes, "region": client.region, "queue": name}
                return GroupHandle(plan.token, self.name, jobs[0]["jobId"], detail)
        return None

    def _keep_the_oldest(self, token: str, queues: list[str]) -> None:
        """`submit_job` knows no token of ours: two who asked at the same time have made two.

        In whichever queues; whoever looks keeps the same one, that of the first queue as options
        have them.
        """
        told = [
            (client, job)
            for queue in self.options.queues
            if queue in queues
            for client, name in [self._at(queue)]
            for job in client.named(name, token)
        ]
        for client, job in told[1:]:
            log.warning("aws_batch.twice", token=token, job=job["jobId"])
            client.terminate(job["jobId"], "spotfit asked twice at the same time; the older stays")

    def _refusal(self, jobs: list[dict[str, Any]]) -> str:
        dwell_s, now_ms = self.options.dwell_s, clocks.wall_ms()
        reasons = (states.waits_for(job, now_ms=now_ms, dwell_s=dwell_s) for job in jobs)
        return next(filter(None, reasons), "")


def _parts(queue: str) -> tuple[str, str]:
    """Region and name of 'spot', 'eu-west-1:spot' or an ARN."""
    if queue.startswith("arn:"):
        return queue.split(":")[3], queue
    region, _, name = queue.rpartition(":")
    return region, name


@cache
def _client_of(region: str, endpoint: str) -> BatchClient:
    return BatchClient(region, endpoint)
