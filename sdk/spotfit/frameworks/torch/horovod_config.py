"""HorovodConfig: the arguments of Ray's HorovodTrainer, of which few have a meaning here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from spotfit.core.input_checks import suggest_keywords
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.host import log
from spotfit.model.config import ScalingConfig


@suggest_keywords
@dataclass
class HorovodConfig(BackendConfig):
    """Configuration of Horovod's workers, with the fields of Ray Train.

    They describe how Horovod starts its workers: over SSH, from a driver. spotfit's agents start
    them and connect them over TLS, so no field has an effect; one that is set is logged.
    """

    nics: set[str] | None = None
    verbose: int = 1
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: int | None = 300
    placement_group_timeout_s: int | None = 100

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "torch"."""
        return "torch"

    def framework_options(self, scaling: ScalingConfig) -> tuple[str, dict[str, Any]]:
        """Return the framework's name and the options of torch's process group.

        Called by the trainer before machines are requested. `scaling` says which devices the
        workers have.
        """
        unused = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if unused:
            log.warning(
                "horovod.unused_options",
                text=f"HorovodConfig({', '.join(unused)}) has no effect: spotfit starts and "
                "connects the workers without SSH",
                do="omit these arguments",
            )
        # Metrics of a script are on the CPU, which NCCL alone could not reduce.
        backend = TorchConfig().backend_for(scaling)
        group = TorchConfig(backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend)
        return group.framework_options(scaling)
