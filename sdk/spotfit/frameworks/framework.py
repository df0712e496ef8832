"""Framework, the interface between a worker and its training library.

`NoFramework` is the implementation for functions that use no library: it forms no group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spotfit.frameworks.rank_env import rank_environment
from spotfit.protocol.worker_agent import StartWorker

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
