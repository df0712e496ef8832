"""Framework, the interface between a worker and its training library.

`NoFramework` is the implementation for functions that use no library: it forms no group.

The environment variables from which training libraries read a worker's ranks and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spotfit.frameworks.devices import (
    CUDA_VISIBLE_DEVICES,
    require_enough_devices,
    visible_device_variables,
)
from spotfit.host import env
from spotfit.protocol.worker_agent import StartWorker

# --- The environment variables from which training libraries read a worker's ranks ----------------


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


BroadcastBytesFn = Callable[[str, bytes], bytes]
"""`(label, value) -> value of rank 0`; a collective that returns when all ranks have called it."""


class Framework(Protocol):
    """Adapter of one training library. It runs in the worker process."""

    @property
    def preload_stages(self) -> tuple[tuple[str, ...], ...]:
        """Modules that the fork server imports before it forks workers, most urgent stage first.

        They must not start threads or initialize an accelerator: neither survives a fork.
        """
        ...

    @property
    def sees_peer_devices(self) -> bool:
        """Whether a worker sees the accelerators of the other workers on its node."""
        ...

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return the variables to set before the library or user code is imported.

        Raises `ConfigError` if the node lacks devices that the worker requests.
        """
        ...

    def form_group(self, start: StartWorker, broadcast: BroadcastBytesFn) -> None:
        """Form the process group of this round. Raises the library's own exceptions."""
        ...

    def leave_group(self) -> None:
        """Leave the group within a bounded time. A no-op if no group was formed."""
        ...


class NoFramework:
    """Framework of functions that use no training library: nothing to import, no group."""

    preload_stages: tuple[tuple[str, ...], ...] = ()
    sees_peer_devices = False

    def environment(self, start: StartWorker) -> dict[str, str]:
        return rank_environment(start, sees_peer_devices=self.sees_peer_devices)

    def form_group(self, start: StartWorker, broadcast: BroadcastBytesFn) -> None:
        """Do nothing."""

    def leave_group(self) -> None:
        """Do nothing."""
