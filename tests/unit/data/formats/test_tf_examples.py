"""`tf.train.Example` messages, against Google's protobuf library."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from spotfit.data.formats.tf_examples import decode_example
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
