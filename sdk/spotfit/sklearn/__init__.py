"""Training with scikit-learn on one worker: `from spotfit.sklearn import SklearnTrainer`.

Importing this package must not import sklearn; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.sklearn.sklearn_trainer import SklearnTrainer as SklearnTrainer

_MODULES = {"SklearnTrainer": "spotfit.sklearn.sklearn_trainer"}

__all__ = ["SklearnTrainer"]


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
