"""Columns and arguments on which batches of spotfit.data are compared with those of Ray Data.

`record_ray_batches.py` runs them with Ray, `test_batches_ray.py` with spotfit. This module needs
neither.
"""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa

ROWS = 5
TIMES = [
    datetime.datetime(2026, 1, 2, 3, 4, 5, 678901) + datetime.timedelta(days=n) for n in range(5)
]
NUMBERS = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}


def columns() -> dict[str, pa.Array]:
    """Return one array of `ROWS` values for each type of column."""
    numbers = {name: _numbers(kind) for name, kind in NUMBERS.items()}
    return numbers | _columns_with_nulls() | _other_columns() | _nested_columns()


def _numbers(kind: pa.DataType) -> pa.Array:
    return pa.array(np.arange(ROWS).astype(kind.to_pandas_dtype()), kind)


def _columns_with_nulls() -> dict[str, pa.Array]:
    return {
        "int64 with null": pa.array([0, None, 2, 3, 4], pa.int64()),
        "uint8 with null": pa.array([0, None, 2, 3, 4], pa.uint8()),
        "float32 with null": pa.array([0, None, 2, 3, 4], pa.float32()),
        "bool with null": pa.array([True, None, False, True, False]),
        "string with null": pa.array(["a", None, "", "é", "long"]),
        "binary with null": pa.array([b"a", None, b"", b"\0", b"long"]),
        "timestamp with null": pa.array([TIMES[0], None, *TIMES[2:]], pa.timestamp("us")),
        "list with null": pa.array([[1, 2], None, [3, 4], [5, 6], [7, 8]]),
        "list with null item": pa.array([[1, None], [1, 2], [3, 4], [5, 6], [7, 8]]),
        "null": pa.nulls(ROWS),
    }


def _other_columns() -> dict[str, pa.Array]:
    days = [one.date() for one in TIMES]
    return {
        "bool": pa.array([True, True, False, True, False]),
        "string": pa.array(["a", "b", "", "é", "long"]),
        "large_string": pa.array(["a", "b", "", "é", "long"], pa.large_string()),
        "binary": pa.array([b"a", b"b", b"", b"\0", b"long"]),
        "fixed binary": pa.array([b"ab", b"cd", b"ef", b"gh", b"\0\0"], pa.binary(2)),
        "dictionary": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode(),
        "timestamp s": pa.array(TIMES, pa.timestamp("us")).cast(pa.timestamp("s"), safe=False),
        "timestamp us": pa.array(TIMES, pa.timestamp("us")),
        "timestamp ns UTC": pa.array(TIMES, pa.timestamp("ns", "UTC")),
        "date32": pa.array(days, pa.date32()),
        "date64": pa.array(days, pa.date64()),
        "time64": pa.array([one.time() for one in TIMES], pa.time64("us")),
        "duration": pa.array([datetime.timedelta(seconds=n) for n in range(5)], pa.duration("ms")),
        "decimal": pa.array([decimal.Decimal(f"{n}.25") for n in range(5)]),
    }


def _nested_columns() -> dict[str, pa.Array]:
    tensor = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    flat = pa.array(np.arange(6 * ROWS, dtype=np.float32))
    return {
        "fixed-size list": pa.FixedSizeListArray.from_arrays(flat, 6),
        "fixed-size list of lists": pa.array(
            [[[n, 1], [2, 3]] for n in range(5)], pa.list_(pa.list_(pa.int64(), 2), 2)
        ),
        "tensor": pa.ExtensionArray.from_storage(
            tensor, pa.FixedSizeListArray.from_arrays(flat, 6)
        ),
        "list of equal lengths": pa.array([[n, 1, 2] for n in range(5)]),
        "list of different lengths": pa.array([[1], [2, 3], [], [4, 5], [6]]),
        "list of lists of equal lengths": pa.array([[[n, 1], [2, 3]] for n in range(5)]),
        "list of lists of different lengths": pa.array([[[1]], [[2, 3], [4]], [], [[5]], [[6]]]),
        "list of strings": pa.array([["a"], ["b", "c"], [], ["d"], ["e"]]),
        "struct": pa.array([{"x": n, "y": str(n)} for n in range(5)]),
        "map": pa.array([[("k", n)] for n in range(5)], pa.map_(pa.string(), pa.int64())),
    }
