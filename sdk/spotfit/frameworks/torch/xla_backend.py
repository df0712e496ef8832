"""TorchXlaFramework: the environment and process group of torch_xla on AWS Neuron.

TorchXLAConfig: training with torch_xla on AWS Neuron.

AWS Neuron: extract a model's graphs while the training function runs, then compile them all.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from spotfit.frameworks.framework import AllGatherFn
from spotfit.frameworks.torch.process_group import (
    TorchFramework,
    import_optional,
    init_default_group,
)
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.host import env
from spotfit.protocol.worker_agent import StartWorker

# --- AWS Neuron -----------------------------------------------------------------------------------


GRAPH_EXTRACTION_VARIABLES = {
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
}
"""Variables under which a model only emits its graphs; the values it computes are meaningless."""


@contextmanager
def compile_extracted_graphs() -> Iterator[None]:
    """After the block, compile the graphs that were extracted in it into the node's cache.

    The context of the training function with `neuron_parallel_compile`. Only local rank 0 compiles,
    and blocks meanwhile; nothing is compiled if the block raises. Raises `MissingExtraError`
    without libneuronxla.
    """
    yield
    # The cache is shared by the node's workers: one compilation per node is enough.
    if env.lookup("LOCAL_RANK") == "0":
        cache = import_optional(
            "libneuronxla.neuron_cc_cache",
            package="libneuronxla",
            needed_by="TorchXLAConfig(neuron_parallel_compile=True)",
        )
        compiler = import_optional(
            "libneuronxla.neuron_parallel_compile",
            package="libneuronxla",
            needed_by="TorchXLAConfig(neuron_parallel_compile=True)",
        )
        url = cache.CacheUrl.get_cache_url(cache_folder(env.lookup("NEURON_CC_FLAGS") or ""))
        with tempfile.TemporaryDirectory() as folder:
            compiler.parallel_compile(f"{folder}/", url)


def cache_folder(flags: str) -> str | None:
    """Return the `--cache_dir` in `flags`, the value of NEURON_CC_FLAGS; None if it is not set."""
    found = re.search(r"--cache_dir[= ](\S+)", flags)
    return found and found[1]


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
        """Return the variables of `TorchFramework` and of torch_xla, the Neuron runtime and EFA.

        EFA's are left out where the node sets them. With `neuron_parallel_compile` they include
        `GRAPH_EXTRACTION_VARIABLES`. Raises `ConfigError` if the node has too few devices.
        """
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

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Join torch's default process group with the backend "xla"; rendezvous at rank 0.

        Blocks until all ranks have joined. Raises `MissingExtraError` without torch_xla.
        """
        import_optional("torch_xla.core.xla_model", package="torch_xla", needed_by="TorchXLAConfig")
        import_optional(
            "torch_xla.distributed.xla_backend", package="torch_xla", needed_by="TorchXLAConfig"
        )
        init_default_group("xla", start, all_gather)


# --- TorchXLAConfig -------------------------------------------------------------------------------


@dataclass
class TorchXLAConfig(TorchConfig):
    """Configuration of torch_xla's process group on AWS Neuron; its backend is always xla.

    With `neuron_parallel_compile` the training function only extracts the model's graphs, which
    are compiled into the cache afterwards. Values computed in such a run are meaningless.
    """

    neuron_parallel_compile: bool = False

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "torch_xla"."""
        return "torch_xla"

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Factory of the context in which each worker runs the training function.

        With `neuron_parallel_compile` it compiles the extracted graphs after the function;
        otherwise it does nothing.
        """
        if self.neuron_parallel_compile:
            return compile_extracted_graphs
        return super().train_func_context
