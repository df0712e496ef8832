"""Public module `spotfit.collective`: collectives for small Python values.

They use the connection between workers and the round's coordinator, not NCCL or Gloo. Every rank
must call them in the same order.
"""

from __future__ import annotations

from typing import Any

from spotfit.worker.training_api import require_session

__all__ = ["barrier", "broadcast_from_rank_zero"]


def barrier() -> None:
    """Block until every rank that is still training has called `barrier()`.

    Raises `CollectiveTimeoutError` if a rank does not arrive within SPOTFIT_COLLECTIVE_TIMEOUT_S.
    """
    require_session("spotfit.collective.barrier").barrier()


def broadcast_from_rank_zero(data: Any) -> Any:
    """Return the value that rank 0 passed, on every rank.

    For small values such as a seed or a path. Raises `CollectiveTimeoutError` like `barrier()`.
    """
    return require_session("spotfit.collective.broadcast_from_rank_zero").broadcast(data)
