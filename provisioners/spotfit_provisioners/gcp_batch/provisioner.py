"""`GcpBatchProvisioner`: submit, observe and cancel groups as Google Cloud Batch jobs."""

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
    missing_group_status,
)
from spotfit.provision.api import AccountCheck, MachineOutput, Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.gcp_batch import checkup, offers, render, states
from spotfit_provisioners.gcp_batch.client import GcpBatchClient, GcpRestClient
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.prices.cache import PriceCache

_ENDED_STATES = ("SUCCEEDED", "CANCELLED", "CANCELLATION_IN_PROGRESS", "DELETION_IN_PROGRESS")


class GcpBatchProvisioner:
    """A group is one job named after its token, with one task per machine, each on its own VM."""

    name = render.BACKEND
    Options: ClassVar = GcpBatchOptions
    network_options: ClassVar = ("project", "region", "network")

    def __init__(self, options: GcpBatchOptions) -> None:
        self.options = options
        self._prices = PriceCache()

    @classmethod
    def with_options(cls, **options: Any) -> GcpBatchProvisioner:
        """Construct from the fields of `GcpBatchOptions`."""
        return cls(GcpBatchOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.max_nodes(self.options),
            notice_s=self.options.notice_s,
            requeues_itself=self.options.max_retries > 0,
            observe_interval_s=10.0,
            # https://google.aip.dev/121 requires that a Get shows a completed Create, but Batch
            # does not promise it, and its tasks appear later than the job.
            read_lag_s=60.0,
            notice_sources=("gcp", "signal"),
            shared_directories="never",
            keeps_output=self.options.cloud_logging,
            software=images.parse_image_software(self.options.image),
        )

    def open_client(self) -> None:
        """Import Google's client library and read the default credentials and project."""
        self._client()

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Create the job. Never returns a refusal: Batch queues the job until it has capacity."""
        client = self._client()
        environment = launch.environment_for(
            plan.token, 0, plan.slots_per_node, node_index_variable=render.TASK_INDEX_VARIABLE
        )
        # Derived from the token, so that a repeated call finds the job of the first one.
        job_id = render.job_id(plan.token)
        client.create_job(
            job_id, render.job_request(plan, environment), request_id=render.request_id(plan.token)
        )
        return self._handle(plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the job whose id is derived from the token."""
        is_known = self._client().find_job(render.job_id(plan.token)) is not None
        return self._handle(plan) if is_known else None

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        client, name = self._client(), render.job_id(plan.token)
        detail = {"nodes": plan.num_nodes, "project": client.project, "region": client.region}
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=name,
            detail=detail,
            offer=render.granted_offer(plan.body, self.options),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        client, count = self._client_for_handle(handle), int(handle.detail["nodes"])
        job = client.find_job(handle.name)
        if job is None:
            return missing_group_status(count, "Google Cloud Batch does not know the job")
        tasks = client.list_tasks(handle.name)
        nodes = tuple(states.node_status(job, tasks.get(number)) for number in range(count))
        # The last event of a job whose tasks all run does not explain anything.
        waiting = any(node.state == NodeState.WAITING for node in nodes)
        return GroupStatus(nodes=nodes, refusal=states.pending_reason(job) if waiting else "")

    def cancel(self, handle: GroupHandle) -> None:
        """Cancel the job without deleting it."""
        # Deleting would free the id, and a delayed submission would create the group again.
        client = self._client_for_handle(handle)
        job = client.find_job(handle.name)
        # Also if a read does not show the job (yet).
        if job is None or job["status"]["state"] not in _ENDED_STATES:
            client.cancel_job(handle.name)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output of every attempt from Cloud Logging, which lags by some seconds."""
        client = self._client_for_handle(handle)
        job = client.find_job(handle.name)
        if job is None:
            return []
        entries = GcpRestClient(self.options.endpoint).read_task_logs(
            client.project, job["uid"], node, max_lines
        )
        source = f"Cloud Logging, labels.task_id:{job['uid']}-group0-{node}/"
        return [MachineOutput(f"{source}{retry}", tuple(lines)) for retry, lines in entries.items()]

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check credentials, region, machines, permissions, quotas, the network and the image."""
        yield from checkup.check_account(self.options, self._client, storage)

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return the offers of the zones, with the prices of the machine type."""
        services = GcpRestClient(self.options.endpoint)
        return offers.list_offers(request, self.options, self._prices, services)

    def _client(self) -> GcpBatchClient:
        return _client_for_region(self.options.project, self.options.region, self.options.endpoint)

    def _client_for_handle(self, handle: GroupHandle) -> GcpBatchClient:
        # Of the handle: the options of this process may select another project or region.
        detail = handle.detail
        return _client_for_region(detail["project"], detail["region"], self.options.endpoint)


# Cached for the process: reading the default credentials takes files or a metadata server.
@cache
def _client_for_region(project: str, region: str, endpoint: str) -> GcpBatchClient:
    return GcpBatchClient(project, region, endpoint)
