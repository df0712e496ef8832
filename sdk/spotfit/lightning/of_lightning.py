"""The classes of spotfit.lightning for the package `lightning.pytorch`: where pickle finds them."""

from __future__ import annotations

from typing import Any

from spotfit.lightning.lightning_classes import class_for


def __getattr__(name: str) -> Any:
    return class_for("lightning.pytorch", name)
