"""`PowerTransformer`: the transforms of Box and Cox, and of Yeo and Johnson."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import arrow_array
from spotfit.data.preprocessors.columns import (
    bool_array,
    float64_array,
    is_missing,
    numeric_column,
)
from spotfit.data.preprocessors.preprocessor_base import ColumnPreprocessor


class PowerTransformer(ColumnPreprocessor):
    """Apply a power transform with a given `power`: "yeo-johnson" or "box-cox" (positive values).

    Missing values stay missing; values for which the transform is not defined give NaN or minus
    infinity. The outputs are 64-bit floats, with "box-cox" 32-bit ones for columns of these.
    """

    _parameters = ("columns", "power", "method", "output_columns")
    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        power: float,
        method: str = "yeo-johnson",
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        if method not in ("yeo-johnson", "box-cox"):
            raise ConfigError(
                f"The method {method!r} is not supported.", do="Use 'yeo-johnson' or 'box-cox'."
            )
        self.power = power
        self.method = method

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        column = numeric_column(table, name)
        values = float64_array(column)
        with np.errstate(all="ignore"):
            if self.method == "box-cox":
                result = _box_cox(values, self.power)
            else:
                # Negative values are mirrored, with the power 2 - power.
                mirrored = -_box_cox(1 - values, 2 - self.power)
                result = np.where(values >= 0, _box_cox(1 + values, self.power), mirrored)
        if self.method == "box-cox" and pa.types.is_float32(column.type):
            result = result.astype(np.float32)
        return arrow_array(result, bool_array(is_missing(column)))


def _box_cox(values: Any, power: float) -> Any:
    return np.log(values) if power == 0 else (np.power(values, power) - 1) / power
