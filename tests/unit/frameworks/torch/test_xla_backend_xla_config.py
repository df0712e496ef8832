"""TorchXLAConfig is a TorchConfig with a compiler."""

from __future__ import annotations

from contextlib import nullcontext

from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.frameworks.torch.xla_backend import compile_extracted_graphs
from spotfit.model.config import ScalingConfig
from spotfit.torch.xla import TorchXLAConfig


def test_the_framework_is_torch_xla() -> None:
    name, options = TorchXLAConfig(timeout_s=60).framework_options(ScalingConfig())
    assert name == "torch_xla"
    assert (options["timeout_s"], options["neuron_parallel_compile"]) == (60, False)
    assert isinstance(TorchXLAConfig(), TorchConfig)


def test_graphs_are_compiled_after_the_function_if_requested() -> None:
    assert TorchXLAConfig().train_func_context is nullcontext
    assert (
        TorchXLAConfig(neuron_parallel_compile=True).train_func_context is compile_extracted_graphs
    )
