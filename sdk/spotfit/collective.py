"""Small collectives of a training function, over the run's own wire. All ranks must call them."""

from __future__ import annotations

from typing import Any

from spotfit.worker.current import current

__all__ = ["barrier", "broadcast_from_rank_zero"]


def barrier() -> None:
    """Wait until every rank is here. Ranks that have returned do not count as here."""
    current("spotfit.collective.barrier").barrier()


def broadcast_from_rank_zero(data: Any) -> Any:
    """What rank 0 passed, on every rank. Meant for small things: a seed, a path, a decision."""
    return current("spotfit.collective.broadcast_from_rank_zero").broadcast(data)
