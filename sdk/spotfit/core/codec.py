"""Facts to JSON and back. Readers keep going on fields they do not know; `msgspec` does the work.

A fact is a frozen `msgspec.Struct`. Unions are told apart by their tag, so an unknown tag is an
error the caller can name, and an unknown field is ignored: add fields with defaults, never change
the meaning of one.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

Fact = TypeVar("Fact")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What a decoder raises for bytes that are not of its kind: cut, foreign, or not even text."""

_encoder = msgspec.json.Encoder(order="deterministic")


class Decode(Protocol[Fact]):  # type: ignore[misc]  # a decoder only ever gives
    def decode(self, body: bytes | memoryview, /) -> Fact: ...


def encode(fact: Any) -> bytes:
    """JSON; equal facts give equal bytes."""
    return _encoder.encode(fact)


def decoder(kind: type[Fact]) -> msgspec.json.Decoder[Fact]:
    """A reusable reader for `kind`; it raises one of `UNREADABLE` on anything else."""
    return msgspec.json.Decoder(kind)
