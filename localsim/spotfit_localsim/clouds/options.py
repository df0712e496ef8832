"""Options of a simulated cloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean
from spotfit_localsim.clouds.capacity import MarketOptions
from spotfit_localsim.clouds.firewall import FIREWALLS

CLOUDS = {
    "aws_batch": "spotfit_localsim.clouds.aws_batch:AwsBatchCloud",
    "azure_batch": "spotfit_localsim.clouds.azure_batch:AzureBatchCloud",
    "gcp_batch": "spotfit_localsim.clouds.gcp_batch:GcpBatchCloud",
    "kubernetes": "spotfit_localsim.clouds.kubernetes:KubernetesCloud",
    "plain": "spotfit_localsim.clouds.minimal:PlainCloud",
}
"""The class of each simulated cloud, imported on first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions(MarketOptions):
    """Options of `sim://<cloud>`: the real client library against a simulator on this machine.

    Example: 'sim://aws_batch?trace=history.json&speed=60&seed=1'. Options of the cloud's own
    provisioner may be added.
    """

    provisioner: ClassVar[str] = "sim"

    cloud: str = "plain"
    """The simulated cloud, a key of `CLOUDS`."""
    root: str = ""
    """Directory of the simulator's state; '' is a per-user directory for each set of options."""
    idle_s: float = 60.0
    """The simulator exits after this time without machines and requests."""
    lag_s: float = 0.0
    """Reads show submitted jobs, and changes of their states, only after this time, in seconds.
    Writes take effect at once."""
    observe_s: float = 0.2
    """The polling interval that the provisioner recommends."""
    firewall: str = ""
    """'machines': machines cannot connect to each other. 'storage': they cannot reach the bucket.
    '': neither."""
    sets_region: bool = False
    """Whether machines of `aws_batch` have AWS_REGION. ECS agents set it since 1.104.0 only:
    https://github.com/aws/amazon-ecs-agent/pull/4946."""

    def __post_init__(self) -> None:
        # Not super(): slots=True creates a second class, and super() would refer to the first.
        MarketOptions.__post_init__(self)
        if self.lag_s < 0:
            raise ConfigError("The option lag_s of a simulated cloud must not be negative.")
        if self.cloud not in CLOUDS:
            hint = did_you_mean(self.cloud, CLOUDS)
            raise ConfigError(f"There is no simulated cloud {self.cloud!r}. {hint}")
        if self.firewall not in FIREWALLS:
            hint = did_you_mean(self.firewall, FIREWALLS)
            raise ConfigError(f"SimOptions(firewall={self.firewall!r}) is not supported. {hint}")
