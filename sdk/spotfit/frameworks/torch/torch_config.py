"""TorchConfig: how torch's process group is formed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import suggest_keywords
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.model.config import ScalingConfig

_INIT_METHODS = ("env", "tcp")
# Those of which torchrun's variables suffice to form the group.
_FRAMEWORKS_WITH_OWN_GROUP = ("torch", "lightning")


@suggest_keywords
@dataclass
class TorchConfig(BackendConfig):
    """Configuration of torch's process group, which is formed in every round.

    `backend` is a torch.distributed backend such as "gloo" or "cpu:gloo,cuda:nccl"; the default is
    nccl with whole GPUs, tpu_dist with TPUs and gloo otherwise. `init_method` is "env" or "tcp",
    which behave alike. `timeout_s` is the timeout of torch's collectives in seconds. With
    `form_group=False` the function forms the group itself: the workers have torchrun's variables,
    with which `init_process_group("nccl")` connects them, and no group yet. For scripts and
    libraries that are written for torchrun.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800
    form_group: bool = field(default=True, kw_only=True)

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "torch"."""
        return "torch"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """Return the framework's name and its options with the backend chosen.

        Called by the trainer before machines are requested. `scaling` says which devices the
        workers have. Raises `ConfigError` for an invalid value.
        """
        # Checked when the trainer starts, before machines are requested.
        if self.init_method not in _INIT_METHODS:
            raise ConfigError(
                f"TorchConfig(init_method={self.init_method!r}): init_method must be 'env' or "
                "'tcp'.",
                do="Omit init_method: both values use rank 0's address and port.",
            )
        # Not `<= 0`, which is False for NaN.
        if not self.timeout_s > 0:
            raise ConfigError(
                f"TorchConfig(timeout_s={self.timeout_s!r}): timeout_s must be greater than 0.",
                do="Set the number of seconds that a collective may take; the default is 1800.",
            )
        if not (self.form_group or self.framework in _FRAMEWORKS_WITH_OWN_GROUP):
            raise ConfigError(
                f"{type(self).__name__}(form_group=False) is not supported: its process group "
                "cannot be formed by the function.",
                do="Omit form_group, or use TorchConfig(form_group=False).",
            )
        return self.framework, {**self.to_dict(), "backend": self.backend_for(scaling)}

    def backend_for(self, scaling: ScalingConfig) -> str:
        """Return the configured backend, else the default for the workers' devices.

        "nccl" with whole GPUs, "tpu_dist" with TPUs, else "gloo", also for workers that share a
        GPU. `scaling` says which devices they have.
        """
        # Workers with less than one GPU share it, which NCCL rejects: "Duplicate GPU detected"
        # (since 2.30 "Multiple Ranks are using the same GPU", src/init.cc). Gloo copies through
        # main memory.
        has_own_gpu = scaling.num_gpus_per_worker >= 1
        return self.backend or default_backend(gpu=has_own_gpu, tpu=scaling.use_tpu)


def default_backend(*, gpu: bool, tpu: bool) -> str:
    """Return the torch.distributed backend: "nccl" for GPUs, "tpu_dist" for TPUs, else "gloo".

    If both are true, GPUs decide.
    """
    if gpu:
        return "nccl"
    return "tpu_dist" if tpu else "gloo"
