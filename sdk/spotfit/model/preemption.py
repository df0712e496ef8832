"""PreemptionInfo: which nodes of the round will be taken away, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes that announced their end, with the world ranks that live there."""

    deadline_ms: int | None
    """When the first of them goes, in milliseconds since 1970; None when nobody knows."""
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """All ranks on those nodes, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)
