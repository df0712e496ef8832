"""TorchConfig: how the process group of torch is formed."""

from __future__ import annotations

from dataclasses import dataclass

from spotfit.frameworks.config import BackendConfig


@dataclass
class TorchConfig(BackendConfig):
    """The process group of every round.

    `backend` is gloo, or nccl with GPUs, unless it is named. Both ways of `init_method` ("env",
    "tcp") meet at rank 0; `timeout_s` is how long a collective of torch may take.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800

    @property
    def framework(self) -> str:
        """The name under which the workers find torch."""
        return "torch"
