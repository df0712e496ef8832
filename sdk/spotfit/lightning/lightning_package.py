"""The installed packages of PyTorch Lightning: `lightning.pytorch` and `pytorch_lightning`.

Both may be installed; a class of one is none of the other. The package that the process has
imported decides.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from spotfit.core.errors import MissingExtraError
from spotfit.frameworks.torch.lightning_check import LIGHTNING_PACKAGES


def imported_package() -> str:
    """Return "lightning.pytorch" or "pytorch_lightning": the one that this process uses.

    The package that was imported last, else the first that is installed, which is then imported.
    Raises `MissingExtraError` if none is.
    """
    # The last one: a forked worker may have one from the fork server, and imports the script's.
    imported = [name for name in sys.modules if name in LIGHTNING_PACKAGES]
    if imported:
        return imported[-1]
    for package in LIGHTNING_PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as missing:
            # A dependency of an installed package is missing: its own error names it.
            if missing.name not in (package, package.partition(".")[0]):
                raise
        else:
            return package
    raise MissingExtraError(
        "spotfit.lightning needs PyTorch Lightning, but neither lightning nor pytorch_lightning is "
        "installed.",
        do="Run `pip install 'spotfit[lightning]'`.",
        module=LIGHTNING_PACKAGES[0],
    )


def package_of(trainer: Any) -> str:
    """Return the package of a `Trainer` object, or of an object of one of its subclasses.

    Raises StopIteration for other objects.
    """
    modules = [f"{base.__module__}." for base in type(trainer).__mro__]
    return next(
        package
        for package in LIGHTNING_PACKAGES
        if any(module.startswith(f"{package}.") for module in modules)
    )


def load(package: str, module: str) -> Any:
    """Import and return a module of the package, such as "trainer.call"."""
    return importlib.import_module(f"{package}.{module}")
