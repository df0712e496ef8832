"""JSON encoding is deterministic and compatible with added fields."""

from typing import Any

import msgspec
import pytest

from spotfit.core.codec import DECODE_ERRORS, decoder, encode, is_nested_deeper, nesting_depth


class Before(msgspec.Struct, frozen=True):
    """A record."""

    name: str


class After(msgspec.Struct, frozen=True):
    """A later version of the record, with another field."""

    name: str
    size_bytes: int = 0


def test_equal_values_have_equal_bytes() -> None:
    assert encode({"b": 1, "a": 2}) == encode({"a": 2, "b": 1})
    assert encode(frozenset({"z", "a", "m"})) == encode(frozenset({"m", "z", "a"}))


def test_numbers_may_be_keys() -> None:
    assert encode({2: "b", 10: "a"}) == encode({10: "a", 2: "b"})
    assert decoder(dict[int, str]).decode(encode({2: "b"})) == {2: "b"}


def test_unknown_fields_are_ignored() -> None:
    assert decoder(Before).decode(encode(After("x", 7))) == Before("x")


def test_missing_fields_get_defaults() -> None:
    assert decoder(After).decode(encode(Before("x"))) == After("x", 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"name":"a',
        b"[]",
        b"{}",
        b'{"name":7}',
        b"\x00\x01",
        b'{"name":"\xff"}',
        b'{"x":' + b"[" * 5000,
    ],
    ids=["empty", "cut", "no object", "no field", "other type", "no JSON", "no text", "deep"],
)
def test_foreign_bytes_raise_a_decode_error(body: bytes) -> None:
    reader: Any = decoder(Before)
    with pytest.raises(DECODE_ERRORS):
        reader.decode(body)


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"", 0),
        (b"7", 0),
        (b"[]", 1),
        (b'{"a":[1,{"b":2}],"c":[[]]}', 3),
        (b'{"a":"[[[[\\"[["}', 1),
        (b"[" * 50_000, 50_000),
        (b'["unterminated [[', 1),
        (b'[["unterminated [\\', 2),
    ],
)
def test_the_nesting_depth_ignores_strings(body: bytes, depth: int) -> None:
    assert nesting_depth(body) == depth
    assert is_nested_deeper(body, depth - 1)
    assert not is_nested_deeper(body, depth)


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_string_without_an_end_is_read_once(end: bytes) -> None:
    # Quadratic time, as for a search at each quote, would be hours.
    assert nesting_depth(b"[" * 300 + b'"' + b'\\"' * 500_000 + end) == 300
