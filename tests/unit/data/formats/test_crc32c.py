"""CRC-32C of many strings."""

from __future__ import annotations

import random

import pytest

from spotfit.data.formats.crc32c import crc32c


@pytest.mark.parametrize(
    ("text", "crc"),
    [
        # RFC 3720, section B.4, and the check value of the catalogue of CRCs.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_values(text: bytes, crc: int) -> None:
    assert crc32c([text]).tolist() == [crc]


def test_strings_of_all_lengths_have_the_crc_of_the_bitwise_algorithm(rng: random.Random) -> None:
    strings = [rng.randbytes(length) for length in range(130)]
    assert crc32c(strings).tolist() == [crc_by_bits(string) for string in strings]


def crc_by_bits(string: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in string:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
