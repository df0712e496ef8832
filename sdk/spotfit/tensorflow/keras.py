"""Callbacks of Keras: `from spotfit.tensorflow.keras import ReportCheckpointCallback`.

Importing this module must not import tensorflow, which the migrate command does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.tensorflow.keras_callback import (
        ReportCheckpointCallback as ReportCheckpointCallback,
    )
    from spotfit.tensorflow.keras_callback import restore_model as restore_model

__all__ = ["ReportCheckpointCallback", "restore_model"]

__getattr__, __dir__ = lazy_names(
    __name__, dict.fromkeys(__all__, "spotfit.tensorflow.keras_callback")
)
