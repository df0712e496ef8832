"""CRC-32C (Castagnoli) of many byte strings at once, with NumPy.

A CRC is linear: that of two halves follows from the CRCs of each. Strings are therefore combined
pairwise, for all strings of about one length together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np

Words: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]"

_POLYNOMIAL = 0x82F63B78  # reversed
_ALL_ONES = 0xFFFFFFFF


def crc32c(strings: Sequence[bytes | memoryview]) -> Words:
    """Return the CRC-32C of each string."""
    by_level: dict[int, list[int]] = defaultdict(list)
    for index, string in enumerate(strings):
        by_level[(max(len(string), 1) - 1).bit_length()].append(index)
    result = np.zeros(len(strings), np.uint32)
    for level, indices in by_level.items():
        result[indices] = _crc_of_level([strings[index] for index in indices], level)
    return result


def _crc_of_level(strings: Sequence[bytes | memoryview], level: int) -> Words:
    """Return the CRCs of strings of at most 2^level bytes."""
    width = 1 << level
    if all(len(string) == width for string in strings):
        padded = np.frombuffer(b"".join(strings), np.uint8).reshape(-1, width)
    else:
        padded = np.zeros((len(strings), width), np.uint8)
        for row, string in enumerate(strings):
            # Zeros in front do not change a CRC whose initial value is zero.
            padded[row, width - len(string) :] = np.frombuffer(string, np.uint8)
    crc: Words = _byte_table()[padded]
    for step in range(level):
        crc = _shift(crc[:, 0::2], step) ^ crc[:, 1::2]
    # The initial value, as if it had been in front of the string.
    lengths = np.array([len(string) for string in strings])
    initial = np.full(len(strings), _ALL_ONES, np.uint32)
    for step in range(level + 1):
        initial = np.where(lengths >> step & 1, _shift(initial, step), initial)
    return crc[:, 0] ^ initial ^ np.uint32(_ALL_ONES)


@cache
def _byte_table() -> Words:
    """Return the CRC of each byte, with the initial value zero."""
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(_POLYNOMIAL), crc >> 1)
    return crc


def _shift(crc: Words, step: int) -> Words:
    """Return the CRCs after 2^step further zero bytes."""
    tables = _shift_tables(step)
    shifted: Words = tables[0][crc & 255]
    for position in range(1, 4):
        shifted = shifted ^ tables[position][crc >> (8 * position) & 255]
    return shifted


@cache
def _shift_tables(step: int) -> Words:
    """Return the shifts of the values of each of the four bytes of a CRC."""
    places = np.arange(4, dtype=np.uint32)[:, None] * 8
    values = np.arange(256, dtype=np.uint32) << places
    if step == 0:
        shifted: Words = _byte_table()[values & 255] ^ (values >> 8)
        return shifted
    return _shift(_shift(values, step - 1), step - 1)
