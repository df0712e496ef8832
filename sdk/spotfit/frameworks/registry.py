"""From a name to a framework."""

from __future__ import annotations

from spotfit.frameworks.api import Framework
from spotfit.frameworks.none import Alone
from spotfit.frameworks.torch.backend import Torch
from spotfit.frameworks.torch.torchft import Torchft
from spotfit.frameworks.torch.xla import TorchXla
from spotfit.host import plugins

GROUP = "spotfit.frameworks"
_OURS: dict[str, type[Framework]] = {
    "none": Alone,
    "torch": Torch,
    "torch_xla": TorchXla,
    "torchft": Torchft,
}


def open_framework(name: str) -> Framework:
    """The framework of that name; ours need no entry point. Raises `ConfigError`."""
    kind = _OURS.get(name) or plugins.load(GROUP, name)
    framework: Framework = kind()
    return framework
