"""No framework: the function runs on every rank and meets nobody but us."""

from __future__ import annotations

from spotfit.frameworks.api import Gather
from spotfit.model.wire import Start


class Alone:
    """Nothing to import, nothing to form."""

    stages: tuple[tuple[str, ...], ...] = ()

    def environment(self, start: Start) -> dict[str, str]:
        return {
            "RANK": str(start.rank),
            "LOCAL_RANK": str(start.local_rank),
            "WORLD_SIZE": str(start.world_size),
            "LOCAL_WORLD_SIZE": str(start.local_world_size),
            "NODE_RANK": str(start.node_rank),
        }

    def enter(self, start: Start, gather: Gather) -> None:
        """There is no group."""

    def leave(self) -> None:
        """There is no group."""
