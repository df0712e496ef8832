"""TorchXLAConfig: training with torch_xla on AWS Neuron."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from spotfit.frameworks.torch.neuron import compile_extracted_graphs
from spotfit.frameworks.torch.torch_config import TorchConfig


@dataclass
class TorchXLAConfig(TorchConfig):
    """Configuration of torch_xla's process group on AWS Neuron; its backend is always xla.

    With `neuron_parallel_compile` the training function only extracts the model's graphs, which
    are compiled into the cache afterwards. Values computed in such a run are meaningless.
    """

    neuron_parallel_compile: bool = False

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework."""
        return "torch_xla"

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Compile the extracted graphs after the function if `neuron_parallel_compile` is set."""
        if self.neuron_parallel_compile:
            return compile_extracted_graphs
        return super().train_func_context
