"""Training with scikit-learn on one worker: `from spotfit.sklearn import SklearnTrainer`.

Importing this package must not import sklearn; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.sklearn.sklearn_trainer import SklearnTrainer as SklearnTrainer

_MODULES = {"SklearnTrainer": "spotfit.sklearn.sklearn_trainer"}

__all__ = ["SklearnTrainer"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
