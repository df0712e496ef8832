"""What can be chosen of Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit_provisioners.kit import images

_GRACE_S = 30.0
"""Kubernetes' own."""
_GKE_GRACE_S = 15.0
"""https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Pods on the spot nodes of a cluster."""

    provisioner: ClassVar[str] = "kubernetes"

    image: str = ""
    """Container image that holds spotfit and what the training function imports. `{python}` and
    `{torch}` in its name are the versions of whoever calls `fit()`; see `kit.images`."""
    namespace: str = ""
    """'' is that of the context, or of the pod that asks."""
    context: str = ""
    """Of the kubeconfig; '' is the current one. Inside a pod its service account is used."""
    server: str = ""
    """Address of an API server without authentication, as `kubectl proxy` offers one."""
    flavour: Literal["", "eks", "karpenter", "gke", "aks"] = ""
    """Whose spot nodes are chosen and tolerated; '': `node_selector` and `tolerations` say it."""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    workers_per_node: int = 1
    """How many workers share a pod."""
    memory_per_cpu_gib: float = 2.0
    """Main memory for each core where the workers did not ask for any."""
    gpu_resource: str = "nvidia.com/gpu"
    shared_memory_mib: int = 0
    """Size of /dev/shm; 0: half of the memory."""
    service_account: str = ""
    """Of the agents: it reads and writes the bucket, and creates Jobs for replacements."""
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str = ""
    kueue_queue: str = ""
    """LocalQueue that admits the Jobs, where Kueue is installed."""
    grace_s: float | None = None
    """How long pods may take after SIGTERM. None: 15 s with `flavour` 'gke', which leaves user pods
    no more whatever they ask for, unless a node pool grants it; else 30 s."""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def stays_s(self) -> float:
        """How long a pod has from its SIGTERM on."""
        if self.grace_s is not None:
            return self.grace_s
        return _GKE_GRACE_S if self.flavour == "gke" else _GRACE_S

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", images.chosen(self.image))
        if self.workers_per_node < 1:
            raise ConfigError("KubernetesOptions(workers_per_node) must be at least 1.")
        if self.shared_memory_mib < 0 or self.memory_per_cpu_gib <= 0 or self.stays_s < 0:
            raise ConfigError("KubernetesOptions: sizes and durations are not below zero.")
        if self.server and self.context:
            raise ConfigError("KubernetesOptions takes a server or a context, not both.")
