"""`from spotfit.torch.xla import TorchXLAConfig`: torch on AWS Neuron."""

from spotfit.frameworks.torch.xla_config import TorchXLAConfig

__all__ = ["TorchXLAConfig"]
