"""Options of the SkyPilot backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector
from spotfit.provision.profile import LOGIN_NAME, check_minimums
from spotfit_provisioners.prices.given import check_prices

_CHOICES = {
    "launch_mode": ("jobs", "clusters"),
    "infra_order": ("price", "given"),
    "spot": ("only", "preferred", "never"),
    "recovery_strategy": ("", "FAILOVER", "EAGER_NEXT_REGION"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilotOptions:
    """Machines from any cloud that SkyPilot supports, through its API server."""

    provisioner: ClassVar[str] = "skypilot"

    launch_mode: Literal["jobs", "clusters"] = "jobs"
    """'jobs': one managed job per machine, which SkyPilot recovers after a loss. 'clusters': one
    single-node cluster per machine, without recovery and without a jobs controller."""
    infra: tuple[str, ...] = ()
    """Allowed infrastructure: 'aws', 'gcp/us-central1', 'k8s/my-context'. Empty: everything that
    SkyPilot has access to."""
    infra_order: Literal["price", "given"] = "price"
    """Order of `infra`: cheapest first, or as listed."""
    spot: Literal["only", "preferred", "never"] = "only"
    """'preferred' uses on-demand machines if there are no spot machines."""
    accelerator: str = ""
    """GPU type of the workers, as SkyPilot names it: 'A100', 'L4', 'H100'."""
    instance_type: str = ""
    """'' lets SkyPilot choose by cores, memory and accelerators."""
    workers_per_node: int = 1
    """Number of workers per machine."""
    image: str = ""
    """Machine image, or 'docker:…' for a container; '' is SkyPilot's default."""
    disk_gib: int = 0
    """Size of the system disk; 0 is SkyPilot's default."""
    setup: tuple[str, ...] = ()
    """Shell lines that run once on every new machine: "pip install 'spotfit[torch]'"."""
    python: str = "python"
    """The interpreter on the machines."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the agents. Must not contain secrets: they are stored unencrypted
    with the run."""
    labels: dict[str, str] = field(default_factory=dict)
    """Additional labels or tags of machines, on clouds that support them."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Prices that take precedence over those of the catalog, in US dollars per machine and hour:
    {'p5.48xlarge': {'spot': 14.5, 'on_demand': 55.04}}. '*' stands for all other machine types."""
    cost_project: str = ""
    """Value of the label `spotfit-project` of everything that is rented, for the allocation of
    costs; '' omits it."""
    user: str = field(default="", metadata=LOGIN_NAME)
    """Value of the label `spotfit-user`; '' is the login name of the caller of `fit()`."""
    recovery_strategy: Literal["", "FAILOVER", "EAGER_NEXT_REGION"] = ""
    """SkyPilot's recovery strategy for lost machines; '' is its default. 'FAILOVER' tries the
    region of the lost machine first."""
    endpoint: str = ""
    """URL of the API server: 'https://sky.example.com'. '' uses SkyPilot's configuration, which
    does not exist on the machines."""
    pending_timeout_s: float = 600.0
    """How long the machines of a run with several wait in one entry of `infra` before the next one
    is tried."""
    request_timeout_s: float = 600.0
    """Time limit for a request. The first one may start a controller, which takes minutes."""

    def __post_init__(self) -> None:
        problems = {  # with their remedies; all are reported together
            f"SkyPilotOptions({name}={value!r}) is not a valid choice.": (
                f"Set {name} to one of {', '.join(map(repr, choices))}."
            )
            for name, choices in _CHOICES.items()
            if (value := getattr(self, name)) not in choices
        }
        for name in self.environment:
            if not name.isidentifier():
                problem = f"SkyPilotOptions(environment): {name!r} is not a valid variable name."
                problems[problem] = "Use letters, digits and '_', and no digit at the start."
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            problem = f"SkyPilotOptions(endpoint={self.endpoint!r}) is not an http or https URL."
            problems[problem] = "Write for example endpoint='https://sky.example.com'."
        errors = ErrorCollector()
        errors.check(lambda: check_prices(self.prices, option="SkyPilotOptions(prices=…)"))
        errors.check(
            lambda: check_minimums(
                self,
                workers_per_node=1,
                disk_gib=0,
                pending_timeout_s=0,
                above_zero=["request_timeout_s"],
            )
        )
        for problem, remedy in problems.items():
            errors.add(ConfigError(problem, do=remedy))
        errors.raise_all()
