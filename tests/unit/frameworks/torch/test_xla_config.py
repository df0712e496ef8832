"""TorchXLAConfig is a TorchConfig with a compiler."""

from __future__ import annotations

from contextlib import nullcontext

from spotfit.frameworks.torch.config import TorchConfig
from spotfit.frameworks.torch.neuron import compiling_graphs
from spotfit.model.config import ScalingConfig
from spotfit.torch.xla import TorchXLAConfig


def test_it_goes_to_the_workers_under_a_name_of_its_own() -> None:
    name, options = TorchXLAConfig(timeout_s=60).framework_options(ScalingConfig())
    assert name == "torch_xla"
    assert (options["timeout_s"], options["neuron_parallel_compile"]) == (60, False)
    assert isinstance(TorchXLAConfig(), TorchConfig)


def test_graphs_are_compiled_after_the_function_if_they_are_to_be() -> None:
    assert TorchXLAConfig().train_func_context is nullcontext
    assert TorchXLAConfig(neuron_parallel_compile=True).train_func_context is compiling_graphs
