"""torch_xla on AWS Neuron: its variables, and its group."""

from __future__ import annotations

from spotfit.frameworks.api import Gather
from spotfit.frameworks.torch.backend import Torch, bring, form
from spotfit.frameworks.torch.neuron import EXTRACTING
from spotfit.host import env
from spotfit.model.wire import Start

_FABRIC = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "XLA_TRANSFER_SEED_ASYNC": "1",
}


class TorchXla(Torch):
    """The group that torch_xla forms among Neuron's cores."""

    def environment(self, start: Start) -> dict[str, str]:
        variables = super().environment(start)
        del variables["ACCELERATE_TORCH_DEVICE"]  # it is none that torch could name
        nodes = start.world_size // start.local_world_size
        return {
            **variables,
            "GROUP_RANK": str(start.node_rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(start.rank),
            "ROLE_WORLD_RANK": str(start.rank),
            "ROLE_WORLD_SIZE": str(start.world_size),
            "TORCHELASTIC_RUN_ID": f"{start.run_id}-{start.round}",
            **{name: text for name, text in _FABRIC.items() if env.lookup(name) is None},
            **(EXTRACTING if start.framework_options.get("neuron_parallel_compile") else {}),
        }

    def enter(self, start: Start, gather: Gather) -> None:
        """Meet at rank 0, like any torch; but torch_xla carries the tensors."""
        bring("torch_xla.core.xla_model", package="torch_xla")
        bring("torch_xla.distributed.xla_backend", package="torch_xla")
        form("xla", start, gather)
