"""Lines of text files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_text
from spotfit.data.source import Source
from spotfit.data.sources import line_files
from tests.unit.data.sources.source_suite import FetchedSourceSuite, read_values, source_of


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "UNIT_BYTES", 50)


class TestText(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "a.txt").write_text("".join(f"line {n}\r\n\n" for n in range(30)))
        (tmp_path / "b.txt").write_text("without an end: äöü")
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_text(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        text = (folder / "a.txt").read_text() + (folder / "b.txt").read_text()
        return pa.table({"text": [line for line in text.split("\n") if line]})


def test_empty_lines_are_rows_if_they_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n \ntwo\n")
    dataset = read_text(tmp_path, drop_empty_lines=False)
    assert read_values(dataset) == {"text": ["one", "", " ", "two"]}


def test_another_encoding_is_read_as_one_unit(tmp_path: Path) -> None:
    text = [f"Zeile {n} äöü" for n in range(20)]
    (tmp_path / "a.txt").write_bytes("\n".join(text).encode("utf-16"))
    dataset = read_text(tmp_path, encoding="utf-16")
    assert dataset.manifest.unit_rows.tolist() == [20]
    assert read_values(dataset) == {"text": text}


def test_a_wrong_encoding_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.txt cannot be parsed from byte 0 on: .*utf-8"):
        _ = read_text(tmp_path).manifest
