"""What a cluster must let us do, looked at one by one, and how to mend what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.checkup import Finding, look, unseen_if_refused
from spotfit_provisioners.kubernetes import render
from spotfit_provisioners.kubernetes.client import Cluster, Right
from spotfit_provisioners.kubernetes.options import KubernetesOptions

RENTS = (
    Right("create", "batch", "jobs"),
    Right("get", "batch", "jobs"),
    Right("delete", "batch", "jobs"),
    Right("list", "", "pods"),
    Right("list", "", "events"),
    Right("get", "", "pods", part="log"),
    Right("create", "", "secrets"),
    Right("patch", "", "secrets"),
    Right("delete", "", "secrets"),
    Right("create", "", "services"),
    Right("patch", "", "services"),
    Right("delete", "", "services"),
)
"""What whoever asks for machines does: we, and the agents when nobody else is awake."""

SEES_TAINTS = Right("get", "", "nodes", everywhere=True)
"""Without it agents hear of their node's end by SIGTERM only."""

_BIND = "Bind the role in infra/terraform/modules/kubernetes to"


def examine(options: KubernetesOptions, open_: Callable[[], Cluster]) -> Iterator[Finding]:
    """Where we would go, what we may do there, what the agents may, and a Job that is not kept."""
    opened: list[Cluster] = []

    def place() -> str:
        opened.append(open_())
        return f"namespace {opened[-1].namespace}"

    yield look("a cluster can be asked", place)
    for cluster in opened:
        yield from _of(cluster, options)


def _of(cluster: Cluster, options: KubernetesOptions) -> Iterator[Finding]:
    yield look(
        f"the namespace {cluster.namespace} is there",
        lambda: _there(
            cluster,
            "Namespace",
            cluster.namespace,
            f"`kubectl create namespace {cluster.namespace}`.",
        ),
    )
    for right in RENTS:
        yield look(f"we may {right.told}", lambda r=right: _ours(cluster, r))  # type: ignore[misc]
    yield from _agents(cluster, options)
    for kind, name, do in _named(options):
        yield look(
            f"the {kind} {name} is there",
            lambda k=kind, n=name, d=do: _there(cluster, k, n, d),  # type: ignore[misc]
        )
    yield look("a Job would be taken", lambda: _try(cluster, options))


def _agents(cluster: Cluster, options: KubernetesOptions) -> Iterator[Finding]:
    name = options.service_account or "default"
    who = f"system:serviceaccount:{cluster.namespace}:{name}"
    yield look("agents may rent machines", lambda: _theirs(cluster, who))
    yield look("agents hear of the end of their node", lambda: _taints(cluster, who))


def _named(options: KubernetesOptions) -> Iterator[tuple[str, str, str]]:
    """What the options name and the cluster must have: its kind, its name, how to get it."""
    if options.service_account:
        do = f"`kubectl create serviceaccount {options.service_account}`, or correct the option."
        yield "ServiceAccount", options.service_account, do
    for name in options.image_pull_secrets:
        do = f"`kubectl create secret docker-registry {name} …`."
        yield "Secret", name, do
    if options.priority_class:
        yield "PriorityClass", options.priority_class, "`kubectl get priorityclasses` tells all."


def _ours(cluster: Cluster, right: Right) -> None:
    if not cluster.may(right):
        raise ProvisionPermissionError(
            f"The cluster says no in namespace {cluster.namespace}.", do=f"{_BIND} whoever asks."
        )


def _theirs(cluster: Cluster, who: str) -> str:
    """Raises `ProvisionPermissionError` for all the rights that account lacks."""
    with unseen_if_refused():
        lacking = [right.told for right in RENTS if not cluster.may(right, who)]
    if lacking:
        raise ProvisionPermissionError(f"{who} may not {', '.join(lacking)}.", do=f"{_BIND} {who}.")
    return who


def _taints(cluster: Cluster, who: str) -> str:
    """By its taints, before their pods get SIGTERM, if they may look: a nicety, no need."""
    with unseen_if_refused():
        early = cluster.may(SEES_TAINTS, who)
    if early:
        return "by its taints, and by SIGTERM"
    return "by SIGTERM; `reads_nodes` of infra/terraform/modules/kubernetes lets them look earlier"


def _there(cluster: Cluster, kind: str, name: str, do: str) -> None:
    with unseen_if_refused():
        there = cluster.has(kind, name)
    if not there:
        raise ConfigError(f"There is no {kind} {name}.", do=do)


def _try(cluster: Cluster, options: KubernetesOptions) -> str:
    """The cluster's own admission: quotas, policies and webhooks. Nothing is kept."""
    request = GroupRequest(Token("t-checkup"), 1, 1, run_name="checkup")
    cluster.would_take(render.plan(request, options).body)
    return "a dry run of one machine is admitted"
