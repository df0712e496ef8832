"""The four verbs on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from spotfit.core.errors import ProvisionPermissionError
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, gone
from spotfit.provision.api import Refusal, Traits
from spotfit.provision.checkup import Finding, look
from spotfit.provision.launch import Launch
from spotfit_provisioners.kit import images
from spotfit_provisioners.kubernetes import render, states
from spotfit_provisioners.kubernetes.client import Cluster, open_cluster
from spotfit_provisioners.kubernetes.options import KubernetesOptions

_RIGHTS = (
    ("create", "batch", "jobs"),
    ("get", "batch", "jobs"),
    ("delete", "batch", "jobs"),
    ("list", "", "pods"),
    ("create", "", "secrets"),
    ("patch", "", "secrets"),
    ("delete", "", "secrets"),
    ("create", "", "services"),
    ("patch", "", "services"),
    ("delete", "", "services"),
)


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
            notice_s=self.options.grace_s,
            requeues_itself=True,
            observe_s=5.0,
            notices=("signal", "kubernetes"),
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
        return states.group(job, cluster.pods(handle.name))

    def cancel(self, handle: GroupHandle) -> None:
        self._cluster(handle.detail["namespace"]).delete(handle.name)

    def examine(self) -> Iterator[Finding]:
        """Where we would go, and every right that is needed there."""
        yield look("a cluster can be asked", lambda: f"namespace {self._cluster().namespace}")
        for verb, group, resource in _RIGHTS:
            yield look(
                f"we may {verb} {resource}",
                lambda v=verb, g=group, r=resource: self._check(v, g, r),  # type: ignore[misc]
            )

    def _check(self, verb: str, group: str, resource: str) -> None:
        if not self._cluster().may(verb, group, resource):
            raise ProvisionPermissionError(
                "The cluster says no.",
                do="Bind the role in infra/terraform/modules/kubernetes to whoever asks.",
            )

    def _cluster(self, namespace: str = "") -> Cluster:
        chosen = namespace or self.options.namespace
        return open_cluster(self.options.server, self.options.context, chosen)
