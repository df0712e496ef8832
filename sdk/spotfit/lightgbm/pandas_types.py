"""Conversion of pandas columns that are backed by Arrow, which LightGBM does not accept."""

from __future__ import annotations

from typing import Any


def normalize_pandas_for_lightgbm(df: Any) -> Any:
    """Return a DataFrame whose Arrow-backed number and bool columns have pandas' nullable types.

    Int, UInt, Float of the same width, and boolean; 16-bit floats become Float32, since pandas has
    no smaller one. Other columns are unchanged, and so is the argument.
    """
    # Read from its names: pandas without pyarrow has no ArrowDtype.
    types = {
        column: converted
        for column, dtype in df.dtypes.items()
        if (converted := _nullable_type(str(dtype))) is not None
    }
    return df.astype(types) if types else df


def _nullable_type(name: str) -> str | None:
    """Return "Int64" for "int64[pyarrow]"; None for a type that is not converted."""
    base, bracket, backend = name.partition("[")
    return _NULLABLE_TYPES.get(base) if bracket and backend == "pyarrow]" else None


_NULLABLE_TYPES = {
    "bool": "boolean",
    "double": "Float64",
    "float": "Float32",
    "halffloat": "Float32",
    **{f"int{bits}": f"Int{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UInt{bits}" for bits in (8, 16, 32, 64)},
}
"""By Arrow's name of a type, as pandas shows it."""
