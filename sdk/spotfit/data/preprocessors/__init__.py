"""Preprocessors of datasets, with the names of `ray.data.preprocessors`.

Importing this package must not import NumPy or PyArrow; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.data.preprocessors.scalers import MaxAbsScaler as MaxAbsScaler
    from spotfit.data.preprocessors.scalers import MinMaxScaler as MinMaxScaler
    from spotfit.data.preprocessors.scalers import RobustScaler as RobustScaler
    from spotfit.data.preprocessors.scalers import StandardScaler as StandardScaler

_SCALERS = "spotfit.data.preprocessors.scalers"
_MODULES = {
    "MaxAbsScaler": _SCALERS,
    "MinMaxScaler": _SCALERS,
    "RobustScaler": _SCALERS,
    "StandardScaler": _SCALERS,
}

__all__ = ["MaxAbsScaler", "MinMaxScaler", "RobustScaler", "StandardScaler"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
