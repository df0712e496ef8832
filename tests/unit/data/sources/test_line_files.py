"""Ranges of bytes that end at ends of lines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spotfit.data.sources import line_files
from spotfit.data.sources.line_files import split_lines
from tests.unit.data.sources.source_suite import open_file


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "UNIT_BYTES", 20)


def ranges_of(path: Path, content: bytes, quote: bytes = b"") -> list[tuple[int, bytes]]:
    path.write_bytes(content)
    return [*split_lines(open_file(path), quote)]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_ranges_are_whole_lines_and_all_of_them(
    tmp_path: Path, rng: random.Random, end: bytes
) -> None:
    content = b"\n".join(b"x" * rng.randrange(60) for _ in range(50)) + end
    ranges = ranges_of(tmp_path / "a", content)
    assert b"".join(body for _, body in ranges) == content
    assert all(body.endswith(b"\n") for _, body in ranges[:-1])
    assert all(content[start:].startswith(body) for start, body in ranges)


def test_ends_of_lines_between_quotation_marks_end_no_range(tmp_path: Path) -> None:
    row = b'a,"' + b"line\n" * 7 + b'with ""quotes""\n"\n'
    ranges = ranges_of(tmp_path / "a", row * 5, b'"')
    assert [body for _, body in ranges] == [row] * 5


def test_a_file_without_an_end_of_line_is_one_range(tmp_path: Path) -> None:
    assert ranges_of(tmp_path / "a", b"x" * 100) == [(0, b"x" * 100)]
    assert ranges_of(tmp_path / "a", b"") == []
