"""Pure translation of a group request to a Job, a Secret and a Service.

Checked against golden files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import AGENT_COMMAND, AgentExitCode, count_nodes
from spotfit.provision.offers import select_offer
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.job_fields.names import allocation_labels
from spotfit_provisioners.kubernetes.offers import list_offers, node_fields
from spotfit_provisioners.kubernetes.options import KubernetesOptions
from spotfit_provisioners.kubernetes.pod_template import merge_pod_template

BACKEND = "kubernetes"
MAX_NODES = 10_000
CONTAINER_NAME = "agent"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
TOKEN_LABEL = "spotfit.dev/token"  # noqa: S105  # the name of a label
LABEL_PREFIX = "spotfit.dev/"
OFFER_ANNOTATION = "spotfit.dev/offer"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"

# A node that looks under-used must not be removed: the replacement of its pod would take minutes,
# and as often as the autoscaler consolidates. Announced spot interruptions are not affected.
# https://karpenter.sh/docs/concepts/disruption/#pod-level-controls
# https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
_NO_CONSOLIDATION: Mapping[str, str] = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}

# Pods without these are rejected by the Pod Security Standard 'restricted':
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
_RESTRICTED_POD: Mapping[str, Any] = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_RESTRICTED_CONTAINER: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}

# A disrupted or drained pod is replaced without counting as a failure, unless the run continues
# without it. Any other exit fails the index of the pod, and no other index. The first matching rule
# applies: https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
_FAILURE_RULES: tuple[Mapping[str, Any], ...] = (
    {
        "action": "FailIndex",
        "onExitCodes": {
            "containerName": CONTAINER_NAME,
            "operator": "In",
            "values": [int(AgentExitCode.RELEASED)],
        },
    },
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "Ignore",
        "onExitCodes": {
            "containerName": CONTAINER_NAME,
            "operator": "In",
            "values": [int(AgentExitCode.DRAINED)],
        },
    },
    {
        "action": "FailIndex",
        "onExitCodes": {
            "containerName": CONTAINER_NAME,
            "operator": "NotIn",
            "values": [int(AgentExitCode.DONE), int(AgentExitCode.DRAINED)],
        },
    },
)


def plan(request: GroupRequest, options: KubernetesOptions) -> GroupPlan:
    """Return the Job, which contains no secrets. Raises `ConfigError`."""
    if not options.image:
        raise ConfigError(
            "KubernetesOptions(image=…) is not set: pods need a container image.",
            do="Set the option in the call, as SPOTFIT_KUBERNETES_IMAGE, or under [kubernetes] in "
            "spotfit.toml; worker_image/bake.sh builds an image.",
        )
    hardware.check_resources(request.resources_per_worker, backend="Kubernetes")
    select_offer(
        request,
        list_offers(options).offers,
        do="For on-demand nodes, set KubernetesOptions(flavour=…) or on_demand_node_selector; else "
        "list the offers again.",
    )
    slots = options.workers_per_node
    nodes = count_nodes(request, slots=slots, max_nodes=MAX_NODES, backend="Kubernetes")
    labels = {
        **options.labels,
        **allocation_labels(
            LABEL_PREFIX,
            run=request.run_name,
            run_id=request.run_id,
            user=options.user,
            project=options.cost_project,
        ),
        TOKEN_LABEL: request.token,
    }
    return GroupPlan(
        token=request.token,
        provisioner=BACKEND,
        num_nodes=nodes,
        slots_per_node=slots,
        body=_job_manifest(request, options, nodes=nodes, labels=labels),
    )


def offer_name(plan: GroupPlan, options: KubernetesOptions) -> str:
    """Return the name of the offer that the Job of the plan rents."""
    annotations = plan.body["metadata"].get("annotations", {})
    return str(annotations.get(OFFER_ANNOTATION) or list_offers(options).default)


def secret_manifest(plan: GroupPlan, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the Secret with the environment of the pods.

    Separate from the Job, because more users may read Jobs than Secrets.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": plan.token, "labels": plan.body["metadata"]["labels"]},
        "type": "Opaque",
        "stringData": dict(environment),
    }


def service_manifest(plan: GroupPlan) -> dict[str, Any]:
    """Return the headless Service that gives pods the DNS name <token>-<index>.<token>."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.token, "labels": plan.body["metadata"]["labels"]},
        "spec": {
            "clusterIP": "None",
            # Agents connect to each other before their pods are ready.
            "publishNotReadyAddresses": True,
            "selector": {TOKEN_LABEL: plan.token},
        },
    }


def _job_manifest(
    request: GroupRequest, options: KubernetesOptions, *, nodes: int, labels: Mapping[str, str]
) -> dict[str, Any]:
    limit_s = request.time_limit_s
    offer = {OFFER_ANNOTATION: request.offer.name} if request.offer is not None else {}
    kueue = {"kueue.x-k8s.io/queue-name": options.kueue_queue} if options.kueue_queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": request.token,
            "labels": {**labels, **kueue},
            **({"annotations": offer} if offer else {}),
        },
        "spec": {
            # Each pod has an index, by which the agent identifies its machine.
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            # Per index, as the rules with FailIndex require. 0: the leader decides on replacements.
            "backoffLimitPerIndex": 0,
            "podFailurePolicy": {"rules": [dict(rule) for rule in _FAILURE_RULES]},
            # Only when a pod has ended, so that two pods never have the same index. Required with
            # a failure policy.
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": options.finished_ttl_s,
            # From the creation of the Job, or its admission by Kueue; pending pods count, too.
            **({"activeDeadlineSeconds": limit_s} if limit_s is not None else {}),
            # Kueue resumes the Job when its queue has admitted it.
            **({"suspend": True} if kueue else {}),
            "template": _pod_template(request, options, labels),
        },
    }


