"""What can be chosen of this machine as a cloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spotfit.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Train on this machine: every node is a process group with a directory and an address."""

    provisioner: ClassVar[str] = "local"

    nodes: int = 1
    """Into how many nodes the whole run is cut; replacements come in nodes of the same size."""
    root: str = ""
    """Where the nodes live; '' is a directory of this user's own below the temporary directory."""
    capacity: int | None = None
    """How many nodes this cloud has at all, or None for no limit; a reclaimer may change it."""
    notice_s: float = 10.0
    """How long before its end a node is told, by a reclaimer that announces it and names no
    other time."""
    idle_s: float = 60.0
    """How long a node waits for the next `fit()` of its driver, its framework imported."""
    loopback: bool = True
    """Whether every node gets an address of its own, where the system has them."""
    agent: str = "spotfit.agent.driver:serve"
    """What a node runs, as module:function."""

    python: str = "here"
    """What its nodes are said to run before there are any: 'here' is the truth, this interpreter's
    version; a version such as '3.12' plays a cloud with that one, '' a cloud that does not know."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"LocalOptions(nodes={self.nodes}): a run needs at least one node.")
        if self.capacity is not None and self.capacity < 0:
            raise ConfigError(f"LocalOptions(capacity={self.capacity}) is below zero.")
        if self.notice_s < 0 or self.idle_s < 0:
            raise ConfigError("LocalOptions(notice_s, idle_s): no duration is below zero.")
        if not isinstance(self.python, str):
            raise ConfigError(
                f"LocalOptions(python={self.python!r}) must be text: 3.10 and 3.1 are one number.",
                do="""Write python="3.12"; in a text: 'local?python="3.12"'.""",
            )
