"""The environment variables from which training libraries read a worker's ranks and devices."""

from __future__ import annotations

from spotfit.frameworks.devices import (
    CUDA_VISIBLE_DEVICES,
    require_enough_devices,
    visible_device_variables,
)
from spotfit.host import env
from spotfit.protocol.worker_agent import StartWorker


def rank_environment(start: StartWorker, *, sees_peer_devices: bool) -> dict[str, str]:
    """Return the variables with this worker's ranks and visible devices.

    The names are those of torchrun. Raises `ConfigError` if the node has too few devices.
    """
    # First of all: a missing GPU would otherwise show as an obscure error of the library.
    require_enough_devices(start)
    return {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(start.local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(start.local_world_size),
        "NODE_RANK": str(start.node_rank),
        **visible_device_variables(
            start, env.lookup(CUDA_VISIBLE_DEVICES), sees_peer_devices=sees_peer_devices
        ),
    }
