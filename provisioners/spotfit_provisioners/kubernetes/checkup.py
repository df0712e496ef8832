"""Account checks of the Kubernetes backend: namespace, RBAC, referenced objects and admission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.api import AccountCheck, CheckSkippedError, run_check, skip_if_denied
from spotfit_provisioners.kubernetes import render
from spotfit_provisioners.kubernetes.client import KubernetesClient, KubernetesPermission
from spotfit_provisioners.kubernetes.offers import list_offers
from spotfit_provisioners.kubernetes.options import KubernetesOptions

PROVISION_PERMISSIONS = (
    KubernetesPermission("create", "batch", "jobs"),
    KubernetesPermission("get", "batch", "jobs"),
    KubernetesPermission("delete", "batch", "jobs"),
    KubernetesPermission("list", "", "pods"),
    KubernetesPermission("list", "", "events"),
    KubernetesPermission("get", "", "pods", subresource="log"),
    KubernetesPermission("create", "", "secrets"),
    KubernetesPermission("patch", "", "secrets"),
    KubernetesPermission("delete", "", "secrets"),
    KubernetesPermission("create", "", "services"),
    KubernetesPermission("patch", "", "services"),
    KubernetesPermission("delete", "", "services"),
)
"""Permissions of the caller, and of the agents, which submit replacements."""

CREATE_PODS_PERMISSION = KubernetesPermission("create", "", "pods")
"""Lets the doctor send a pod as a dry run. Runs do not need it: the Job controller creates pods."""

READ_NODES_PERMISSION = KubernetesPermission("get", "", "nodes", is_cluster_wide=True)
"""Lets agents read the taints of their node. Without it SIGTERM is their only notice."""

_REQUEST = GroupRequest(
    token=Token("t-checkup"), num_workers=1, total_workers=1, run_name="checkup"
)

_REMEDY_BIND_ROLE = "Bind the role in infra/terraform/modules/kubernetes to"


def check_account(
    options: KubernetesOptions, open_client: Callable[[], KubernetesClient]
) -> Iterator[AccountCheck]:
    """Run all checks; without a configured cluster only the first one."""
    clients: list[KubernetesClient] = []

    def connect() -> str:
        clients.append(open_client())
        return f"namespace {clients[-1].namespace}"

    yield run_check("a cluster is configured", connect)
    for cluster in clients:
        yield from _check_cluster(cluster, options)


def _check_cluster(cluster: KubernetesClient, options: KubernetesOptions) -> Iterator[AccountCheck]:
    yield run_check(
        f"the namespace {cluster.namespace} exists",
        lambda: _check_exists(
            cluster,
            "Namespace",
            name=cluster.namespace,
            do=f"Run `kubectl create namespace {cluster.namespace}`, or correct "
            "KubernetesOptions(namespace=…).",
        ),
    )
    # One check each: administrators of a cluster grant verbs and resources separately.
    for permission in PROVISION_PERMISSIONS:
        yield run_check(
            f"the caller may {permission.description}",
            partial(_check_own_permission, cluster, permission),
        )
    account = options.service_account or "default"
    user = f"system:serviceaccount:{cluster.namespace}:{account}"  # its user name in RBAC
    yield run_check("agents may rent machines", lambda: _check_agent_permissions(cluster, user))
    yield run_check("agents get preemption notices", lambda: _check_taint_access(cluster, user))
    for kind, name, do in _referenced_objects(options):
        yield run_check(
            f"the {kind} {name} exists",
            lambda k=kind, n=name, d=do: _check_exists(cluster, k, name=n, do=d),  # type: ignore[misc]
        )
    yield run_check("a Job is admitted", lambda: _check_job_admission(cluster, _REQUEST, options))
    yield run_check("its pods are admitted", lambda: _check_pod_admission(cluster, options))
    spot_and_on_demand = list_offers(options).offers
    if len(spot_and_on_demand) > 1:
        request = replace(_REQUEST, offer=spot_and_on_demand[-1])
        yield run_check(
            "a Job on on-demand nodes is admitted",
            lambda: _check_job_admission(cluster, request, options),
        )


def _referenced_objects(options: KubernetesOptions) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and remedy of each object that the options refer to."""
    if options.service_account:
        do = f"`kubectl create serviceaccount {options.service_account}`, or correct the option."
        yield "ServiceAccount", options.service_account, do
    for name in options.image_pull_secrets:
        do = f"Run `kubectl create secret docker-registry {name} …`."
        yield "Secret", name, do
    if options.priority_class:
        yield "PriorityClass", options.priority_class, "`kubectl get priorityclasses` lists all."


def _check_own_permission(cluster: KubernetesClient, permission: KubernetesPermission) -> None:
    if not cluster.is_allowed(permission):
        raise ProvisionPermissionError(
            f"The caller may not {permission.description} in the namespace {cluster.namespace} "
            "(RBAC).",
            do=f"{_REMEDY_BIND_ROLE} the caller.",
        )


def _check_agent_permissions(cluster: KubernetesClient, user: str) -> str:
    """Raise `ProvisionPermissionError` naming all missing permissions of the service account."""
    with skip_if_denied():
        missing = [
            permission.description
            for permission in PROVISION_PERMISSIONS
            if not cluster.is_allowed(permission, user)
        ]
    if missing:
        raise ProvisionPermissionError(
            f"The agents' service account {user} may not {', '.join(missing)}.",
            do=f"{_REMEDY_BIND_ROLE} {user}.",
        )
    return user


def _check_taint_access(cluster: KubernetesClient, user: str) -> str:
    # Optional: node taints precede the SIGTERM of the pods by some seconds.
    with skip_if_denied():
        can_read_nodes = cluster.is_allowed(READ_NODES_PERMISSION, user)
    if can_read_nodes:
        return "from node taints and SIGTERM"
    return "from SIGTERM; `reads_nodes` of infra/terraform/modules/kubernetes adds earlier notices"


def _check_exists(cluster: KubernetesClient, kind: str, *, name: str, do: str) -> None:
    with skip_if_denied():
        exists = cluster.exists(kind, name)
    if not exists:
        raise ConfigError(f"The {kind} {name} does not exist in the cluster.", do=do)


def _check_job_admission(
    cluster: KubernetesClient, request: GroupRequest, options: KubernetesOptions
) -> str:
    """Send a Job as a dry run, which checks quotas, policies and webhooks."""
    cluster.dry_run(render.plan(request, options).body)
    return "a dry run of one machine is admitted"


def _check_pod_admission(cluster: KubernetesClient, options: KubernetesOptions) -> str:
    """Send a pod as a dry run: Pod Security Admission and most quotas apply to pods only."""
    if not cluster.is_allowed(CREATE_PODS_PERMISSION):
        raise CheckSkippedError(
            "the caller may not create pods, so whether the Pod Security Standard and the quotas "
            "of the namespace admit them is not determined"
        )
    cluster.dry_run(render.pod_manifest(render.plan(_REQUEST, options)))
    return f"a dry run of one pod is admitted, with pod_security={options.pod_security!r}"
