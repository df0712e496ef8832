"""Encoding of what is saved besides arrays: plain leaves and the states of a rank's own objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spotfit.checkpoint import value_codec
from spotfit.checkpoint.format import StateKey
from spotfit.checkpoint.value_codec import EncodedArray, ForeignValue, LeafDecoder


def encode_values(values: Any, *, keys: Sequence[StateKey] = ()) -> bytes:
    """Encode a list with one key per value, or a dict without keys. Raises `ConfigError`."""
    return value_codec.encode_values(values, keys=keys, encode_leaf=_encode_leaf)


def decode_values(body: bytes, source: str) -> Any:
    """Decode what `encode_values` returned; arrays are those of numpy. Raises `IntegrityError`.

    Also for values that only another framework can read.
    """
    return value_codec.decode_values(body, source, _LEAF_DECODER)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a dtype of numpy or JAX by its name, such as 'bfloat16'. Raises TypeError."""
    # JAX's import has registered its dtypes with numpy.
    return np.dtype(name)


def _encode_leaf(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, jax.Array) and value.is_fully_addressable:
        value = np.asarray(value)
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return EncodedArray(str(value.dtype), value.shape, value.tobytes())
    return value


def _decode_array(array: EncodedArray) -> np.ndarray[Any, Any]:
    # A copy, which the caller may change.
    return np.frombuffer(bytearray(array.body), dtype_of(array.dtype)).reshape(array.shape)


def _reject_foreign(value: ForeignValue) -> Any:
    raise ValueError(f"one of them can only be read by {value.framework}")


_LEAF_DECODER = LeafDecoder(array=_decode_array, foreign=_reject_foreign)
