"""Who a worker is and what it may see, in the variables that training libraries read."""

from __future__ import annotations

from spotfit.frameworks.devices import VISIBLE, refuse_too_few, visibility
from spotfit.host import env
from spotfit.model.wire import Start


def place(start: Start, *, beside_peers: bool) -> dict[str, str]:
    """The ranks of this worker, and the devices it is shown.

    Raises `ConfigError` where its node has fewer than it asked for.
    """
    refuse_too_few(start)
    return {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(start.local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(start.local_world_size),
        "NODE_RANK": str(start.node_rank),
        **visibility(start, env.lookup(VISIBLE), beside_peers=beside_peers),
    }
