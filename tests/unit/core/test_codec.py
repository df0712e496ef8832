"""Facts to JSON and back: equal facts are equal bytes, and readers outlive new fields."""

from typing import Any

import msgspec
import pytest

from spotfit.core.codec import UNREADABLE, decoder, encode


class Before(msgspec.Struct, frozen=True):
    """A fact as it was."""

    name: str


class After(msgspec.Struct, frozen=True):
    """The same, a version later."""

    name: str
    size_bytes: int = 0


def test_equal_facts_are_equal_bytes() -> None:
    assert encode({"b": 1, "a": 2}) == encode({"a": 2, "b": 1})
    assert encode(frozenset({"z", "a", "m"})) == encode(frozenset({"m", "z", "a"}))


def test_a_reader_passes_over_fields_that_came_later() -> None:
    assert decoder(Before).decode(encode(After("x", 7))) == Before("x")


def test_a_new_reader_fills_in_what_an_old_writer_did_not_know() -> None:
    assert decoder(After).decode(encode(Before("x"))) == After("x", 0)


@pytest.mark.parametrize(
    "body",
    [b"", b'{"name":"a', b"[]", b"{}", b'{"name":7}', b"\x00\x01", b'{"name":"\xff"}'],
    ids=["empty", "cut", "no object", "field missing", "other type", "no JSON", "no text"],
)
def test_what_is_not_of_its_kind_is_unreadable(body: bytes) -> None:
    reader: Any = decoder(Before)
    with pytest.raises(UNREADABLE):
        reader.decode(body)
