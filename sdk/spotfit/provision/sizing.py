"""How many machines a request is: the arithmetic that every backend's `plan` begins with."""

from __future__ import annotations

from spotfit.core.errors import ConfigError
from spotfit.core.ids import parse_name
from spotfit.model.group import GroupRequest


def nodes_for(request: GroupRequest, *, slots: int, max_nodes: int, backend: str) -> int:
    """Machines with `slots` workers each for that request.

    Raises `ConfigError` for a request that is none, and for more than the backend can give.
    """
    parse_name(request.token, what="The token")
    if request.workers < 1 or request.of < 1:
        raise ConfigError(f"Machines for {request.workers} of {request.of} workers cannot be.")
    nodes = -(-request.workers // slots)
    if nodes > max_nodes:
        raise ConfigError(
            f"{request.workers} workers need {nodes} machines with {slots} workers each; "
            f"{backend} gives {max_nodes} at most.",
            do="Ask for fewer workers, or for machines that hold more of them.",
        )
    return nodes
