"""TorchftConfig: torch with torchft, each worker a replica group of its own."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from spotfit.frameworks.config import Backend
from spotfit.frameworks.torch.backend import bring
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.host import env, machine

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Where torchft's managers look for their lighthouse."""


class TorchftBackend(Backend):
    """Keeps the lighthouse of an attempt, beside its leader, and tells the workers where it is."""

    share_cuda_visible_devices = True
    _lighthouse: Any = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """A lighthouse of its own for every attempt: nobody finds what a dead one left."""
        self.on_shutdown(worker_group, backend_config)
        coordination = bring("torchft.coordination", package="torchft")
        here = machine.own_address()
        asked = {"bind": f"{_bracketed(here)}:0", **backend_config.lighthouse_kwargs}
        self._lighthouse = coordination.LighthouseServer(**asked)
        port = urlsplit(self._lighthouse.address()).port
        worker_group.execute(env.update, {LIGHTHOUSE: f"http://{_bracketed(here)}:{port}"})

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Put it out."""
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None


class TorchftConfig(TorchConfig):
    """A process group of its own for every worker; torchft connects them, step by step.

    `lighthouse_kwargs` go to torchft's LighthouseServer (`min_replicas` and others); all else is
    as in `TorchConfig`. The machines need the package torchft.
    """

    def __init__(self, lighthouse_kwargs: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lighthouse_kwargs = lighthouse_kwargs

    @property
    def backend_cls(self) -> type[Backend]:
        """Keeps the lighthouse."""
        return TorchftBackend

    @property
    def framework(self) -> str:
        """The name under which the workers find torchft."""
        return "torchft"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
