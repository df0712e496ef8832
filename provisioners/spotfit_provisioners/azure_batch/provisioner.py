"""`AzureBatchProvisioner`: submit, observe and cancel groups as Azure Batch jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

from spotfit.core.errors import ProvisionError, ProvisionPermissionError
from spotfit.host import log
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    missing_group_status,
)
from spotfit.provision.api import AccountCheck, MachineOutput, Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.azure_batch import checkup, offers, render, states
from spotfit_provisioners.azure_batch.client import AzureBatchClient, AzureResourceManagerClient
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.prices.cache import PriceCache

_ENDED_STATES = ("terminating", "completed", "deleting")


class AzureBatchProvisioner:
    """A group is one job named after its token, with one task per machine.

    Each task has a node of its own, in the pool of its market, which all groups share.
    """

    name = render.BACKEND
    Options: ClassVar = AzureBatchOptions
    network_options: ClassVar = ("subnet",)

    def __init__(self, options: AzureBatchOptions) -> None:
        self.options = options
        self._prices = PriceCache()

    @classmethod
    def with_options(cls, **options: Any) -> AzureBatchProvisioner:
        """Construct from the fields of `AzureBatchOptions`."""
        return cls(AzureBatchOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=self.options.max_nodes,
            # https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: 'Preempt'
            notice_s=30.0,
            requeues_itself=True,
            observe_interval_s=10.0,
            # The REST reference promises nothing about reads after writes.
            read_lag_s=60.0,
            notice_sources=("azure", "signal"),
            # They may mount a file share.
            shared_directories="possibly" if self.options.container_options else "never",
            keeps_output=True,
            software=images.parse_image_software(self.options.image),
        )

    def open_client(self) -> None:
        """Import Azure's client libraries. Sends no request."""
        self._client()

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Create the pool if it is missing, then the job and its tasks, which wait for nodes."""
        if "unreachable_network" in plan.body:
            network = plan.body["unreachable_network"]
            return Refusal(
                f"the run's machines are in the pool {network}, which nodes of another pool can "
                "reach only through a subnet"
            )
        client = self._client()
        pool_id = plan.body["job"]["poolInfo"]["poolId"]
        pool = client.find_pool(pool_id)
        if pool is None and "pool" not in plan.body:
            raise ProvisionError(
                f"The Batch pool {pool_id!r} does not exist.", do=checkup.REMEDY_NO_POOL
            )
        # Batch accepts no jobs for a pool that is being deleted, and its name is not free yet.
        if pool is None:
            self._create_pool(plan.body["pool"])
        elif pool["state"] == "deleting":
            return Refusal(f"the pool {pool_id} is being deleted")
        if "other_pool" in plan.body:
            self._prepare_other_pool(plan.body["other_pool"])
        tasks = [
            render.task_request(
                plan, number, launch.environment_for(plan.token, number, plan.slots_per_node)
            )
            for number in range(plan.num_nodes)
        ]
        client.create_job(plan.body["job"], tasks)
        return self._handle(plan)

    def _create_pool(self, pool: Mapping[str, Any]) -> None:
        AzureResourceManagerClient(self.options.management_endpoint).create_if_absent(**pool)

    def _prepare_other_pool(self, pool: Mapping[str, Any]) -> None:
        """Create the pool of the other market, empty, if it is missing and the caller may."""
        if self._client().find_pool(pool["path"].rpartition("/")[2]) is None:
            try:
                self._create_pool(pool)
            except ProvisionPermissionError as error:  # as on a machine
                log.info("azure_batch.other_pool_not_created", reason=str(error))

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the job of the plan's id."""
        is_known = self._client().find_job(plan.body["job"]["id"]) is not None
        return self._handle(plan) if is_known else None

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        job = plan.body["job"]
        detail = {
            "nodes": plan.num_nodes,
            "pool": job["poolInfo"]["poolId"],
            "endpoint": self.options.endpoint,
        }
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=job["id"],
            detail=detail,
            network=render.network_of_pool(detail["pool"], self.options),
            offer=render.granted_offer(detail["pool"], self.options),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        client, count = self._client(), int(handle.detail["nodes"])
        job = client.find_job(handle.name)
        if job is None:
            return missing_group_status(count, "Azure Batch does not know the job")
        tasks, nodes = client.list_tasks(handle.name), client.list_nodes(handle.detail["pool"])
        statuses = tuple(states.node_status(job, tasks.get(str(n)), nodes) for n in range(count))
        # The pool is read only for the reason of waiting: one request less for a running group.
        if not any(node.state == NodeState.WAITING for node in statuses):
            return GroupStatus(nodes=statuses)
        pool = client.find_pool(handle.detail["pool"])
        return GroupStatus(nodes=statuses, refusal=states.pending_reason(pool, [*nodes.values()]))

    def cancel(self, handle: GroupHandle) -> None:
        """Terminate the job without deleting it."""
        # Deleting would free the id, and a delayed submission would create the group again.
        client = self._client()
        job = client.find_job(handle.name)
        # Also if a read does not show the job (yet).
        if job is None or job["state"] not in _ENDED_STATES:
            client.terminate_job(handle.name)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output from the node itself; it is lost with the node."""
        # The names that Batch gives the files of every task.
        client, names = self._client(), ("stdout.txt", "stderr.txt")
        files = {
            name: client.read_task_file(handle.name, str(node), name, max_lines) for name in names
        }
        task = f"{handle.name}/{node}"
        return [MachineOutput(f"{task}/{name}", lines) for name, lines in files.items() if lines]

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check access, the pool, the account, quotas, the nodes' identity and permissions."""
        yield from checkup.check_account(self.options, self._client)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of the VM size; the size of the request does not matter."""
        return offers.list_offers(self.options, self._prices)

    def _client(self) -> AzureBatchClient:
        return _client_for_endpoint(self.options.endpoint)


# Cached for the process: the client keeps the token of the account and its connections.
@cache
def _client_for_endpoint(endpoint: str) -> AzureBatchClient:
    return AzureBatchClient(endpoint)
