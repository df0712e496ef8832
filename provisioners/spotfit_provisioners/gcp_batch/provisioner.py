"""The four verbs on Google Cloud Batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    gone,
)
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said
from spotfit_provisioners.gcp_batch import checkup, render, states
from spotfit_provisioners.gcp_batch.client import BatchClient, Services
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.kit import images

_ENDED = ("SUCCEEDED", "CANCELLED", "CANCELLATION_IN_PROGRESS", "DELETION_IN_PROGRESS")


class GcpBatchProvisioner:
    """A group is one job, named after its token: one task for each machine, alone on a Spot VM."""

    name = render.BACKEND
    Options: ClassVar = GcpBatchOptions

    def __init__(self, options: GcpBatchOptions) -> None:
        self.options = options

    @classmethod
    def with_options(cls, **options: Any) -> GcpBatchProvisioner:
        """From the fields of `GcpBatchOptions`."""
        return cls(GcpBatchOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.max_nodes(self.options),
            notice_s=self.options.notice_s,
            requeues_itself=self.options.retries > 0,
            observe_s=10.0,
            notices=("gcp", "signal"),
            keeps_output=self.options.logs,
            runs=images.software(self.options.image),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """Never a refusal: Batch queues the job for days, and `observe` tells why it waits."""
        client = self._client()
        environment = launch.environment(plan.token, 0, plan.slots, node_from=render.TASK_INDEX)
        job_id = render.job_id(plan.token)
        client.create(
            job_id, render.job(plan, environment), request_id=render.request_id(plan.token)
        )
        detail = {"nodes": plan.nodes, "project": client.project, "region": client.region}
        return GroupHandle(plan.token, self.name, job_id, detail)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        client, count = self._client_of(handle), int(handle.detail["nodes"])
        job = client.job(handle.name)
        if job is None:
            return gone(count, "Google Cloud Batch does not remember it")
        tasks = client.tasks(handle.name)
        nodes = tuple(states.status(job, tasks.get(number)) for number in range(count))
        waiting = any(node.state == NodeState.WAITING for node in nodes)
        return GroupStatus(nodes, states.waits_for(job) if waiting else "")

    def cancel(self, handle: GroupHandle) -> None:
        """Never deletes: as long as the job is known, its id cannot be used again."""
        client = self._client_of(handle)
        job = client.job(handle.name)
        if job is not None and job["status"]["state"] not in _ENDED:
            client.cancel(handle.name)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """Try by try, from Cloud Logging, which is some seconds late."""
        client = self._client_of(handle)
        job = client.job(handle.name)
        if job is None:
            return []
        entries = Services(self.options.endpoint).printed(client.project, job["uid"], node, last)
        where = f"Cloud Logging, labels.task_id:{job['uid']}-group0-{node}/"
        return [Said(f"{where}{retry}", tuple(lines)) for retry, lines in entries.items()]

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """Who we are, the region, our rights, whom we would let agents be, and the image."""
        yield from checkup.examine(self.options, self._client)

    def _client(self) -> BatchClient:
        return _client_in(self.options.project, self.options.region, self.options.endpoint)

    def _client_of(self, handle: GroupHandle) -> BatchClient:
        detail = handle.detail
        return _client_in(detail["project"], detail["region"], self.options.endpoint)


@cache
def _client_in(project: str, region: str, endpoint: str) -> BatchClient:
    return BatchClient(project, region, endpoint)
