"""What can be chosen of SkyPilot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit.core.mistakes import Mistakes

_CHOICES = {
    "via": ("jobs", "clusters"),
    "order": ("price", "given"),
    "spot": ("only", "preferred", "never"),
    "recovery": ("", "FAILOVER", "EAGER_NEXT_REGION"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilotOptions:
    """Machines from any cloud that SkyPilot knows, through its API server."""

    provisioner: ClassVar[str] = "skypilot"

    via: Literal["jobs", "clusters"] = "jobs"
    """'jobs': a managed job for each machine, which SkyPilot brings back when it is lost;
    'clusters': a cluster of one node for each, which it does not, and no jobs controller."""
    infra: tuple[str, ...] = ()
    """Where machines may be: 'aws', 'gcp/us-central1', 'k8s/my-context'. Nothing: wherever
    SkyPilot has access."""
    order: Literal["price", "given"] = "price"
    """Which place comes first: the cheapest, or as they are written."""
    spot: Literal["only", "preferred", "never"] = "only"
    """'preferred' takes machines at full price where no spot machine is to be had."""
    accelerator: str = ""
    """Kind of the workers' GPUs, as SkyPilot calls it: 'A100', 'L4', 'H100'."""
    instance_type: str = ""
    """'' lets SkyPilot choose by cores, memory and accelerators."""
    workers_per_node: int = 1
    """How many workers share a machine."""
    image: str = ""
    """A machine's image, or 'docker:…' for a container; '' is SkyPilot's own for the cloud."""
    disk_gib: int = 0
    """Size of the system's disk; 0 is SkyPilot's own choice."""
    setup: tuple[str, ...] = ()
    """Lines of shell, once on every new machine: "pip install 'spotfit[torch]'"."""
    python: str = "python"
    """The interpreter on the machines."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the agents. No secrets: whoever may look at the run can read them."""
    labels: dict[str, str] = field(default_factory=dict)
    """On machines, where the cloud has labels or tags."""
    recovery: Literal["", "FAILOVER", "EAGER_NEXT_REGION"] = ""
    """How SkyPilot brings a lost machine back: 'FAILOVER' tries its region first. '' is its own
    choice."""
    endpoint: str = ""
    """Where the API server is: 'https://sky.example.com'. '' is what SkyPilot itself is
    configured with, which on the machines is nothing."""
    patience_s: float = 600.0
    """How long the API server may take to accept a request: the first may start a controller."""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name, known in _CHOICES.items():
            if (told := getattr(self, name)) not in known:
                mistakes.add(ConfigError(f"SkyPilotOptions({name}={told!r}) is none of {known}."))
        if self.workers_per_node < 1:
            mistakes.add(ConfigError("SkyPilotOptions(workers_per_node) must be at least 1."))
        if self.disk_gib < 0 or self.patience_s <= 0:
            mistakes.add(ConfigError("SkyPilotOptions: disk_gib and patience_s are above zero."))
        for name in self.environment:
            if not name.isidentifier():
                mistakes.add(
                    ConfigError(f"SkyPilotOptions(environment) names {name!r}: no variable's name.")
                )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            mistakes.add(
                ConfigError(
                    f"SkyPilotOptions(endpoint={self.endpoint!r}) is no address.",
                    do="Write it with http:// or https://.",
                )
            )
        mistakes.raise_all()
