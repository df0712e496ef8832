"""Random nested columns of Arrow, and their values as Python objects."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

_Draw: TypeAlias = Callable[[random.Random], Any]
_VALUES: tuple[tuple[pa.DataType, _Draw], ...] = (
    (pa.int32(), lambda rng: rng.randrange(-5, 5)),
    (pa.float32(), lambda rng: float(rng.randrange(9))),
    (pa.bool_(), lambda rng: rng.random() < 0.5),
    (pa.string(), lambda rng: "é" * rng.randrange(4)),
    (pa.binary(), lambda rng: bytes(rng.randrange(3))),
)


def random_column(rng: random.Random) -> pa.ChunkedArray:
    """Return a column of up to seven rows: lists of up to three levels, in one or two chunks."""
    kind, draw = _random_type(rng, levels=3)
    null_share = rng.choice([0, 0, 0.2])
    rows = [_with_nulls(draw(rng), null_share, rng) for _ in range(rng.randrange(8))]
    # A slice, whose values do not begin at the begin of their buffers.
    array = pa.array([*rows, *rows], kind).slice(len(rows))
    first = rng.randrange(len(rows) + 1)
    return pa.chunked_array([array] if first == 0 else [array.slice(0, first), array.slice(first)])


def _random_type(rng: random.Random, levels: int) -> tuple[pa.DataType, _Draw]:
    if not levels or rng.random() < 0.3:
        return rng.choice(_VALUES)
    kind, draw = _random_type(rng, levels - 1)
    if rng.random() < 0.4:
        size = rng.randrange(4)
        return pa.list_(kind, size), lambda rng: [draw(rng) for _ in range(size)]
    lists = pa.list_(kind) if rng.random() < 0.7 else pa.large_list(kind)
    return lists, lambda rng: [draw(rng) for _ in range(rng.randrange(4))]


def _with_nulls(value: Any, share: float, rng: random.Random) -> Any:
    if rng.random() < share:
        return None
    return [_with_nulls(one, share, rng) for one in value] if isinstance(value, list) else value


def python_values(value: Any) -> Any:
    """Return arrays as lists, and NaN, which stands for null values of numbers, as None."""
    if isinstance(value, np.ndarray):
        return [python_values(one) for one in value]
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and math.isnan(plain) else plain
