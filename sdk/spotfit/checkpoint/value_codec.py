"""Encoding of the values in a snapshot's index that are not pieces of tensors, without pickle.

msgpack with extensions keeps what msgpack lacks: tuples, dicts with any keys, large integers and
arrays. Values that only one framework knows stay as bytes which that framework reads. Decoding runs
no code, and needs a framework only for its own arrays and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.msgpack import Ext

from spotfit.checkpoint.format import StateKey, dotted_name
from spotfit.core.errors import ConfigError, IntegrityError

# The codes are part of the format: a code keeps its meaning.
_TUPLE, _DICT, _ORDERED_DICT, _INTEGER, _COMPLEX, _ARRAY, _FOREIGN = range(1, 8)
_MIN_INT, _MAX_INT = -(2**63), 2**64
"""Integers of msgpack: from the first up to, but without, the second."""
_MAX_DEPTH = 100
"""Containers in containers. A decoder calls itself for each level, on a stack that is limited."""
_CONTAINERS: Mapping[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _DICT: dict,
    _ORDERED_DICT: OrderedDict,
}


class EncodedArray(NamedTuple):
    """An array or tensor on the CPU, as bytes in row-major order."""

    dtype: str
    """As in `TensorPiece`."""
    shape: tuple[int, ...]
    body: bytes


class ForeignValue(NamedTuple):
    """A value that only one framework can read, such as a sparse tensor."""

    framework: str
    body: bytes


EncodeLeafFn = Callable[[Any], Any]
"""Returns a value of a framework as `EncodedArray`, `ForeignValue` or plain value.

Returns the value itself if it cannot be encoded.
"""


class LeafDecoder(NamedTuple):
    """How a framework reads what its `EncodeLeafFn` has written. Both may raise ValueError."""

    array: Callable[[EncodedArray], Any]
    foreign: Callable[[ForeignValue], Any]


def encode_values(
    values: Any, *, keys: Sequence[StateKey] = (), encode_leaf: EncodeLeafFn
) -> bytes:
    """Encode a list with one key per value, or a dict without `keys`, for `decode_values`.

    None, numbers, strings, bytes, and lists, tuples and dicts of these are plain values. Raises
    `ConfigError`, with the names of all values that are not plain and that `encode_leaf` rejects,
    and for values that are nested more than 100 levels deep.
    """
    rejected: list[StateKey] = []
    encoder = _Encoder(encode_leaf, rejected)
    plain = (
        [encoder.encode(value, key) for key, value in zip(keys, values, strict=True)]
        if keys
        else encoder.encode(values, ())
    )
    if rejected:
        raise ConfigError(
            f"The state of {', '.join(map(dotted_name, rejected))} contains objects that can only "
            "be pickled.",
            do="Let its state_dict() return tensors, numbers, strings, and lists and dictionaries "
            "of these.",
        )
    return msgspec.msgpack.encode(plain)


def decode_values(body: bytes, source: str, decoder: LeafDecoder) -> Any:
    """Decode what `encode_values` returned.

    `source` says whose values they are. Raises `IntegrityError` with it if the bytes are corrupt.
    """

    def decode_extension(code: int, content: memoryview) -> Any:
        if code in (_INTEGER, _COMPLEX):
            text = bytes(content).decode()
            return int(text, 0) if code == _INTEGER else complex(text)
        parts = decode(content)
        if code == _ARRAY:
            dtype, shape, array = parts
            return decoder.array(EncodedArray(dtype, tuple(shape), array))
        if code == _FOREIGN:
            return decoder.foreign(ForeignValue(*parts))
        return _CONTAINERS[code](parts)

    def decode(encoded: bytes | memoryview) -> Any:
        return msgspec.msgpack.decode(encoded, ext_hook=decode_extension)

    try:
        return decode(body)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise IntegrityError(
            f"The values that {source} saved are corrupt: {error}",
            do="Use another checkpoint (spotfit checkpoints ls lists them), or restore this one "
            "from a backup.",
        ) from error


class _Encoder:
    """Replaces what msgpack lacks by extensions, and collects the keys of rejected values."""

    def __init__(self, encode_leaf: EncodeLeafFn, rejected: list[StateKey]) -> None:
        self._encode_leaf = encode_leaf
        self._rejected = rejected

    def encode(self, value: Any, key: StateKey) -> Any:
        if len(key) > _MAX_DEPTH:
            raise ConfigError(
                f"The state of {dotted_name(key[:3])} is nested more than {_MAX_DEPTH} levels "
                "deep.",
                do="Store it in flat lists or dictionaries; a cycle of references cannot be saved.",
            )
        kind = type(value)
        if kind in (bool, float, bytes, type(None)) or (kind is str and _is_utf8(value)):
            return value
        if kind is int:
            if _MIN_INT <= value < _MAX_INT:
                return value
            # Hexadecimal: Python limits the number of decimal digits.
            return Ext(_INTEGER, hex(value).encode())
        if kind is complex:
            return Ext(_COMPLEX, str(value).encode())
        if kind is list:
            return self._encode_items(value, key)
        if kind is tuple:
            return _extension(_TUPLE, self._encode_items(value, key))
        if kind in (dict, OrderedDict):
            return self._encode_mapping(value, key)
        return self._encode_other(value, key)

    def _encode_items(self, items: Sequence[Any], key: StateKey) -> list[Any]:
        return [self.encode(item, (*key, n)) for n, item in enumerate(items)]

    def _encode_mapping(self, value: Mapping[Any, Any], key: StateKey) -> Any:
        encoded = [
            (self.encode(name, key), self.encode(part, (*key, str(name))))
            for name, part in value.items()
        ]
        if type(value) is OrderedDict:
            return _extension(_ORDERED_DICT, encoded)
        is_plain = all(type(name) is str and _is_utf8(name) for name in value)
        return dict(encoded) if is_plain else _extension(_DICT, encoded)

    def _encode_other(self, value: Any, key: StateKey) -> Any:
        leaf = self._encode_leaf(value)
        if isinstance(leaf, EncodedArray | ForeignValue):
            return _extension(_ARRAY if isinstance(leaf, EncodedArray) else _FOREIGN, leaf)
        if type(leaf) is not type(value):
            return self.encode(leaf, key)
        self._rejected.append(key)
        return None


def _extension(code: int, parts: Any) -> Ext:
    return Ext(code, msgspec.msgpack.encode(parts))


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:  # a surrogate, for example of a file name with any bytes
        return False
