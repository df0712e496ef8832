"""Values are restored exactly, and nothing that is read runs code."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from spotfit.checkpoint.value_codec import (
    EncodedArray,
    ForeignValue,
    LeafDecoder,
    decode_values,
    encode_values,
)
from spotfit.core.errors import ConfigError, IntegrityError

DECODER = LeafDecoder(array=lambda array: array, foreign=lambda value: value)


def keep(value: Any) -> Any:
    return value


def round_trip(value: Any) -> Any:
    body = encode_values([value], keys=[("value",)], encode_leaf=keep)
    return decode_values(body, "rank 0", DECODER)[0]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        2**64 - 1,
        2**64,
        -(10**40),
        1 << 20_000,  # more digits than Python prints
        0.1,
        -0.0,
        math.inf,
        1 - 2j,
        "",
        "Ä",
        b"\0\xff",
        [],
        (),
        {},
        [1, [2, (3, [4])]],
        (1, (2, {"a": (3,)})),
        {"a": {"b": [None]}},
        {1: "a", "1": "b", (1, 2): "c", None: "d"},
        OrderedDict(b=1, a=(2,)),
    ],
    ids=lambda value: "large" if value == 1 << 20_000 else repr(value),
)
def test_values_keep_their_types_and_order(value: Any) -> None:
    restored = round_trip(value)
    assert (type(restored), restored) == (type(value), value)
    if value != 1 << 20_000:
        assert repr(restored) == repr(value)


def test_integers_of_earlier_checkpoints_are_read_as_decimals() -> None:
    body = msgspec.msgpack.encode([msgspec.msgpack.Ext(4, b"-10000000000000000000000")])
    assert decode_values(body, "rank 0", DECODER) == [-(10**22)]


def nested(value: Any, wrap: Callable[[Any], Any], levels: int) -> Any:
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS = [lambda one: [one], lambda one: (one,), lambda one: {"a": one}, lambda one: {1: one}]


@pytest.mark.parametrize("wrap", WRAPS, ids=["list", "tuple", "dict", "integer keys"])
def test_values_of_100_levels_are_restored_and_deeper_ones_rejected(wrap: Any) -> None:
    deepest = nested(1, wrap, 99)
    assert round_trip(deepest) == deepest
    with pytest.raises(ConfigError, match="more than 100 levels deep"):
        round_trip(wrap(deepest))


def test_a_cycle_is_rejected() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="a cycle of references"):
        round_trip(cycle)


def test_keys_that_are_not_unicode_are_values_of_the_framework() -> None:
    body = encode_values(
        {"\udc80": 1}, encode_leaf=lambda key: ForeignValue("torch", key.encode("utf-8", "replace"))
    )
    assert list(decode_values(body, "rank 0", DECODER).values()) == [1]


def test_nan_is_restored() -> None:
    assert math.isnan(round_trip([float("nan")])[0])


def test_arrays_and_values_of_a_framework_reach_its_decoder() -> None:
    array = EncodedArray("float32", (2, 1), b"\0" * 8)
    foreign = ForeignValue("torch", b"sparse")
    body = encode_values(
        {"a": {1}, "b": [object]},
        encode_leaf=lambda value: array if type(value) is set else foreign,
    )
    assert decode_values(body, "rank 0", DECODER) == {"a": array, "b": [foreign]}


def test_a_leaf_may_become_a_plain_value() -> None:
    body = encode_values({"a": {3}}, encode_leaf=lambda value: max(value))
    assert decode_values(body, "rank 0", DECODER) == {"a": 3}


def test_all_rejected_values_are_named() -> None:
    values = [1, {"clock": object(), "b": [2, object()]}, "\ud800"]
    keys = [("a",), ("extra", "x"), ("name",)]
    with pytest.raises(ConfigError, match=r"of extra\.x\.clock, extra\.x\.b\.1, name contains"):
        encode_values(values, keys=keys, encode_leaf=keep)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"\x90")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, b"no number")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"\x91\x91\x01")),
    ],
    ids=repr,
)
def test_corrupt_bytes_are_rejected(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="The values that rank 3 saved are corrupt"):
        decode_values(body, "rank 3", DECODER)
