"""TorchConfig: how the process group of torch is formed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.frameworks.config import BackendConfig
from spotfit.model.config import ScalingConfig

_INIT_METHODS = ("env", "tcp")


@dataclass
class TorchConfig(BackendConfig):
    """The process group of every round.

    `backend` is nccl with GPUs, tpu_dist with TPUs, else gloo, unless it is named; several go as
    torch writes them: "cpu:gloo,cuda:nccl". Both ways of `init_method` ("env", "tcp") meet at rank
    0; `timeout_s` is how long a collective of torch may take.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800

    @property
    def framework(self) -> str:
        """The name under which the workers find torch."""
        return "torch"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """As the workers read it, with the backend chosen. Raises `ConfigError`."""
        self._check()
        return self.framework, {**self.to_dict(), "backend": self.backend_for(scaling)}

    def backend_for(self, scaling: ScalingConfig) -> str:
        """The backend that was named, else that of the devices such workers have."""
        return self.backend or default_backend(gpu=scaling.use_gpu, tpu=scaling.use_tpu)

    def _check(self) -> None:
        if self.init_method not in _INIT_METHODS:
            raise ConfigError(
                f"init_method must be 'env' or 'tcp', not {self.init_method!r}.",
                do="Leave it out: both meet at rank 0's address and port.",
            )
        if not self.timeout_s > 0:
            raise ConfigError(
                f"timeout_s must be more than nothing, not {self.timeout_s}.",
                do="Give the seconds a collective may take; 1800 is the default.",
            )


def default_backend(*, gpu: bool, tpu: bool) -> str:
    """What tensors on such devices travel with."""
    if gpu:
        return "nccl"
    return "tpu_dist" if tpu else "gloo"
