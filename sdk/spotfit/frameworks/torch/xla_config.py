"""TorchXLAConfig: torch on AWS Neuron, through torch_xla."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from spotfit.frameworks.torch.config import TorchConfig
from spotfit.frameworks.torch.neuron import compiling_graphs


@dataclass
class TorchXLAConfig(TorchConfig):
    """A process group of torch_xla, on machines with AWS Neuron; its backend is always xla.

    With `neuron_parallel_compile` the function only extracts the graphs of its model, which are
    then compiled into the cache: what it computes meanwhile means nothing.
    """

    neuron_parallel_compile: bool = False

    @property
    def framework(self) -> str:
        """The name under which the workers find torch_xla."""
        return "torch_xla"

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Compiles what the function has extracted, if it was to."""
        if self.neuron_parallel_compile:
            return compiling_graphs
        return super().train_func_context
