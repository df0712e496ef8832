"""Our request as an indexed Job with what belongs to it: pure, and pinned by golden files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND, Exit
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.kit.names import label
from spotfit_provisioners.kubernetes.options import KubernetesOptions

BACKEND = "kubernetes"
MAX_NODES = 10_000
CONTAINER = "agent"
INDEX = "JOB_COMPLETION_INDEX"
TOKEN_LABEL = "spotfit.dev/token"  # noqa: S105  # the name of a label
RUN_LABEL = "spotfit.dev/run"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"

_SPOT: Mapping[str, tuple[Mapping[str, str], tuple[Mapping[str, str], ...]]] = {
    "": ({}, ()),
    "eks": ({"eks.amazonaws.com/capacityType": "SPOT"}, ()),
    "karpenter": ({"karpenter.sh/capacity-type": "spot"}, ()),
    "gke": (
        {"cloud.google.com/gke-spot": "true"},
        (
            {
                "key": "cloud.google.com/gke-spot",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            },
        ),
    ),
    "aks": (
        {"kubernetes.azure.com/scalesetpriority": "spot"},
        (
            {
                "key": "kubernetes.azure.com/scalesetpriority",
                "operator": "Equal",
                "value": "spot",
                "effect": "NoSchedule",
            },
        ),
    ),
}
"""Labels and taints of spot nodes: EKS and Karpenter only label them."""

_FAILURE_RULES: tuple[Mapping[str, Any], ...] = (
    {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    },
    {
        "action": "Ignore",
        "onExitCodes": {
            "containerName": CONTAINER,
            "operator": "In",
            "values": [int(Exit.DRAINED)],
        },
    },
    {
        "action": "FailIndex",
        "onExitCodes": {
            "containerName": CONTAINER,
            "operator": "NotIn",
            "values": [int(Exit.DONE), int(Exit.DRAINED)],
        },
    },
)
"""A pod that was disrupted, or has drained, comes again and costs nothing; any other end is final
for its index, and leaves the others alone."""


def plan(request: GroupRequest, options: KubernetesOptions) -> GroupPlan:
    """The Job, all but the secret that its pods are given."""
    if not options.image:
        raise ConfigError(
            "KubernetesOptions(image=…) is missing.",
            do="Say it in the call, in SPOTFIT_KUBERNETES_IMAGE, or under [kubernetes] in "
            "spotfit.toml; worker_image/bake.sh makes one.",
        )
    hardware.check(request.resources_per_worker, backend="Kubernetes")
    slots = options.workers_per_node
    nodes = nodes_for(request, slots=slots, max_nodes=MAX_NODES, backend="Kubernetes")
    labels = {
        TOKEN_LABEL: request.token,
        RUN_LABEL: label(request.run_name or "run"),
        **options.labels,
    }
    return GroupPlan(request.token, BACKEND, nodes, slots, _job(request, options, nodes, labels))


def secret(plan: GroupPlan, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the pods find in their environment, apart from the Job that everybody may read."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": plan.token, "labels": plan.body["metadata"]["labels"]},
        "type": "Opaque",
        "stringData": dict(environment),
    }


def service(plan: GroupPlan) -> dict[str, Any]:
    """A name for every pod: <token>-<index>.<token>, from before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.token, "labels": plan.body["metadata"]["labels"]},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {TOKEN_LABEL: plan.token},
        },
    }


def _job(
    request: GroupRequest, options: KubernetesOptions, nodes: int, labels: Mapping[str, str]
) -> dict[str, Any]:
    kueue = {"kueue.x-k8s.io/queue-name": options.kueue_queue} if options.kueue_queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": request.token, "labels": {**labels, **kueue}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimitPerIndex": 0,
            "podFailurePolicy": {"rules": [dict(rule) for rule in _FAILURE_RULES]},
            "podReplacementPolicy": "Failed",
            **({"suspend": True} if kueue else {}),
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": _pod(request, options),
            },
        },
    }


def _pod(request: GroupRequest, options: KubernetesOptions) -> dict[str, Any]:
    selector, tolerations = _SPOT[options.flavour]
    memory = _memory_mib(request, options)
    shared = options.shared_memory_mib or memory // 2
    named = {
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "nodeSelector": {**selector, **options.node_selector},
        "tolerations": [dict(one) for one in (*tolerations, *options.tolerations)],
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    return {
        "restartPolicy": "Never",
        "subdomain": request.token,
        "terminationGracePeriodSeconds": int(options.stays_s),
        "containers": [_container(request, options)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared}Mi"}},
        ],
        **{name: value for name, value in named.items() if value},
    }


def _container(request: GroupRequest, options: KubernetesOptions) -> dict[str, Any]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.gpus(per_worker, slots)
    needs = {
        "cpu": str(hardware.cpus(per_worker, slots)),
        "memory": f"{_memory_mib(request, options)}Mi",
        **({options.gpu_resource: str(gpus)} if gpus else {}),
    }
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": list(COMMAND),
        "env": [
            {"name": "SPOTFIT_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "SPOTFIT_KUBERNETES_NODE",
                "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
            },
            {"name": "SPOTFIT_SIGNAL_GRACE_S", "value": str(options.stays_s)},
        ],
        "envFrom": [{"secretRef": {"name": request.token}}],
        "resources": {"requests": needs, "limits": needs},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108  # of the pod
    }


def _memory_mib(request: GroupRequest, options: KubernetesOptions) -> int:
    return hardware.memory_mib(
        request.resources_per_worker,
        options.workers_per_node,
        per_cpu_gib=options.memory_per_cpu_gib,
    )
