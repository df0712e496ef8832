"""What can be chosen of a simulated cloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean
from spotfit_localsim.wire.tide import MarketOptions

CLOUDS = {
    "aws_batch": "spotfit_localsim.wire.aws_batch:AwsBatchCloud",
    "azure_batch": "spotfit_localsim.wire.azure_batch:AzureBatchCloud",
    "gcp_batch": "spotfit_localsim.wire.gcp_batch:GcpBatchCloud",
    "kubernetes": "spotfit_localsim.wire.kubernetes:KubernetesCloud",
    "plain": "spotfit_localsim.wire.plain:PlainCloud",
}
"""Where each simulated cloud is at home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions(MarketOptions):
    """A cloud of your own: the real client library against a simulator on this machine.

    As text: 'sim://aws_batch?trace=history.json&speed=60&seed=1'. Options of the cloud itself may
    stand beside these.
    """

    provisioner: ClassVar[str] = "sim"

    cloud: str = "plain"
    """Which one is simulated."""
    root: str = ""
    """Where it keeps what it knows; '' is a directory of this user's own, one for each choice."""
    idle_s: float = 60.0
    """How long it stays when nothing runs and nobody asks."""
    observe_s: float = 0.2
    """How often looking at a group is worth its while."""

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is made twice, and the first one is meant.
        MarketOptions.__post_init__(self)
        if self.cloud not in CLOUDS:
            hint = did_you_mean(self.cloud, CLOUDS)
            raise ConfigError(f"No cloud {self.cloud!r} is simulated. {hint}")
