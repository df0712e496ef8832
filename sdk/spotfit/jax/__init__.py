"""Training with JAX: `from spotfit.jax import JaxTrainer`.

Importing this package must not import jax; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.frameworks.jax.jax_config import JaxConfig as JaxConfig
    from spotfit.jax.jax_trainer import JaxTrainer as JaxTrainer

_MODULES = {
    "JaxConfig": "spotfit.frameworks.jax.jax_config",
    "JaxTrainer": "spotfit.jax.jax_trainer",
}

__all__ = ["JaxConfig", "JaxTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    # Without the imports of this module, which would be offered as completions.
    special = (name for name in globals() if name.startswith("__"))
    return sorted({*special, *__all__})
