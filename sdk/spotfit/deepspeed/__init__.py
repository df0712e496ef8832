"""Training with DeepSpeed: `from spotfit.deepspeed import Checkpointer, initialize`.

Importing this package must not import deepspeed; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.deepspeed.checkpoint_files import load_checkpoint as load_checkpoint
    from spotfit.deepspeed.checkpoint_files import report_checkpoint as report_checkpoint
    from spotfit.deepspeed.engine import initialize as initialize
    from spotfit.deepspeed.engine_checkpointer import Checkpointer as Checkpointer

_MODULES = {
    "Checkpointer": "spotfit.deepspeed.engine_checkpointer",
    "initialize": "spotfit.deepspeed.engine",
    "load_checkpoint": "spotfit.deepspeed.checkpoint_files",
    "report_checkpoint": "spotfit.deepspeed.checkpoint_files",
}

__all__ = ["Checkpointer", "initialize", "load_checkpoint", "report_checkpoint"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
