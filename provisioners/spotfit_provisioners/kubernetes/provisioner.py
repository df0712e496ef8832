"""The four verbs on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, gone
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding
from spotfit.provision.launch import Launch
from spotfit.provision.output import Said
from spotfit_provisioners.kit import images
from spotfit_provisioners.kubernetes import checkup, render, states
from spotfit_provisioners.kubernetes.client import Cluster, open_cluster
from spotfit_provisioners.kubernetes.options import KubernetesOptions

_TOLD_LATE_S = 90.0
"""A node is called silent after 40 s, or 50 s since Kubernetes 1.32, and then its pods are:
https://kubernetes.io/docs/reference/command-line-tools-reference/kube-controller-manager/
(--node-monitor-grace-period)."""


class KubernetesProvisioner:
    """A group is one indexed Job; the name of everything that belongs to it is its token."""

    name = render.BACKEND
    Options: ClassVar = KubernetesOptions

    def __init__(self, options: KubernetesOptions) -> None:
        self.options = options

    @classmethod
    def with_options(cls, **options: Any) -> KubernetesProvisioner:
        """From the fields of `KubernetesOptions`."""
        return cls(KubernetesOptions(**options))

    @property
    def traits(self) -> Traits:
        return Traits(
            max_nodes=render.MAX_NODES,
            notice_s=self.options.stays_s,
            requeues_itself=True,
            observe_s=5.0,
            told_late_s=_TOLD_LATE_S,
            notices=("signal", "kubernetes", "machine"),
            keeps_output=True,
            runs=images.software(self.options.image),
        )

    def plan(self, request: GroupRequest) -> GroupPlan:
        return render.plan(request, self.options)

    def submit(self, plan: GroupPlan, launch: Launch) -> GroupHandle | Refusal:
        """The Secret and the Service first, then the Job that owns them: its name is the token."""
        cluster = self._cluster()
        environment = launch.environment(plan.token, 0, plan.slots, node_from=render.INDEX)
        cluster.create("Secret", render.secret(plan, environment))
        cluster.create("Service", render.service(plan))
        job = cluster.create("Job", plan.body) or cluster.job(plan.token)
        if job is not None:  # one that was there before may have been left without its Secret
            cluster.own(job)
        detail = {"nodes": plan.nodes, "namespace": cluster.namespace}
        return GroupHandle(plan.token, self.name, plan.token, detail)

    def observe(self, handle: GroupHandle) -> GroupStatus:
        cluster = self._cluster(handle.detail["namespace"])
        job = cluster.job(handle.name)
        if job is None or job["metadata"].get("deletionTimestamp"):
            return gone(int(handle.detail["nodes"]), "the cluster has no such Job")
        pods = cluster.pods(handle.name)
        complaint = cluster.complaint(handle.name) if states.lacks_pods(job, pods) else ""
        return states.group(job, pods, complaint)

    def cancel(self, handle: GroupHandle) -> None:
        self._cluster(handle.detail["namespace"]).delete(handle.name)

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        """Pod by pod, for as long as the cluster keeps them."""
        cluster = self._cluster(handle.detail["namespace"])
        pods = states.of_index(cluster.pods(handle.name), node)
        names = [str(pod["metadata"]["name"]) for pod in pods]
        return [Said(f"pod {name}", cluster.printed(name, last)) for name in names]

    def examine(self, storage: str = "") -> Iterator[Finding]:
        """Where we would go, every right that is needed there, and whether a Job would be taken."""
        yield from checkup.examine(self.options, self._cluster)

    def _cluster(self, namespace: str = "") -> Cluster:
        chosen = namespace or self.options.namespace
        return open_cluster(self.options.server, self.options.context, chosen)
