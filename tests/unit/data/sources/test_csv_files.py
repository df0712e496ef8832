"""CSV files: ranges of lines, types of columns, options of pyarrow."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_csv
from spotfit.data.source import Source
from spotfit.data.sources import line_files
from tests.unit.data.sources.source_suite import FetchedSourceSuite, read_values, source_of


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "UNIT_BYTES", 100)


def lines(*values: object) -> str:
    return "".join(f"{value}\n" for value in values)


class TestCsv(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rows = [f"{n},{n / 2},name {n},{'' if n % 2 else n}" for n in range(40)]
        (tmp_path / "a.csv").write_text(lines("id,half,name,even", *rows))
        (tmp_path / "b.csv").write_text(lines("id,half,name,even", *rows[:30]))
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_csv(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        return pa.concat_tables(
            pyarrow.csv.read_csv(path) for path in (folder / "a.csv", folder / "b.csv")
        )


def test_values_between_quotation_marks_may_contain_ends_of_lines(tmp_path: Path) -> None:
    rows = [f'{n},"first\nsecond ""{n}"" "' for n in range(30)]
    (tmp_path / "a.csv").write_text(lines("id,text", *rows))
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    dataset = read_csv(tmp_path, parse_options=options)
    assert len(dataset.manifest.unit_rows) > 3
    assert read_values(dataset)["text"] == [f'first\nsecond "{n}" ' for n in range(30)]


def test_types_of_a_column_are_those_of_all_its_values(tmp_path: Path) -> None:
    rows = [f"{n},{n},,{n}" for n in range(30)]
    (tmp_path / "a.csv").write_text(lines("a,b,c,d", *rows, "30,30.5,1,no number"))
    dataset = read_csv(tmp_path)
    expected = pyarrow.csv.read_csv(tmp_path / "a.csv")
    assert dataset.manifest.schema == expected.schema
    assert read_values(dataset) == expected.to_pydict()


def test_a_compressed_file_is_one_unit(tmp_path: Path) -> None:
    rows = list(range(100))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(lines("id", *rows).encode()))
    dataset = read_csv(tmp_path)
    assert dataset.manifest.unit_rows.tolist() == [100]
    assert read_values(dataset) == {"id": rows}


def test_the_compression_can_be_stated(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(gzip.compress(b"id\n7\n"))
    dataset = read_csv(tmp_path, arrow_open_stream_args={"compression": "gzip"})
    assert read_values(dataset) == {"id": [7]}


def test_options_of_pyarrow_apply_to_every_unit(tmp_path: Path) -> None:
    rows = [f"{n};{n}" for n in range(40)]
    (tmp_path / "a.csv").write_text(lines("a comment", "another", *rows))
    dataset = read_csv(
        tmp_path,
        read_options=pyarrow.csv.ReadOptions(skip_rows=2, column_names=["x", "y"]),
        parse_options=pyarrow.csv.ParseOptions(delimiter=";"),
        convert_options=pyarrow.csv.ConvertOptions(column_types={"y": pa.string()}),
    )
    assert len(dataset.manifest.unit_rows) > 2
    assert read_values(dataset) == {"x": list(range(40)), "y": [str(n) for n in range(40)]}


def test_another_encoding_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(lines("name", "Ä", "ö").encode("utf-16"))
    dataset = read_csv(tmp_path, read_options=pyarrow.csv.ReadOptions(encoding="utf-16"))
    assert read_values(dataset) == {"name": ["Ä", "ö"]}


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").write_text("id\n")
    (tmp_path / "c.csv").write_text("id\n5")
    assert read_values(read_csv(tmp_path)) == {"id": [5]}


def test_an_invalid_line_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ConfigError, match=r"a\.csv cannot be parsed from byte 0 on: .*Expected 2"):
        _ = read_csv(tmp_path).manifest


def test_other_arguments_of_streams_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unsupported keys: metadata"):
        read_csv(tmp_path, arrow_open_stream_args={"metadata": {}})


def test_options_change_the_digest(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    options = pyarrow.csv.ConvertOptions(column_types={"a": pa.string()})
    digests = {
        read_csv(tmp_path).manifest.digest,
        read_csv(tmp_path).manifest.digest,
        read_csv(tmp_path, convert_options=options).manifest.digest,
    }
    assert len(digests) == 2


def test_the_size_of_a_compressed_file_is_that_of_its_text(tmp_path: Path) -> None:
    text = b"x\n" + b"0\n" * 10_000
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    assert read_csv(tmp_path).manifest.unit_bytes.tolist() == [len(text)]
