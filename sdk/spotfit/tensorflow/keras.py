"""Callbacks of Keras: `from spotfit.tensorflow.keras import ReportCheckpointCallback`.

Importing this module must not import tensorflow, which the migrate command does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.tensorflow.keras_callback import (
        ReportCheckpointCallback as ReportCheckpointCallback,
    )
    from spotfit.tensorflow.keras_callback import restore_model as restore_model

__all__ = ["ReportCheckpointCallback", "restore_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("spotfit.tensorflow.keras_callback"), name)
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    # Without the imports of this module, which would be offered as completions.
    special = (name for name in globals() if name.startswith("__"))
    return sorted({*special, *__all__})
