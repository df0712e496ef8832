import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.store.marks import mark_of


@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_bit_makes_another_mark(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, 8 * len(body) - 1))
    flipped = bytearray(body)
    flipped[at // 8] ^= 1 << at % 8
    assert mark_of(flipped) != mark_of(body)


@given(st.binary(max_size=100))
def test_what_is_cut_or_longer_has_another_mark(body: bytes) -> None:
    assert len({mark_of(body + bytes(more)) for more in range(40)}) == 40


def test_no_two_of_many_are_alike(seed: int) -> None:
    dice = random.Random(seed)
    bodies = {dice.randbytes(24) for _ in range(2000)}
    assert len({mark_of(body) for body in bodies}) == len(bodies)


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
def test_marks_stay_what_they_are(body: bytes, mark: str) -> None:
    assert mark_of(body) == mark
    assert mark_of(memoryview(body)) == mark
