"""Options of the local backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from spotfit.core.errors import ConfigError
from spotfit.provision.profile import check_minimums
from spotfit_provisioners.prices.given import ANY_TYPE, check_prices


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Nodes on this machine, each a process group with a directory and an address."""

    provisioner: ClassVar[str] = "local"

    nodes: int = 1
    """Number of nodes on which the workers of a run are distributed. Replacements have the same
    size."""
    root: str = ""
    """State directory; '' is a private directory below the temporary directory."""
    capacity: int | None = None
    """Largest number of nodes at a time; None: no limit. A preemption simulator may override it."""
    notice_s: float = 10.0
    """Default time between a simulated preemption notice and the end of the node, in seconds."""
    idle_s: float = 60.0
    """How long a machine waits for the next `fit()` of its driver, in seconds."""
    loopback: bool = True
    """Give every node a loopback address of its own, where the system supports it."""
    agent: str = "spotfit.agent.driver:serve"
    """The agent's entry point, as module:function."""
    prices: dict[str, Any] = field(default_factory=dict)
    """Price of a node in US dollars per hour: {'*': {'on_demand': 0}}."""

    python: str = "here"
    """Python version that the backend reports for its nodes: 'here' is the version of this
    interpreter; '3.12' simulates a cloud with that version, '' one with an unknown version."""

    def __post_init__(self) -> None:
        check_prices(self.prices, option="LocalOptions(prices=…)", types=(ANY_TYPE,))
        check_minimums(self, nodes=1, capacity=0, notice_s=0, idle_s=0)
        if not isinstance(self.python, str):
            raise ConfigError(
                f"LocalOptions(python={self.python!r}) must be a string: as numbers, 3.10 and 3.1 "
                "are equal.",
                do="""Write python="3.12", or 'local?python="3.12"' in a string.""",
            )
