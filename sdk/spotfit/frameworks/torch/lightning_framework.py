"""LightningFramework: as TorchFramework, with Lightning imported before workers are forked.

Importing Lightning takes several seconds of CPU time, on every worker at every restart; a forked
worker has it already.
"""

from __future__ import annotations

import importlib.util

from spotfit.frameworks.torch.lightning_check import LIGHTNING_PACKAGES
from spotfit.frameworks.torch.process_group import TorchFramework


class LightningFramework(TorchFramework):
    """Framework of `LightningTrainer`: torch's process group, and Lightning preloaded."""

    @property
    def preload_modules(self) -> tuple[str, ...]:  # type: ignore[override]  # read only
        """The modules of torch, then the preferred one of the installed packages of Lightning."""
        packages = (
            name for name in LIGHTNING_PACKAGES if importlib.util.find_spec(name.partition(".")[0])
        )
        package = next(packages, None)
        if package is None:
            return TorchFramework.preload_modules
        classes = ("spotfit.lightning.lightning_classes", "torchmetrics")
        return (*TorchFramework.preload_modules, package, *classes)
