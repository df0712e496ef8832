"""`KubernetesProvisioner`: submit, observe and cancel groups as indexed Jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from spotfit.host import system
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    missing_group_status,
)
from spotfit.provision.api import AccountCheck, MachineOutput, Refusal, Traits
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.kubernetes import checkup, offers, render, states
from spotfit_provisioners.kubernetes.client import KubernetesClient, open_kubernetes_client
from spotfit_provisioners.kubernetes.options import KubernetesOptions

# The node controller marks a node as unreachable after 40 s (50 s since Kubernetes 1.32), and then
# its pods as not ready; the rest is a margin. See --node-monitor-grace-period in
# https://kubernetes.io/docs/reference/command-line-tools-reference/kube-controller-manager/
_STATUS_LAG_S = 90.0


class KubernetesProvisioner:
    """A group is one indexed Job. The Job, its Secret and its Service are named after the token."""

    name = render.BACKEND
    Options: ClassVar = KubernetesOptions
    network_options: ClassVar = ("context", "server")

    def __init__(self, options: KubernetesOptions) -> None:
        self.options = options

    @classmethod
    def with_options(cls, **options: Any) -> KubernetesProvisioner:
        """Construct from the fields of `KubernetesOptions`."""
        return cls(KubernetesOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.MAX_NODES,
            notice_s=self.options.termination_grace_s,
            requeues_itself=True,
            observe_interval_s=5.0,
            status_lag_s=_STATUS_LAG_S,
            # Reads without a resource version show every completed write:
            # https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
            read_lag_s=0.0,
            notice_sources=("signal", "kubernetes", "machine"),
            shared_directories="never",
            keeps_output=True,
            software=images.parse_image_software(self.options.image),
        )

    def offers(self, request: GroupRequest) -> OfferListing:
        """Return a spot and an on-demand offer, with the prices of the option `prices`."""
        return offers.list_offers(self.options, now_s=system.wall_ms() / 1000)

    def open_client(self) -> None:
        """Import the Kubernetes client and read its configuration. Sends no request."""
        self._client()

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Create the Secret and the Service, then the Job that owns them."""
        cluster = self._client()
        environment = launch.environment_for(
            plan.token, 0, plan.slots_per_node, node_index_variable=render.INDEX_VARIABLE
        )
        # The Job last: its pods refer to the Secret, and would not start without it.
        cluster.create("Secret", render.secret_manifest(plan, environment))
        cluster.create("Service", render.service_manifest(plan))
        job = cluster.create("Job", plan.body) or cluster.find_job(plan.token)
        # Also for an existing Job: an earlier submission may have been interrupted before this.
        if job is not None:
            cluster.set_owner(job)
        return self._handle(plan)

    def find_group(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | None:
        """Return the Job whose name is the token."""
        is_known = self._client().find_job(plan.token) is not None
        return self._handle(plan) if is_known else None

    def _handle(self, plan: GroupPlan) -> GroupHandle:
        detail = {"nodes": plan.num_nodes, "namespace": self._client().namespace}
        return GroupHandle(
            token=plan.token,
            provisioner=self.name,
            name=plan.token,
            detail=detail,
            offer=render.offer_name(plan, self.options),
        )

    def observe(self, handle: GroupHandle) -> GroupStatus:
        cluster = self._client(handle.detail["namespace"])
        job = cluster.find_job(handle.name)
        # A deleted Job exists until the garbage collector has deleted its pods.
        if job is None or job["metadata"].get("deletionTimestamp"):
            return missing_group_status(int(handle.detail["nodes"]), "the Job does not exist")
        pods = cluster.list_pods(handle.name)
        # Events are read only if they are needed: listing them is slow in large namespaces.
        creation_error = (
            cluster.last_pod_creation_error(handle.name)
            if states.has_missing_pods(job, pods)
            else ""
        )
        return states.group_status(job, pods, creation_error)

    def cancel(self, handle: GroupHandle) -> None:
        self._client(handle.detail["namespace"]).delete_job(handle.name)

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        """Return the output of every pod of the machine that the cluster still keeps."""
        cluster = self._client(handle.detail["namespace"])
        pods = states.pods_of_index(cluster.list_pods(handle.name), node)
        names = [str(pod["metadata"]["name"]) for pod in pods]
        return [
            MachineOutput(f"pod {name}", cluster.read_pod_log(name, max_lines)) for name in names
        ]

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        """Check the namespace, permissions, referenced objects, and admission of a Job."""
        yield from checkup.check_account(self.options, self._client)

    def _client(self, namespace: str = "") -> KubernetesClient:
        return open_kubernetes_client(
            self.options.server, self.options.context, namespace or self.options.namespace
        )
