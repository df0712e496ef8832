import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.store.transfer import compute_content_hash


@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_flipped_bit_changes_the_hash(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, 8 * len(body) - 1))
    flipped = bytearray(body)
    flipped[at // 8] ^= 1 << at % 8
    assert compute_content_hash(flipped) != compute_content_hash(body)


@given(st.binary(max_size=100))
def test_another_length_changes_the_hash(body: bytes) -> None:
    assert len({compute_content_hash(body + bytes(more)) for more in range(40)}) == 40


def test_hashes_of_many_bodies_differ(seed: int) -> None:
    rng = random.Random(seed)
    bodies = {rng.randbytes(24) for _ in range(2000)}
    assert len({compute_content_hash(body) for body in bodies}) == len(bodies)


@pytest.mark.parametrize(
    ("body", "mark"),
    [
        (b"", "5606a9c67129ede9659665313f2805c1"),
        (
            b"what is in the bucket must be known again by later versions",
            "b91e27772bf272f276e4a25efb8d3de9",
        ),
    ],
)
def test_hashes_are_stable(body: bytes, mark: str) -> None:
    assert compute_content_hash(body) == mark
    assert compute_content_hash(memoryview(body)) == mark
