"""Options of the Kubernetes backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import LOGIN_NAME, check_minimums
from spotfit_provisioners.job_fields import images
from spotfit_provisioners.job_fields.names import LabelRules, check_labels
from spotfit_provisioners.prices.given import check_prices

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DNS_PREFIX = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
LABEL_RULES = LabelRules(
    name=re.compile(f"(?:{_DNS_PREFIX}/)?{_NAME}"),
    value=re.compile(f"(?:{_NAME})?"),
    reserved=("spotfit.dev/", "batch.kubernetes.io/"),
    source="https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/"
    "#syntax-and-character-set",
)

_DEFAULT_GRACE_S = 30.0  # the default of Kubernetes
# https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
_GKE_GRACE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Pods on the spot nodes of a Kubernetes cluster."""

    provisioner: ClassVar[str] = "kubernetes"
    questions: ClassVar[Mapping[str, str]] = {
        "image": "Container image, in a registry that the nodes can read",
        "context": "Context of the kubeconfig; empty: the current one",
        "namespace": "Namespace; empty: that of the context",
        "flavour": "Platform of the spot nodes: eks, karpenter, gke or aks; empty: none",
        "service_account": "Service account of the agents; empty: default",
    }

    image: str = ""
    """Container image with spotfit and the imports of the training function. `{python}` and
    `{torch}` in its name are replaced by the caller's versions; see `job_fields.images`."""
    namespace: str = ""
    """'' is the namespace of the context, or of the pod of the caller."""
    context: str = ""
    """Context of the kubeconfig; '' is the current one. Inside a pod, the pod's service account is
    used instead."""
    server: str = ""
    """URL of an API server without authentication, for example of `kubectl proxy`."""
    flavour: Literal["", "eks", "karpenter", "gke", "aks"] = ""
    """Selects and tolerates the spot nodes of this platform; '' uses only `node_selector` and
    `tolerations`."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Additional node labels that pods require."""
    on_demand_node_selector: dict[str, str] = field(default_factory=dict)
    """Node labels that pods on on-demand nodes require, besides and instead of equal names of
    `node_selector`. Needed if `flavour` does not distinguish these nodes from spot nodes."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Additional tolerations of pods."""
    workers_per_node: int = 1
    """Number of workers per pod."""
    memory_per_cpu_gib: float = 2.0
    """Memory per CPU core if `resources_per_worker` has no "memory". Workers that request only GPUs
    request 3 CPUs and 10 GiB per GPU, and may use all CPUs and all memory of their node."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of GPUs."""
    shared_memory_mib: int = 0
    """Size of /dev/shm; 0: half of the memory limit, without a limit all that the node has for
    pods."""
    service_account: str = ""
    """Service account of the agents. It needs access to the bucket and permission to create
    Jobs."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets for private registries."""
    priority_class: str = ""
    """Name of the PriorityClass of pods."""
    kueue_queue: str = ""
    """Kueue LocalQueue that admits the Jobs."""
    grace_s: float | None = None
    """Termination grace period of pods. None: 15 s with `flavour="gke"`, where spot nodes grant no
    more by default, else 30 s."""
    labels: dict[str, str] = field(default_factory=dict)
    """Additional labels of Jobs and pods."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices of the nodes in US dollars per hour: {'*': {'spot': 2.1, 'on_demand': 9.8}}. Names are
    values of the label `node.kubernetes.io/instance-type` in `node_selector`; '*' is any other."""
    cost_project: str = ""
    """Value of the label `spotfit.dev/project` of everything that is rented, for the allocation of
    costs; '' omits it."""
    user: str = field(default="", metadata=LOGIN_NAME)
    """Value of the label `spotfit.dev/user`; '' is the login name of the caller of `fit()`."""
    extra_resources: dict[str, int] = field(default_factory=dict)
    """Further resources of a pod, for example {'vpc.amazonaws.com/efa': 4} or {'rdma/hca': 1}."""
    ephemeral_storage_gib: float = 2.0
    """Requested space on the disk of the node; 0 requests none. Not a limit."""
    pod_security: Literal["restricted", "none"] = "restricted"
    """'restricted': pods satisfy the Pod Security Standard of that name, and the image must run as
    a user other than root. 'none' sets no security context."""
    pod_template: dict[str, Any] = field(default_factory=dict)
    """Overrides of the pod template, with `metadata` and `spec` as in a manifest. Lists are merged
    by name as in `kubectl patch`; the agents' container is named 'agent'."""
    finished_ttl_s: int = 7 * 24 * 3600
    """How long a Job is kept after its end, with the logs of its pods."""

    @property
    def termination_grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL of a pod."""
        if self.grace_s is not None:
            return self.grace_s
        return _GKE_GRACE_S if self.flavour == "gke" else _DEFAULT_GRACE_S

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.resolve_image(self.image))
        check_prices(self.prices, option="KubernetesOptions(prices=…)")
        check_labels(self.labels, LABEL_RULES, option="KubernetesOptions(labels=…)")
        check_minimums(
            self,
            workers_per_node=1,
            shared_memory_mib=0,
            grace_s=0,
            ephemeral_storage_gib=0,
            finished_ttl_s=0,
            above_zero=["memory_per_cpu_gib"],
        )
        if self.server and self.context:
            raise ConfigError(
                f"KubernetesOptions(server={self.server!r}, context={self.context!r}) selects two "
                "clusters.",
                do="Remove server to use the context of the kubeconfig, or remove context.",
            )
