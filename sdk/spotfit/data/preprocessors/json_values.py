"""Values of Python as JSON that is read back with the same types: keys, tuples, NaN, arrays.

Objects of JSON are always `{"$type": ...}`, so that no value can be mistaken for another.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np

from spotfit.core.errors import ConfigError


def encode_value(value: Any) -> Any:
    """Return a value of which `json.dumps` makes text. Raises `ConfigError` for other types."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is list:
        return [encode_value(element) for element in value]
    encoded = _ENCODERS.get(type(value))
    if encoded is not None:
        return {encoded[0]: encoded[1](value)}
    return _encode_other(value)


def decode_value(encoded: Any) -> Any:
    """Return the value of `encode_value`. Raises `ConfigError` for unknown types."""
    if isinstance(encoded, list):
        return [decode_value(element) for element in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) == 1:
        tag, content = next(iter(encoded.items()))
        if tag in _DECODERS:
            return _DECODERS[tag](content)
    raise ConfigError(
        f"The stored preprocessor contains a value of an unknown type: {sorted(encoded)}.",
        do="Read it with the version of spotfit that wrote it, or a later one.",
    )


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return {"$dtype": value.str}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"$scalar_type": np.dtype(value).str}
    name = type(value).__name__
    if name == "CategoricalDtype":
        return {"$categories": [encode_value(list(value.categories)), bool(value.ordered)]}
    if name == "IntervalIndex":
        bounds = [encode_value(list(value.left)), encode_value(list(value.right))]
        return {"$intervals": [*bounds, value.closed]}
    raise ConfigError(
        f"A value of the type {name} cannot be stored as JSON: {value!r:.100}.",
        do="Use serialize(), whose result must be trusted by its reader, or convert the column to "
        "text or numbers before fit().",
    )


def _encode_pairs(values: Any) -> list[Any]:
    return [[encode_value(key), encode_value(value)] for key, value in values.items()]


def _decode_pairs(pairs: Any) -> dict[Any, Any]:
    return {decode_value(key): decode_value(value) for key, value in pairs}


def _encode_array(array: Any) -> list[Any]:
    return [array.dtype.str, list(array.shape), encode_value(array.reshape(-1).tolist())]


def _decode_array(content: Any) -> Any:
    dtype, shape, values = content
    return np.array(decode_value(values), dtype=np.dtype(dtype)).reshape(shape)


def _decode_categories(content: Any) -> Any:
    import pandas as pd

    categories, ordered = content
    return pd.CategoricalDtype(decode_value(categories), ordered=ordered)


def _decode_intervals(content: Any) -> Any:
    import pandas as pd

    left, right, closed = content
    return pd.IntervalIndex.from_arrays(decode_value(left), decode_value(right), closed=closed)


_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    float: ("$float", repr),
    tuple: ("$tuple", lambda values: [encode_value(value) for value in values]),
    dict: ("$dict", _encode_pairs),
    Counter: ("$counter", _encode_pairs),
    bytes: ("$bytes", bytes.hex),
    np.ndarray: ("$array", _encode_array),
    Decimal: ("$decimal", str),
    datetime.datetime: ("$datetime", datetime.datetime.isoformat),
    datetime.date: ("$date", datetime.date.isoformat),
    datetime.time: ("$time", datetime.time.isoformat),
    datetime.timedelta: ("$seconds", lambda value: [value.days, value.seconds, value.microseconds]),
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda values: tuple(decode_value(value) for value in values),
    "$dict": _decode_pairs,
    "$counter": lambda pairs: Counter(_decode_pairs(pairs)),
    "$bytes": bytes.fromhex,
    "$array": _decode_array,
    "$decimal": Decimal,
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$seconds": lambda parts: datetime.timedelta(*parts),
    "$dtype": np.dtype,
    "$scalar_type": lambda name: np.dtype(name).type,
    "$categories": _decode_categories,
    "$intervals": _decode_intervals,
}
