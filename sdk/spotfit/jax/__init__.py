"""Training with JAX: `from spotfit.jax import JaxTrainer`.

Importing this package must not import jax; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.frameworks.jax.jax_config import JaxConfig as JaxConfig
    from spotfit.jax.jax_trainer import JaxTrainer as JaxTrainer

_MODULES = {
    "JaxConfig": "spotfit.frameworks.jax.jax_config",
    "JaxTrainer": "spotfit.jax.jax_trainer",
}

__all__ = ["JaxConfig", "JaxTrainer"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
