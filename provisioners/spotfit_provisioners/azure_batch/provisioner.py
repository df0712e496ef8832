"""The four verbs on Azure Batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError, ProvisionError
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    gone,
)
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding, look
from spotfit.provision.launch import Launch
from spotfit_provisioners.azure_batch import render, states
from spotfit_provisioners.azure_batch.client import BatchClient, Management
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.kit import images

_OVER = ("terminating", "completed", "deleting")
_NO_POOL = (
    "Make it as docs/guides/azure_batch.md shows, or set account_id, vm_size and identity: then it "
    "is made when it is needed."
)


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

    def examine(self) -> Iterator[Finding]:
        """Who we are, then the pool."""
        where = f"jobs can be listed at {self.options.endpoint}"
        known = look(where, lambda: self._client().look_around())
        yield known
        if known.well:
            yield look("there is a pool of spot nodes that scales to zero", self._sound)

    def _make(self, pool_id: str, plan: GroupPlan) -> None:
        if "pool" not in plan.body:
            raise ProvisionError(f"There is no pool {pool_id!r}.", do=_NO_POOL)
        Management(self.options.management).make(**plan.body["pool"])

    def _sound(self) -> str:
        """What the pool is like. Raises `ConfigError` for what would keep groups waiting, or cost
        too much."""
        pool_id = render.pool_id(self.options)
        pool = self._client().pool(pool_id)
        if pool is None:
            if self.options.makes_pool:
                return f"{pool_id} will be made"
            raise ConfigError(f"There is no pool {pool_id!r}.", do=_NO_POOL)
        wrong = [what for what, well in _wishes(pool) if not well]
        if wrong:
            raise ConfigError(
                f"The pool {pool_id} {', '.join(wrong)}.",
                do="Make another one; docs/guides/azure_batch.md shows how.",
            )
        return f"{pool_id}: {pool['vmSize']}, {pool.get('currentLowPriorityNodes', 0)} nodes now"

    def _client(self) -> BatchClient:
        return _client_at(self.options.endpoint)


def _wishes(pool: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What is wrong with a pool, and whether it is not."""
    system = pool.get("virtualMachineConfiguration") or {}
    formula = pool.get("autoScaleFormula", "")
    yield "does not scale itself", bool(pool.get("enableAutoScale"))
    yield "has a formula without $TargetLowPriorityNodes", "$TargetLowPriorityNodes" in formula
    yield "does not let nodes reach each other", bool(pool.get("enableInterNodeCommunication"))
    yield "puts several tasks on a node", pool.get("taskSlotsPerNode", 1) == 1
    yield "runs no containers", bool(system.get("containerConfiguration"))
    yield "gives its nodes no identity", bool(pool.get("identity"))


@cache
def _client_at(endpoint: str) -> BatchClient:
    return BatchClient(endpoint)
