"""TorchftConfig and its framework: fault-tolerant training with torchft.

Every worker is a replica group of its own: torch's process group contains one rank, and torchft's
managers exchange gradients between the workers. They find each other through a lighthouse, which
`TorchftBackend` runs beside the leader for the duration of a round.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from spotfit.frameworks.backend_config import Backend
from spotfit.frameworks.framework import AllGatherFn
from spotfit.frameworks.torch.process_group import TorchFramework, import_optional
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.host import env, machine
from spotfit.protocol.worker_agent import StartWorker

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable from which torchft's managers read the lighthouse's URL."""


class TorchftFramework(TorchFramework):
    """Framework for torchft: a process group of one rank per worker.

    Ranks in the environment and in the train context are still those among all workers.
    """

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Form torch's group of this rank alone; its store listens on this node's address.

        `all_gather` is not used, and no other rank is waited for: torchft connects the workers
        later.
        """
        # torchft replaces failed replicas without a new round, which torch's group could not do.
        alone = msgspec.structs.replace(start, rank=0, world_size=1)
        super().form_group(alone, lambda _, value: (value,))


class TorchftBackend(Backend):
    """Runs one lighthouse per round beside the leader and publishes its URL to the workers."""

    # torchft's process groups use NCCL between workers of a node, which needs both GPUs visible.
    share_cuda_visible_devices = True
    _lighthouse: Any = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start a new lighthouse in the hooks process on the leader's node; send workers its URL.

        Called once per round. A lighthouse of a previous round is stopped: it may still list
        workers that no longer exist. Raises `MissingExtraError` without torchft.
        """
        self.on_shutdown(worker_group, backend_config)
        coordination = import_optional(
            "torchft.coordination", package="torchft", needed_by="TorchftConfig"
        )
        address = machine.own_address()
        host = f"[{address}]" if ":" in address else address  # IPv6 needs brackets before a port
        options = {"bind": f"{host}:0", **backend_config.lighthouse_kwargs}
        self._lighthouse = coordination.LighthouseServer(**options)
        port = urlsplit(self._lighthouse.address()).port
        worker_group.execute(env.update, {LIGHTHOUSE: f"http://{host}:{port}"})

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Stop the lighthouse of the round, if there is one. Idempotent."""
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None


class TorchftConfig(TorchConfig):
    """Configuration for torchft, with one replica group per worker.

    `lighthouse_kwargs` are passed to torchft's `LighthouseServer` (`min_replicas` and others); all
    other arguments are those of `TorchConfig`. The machines need the package torchft.
    """

    def __init__(self, lighthouse_kwargs: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lighthouse_kwargs = lighthouse_kwargs

    @property
    def backend_cls(self) -> type[Backend]:
        """The class whose hooks start and stop the lighthouse in every round."""
        return TorchftBackend

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "torchft"."""
        return "torchft"
