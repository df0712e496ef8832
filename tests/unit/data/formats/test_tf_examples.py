"""`tf.train.Example` messages, against Google's protobuf library."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.data.formats.tf_examples import decode_example, read_shapes
from tests.unit.data.tf_example_messages import encode_example


def decode(features: dict[str, list[Any]]) -> dict[str, Any]:
    found = decode_example(encode_example(features))
    return {name: None if value is None else list(value) for name, value in found.items()}


@pytest.mark.parametrize(
    "values",
    [
        [b"a", b"", b"\xff" * 300],
        [0.5, -1.25, 3e38],
        [0, 1, -1, 127, 128, 2**63 - 1, -(2**63)],
    ],
)
def test_values_of_every_kind_are_decoded(values: list[Any]) -> None:
    found = decode({"feature": values})["feature"]
    expected = np.array(values, np.float32).tolist() if isinstance(values[0], float) else values
    assert found == expected


def test_many_integers_are_decoded(rng: random.Random) -> None:
    values = [rng.randrange(-(2 ** rng.randrange(64)), 2 ** rng.randrange(64)) for _ in range(999)]
    found = decode_example(encode_example({"feature": values}))["feature"]
    assert found.tolist() == values


def test_a_feature_without_a_kind_has_no_values() -> None:
    assert decode({"feature": [], "other": [1]}) == {"feature": None, "other": [1]}


def test_numbers_that_are_not_packed_are_decoded() -> None:
    # As the first version of protobuf's language writes them: each value has its own tag.
    feature = b"\x1a\x05\x08\x05\x08\xac\x02"
    entry = b"\x0a\x01n\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    message = b"\x0a" + bytes([len(features)]) + features
    assert decode_example(message)["n"].tolist() == [5, 300]


def test_an_incomplete_message_is_refused() -> None:
    message = encode_example({"feature": [1, 2, 3]})
    for length in range(1, len(message)):
        with pytest.raises(ValueError, match="incomplete"):
            decode_example(message[:length])


# --- Shapes ---------------------------------------------------------------------------------------

UNPACKED = bytes.fromhex("0a0e0a0c0a016e12071a05080508ac02")
"""As the first version of protobuf's language writes the numbers 5 and 300."""
VALUES = st.one_of(
    st.lists(st.binary(max_size=300)),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.floats(width=32)),
)


def shapes_of(message: bytes) -> dict[str, tuple[pa.DataType, int] | None]:
    """Return the shapes of a message that is within other bytes."""
    before = b"before"
    reader = io.BytesIO(before + message + b"after")
    return dict(read_shapes(reader, len(before), len(before) + len(message)))


def decoded_shapes(message: bytes) -> dict[str, tuple[pa.DataType, int] | None]:
    kinds = {"list": pa.binary(), "float32": pa.float32(), "int64": pa.int64()}
    return {
        name: None
        if values is None
        else (kinds[str(getattr(values, "dtype", "list"))], len(values))
        for name, values in decode_example(message).items()
    }


@given(features=st.dictionaries(st.text(max_size=200), VALUES))
def test_shapes_are_those_of_the_values(features: dict[str, list[Any]]) -> None:
    message = encode_example(features)
    assert shapes_of(message) == decoded_shapes(message)


def test_shapes_of_numbers_that_are_not_packed() -> None:
    assert shapes_of(UNPACKED) == decoded_shapes(UNPACKED) == {"n": (pa.int64(), 2)}


@given(body=st.binary(max_size=40))
def test_shapes_of_other_bytes_are_refused_like_their_values(body: bytes) -> None:
    try:
        expected = decoded_shapes(body)
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            shapes_of(body)
    else:
        assert shapes_of(body) == expected
