"""`tf.train.Example` messages, decoded without TensorFlow and protobuf.

The format is that of https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example:
Example { Features features = 1; }, Features { map<string, Feature> feature = 1; } and
Feature { BytesList bytes_list = 1 | FloatList float_list = 2 | Int64List int64_list = 3; }, whose
values are field 1. Numbers are packed, by old writers not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

Features: TypeAlias = dict[str, Any]
"""Per name: a list of bytes, or an array of float32 or int64; None if a feature has no kind."""

_BYTES_KIND, _FLOAT_KIND, _INT_KIND = 1, 2, 3
_KINDS = {_BYTES_KIND: pa.binary(), _FLOAT_KIND: pa.float32(), _INT_KIND: pa.int64()}
_HEADER_BYTES = 20
"""Two numbers of at most ten bytes: the tag and the length of a field."""


def decode_example(message: bytes | memoryview) -> Features:
    """Return the features of an Example. Raises `ValueError` for another message."""
    features: Features = {}
    for _, body in _fields(memoryview(message), 1):
        for _, entry in _fields(body, 1):
            name, value = "", None
            for field, content in _fields(entry):
                if field == 1:
                    name = bytes(content).decode()
                elif field == 2:
                    value = _decode_feature(content)
            features[name] = value
    return features


class FeatureShape(NamedTuple):
    """Type and number of the values of a feature."""

    kind: pa.DataType
    value_count: int


class MessageReader(Protocol):
    """A file with messages, or a part of one."""

    def seek(self, offset: int, /) -> int:
        """Set the position of the next `read`."""
        ...

    def read(self, size: int, /) -> bytes | None:
        """Return `size` bytes, fewer at the end."""
        ...


def read_shapes(reader: MessageReader, begin: int, end: int) -> dict[str, FeatureShape | None]:
    """Return what `decode_example` would return, without values: None if a feature has no kind.

    Bytes and floats are skipped. Raises `ValueError` for another message.
    """
    shapes: dict[str, FeatureShape | None] = {}
    for features in _spans(reader, _Span(1, begin, end), 1):
        for entry in _spans(reader, features, 1):
            name, shape = "", None
            for part in _spans(reader, entry):
                if part.number == 1:
                    name = _content(reader, part).decode()
                elif part.number == 2:
                    shape = _read_shape(reader, part)
            shapes[name] = shape
    return shapes


def _read_shape(reader: MessageReader, feature: _Span) -> FeatureShape | None:
    shape = None
    for values in _spans(reader, feature):
        if values.number not in _KINDS:
            raise ValueError(f"a feature has the unknown kind {values.number}")
        parts = _spans(reader, values, 1)
        count = sum(_count_values(reader, part, values.number) for part in parts)
        shape = FeatureShape(_KINDS[values.number], count)
    return shape


def _count_values(reader: MessageReader, values: _Span, kind: int) -> int:
    length = values.end - values.begin
    if kind == _BYTES_KIND:
        return 1
    if kind == _FLOAT_KIND:
        if length % 4:
            raise ValueError("a number is incomplete")
        return length // 4
    body = np.frombuffer(_content(reader, values), np.uint8)
    if length and body[-1] >= 128:
        raise ValueError("an integer is incomplete")
    return int(np.count_nonzero(body < 128))


def _decode_feature(message: memoryview) -> Any:
    value: Any = None
    for kind, content in _fields(message):
        if kind == 1:
            value = [bytes(one) for _, one in _fields(content, 1)]
        elif kind in (2, 3):
            value = _decode_numbers(content, is_float=kind == 2)
        else:
            raise ValueError(f"a feature has the unknown kind {kind}")
    return value


def _decode_numbers(message: memoryview, *, is_float: bool) -> Any:
    parts = []
    for _, content in _fields(message, 1):
        if is_float:
            parts.append(np.frombuffer(content, "<f4"))
        else:
            parts.append(_decode_varints(content))
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, np.float32 if is_float else np.int64)
    return np.concatenate([empty, *parts])


def _decode_varints(body: memoryview) -> Any:
    """Return packed variable-length integers of 7 bits per byte, the lowest first."""
    values = np.frombuffer(body, np.uint8)
    (ends,) = np.nonzero(values < 128)
    if not len(values):
        return np.empty(0, np.int64)
    if not len(ends) or ends[-1] != len(values) - 1:
        raise ValueError("an integer is incomplete")
    begins = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(values)) - np.repeat(begins, ends - begins + 1)
    bits = (values & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(bits, begins).view(np.int64)


def _fields(message: memoryview, wanted: int | None = None) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of the fields; of `wanted` only, if it is given."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        match tag & 7:
            case 0:
                begin = position
                _, position = _varint(message, position)
                content = message[begin:position]
            case 1:
                position += 8
                content = message[position - 8 : position]
            case 2:
                length, begin = _varint(message, position)
                position = begin + length
                content = message[begin:position]
            case 5:
                position += 4
                content = message[position - 4 : position]
            case kind:
                raise ValueError(f"a field has the unknown wire type {kind}")
        if position > len(message):
            raise ValueError("a field is incomplete")
        if wanted is None or tag >> 3 == wanted:
            yield tag >> 3, content


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message):
            raise ValueError("a number is incomplete")
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


class _Span(NamedTuple):
    """Where the content of a field is."""

    number: int
    begin: int
    end: int


def _spans(reader: MessageReader, message: _Span, wanted: int | None = None) -> Iterator[_Span]:
    """Yield the fields of a message as `_fields` does, without their contents."""
    position = message.begin
    while position < message.end:
        reader.seek(position)
        header = memoryview(reader.read(min(_HEADER_BYTES, message.end - position)) or b"")
        tag, length = _varint(header, 0)
        match tag & 7:
            case 0:
                begin, (_, size) = position + length, _varint(header, length)
                end = position + size
            case 1:
                begin, end = position + length, position + length + 8
            case 2:
                size, length = _varint(header, length)
                begin, end = position + length, position + length + size
            case 5:
                begin, end = position + length, position + length + 4
            case kind:
                raise ValueError(f"a field has the unknown wire type {kind}")
        if end > message.end:
            raise ValueError("a field is incomplete")
        if wanted is None or tag >> 3 == wanted:
            yield _Span(tag >> 3, begin, end)
        position = end


def _content(reader: MessageReader, span: _Span) -> bytes:
    reader.seek(span.begin)
    return reader.read(span.end - span.begin) or b""
