"""JSON encoding of persisted and transmitted `msgspec.Struct` types.

Compatibility rules (decision 0010): decoders ignore unknown fields, so a field with a default may
be added at any time; the meaning of an existing field never changes. Unions are tagged, and an
unknown tag is a decoding error that the caller must handle.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, TypeVar

import msgspec

StructT = TypeVar("StructT")
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of a decoder for truncated, foreign, non-text or too deeply nested input."""

# Deterministic order: equal values must give equal bytes, because callers compare and hash them.
_encoder = msgspec.json.Encoder(order="deterministic")


def encode(value: Any) -> bytes:
    """Return `value`, usually a `msgspec.Struct`, as UTF-8 JSON. Equal values give equal bytes.

    Raises `TypeError` for a type that msgspec cannot encode. NaN and infinities become null: encode
    metrics with `model.reporting.metrics_to_json` first.
    """
    try:
        return _encoder.encode(value)
    except TypeError:
        # It sorts str keys only.
        return _encoder.encode(msgspec.to_builtins(value, str_keys=True))


def decoder(struct_type: type[StructT]) -> msgspec.json.Decoder[StructT]:
    """Return a reusable decoder of JSON into `struct_type`, a `msgspec.Struct` or a union of them.

    Its `decode(body)` ignores unknown fields and raises one of `DECODE_ERRORS` for any other input
    that does not fit. Build it once per module.
    """
    return msgspec.json.Decoder(struct_type)


# Strings first: their brackets do not nest. One without an end extends to the end of the document:
# if it did not match, a search would start again at each of its quotes.
_WITHOUT_NESTING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[^\[\]{}"]+', re.DOTALL)
_DEPTH_CHANGES = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def nesting_depth(body: bytes) -> int:
    """Return how many objects and arrays of a JSON document lie within each other, at most.

    0 for a document without any, 2 for `[[1]]`; brackets in strings do not count. Does not decode,
    and therefore accepts every depth and every input; of an invalid one it counts the brackets.
    """
    brackets = _WITHOUT_NESTING.sub(b"", body)
    return max(itertools.accumulate(map(_DEPTH_CHANGES.__getitem__, brackets)), default=0)


def is_nested_deeper(body: bytes, limit: int) -> bool:
    """Whether `nesting_depth(body)` exceeds `limit`; fast for most documents."""
    # The number of brackets is an upper bound, and most messages are short or have few.
    if len(body) <= limit:
        return False
    return body.count(b"[") + body.count(b"{") > limit and nesting_depth(body) > limit