def _pod_template(
    request: GroupRequest, options: KubernetesOptions, labels: Mapping[str, str]
) -> dict[str, Any]:
    template: dict[str, Any] = {
        "metadata": {"labels": dict(labels), "annotations": dict(_NO_CONSOLIDATION)},
        "spec": _pod(request, options),
    }
    merged = merge_pod_template(template, options.pod_template, container=CONTAINER_NAME)
    affinity = template["spec"].get("affinity")
    if (
        affinity
        and (merged["spec"].get("affinity") or {}).get("nodeAffinity") != affinity["nodeAffinity"]
    ):
        raise ConfigError(
            "KubernetesOptions(pod_template=…): spec.affinity.nodeAffinity replaces the rule that "
            "keeps on-demand machines away from spot nodes.",
            do="Write the node labels in node_selector.",
        )
    return merged


def pod_manifest(plan: GroupPlan) -> dict[str, Any]:
    """Return one pod of the group, for a dry run: some admission rules apply to pods only."""
    template = plan.body["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": plan.token, **template["metadata"]},
        "spec": template["spec"],
    }


def _pod(request: GroupRequest, options: KubernetesOptions) -> dict[str, Any]:
    named = {
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        **node_fields(options, request.offer.market if request.offer is not None else None),
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "securityContext": dict(_RESTRICTED_POD) if options.pod_security == "restricted" else {},
    }
    return {
        # Required with a failure policy: a lost container ends its pod.
        "restartPolicy": "Never",
        # Together with the headless Service it gives every pod a DNS name.
        "subdomain": request.token,
        "terminationGracePeriodSeconds": int(options.termination_grace_s),
        "containers": [_container(request, options)],
        "volumes": [_shared_memory_volume(request, options)],
        **{name: value for name, value in named.items() if value},
    }


def _container(request: GroupRequest, options: KubernetesOptions) -> dict[str, Any]:
    needs = _requests(request, options)
    names = _limited_resources(request, options)
    disk_gib = options.ephemeral_storage_gib
    disk = {"ephemeral-storage": f"{math.ceil(disk_gib * 1024)}Mi"} if disk_gib else {}
    restricted = options.pod_security == "restricted"
    return {
        "name": CONTAINER_NAME,
        "image": options.image,
        "command": list(AGENT_COMMAND),
        "env": [
            {"name": "SPOTFIT_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "SPOTFIT_KUBERNETES_NODE",
                "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
            },
            {"name": "SPOTFIT_SIGNAL_GRACE_S", "value": str(options.termination_grace_s)},
        ],
        "envFrom": [{"secretRef": {"name": request.token}}],
        "resources": {
            "requests": {**needs, **disk},
            "limits": {name: needs[name] for name in names},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108  # of the pod
        **({"securityContext": dict(_RESTRICTED_CONTAINER)} if restricted else {}),
    }


def _requests(request: GroupRequest, options: KubernetesOptions) -> dict[str, str]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.count_gpus(per_worker, slots)
    cpus = hardware.count_cpus(per_worker, slots, share=hardware.KUBERNETES_GPU_SHARE)
    return {
        "cpu": str(cpus),
        "memory": f"{_memory_mib(request, options)}Mi",
        **({options.gpu_resource: str(gpus)} if gpus else {}),
        **{name: str(count) for name, count in options.extra_resources.items()},
    }


def _limited_resources(request: GroupRequest, options: KubernetesOptions) -> tuple[str, ...]:
    """Return the names of the resources whose requests are limits as well."""
    per_worker = request.resources_per_worker
    if not hardware.count_gpus(per_worker, options.workers_per_node):
        # All, so that the pods have the QoS class Guaranteed and are evicted last.
        return ("cpu", "memory", *options.extra_resources)
    # A limit on CPUs throttles data loaders, and one on memory kills, while the rest of a node with
    # GPUs is idle. GPUs and other extended resources need limits, as they cannot be overcommitted:
    # https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/#extended-resources
    memory = ("memory",) if "memory" in per_worker else ()
    return (*memory, options.gpu_resource, *options.extra_resources)


def _shared_memory_volume(request: GroupRequest, options: KubernetesOptions) -> dict[str, Any]:
    """Return the volume for /dev/shm, to which container runtimes give 64 MiB only."""
    size_mib = options.shared_memory_mib
    if "memory" in _limited_resources(request, options):
        limit_mib = _memory_mib(request, options)
        size_mib = size_mib or limit_mib // 2
        # The pages of the volume count towards the limit:
        # https://kubernetes.io/docs/concepts/storage/volumes/#emptydir
        hardware.check_memory_limit(
            request.resources_per_worker,
            options.workers_per_node,
            limit_mib=limit_mib,
            shared_memory_mib=size_mib,
            backend="Kubernetes",
        )
    # Without a limit, the volume may take the memory that the node has for pods.
    limit = {"sizeLimit": f"{size_mib}Mi"} if size_mib else {}
    return {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}


def _memory_mib(request: GroupRequest, options: KubernetesOptions) -> int:
    return hardware.required_memory_mib(
        request.resources_per_worker,
        options.workers_per_node,
        per_cpu_gib=options.memory_per_cpu_gib,
        share=hardware.KUBERNETES_GPU_SHARE,
    )
