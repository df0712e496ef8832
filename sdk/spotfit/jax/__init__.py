"""Training with JAX: `from spotfit.jax import JaxTrainer, Checkpointer`.

Importing this package must not import jax; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.frameworks.jax.jax_config import JaxConfig as JaxConfig
    from spotfit.jax.checkpoint.pytree_checkpointer import Checkpointer as Checkpointer
    from spotfit.jax.checkpoint.pytree_checkpointer import export_checkpoint as export_checkpoint
    from spotfit.jax.jax_trainer import JaxTrainer as JaxTrainer

_MODULES = {
    "Checkpointer": "spotfit.jax.checkpoint.pytree_checkpointer",
    "JaxConfig": "spotfit.frameworks.jax.jax_config",
    "JaxTrainer": "spotfit.jax.jax_trainer",
    "export_checkpoint": "spotfit.jax.checkpoint.pytree_checkpointer",
}

__all__ = ["Checkpointer", "JaxConfig", "JaxTrainer", "export_checkpoint"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
