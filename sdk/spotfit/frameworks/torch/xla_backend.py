"""TorchXlaFramework: the environment and process group of torch_xla on AWS Neuron."""

from __future__ import annotations

from spotfit.frameworks.framework import BroadcastBytesFn
from spotfit.frameworks.torch.neuron import GRAPH_EXTRACTION_VARIABLES
from spotfit.frameworks.torch.process_group import (
    TorchFramework,
    import_optional,
    init_default_group,
)
from spotfit.host import env
from spotfit.protocol.worker_agent import StartWorker

# Settings that AWS documents for EFA, the network between Trainium instances.
_EFA_VARIABLES = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "XLA_TRANSFER_SEED_ASYNC": "1",
}


class TorchXlaFramework(TorchFramework):
    """Framework for torch_xla: the process group over the NeuronCores of all nodes."""

    def environment(self, start: StartWorker) -> dict[str, str]:
        variables = super().environment(start)
        del variables["ACCELERATE_TORCH_DEVICE"]  # torch has no device name for a NeuronCore
        nodes = start.world_size // start.local_world_size
        # The Neuron runtime reads torchelastic's names for ranks and run.
        return {
            **variables,
            "GROUP_RANK": str(start.node_rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(start.rank),
            "ROLE_WORLD_RANK": str(start.rank),
            "ROLE_WORLD_SIZE": str(start.world_size),
            "TORCHELASTIC_RUN_ID": f"{start.run_id}-{start.round}",
            **{name: text for name, text in _EFA_VARIABLES.items() if env.lookup(name) is None},
            **(
                GRAPH_EXTRACTION_VARIABLES
                if start.framework_options.get("neuron_parallel_compile")
                else {}
            ),
        }

    def form_group(self, start: StartWorker, broadcast: BroadcastBytesFn) -> None:
        """Rendezvous at rank 0 as torch does; torch_xla transports the tensors."""
        import_optional("torch_xla.core.xla_model", package="torch_xla")
        import_optional("torch_xla.distributed.xla_backend", package="torch_xla")
        init_default_group("xla", start, broadcast)
