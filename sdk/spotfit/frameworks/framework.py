"""Framework, the interface between a worker and its training library.

`NoFramework` is the implementation for functions that use no library: it forms no group.

The environment variables from which training libraries read a worker's ranks and devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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

    The names are those of torchrun, such as RANK and LOCAL_WORLD_SIZE; the caller sets them. With
    `sees_peer_devices` the worker also sees the devices of the other workers on its node. Raises
    `ConfigError` if the node has too few devices.
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


AllGatherFn = Callable[[str, bytes], Sequence[bytes]]
"""`(label, value) -> values of all ranks, ordered by rank`, for addresses and other small values.

A collective over the agents' authenticated connections: it returns when all ranks have called it. A
value has at most `MAX_GATHERED_BYTES`.
"""


class Framework(Protocol):
    """Adapter of one training library. It runs in the worker process, one instance per round.

    The fork server of a node also creates one, to read `preload_modules`.
    """

    @property
    def preload_modules(self) -> tuple[str, ...]:
        """Modules that the fork server imports before it forks workers, in their order.

        All that workers import up to their first training step, also within the library. They must
        not start threads or initialize an accelerator: neither survives a fork. Those that are not
        installed are left out.
        """
        ...

    @property
    def sees_peer_devices(self) -> bool:
        """Whether a worker sees the accelerators of the other workers on its node.

        The same for all workers of the run; devices are then numbered among all of them.
        """
        ...

    @property
    def leaves_together(self) -> bool:
        """Whether the training functions of all ranks must have returned before any rank leaves.

        True if a rank that leaves, or ends, fails those that still train: they then wait for each
        other, without a time limit, before `leave_group`.
        """
        ...

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return the variables that a worker sets before the library or user code is imported.

        `start` is the worker's first message, with its ranks and devices. Changes nothing itself.
        Raises `ConfigError` if the node lacks devices that the worker requests.
        """
        ...

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Form the process group of this round; return when all ranks have joined.

        Called once in each worker, before the training function. `start` has the ranks and the
        framework's options, `all_gather` exchanges the ranks' addresses. Raises the library's own
        exceptions, which fail the worker.
        """
        ...

    def leave_group(self) -> None:
        """Leave the group within a bounded time. A no-op if no group was formed.

        Called once in a worker whose function has returned, before it exits; not after a failure,
        when other ranks may be inside a collective.
        """
        ...


def call_in_thread(function: Callable[[], None], *, timeout_s: float) -> bool:
    """Call a function that may block indefinitely in a daemon thread; return whether it ended.

    Waits for at most `timeout_s`. The function handles its own exceptions.
    """
    thread = threading.Thread(target=function, name="spotfit-leave-group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class NoFramework:
    """Framework of functions that use no training library: nothing to import, no group."""

    preload_modules: tuple[str, ...] = ()
    sees_peer_devices = False
    leaves_together = False

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return torchrun's rank variables and the visible devices, for the worker to set.

        Raises `ConfigError` if the node has too few devices; see `rank_environment`.
        """
        return rank_environment(start, sees_peer_devices=self.sees_peer_devices)

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Do nothing: functions without a training library have no process group."""

    def leave_group(self) -> None:
        """Do nothing: `form_group` has formed no process group."""
