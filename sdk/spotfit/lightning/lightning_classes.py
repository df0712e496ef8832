"""Combines the classes of this package with Lightning's base classes, for either package.

Lightning is imported on first use. A class is pickled by the name of the module of its package
(`of_lightning`, `of_pytorch_lightning`), so that a worker uses the package of the script.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from spotfit.lightning.checkpointer_callback import CheckpointerHooks
from spotfit.lightning.epoch_report import ReportHooks
from spotfit.lightning.lightning_package import load
from spotfit.lightning.strategies import (
    WorkerDeepSpeedStrategy,
    WorkerEnvironment,
    WorkerFSDPStrategy,
    WorkerStrategy,
)

HOMES = {
    "lightning.pytorch": "spotfit.lightning.of_lightning",
    "pytorch_lightning": "spotfit.lightning.of_pytorch_lightning",
}
"""The module in which the classes of a package are found by name."""
_PARTS: dict[str, tuple[type[Any], str, str]] = {
    "CheckpointerCallback": (CheckpointerHooks, "callbacks", "Callback"),
    "RayDDPStrategy": (WorkerStrategy, "strategies", "DDPStrategy"),
    "RayDeepSpeedStrategy": (WorkerDeepSpeedStrategy, "strategies", "DeepSpeedStrategy"),
    "RayFSDPStrategy": (WorkerFSDPStrategy, "strategies", "FSDPStrategy"),
    "RayLightningEnvironment": (
        WorkerEnvironment,
        "plugins.environments",
        "LightningEnvironment",
    ),
    "RayTrainReportCallback": (ReportHooks, "callbacks", "Callback"),
}
CLASS_NAMES = tuple(_PARTS)
"""The public classes that need Lightning."""


@cache
def class_for(package: str, name: str) -> type[Any]:
    """Return the class of that public name for "lightning.pytorch" or "pytorch_lightning".

    The same class every time. Raises AttributeError for another name.
    """
    if name not in _PARTS:
        raise AttributeError(f"module {HOMES[package]!r} has no attribute {name!r}")
    part, module, base = _PARTS[name]
    attributes = {"__module__": HOMES[package], "__doc__": part.__doc__}
    return type(name, (part, getattr(load(package, module), base)), attributes)
