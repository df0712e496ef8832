"""The four verbs on Azure Batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from spotfit.core.errors import ProvisionError
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
from spotfit_provisioners.azure_batch import checkup, render, states
from spotfit_provisioners.azure_batch.client import BatchClient, Management
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.kit import images

_OVER = ("terminating", "completed", "deleting")


class AzureBatchProvisioner:
    """A group is one job, named after its token: one task for each machine, alone on a spot node
    of a pool that all groups share."""

    name = render.BACKEND
    Options: ClassVar = AzureBatchOptions

    def __init__(self, options: AzureBatchOptions) -> None:
        self.options = options

    @classmethod
    def with_options(cls, **options: Any) -> AzureBatchProvisioner:
        """From the fields of `AzureBatchOptions`."""
        return cls(AzureBatchOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=self.options.most_nodes,
            notice_s=30.0,
            requeues_itself=True,
            observe_s=10.0,
            notices=("azure", "signal"),
            keeps_output=True,
            runs=images.software(self.options.image),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """The pool first, if it is not there; then the job and its tasks, which wait for nodes."""
        client = self._client()
        pool_id = plan.body["job"]["poolInfo"]["poolId"]
        pool = client.pool(pool_id)
        if pool is None:
            self._make(pool_id, plan)
        elif pool["state"] == "deleting":
            return Refusal(f"the pool {pool_id} is being deleted")
        tasks = [
            render.task(plan, number, launch.environment(plan.token, number, plan.slots))
            for number in range(plan.nodes)
        ]
        client.create(plan.body["job"], tasks)
        detail = {"nodes": plan.nodes, "pool": pool_id, "endpoint": self.options.endpoint}
        return GroupHandle(plan.token, self.name, plan.body["job"]["id"], detail)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        client, count = self._client(), int(handle.detail["nodes"])
        job = client.job(handle.name)
        if job is None:
            return gone(count, "Azure Batch does not remember it")
        tasks, nodes = client.tasks(handle.name), client.nodes(handle.detail["pool"])
        told = tuple(states.status(job, tasks.get(str(n)), nodes) for n in range(count))
        waiting = any(node.state == NodeState.WAITING for node in told)
        pool = client.pool(handle.detail["pool"]) if waiting else None
        return GroupStatus(told, states.waits_for(pool, [*nodes.values()]) if waiting else "")

    def cancel(self, handle: GroupHandle) -> None:
        """Never deletes: as long as the job is known, its id cannot be used again."""
        client = self._client()
        job = client.job(handle.name)
        if job is not None and job["state"] not in _OVER:
            client.terminate(handle.name)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """From the node itself: what is gone with its node nobody can tell any more."""
        client, names = self._client(), ("stdout.txt", "stderr.txt")
        told = {name: client.printed(handle.name, str(node), name, last) for name in names}
        where = f"{handle.name}/{node}"
        return [Said(f"{where}/{name}", lines) for name, lines in told.items() if lines]

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """Who we are, the pool, the account's quotas, the nodes' identity and our rights."""
        yield from checkup.examine(self.options, self._client)

    def _make(self, pool_id: str, plan: GroupPlan) -> None:
        if "pool" not in plan.body:
            raise ProvisionError(f"There is no pool {pool_id!r}.", do=checkup.NO_POOL)
        Management(self.options.management).make(**plan.body["pool"])

    def _client(self) -> BatchClient:
        return _client_at(self.options.endpoint)


@cache
def _client_at(endpoint: str) -> BatchClient:
    return BatchClient(endpoint)
