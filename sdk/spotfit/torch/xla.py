"""Training with torch_xla on AWS Neuron: `from spotfit.torch.xla import TorchXLAConfig`."""

from spotfit.frameworks.torch.xla_backend import TorchXLAConfig

__all__ = ["TorchXLAConfig"]
