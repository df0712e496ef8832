"""TorchConfig: how the process group of torch is formed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotfit.frameworks.config import BackendConfig
from spotfit.model.config import ScalingConfig


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

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """As the workers read it, with the backend chosen."""
        backend = self.backend or ("nccl" if scaling.use_gpu else "gloo")
        return self.framework, {**self.to_dict(), "backend": backend}
